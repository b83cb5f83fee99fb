"""Capture of models as frozen graphs in canonical form."""
