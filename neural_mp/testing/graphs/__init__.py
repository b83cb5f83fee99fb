"""Graphs drawn by a seed, whose conversions to INT8 are checked."""
