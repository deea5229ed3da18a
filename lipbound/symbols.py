r"""The matrix-valued symbol of a convolution, frequency grids, and widening a grid to a supremum.

The symbol of a kernel K is :math:`F(\omega) = \sum_h K_h e^{i h\cdot\omega}`. For zero padding of
any amount the layer's matrix is a compression of the infinite Toeplitz operator F generates, so
:math:`\sigma_1(M) \leq \sup_\omega \sigma_1(F(\omega))` whatever the input size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lipbound.geometry import Convolution, Layer, convolution
from lipbound.runtime import widened


def taps(conv: Convolution, stride: Sequence[int] | None = None) -> Tensor:
    """The coefficients of the symbol that bounds a layer: ``(groups, rows, columns, *m)``.

    There is one symbol per group. Strides are split into phases and dilation is removed (see
    :meth:`Convolution.symbol_stride`); neither changes the supremum of the singular values. An axis
    with m taps left has degree (m − 1)/2. ``stride`` takes the place of that stride.
    """
    return _phases(_grouped(conv.kernel, conv.groups), stride or conv.symbol_stride())


def symbol(
    layer: Layer, frequencies: Tensor | Sequence[Sequence[float]], **geometry: object
) -> Tensor:
    r"""Evaluate the layer's symbol at the given frequencies, without simplification.

    Stride t splits the tap positions a·h by residue, one column block per residue; groups are
    diagonal blocks; a transposed layer has the conjugate transpose.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        frequencies: ``(P, D)``, in radians.
        geometry: Options of a bare kernel.

    Returns:
        Complex ``(P, cout, cin·t^D)``; transposed: ``(P, cout·t^D, cin)``.

    Example:
        >>> symbol(torch.ones(1, 1, 3), torch.zeros(1, 1))
        tensor([[[3.+0.j]]])
    """
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    if not isinstance(frequencies, Tensor):
        frequencies = torch.tensor(frequencies, dtype=torch.float64)
    if frequencies.ndim != 2 or frequencies.shape[1] != conv.dims:
        raise ValueError(
            f"frequencies of shape {tuple(frequencies.shape)} do not fit a kernel with "
            f"{conv.dims} spatial axes; pass (P, {conv.dims})"
        )
    kernel = widened(conv.kernel)
    for axis, a in enumerate(conv.dilation, start=2):
        kernel = _dilate(kernel, axis, a)
    blocks = evaluate(_phases(_grouped(kernel, conv.groups), conv.stride), frequencies)
    groups, points, rows, columns = blocks.shape
    whole = blocks.new_zeros(points, groups, rows, groups, columns)
    index = torch.arange(groups, device=blocks.device)
    whole[:, index, :, index, :] = blocks
    # A group's columns are (cin/groups, phases): already in the order of the input channels.
    whole = whole.reshape(points, groups * rows, groups * columns)
    return whole.mH if conv.transposed else whole


def evaluate(coefficients: Tensor, frequencies: Tensor) -> Tensor:
    """Evaluate symbols ``(groups, P, rows, columns)`` of taps ``(groups, rows, columns, *m)``.

    Frequencies are ``(P, D)`` radians. Cosines and sines are computed in float64 and multiplied by
    the taps in two real products, so the rounding is that of an inner product over the taps.
    """
    sizes = coefficients.shape[3:]
    angles = (
        frequencies.to(coefficients.device, torch.float64)
        @ positions(sizes).to(coefficients.device, torch.float64).mT
    )  # (P, taps)
    groups, rows, columns = coefficients.shape[:3]
    flat = coefficients.reshape(groups, rows * columns, -1).mT  # (groups, taps, rows·columns)
    real = angles.cos().to(flat.dtype) @ flat
    imag = angles.sin().to(flat.dtype) @ flat
    return torch.complex(real, imag).reshape(groups, -1, rows, columns)


def positions(sizes: Sequence[int]) -> Tensor:
    """All index vectors below ``sizes``, row by row: ``(prod(sizes), D)`` integers."""
    if not sizes:
        return torch.zeros(1, 0, dtype=torch.int64)
    axes = torch.meshgrid([torch.arange(n) for n in sizes], indexing="ij")
    return torch.stack(axes, -1).reshape(-1, len(sizes))


def grid(samples: Sequence[int], half: bool = False) -> Tensor:
    """The equispaced grid of ``samples`` points per axis, as indices k with ω = 2πk/S: ``(P, D)``.

    ``half`` keeps one of each pair ω, −ω: for real kernels F(−ω) is the conjugate of F(ω), so
    all absolute values agree.

    Example:
        >>> len(grid((10, 10))), len(grid((10, 10), half=True))
        (100, 52)
    """
    points = positions(samples)
    if not half or not samples:
        return points
    sizes = torch.tensor(samples)
    weights = torch.tensor([math.prod(samples[axis + 1 :]) for axis in range(len(samples))])
    mirrored = ((-points) % sizes) @ weights
    return points[torch.arange(len(points)) <= mirrored]


def radians(points: Tensor, samples: Sequence[int]) -> Tensor:
    """Convert grid indices to frequencies, ``(P, D)`` float64."""
    return points * (2 * math.pi / torch.tensor(samples, dtype=torch.float64))


def samples_per_axis(sizes: Sequence[int], samples: int | None) -> tuple[int, ...]:
    """Grid points per axis: 1 on an axis with a single tap, otherwise ``samples``.

    ``None`` uses 32 points per unit of degree, which keeps the widening below 1.005 per axis for a
    kernel of any size.

    Raises:
        ValueError: If the grid is too coarse for the degree: S must exceed 2d = m − 1.
    """
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ValueError(f"samples={samples!r} must be a positive integer, or None for the default")
    counts = []
    for m in sizes:
        chosen = max(32, 16 * (m - 1)) if samples is None else samples
        if m > 1 and chosen <= m - 1:
            raise ValueError(
                f"samples={samples} is too coarse for {m} taps on an axis (degree {(m - 1) / 2:g})"
                f"; use more than {m - 1}, or None for the default"
            )
        counts.append(chosen if m > 1 else 1)
    return tuple(counts)


WIDENINGS: dict[str, Callable[[int, int], float]] = {
    "cosine": lambda samples, spread: 1 / math.cos(math.pi * spread / (2 * samples)),
    "paper": lambda samples, spread: 1 / math.sqrt(1 - spread / samples),
}
"""Factor per axis by name, from the samples S and the taps' spread 2d = m − 1."""


def widening(samples: Sequence[int], sizes: Sequence[int], kind: str = "best") -> float:
    r"""The factor from a maximum over the grid to the supremum over all frequencies.

    Let :math:`M = \sup \|f\|` be attained at ω*, for f complex, vector- or matrix-valued.

    ``'cosine'``: :math:`1/\cos(\pi d/S)` per axis. With unit u, v such that u*f(ω*)v = M,
    T = Re u*f(·)v is a real trigonometric polynomial with \|T\| ≤ M = T(ω*), and M. Riesz's lemma
    gives T(ω* + δ) ≥ M cos(dδ) while d\|δ\| ≤ π; a grid point lies within δ = π/S.

    ``'paper'``: :math:`(1 - 2d/S)^{-1/2}` per axis (Pfister & Bresler 2018), in two dimensions
    the paper's :math:`(1 - 2d/S)^{-1}`. f is the grid's values summed against de la Vallée
    Poussin's kernel, a product of two Dirichlet kernels, whose absolute sum Cauchy–Schwarz bounds.

    ``'best'``: the smaller of the two on each axis; the first for S ≥ 4d. Only the spread 2d of
    the taps enters, so half-integer degrees (even kernels) need nothing special. The factors
    of the axes multiply: widen one at a time with the others held fixed.

    Args:
        samples: Grid points S per axis.
        sizes: Taps per axis, 2d + 1.
        kind: ``'best'``, ``'cosine'`` or ``'paper'``.

    Example:
        >>> round(widening((10, 10), (3, 3), "paper"), 6), round(widening((10, 10), (3, 3)), 4)
        (1.25, 1.1056)
    """
    if kind != "best" and kind not in WIDENINGS:
        raise ValueError(f"widening={kind!r} is not one of best, {', '.join(WIDENINGS)}")
    factors = list(WIDENINGS.values()) if kind == "best" else [WIDENINGS[kind]]
    return math.prod(
        [
            min([factor(count, m - 1) for factor in factors])
            for count, m in zip(samples, sizes, strict=True)
        ]
    )


def _grouped(kernel: Tensor, groups: int) -> Tensor:
    return kernel.reshape(groups, -1, *kernel.shape[1:])


def _phases(coefficients: Tensor, stride: Sequence[int]) -> Tensor:
    """Split each axis h = t·k + r into taps k and a column block r, zeros filling the last k."""
    dims = len(stride)
    if all(t == 1 for t in stride):
        return coefficients
    sizes = coefficients.shape[3:]
    fill = [amount for m, t in zip(sizes, stride, strict=True) for amount in (-m % t, 0)]
    padded = functional.pad(coefficients, fill[::-1])
    pairs = [n for m, t in zip(sizes, stride, strict=True) for n in (-(-m // t), t)]
    split = padded.reshape(*coefficients.shape[:3], *pairs)
    order = [*range(3), *range(4, 3 + 2 * dims, 2), *range(3, 3 + 2 * dims, 2)]
    return split.permute(order).flatten(2, 2 + dims)


def _dilate(kernel: Tensor, axis: int, dilation: int) -> Tensor:
    if dilation == 1:
        return kernel
    shape = list(kernel.shape)
    shape[axis] = dilation * (shape[axis] - 1) + 1
    spread = kernel.new_zeros(shape)
    index = torch.arange(0, shape[axis], dilation, device=kernel.device)
    return spread.index_copy(axis, index, kernel)
