"""The logarithms of a network's factors and their gradient in plain PyTorch.

This code defines what the fused kernels compute, and runs wherever they cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.modules import batch_norm_gains
from lipbound.penalty.factors import Factor
from lipbound.row_energies import add_row_gradient_, row_peaks
from lipbound.runtime import widened


def logs(found: Sequence[Factor], log_floor: float, least: torch.dtype = torch.float32) -> Tensor:
    """count · log max(bound, floor) of every factor, ``(factors,)``; differentiable.

    Computed at least in ``least``. Products in float64 are never reduced to TF32.
    """
    return combine(found, [log_factor(f, f.weight(), least) for f in found], log_floor)


def combine(found: Sequence[Factor], each: Sequence[Tensor], log_floor: float) -> Tensor:
    """Apply the floor to the factors' logarithms and multiply them by their counts."""
    stacked = torch.stack([log.to(each[0].dtype) for log in each]).clamp_min(log_floor)
    counts = [f.count for f in found]
    return stacked if set(counts) == {1} else stacked * stacked.new_tensor(counts)


def log_factor(factor: Factor, weight: Tensor, least: torch.dtype = torch.float32) -> Tensor:
    """Logarithm of the factor's bound, differentiable in its weight and γ."""
    if factor.kind is None:
        gains = norm_gains(factor, least).abs()
        return gains.amax().clamp_min(torch.finfo(gains.dtype).tiny).log()
    rows = factor.rows(widened(weight, factor.least(weight, least)))
    locate = weight.requires_grad and torch.is_grad_enabled()
    peaks, _ = row_peaks(rows, factor.kind, locate)
    scale, tiny = factor.constant(rows)
    return 0.5 * (_largest_group(factor, peaks)[0] + tiny).log() + math.log(scale)


@torch.no_grad()
def add_gradient_(
    factor: Factor,
    weight: Tensor,
    into: Tensor | None,
    gamma: Tensor | None,
    scale: float | Tensor,
    log_floor: float,
) -> Tensor:
    """Return log of the factor's bound, and add ``scale`` times its gradient to the tensors.

    With Σp the energy of the largest group, ∂(½ log Σp)/∂p_i = γ_i²/(var_i + ε)/(2 Σp) in its
    rows (γ²/(var + ε) is 1 where nothing is folded in) and 0 elsewhere. The gradient of
    max|γ|/√(var + ε) is shared by the channels that attain it. It is 0 at or below the floor.

    Args:
        factor: The factor.
        weight: Its weight.
        into: Gradient of the weight; ``None`` if the weight is frozen.
        gamma: Gradient of the BatchNorm's γ, likewise.
        scale: Factor of the gradient.
        log_floor: Logarithm of the floor.
    """
    if factor.kind is None:
        gains = norm_gains(factor).abs()
        top = gains.amax()
        log = top.clamp_min(torch.finfo(gains.dtype).tiny).log()
        if gamma is not None:
            best = (gains == top) & (top > torch.finfo(gains.dtype).tiny)
            share = scale * (log > log_floor) / best.sum().clamp_min(1)
            gamma.add_(torch.where(best, share / torch.where(best, widened(weight), 1.0), 0.0))
        return log
    rows = factor.rows(widened(weight, factor.least(weight)))
    peaks, points = row_peaks(rows, factor.kind)
    assert points is not None
    constant, tiny = factor.constant(rows)
    total, winner = _largest_group(factor, peaks)
    total = total + tiny
    log = 0.5 * total.log() + math.log(constant)
    share = scale * (log > log_floor) / total
    group = torch.arange(factor.groups, device=winner.device) == winner
    shares = (share * group).repeat_interleave(len(rows) // factor.groups)
    if gamma is not None and factor.norm is not None:
        variance = widened(factor.norm.running_var)  # type: ignore[arg-type]
        gamma.add_(shares * peaks * widened(factor.norm.weight) / (variance + factor.norm.eps))
    if into is not None:
        if factor.norm is not None:
            shares = shares * norm_gains(factor).square()
        direct = into.dtype == rows.dtype and _viewable(into)
        target = factor.rows(into) if direct else torch.zeros_like(rows)
        add_row_gradient_(target, rows, points, shares / 2, factor.kind)
        if not direct:
            laid = target.transpose(0, 1) if factor.across else target
            into.add_(laid.reshape(into.shape))
    return log


def norm_gains(factor: Factor, least: torch.dtype = torch.float32) -> Tensor:
    """γ/√(var + ε) of the factor's BatchNorm."""
    norm = factor.norm
    assert norm is not None
    assert norm.running_var is not None
    return batch_norm_gains(norm.running_var, norm.weight, norm.eps, least)


def _largest_group(factor: Factor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    if factor.norm is not None:
        peaks = peaks * norm_gains(factor, peaks.dtype).square()
    best = peaks.reshape(factor.groups, -1).sum(1).max(0)
    return best.values, best.indices


def _viewable(tensor: Tensor) -> bool:
    """Whether the spatial axes merge without a copy."""
    return tensor.ndim < 3 or tensor.flatten(2).data_ptr() == tensor.data_ptr()
