"""Hunts for violations of what lipbound promises: ``python -m verify NAME``. Not in the wheel."""
