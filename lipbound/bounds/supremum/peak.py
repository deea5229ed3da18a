"""Lower end of a search: the best value attained for every layer, and how it is raised."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import UNIT
from lipbound.bounds.supremum.cells import Cells, pick
from lipbound.bounds.supremum.eigen import bottom_eigenpairs, top_eigenpairs, uphill
from lipbound.bounds.supremum.field import Field, Floats, Integers
from lipbound.runtime import one_blas_thread

FEW, MANY = 8, 48  # sizes of Krylov spaces: while climbing, and where that was not enough
ALL = 1 << 30  # a full eigenvalue decomposition
ROUNDS = 4  # turns of climbing from one start


class Peak:
    """Best value attained for each layer, with its frequency and left singular vector.

    Attributes:
        lower: ``(layers,)`` attained values, rounded down.
        block: ``(layers,)`` blocks of the field where they are attained.
        frequency: ``(layers, D)`` frequencies where they are attained.
        left: ``(layers, n)`` left unit vectors.
        evaluations: ``(layers,)`` number of symbols evaluated so far.

    Args:
        field: The symbols.
        owner: ``(blocks,)`` layer that each block belongs to.
        layers: Number of layers.
        rtol: Target relative width of the search.
        moves: Whether frequencies may move to better ones.
    """

    def __init__(self, field: Field, owner: Integers, layers: int, rtol: float, moves: bool):
        self.field, self.owner, self.rtol = field, owner, rtol
        self.moves = moves and math.prod(field.sizes) > 1
        self.lower: Floats = np.zeros(layers)
        self.block: Integers = np.zeros(layers, dtype=np.int64)
        self.frequency: Floats = np.zeros((layers, len(field.sizes)))
        self.left: NDArray[np.complex128] = np.zeros((layers, field.rows), dtype=np.complex128)
        self.evaluations: Integers = np.zeros(layers, dtype=np.int64)

    def count(self, block: Integers) -> None:
        """Count one evaluation for each of these blocks."""
        self.evaluations += np.bincount(self.owner[block], minlength=len(self.lower))

    def raise_from(self, cells: Cells, value: Floats, retries: int = 0) -> None:
        """Climb from the best centre of each layer if it exceeds the lower end."""
        layer = self.owner[cells.block]
        order = np.lexsort((value, layer))
        last = np.append(layer[order][1:] != layer[order][:-1], True)
        best = order[last]  # one cell for every layer that has any
        # A smaller gain is not worth a climb, because τ leaves a margin for it.
        lower = self.lower[layer[best]]
        short = (np.sqrt(np.maximum(value[best], 0)) > lower * (1 + self.rtol / 4)) | (lower == 0)
        # Cells this small fail only where σ1 exceeds the lower end: use more steps there.
        small = np.cos(cells.angle[best]) > 1 - self.rtol / 4
        if short.any():
            best, steps = best[short], FEW
        elif small.any():
            best, steps = best[small], ALL if retries else MANY
        else:
            return
        self._climb(
            layer[best], cells.block[best], cells.frequency[best], pick(cells.left, best),
            reach=np.maximum(cells.angle[best], 1e-6), steps=steps,
        )  # fmt: skip

    def _climb(
        self, layers: Integers, block: Integers, frequency: Floats, left: Tensor,
        *, reach: Floats, steps: int,
    ) -> None:  # fmt: skip
        """Alternate between singular vectors u, v at a frequency and the best frequency for them.

        Re u*F(ω)v is a scalar polynomial in ω, so the second half is nearly free.
        """
        field = self.field
        for turn in range(ROUNDS):
            if turn or steps > FEW:
                left = self._vectors(block, frequency, left, self.lower[layers], steps)
                self.count(block)
            before = self.lower[layers]
            rows = field.rows_applied(block, left)  # (Q, N, T): u*K_h
            right = (rows @ field.waves(frequency)[..., None])[..., 0].conj()  # F*u
            self._record(layers, block, frequency, left.cpu().numpy(), right)
            done = self.lower[layers] <= before * (1 + 1e-3 * self.rtol)
            if not self.moves or (turn and done.all()):
                return  # converged, or the frequency is fixed: on a grid or for a matrix
            coefficients = (rows.swapaxes(1, 2) @ right[..., None])[..., 0]
            frequency = uphill(coefficients, field.positions, frequency, reach / 2**turn)

    def _vectors(
        self, block: Integers, frequency: Floats, left: Tensor, lower: Floats, steps: int
    ) -> Tensor:
        """Compute top left singular vectors of F, starting from vectors close to them."""
        level = np.where(lower > 0, np.maximum(lower**2, 1e-290), self.field.usual[block])
        gaps = self.field.gap(block, frequency, 1 / level)
        if steps > MANY or (steps == MANY and self.rtol < 1e-6):
            return top_eigenpairs(gaps.neg_(), left, steps)[1]
        return bottom_eigenpairs(gaps, left, steps)[1]

    @one_blas_thread()
    def polish(self) -> None:
        """Refine every layer's frequency and vectors by Newton's method, as a gradient needs.

        The gradient of λ1(FF*) is that of u*FF*u at its vector u; second derivatives are finite
        differences of it.
        """
        field, dims = self.field, len(self.field.sizes)
        offsets = np.concatenate([np.zeros((1, dims)), np.eye(dims)]) * 1e-5
        for layer in range(len(self.lower)):
            block = self.block[layer].repeat(dims + 1)
            frequency, left = self.frequency[layer], self.left[layer]
            for _ in range(6):
                places = frequency + offsets
                start = field.send(left[None].repeat(dims + 1, 0))
                lefts = top_eigenpairs(field.gram(block, places), start, MANY)[1]
                rows, waves = field.rows_applied(block, lefts), field.waves(places)
                image = (rows @ waves[..., None])[..., 0]  # (F*u)*
                turned = rows @ (1j * field.positions * waves[..., None])  # (1 + D, N, D)
                slope = 2 * (image.conj()[..., None] * turned).sum(1).real
                left = lefts[0].cpu().numpy()
                self._record(
                    np.array([layer]), block[:1], frequency[None], left[None],
                    image[:1].conj(), always=True,
                )  # fmt: skip
                bend = (slope[1:] - slope[0]) / 1e-5
                values, axes = np.linalg.eigh((bend + bend.T) / 2)
                level = 1e-8 * np.abs(values).max(initial=0.0)  # accuracy of the differences
                steep = values < -level
                if not steep.any() or (values > level).any():
                    break
                along = axes[:, steep]  # along a ridge the maximum is not unique
                frequency = frequency - along @ (along.T @ slope[0] / values[steep])

    def _record(
        self, layers: Integers, block: Integers, frequency: Floats, left: NDArray[np.complex128],
        image: NDArray[np.complex128], *, always: bool = False,
    ) -> None:  # fmt: skip
        """Keep ‖F(ω)*u‖/‖u‖, rounded down, where it is a layer's best (up to rounding)."""
        norm = np.linalg.norm(left, axis=-1)
        lower = np.linalg.norm(image, axis=-1) / norm * (1 - 64 * UNIT)
        lower = lower - self.field.image_error[block]
        better = lower >= self.lower[layers] * (1 - 1e-12 * always)
        kept = layers[better]
        self.lower[kept] = np.maximum(lower[better], self.lower[kept])
        self.block[kept] = block[better]
        self.frequency[kept] = frequency[better]
        self.left[kept] = (left / norm[:, None])[better]
