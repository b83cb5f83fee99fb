"""Example scripts of Intel Neural Compressor, with data and models of the right form."""
