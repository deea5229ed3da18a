"""Lipschitz rules for PyTorch's operations, one file per family of operations."""

from lipbound.network.rules import elementwise, intervals, linear, pooling, products, shapes
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
    "intervals",
    "linear",
    "pooling",
    "products",
    "register_rule",
    "shapes",
]
