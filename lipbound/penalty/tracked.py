r"""Estimates of σ1 that keep their state between calls, for weights that change slowly.

*Spectral* uses :class:`lipbound.estimates.Climb`, for the supremum over all input sizes.

*Power iteration* uses :class:`lipbound.estimates.PowerIteration` at the layer's own input size.

Layers of one shape form a batch. On a GPU the batches run in parallel, because each is a chain of
small kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor, nn

from lipbound.cuda_graphs import on_streams
from lipbound.estimates import FIRST, Climb, PowerIteration, State, power_of_two, powers
from lipbound.geometry import Convolution, convolution, weight_of
from lipbound.modules import input_shapes
from lipbound.penalty import plain
from lipbound.penalty.factors import Factor
from lipbound.penalty.gradients import Adder
from lipbound.runtime import widened
from lipbound.symbols import taps
from lipbound.toeplitz import apply


class Followed:
    """Terms of a penalty that estimates convolutions from kept states; BatchNorms are exact.

    Args:
        model: The network.
        found: Its factors.
        method: ``'spectral'`` or ``'power_iteration'``.
        iterations: Number of iterations per call; the first call runs more.
        input_shape: Input shape of the network, for power iteration.
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
            self.layers: Sequence[Spectral | Power] = _batches(self.factors, layers)
        else:
            if input_shape is None:
                raise ValueError(
                    "method='power_iteration' needs an input size; pass "
                    "input_shape=(channels, *spatial), for example (3, 32, 32)"
                )
            self.layers = _powers(model, self.factors, layers, input_shape)
        modules = (m for f in found for m in (f.layer, f.norm) if m is not None)
        self._add = Adder(model, [*dict.fromkeys(modules)])

    def logs(self, log_floor: float) -> Tensor:
        """Return the terms. The states keep their memory, so that a CUDA graph can hold a call."""
        found: dict[int, Tensor] = {
            i: plain.log_factor(f, f.weight()) for i, f in enumerate(self.factors) if f.kind is None
        }
        scaled = [layer.read() for layer in self.layers]
        climbs = [
            partial(layer.climb, weights.detach(), self.iterations)
            for layer, (weights, _) in zip(self.layers, scaled, strict=True)
        ]
        reached = on_streams(climbs)
        for layer, (weights, unit), at in zip(self.layers, scaled, reached, strict=True):
            values = layer.value(weights, unit, at)
            tiny = torch.finfo(values.dtype).tiny
            found |= zip(layer.indices, values.clamp_min(tiny).log(), strict=True)
        return plain.combine(self.factors, [found[i] for i in range(len(found))], log_floor)

    def total(self, log_floor: float) -> Tensor:
        return self.logs(log_floor).sum()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of the estimates by layer."""
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
        number = partial(self.total, log_floor)
        return self._add(number, scale, repeats, (log_floor, self.iterations), state)


class Spectral:
    """Layers of equal shape, estimated together; the batch runs over their groups."""

    def __init__(self, factors: Sequence[Factor], indices: Sequence[int]):
        self.indices = list(indices)
        self.factors = [factors[i] for i in indices]
        self.layers = [convolution(f.layer) for f in self.factors]
        self.climber = Climb(taps(self.layers[0]).shape[1:])
        self.gains = [layer.padding_gain() for layer in self.layers]
        self.state: State | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the taps of all layers scaled to near 1, differentiable, and their units."""
        return self.climber.scaled(torch.cat([self._taps(i) for i in range(len(self.factors))]))

    @torch.no_grad()
    def climb(self, batch: Tensor, iterations: int) -> tuple[Tensor, ...]:
        """Climb and keep the state; return left vectors, and right vectors times waves."""
        state, right = self.climber.reach(batch, self.state, iterations)
        before = (None, None) if self.state is None else self.state
        self.state = _kept(before[0], state[0]), _kept(before[1], state[1])
        return state[1], right

    def value(self, batch: Tensor, unit: Tensor, at: tuple[Tensor, ...]) -> Tensor:
        """Values of the layers for these vectors, differentiable in the taps."""
        values = (self.climber.at(batch, *at) * unit).reshape(len(self.layers), -1).amax(1)
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
        weight = widened(factor.weight())
        if factor.norm is not None:
            weight = weight * plain.norm_gains(factor).reshape(-1, *[1] * (weight.ndim - 1))
        return taps(replace(self.layers[index], kernel=weight))


class Power:
    """Power iteration on equal layers at their input size, run as the groups of one layer.

    Each layer gets the result of :class:`lipbound.estimates.PowerIteration`.
    """

    def __init__(self, indices: Sequence[int], layers: Sequence[nn.Module], shape: Sequence[int]):
        self.indices, self.layers = list(indices), list(layers)
        alone = PowerIteration(layers[0], shape)
        self.conv, count = alone._conv, len(layers)
        self.vector = alone.vector.repeat(1, count, *[1] * self.conv.dims)
        self.started = False

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the kernels scaled to near 1, stacked and differentiable, and their units."""
        kernels = torch.stack([widened(weight_of(layer)) for layer in self.layers])
        unit = power_of_two(kernels, tuple(range(1, kernels.ndim)))
        return kernels / unit.reshape(-1, *[1] * (kernels.ndim - 1)), unit

    @torch.no_grad()
    def climb(self, kernels: Tensor, iterations: int) -> tuple[Tensor, ...]:
        """Iterate and keep the right vectors; return left and right vectors."""
        rounds = iterations if self.started else max(iterations, FIRST)
        left, right = powers(self._as_one(kernels), self.vector, len(self.layers), rounds)
        # A zero layer maps everything to zero, so the previous vector is kept for the next call.
        zero = kernels.flatten(1).abs().amax(1) == 0
        now = torch.where(zero[:, None], self._each(self.vector), self._each(right))
        self.vector = _kept(self.vector, now.reshape(right.shape))
        self.started = True
        return left, right

    def value(self, kernels: Tensor, unit: Tensor, at: tuple[Tensor, ...]) -> Tensor:
        """‖layer(v)‖ of every layer, differentiable."""
        left, right = at
        return self._each(left * apply(self._as_one(kernels), right)).sum(1) * unit

    def repeats(self) -> bool:
        """Whether a call needs nothing from the host; other padding modes need tables."""
        return self.conv.padding_mode == "zeros"

    def state_dict(self) -> dict[str, Tensor]:
        return {"vector": self.vector} if self.started else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self.vector = state["vector"].to(self.vector).clone()
            self.started = True

    def _as_one(self, kernels: Tensor) -> Convolution:
        groups = self.conv.groups * len(self.layers)
        return replace(self.conv, kernel=kernels.flatten(0, 1), groups=groups)

    def _each(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(len(self.layers), -1)


@torch.no_grad()
def _kept(before: Tensor | None, now: Tensor) -> Tensor:
    """Copy ``now``, into ``before`` if possible; a gradient may need the original."""
    if before is None or before.is_inference() or before.device != now.device:
        return now.clone()
    return before.copy_(now)


def _batches(factors: Sequence[Factor], indices: Sequence[int]) -> list[Spectral]:
    def look(index: int) -> object:
        conv = convolution(factors[index].layer)
        return taps(conv).shape, conv.kernel.dtype, conv.kernel.device

    return [Spectral(factors, batch) for batch in _alike(indices, look)]


def _powers(
    model: nn.Module, factors: Sequence[Factor], indices: Sequence[int], shape: Sequence[int]
) -> list[Power]:
    for index in indices:
        if factors[index].norm is not None:
            raise ValueError(
                "method='power_iteration' cannot fold a BatchNorm into a convolution; "
                "use include_batchnorm=True"
            )
    shapes = input_shapes(model, shape)
    unseen = [factors[i].name for i in indices if factors[i].name not in shapes]
    if unseen:
        raise ValueError(
            f"an input of shape {tuple(shape)} never reaches {', '.join(unseen)}; exclude them"
        )

    def look(index: int) -> object:
        conv = convolution(factors[index].layer, input_shape=shapes[factors[index].name])
        alone = index if conv.dims == 0 else None  # a matrix has no groups
        rest = tuple(getattr(conv, f.name) for f in fields(conv) if f.name != "kernel")
        return conv.kernel.shape, conv.kernel.dtype, conv.kernel.device, alone, rest

    return [
        Power(batch, [factors[i].layer for i in batch], shapes[factors[batch[0]].name])
        for batch in _alike(indices, look)
    ]


def _alike(indices: Sequence[int], look: Callable[[int], object]) -> list[list[int]]:
    """Group the indices for which ``look`` is equal, in order of first appearance."""
    groups: dict[object, list[int]] = {}
    for index in indices:
        groups.setdefault(look(index), []).append(index)
    return list(groups.values())
