"""The layers that a search takes, and how those of one shape are read and searched together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import double
from lipbound.bounds.supremum.field import LAG_BYTES, lag_bytes
from lipbound.bounds.supremum.peak import Peak
from lipbound.geometry import Convolution, check_values
from lipbound.runtime import piece
from lipbound.symbols import taps


@dataclass
class Problem:
    """One layer's symbols, divided by a power of two, which is the product of ``scales``."""

    conv: Convolution
    taps: Tensor  # (groups, n, N, *m), n ≤ N, float64, no gradient
    scales: tuple[float, float]
    zero: bool  # whether the kernel is zero; its taps are then ones
    spread: float  # largest deviation of a row's energy from the mean of its group, relative


@torch.no_grad()
def normalised(
    convs: Mapping[str, Convolution], device: torch.device | str | None = None
) -> dict[str, Problem]:
    """Normalise the symbols; layers of equal geometry are read together as groups of one layer.

    A GPU is read twice, however many geometries there are.

    Raises:
        ValueError: If a kernel is not finite.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, conv in convs.items():
        kernel = conv.kernel
        kind = (kernel.shape, kernel.dtype, kernel.device, conv.groups, conv.symbol_stride())
        alike.setdefault(kind, []).append(name)
    stacks = []
    for names in alike.values():
        kernels = torch.cat([convs[name].kernel for name in names]).to(device)
        first = convs[names[0]]
        whole = replace(first, kernel=kernels, groups=first.groups * len(names))
        stacks.append(wide(double(taps(whole))).unflatten(0, (len(names), -1)))
    largest = _read([torch.linalg.vector_norm(t.flatten(1), math.inf, dim=1) for t in stacks])
    halves, spreads = [], []
    for k, (names, most) in enumerate(zip(alike.values(), largest, strict=True)):
        for name, value in zip(names, most, strict=True):
            if not math.isfinite(value):
                check_values(convs[name].kernel, name)
        exponents = [math.frexp(value or 1.0)[1] - 1 for value in most]
        # In halves, because 2^-e may overflow.
        halves.append([(2.0 ** (e // 2), 2.0 ** (e - e // 2)) for e in exponents])
        for scale in torch.tensor(halves[k], dtype=torch.float64).to(stacks[k].device).unbind(1):
            stacks[k] = stacks[k] / scale.reshape(-1, *[1] * (stacks[k].ndim - 1))
        if 0 in most:
            stacks[k][[value == 0 for value in most]] = 1.0
        energies = torch.linalg.vector_norm(stacks[k].flatten(3), dim=3).square()
        level = energies.mean(2, keepdim=True).clamp_min(1e-300)
        spreads.append(((energies - level).abs() / level).amax((1, 2)))
    problems = {}
    known = zip(alike.values(), stacks, halves, largest, _read(spreads), strict=True)
    for names, *stack in known:
        for name, own, scales, most, spread in zip(names, *stack, strict=True):
            problems[name] = Problem(convs[name], own, scales, most == 0, spread)
    return {name: problems[name] for name in convs}


def _read(rows: Sequence[Tensor]) -> list[list[float]]:
    """The values of vectors, which are copied from a device together."""
    if not rows:
        return []
    values: list[float] = torch.cat([row.to(rows[0].device) for row in rows]).tolist()
    ends = np.cumsum([0, *map(len, rows)]).tolist()
    return [values[start:end] for start, end in pairwise(ends)]


def wide(taps: Tensor) -> Tensor:
    """The symbols, or their transposes if they have more rows than columns."""
    return taps if taps.shape[1] <= taps.shape[2] else taps.transpose(1, 2)


@dataclass
class Found:
    """Result of the search for one layer, in normalised units."""

    lower: float
    upper: float
    group: int
    frequency: tuple[float, ...]
    left: NDArray[np.complex128]
    evaluations: int


def by_shape(
    problems: Sequence[Problem], chosen: Sequence[int], most: float = math.inf
) -> list[list[int]]:
    """Divide the chosen problems into batches of one shape, of at most so many blocks."""
    batches: dict[tuple[int, ...], list[list[int]]] = {}
    blocks: dict[tuple[int, ...], int] = {}
    for i in chosen:
        count, *shape = problems[i].taps.shape
        kind = tuple(shape)
        room = max(1, piece(LAG_BYTES) // 2 // lag_bytes(kind[0], kind[2:]))
        if kind not in batches or blocks[kind] + count > min(room, most):
            batches.setdefault(kind, []).append([])
            blocks[kind] = 0
        batches[kind][-1].append(i)
        blocks[kind] += count
    return [batch for same in batches.values() for batch in same]


class Batch:
    """Problems of one shape whose symbols are searched together.

    Attributes:
        owner: ``(blocks,)``, the problem that each block belongs to.
        first: ``(problems,)``, the first block of each.
    """

    def __init__(self, problems: Sequence[Problem]):
        self.problems = problems
        counts = np.array([len(problem.taps) for problem in problems])
        self.owner = np.arange(len(problems)).repeat(counts)
        self.first = counts.cumsum() - counts

    @property
    def axes(self) -> tuple[bool, ...]:
        """On which axes the symbols have several taps."""
        return tuple(m > 1 for m in self.problems[0].taps.shape[3:])

    def taps(self, dims: int | None = None) -> Tensor:
        """The symbols; those of one tap may be seen as symbols on any number of axes."""
        coefficients = torch.cat([problem.taps for problem in self.problems])
        if dims is not None and not any(self.axes):
            coefficients = coefficients.reshape(*coefficients.shape[:3], *[1] * dims)
        return coefficients

    def found(self, peak: Peak, upper: NDArray[np.float64], polish: bool) -> list[Found]:
        """What a search found for each problem."""
        if polish:
            peak.polish()
        return [
            Found(
                float(peak.lower[i]),
                float(upper[i]),
                int(peak.block[i] - self.first[i]),
                tuple(peak.frequency[i, : len(self.axes)].tolist()),
                peak.left[i],
                int(peak.evaluations[i]),
            )
            for i in range(len(self.problems))
        ]
