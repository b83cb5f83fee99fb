"""Weights: rounding, corrections, storage in groups and checkpoint formats."""
