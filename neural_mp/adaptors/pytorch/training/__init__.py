"""Mixed-precision training of torch modules."""
