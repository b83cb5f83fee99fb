"""Measurements of plans: times, noise, and comparisons with other models."""
