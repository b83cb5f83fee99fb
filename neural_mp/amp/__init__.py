"""Four-list auto mixed precision: which ops may leave FP32 by type, and how that spreads."""
