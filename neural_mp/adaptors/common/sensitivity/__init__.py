"""Sensitivity of a model to the rounding of its weights, and moments of layer inputs."""
