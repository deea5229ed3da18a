"""Sample the singular values of a layer's symbol over all frequencies, for pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lipbound.bounds import Bracket
from lipbound.geometry import Layer, convolution
from lipbound.spectra import Spectrum, sampled, singular_values
from lipbound.symbols import taps

SAMPLES = 32  # points per axis and period
WORK = 1 << 32  # limit for frequencies × entries × shorter side; above it, use fewer frequencies


@dataclass(frozen=True)
class Portrait:
    """Singular values on a grid over one period: estimates for a picture, not bounds.

    Attributes:
        axis: Frequencies along each axis, in radians from −π to π.
        heights: σ1, ``(len(axis),)`` for one spatial axis, else ``(len(axis), len(axis))``; for
            three axes the slice through the maximizer.
        spectrum: The distribution of all singular values.
        peak: Maximizer of σ1, one frequency per shown axis; empty if it is not known.
    """

    axis: NDArray[np.float64]
    heights: NDArray[np.float64]
    spectrum: Spectrum
    peak: tuple[float, ...]


@torch.no_grad()
def portrait(layer: Layer, bracket: Bracket) -> Portrait | None:
    """Sample a convolution with at least two taps; ``None`` if its symbol is constant."""
    conv = convolution(layer)
    coefficients = taps(conv).double()
    groups, rows, columns, *sizes = coefficients.shape
    if math.prod(sizes) == 1:
        return None
    work = groups * rows * columns * min(rows, columns)
    room = (WORK / work) ** (1 / len(sizes))
    count = max(int(min(SAMPLES, max(8, room))) // 2 * 2, 2 * (max(sizes) // 2 + 1))
    spectrum, heights = sampled(conv, bracket, count)
    axis = np.linspace(-np.pi, np.pi, count + 1)
    if len(sizes) > 2:
        place = bracket.frequency or (0.0,) * len(sizes)  # empty if there was no search
        plane = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
        rest = np.broadcast_to(np.array(place[2:]), (len(plane), len(sizes) - 2))
        points = torch.from_numpy(np.concatenate([plane, rest], 1))
        tops = singular_values(coefficients, points).amax(1).numpy()
        heights = tops.reshape(count + 1, count + 1)
    else:
        wrap = (np.arange(count + 1) + count // 2) % count
        for place_of in range(len(sizes)):  # from 0…2π to −π…π; an axis with one tap is constant
            places = wrap if heights.shape[place_of] > 1 else np.zeros_like(wrap)
            heights = heights.take(places, place_of)
    wrapped = [(w + np.pi) % (2 * np.pi) - np.pi for w in bracket.frequency[:2]]
    return Portrait(axis, heights, spectrum, tuple(float(w) for w in wrapped))
