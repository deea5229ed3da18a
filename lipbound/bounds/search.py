r"""Branch and prune: the supremum of σ1(F) over all frequencies, bracketed and proved.

**The lemma.** Let M = sup σ1(F), attained at ω*, with unit u, v such that u*F(ω*)v = M. After
centring the taps (a unit phase, which changes no singular value, and which half-integer degrees
d_j = (m_j − 1)/2 allow on the double torus), T(ω) = Re u*F(ω)v is a real trigonometric polynomial
of degree at most d_j in ω_j, \|T\| ≤ M and T(ω*) = M. Along the line ω* + sδ it is a real function
of exponential type Σ d_j\|δ_j\| bounded by M with a maximum M at s = 0, so by M. Riesz's lemma
(Hörmander's form, for entire functions of exponential type)

.. math:: \sigma_1(F(\omega^* + \delta)) \geq T(\omega^* + \delta)
          \geq M \cos\Big(\sum_j d_j |\delta_j|\Big) \quad\text{while the angle is at most } \pi.

**The proof it gives.** Cover the torus by cells, cell c reaching an angle θ_c < π/2 from its
centre. If σ1(F(c)) < τ cos θ_c for every cell, then M < τ: otherwise the cell that holds ω* would
have σ1(F(c)) ≥ M cos θ_c ≥ τ cos θ_c. Cells that fail are divided and tried again; a failing
centre may also raise the lower end, and τ with it, which takes nothing from the cells already
done. The test is a Cholesky factorization, so what was estimated on the way decides the speed
only.

F(−ω) is the conjugate of F(ω), so one of each pair of cells ±c is enough. For their shape see
:mod:`lipbound.bounds.cells`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.bounds.cells import Cells
from lipbound.bounds.field import Field, top_eigenpairs
from lipbound.bounds.rounding import UNIT, cholesky_error, gamma_complex, symbol_error

LOOK, FEW, MANY = 6, 8, 48  # Lanczos steps: at every cell, while climbing, where that fell short
ALL = 1 << 30  # a full eigenvalue decomposition
RETRIES = 8


@dataclass
class Peak:
    """The best attained value of each layer: where, and with which left vector."""

    lower: Tensor  # (layers,)
    block: Tensor  # (layers,)
    frequency: Tensor  # (layers, D)
    left: Tensor  # (layers, n)


class Search:
    """One run over a stack of symbols. ``owner[b]`` is the layer that block b belongs to.

    Args:
        field: The symbols.
        owner: ``(blocks,)``.
        layers: How many layers.
        rtol: Wanted upper/lower − 1.
        limit: Cells at once beyond which the interval is left wider.
        cap: An upper bound on the supremum, when the cells are only to cover a grid's points.
    """

    def __init__(
        self,
        field: Field,
        owner: Tensor,
        layers: int,
        rtol: float,
        limit: int,
        cap: float | None = None,
    ):
        self.field, self.owner, self.layers = field, owner, layers
        self.limit, self.cap = limit, cap
        self.evaluations = torch.zeros(layers, dtype=torch.int64, device=owner.device)
        device = owner.device
        dims = len(field.sizes)
        self.peak = Peak(
            torch.zeros(layers, dtype=torch.float64, device=device),
            torch.zeros(layers, dtype=torch.int64, device=device),
            torch.zeros(layers, dims, dtype=torch.float64, device=device),
            torch.zeros(layers, field.rows, dtype=torch.complex128, device=device),
        )
        self.target = torch.zeros_like(self.peak.lower)
        self.error = self._largest(field.error)  # (layers,)
        self.factor = cholesky_error(field.rows) + 4 * UNIT
        self.rtol = rtol

    def run(self, cells: Cells, divide: Callable[[Cells], Cells | None]) -> Tensor:
        """Prove all cells, dividing those that fail; returns the upper end per layer."""
        self._improve(cells, steps=FEW)
        if self.cap is None:  # layers that are flat need no cells, whoever shares the batch
            curved = self.field.flat_bound() > self._target()[self.owner]
            cells = cells[(self._largest(curved.double()) > 0)[self.owner[cells.block]]]
            if not len(cells.block):
                return self._target()
        retries = 0
        while True:
            passed = self._prove(cells, self._target())
            failed = cells[~passed]
            if not len(failed.block):
                return self._target()
            # Cells this small fail only where σ1 exceeds the lower end: look harder there.
            small = math.cos(failed.angle) > 1 - self.rtol / 4
            self._improve(failed, steps=ALL if retries else MANY if small else FEW)
            children = divide(failed)
            if children is None and retries < RETRIES:
                children, retries = failed, retries + 1  # points: only a better lower end helps
            if children is None or len(children.block) > self.limit:
                return self._give_up(failed)
            cells = children

    def _target(self) -> Tensor:
        """τ per layer, never lowered: what was proved for one τ holds for all above it.

        It stays as far from the lower end as rounding requires for a proof.
        """
        field = self.field
        worst = self.error / self.peak.lower.square().clamp_min(1e-300)
        floor = (4 * (worst + field.rows * self.factor + 8 * UNIT)).clamp_max(1.0)
        wanted = self.peak.lower * (1 + torch.clamp_min(floor, 0.98 * self.rtol))
        self.target = torch.maximum(self.target, wanted)
        return self.target

    def _prove(self, cells: Cells, target: Tensor) -> Tensor:
        """Which cells have σ1(F(c)) < τ·cos θ, proved. ``(P,)`` booleans."""
        field = self.field
        target = target[self.owner[cells.block]]
        if self.cap is None:
            wanted = target * (math.cos(cells.angle) * (1 - 8 * UNIT))
        else:
            # arccos loses half its digits near 1, hence the slack.
            angle = (target / self.cap).clamp_max(1.0).acos() + cells.angle + 1e-7
            wanted = self.cap * angle.clamp_max(math.pi / 2).cos() - self.cap * 8 * UNIT
            wanted = wanted if cells.angle else target
        # Cholesky of tI − Ĝ succeeding means λ1(G) ≤ t + (factor)·tr(tI − Ĝ) + ‖Ĝ − G‖.
        wanted = wanted.clamp_min(0.0).square()
        level = wanted * (1 - field.rows * self.factor) - field.error[cells.block]
        level = level * (1 - 8 * UNIT)
        passed = []
        frequencies = cells.frequencies
        for part in torch.arange(len(level), device=level.device).split(field.chunk):
            gap = field.gram(cells.block[part], frequencies[part]).neg_()
            gap.diagonal(dim1=-2, dim2=-1).add_(level[part, None])
            passed.append(torch.linalg.cholesky_ex(gap).info == 0)
        self._count(cells.block)
        return torch.cat(passed)

    def _largest(self, per_block: Tensor) -> Tensor:
        """The maximum over each layer's blocks, of non-negative numbers: ``(layers,)``."""
        return torch.zeros_like(self.peak.lower).scatter_reduce(0, self.owner, per_block, "amax")

    def _count(self, block: Tensor) -> None:
        self.evaluations += torch.bincount(self.owner[block], minlength=self.layers)

    def _improve(self, cells: Cells, steps: int) -> None:
        """Estimate λ1(FF*) at the centres; where one beats its layer's lower end, climb."""
        field, frequencies = self.field, cells.frequencies
        value = torch.empty(len(cells.block), dtype=torch.float64, device=cells.block.device)
        for part in torch.arange(len(value), device=value.device).split(field.chunk):
            gram = field.gram(cells.block[part], frequencies[part])
            value[part], cells.left[part] = top_eigenpairs(gram, cells.left[part], LOOK)
        layer = self.owner[cells.block]
        best = torch.full_like(self.peak.lower, -math.inf).scatter_reduce(0, layer, value, "amax")
        where = torch.arange(len(value), device=value.device)
        where = torch.where(value == best[layer], where, -1)
        where = torch.full_like(self.peak.block, -1).scatter_reduce(0, layer, where, "amax")
        # A lower end short by less than this costs nothing: τ leaves it room.
        worth = best.clamp_min(0).sqrt() > self.peak.lower * (1 + self.rtol / 4)
        found = (worth & (where >= 0)).nonzero()[:, 0]
        if not len(found) and steps > FEW:
            found = (where >= 0).nonzero()[:, 0]  # the estimate fell short: look harder
        elif steps > FEW:
            steps = FEW
        if len(found):
            at = where[found]
            start = (found, cells.block[at], frequencies[at], cells.left[at])
            self._climb(*start, reach=max(cells.angle, 1e-6), steps=steps)

    def polish(self) -> None:
        """Newton's method from every layer's peak: the place and vectors a gradient needs.

        λ1(FF*) has the gradient of u*FF*u at its vector u; the second derivatives are differences
        of it.
        """
        field, dims = self.field, self.field.positions.shape[1]
        offsets = torch.cat([torch.zeros(1, dims), torch.eye(dims)]).to(self.peak.frequency) * 1e-5
        for layer in range(self.layers):
            block = self.peak.block[layer].expand(dims + 1)
            frequency, left = self.peak.frequency[layer].clone(), self.peak.left[layer].clone()
            for _ in range(6):
                places = frequency + offsets
                start = left.expand(dims + 1, -1)
                left_all = top_eigenpairs(field.gram(block, places), start, MANY)[1]
                rows, waves = field.rows_applied(block, left_all), field.waves(places)
                image = (rows @ waves[..., None])[..., 0]  # (F*u)*
                turned = rows @ (1j * field.positions * waves[..., None])  # (1 + D, N, D)
                slope = 2 * (image.conj()[..., None] * turned).sum(1).real
                left = left_all[0]
                self._record(
                    torch.tensor([layer], device=left.device), block[:1], frequency[None],
                    left[None], image[:1].conj(), always=True,
                )  # fmt: skip
                bend = (slope[1:] - slope[0]) / 1e-5
                bend = (bend + bend.mT) / 2
                if not dims or bool((torch.linalg.eigvalsh(bend) >= 0).any()):
                    break
                frequency = frequency - torch.linalg.solve(bend, slope[0])

    def _climb(
        self,
        layers: Tensor,
        block: Tensor,
        frequency: Tensor,
        left: Tensor,
        reach: float,
        steps: int,
        rounds: int = 4,
    ) -> None:
        """Alternate: singular vectors u, v at a frequency, then the frequency for that u and v.

        Re u*F(ω)v is a scalar polynomial in ω, so the second half is nearly free.
        """
        field = self.field
        for turn in range(rounds):
            if turn:
                gram = field.gram(block, frequency)
                left = top_eigenpairs(gram, left, steps)[1]
                self._count(block)
            rows = field.rows_applied(block, left)  # (Q, N, T): u*K_h
            right = (rows @ field.waves(frequency)[..., None])[..., 0].conj()  # F*u
            self._record(layers, block, frequency, left, right)
            if self.cap is not None or not field.positions.shape[1]:
                return  # on a grid, or without one, the frequency stays where it is
            coefficients = (rows.mT @ right[..., None])[..., 0]
            frequency = _uphill(coefficients, field.positions, frequency, reach / 2**turn)

    def _record(
        self,
        layers: Tensor,
        block: Tensor,
        frequency: Tensor,
        left: Tensor,
        image: Tensor,
        always: bool = False,
    ) -> None:
        """‖F(ω)*u‖/‖u‖ rounded down, kept where it is a layer's best (or equal but for rounding).

        The image is off by the symbol's rounding and by inner products over rows and taps, both
        relative to ‖Σ|K|‖_F ‖u‖.
        """
        field, peak = self.field, self.peak
        norm = torch.linalg.vector_norm(left, dim=-1)
        attained = torch.linalg.vector_norm(image, dim=-1) / norm
        count = len(field.positions)
        error = symbol_error(field.sizes) + gamma_complex(field.rows + count + field.columns + 32)
        lower = attained * (1 - 64 * UNIT) - 2 * error * field.size[block]
        better = lower >= peak.lower[layers] * (1 - 1e-12 * always)
        lower = torch.maximum(lower, peak.lower[layers])
        for kept, new in (
            (peak.lower, lower),
            (peak.block, block),
            (peak.frequency, frequency),
            (peak.left, left / norm[:, None]),
        ):
            choose = better.reshape(-1, *[1] * (new.ndim - 1))
            kept[layers] = torch.where(choose, new, kept[layers])

    def _give_up(self, cells: Cells) -> Tensor:
        """Widen until the cells that are left are proved too: the interval stays certified."""
        # σ1(F) ≤ ‖Σ|K|‖_F at every frequency: no proof is needed beyond that.
        ceiling = self._largest(self.field.size * (1 + 1e-9))
        target, growth = self._target().clone(), self.rtol
        while True:
            failed = self.owner[cells.block[~self._prove(cells, target)]].unique()
            failed = failed[target[failed] < ceiling[failed]]
            if not len(failed):
                return torch.minimum(target, ceiling)
            raised = (target[failed] * (1 + growth)).clamp_min(1e-3 * ceiling[failed])
            target[failed] = raised
            growth *= 1.5


def _uphill(coefficients: Tensor, positions: Tensor, frequency: Tensor, reach: float) -> Tensor:
    """A local maximum of Re Σ t_h e^{ih·ω} near ``frequency``, on ever finer 5^D lattices.

    On the CPU: a handful of numbers, and a GPU would spend the time on launches.
    """
    device, dims = frequency.device, positions.shape[1]
    coefficients, positions = coefficients.cpu(), positions.cpu()
    frequency = frequency.cpu()
    lattice = torch.cartesian_prod(*[torch.arange(-2, 3)] * dims).reshape(-1, dims) / 2
    lattice = lattice.to(frequency.dtype)
    for _ in range(8):
        tried = frequency[:, None] + reach * lattice  # (Q, 5^D, D)
        angles = tried @ positions.mT
        even = coefficients.real[:, None] * angles.cos()
        best = (even - coefficients.imag[:, None] * angles.sin()).sum(-1).argmax(1)
        frequency = tried[torch.arange(len(tried)), best]
        reach *= 0.55
    return frequency.to(device)
