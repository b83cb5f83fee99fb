"""Graphs of nodes: table of ops, shapes, control flow and structure."""
