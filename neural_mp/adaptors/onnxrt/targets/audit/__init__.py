"""Audit of the files for a target: by its rules, and by its compiler."""
