"""Scales with which layers are proved to keep their limits, found for many layers together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from lipbound.bounds import bound, brackets
from lipbound.geometry import Convolution
from lipbound.runtime import widened


@dataclass(frozen=True)
class Limit:
    """A layer with its free weight as kernel, and the largest norm that it may have.

    Attributes:
        method: Name of the bound that proves the norm, see ``BOUNDS``.
        rtol: Relative width of the bracket, if the method is ``'spectral'``.
    """

    conv: Convolution
    norm: float
    method: str
    rtol: float

    def __post_init__(self) -> None:
        check_norm(self.norm)


def check_norm(norm: float) -> None:
    """Check that a limit is a positive number."""
    if not isinstance(norm, Real) or not norm > 0:
        raise ValueError(f"norm={norm!r} must be a positive Python number, for example 1.0")


@torch.no_grad()
def certified_scales(limits: Sequence[Limit]) -> list[float]:
    """Scales in (0, 1] such that the rounded product of scale and weight keeps each limit."""
    kernels = [limit.conv.kernel for limit in limits]
    scales = [torch.ones((), dtype=widened(kernel).dtype, device="cpu") for kernel in kernels]
    shrinks = [torch.finfo(kernel.dtype).eps for kernel in kernels]
    left = list(range(len(limits)))
    while left:
        uppers = _uppers(limits, scales, left)
        if any(map(math.isnan, uppers.values())):
            raise ValueError("a bound on the norm is not a number; use weights of ordinary size")
        left = [i for i in left if uppers[i] > limits[i].norm]
        for i in left:
            # The scale must always decrease, even if it or the weights are subnormal.
            below = torch.nextafter(scales[i], torch.zeros_like(scales[i]))
            factor = min(limits[i].norm / uppers[i], 1 - shrinks[i])
            scales[i] = torch.minimum((scales[i].double() * factor).to(below.dtype), below)
            shrinks[i] = min(2 * shrinks[i], 0.5)
    return [float(scale) for scale in scales]


def _uppers(
    limits: Sequence[Limit], scales: Sequence[Tensor], chosen: Sequence[int]
) -> dict[int, float]:
    """Certified upper bounds on the norms of the chosen layers, their weights scaled."""
    uppers: dict[int, float] = {}
    searched: dict[float, dict[str, Convolution]] = {}
    for i in chosen:
        limit = limits[i]
        conv = replace(limit.conv, kernel=scaled(limit.conv.kernel, float(scales[i])))
        if limit.method == "spectral":
            searched.setdefault(limit.rtol, {})[str(i)] = conv
        else:
            uppers[i] = float(bound(conv, limit.method))
    for rtol, convs in searched.items():
        uppers |= {int(i): found.upper for i, found in brackets(convs, rtol).items()}
    return uppers


def scaled(weight: Tensor, scale: Tensor | float) -> Tensor:
    """Multiply in float32 at least; return the product in the weight's precision."""
    wide = widened(weight)
    factor = scale.to(wide.dtype) if isinstance(scale, Tensor) else scale
    return (wide * factor).to(weight.dtype)
