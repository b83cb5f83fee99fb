"""Captured graphs: ops, fusion groups, casts and quantize/dequantize pairs."""
