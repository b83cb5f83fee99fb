"""Models for accelerators: rewritten, quantized by pairs of Q/DQ ops, and simulated on the CPU."""
