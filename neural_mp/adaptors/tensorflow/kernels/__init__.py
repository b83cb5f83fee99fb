"""Kernels of the runtime, and conversion to them."""
