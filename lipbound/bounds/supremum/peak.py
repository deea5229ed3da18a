"""The lower end of a search: the best attained value of every layer, and the way up to it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import UNIT, gamma_complex, symbol_error
from lipbound.bounds.supremum.cells import Cells, pick
from lipbound.bounds.supremum.eigen import bottom_eigenpairs, top_eigenpairs, uphill
from lipbound.bounds.supremum.field import Field, Floats, Integers
from lipbound.runtime import one_blas_thread

FEW, MANY = 8, 48  # Krylov spaces: while climbing, and where that fell short
ALL = 1 << 30  # a full eigenvalue decomposition


class Peak:
    """Where each layer's largest value has been attained, and with which left vector.

    Attributes:
        lower: ``(layers,)`` attained, rounded down.
        block: ``(layers,)`` of the field.
        frequency: ``(layers, D)``.
        left: ``(layers, n)``, unit vectors.
        evaluations: ``(layers,)`` symbols looked at so far, by whomever.

    Args:
        field: The symbols.
        owner: ``(blocks,)`` the layer each belongs to.
        layers: How many layers.
        rtol: What a search wants to know it to.
        moves: Whether frequencies may be left for better ones.
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
        """Symbols of these blocks have been looked at."""
        self.evaluations += np.bincount(self.owner[block], minlength=len(self.lower))

    def raise_from(self, cells: Cells, value: Floats, retries: int = 0) -> None:
        """Where a centre beats its layer's lower end, climb from the best one."""
        layer = self.owner[cells.block]
        order = np.lexsort((value, layer))
        last = np.append(layer[order][1:] != layer[order][:-1], True)
        best = order[last]  # one cell for every layer that has any
        # A lower end short by less than this costs nothing: τ leaves it room.
        lower = self.lower[layer[best]]
        short = (np.sqrt(np.maximum(value[best], 0)) > lower * (1 + self.rtol / 4)) | (lower == 0)
        # Cells this small fail only where σ1 exceeds the lower end: look harder there.
        small = np.cos(cells.angle[best]) > 1 - self.rtol / 4
        if short.any():
            best, steps = best[short], FEW
        elif small.any():
            best, steps = best[small], ALL if retries else MANY
        else:
            return
        left = pick(cells.left, best)
        reach = np.maximum(cells.angle[best], 1e-6)
        self._climb(layer[best], cells.block[best], cells.frequency[best], left, reach, steps)

    def _climb(
        self,
        layers: Integers,
        block: Integers,
        frequency: Floats,
        left: Tensor,
        reach: Floats,
        steps: int,
        rounds: int = 4,
    ) -> None:
        """Alternate: singular vectors u, v at a frequency, then the frequency for that u and v.

        Re u*F(ω)v is a scalar polynomial in ω, so the second half is nearly free.
        """
        field = self.field
        for turn in range(rounds):
            if turn or steps > FEW:
                left = self._vectors(block, frequency, left, self.lower[layers], steps)
                self.count(block)
            before = self.lower[layers]
            rows = field.rows_applied(block, left)  # (Q, N, T): u*K_h
            right = (rows @ field.waves(frequency)[..., None])[..., 0].conj()  # F*u
            self._record(layers, block, frequency, left.cpu().numpy(), right)
            done = self.lower[layers] <= before * (1 + 1e-3 * self.rtol)
            if not self.moves or (turn and done.all()):
                return  # on a grid, or without one, the frequency stays where it is
            coefficients = (rows.swapaxes(1, 2) @ right[..., None])[..., 0]
            frequency = uphill(coefficients, field.positions, frequency, reach / 2**turn)

    def _vectors(
        self, block: Integers, frequency: Floats, left: Tensor, lower: Floats, steps: int
    ) -> Tensor:
        """Top left singular vectors of F, from vectors close to them."""
        level = np.where(lower > 0, np.maximum(lower**2, 1e-290), self.field.usual[block])
        gaps = self.field.gap(block, frequency, 1 / level)
        if steps > MANY or (steps == MANY and self.rtol < 1e-6):
            return top_eigenpairs(gaps.neg_(), left, steps)[1]
        return bottom_eigenpairs(gaps, left, steps)[1]

    @one_blas_thread()
    def polish(self) -> None:
        """Newton's method from every layer's peak: the place and vectors a gradient needs.

        λ1(FF*) has the gradient of u*FF*u at its vector u; the second derivatives are differences
        of it.
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
                level = 1e-8 * np.abs(values).max(initial=0.0)  # what differences can tell from 0
                steep = values < -level
                if not steep.any() or (values > level).any():
                    break
                along = axes[:, steep]  # a ridge has no place of its own along the others
                frequency = frequency - along @ (along.T @ slope[0] / values[steep])

    def _record(
        self,
        layers: Integers,
        block: Integers,
        frequency: Floats,
        left: NDArray[np.complex128],
        image: NDArray[np.complex128],
        always: bool = False,
    ) -> None:
        """‖F(ω)*u‖/‖u‖ rounded down, kept where it is a layer's best (or equal but for rounding).

        The image is off by the symbol's rounding and by inner products over rows and taps, both
        relative to ‖Σ|K|‖_F ‖u‖.
        """
        field = self.field
        norm = np.linalg.norm(left, axis=-1)
        count = len(field.positions)
        error = symbol_error(field.sizes) + gamma_complex(field.rows + count + field.columns + 32)
        lower = np.linalg.norm(image, axis=-1) / norm * (1 - 64 * UNIT)
        lower = lower - 2 * error * field.size[block]
        better = lower >= self.lower[layers] * (1 - 1e-12 * always)
        kept = layers[better]
        self.lower[kept] = np.maximum(lower[better], self.lower[kept])
        self.block[kept] = block[better]
        self.frequency[kept] = frequency[better]
        self.left[kept] = (left / norm[:, None])[better]
