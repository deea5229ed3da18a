r"""Climb to σ1 of a symbol from where the last climb stood.

For a unit vector u, :math:`\|u^* F(\omega)\|^2` is a trigonometric polynomial with few lags,
maximized over a whole grid at the price of one product with u. So (ω, u) climb in turns: ω to the
best grid point or one Newton step from where it is, whichever is higher; then u to
:math:`F F^* u`. The value never falls while the weights stand still, and is attained: at most
sup σ1(F). Its gradient is that of Re u*F(ω)v at the vectors reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.estimates import power_of_two
from lipbound.symbols import evaluate, grid, positions, radians

CHUNK = 1 << 22  # entries of products of taps at once
FIRST = 20  # iterations of the first call, from a random start

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
        matrices, unit = self.scaled(batch)
        state, right = self.reach(matrices, state, iterations)
        return self.at(matrices, state[1], right) * unit, state

    def scaled(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Matrices of taps near 1, for 1e20 squared would leave float32; and their units."""
        batch = batch.reshape(len(batch), self.rows, -1)
        unit = power_of_two(batch, (1, 2))
        return batch / unit[:, None, None], unit

    @torch.no_grad()
    def reach(self, batch: Tensor, state: State | None, iterations: int) -> tuple[State, Tensor]:
        """Where a climb on scaled matrices gets, and the right vectors times the waves there."""
        if state is None or state[0].device != batch.device:
            state = self._start(batch)
            iterations = max(iterations, FIRST)
        for _ in range(iterations):
            state, right = self._climb(batch, *state)
        return state, right

    def at(self, batch: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The scaled matrices' values at what was reached, differentiable."""
        return ((batch @ right) * left).sum((1, 2))

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


def _unit(vectors: Tensor) -> Tensor:
    """``(batch, rows, 2)``, each of norm one as a complex vector; a zero stays zero."""
    return vectors / torch.linalg.vector_norm(vectors, dim=(1, 2), keepdim=True).clamp_min(1e-30)
