"""Mixed precision while a torch model is trained."""
