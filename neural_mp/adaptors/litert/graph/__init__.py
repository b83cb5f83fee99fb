"""Graphs of LiteRT as flatbuffers: read, edit, write."""
