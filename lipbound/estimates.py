"""Estimates of σ1: no promise on which side they err. What the literature measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipbound.energy import energy_maxima
from lipbound.geometry import Convolution, Layer, convolution, weight_of
from lipbound.methods import call
from lipbound.symbols import evaluate, grid, radians
from lipbound.toeplitz import adjoint, apply


def polygrid(layer: Layer, samples: int = 10, **geometry: object) -> Tensor:
    r"""LipBound on an unwidened grid: the paper's Algorithm 1, what its Table 1 measured.

    :math:`\sqrt{\sum_i \max_{\omega \in \Theta_S} \sum_j |f_{ij}(\omega)|^2}`, the kernel as it
    stands (strides ignored), rows only. Below LipBound by up to the widening, and so possibly
    below σ1. Differentiable.

    Example:
        >>> polygrid(torch.tensor([[[1.0, 0.0, -1.0]]]))  # peak 2 at π/2, between grid points
        tensor(1.9021)
    """
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    kernel, unit = _working(conv)
    taps = kernel.reshape(conv.groups, -1, *kernel.shape[1:])
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r} must be a positive integer")
    total = energy_maxima(taps, (samples,) * conv.dims).sum(-1).amax()
    return _root(total) * unit


class PowerIteration:
    """Farnia et al.'s power method on the layer itself, with its stride, padding and input size.

    Keeps its vector between calls: a loop that calls it once a step with few iterations follows
    the layer as it trains.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        input_shape: ``(*spatial)`` or ``(cin, *spatial)``.
        seed: Of the random start.
        geometry: Options of a bare kernel.
    """

    def __init__(self, layer: Layer, input_shape: Sequence[int], seed: int = 0, **geometry: object):
        self.layer = layer
        conv = self._conv = convolution(layer, input_shape=input_shape, **geometry)  # type: ignore[arg-type]
        shape = (1, conv.in_channels, *(conv.input_size or ()))
        draw = torch.Generator().manual_seed(seed)
        start = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.vector = start.to(conv.kernel.device, _dtype(conv))

    def _read(self) -> Convolution:
        if not isinstance(self.layer, nn.Module):
            return self._conv
        # Its geometry was read, and checked, once.
        return replace(self._conv, kernel=weight_of(self.layer))

    def __call__(self, iterations: int = 10) -> Tensor:
        """Run, remember the vector, and return ‖layer(v)‖ for unit v, differentiable."""
        conv = self._read()
        weight = conv.kernel.detach().abs().amax()
        unit = power_of_two(conv.kernel.to(_dtype(conv)))
        conv = replace(conv, kernel=conv.kernel.to(_dtype(conv)) / unit)
        vector = self.vector
        with torch.no_grad():
            for _ in range(iterations):
                vector = _unit(vector)
                vector = adjoint(conv, _unit(apply(conv, vector)), vector.shape[2:])
            right = _unit(vector)
            left = _unit(apply(conv, right))
            # A zero layer maps everything to zero; the next call starts afresh from where it was.
            self.vector = torch.where(weight > 0, right, self.vector)
        return (left * apply(conv, right)).sum() * unit


def power_iteration(
    layer: Layer,
    input_shape: Sequence[int] | None = None,
    iterations: int = 10,
    seed: int = 0,
    **geometry: object,
) -> Tensor:
    """Farnia et al.'s power method from a random start: at most σ1, close to it when run long.

    For a warm start over many calls keep a :class:`PowerIteration`.

    Example:
        >>> 2.8 < float(power_iteration(torch.ones(1, 1, 3), (50,))) < 2.9962
        True
    """
    size = _required("power_iteration", layer, input_shape)
    return PowerIteration(layer, size, seed, **geometry)(iterations)


def circulant(layer: Layer, input_shape: Sequence[int] | None = None, **geometry: object) -> Tensor:
    """Sedghi et al.: σ1 of the stride-1 layer with circular padding, exactly, at an input size.

    For zero padding an estimate that can fall on either side. Differentiable.

    Example:
        >>> circulant(torch.ones(1, 1, 3), (50,))
        tensor(3.)
    """
    size = _required("circulant", layer, input_shape)
    conv = convolution(layer, input_shape=size, **geometry)  # type: ignore[arg-type]
    size = conv.input_size or ()
    kernel, unit = _working(conv)
    taps = kernel.reshape(conv.groups, -1, *kernel.shape[1:])
    # F(aω) on the n-grid: dilation only picks other points of the same grid.
    frequencies = radians(grid(size, half=True), size) * torch.tensor(conv.dilation).double()
    symbols = evaluate(taps, frequencies)
    return torch.linalg.matrix_norm(symbols, 2).amax() * unit


def reshape(layer: Layer, **geometry: object) -> Tensor:
    """σ1 of the kernel reshaped to cout × (cin·taps), as in ``torch.nn.utils.spectral_norm``.

    Miyato et al.'s normalization; between σ1/√taps and √taps·σ1 of the layer. Differentiable.

    Example:
        >>> reshape(torch.ones(1, 1, 3, 3))
        tensor(3.0000)
    """
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    kernel, unit = _working(conv)
    matrices = kernel.reshape(conv.groups, -1, kernel[0].numel())
    return torch.linalg.matrix_norm(matrices, 2).amax() * unit


ESTIMATES: dict[str, Callable[..., Tensor]] = {
    "polygrid": polygrid,
    "power_iteration": power_iteration,
    "circulant": circulant,
    "reshape": reshape,
}
"""Name → function of a layer. None of them is a bound."""


def estimate(layer: Layer, method: str = "polygrid", **options: object) -> Tensor:
    """A number near the layer's largest singular value, on either side of it.

    Args:
        layer: ``nn.Conv*d``, ``nn.ConvTranspose*d``, ``nn.Linear``, or a weight tensor with its
            geometry as options.
        method: A name in ``ESTIMATES``.
        options: The method's own options; ``input_shape`` for those that work at a size.

    Example:
        >>> estimate(torch.ones(1, 1, 3, 3))
        tensor(9.)
    """
    return call(ESTIMATES, "estimate", method, layer, options)


def _dtype(conv: Convolution) -> torch.dtype:
    return torch.promote_types(conv.kernel.dtype, torch.float32)


def _working(conv: Convolution) -> tuple[Tensor, Tensor]:
    """The kernel divided by a power of two near its largest entry, and that power."""
    kernel = conv.kernel.to(_dtype(conv))
    unit = power_of_two(kernel)
    return kernel / unit, unit


@torch.no_grad()
def power_of_two(tensor: Tensor, dim: tuple[int, ...] = ()) -> Tensor:
    """Near the largest entry, over ``dim`` or all: what is divided by it squares without overflow.

    Nothing is read back from the device. Subnormal entries stay below 1.
    """
    kind = torch.finfo(tensor.dtype)
    largest = tensor.abs().amax(dim).clamp(kind.tiny, kind.max / 8)
    return largest.log2().floor().exp2()


def _required(method: str, layer: Layer, shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        known = layer.input_size if isinstance(layer, Convolution) else None
        if known is None:
            raise ValueError(
                f"{method} works at one input size; pass input_shape=(*spatial), (32, 32) say"
            )
        return known
    return shape


def _unit(vector: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(vector)
    return vector / torch.where(norm > 0, norm, 1.0)


def _root(total: Tensor) -> Tensor:
    """√ with a zero gradient at zero."""
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1.0).sqrt(), total)
