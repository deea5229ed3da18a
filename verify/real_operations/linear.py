"""Products with matrices and kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from verify.real_operations.steps import Array, Step, entries, operation, zeros


@operation("linear")
def _linear(step: Step) -> Array:
    result = entries(step.array("input") @ step.array("weight").T)
    return result if step["bias"] is None else entries(result + step.array("bias"))


@operation("mm", "bmm")
def _mm(step: Step) -> Array:
    return entries(step.array("self") @ step.array("mat2"))


@operation("matmul")
def _matmul(step: Step) -> Array:
    return entries(step.array("self") @ step.array("other"))


@operation("addmm", "baddbmm")
def _addmm(step: Step) -> Array:
    one, other = ("mat1", "mat2") if step.name.startswith("addmm") else ("batch1", "batch2")
    product = entries(step.array(one) @ step.array(other))
    return entries(step.number("beta") * step.array("self") + step.number("alpha") * product)


@operation("einsum")
def _einsum(step: Step) -> Array:
    return entries(np.einsum(step["equation"], *map(step.real, step["tensors"])))


@operation("conv1d", "conv2d", "conv3d")
def _conv(step: Step) -> Array:
    return _convolved(step, transposed=False)


@operation("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(step: Step) -> Array:
    return _convolved(step, transposed=True)


@operation("convolution")
def _convolution(step: Step) -> Array:
    return _convolved(step, transposed=step["transposed"])


def _convolved(step: Step, transposed: bool) -> Array:
    x, weight = step.array("input"), step.array("weight")
    dims = weight.ndim - 2
    whole = x if x.ndim == dims + 2 else x[None]
    options = {name: step.axes(name, dims) for name in ("stride", "dilation")}
    if transposed:
        extra = step.axes("output_padding", dims)
        result = spread_taps(
            whole, weight, padding=step.axes("padding", dims), extra=extra, groups=step["groups"],
            **options,
        )  # fmt: skip
    else:
        pads = _pads(step, weight.shape[2:], options["dilation"])
        result = summed_taps(whole, weight, pads=pads, groups=step["groups"], **options)
    if step["bias"] is not None:
        result = entries(result + step.array("bias").reshape(-1, *[1] * dims))
    return result if x.ndim == dims + 2 else result[0]


def _pads(step: Step, sizes: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Return the zeros before and after each axis."""
    padding = step["padding"]
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
        return [(r // 2, r - r // 2) for r in reach]
    if padding == "valid":
        return [(0, 0)] * len(sizes)
    return [(p, p) for p in step.axes("padding", len(sizes))]


def summed_taps(
    x: Array, weight: Array, stride: Sequence[int], pads: Sequence[tuple[int, int]],
    dilation: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    """Return y[o, i] = Σ over c and taps h of weight[o, c, h] · x[c, t·i + a·h − p]."""
    spatial = [n + p + q for n, (p, q) in zip(x.shape[2:], pads, strict=True)]
    padded = zeros((*x.shape[:2], *spatial))
    inside = [slice(p, p + n) for n, (p, _) in zip(x.shape[2:], pads, strict=True)]
    padded[(slice(None), slice(None), *inside)] = x
    reach = [a * (k - 1) for a, k in zip(dilation, weight.shape[2:], strict=True)]
    sizes = [(n - r - 1) // t + 1 for n, r, t in zip(spatial, reach, stride, strict=True)]
    rows = weight.shape[0] // groups
    result = zeros((len(x), groups, rows, math.prod(sizes)))
    for tap in np.ndindex(*weight.shape[2:]):
        where = [
            slice(a * h, a * h + t * (m - 1) + 1, t)
            for a, h, t, m in zip(dilation, tap, stride, sizes, strict=True)
        ]
        seen = padded[(slice(None), slice(None), *where)]
        seen = seen.reshape(len(x), groups, -1, math.prod(sizes))
        matrix = weight[(slice(None), slice(None), *tap)].reshape(groups, rows, -1)
        result = result + matrix @ seen
    return result.reshape(len(x), groups * rows, *sizes)


def spread_taps(
    x: Array, weight: Array, stride: Sequence[int], padding: Sequence[int],
    extra: Sequence[int], dilation: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    """Return y, to which every x[c, i] adds weight[c, o, h] · x[c, i] at y[o, t·i + a·h − p]."""
    reach = [a * (k - 1) for a, k in zip(dilation, weight.shape[2:], strict=True)]
    spans = [t * (n - 1) + r + 1 for t, n, r in zip(stride, x.shape[2:], reach, strict=True)]
    sizes = [n - 2 * p + e for n, p, e in zip(spans, padding, extra, strict=True)]
    columns = weight.shape[1]
    whole = zeros((len(x), groups * columns, *[n + e for n, e in zip(spans, extra, strict=True)]))
    given = x.reshape(len(x), groups, -1, math.prod(x.shape[2:]))
    for tap in np.ndindex(*weight.shape[2:]):
        matrix = weight[(slice(None), slice(None), *tap)].reshape(groups, -1, columns)
        sent = matrix.swapaxes(1, 2) @ given
        where = [
            slice(a * h, a * h + t * (n - 1) + 1, t)
            for a, h, t, n in zip(dilation, tap, stride, x.shape[2:], strict=True)
        ]
        place = (slice(None), slice(None), *where)
        whole[place] = whole[place] + sent.reshape(len(x), -1, *x.shape[2:])
    kept = [slice(p, p + m) for p, m in zip(padding, sizes, strict=True)]
    return whole[(slice(None), slice(None), *kept)]


@operation("col2im")
def _col2im(step: Step) -> Array:
    """Add every entry to the pixel that im2col would take it from."""
    x, image = step.array("self"), step.axes("output_size", 2)
    geometry = [step.axes(n, 2) for n in ("kernel_size", "dilation", "padding", "stride")]
    columns = x if x.ndim == 3 else x[None]
    channels = columns.shape[1] // math.prod(geometry[0])
    pixels = torch.arange(1, channels * math.prod(image) + 1, dtype=torch.float64)
    places = torch.ops.aten.im2col(pixels.reshape(1, channels, *image), *geometry)[0].long()
    result = zeros((len(columns), 1 + pixels.numel()))
    for place, entry in zip(places.flatten().tolist(), columns.reshape(len(columns), -1).T,
                            strict=True):  # fmt: skip
        result[:, place] += entry
    result = result[:, 1:].reshape(len(columns), channels, *image)
    return result if x.ndim == 3 else result[0]
