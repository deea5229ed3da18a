"""Penalty for training loops: a sum of logarithms of layer bounds."""

from lipbound.penalty.penalty import Penalty

__all__ = ["Penalty"]
