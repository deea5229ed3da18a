"""Rules for pooling and interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lipbound.bounds.banded import banded_norm_above
from lipbound.network.rules.values import Step, Unbounded, axes, register_rule, up, windows

PIECE = 512  # number of lines to process at once


@register_rule(*[
    f"aten.{name}" for name in (
        "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices",
        "max_pool2d_with_indices", "max_pool3d_with_indices",
    )
])  # fmt: skip
def _max_pool(step: Step) -> Any:
    """Return √(the largest number of windows that contain one entry)."""
    value = step.only()
    dims = 1 if "1d" in step.call.op else 2 if "2d" in step.call.op else 3
    kernel = axes(step["kernel_size"], dims)
    stride = axes(step["stride"] or kernel, dims)
    padding, dilation = axes(step["padding"], dims), axes(step["dilation"], dims)
    ceil = [bool(step["ceil_mode"])] * dims
    counts = map(windows, value.shape[-dims:], kernel, stride, padding, dilation, ceil)
    result = value.times(up(math.sqrt(math.prod(counts))), step.call.shape)
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
    """Bound an operation that is linear, equal for all channels, and separable over its axes.

    Its norm is the product of the norms of one matrix per axis: the operation on lines along that
    axis. Interpolation computes the positions of pixels in the network's precision.
    """
    dims = {"1d": 1, "2d": 2, "3d": 3}[step.call.op.removesuffix("_aa")[-2:]]
    sizes = step.only().shape[-dims:]
    types = (torch.float64, torch.float32) if "upsample" in step.call.op else (torch.float64,)
    gains = [
        math.prod(_line_norm(_lines(step, axis, dims), n, dtype) for axis, n in enumerate(sizes))
        for dtype in types
    ]
    divisor = step.arguments.get("divisor_override")
    return up(max(gains) / abs(divisor or 1) * (1 + 2.0**-40))


Lines = Callable[[Tensor], Tensor]  # maps (lines, 1, n) to (lines, 1, m)


def _lines(step: Step, axis: int, dims: int) -> Lines:
    """Return the operation on lines along one axis."""
    name = step.call.op.removeprefix("aten.")
    aten = torch.ops.aten
    if "adaptive" in name:
        size = axes(step["output_size"], dims)[axis]
        return lambda lines: aten.adaptive_avg_pool1d(lines, [size])
    if "avg_pool" in name:
        kernel = axes(step["kernel_size"], dims)
        options = [axes(step["stride"] or kernel, dims), axes(step["padding"], dims)]
        k, s, p = (numbers[axis] for numbers in (kernel, *options))
        # divisor_override is applied once, not once per axis.
        own = 1 if step.arguments.get("divisor_override") else None
        rest = [bool(step["ceil_mode"]), bool(step["count_include_pad"]), own]
        return lambda lines: aten.avg_pool2d(lines, [1, k], [1, s], [0, p], *rest)
    size = step.shape[axis - dims]
    scale = _scale(step, axis, dims)
    corners = [step["align_corners"]] if "align_corners" in step.arguments else []
    if "bicubic" in name or name.endswith("_aa"):
        resize = getattr(aten, name)
        return lambda lines: resize(lines[:, None], [1, size], *corners, None, scale)[:, 0]
    resize = getattr(aten, {"linear": "upsample_linear1d", "bilinear": "upsample_linear1d",
                            "trilinear": "upsample_linear1d"}.get(
        name.removeprefix("upsample_")[:-2], f"{name[:-2]}1d"))  # fmt: skip
    return lambda lines: resize(lines, [size], *corners, scale)


def _scale(step: Step, axis: int, dims: int) -> float | None:
    """Return the factor by which an axis is resized, if coordinates are computed from it."""
    if step.arguments.get("scale_factors") is not None:
        return float(axes(step["scale_factors"], dims)[axis])
    names = {1: ["scales"], 2: ["scales_h", "scales_w"], 3: ["scales_d", "scales_h", "scales_w"]}
    given = step.arguments.get(names[dims][axis])
    return None if given is None else float(given)


def _line_norm(run: Lines, size: int, dtype: torch.dtype) -> float:
    """Return an upper bound on σ1 of a linear map on lines."""
    columns = []
    for start in range(0, size, PIECE):
        count = min(PIECE, size - start)
        basis = torch.zeros(count, 1, size, dtype=dtype)
        basis[torch.arange(count), 0, torch.arange(start, start + count)] = 1
        columns.append(sparse.csr_array(run(basis)[:, 0].double().numpy()))
    matrix = sparse.csr_array(sparse.vstack(columns))  # (n, m), transposed
    if not matrix.shape[1]:
        raise Unbounded("the output is empty")
    return banded_norm_above(matrix)
