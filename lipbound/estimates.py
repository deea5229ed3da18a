"""Estimates of σ1 from the literature. They may be below or above the true value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipbound.geometry import Convolution, Layer, convolution, weight_of
from lipbound.registry import call
from lipbound.row_energies import on_grid, root, row_peaks
from lipbound.runtime import wide, widened
from lipbound.symbols import evaluate, grid, positions, radians, taps
from lipbound.toeplitz import adjoint, apply


def ascent(layer: Layer, **geometry: object) -> Tensor:
    r"""Estimate σ1 over all input sizes: climb to the largest σ1 of the symbol.

    From the best of a coarse grid of frequencies, ω and the singular vectors are improved in turn.
    Strides, groups, dilation and padding are taken into account. The value is attained by the
    symbol, so it is too small if the ascent ends at a lower peak, and never too large except by
    rounding and by reflect or replicate padding. Differentiable.

    Example:
        >>> ascent(torch.tensor([[[1.0, 0.0, -1.0]]]))  # sup |2 sin ω|
        tensor(2.)
    """
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    kernel = taps(replace(conv, kernel=widened(conv.kernel)))
    values, _ = Climb(kernel.shape[1:])(kernel, None, FIRST)
    return values.amax() * conv.padding_gain()


def polygrid(layer: Layer, samples: int = 10, **geometry: object) -> Tensor:
    r"""Estimate σ1 by LipBound on an unwidened grid, as in the paper's Algorithm 1 and Table 1.

    :math:`\sqrt{\sum_i \max_{\omega \in \Theta_S} \sum_j |f_{ij}(\omega)|^2}`, with strides ignored
    and the sum over rows only. It is below LipBound by up to the widening factor, so it may be
    below σ1. Differentiable.

    Example:
        >>> polygrid(torch.tensor([[[1.0, 0.0, -1.0]]]))  # peak 2 at π/2, between grid points
        tensor(1.9021)
    """
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    kernel, unit = _working(conv)
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r} must be a positive integer")
    kind = on_grid(tuple(kernel.shape[2:]), (1,) * conv.dims, (samples,) * conv.dims)
    peaks, _ = row_peaks(kernel.reshape(*kernel.shape[:2], -1), kind, locate=False)
    return root(peaks.reshape(conv.groups, -1).sum(1).amax()) * unit


class PowerIteration:
    """Power method of Farnia et al. on the layer itself, with its stride, padding and input size.

    The vector is kept between calls, so a training loop can call it once per step with few
    iterations.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        input_shape: ``(*spatial)`` or ``(cin, *spatial)``.
        seed: Seed for the random start vector.
        geometry: Options of a bare kernel.
    """

    def __init__(self, layer: Layer, input_shape: Sequence[int], seed: int = 0, **geometry: object):
        self.layer = layer
        conv = self._conv = convolution(layer, input_shape=input_shape, **geometry)  # type: ignore[arg-type]
        shape = (1, conv.in_channels, *(conv.input_size or ()))
        draw = torch.Generator().manual_seed(seed)
        start = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.vector = start.to(conv.kernel.device, wide(conv.kernel.dtype))

    def _read(self) -> Convolution:
        if not isinstance(self.layer, nn.Module):
            return self._conv
        # The geometry was read and checked in __init__.
        return replace(self._conv, kernel=weight_of(self.layer))

    def __call__(self, iterations: int = 10) -> Tensor:
        """Run the iterations, keep the vector, return ‖layer(v)‖ for unit v; differentiable."""
        kernel, unit = _working(self._read())
        conv = replace(self._conv, kernel=kernel)
        left, right = powers(conv, self.vector, 1, iterations)
        # A zero layer maps everything to zero, so the previous vector is kept for the next call.
        self.vector = torch.where(kernel.detach().abs().amax() > 0, right, self.vector)
        return (left * apply(conv, right)).sum() * unit


@torch.no_grad()
def powers(conv: Convolution, start: Tensor, count: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Run power iteration on ``count`` layers at once; return left and right unit vectors.

    Args:
        conv: The layers, as the groups of one convolution.
        start: Start vectors of all layers, ``(1, channels, *spatial)``.
        count: Number of layers; each has its own vector.
        iterations: Number of products with every layer and its adjoint.
    """

    def unit(tensor: Tensor) -> Tensor:
        each = tensor.reshape(count, -1)
        norm = torch.linalg.vector_norm(each, dim=1, keepdim=True)
        return (each / norm.clamp_min(1e-30)).reshape(tensor.shape)

    vector = start
    for _ in range(iterations):
        vector = unit(vector)
        vector = adjoint(conv, unit(apply(conv, vector)), vector.shape[2:])
    right = unit(vector)
    return unit(apply(conv, right)), right


def power_iteration(
    layer: Layer,
    input_shape: Sequence[int] | None = None,
    iterations: int = 10,
    seed: int = 0,
    **geometry: object,
) -> Tensor:
    """Estimate σ1 by Farnia et al.'s power method from a random start.

    The value is at most σ1. To keep the vector over many calls, use :class:`PowerIteration`.

    Example:
        >>> 2.8 < float(power_iteration(torch.ones(1, 1, 3), (50,))) < 2.9962
        True
    """
    size = _required("power_iteration", layer, input_shape)
    return PowerIteration(layer, size, seed, **geometry)(iterations)


def circulant(layer: Layer, input_shape: Sequence[int] | None = None, **geometry: object) -> Tensor:
    """Compute σ1 of the layer with stride 1 and circular padding at an input size (Sedghi et al.).

    For zero padding this is an estimate, which may be below or above σ1. Differentiable.

    Example:
        >>> circulant(torch.ones(1, 1, 3), (50,))
        tensor(3.)
    """
    size = _required("circulant", layer, input_shape)
    conv = convolution(layer, input_shape=size, **geometry)  # type: ignore[arg-type]
    size = conv.input_size or ()
    kernel, unit = _working(conv)
    grouped = kernel.reshape(conv.groups, -1, *kernel.shape[1:])
    # F(aω) on the n-grid: dilation only picks other points of the same grid.
    frequencies = radians(grid(size, half=True), size) * torch.tensor(conv.dilation).double()
    symbols = evaluate(grouped, frequencies)
    return torch.linalg.matrix_norm(symbols, 2).amax() * unit


def reshape(layer: Layer, **geometry: object) -> Tensor:
    """σ1 of the kernel reshaped to cout × (cin·taps), as in ``torch.nn.utils.spectral_norm``.

    Miyato et al. normalize by it. It is between σ1/√taps and √taps·σ1 of the layer. Differentiable.

    Example:
        >>> reshape(torch.ones(1, 1, 3, 3))
        tensor(3.0000)
    """
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    kernel, unit = _working(conv)
    matrices = kernel.reshape(conv.groups, -1, kernel[0].numel())
    return torch.linalg.matrix_norm(matrices, 2).amax() * unit


ESTIMATES: dict[str, Callable[..., Tensor]] = {
    "ascent": ascent,
    "polygrid": polygrid,
    "power_iteration": power_iteration,
    "circulant": circulant,
    "reshape": reshape,
}
"""Estimates by name. None of them is a bound."""


def estimate(layer: Layer, method: str = "ascent", **options: object) -> Tensor:
    """Estimate the layer's largest singular value; the result may be too small or too large.

    The default, ``'ascent'``, is usually close to σ1 over all input sizes. ``'polygrid'``, the
    paper's algorithm, is a sum over the output channels and ignores strides, so it can be several
    times too large. For a proof use :func:`lipbound.bracket` or :func:`lipbound.bound`.

    Args:
        layer: ``nn.Conv*d``, ``nn.ConvTranspose*d``, ``nn.Linear``, or a weight tensor with its
            geometry as options.
        method: A name in ``ESTIMATES``.
        options: Options of the method, for example ``input_shape`` if it needs an input size.

    Example:
        >>> estimate(torch.ones(1, 1, 3, 3), stride=2)  # its four phases have 4, 2, 2 and 1 taps
        tensor(5.0000)
        >>> estimate(torch.ones(1, 1, 3, 3), "polygrid", stride=2)
        tensor(9.)
    """
    return call(ESTIMATES, "estimate", method, layer, options)


def _working(conv: Convolution) -> tuple[Tensor, Tensor]:
    """The kernel divided by a power of two near its largest entry, and that power."""
    kernel = widened(conv.kernel)
    unit = power_of_two(kernel)
    return kernel / unit, unit


@torch.no_grad()
def power_of_two(tensor: Tensor, dim: tuple[int, ...] = ()) -> Tensor:
    """Power of two near the largest entry over ``dim``; dividing by it avoids overflow in squares.

    Nothing is read back from the device. Subnormal entries stay below 1.
    """
    kind = torch.finfo(tensor.dtype)
    largest = tensor.abs().amax(dim).clamp(kind.tiny, kind.max / 8)
    return largest.log2().floor().exp2()


def _required(method: str, layer: Layer, shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        known = layer.input_size if isinstance(layer, Convolution) else None
        if known is None:
            raise ValueError(f"{method} needs an input size; pass for example input_shape=(32, 32)")
        return known
    return shape


CHUNK = 1 << 22  # entries of tap products held at once
FIRST = 20  # iterations of the first call, from a random start

State = tuple[Tensor, Tensor]
"""State of a climb: frequencies ω ``(batch, axes)`` and vectors u ``(batch, rows, 2)``."""


class Climb:
    """Alternating ascent to σ1 of symbols of one shape; u is stored as real and imaginary part.

    Args:
        shape: Shape of one symbol's taps, ``(rows, columns, *sizes)``.
    """

    def __init__(self, shape: Sequence[int]):
        self.rows, self.columns, *self.sizes = shape
        self.samples = tuple(1 if m == 1 else max(8, 4 * (m - 1)) for m in self.sizes)
        self.count = math.prod(self.sizes)
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Tensor, state: State | None, iterations: int) -> tuple[Tensor, State]:
        """Return the values ``(batch,)``, differentiable in the real taps, and the new state.

        Args:
            batch: Taps, ``(batch, rows, columns, *sizes)``.
            state: State to start from; ``None`` runs a longer first climb.
            iterations: Number of rounds.
        """
        matrices, unit = self.scaled(batch)
        state, right = self.reach(matrices, state, iterations)
        return self.at(matrices, state[1], right) * unit, state

    def scaled(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the taps to near 1, so that squares fit in float32; return them and their units."""
        batch = batch.reshape(len(batch), self.rows, -1)
        unit = power_of_two(batch, (1, 2))
        return batch / unit[:, None, None], unit

    @torch.no_grad()
    def reach(self, batch: Tensor, state: State | None, iterations: int) -> tuple[State, Tensor]:
        """Climb on scaled matrices; return the state and the right vectors times the waves."""
        if state is None or state[0].device != batch.device:
            state = self._start(batch)
            iterations = max(iterations, FIRST)
        for _ in range(iterations):
            state, right = self._climb(batch, *state)
        return state, right

    def at(self, batch: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Values of the scaled matrices for left and right vectors; differentiable."""
        return ((batch @ right) * left).sum((1, 2))

    def _start(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Start at the grid point where a short power iteration gives the largest value.

        Alternating ascent stops at any local maximum, so the start matters.
        """
        half = radians(grid(self.samples, half=True), self.samples).to(batch.device)
        draw = torch.Generator().manual_seed(0)
        start = torch.randn(len(half), self.rows, 2, generator=draw, dtype=torch.float64)
        shape = (1, self.rows, self.columns, *self.sizes)
        frequencies, lefts = [], []
        for kernel in batch:
            symbols = evaluate(kernel.reshape(shape), half)[0]  # (P, rows, columns)
            left = torch.view_as_complex(start.to(batch)).unsqueeze(-1)
            for _ in range(FIRST):
                left = symbols @ (symbols.mH @ left)
                norm = torch.linalg.vector_norm(left, dim=1, keepdim=True)
                left = left / norm.clamp_min(1e-30)
            best = norm.flatten().argmax()
            frequencies.append(half[best])
            lefts.append(torch.view_as_real(left[best, :, 0]))
        return torch.stack(frequencies), torch.stack(lefts)

    def _climb(
        self, batch: Tensor, frequency: Tensor, left: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Run one round; also return right vectors times waves, ``(batch, columns·taps, 2)``.

        With y_h = u*K_h, the polynomial's coefficients are Σ_j conj(y_js) y_jt.
        """
        product = batch.mT @ left  # (batch, columns·taps, 2): Kᵀ(a + ib), so conj of u*K
        rows = torch.complex(product[..., 0], -product[..., 1])
        rows = rows.reshape(len(batch), self.columns, self.count)
        step = max(1, CHUNK // self.count**2)
        parts = zip(rows.split(step), frequency.split(step), strict=True)
        frequency = torch.cat([self._best(part, place) for part, place in parts])
        waves = self._waves(frequency).to(rows.dtype)  # (batch, T)
        right = (rows @ waves[..., None]).conj()  # F*u, (batch, columns, 1)
        right = right / torch.linalg.vector_norm(right, dim=1, keepdim=True).clamp_min(1e-30)
        spread = torch.view_as_real((right * waves[:, None, :]).flatten(1))
        left = batch @ spread  # a zero vector stays zero
        norms = torch.linalg.vector_norm(left, dim=(1, 2), keepdim=True)
        return (frequency, left / norms.clamp_min(1e-30)), spread

    def _best(self, rows: Tensor, frequency: Tensor) -> Tensor:
        """Best of four frequencies: grid maximum, current one, and two Newton steps from it."""
        gram = rows.mH @ rows  # (batch, T, T)
        peak = self._on_grid(rows, gram).argmax(1)
        everywhere, places = self._grid_and_taps(gram.device)
        distance = places[None, :, :] - places[:, None, :]  # (T, T, D)
        waves = self._waves(frequency).to(gram.dtype)
        terms = (waves.conj()[:, :, None] * gram * waves[:, None, :]).to(torch.complex128)
        slope = -(terms.imag[..., None] * distance).sum((1, 2))  # (batch, D)
        bend = -(terms.real[..., None] * distance.square()).sum((1, 2))
        step = torch.where(bend < 0, -slope / torch.where(bend < 0, bend, -1.0), 0.0)
        newton = [frequency + step, frequency + step / max(1, len(self.sizes))]
        tried = torch.stack([everywhere[peak], frequency, *newton], 1)  # (batch, 4, D)
        waves = self._waves(tried).to(gram.dtype)  # (batch, 4, T)
        energy = ((waves.conj() @ gram) * waves).sum(-1).real
        best = energy.argmax(1)
        return tried[torch.arange(len(tried), device=best.device), best]

    def _on_grid(self, rows: Tensor, gram: Tensor) -> Tensor:
        """Compute ‖u*F(ω)‖² on the grid, ``(batch, P)``; by an FFT if there are many taps."""
        if self.count <= max(64, self.columns):
            everywhere, _ = self._grid_and_taps(gram.device)
            shared = self._waves(everywhere).to(gram.dtype).mT  # (T, P)
            return ((gram @ shared) * shared.conj()).sum(1).real
        axes = tuple(range(2, 2 + len(self.sizes)))
        field = torch.fft.ifftn(rows.unflatten(-1, self.sizes), self.samples, axes, norm="forward")
        return field.abs().square().sum(1).flatten(1)

    def _waves(self, frequency: Tensor) -> Tensor:
        """e^{ih·ω}, ``(..., axes)`` → ``(..., taps)``."""
        angle = frequency @ self._grid_and_taps(frequency.device)[1].mT
        return torch.polar(torch.ones_like(angle), angle)

    def _grid_and_taps(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Frequencies ``(P, axes)`` and positions ``(taps, axes)``, cached per device."""
        if device not in self._constants:
            with torch.inference_mode(False):
                points = radians(grid(self.samples), self.samples).to(device)
                made = points, positions(self.sizes).double().to(device)
            if type(points) is not Tensor:  # a tracer's tensor without values: never keep it
                return made
            self._constants[device] = made
        return self._constants[device]
