"""Evaluation of models with the user's data and metrics."""
