"""All that knows PyTorch."""
