"""Matrix-valued trigonometric polynomials with a bound on the rounding of their coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lipbound.bounds.rounding import UNIT
from lipbound.symbols import positions


@dataclass(frozen=True, eq=False)
class Laurent:
    """The operator y[n] = Σ_k A_k x[n + k], whose symbol is Σ_k A_k e^{ikω}.

    Attributes:
        taps: Coefficients, ``(rows, columns, *m)`` float64.
        first: Position k of the first coefficient on each axis.
        size: Sums of the absolute values from which the entries were computed, ``(rows, columns)``.
        roundings: Σ_k |error of A_k| is at most ``roundings`` · 2^-53 · ``size``, entry by entry.
        slack: Bound on the norm of further errors of the symbol.
    """

    taps: Tensor
    first: tuple[int, ...]
    size: Tensor
    roundings: float = 0.0
    slack: float = 0.0

    @classmethod
    def of(
        cls, taps: Tensor, first: Sequence[int], roundings: float = 0.0, slack: float = 0.0
    ) -> Laurent:
        return cls(taps, tuple(first), _sums(taps), roundings, slack)

    @classmethod
    def pointwise(
        cls, matrix: Tensor, dims: int, roundings: float = 0.0, slack: float = 0.0
    ) -> Laurent:
        """The operator that multiplies every pixel by a matrix."""
        taps = matrix.reshape(*matrix.shape, *[1] * dims)
        return cls.of(taps, (0,) * dims, roundings, slack)

    @property
    def rows(self) -> int:
        return int(self.taps.shape[0])

    @property
    def columns(self) -> int:
        return int(self.taps.shape[1])

    @property
    def last(self) -> tuple[int, ...]:
        """Position of the last coefficient on each axis."""
        return tuple(a + n - 1 for a, n in zip(self.first, self.taps.shape[2:], strict=True))

    @property
    def at_one_place(self) -> bool:
        """Whether there is no coefficient beside that of position 0."""
        return not any(self.first) and not any(self.last)

    def norm(self) -> float:
        """Bound the norm of the symbol at all frequencies."""
        return float(torch.linalg.matrix_norm(self.size)) * (1 + 1e-12)

    def __add__(self, other: Laurent) -> Laurent:
        low = [min(a, b) for a, b in zip(self.first, other.first, strict=True)]
        high = [max(a, b) for a, b in zip(self.last, other.last, strict=True)]
        sizes = [b - a + 1 for a, b in zip(low, high, strict=True)]
        taps = self.taps.new_zeros(self.rows, self.columns, *sizes)
        for one in (self, other):
            places = zip(one.first, low, one.taps.shape[2:], strict=True)
            taps[:, :, *[slice(a - b, a - b + n) for a, b, n in places]] += one.taps
        roundings = max(self.roundings, other.roundings) + 2
        size = (self.size + other.size) * (1 + 4 * UNIT)
        return Laurent(taps, tuple(low), size, roundings, self.slack + other.slack)

    def __matmul__(self, other: Laurent) -> Laurent:
        """Return the operator that applies ``other`` first."""
        sizes = [a + b - 1 for a, b in zip(self.taps.shape[2:], other.taps.shape[2:], strict=True)]
        taps = self.taps.new_zeros(self.rows, other.columns, *sizes)
        for place in positions(self.taps.shape[2:]).tolist():
            where = [slice(i, i + n) for i, n in zip(place, other.taps.shape[2:], strict=True)]
            part = torch.einsum("ij,j...->i...", self.taps[:, :, *place], other.taps)
            taps[:, :, *where] += part
        first = tuple(a + b for a, b in zip(self.first, other.first, strict=True))
        length = self.columns * math.prod(self.taps.shape[2:])
        roundings = self.roundings + other.roundings + 2 * length + 4
        size = (self.size @ other.size) * (1 + 4 * (self.columns + 2) * UNIT)
        slack = 0.0
        if self.slack or other.slack:
            slack = self.slack * (other.norm() + other.slack) + self.norm() * other.slack
        return Laurent(taps, first, size, roundings, slack)

    @property
    def adjoint(self) -> Laurent:
        """The operator with the conjugate transposed symbol."""
        axes = range(2, self.taps.ndim)
        taps = self.taps.transpose(0, 1).flip(*axes) if self.taps.ndim > 2 else self.taps.mT
        return replace(self, taps=taps, first=tuple(-n for n in self.last), size=self.size.mT)

    def scaled(self, left: Tensor | None = None, right: Tensor | None = None) -> Laurent:
        """Multiply rows by ``left`` and columns by ``right``."""
        taps, size, slack = self.taps, self.size, self.slack
        tail = [1] * (taps.ndim - 2)
        for numbers, shape in ((left, (-1, 1)), (right, (1, -1))):
            if numbers is not None:
                taps = taps * numbers.reshape(*shape, *tail)
                size = size * numbers.abs().reshape(shape)
                slack = slack * float(numbers.abs().max()) * (1 + 2 * UNIT)
        return Laurent(taps, self.first, size * (1 + 8 * UNIT), self.roundings + 8, slack)

    def moved(self, by: Sequence[int]) -> Laurent:
        """Move all coefficients."""
        return replace(self, first=tuple(a + b for a, b in zip(self.first, by, strict=True)))

    def polyphase(self, stride: Sequence[int], phases: Sequence[int]) -> Laurent:
        """Return the operator y[n] = Σ_k A_k x[stride·n + k] on a coarser lattice.

        A point of that lattice holds ``phases`` pixels of y on each axis, and stride · phases
        pixels of x. Rows and columns are ordered by pixel, then by channel.
        """
        inner = [s * r for s, r in zip(stride, phases, strict=True)]
        if all(n == 1 for n in inner):
            return self
        rows, columns = self.taps.shape[:2]
        low = [a // n for a, n in zip(self.first, inner, strict=True)]
        reach = [s * (r - 1) for s, r in zip(stride, phases, strict=True)]
        high = [(a + b) // n for a, b, n in zip(self.last, reach, inner, strict=True)]
        sizes = [b - a + 1 for a, b in zip(low, high, strict=True)]
        taps = self.taps.new_zeros(math.prod(phases), rows, math.prod(inner), columns, *sizes)
        for out, pixel in enumerate(positions(phases).tolist()):
            for index in positions(self.taps.shape[2:]).tolist():
                axes = zip(stride, pixel, self.first, index, strict=True)
                place = [s * q + a + i for s, q, a, i in axes]
                phase = 0
                for p, n in zip(place, inner, strict=True):
                    phase = phase * n + p % n
                where = [p // n - a for p, n, a in zip(place, inner, low, strict=True)]
                taps[out, :, phase, :, *where] += self.taps[:, :, *index]
        flat = taps.reshape(math.prod(phases) * rows, math.prod(inner) * columns, *sizes)
        cancelled = (self.size - _sums(self.taps)).clamp_min(0.0)
        size = _sums(flat) + cancelled.repeat(math.prod(phases), math.prod(inner))
        # It is the same operator, so the norm of its error is the same.
        return Laurent(flat, tuple(low), size * (1 + 4 * UNIT), self.roundings, self.slack)

    @cached_property
    def multiple(self) -> float | None:
        """The number if this is a multiple of the identity."""
        if not self.at_one_place or self.rows != self.columns:
            return None
        matrix = self.taps.reshape(self.rows, self.columns)
        number = float(matrix[0, 0])
        same = bool((matrix == torch.eye(self.rows).to(matrix) * number).all())
        return number if same else None

    def symbol(self, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
        """Evaluate the symbol at frequencies ``(P, D)``: ``(P, rows, columns)``, an estimate.

        A symbol that is constant has P = 1, and may have a real type.
        """
        if self.at_one_place:
            return self.taps.reshape(1, self.rows, self.columns).to(dtype)
        places = positions(self.taps.shape[2:]) + torch.tensor(self.first, dtype=torch.int64)
        angles = frequencies @ places.to(frequencies).mT
        flat = self.taps.reshape(self.rows * self.columns, -1).mT.to(dtype.to_real())
        parts = torch.complex(angles.cos().to(flat) @ flat, angles.sin().to(flat) @ flat)
        return parts.reshape(-1, self.rows, self.columns)


def _sums(taps: Tensor) -> Tensor:
    """Return the sum of the absolute values of each entry's coefficients."""
    return taps.abs().sum(tuple(range(2, taps.ndim))) if taps.ndim > 2 else taps.abs()
