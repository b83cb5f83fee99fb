"""Language models in the user's own code, and checkpoints of `transformers`."""
