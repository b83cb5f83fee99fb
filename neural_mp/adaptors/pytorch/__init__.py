"""PyTorch adaptor."""
