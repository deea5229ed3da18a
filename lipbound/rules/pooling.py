"""Pooling and interpolation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.rules.values import Step, Unbounded, Value, axes, register_rule, up


@register_rule(*[
    f"aten.{name}" for name in (
        "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices",
        "max_pool2d_with_indices", "max_pool3d_with_indices",
    )
])  # fmt: skip
def _max_pool(step: Step) -> Any:
    """√(the largest number of windows that see one entry)."""
    value = step.only()
    dims = 1 if "1d" in step.call.op else 2 if "2d" in step.call.op else 3
    kernel = axes(step["kernel_size"], dims)
    stride = axes(step["stride"] or kernel, dims)
    padding, dilation = axes(step["padding"], dims), axes(step["dilation"], dims)
    windows = 1
    geometry = zip(value.shape[-dims:], kernel, stride, padding, dilation, strict=True)
    for n, k, s, p, d in geometry:
        count = (n + 2 * p - d * (k - 1) - 1) // s + 1 + bool(step["ceil_mode"])
        seen = (np.arange(count)[:, None] * s - p + np.arange(k)[None, :] * d).ravel()
        windows *= int(np.bincount(seen[(seen >= 0) & (seen < n)], minlength=1).max())
    result = value.times(up(math.sqrt(windows)), step.call.shape)
    return result if step.call.shape is not None else [result, result]


@register_rule("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def _adaptive_max_pool(step: Step) -> Any:
    value = step.only()
    sizes = step["output_size"]
    windows = 1
    for n, m in zip(value.shape[-len(sizes) :], sizes, strict=True):
        spans = [range(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        windows *= int(np.bincount(np.concatenate([np.array(span) for span in spans])).max())
    result = value.times(up(math.sqrt(windows)))
    return [result, result]


@register_rule(*[
    f"aten.{name}" for name in (
        "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
        "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
        "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
        "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    )
])  # fmt: skip
def _separable(step: Step) -> float:
    """The norm of an operation that is linear, the same for every channel, and a product of axes.

    With A⊗B its matrix and a, b vectors of ones: the images of e_i⊗b over i have the matrix
    A·‖Bb‖, so σ1(A)‖Bb‖, σ1(B)‖Aa‖ and ‖Aa‖‖Bb‖ are measured on the operation itself.
    """
    if "nearest" in step.call.op:  # which pixel is nearest, float32 decides otherwise
        return max(_product(step, dtype) for dtype in (torch.float64, torch.float32))
    return _product(step, torch.float64)


def _product(step: Step, dtype: torch.dtype) -> float:
    """σ1 of the axes' matrices, multiplied, as the operation works in a precision."""
    value = step.only()
    dims = {"1d": 1, "2d": 2, "3d": 3}[step.call.op.removesuffix("_aa")[-2:]]
    sizes = value.shape[-dims:]
    whole = _apply(step, torch.ones(1, 1, *sizes, dtype=dtype)).double().norm()
    if whole == 0:
        raise Unbounded("its output is empty")
    gain = 1.0
    for axis, n in enumerate(sizes):
        basis = torch.eye(n, dtype=dtype).reshape(
            n, 1, *[n if i == axis else 1 for i in range(dims)]
        )
        images = _apply(step, basis.expand(n, 1, *sizes).contiguous()).double().reshape(n, -1)
        gain *= float(torch.linalg.matrix_norm(images, 2)) / (float(whole) if axis else 1.0)
    return up(gain * (1 + 1e-12))


def _apply(step: Step, image: Tensor) -> Tensor:
    """Run the operation itself on another tensor."""
    arguments = [
        image if isinstance(argument, Value) else argument for argument in step.arguments.values()
    ]
    packet = getattr(torch.ops.aten, step.call.op.removeprefix("aten."))
    return getattr(packet, step.call.overload)(*arguments)
