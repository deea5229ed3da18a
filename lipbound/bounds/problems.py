"""The layers that a search takes, and how those of one shape are read and searched together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import double
from lipbound.bounds.supremum.field import LAG_BYTES, lag_bytes
from lipbound.bounds.supremum.peak import Peak
from lipbound.geometry import Convolution, check_values
from lipbound.runtime import piece, read_together
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

    A GPU is read once, however many geometries there are.

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
    measured = read_together([_measures(stack) for stack in stacks])
    halves = []
    for names, values in zip(alike.values(), measured, strict=True):
        for name, most in zip(names, values[:, 0], strict=True):
            if not math.isfinite(most):
                check_values(convs[name].kernel, name)
        exponents = np.frexp(np.where(values[:, 0] > 0, values[:, 0], 1.0))[1] - 1
        # In halves, because 2^-e may overflow.
        halves.append(np.ldexp(1.0, [exponents // 2, exponents - exponents // 2]).T)  # (layers, 2)
    scales = _sent_together(halves, [stack.device for stack in stacks])
    problems = {}
    known = zip(alike.values(), stacks, measured, halves, scales, strict=True)
    for names, stack, values, pairs, sent in known:
        for half in sent.unbind(1):
            stack = stack / half.reshape(-1, *[1] * (stack.ndim - 1))
        spreads = _spreads(values[:, 0], values[:, 1:].reshape(stack.shape[:3]))
        for i, name in enumerate(names):
            zero = bool(values[i, 0] == 0)
            own = torch.ones_like(stack[i]) if zero else stack[i]
            problems[name] = Problem(convs[name], own, tuple(pairs[i].tolist()), zero, spreads[i])
    return {name: problems[name] for name in convs}


def _sent_together(
    tables: Sequence[NDArray[np.float64]], devices: Sequence[torch.device]
) -> list[Tensor]:
    """The tables on their devices, each of which gets one copy of all rows."""
    if not tables:
        return []
    whole = torch.from_numpy(np.concatenate(tables))
    parts = {place: whole.to(place).split([len(t) for t in tables]) for place in set(devices)}
    return [parts[place][k] for k, place in enumerate(devices)]


def _measures(stack: Tensor) -> Tensor:
    """``(layers, 1 + groups·n)``: the largest entry of each layer, and the norm of every row."""
    largest = torch.linalg.vector_norm(stack.flatten(1), math.inf, dim=1)
    rows = torch.linalg.vector_norm(stack.flatten(3), dim=3).flatten(1)
    return torch.cat([largest[:, None], rows], 1)


def _spreads(largest: NDArray[np.float64], norms: NDArray[np.float64]) -> list[float]:
    """The ``spread`` of layers with these norms of rows ``(layers, groups, n)``.

    It is 0 where squares may under- or overflow, so that such a layer counts as perhaps flat.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        energies = norms**2
        apart = np.abs(energies / energies.mean(2, keepdims=True) - 1)
    spreads = np.nan_to_num(apart).max((1, 2))  # a group of zeros gives NaN, and is flat
    safe = (largest > 1e-140) & (largest < 1e140)
    found: list[float] = np.where(safe, spreads, 0.0).tolist()
    return found


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
        """What a search found for each problem.

        It may have seen symbols of one tap on another number of axes; their frequencies are zero.
        """
        if polish:
            peak.polish()
        axes = len(self.axes)
        frequency = np.pad(peak.frequency, ((0, 0), (0, axes)))[:, :axes].tolist()
        return [
            Found(
                float(peak.lower[i]),
                float(upper[i]),
                int(peak.block[i] - self.first[i]),
                tuple(frequency[i]),
                peak.left[i],
                int(peak.evaluations[i]),
            )
            for i in range(len(self.problems))
        ]
