"""Attacks, and what a network is worth under them."""
