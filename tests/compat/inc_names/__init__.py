"""What `inc_values.py` compares: one module for each kind of names."""
