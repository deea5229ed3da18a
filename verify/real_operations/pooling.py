"""Pooling and interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gmpy2
import numpy as np
import torch
from gmpy2 import mpfr

from verify.real_operations.steps import Array, Step, entries, operation, real_array, zeros


def _axes_of(name: str) -> int:
    """Return the number of spatial axes of an operation from its name."""
    return next(dims for dims in (1, 2, 3) if f"{dims}d" in name)


def _pooled(x: Array, spans: Sequence[Sequence[range]], reduce: Callable[..., Any]) -> Array:
    """Apply ``reduce`` to the entries of every window, a product of one range per axis."""
    result = np.empty((*x.shape[: x.ndim - len(spans)], *map(len, spans)), dtype=object)
    for place in np.ndindex(*map(len, spans)):
        window = [spans[axis][i] for axis, i in enumerate(place)]
        taken = x[(..., *np.ix_(*window))]
        flat = taken.reshape(*taken.shape[: taken.ndim - len(spans)], math.prod(map(len, window)))
        result[(..., *place)] = reduce(flat, place)
    return result


def _spans(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Any:
    """Return the places of each window of an axis, with those in the padding."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil else room // stride) + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1  # a window must not start in the padding behind the entries
    starts = [i * stride - padding for i in range(count)]
    return [range(s, s + dilation * (kernel - 1) + 1, dilation) for s in starts]


def _inside(span: range, size: int) -> range:
    """Return the places of a window that are entries."""
    kept = [i for i in span if 0 <= i < size]
    return range(kept[0], kept[-1] + 1, span.step) if kept else range(0)


def _pool_spans(step: Step, x: Array) -> list[list[range]]:
    dims = _axes_of(step.name)
    kernel = step.axes("kernel_size", dims)
    stride = step.axes("stride", dims) if step["stride"] else kernel
    dilation = [1] * dims if step["dilation"] is None else step.axes("dilation", dims)
    padding = step.axes("padding", dims)
    ceil = [bool(step["ceil_mode"])] * dims
    return list(map(_spans, x.shape[-dims:], kernel, stride, padding, dilation, ceil))


def _largest_of(flat: Array, place: Any) -> Any:
    return np.max(flat, axis=-1) if flat.shape[-1] else mpfr("-inf")


def _mean_of(flat: Array, place: Any) -> Any:
    return np.sum(flat, axis=-1) / flat.shape[-1]


@operation("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices",
           "max_pool2d_with_indices", "max_pool3d_with_indices")  # fmt: skip
def _max_pool(step: Step) -> Any:
    """Return the maxima, −∞ for a window in padding alone. The indices are not computed."""
    x, spans = step.array("self"), _pool_spans(step, step.array("self"))
    sizes = x.shape[-len(spans) :]
    spans = [[_inside(s, n) for s in axis] for axis, n in zip(spans, sizes, strict=True)]
    result = _pooled(x, spans, _largest_of)
    return result if step.call.results == 1 else [result, None]


@operation("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(step: Step) -> Array:
    """Return the sum of each window divided by its size, with or without its padding.

    Padding behind the last padded entry, which ``ceil_mode`` can add, is never counted.
    """
    x, spans = step.array("self"), _pool_spans(step, step.array("self"))
    sizes = x.shape[-len(spans) :]
    padding = step.axes("padding", len(spans))
    counted = [
        [sum(i < n + p for i in span) for span in axis]
        for axis, n, p in zip(spans, sizes, padding, strict=True)
    ]
    inside = [[_inside(s, n) for s in axis] for axis, n in zip(spans, sizes, strict=True)]

    def mean(flat: Array, place: Sequence[int]) -> Any:
        if not flat.shape[-1]:
            return mpfr(0)
        count = math.prod(axis[i] for axis, i in zip(counted, place, strict=True))
        if step["count_include_pad"] is False:
            count = flat.shape[-1]
        return np.sum(flat, axis=-1) / (step["divisor_override"] or count)

    return _pooled(x, inside, mean)


def _adaptive_spans(step: Step, x: Array) -> list[list[range]]:
    sizes = step.axes("output_size", _axes_of(step.name))
    return [
        [range(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        for n, m in zip(x.shape[-len(sizes) :], sizes, strict=True)
    ]


@operation("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(step: Step) -> list[Any]:
    x = step.array("self")
    return [_pooled(x, _adaptive_spans(step, x), _largest_of), None]


@operation("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
           "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")  # fmt: skip
def _adaptive_avg_pool(step: Step) -> Array:
    x = step.array("self")
    return _pooled(x, _adaptive_spans(step, x), _mean_of)


@operation("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
           "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")  # fmt: skip
def _resized(step: Step) -> Array:
    """Interpolate along one axis after another, with one matrix of weights per axis.

    A ``'rounded'`` reading takes the weights that PyTorch computes in the network's precision;
    ``'exact'`` computes the positions in real arithmetic.
    """
    x = step.array("self" if step["self"] is not None else "input")
    dims = _axes_of(step.name)
    assert step.call.shape is not None
    for axis in range(-dims, 0):
        size, scale = step.call.shape[axis], _scale(step, axis % dims, dims)
        weights = stored_weights if step.reading == "rounded" else real_weights
        matrix = weights(step, x.shape[axis], size, scale, axis)
        x = entries(np.moveaxis(np.moveaxis(x, axis, -1) @ matrix.T, -1, axis))
    return x


def _scale(step: Step, axis: int, dims: int) -> float | None:
    """Return the factor by which an axis is resized, if positions are computed from it."""
    if step["scale_factors"] is not None:
        return float(step.axes("scale_factors", dims)[axis])
    names = {1: ["scales"], 2: ["scales_h", "scales_w"], 3: ["scales_d", "scales_h", "scales_w"]}
    given = step[names[dims][axis]]
    return None if given is None else float(given)


def stored_weights(step: Step, size: int, count: int, scale: float | None, axis: int) -> Array:
    """Return PyTorch's weights along one axis, ``(count, size)``, as its images of unit vectors."""
    dims = _axes_of(step.name)
    units = torch.eye(size, dtype=step.dtype).reshape(size, 1, *[1] * dims, size)
    units = units.movedim(-1, axis - 1).squeeze(-1) if axis != -1 else units.squeeze(-2)
    sizes: list[int] = [1] * dims
    scales: list[float | None] = [None] * dims
    sizes[axis], scales[axis] = count, scale
    run = getattr(torch.ops.aten, step.name).default
    found = run(units, sizes, bool(step["align_corners"]), *scales)
    return real_array(found.reshape(size, count).mT)


def real_weights(step: Step, size: int, count: int, scale: float | None, axis: int) -> Array:
    """Return the weights along one axis, ``(count, size)``, from positions in real arithmetic."""
    if step.name.endswith("_aa"):
        raise step.unknown("the exact reading")
    cubic = "bicubic" in step.name
    half = mpfr(1) / 2
    result = zeros((count, size))
    for row in range(count):
        if step["align_corners"]:
            place = mpfr(row) * (size - 1) / (count - 1) if count > 1 else mpfr(0)
        else:
            pace = 1 / mpfr(scale) if scale else mpfr(size) / count
            place = pace * (row + half) - half
            place = place if cubic else max(place, mpfr(0))
            if size == count and not cubic:
                place = mpfr(row)  # PyTorch copies an axis that keeps its size
        first = int(gmpy2.floor(place))
        rest = place - first
        taps = _cubic(rest) if cubic else {0: 1 - rest, 1: rest}
        for tap, weight in taps.items():
            result[row, min(max(first + tap, 0), size - 1)] += weight
    return result


def _cubic(t: mpfr) -> dict[int, mpfr]:
    """Return the weights of cubic convolution with parameter −3/4 at the four nearest pixels."""
    a = mpfr(-3) / 4

    def near(x: mpfr) -> mpfr:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: mpfr) -> mpfr:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return {-1: far(t + 1), 0: near(t), 1: near(1 - t), 2: far(2 - t)}
