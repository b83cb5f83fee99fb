"""Kernels of a runtime: fusion, and probes of a kernel's results."""
