"""Adversarial attacks, and the evaluation of networks under them."""
