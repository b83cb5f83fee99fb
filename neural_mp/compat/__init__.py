"""Compatibility with other tools."""
