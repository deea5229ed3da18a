"""Training and evaluating networks under attack."""
