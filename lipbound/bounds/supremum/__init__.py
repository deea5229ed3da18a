"""Branch and prune: the supremum of σ1 of a symbol over all frequencies."""
