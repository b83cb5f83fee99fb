"""Signatures of models: their inputs and outputs, read identically for all frameworks."""
