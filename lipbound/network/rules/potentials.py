"""A rule for residual layers with tied weights: convex potential layers and SDP-based layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipbound.network.rules.values import (
    Error,
    Linear,
    Step,
    Value,
    readings,
    scaled,
    total,
    up,
)

RISING = ("aten.relu", "aten.relu_", "aten.tanh", "aten.sigmoid", "aten.hardtanh")
"""Activations whose slope lies between 0 and 1, entry by entry."""


def potential_of(step: Step) -> Value | None:
    """Bound x − Aᵀ·Λ·φ(Ax + b), where Λ ≥ 0 is diagonal and φ has slopes between 0 and 1.

    The Jacobian is I − AᵀΛDA with 0 ≤ D ≤ 1. It is symmetric, its eigenvalues lie between
    1 − ‖√Λ·A‖² and 1, and the norm is at most max(1, ‖√Λ·A‖² − 1).
    """
    x, branch = step["self"], step["other"]
    alpha = step.arguments.get("alpha")
    if "sub" not in step.call.op or step.call.op == "aten.rsub" or alpha not in (None, 1):
        return None
    outer, scale, late = _unscaled(branch, step.call.dtype)
    back = outer.linear
    if back is None:
        return None
    active, gains, early = _unscaled(back.anchor, step.call.dtype, -1 - back.conv.dims)
    before = active.origin["self"] if active.origin and active.origin.call.op in RISING else None
    ahead = before.linear if isinstance(before, Value) else None
    same = x.shape == branch.shape == step.shape
    if before is None or ahead is None or ahead.anchor is not x or not same:
        return None
    gain = _adjoint_gain(ahead, back, gains * scale)
    if gain is None:
        return None
    apart = total(scaled(_most(gains), total(before.apart, active.own)), early)
    apart = total(scaled(_most(scale), total(scaled(back.norm, apart), outer.apart)), late)
    return x.times(max(1.0, up(gain - 1)), step.shape, apart=apart)


def _most(factors: Tensor) -> float:
    """Return the largest of some factors ≥ 0, enlarged by more than their rounding."""
    return up(float(factors.max()) * (1 + 2.0**-40))


def _unscaled(
    value: Value, dtype: torch.dtype | None, channels: int | None = None
) -> tuple[Value, Tensor, Error]:
    """Return what a value was before constant factors ≥ 0, and the largest that these may be.

    Args:
        value: The value.
        dtype: Precision of the network, to which a Python number is rounded.
        channels: Axis along which factors may differ; ``None`` for none.

    Returns:
        The earlier value; one factor, or one for each entry of the axis; the error since then.
    """
    factors = torch.ones((), dtype=torch.float64)
    apart: Error = 0.0
    while value.linear is None and (parts := made_by(value, "aten.mul")):
        one, other = parts["self"], parts["other"]
        inner, factor = (one, other) if isinstance(one, Value) else (other, one)
        if not isinstance(inner, Value) or inner.shape != value.shape or isinstance(factor, Value):
            break
        sizes = _sizes(factor, value, dtype, channels)
        if sizes is None or not bool((sizes >= 0).all()):
            break
        apart = total(apart, scaled(_most(factors), value.own))
        value, factors = inner, factors * sizes
    return value, factors, apart


def _sizes(
    factor: Any, value: Value, dtype: torch.dtype | None, channels: int | None
) -> Tensor | None:
    """Return a constant factor as one number or one per channel; ``None`` if it varies more."""
    if isinstance(factor, Tensor) and not factor.ndim and factor.dtype != dtype:
        factor = float(factor)  # a tensor without axes is rounded like a number
    if not isinstance(factor, Tensor):
        return torch.tensor(max(readings(factor, dtype), key=abs), dtype=torch.float64)
    sizes = factor.detach().double().cpu()
    if sizes.numel() == 1:
        return sizes.reshape(())
    if channels is None or sizes.ndim > len(value.shape):
        return None
    lengths = [1] * (len(value.shape) - sizes.ndim) + list(sizes.shape)
    axis = channels % len(lengths)
    alone = all(length == 1 for place, length in enumerate(lengths) if place != axis)
    return sizes.flatten() if alone else None


def _adjoint_gain(ahead: Linear, back: Linear, gains: Tensor) -> float | None:
    """Bound ‖√Λ·A‖² for the convolution A ``ahead``, if the one ``back`` is its adjoint.

    Args:
        ahead: The convolution A, whose rounding errors count.
        back: The convolution that follows the activation.
        gains: The diagonal of Λ: one number, or one for every output channel of A.
    """
    conv, other = ahead.conv, back.conv
    if conv.dims == 0:
        same = other.dims == 0 and torch.equal(conv.kernel, other.kernel.mT)
    else:
        names = ("stride", "padding", "dilation", "groups", "padding_mode")
        same = (
            other.transposed
            and not conv.transposed
            and torch.equal(conv.kernel, other.kernel)
            and all(getattr(conv, name) == getattr(other, name) for name in names)
        )
    if not same or ahead.slack or back.slack or ahead.rounded or back.rounded:
        return None
    if gains.numel() > 1:
        roots = gains.sqrt().to(conv.kernel).reshape(-1, *[1] * (conv.kernel.ndim - 1))
        weighted = Linear(ahead.anchor, replace(conv, kernel=conv.kernel * roots), ahead.options)
        return up(up(weighted.norm * (1 + 2.0**-40)) ** 2 * (1 + 2.0**-40))
    return up(up(ahead.norm * ahead.norm) * float(gains) * (1 + 2.0**-40))


def made_by(value: Any, op: str) -> dict[str, Any]:
    """Return the arguments from which ``op`` computed a value; empty for other operations."""
    origin = value.origin if isinstance(value, Value) else None
    return origin.arguments if origin is not None and origin.call.op == op else {}
