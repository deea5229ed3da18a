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
have σ1(F(c)) ≥ M cos θ_c ≥ τ cos θ_c. Cells that fail are divided and tested again. A failing
centre may also raise the lower end, and τ with it. Cells already proved remain proved then, and
cells that had failed are tested again first. The test is a Cholesky factorization, in single
precision where the margin allows it (:mod:`.single`). Estimates decide only the speed: where to
climb, and into how many parts to divide.

F(−ω) is the conjugate of F(ω), so one of each pair of cells ±c is enough. For their shape see
:mod:`lipbound.bounds.supremum.cells`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import UNIT, cholesky_error, positive
from lipbound.bounds.supremum import triangles
from lipbound.bounds.supremum.cells import Cells, pick
from lipbound.bounds.supremum.eigen import bottom_eigenpairs
from lipbound.bounds.supremum.field import Field, Floats, Integers
from lipbound.bounds.supremum.peak import MANY, Peak
from lipbound.bounds.supremum.single import UNDECIDED, YES, Single
from lipbound.bounds.supremum.triangles import Triangles
from lipbound.runtime import one_blas_thread

FIRST, LOOK = 16, 8  # sizes of Krylov spaces: from random vectors, at cells that fail
RETRIES = 8
TURNS = 1 << 22  # matrix entries from which cells are proved in two batches
WIDE = 256  # rows from which a cell that fails costs more than several smaller ones


def parts(
    cells: Cells, value: Floats, target: Floats, rtol: float, axes: int, limit: int,
    *, most: int = 6, share: float = 0.9,
) -> Integers:  # fmt: skip
    """Number of parts to divide cells into: enough if σ1 were constant on each cell.

    Since it is not, ``share`` makes the parts smaller; it was tuned on random symbols.

    Args:
        cells: The cells.
        value: Estimates of λ1(FF*) at their centres.
        target: The target τ of their layers.
        rtol: Target relative width.
        axes: Number of axes on which cells are divided.
        limit: Number of cells beyond which every cell is divided into two on each axis.
        most: Largest number of parts, at most three on three axes.
        share: Share of the angle that σ1 would allow.
    """
    ratio = np.sqrt(np.maximum(value, 0)) / np.maximum(target, 1e-300)
    enough = np.arccos(np.minimum(ratio, 1 - rtol / 2))
    most = most if axes < 3 else 3
    wanted = np.nan_to_num(np.ceil(cells.angle / (share * enough)), nan=most)
    wanted = np.clip(wanted, 2, most).astype(np.int64)
    return wanted if (wanted**axes).sum() <= limit else np.full_like(wanted, 2)


class Search:
    """Search over a stack of symbols. ``owner[b]`` is the layer that block b belongs to.

    Matrices and vectors stay on the field's device. Decisions need a few numbers per cell and are
    made on the host.

    Args:
        field: The symbols.
        owner: ``(blocks,)``, ascending.
        layers: Number of layers.
        rtol: Target relative width, upper/lower − 1.
        limit: Number of cells at once beyond which the interval is left wider.
        cap: An upper bound on the supremum, if the cells only have to cover a grid's points.
    """

    def __init__(
        self, field: Field, owner: Integers, layers: int, rtol: float,
        *, limit: int, cap: float | None = None,
    ):  # fmt: skip
        self.field, self.owner, self.layers = field, owner, layers
        self.limit, self.cap, self.rtol = limit, cap, rtol
        self.peak = Peak(field, owner, layers, rtol, moves=cap is None)
        self.target = np.zeros(layers)
        self.single = Single(field)
        self.triangular = triangles.suits(field)
        self.error = self._largest(field.error)  # (layers,)
        self.factor = cholesky_error(field.rows) + 8 * UNIT

    @cached_property
    def triangles(self) -> Triangles:
        return Triangles(self.field, np.float64)

    @one_blas_thread()
    def run(self, cells: Cells, divide: Callable[[Any, Integers], Cells | None]) -> Floats:
        """Prove all cells, dividing those that fail; return the upper end per layer."""
        first = self._look(cells)
        self.peak.raise_from(cells, first)
        failed, value = self._prove(cells, first)
        if self.cap is None:
            failed, value = self._without_flat(cells, failed, value)
        retries = 0
        while len(failed):
            failed, value = self._raise_and_retry(failed, value, retries)
            if not len(failed):
                break
            children = divide(failed, self._parts(failed, value))
            if children is None and retries < RETRIES:
                children, retries = failed, retries + 1  # only a better lower end helps
            if children is None or len(children) > self.limit:
                return self._give_up(failed)
            failed, value = self._prove_in_turns(children)
        return self._target()

    def _prove_in_turns(self, cells: Cells) -> tuple[Cells, Floats]:
        """Call :meth:`_prove`, on a quarter of the cells first if the work is large.

        If these raise the lower end, the other cells are tested only with the higher target.
        """
        if not self.triangular or len(cells) * self.field.rows**2 < TURNS:
            return self._prove(cells)
        first = np.arange(len(cells)) % 4 == 0
        failed, value = self._prove(cells[first])
        if len(failed):
            failed, value = self._raise_and_retry(failed, value)
        others, more = self._prove(cells[~first])
        order = np.concatenate([failed.block, others.block]).argsort(kind="stable")
        return failed.joined(others, order), np.concatenate([value, more])[order]

    def _raise_and_retry(
        self, failed: Cells, value: Floats, retries: int = 0
    ) -> tuple[Cells, Floats]:
        """Climb from the best cells; if this raises the target, test the failed cells again."""
        before = self._target()
        self.peak.raise_from(failed, value, retries)
        if (self._target() > before * (1 + self.rtol / 4)).any():
            return self._prove(failed, value)
        return failed, value

    def _without_flat(self, cells: Cells, failed: Cells, value: Floats) -> tuple[Cells, Floats]:
        """Drop layers proved by ``flat_bound``, which is tried if no cell of a layer has passed."""
        whole, lost = (np.bincount(self.owner[c.block], minlength=self.layers)
                       for c in (cells, failed))  # fmt: skip
        if not (whole == lost).any():
            return failed, value
        curved = self.field.flat_bound() > self._target()[self.owner]
        kept = (self._largest(curved.astype(float)) > 0)[self.owner[failed.block]]
        return failed[kept], value[kept]

    def _parts(self, cells: Cells, value: Floats) -> Integers:
        target = self._target()[self.owner[cells.block]]
        axes = sum(m > 1 for m in self.field.sizes)
        most, share = (8, 0.7) if self.field.rows >= WIDE and self.triangular else (6, 0.9)
        return parts(cells, value, target, self.rtol, axes, self.limit, most=most, share=share)

    def _target(self) -> Floats:
        """Target τ per layer. It never decreases, so cells proved for one τ remain proved.

        It exceeds the lower end by at least the margin that rounding requires for a proof.
        """
        worst = self.error / np.maximum(self.peak.lower**2, 1e-300)
        floor = np.minimum(4 * (worst + self.field.rows * self.factor + 8 * UNIT), 1.0)
        wanted = self.peak.lower * (1 + np.maximum(floor, 0.98 * self.rtol))
        self.target = np.maximum(self.target, wanted)
        return self.target

    def _limit(self, cells: Cells, target: Floats) -> Floats:
        """Limit on λ1(FF*) at the centres that implies σ1(F) ≤ τ on the cells."""
        target = target[self.owner[cells.block]]
        if self.cap is None:
            wanted = target * np.cos(cells.angle) * (1 - 8 * UNIT)
        else:
            # arccos loses half its digits near 1, hence the slack.
            angle = np.arccos(np.minimum(target / self.cap, 1.0)) + cells.angle + 1e-7
            wanted = self.cap * (np.cos(np.minimum(angle, math.pi / 2)) - 8 * UNIT)
            wanted = np.where(cells.angle > 0, wanted, target)
        return (np.maximum(wanted, 0.0) ** 2 - self.field.error[cells.block]) * (1 - 8 * UNIT)

    def _prove(
        self, cells: Cells, known: Floats | None = None, target: Floats | None = None
    ) -> tuple[Cells, Floats]:
        """Return the cells for which σ1(F(c)) < τ·cos θ was not proved, with estimates of λ1(FF*).

        Cells whose ``known`` λ1 is too large are not tested. Cells that fail get an estimate,
        unless ``known`` or ``target`` is given.
        """
        limit = self._limit(cells, self._target() if target is None else target)
        value = np.zeros(len(cells)) if known is None else known
        tried = ((limit > 0) & (value < limit)).nonzero()[0]
        passed = np.zeros(len(cells), dtype=bool)
        estimates = known is None and target is None
        rest = self._prove_in_single(cells, limit, tried, passed)
        for part in self.field.chunks(len(rest)):
            self._prove_part(cells, limit, rest[part], passed, value if estimates else None)
        if estimates and self.field.device.type == "cpu":
            failed = tried[~passed[tried]]
            for part in self.field.chunks(len(failed)):
                self._estimate(cells, limit, failed[part], value)
        if known is None:
            self.peak.count(cells.block)
        return cells[~passed], value[~passed]

    def _prove_in_single(
        self, cells: Cells, limit: Floats, at: Integers, passed: NDArray[np.bool_]
    ) -> Integers:
        """Decide cells in single precision where possible; return the others."""
        block, angle = cells.block[at], cells.angle[at]
        suits = self.single.suits(block, angle, limit[at])
        chosen = at[suits]
        if not len(chosen):
            return at
        answer = self.single.prove(
            block[suits], cells.frequency[chosen], limit[chosen], angle[suits]
        )
        passed[chosen] = answer == YES
        return np.sort(np.concatenate([at[~suits], chosen[answer == UNDECIDED]]))

    def _prove_part(
        self,
        cells: Cells,
        limit: Floats,
        at: Integers,
        passed: NDArray[np.bool_],
        value: Floats | None,
    ) -> None:
        field = self.field
        # Cholesky of I − Ĝ/t succeeding means λ1(Ĝ) ≤ t(1 + factor·tr(I − Ĝ/t)) ≤ t(1 + n·factor).
        scale = 1 / (limit[at] * (1 - field.rows * self.factor))
        if self.triangular:
            passed[at] = self.triangles.positive(cells.block[at], cells.frequency[at], scale)
            return
        gaps = field.gap(cells.block[at], cells.frequency[at], scale)
        passed[at] = positive(gaps)
        lost = (~passed[at]).nonzero()[0]
        if value is not None and len(lost) and gaps.device.type != "cpu":
            self._estimate(cells, limit, at[lost], value, pick(gaps, lost))

    def _estimate(
        self,
        cells: Cells,
        limit: Floats,
        at: Integers,
        value: Floats,
        gaps: Tensor | None = None,
    ) -> None:
        """Estimate λ1, which is at least the limit, and its vectors at cells that failed."""
        start = pick(cells.left, at)
        if gaps is None:  # the factorization has overwritten them
            place = cells.block[at], cells.frequency[at], 1 / limit[at]
            least, left = self._bottom_eigenpairs(*place, start)
        else:
            least, left = bottom_eigenpairs(gaps, start, LOOK)
        value[at] = np.maximum(1 - least, 1) * limit[at]
        cells.left[self.field.send(at)] = left

    def _bottom_eigenpairs(
        self, block: Integers, frequency: Floats, scale: Floats, start: Tensor
    ) -> tuple[Floats, Tensor]:
        """Bottom eigenpairs of I − scale·FF*, in single precision if accurate enough."""
        if self.triangular and self.rtol >= 1e-4:
            found = self.single.triangles.bottom_eigenpairs(block, frequency, scale, start, LOOK)
            if not np.isnan(found[0]).any():
                return found
        return bottom_eigenpairs(self.field.gap(block, frequency, scale), start, LOOK)

    def _largest(self, per_block: Floats) -> Floats:
        """Maximum of non-negative numbers over each layer's blocks: ``(layers,)``."""
        result = np.zeros(self.layers)
        np.maximum.at(result, self.owner, per_block)
        return result

    def _look(self, cells: Cells) -> Floats:
        """Estimate λ1(FF*) and its vectors at the centres, from random vectors."""
        field = self.field
        value = np.empty(len(cells))
        steps = FIRST if math.prod(field.sizes) > 1 else MANY  # a matrix is a single cell
        for part in field.chunks(len(cells)):
            block, scale = cells.block[part], 1 / field.usual[cells.block[part]]
            gaps = field.gap(block, cells.frequency[part], scale)
            least, cells.left[part] = bottom_eigenpairs(gaps, cells.left[part], steps)
            value[part] = np.nan_to_num((1 - least) / scale, nan=0.0)  # 0 if there is no estimate
        self.peak.count(cells.block)
        return value

    def _give_up(self, cells: Cells) -> Floats:
        """Raise τ until the remaining cells are proved; the interval stays certified."""
        # σ1(F) ≤ ‖Σ|K|‖_F at every frequency, so larger targets need no proof.
        ceiling = self._largest(self.field.size * (1 + 1e-9))
        target, growth = self._target().copy(), self.rtol
        while True:
            failed = np.unique(self.owner[self._prove(cells, target=target)[0].block])
            failed = failed[target[failed] < ceiling[failed]]
            if not len(failed):
                return np.minimum(target, ceiling)
            raised = np.maximum(target[failed] * (1 + growth), 1e-3 * ceiling[failed])
            target[failed] = raised
            growth *= 1.5
