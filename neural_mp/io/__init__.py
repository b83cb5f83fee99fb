"""Untrusted files: bounded readers, atomic writes, archives, trust."""
