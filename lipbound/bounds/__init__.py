"""Bounds: proved to be at least σ1 of the layer. Rounding errors are included in the proof."""

from lipbound.bounds.certified import Bracket, bracket, brackets
from lipbound.bounds.layers import lipschitz
from lipbound.bounds.methods import BOUNDS, bound
from lipbound.bounds.supremum.levels import release_memory

__all__ = ["BOUNDS", "Bracket", "bound", "bracket", "brackets", "lipschitz", "release_memory"]
