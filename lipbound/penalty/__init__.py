"""The penalty: a sum of logarithms of layer bounds, for a training loop."""

from lipbound.penalty.penalty import Penalty

__all__ = ["Penalty"]
