"""The paper's tables and figures: compute, then record."""
