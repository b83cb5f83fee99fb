"""The Python API; the command line is built on it."""
