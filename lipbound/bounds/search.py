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

**Cells** are diamonds \|δ_1\|/h_1 + \|δ_2\|/h_2 ≤ 1 on the first two axes, which tile the plane as
squares do but have twice the area for the same angle max_j d_j h_j, times intervals on a third.
F(−ω) is the conjugate of F(ω), so one of each pair ±c is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.bounds.field import Field, top_eigenpairs
from lipbound.bounds.rounding import UNIT, gamma_complex, symbol_error
from lipbound.symbol import positions

LEVELS = 30
FEW, MANY, ALL = 8, 48, 1 << 30  # Lanczos steps; all: a full eigenvalue decomposition
RETRIES = 8


@dataclass
class Peak:
    """The best attained value of each layer: where, and with which left vector."""

    lower: Tensor  # (layers,)
    block: Tensor  # (layers,)
    frequency: Tensor  # (layers, D)
    left: Tensor  # (layers, n)


@dataclass
class Cells:
    """Frequencies to be proved: ``block`` of the field, centre, and the angle the cell reaches."""

    block: Tensor  # (P,)
    index: Tensor  # (P, D) integers, ω = 2π·index/samples
    samples: Tensor  # (D,)
    angle: float
    left: Tensor  # (P, n): near the top left singular vectors, from the parent cell
    scale: Tensor | None = None  # (D,) integers: ω = 2π·scale·index/samples

    @property
    def frequencies(self) -> Tensor:
        index = self.index if self.scale is None else (self.index * self.scale) % self.samples
        return index * (2 * math.pi / self.samples.double())

    def __getitem__(self, chosen: Tensor) -> Cells:
        return replace(
            self, block=self.block[chosen], index=self.index[chosen], left=self.left[chosen]
        )


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
        self.rtol = rtol

    def run(self, cells: Cells, divide: Callable[[Cells], Cells | None]) -> Tensor:
        """Prove all cells, dividing those that fail; returns the upper end per layer."""
        self._improve(cells, steps=FEW)
        if self.cap is None and bool((self.field.flat_bound() <= self._target()[self.owner]).all()):
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
        """τ per layer; never closer to the lower end than rounding lets a proof come."""
        field = self.field
        worst = torch.zeros_like(self.peak.lower).scatter_reduce(
            0, self.owner, field.error, "amax"
        ) / self.peak.lower.square().clamp_min(1e-300)
        floor = 4 * (worst + field.rows * _factor(field.rows) + 8 * UNIT)
        return self.peak.lower * (1 + torch.clamp_min(floor, 0.98 * self.rtol))

    def _prove(self, cells: Cells, target: Tensor) -> Tensor:
        """Which cells have σ1(F(c)) < τ·cos θ, proved. ``(P,)`` booleans."""
        field = self.field
        target = target[self.owner[cells.block]]
        if self.cap is None:
            wanted = target * (math.cos(cells.angle) * (1 - 8 * UNIT))
        else:
            angle = (target / self.cap).clamp_max(1.0).acos() + cells.angle
            wanted = self.cap * angle.clamp_max(math.pi / 2).cos() - self.cap * 8 * UNIT
            wanted = wanted if cells.angle else target
        # Cholesky of tI − Ĝ succeeding means λ1(G) ≤ t + (factor)·tr(tI − Ĝ) + ‖Ĝ − G‖.
        wanted = wanted.clamp_min(0.0).square()
        level = wanted * (1 - field.rows * _factor(field.rows)) - field.error[cells.block]
        level = level * (1 - 8 * UNIT)
        passed = []
        frequencies = cells.frequencies
        for part in torch.arange(len(level), device=level.device).split(field.chunk):
            gap = field.gram(cells.block[part], frequencies[part]).neg_()
            gap.diagonal(dim1=-2, dim2=-1).add_(level[part, None])
            passed.append(torch.linalg.cholesky_ex(gap).info == 0)
        self._count(cells.block)
        return torch.cat(passed)

    def _count(self, block: Tensor) -> None:
        self.evaluations += torch.bincount(self.owner[block], minlength=self.layers)

    def _improve(self, cells: Cells, steps: int) -> None:
        """Estimate λ1(FF*) at the centres; where one beats its layer's lower end, climb."""
        field, frequencies = self.field, cells.frequencies
        value = torch.empty(len(cells.block), dtype=torch.float64, device=cells.block.device)
        for part in torch.arange(len(value), device=value.device).split(field.chunk):
            gram = field.gram(cells.block[part], frequencies[part])
            value[part], cells.left[part] = top_eigenpairs(gram, cells.left[part], 6)
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
        ceiling = torch.zeros_like(self.peak.lower).scatter_reduce(
            0, self.owner, self.field.size * (1 + 1e-9), "amax"
        )
        target, growth = self._target(), self.rtol
        while True:
            failed = self.owner[cells.block[~self._prove(cells, target)]].unique()
            failed = failed[target[failed] < ceiling[failed]]
            if not len(failed):
                return torch.minimum(target, ceiling)
            raised = (target[failed] * (1 + growth)).clamp_min(1e-3 * ceiling[failed])
            target[failed] = raised
            growth *= 1.5


def start_cells(field: Field) -> Cells:
    """The coarsest cover of half the torus: cells reach π/4 on the pair of axes, and on a third."""
    device = field.taps.device
    spread = [m - 1 for m in field.sizes]
    samples = [4 * w if w else 1 for w in spread]
    index = positions(samples)
    active = [axis for axis, w in enumerate(spread) if w]
    for axes in (active[:2], *[[axis] for axis in active[2:]]):
        if axes:
            index = index[index[:, axes].sum(1) % 2 == 0]
    index = _one_of_each_pair(index, samples)
    blocks = torch.arange(field.blocks).repeat_interleave(len(index))
    index = index.repeat(field.blocks, 1)
    return Cells(
        blocks.to(device),
        index.to(device),
        torch.tensor(samples, device=device),
        _angle(field, samples),
        random_vectors(len(blocks), field),
    )


def random_vectors(count: int, field: Field) -> Tensor:
    """Seeded starts for the eigenvalue iteration: ``(count, n)``."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(count, field.rows, generator=draw, dtype=torch.float64)
    return start.to(field.taps.device).to(torch.complex128)


def quarter(field: Field) -> Callable[[Cells], Cells | None]:
    """How a field's cells are divided: into cells of half the reach."""
    active = [axis for axis, m in enumerate(field.sizes) if m > 1]
    dims = len(field.sizes)
    moves = [[0] * dims]
    if active:
        moves = []
        for axis in active[:2]:
            for sign in (1, -1):
                moves.append([sign if a == axis else 0 for a in range(dims)])
    for axis in active[2:]:
        moves = [[*m[:axis], sign, *m[axis + 1 :]] for m in moves for sign in (1, -1)]

    def divide(cells: Cells) -> Cells | None:
        samples = torch.where(cells.samples > 1, cells.samples * 2, 1)
        if not active or int(samples.max()) >> LEVELS:
            return None
        steps = torch.tensor(moves, device=cells.index.device)
        index = (cells.index[:, None] * 2 + steps).flatten(0, 1) % samples
        block = cells.block.repeat_interleave(len(moves))
        left = cells.left.repeat_interleave(len(moves), 0)
        # At −ω the vectors are the conjugates.
        kept, mirrored = _canonical(index, samples)
        left = torch.where(mirrored[:, None], left.conj(), left)
        both, inverse = torch.cat([block[:, None], kept], 1).unique(dim=0, return_inverse=True)
        first = torch.zeros(len(both), dtype=torch.int64, device=both.device)
        first[inverse] = torch.arange(len(inverse), device=both.device)
        angle = _angle(field, samples.tolist())
        return Cells(both[:, 0], both[:, 1:], samples, angle, left[first])

    return divide


def _angle(field: Field, samples: list[int]) -> float:
    reach = [
        math.pi * (m - 1) / s for m, s in zip(field.sizes, samples, strict=True) if m > 1
    ]  # d·h, h = 2π/S
    return (max(reach[:2], default=0.0) + sum(reach[2:])) * (1 + 8 * UNIT)


def _canonical(index: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller, in row order, of k and −k, and whether that is −k."""
    mirrored = (-index) % samples
    differs = index != mirrored
    first = differs & (differs.long().cumsum(1) == 1)
    swap = ((mirrored - index) * first).sum(1) < 0
    return torch.where(swap[:, None], mirrored, index), swap


def _one_of_each_pair(index: Tensor, samples: list[int]) -> Tensor:
    if not samples:
        return index
    return _canonical(index, torch.tensor(samples))[0].unique(dim=0)


def _factor(size: int) -> float:
    """Cholesky's backward error relative to the trace, see ``spectral_norm_above``."""
    return gamma_complex(size + 1) / (1 - gamma_complex(size + 1)) + 4 * UNIT


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
