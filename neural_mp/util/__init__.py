"""Helpers without knowledge of quantization: validators, fingerprints, processes, text."""
