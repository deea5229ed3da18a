"""Layers of known norm: limits on any layer, orthogonal layers, activations of norm 1."""

from lipbound.constraints.layers import (
    Centre,
    ConvexPotential,
    CyclicShift,
    GroupSort,
    HalfAbs,
    MinMax,
)
from lipbound.constraints.maps import MAPS
from lipbound.constraints.norm_limit import constrain, unconstrain
from lipbound.constraints.orthogonal import OrthogonalLinear, Retraction

__all__ = [
    "MAPS",
    "Centre",
    "ConvexPotential",
    "CyclicShift",
    "GroupSort",
    "HalfAbs",
    "MinMax",
    "OrthogonalLinear",
    "Retraction",
    "constrain",
    "unconstrain",
]
