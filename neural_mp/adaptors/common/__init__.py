"""Code shared by all adaptors."""
