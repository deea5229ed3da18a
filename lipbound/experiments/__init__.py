"""Experiments: compute → record."""
