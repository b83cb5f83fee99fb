"""Nets of the benchmark of accelerators: six that packages ship, and six trained within minutes."""
