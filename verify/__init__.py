"""Searches for violations of lipbound's guarantees, not in the wheel: ``python -m verify NAME``."""
