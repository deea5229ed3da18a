"""Lipschitz rules for PyTorch's operations, one file per family of operations."""

from lipbound.network.rules import elementwise, linear, pooling, shapes
from lipbound.network.rules.values import (
    RULES,
    Linear,
    Options,
    Step,
    Unbounded,
    Value,
    follow,
    register_rule,
)

__all__ = [
    "RULES",
    "Linear",
    "Options",
    "Step",
    "Unbounded",
    "Value",
    "elementwise",
    "follow",
    "linear",
    "pooling",
    "register_rule",
    "shapes",
]
