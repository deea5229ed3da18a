"""Arrays of real numbers, and the register of operations on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gmpy2 import mpfr
from numpy.typing import NDArray
from torch import Tensor

from lipbound.network.graph import Call

PRECISION = 256  # bits; every operation rounds to so many
READINGS = ("rounded", "exact")

Array = NDArray[Any]  # of mpfr, or of booleans or integers
Operation = Callable[["Step"], Any]
OPERATIONS: dict[str, Operation] = {}
"""Operation → function from a :class:`Step` to an array, or to a list for several results."""


class NoOperation(NotImplementedError):
    """The oracle does not know an operation, or one of its options."""


@dataclass(frozen=True)
class Step:
    """One call on real values.

    Attributes:
        call: The call, whose arguments are arrays of real numbers where they depend on the input.
        dtype: Precision in which the network computes it.
        reading: How to read a Python number, see :func:`read`.
    """

    call: Call
    dtype: torch.dtype
    reading: str

    def __getitem__(self, name: str) -> Any:
        return self.call.arguments().get(name)

    @property
    def name(self) -> str:
        return self.call.op.removeprefix("aten.")

    def read(self, number: Any) -> mpfr:
        """Return a Python number as the network uses it."""
        return mpfr(read(number, self.dtype, self.reading))

    def number(self, name: str, default: float = 1.0) -> mpfr:
        """Return a number among the arguments as the network uses it."""
        given = self[name]
        return self.read(default if given is None else given)

    def array(self, name: str) -> Array:
        """Return a tensor or number among the arguments as an array of real numbers."""
        return self.real(self[name])

    def real(self, value: Any) -> Array:
        """Return an array, tensor or number as an array of real numbers.

        PyTorch rounds a tensor of no axes to the type of the result, as it does with a number.
        """
        if isinstance(value, Tensor):
            wide = value.ndim == 0 and value.is_floating_point() and self.reading == "rounded"
            return real_array(value.to(self.dtype) if wide else value)
        if isinstance(value, np.ndarray):
            return value if value.dtype == object else real_array(torch.from_numpy(value))
        if value is None:
            raise self.unknown("a result of an earlier call that the oracle does not compute")
        return entries(self.read(value))

    def axes(self, name: str, dims: int) -> list[int]:
        """Return one integer per axis."""
        value = self[name]
        values = [value] if isinstance(value, int) else list(value)
        return values * dims if len(values) == 1 else values

    def unknown(self, what: str) -> NoOperation:
        return NoOperation(f"the oracle has no {self.call.op} with {what}")


def read(number: Any, dtype: torch.dtype, reading: str) -> float:
    """Return the value of a Python number in a network of this precision.

    The rules of the audit hold for both (``lipbound.network.rules.values.readings``): ``'rounded'``
    is the number in the network's precision, which PyTorch's kernels use, and ``'exact'`` is the
    float64 that the program has. They are equal in a float64 network.
    """
    wide = torch.tensor(float(number), dtype=torch.float64)
    return float(wide.to(dtype)) if reading == "rounded" else float(wide)


def entries(value: Any) -> Array:
    """Return an array of objects; functions of arrays without axes return their only entry."""
    return np.asarray(value, dtype=object)


def mapped(function: Callable[..., Any], *arrays: Array) -> Array:
    """Apply a function entry by entry, with broadcasting."""
    return entries(np.frompyfunc(function, len(arrays), 1)(*arrays))


def real_array(tensor: Tensor) -> Array:
    """Return the entries of a tensor as real numbers, without rounding."""
    wide = tensor.detach().cpu().double() if tensor.is_floating_point() else tensor.detach().cpu()
    return mapped(mpfr, wide.numpy().astype(object))


def zeros(shape: Sequence[int]) -> Array:
    return np.full(tuple(shape), mpfr(0), dtype=object)


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Register an operation under names without ``aten.``; in-place forms are the same."""

    def add(function: Operation) -> Operation:
        for name in names:
            OPERATIONS[f"aten.{name}"] = OPERATIONS[f"aten.{name}_"] = function
        return function

    return add
