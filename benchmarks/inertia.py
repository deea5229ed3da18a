r"""Count the singular values of a large convolution below given numbers, without computing them.

By Sylvester's law of inertia, :math:`AA^T - t^2 I` has as many negative eigenvalues as the blocks D
of a factorization :math:`LDL^T`, and that is the number of singular values of A below t. Ordered by
rows of pixels, :math:`AA^T` is block banded, so elimination works in a window of a few rows. Rows
are exchanged only inside a block. Entries grow where a block is nearly singular, and
:class:`Counts` tells by how much: rounding shifts the eigenvalues by about the growth times 1e-16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lipbound.toeplitz import operator_matrix

LEAF = 32  # eigenvalues are computed of blocks with at most so many rows
PIVOT = 128  # rows with exchanges between them
PANEL = 512  # rows whose effect on later rows is one product
STRIP = 2048  # columns that are updated together, above the diagonal


@dataclass(frozen=True)
class Counts:
    """Number of singular values below each threshold, and the largest growth of an entry."""

    below: list[int]
    growth: float


@torch.no_grad()
def below(
    kernel: Tensor,
    size: int,
    thresholds: Sequence[float],
    stride: int = 1,
    device: torch.device | str = "cpu",
) -> Counts:
    """Count the singular values of a convolution with zero padding below each threshold.

    The padding is half of the kernel, rounded down. With more output than input values, the
    singular values at 0 that only come from the shape are counted as well.

    Args:
        kernel: ``(cout, cin, height, width)``.
        size: Input height and width.
        thresholds: Numbers above 0. Each needs room for (height · values in a row)² numbers.
        stride: Of the convolution, on both axes.
        device: Where to eliminate, in float64.
    """
    block, rows, reach = _gram(kernel, size, stride, torch.device(device))
    width = len(block(0, 0))
    shifts = torch.tensor(thresholds, dtype=torch.float64, device=device).square()
    window = shifts.new_zeros(len(shifts), (reach + 1) * width, (reach + 1) * width)

    def enter(row: int) -> None:
        """Write a row's blocks above the diagonal; earlier rows of the window lie before it."""
        place = min(row, reach) * width
        columns = slice(place, place + width)
        for other in range(max(0, row - reach), row + 1):
            start = place - (row - other) * width
            window[:, start : start + width, columns] = block(other, row)
        window[:, columns, columns].diagonal(0, 1, 2).sub_(shifts[:, None])

    for row in range(min(reach + 1, rows)):
        enter(row)
    largest = torch.stack([block(row, row).abs().amax() for row in (0, rows // 2)]).amax()
    found = torch.zeros(len(shifts), dtype=torch.int64, device=device)
    growth = torch.zeros_like(largest)
    for row in range(rows):
        pivots = _eliminate(window, width)
        for length in {p.shape[-1] for p in pivots}:
            found += negatives(torch.stack([p for p in pivots if p.shape[-1] == length])).sum(0)
        growth = torch.stack([growth, *(p.abs().amax() for p in pivots)]).amax()
        if reach:
            moved = torch.zeros_like(window)
            moved[:, :-width, :-width] = window[:, width:, width:]
            window = moved
        else:
            window.zero_()
        if row + reach + 1 < rows:
            enter(row + reach + 1)
    return Counts(found.tolist(), float(growth / largest))


def _gram(
    kernel: Tensor, size: int, stride: int, device: torch.device
) -> tuple[Callable[[int, int], Tensor], int, int]:
    """Return the blocks (row ≤ later) of AAᵀ, the number of rows, and how far blocks reach."""
    height, width = kernel.shape[2:]
    padding = height // 2
    rows = (size + 2 * padding - height) // stride + 1
    along = {"padding": width // 2, "stride": stride}
    parts = [
        torch.from_numpy(operator_matrix(kernel[:, :, tap], (size,), **along).toarray()).to(device)
        for tap in range(height)
    ]

    @cache
    def total(taps: tuple[int, ...], shift: int) -> Tensor:
        return sum((parts[d] @ parts[d - shift].mT for d in taps), parts[0].new_zeros(()))

    def block(row: int, later: int) -> Tensor:
        shift = stride * (later - row)
        inside = range(height)
        taps = (d for d in inside if d - shift in inside and 0 <= stride * row - padding + d < size)
        return total(tuple(taps), shift).expand(len(parts[0]), len(parts[0]))

    return block, rows, min((height - 1) // stride, rows - 1)


def _eliminate(window: Tensor, count: int) -> list[Tensor]:
    """Replace the upper triangle after the first ``count`` rows by their Schur complement.

    Returns the pivot blocks, ``(thresholds, rows, rows)``.
    """
    size, pivots = window.shape[-1], []
    for start in range(0, count, PANEL):
        end = min(start + PANEL, count)
        solved = window.new_empty(len(window), end - start, size - end)
        for top in range(start, end, PIVOT):
            bottom = min(top + PIVOT, end)
            corner = window[:, top:bottom, top:bottom].triu()
            pivots.append(corner + corner.triu(1).mT)
            rows = window[:, top:bottom, bottom:]
            part = torch.linalg.inv_ex(pivots[-1]).inverse @ rows
            solved[:, top - start : bottom - start] = part[:, :, end - bottom :]
            if bottom < end:
                above = rows[:, :, : end - bottom].mT
                window[:, bottom:end, bottom:].baddbmm_(above, part, alpha=-1)
        panel = window[:, start:end, end:]
        for left in range(end, size, STRIP):
            right = min(left + STRIP, size)
            above, strip = panel[:, :, : right - end].mT, solved[:, :, left - end : right - end]
            window[:, end:right, left:right].baddbmm_(above, strip, alpha=-1)
    return pivots


def negatives(blocks: Tensor) -> Tensor:
    """Count the negative eigenvalues of symmetric matrices ``(*, n, n)``, by halves."""
    size = blocks.shape[-1]
    if size <= LEAF:
        return (torch.linalg.eigvalsh(blocks) < 0).sum(-1)
    half = size // 2
    first, side = blocks[..., :half, :half], blocks[..., :half, half:]
    rest = blocks[..., half:, half:] - side.mT @ torch.linalg.solve_ex(first, side).result
    return negatives(first) + negatives(rest)
