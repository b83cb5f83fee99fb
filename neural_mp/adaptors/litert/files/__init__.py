"""LiteRT models in files: check, load, save."""
