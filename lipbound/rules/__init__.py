"""Lipschitz rules of PyTorch's operations, one file per family."""

from lipbound.rules import elementwise, linear, pooling, shapes
from lipbound.rules.values import (
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
