"""PyTorch's operations in real arithmetic, on arrays of 256-bit numbers.

Every operation is written from its definition. Operations that only move entries let PyTorch move
the entries' numbers. The tests compare each operation with fractions, or with functions of mpmath
at 300 bits.
"""

from verify.real_operations import elementwise, linear, pooling, reductions, shapes
from verify.real_operations.steps import (
    OPERATIONS,
    PRECISION,
    READINGS,
    Array,
    NoOperation,
    Step,
    read,
    real_array,
)

__all__ = [
    "OPERATIONS",
    "PRECISION",
    "READINGS",
    "Array",
    "NoOperation",
    "Step",
    "elementwise",
    "linear",
    "pooling",
    "read",
    "real_array",
    "reductions",
    "shapes",
]
