"""Kernels of converted graphs, and the calls that run them."""
