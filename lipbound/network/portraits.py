"""Sample the singular values of a layer's symbol over all frequencies, for pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lipbound.bounds import Bracket
from lipbound.geometry import Layer, convolution
from lipbound.symbols import evaluate, taps

SAMPLES = 33  # points per axis: an odd number that includes both ends of the period
LARGEST = 1 << 26  # limit for the entries of all symbols together; above it, use fewer points


@dataclass(frozen=True)
class Portrait:
    """Singular values on a grid over one period: estimates for a picture, not bounds.

    Attributes:
        axis: Frequencies along each axis, in radians from −π to π.
        heights: σ1, ``(len(axis),)`` for one spatial axis, else ``(len(axis), len(axis))``; for
            three axes the slice through the maximizer.
        values: All singular values on the grid, sorted.
        peak: Maximizer of σ1, one frequency per shown axis; empty if it is not known.
    """

    axis: NDArray[np.float64]
    heights: NDArray[np.float64]
    values: NDArray[np.float64]
    peak: tuple[float, ...]


@torch.no_grad()
def portrait(layer: Layer, bracket: Bracket) -> Portrait | None:
    """Sample a convolution with at least two taps; ``None`` if its symbol is constant."""
    conv = convolution(layer)
    coefficients = taps(conv).double()
    groups, rows, columns, *sizes = coefficients.shape
    shown = min(2, len(sizes))
    if shown == 0 or math.prod(sizes) == 1:
        return None
    room = (LARGEST / (groups * rows * columns)) ** (1 / shown)
    count = int(min(SAMPLES, max(9, room))) // 2 * 2 + 1
    axis = np.linspace(-np.pi, np.pi, count)
    whole = np.stack(np.meshgrid(*[axis] * shown, indexing="ij"), -1).reshape(-1, shown)
    mirrored = shown == len(sizes)  # F(−ω) is the conjugate of F(ω), so half the grid is enough
    points = whole[: len(whole) // 2 + 1] if mirrored else whole
    place = bracket.frequency or (0.0,) * len(sizes)  # empty if there was no search
    rest = np.broadcast_to(np.array(place[shown:]), (len(points), len(sizes) - shown))
    frequencies = torch.from_numpy(np.concatenate([points, rest], 1))
    values = torch.linalg.svdvals(evaluate(coefficients.float(), frequencies)).cpu()
    half = values.amax((0, 2)).double().numpy()
    full = np.concatenate([half, half[-2::-1]]) if mirrored else half
    heights = full.reshape([count] * shown)
    wrapped = [(w + np.pi) % (2 * np.pi) - np.pi for w in bracket.frequency[:shown]]
    flat = np.sort(values.flatten().double().numpy())
    return Portrait(axis, heights, flat, tuple(float(w) for w in wrapped))
