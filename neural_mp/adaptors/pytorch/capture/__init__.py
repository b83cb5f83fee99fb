"""Capture of user models as graphs: whole, by module or by layer."""
