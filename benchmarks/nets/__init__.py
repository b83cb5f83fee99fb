"""Nets that are measured."""
