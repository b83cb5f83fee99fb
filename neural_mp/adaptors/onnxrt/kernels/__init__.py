"""Kernels of ONNX Runtime: the table of ops, and the writers of integer kernels."""
