r"""Follow σ1 of the layers from call to call: estimates for a loop whose weights move slowly.

*Spectral.* For a unit vector u, :math:`\|u^* F(\omega)\|^2` is a trigonometric polynomial with few
lags, maximized over a whole grid at the price of one product with u. So (ω, u) climb in turns: ω
to the best grid point or one Newton step from where it is, whichever is higher; then u to
:math:`F F^* u`. The value never falls while the weights stand still, and is attained: at most
sup σ1(F). Its gradient is that of Re u*F(ω)v at the vectors reached.

*Power iteration.* :class:`lipbound.estimates.PowerIteration` at the layer's own input size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lipbound.adding import Adder
from lipbound.estimates import PowerIteration, power_of_two
from lipbound.factors import Factor
from lipbound.geometry import convolution
from lipbound.kernels import plain
from lipbound.sizes import input_shapes
from lipbound.symbol import evaluate, grid, positions, radians, taps

CHUNK = 1 << 22  # entries of products of taps at once
FIRST = 20  # iterations of the first call, from a random start


class Followed:
    """Terms of a penalty whose convolutions are followed; BatchNorms are exact as always.

    Args:
        model: The network.
        found: Its factors.
        method: ``'spectral'`` or ``'power_iteration'``.
        iterations: Per call, after a longer first one.
        input_shape: Of the network, for power iteration.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[Factor],
        method: str,
        iterations: int = 1,
        input_shape: Sequence[int] | None = None,
    ):
        if not isinstance(iterations, int) or iterations < 1:
            raise ValueError(f"iterations={iterations!r} must be a positive integer")
        self.model, self.factors, self.iterations = model, list(found), iterations
        layers = [i for i, f in enumerate(found) if f.kind is not None]
        if method == "spectral":
            self.layers: list[Spectral] | list[Power] = _batches(self.factors, layers)
        else:
            if input_shape is None:
                raise ValueError(
                    "method='power_iteration' works at one input size; pass "
                    "input_shape=(channels, *spatial), (3, 32, 32) say"
                )
            self.layers = _powers(model, self.factors, layers, input_shape)
        modules = (m for f in found for m in (f.layer, f.norm) if m is not None)
        self._add = Adder(model, [*dict.fromkeys(modules)])

    def logs(self, log_floor: float, in_place: bool = False) -> Tensor:
        """``in_place``: the states of the climbs stay where they lie, for a graph."""
        found: dict[int, Tensor] = {
            i: plain.log_factor(f, f.weight()) for i, f in enumerate(self.factors) if f.kind is None
        }
        for layer in self.layers:
            values = layer(self.iterations, in_place)
            tiny = torch.finfo(values.dtype).tiny
            found |= zip(layer.indices, values.clamp_min(tiny).log(), strict=True)
        return plain.combine(self.factors, [found[i] for i in range(len(found))], log_floor)

    def total(self, log_floor: float, in_place: bool = False) -> Tensor:
        return self.logs(log_floor, in_place).sum()

    def state_dict(self) -> dict[str, Tensor]:
        """Where the climbs stand, by layer."""
        return {
            f"{self.factors[layer.indices[0]].name}.{name}": tensor.clone()
            for layer in self.layers
            for name, tensor in layer.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for layer in self.layers:
            prefix = f"{self.factors[layer.indices[0]].name}."
            layer.load_state_dict(
                {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
            )

    def add_grad_(self, scale: float | Tensor, log_floor: float) -> Tensor:
        repeats = (
            all(f.count == 1 for f in self.factors)
            and all(layer.repeats() for layer in self.layers)
            and len({p.device for p in self.model.parameters()}) == 1
        )
        state = [t for layer in self.layers for t in layer.state_dict().values()]
        number = partial(self.total, log_floor, in_place=repeats)
        return self._add(number, scale, repeats, (log_floor, self.iterations), state)


State = tuple[Tensor, Tensor]
"""Where a climb stands: frequencies ω ``(batch, axes)`` and vectors u ``(batch, rows, 2)``."""


class Climb:
    """Climbs to σ1 of symbols of one shape; u is kept as real and imaginary part.

    Args:
        shape: Of one symbol's taps, ``(rows, columns, *sizes)``.
        seed: Of the random start.
    """

    def __init__(self, shape: Sequence[int], seed: int = 0):
        self.rows, self.columns, *self.sizes = shape
        self.samples = tuple(1 if m == 1 else max(8, 4 * (m - 1)) for m in self.sizes)
        self.count = math.prod(self.sizes)
        self.seed = seed
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Tensor, state: State | None, iterations: int) -> tuple[Tensor, State]:
        """The values ``(batch,)``, differentiable in the real taps, and where they were found.

        Args:
            batch: Taps, ``(batch, rows, columns, *sizes)``.
            state: Where to begin; a longer first climb without it.
            iterations: How many rounds.
        """
        batch = batch.reshape(len(batch), self.rows, -1)
        unit = power_of_two(batch, (1, 2))
        batch = batch / unit[:, None, None]  # or 1e20 squared would leave float32
        with torch.no_grad():
            if state is None or state[0].device != batch.device:
                state = self._start(batch)
                iterations = max(iterations, FIRST)
            for _ in range(iterations):
                state, right = self._climb(batch.detach(), *state)
        return ((batch @ right) * state[1]).sum((1, 2)) * unit, state

    def _start(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """A short power iteration at every point of the grid; the highest of them starts.

        Climbing in turns stops at any local peak, so where it starts matters.
        """
        half = radians(grid(self.samples, half=True), self.samples).to(batch.device)
        draw = torch.Generator().manual_seed(self.seed)
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
        """One round; also the right vectors times the waves, ``(batch, columns·taps, 2)``.

        With y_h = u*K_h: the polynomial's coefficients are Σ_j conj(y_js) y_jt.
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
        return (frequency, _unit(batch @ spread)), spread

    def _best(self, rows: Tensor, frequency: Tensor) -> Tensor:
        """The highest of the grid, where it is, and two Newton steps along the axes from there."""
        gram = rows.mH @ rows  # (batch, T, T)
        peak = self._on_grid(rows, gram).argmax(1)
        everywhere, taps = self._grid_and_taps(gram.device)
        distance = taps[None, :, :] - taps[:, None, :]  # (T, T, D)
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
        """‖u*F(ω)‖² at every point, ``(batch, P)``; of many taps by a Fourier transform."""
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
        """Frequencies ``(P, axes)`` and positions ``(taps, axes)``, kept on every device in use."""
        if device not in self._constants:
            with torch.inference_mode(False):
                points = radians(grid(self.samples), self.samples).to(device)
                self._constants[device] = points, positions(self.sizes).double().to(device)
        return self._constants[device]


class Spectral:
    """Equal-shaped layers of a network, followed together; the batch runs over their groups."""

    def __init__(self, factors: Sequence[Factor], indices: Sequence[int]):
        self.indices = list(indices)
        self.factors = [factors[i] for i in indices]
        self.layers = [convolution(f.layer) for f in self.factors]
        self.climb = Climb(taps(self.layers[0]).shape[1:])
        self.gains = [layer.padding_gain() for layer in self.layers]
        self.state: State | None = None

    def __call__(self, iterations: int, in_place: bool = False) -> Tensor:
        """Climb, and return the layers' values, differentiable."""
        batch = torch.cat([self._taps(i) for i in range(len(self.factors))])
        values, state = self.climb(batch, self.state, iterations)
        before = self.state if in_place and self.state is not None else (None, None)
        self.state = _kept(before[0], state[0]), _kept(before[1], state[1])
        values = values.reshape(len(self.layers), -1).amax(1)
        return values if self.repeats() else values * values.new_tensor(self.gains)

    def repeats(self) -> bool:
        """Whether a call needs nothing from the host."""
        return set(self.gains) == {1.0}

    def state_dict(self) -> dict[str, Tensor]:
        if self.state is None:
            return {}
        return {"frequency": self.state[0], "left": self.state[1]}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        device = self.layers[0].kernel.device
        if state:
            frequency, left = (state[name].to(device) for name in ("frequency", "left"))
            self.state = frequency.clone(), left.clone()

    def _taps(self, index: int) -> Tensor:
        factor = self.factors[index]
        weight = plain.working(factor.weight())
        if factor.norm is not None:
            weight = weight * plain.norm_gains(factor).reshape(-1, *[1] * (weight.ndim - 1))
        return taps(replace(self.layers[index], kernel=weight))


class Power:
    """Power iteration on one layer at its input size."""

    def __init__(self, index: int, layer: nn.Module, shape: Sequence[int]):
        self.indices = [index]
        self.iteration = PowerIteration(layer, shape)
        self.started = False

    def __call__(self, iterations: int, in_place: bool = False) -> Tensor:
        steps = iterations if self.started else max(iterations, FIRST)
        self.started = True
        before = self.iteration.vector
        value = self.iteration(steps)
        if in_place:
            self.iteration.vector = _kept(before, self.iteration.vector)
        return value.reshape(1)

    def repeats(self) -> bool:
        """Whether a call needs nothing from the host: other paddings are tables of pixels."""
        return self.iteration._conv.padding_mode == "zeros"

    def state_dict(self) -> dict[str, Tensor]:
        return {"vector": self.iteration.vector} if self.started else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self.iteration.vector = state["vector"].to(self.iteration.vector).clone()
            self.started = True


@torch.no_grad()
def _kept(before: Tensor | None, now: Tensor) -> Tensor:
    """A copy, in the place of the one before if there is one: a gradient may need the original."""
    if before is None or before.is_inference() or before.device != now.device:
        return now.clone()
    return before.copy_(now)


def _batches(factors: Sequence[Factor], indices: Sequence[int]) -> list[Spectral]:
    equal: dict[object, list[int]] = {}
    for index in indices:
        conv = convolution(factors[index].layer)
        shape = tuple(taps(conv).shape)
        equal.setdefault((shape, conv.kernel.dtype, conv.kernel.device), []).append(index)
    return [Spectral(factors, batch) for batch in equal.values()]


def _powers(
    model: nn.Module, factors: Sequence[Factor], indices: Sequence[int], shape: Sequence[int]
) -> list[Power]:
    for index in indices:
        if factors[index].norm is not None:
            raise ValueError(
                "method='power_iteration' runs the layers as they are; "
                "use include_batchnorm=True, which keeps BatchNorm apart"
            )
    shapes = input_shapes(model, shape)
    unseen = [factors[i].name for i in indices if factors[i].name not in shapes]
    if unseen:
        raise ValueError(
            f"a forward pass of {tuple(shape)} never reaches {', '.join(unseen)}; exclude them"
        )
    return [Power(i, factors[i].layer, shapes[factors[i].name]) for i in indices]


def _unit(vectors: Tensor) -> Tensor:
    """``(batch, rows, 2)``, each of norm one as a complex vector; a zero stays zero."""
    return vectors / torch.linalg.vector_norm(vectors, dim=(1, 2), keepdim=True).clamp_min(1e-30)
