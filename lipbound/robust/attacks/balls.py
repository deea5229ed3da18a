"""Norm balls of perturbations: random starts, steepest ascent and projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def _norms(x: Tensor) -> Tensor:
    """Return the L2 norm of every example, shaped to divide it, and 1 where it is zero."""
    flat = x.flatten(1)
    largest = flat.abs().amax(1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    norms = (flat / largest).norm(dim=1) * largest[:, 0]  # squares could underflow
    return torch.where(norms > 0, norms, 1.0).reshape(-1, *[1] * (x.ndim - 1))


def _cube(images: Tensor, radius: float, generator: torch.Generator | None) -> Tensor:
    return torch.empty_like(images).uniform_(-radius, radius, generator=generator)


def _sphere(images: Tensor, radius: float, generator: torch.Generator | None) -> Tensor:
    """Sample uniformly in the L2 ball: a random direction, and a radius with the right density."""
    direction = torch.empty_like(images).normal_(generator=generator)
    count = images[0].numel()
    share = torch.empty(len(images), device=images.device).uniform_(generator=generator)
    length = radius * share.pow(1 / count).reshape(-1, *[1] * (images.ndim - 1))
    return direction / _norms(direction) * length


@dataclass(frozen=True)
class Ball:
    """A norm ball.

    Attributes:
        sample: ``(images, radius, generator)`` → a random perturbation inside the ball.
        ascend: Gradient → direction of steepest ascent, with norm one in the ball's norm.
        project: ``(perturbation, radius, a number or a tensor)`` → the nearest one inside the ball.
    """

    sample: Callable[[Tensor, float, torch.Generator | None], Tensor]
    ascend: Callable[[Tensor], Tensor]
    project: Callable[[Tensor, Any], Tensor]


BALLS: dict[str, Ball] = {
    "linf": Ball(_cube, torch.sign, lambda delta, radius: delta.clamp(-radius, radius)),
    "l2": Ball(
        _sphere,
        lambda gradient: gradient / _norms(gradient),
        lambda delta, radius: delta * (radius / _norms(delta)).clamp_max(1.0),
    ),
}
"""Name of the norm → its ball."""
