r"""Follow σ1 of the layers from call to call: estimates for a loop whose weights move slowly.

*Spectral.* For a unit vector u, :math:`\|u^* F(\omega)\|^2` is a trigonometric polynomial with few
lags, maximized over a whole grid at the price of one product with u. So (ω, u) climb in turns: ω
to the best grid point or one Newton step from where it is, whichever is higher; then u to
:math:`F F^* u`. The value never falls while the weights stand still, and is attained: at most
sup σ1(F). Its gradient is that of Re u*F(ω)v at the vectors reached.

*Power iteration.* :class:`lipbound.estimates.PowerIteration` at the layer's own input size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lipbound.estimates import PowerIteration, power_of_two
from lipbound.factors import Factor
from lipbound.geometry import convolution
from lipbound.kernels import plain
from lipbound.kernels.graphs import Repeated
from lipbound.sizes import input_shapes
from lipbound.symbol import evaluate, grid, positions, radians, taps

CHUNK = 1 << 22  # entries of products of taps at once
FIRST = 20  # iterations of the first call, from a random start


class Followed:
    """Terms of a penalty whose convolutions are followed; BatchNorms are exact as always.

    On CUDA a call of :meth:`add_grad_` is a thousand small kernels and more, the same every time:
    it is replayed as a graph, where the layers have weights of their own that stay where they are.

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
        self._scale = torch.ones((), dtype=torch.float64)
        self._leaves: list[Tensor] = []
        self._places: list[object] = []
        self._graph: Repeated[tuple[Tensor, list[Tensor | None]]] | None = None

    def logs(self, log_floor: float) -> Tensor:
        found: dict[int, Tensor] = {
            i: plain.log_factor(f, f.weight()) for i, f in enumerate(self.factors) if f.kind is None
        }
        for layer in self.layers:
            values = layer(self.iterations)
            tiny = torch.finfo(values.dtype).tiny
            found |= zip(layer.indices, values.clamp_min(tiny).log(), strict=True)
        return plain.combine(self.factors, [found[i] for i in range(len(found))], log_floor)

    def total(self, log_floor: float) -> Tensor:
        return self.logs(log_floor).sum()

    def state_dict(self) -> dict[str, Tensor]:
        """Where the climbs stand, by layer."""
        return {
            f"{self.factors[layer.indices[0]].name}.{name}": tensor
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
        self._look(log_floor)
        self._scale.fill_(scale)
        work = partial(self._differentiate, log_floor)
        total, parts = work() if self._graph is None else self._graph(work)
        grads: list[Tensor] = []
        for leaf, part in zip(self._leaves, parts, strict=True):
            if part is not None:
                leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                grads.append(leaf.grad)
        if grads:
            torch._foreach_add_(grads, [part for part in parts if part is not None])
        return total.clone()

    def _differentiate(self, log_floor: float) -> tuple[Tensor, list[Tensor | None]]:
        """The total, and its gradient times the scale."""
        with torch.enable_grad(), self._stand_ins() as leaves:
            total = self.total(log_floor)
            if not total.requires_grad:
                return total, [None] * len(leaves)
            found = torch.autograd.grad(total, leaves, self._scale.to(total), allow_unused=True)
        return total.detach(), [*found]

    @contextmanager
    def _stand_ins(self) -> Iterator[list[Tensor]]:
        """The leaves to differentiate by. For a graph, others in the same places.

        Autograd keeps what belongs to a parameter on the stream that the loss's backward used, and
        waiting for it would break a capture.
        """
        if self._graph is None:
            yield self._leaves
            return
        fresh = {id(p): p.detach().requires_grad_(p.requires_grad) for p in self._leaves}
        own = [(slots, slots["weight"]) for slots in (m._parameters for m in self._modules())]
        try:
            for slots, weight in own:
                slots["weight"] = fresh.get(id(weight), weight)  # type: ignore[assignment]
            yield [*fresh.values()]
        finally:
            for slots, weight in own:
                slots["weight"] = weight

    def _modules(self) -> list[nn.Module]:
        """The factors' layers and norms, each once."""
        found = (m for f in self.factors for m in (f.layer, f.norm) if m is not None)
        return [*dict.fromkeys(found)]

    def _look(self, log_floor: float) -> None:
        """Where all tensors lie: a graph is good as long as they stay there."""
        weights = [*self.model.parameters()]
        device = self.factors[0].weight().device
        state = [t for layer in self.layers for t in layer.state_dict().values()]
        fixed = self._fixed()
        places: list[object] = [fixed, device, log_floor, torch.is_autocast_enabled(device.type)]
        for tensor in (*weights, *self.model.buffers(), *state):
            places.append((id(tensor), tensor.data_ptr(), tensor.requires_grad))
        if places != self._places:
            self._places, self._scale = places, self._scale.to(device)
            self._leaves = [p for p in weights if p.requires_grad]
            self._graph = Repeated(device) if fixed else None

    def _fixed(self) -> bool:
        """Whether a call does the same to the same tensors as the one before, without the host."""
        own = all("weight" in module._parameters for module in self._modules())
        together = len({p.device for p in self.model.parameters()}) == 1
        once = all(f.count == 1 for f in self.factors)
        return own and together and once and all(layer.fixed() for layer in self.layers)


def add_autograd_(model: nn.Module, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add the gradient of ``outputs`` to the parameters' ``.grad``, firing no hook of theirs.

    DistributedDataParallel listens to hooks and would take this for the loss's backward.
    """
    leaves = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    for leaf, part in zip(leaves, found, strict=True):
        if part is not None:
            leaf.grad = part if leaf.grad is None else leaf.grad.add_(part)


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
        self.samples = samples = tuple(1 if m == 1 else max(8, 4 * (m - 1)) for m in self.sizes)
        self.grid = radians(grid(samples), samples)  # (P, D)
        self.taps = positions(self.sizes).double()  # (T, D)
        self.seed = seed

    def __call__(self, batch: Tensor, state: State | None, iterations: int) -> tuple[Tensor, State]:
        """The values ``(batch,)``, differentiable in the real taps, and where they were found.

        Args:
            batch: Taps, ``(batch, rows, columns, *sizes)``.
            state: Where to begin; a longer first climb without it.
            iterations: How many rounds.
        """
        batch = batch.reshape(-1, self.rows, self.columns * len(self.taps))
        self.grid, self.taps = self.grid.to(batch.device), self.taps.to(batch.device)
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
        rows = rows.reshape(len(batch), self.columns, len(self.taps))
        step = max(1, CHUNK // len(self.taps) ** 2)
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
        distance = self.taps[None, :, :] - self.taps[:, None, :]  # (T, T, D)
        waves = self._waves(frequency).to(gram.dtype)
        terms = (waves.conj()[:, :, None] * gram * waves[:, None, :]).to(torch.complex128)
        slope = -(terms.imag[..., None] * distance).sum((1, 2))  # (batch, D)
        bend = -(terms.real[..., None] * distance.square()).sum((1, 2))
        step = torch.where(bend < 0, -slope / torch.where(bend < 0, bend, -1.0), 0.0)
        newton = [frequency + step, frequency + step / max(1, len(self.sizes))]
        tried = torch.stack([self.grid[peak], frequency, *newton], 1)  # (batch, 4, D)
        waves = self._waves(tried).to(gram.dtype)  # (batch, 4, T)
        energy = ((waves.conj() @ gram) * waves).sum(-1).real
        best = energy.argmax(1)
        return tried[torch.arange(len(tried), device=best.device), best]

    def _on_grid(self, rows: Tensor, gram: Tensor) -> Tensor:
        """‖u*F(ω)‖² at every point, ``(batch, P)``; of many taps by a Fourier transform."""
        if len(self.taps) <= max(64, self.columns):
            shared = self._waves(self.grid).to(gram.dtype).mT  # (T, P)
            return ((gram @ shared) * shared.conj()).sum(1).real
        axes = tuple(range(2, 2 + len(self.sizes)))
        field = torch.fft.ifftn(rows.unflatten(-1, self.sizes), self.samples, axes, norm="forward")
        return field.abs().square().sum(1).flatten(1)

    def _waves(self, frequency: Tensor) -> Tensor:
        """e^{ih·ω}, ``(..., axes)`` → ``(..., taps)``."""
        angle = frequency @ self.taps.mT
        return torch.polar(torch.ones_like(angle), angle)


class Spectral:
    """Equal-shaped layers of a network, followed together; the batch runs over their groups."""

    def __init__(self, factors: Sequence[Factor], indices: Sequence[int]):
        self.indices = list(indices)
        self.factors = [factors[i] for i in indices]
        self.layers = [convolution(f.layer) for f in self.factors]
        self.climb = Climb(taps(self.layers[0]).shape[1:])
        self.gains = torch.tensor([layer.padding_gain() for layer in self.layers])
        self.state: State | None = None

    def __call__(self, iterations: int) -> Tensor:
        """Climb, and return the layers' values, differentiable."""
        batch = torch.cat([self._taps(i) for i in range(len(self.factors))])
        values, state = self.climb(batch, self.state, iterations)
        self._remember(state)
        self.gains = self.gains.to(values)
        return values.reshape(len(self.layers), -1).amax(1) * self.gains

    @torch.no_grad()
    def _remember(self, state: State) -> None:
        """In the same place every time, for graphs; copied, for a gradient may need the state."""
        if self.state is None or self.state[0].device != state[0].device:
            with torch.inference_mode(False):
                self.state = state[0].clone(), state[1].clone()
        else:
            self.state[0].copy_(state[0])
            self.state[1].copy_(state[1])

    def fixed(self) -> bool:
        """Whether a call needs nothing from the host."""
        return True

    def state_dict(self) -> dict[str, Tensor]:
        if self.state is None:
            return {}
        return {"frequency": self.state[0], "left": self.state[1]}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        device = self.layers[0].kernel.device
        if state:
            frequency, left = (state[k].to(device, copy=True) for k in ("frequency", "left"))
            self.state = frequency, left

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

    def __call__(self, iterations: int) -> Tensor:
        steps = iterations if self.started else max(iterations, FIRST)
        self.started = True
        return self.iteration(steps).reshape(1)

    def fixed(self) -> bool:
        """Whether a call needs nothing from the host: other paddings are tables of pixels."""
        return self.iteration._conv.padding_mode == "zeros"

    def state_dict(self) -> dict[str, Tensor]:
        return {"vector": self.iteration.vector} if self.started else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self.iteration.vector = state["vector"].to(self.iteration.vector, copy=True)
            self.started = True


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
