"""The API of Intel Neural Compressor 3.x."""
