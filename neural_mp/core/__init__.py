"""The domain: precisions, graphs, plans, trials."""
