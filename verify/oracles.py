"""True norms of random layers, from dense float64 spectra of whole stacks.

There are two: σ1 of the symbol at one frequency, which long inputs approach with any padding, and
σ1 of the layer's matrix, which is computed with PyTorch's own module. The layer attains both.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipbound.geometry import convolution
from lipbound.symbols import grid, positions, radians, taps
from verify.random_layers import Stack, module

ENTRIES = 1 << 21  # largest number of complex entries of a temporary tensor
MATRICES = 1 << 10  # largest batch: a GPU's solver may take 1 MiB for each matrix
ROUNDS = 16  # number of times the ascent halves its step


class Symbols:
    """The strided symbols of a stack, scaled so that each layer's largest weight is near 1.

    Attributes:
        unit: Powers of two by which the kernels were divided, ``(layers,)``.
        flat: ``(blocks, taps, rows·columns)``, a block for every group of every layer.
    """

    def __init__(self, stack: Stack):
        kernels = stack.doubles()
        largest = kernels.abs().flatten(1).amax(1)
        self.layers = len(kernels)
        self.unit = torch.where(largest > 0, largest, 1.0).log2().floor().exp2()
        kernels = kernels / self.unit.reshape(-1, *[1] * (kernels.ndim - 1))
        groups = stack.options.get("groups", 1)
        options = {**stack.options, "padding_mode": "zeros"} if stack.dims else {}
        one = convolution(kernels[0], **options)
        whole = taps(replace(one, kernel=kernels.flatten(0, 1), groups=self.layers * groups))
        self.blocks, self.rows, self.columns, *self.sizes = whole.shape
        self.flat = whole.reshape(self.blocks, self.rows * self.columns, -1).mT
        self.places = positions(self.sizes).to(self.flat)

    def largest(self, frequencies: Tensor) -> Tensor:
        """Return σ1 at frequencies of each block: ``(blocks, P, D)`` → ``(blocks, P)``."""
        each = max(ENTRIES // MATRICES, self.rows * self.columns)
        step = max(1, ENTRIES // (self.blocks * each))
        parts = []
        for part in frequencies.split(step, 1):
            angles = part @ self.places.mT
            symbol = torch.complex(angles.cos() @ self.flat, angles.sin() @ self.flat)
            parts.append(norms(symbol.unflatten(-1, (self.rows, self.columns))))
        return torch.cat(parts, 1)

    def per_layer(self, values: Tensor) -> Tensor:
        """Return the largest value over groups, unscaled: ``(blocks,)`` → ``(layers,)``."""
        return values.reshape(self.layers, -1).amax(1) * self.unit

    def at(self, frequencies: Tensor) -> Tensor:
        """Return σ1 of every layer at its own frequency: ``(layers, D)`` → ``(layers,)``."""
        each = frequencies.to(self.flat).repeat_interleave(self.blocks // self.layers, 0)
        return self.per_layer(self.largest(each[:, None])[:, 0])

    def peaks(self, start: Tensor) -> Tensor:
        """Return the largest σ1 found per layer from ``start``, ``(layers, D)``, or a grid."""
        return self.per_layer(self.climb(start)[0])

    @torch.no_grad()
    def climb(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Ascend from a grid's best point, or from ``start``, ``(layers, D)``, if that is higher.

        Returns every block's largest σ1, ``(blocks,)``, and its frequency, ``(blocks, D)``.
        """
        per_degree = {0: 1, 1: 8, 2: 4, 3: 3}[len(self.sizes)]
        samples = tuple(max(1, per_degree * (m - 1)) for m in self.sizes)
        points = radians(grid(samples, half=True), samples).to(self.flat)
        start = start.to(self.flat).repeat_interleave(self.blocks // self.layers, 0)
        points = torch.cat([points.expand(self.blocks, *points.shape), start[:, None]], 1)
        best, place = self.largest(points).max(1)
        each = torch.arange(self.blocks, device=place.device)
        here = points[each, place]
        moving = [axis for axis, m in enumerate(self.sizes) if m > 1]
        moves = torch.zeros(2 * len(moving), len(self.sizes)).to(self.flat)
        for row, axis in enumerate(moving):
            reach = math.pi / samples[axis]
            moves[2 * row, axis], moves[2 * row + 1, axis] = reach, -reach
        for _ in range(ROUNDS if moving else 0):
            tried = here[:, None] + moves
            values, place = self.largest(tried).max(1)
            better = values > best
            best = torch.where(better, values, best)
            here = torch.where(better[:, None], tried[each, place], here)
            moves = moves / 2
        return best, here


def norms(matrices: Tensor) -> Tensor:
    """Return σ1 of each matrix, from the eigenvalues of its smaller Gram matrix."""
    rows, columns = matrices.shape[-2:]
    if min(rows, columns) == 1:
        return torch.linalg.vector_norm(matrices, dim=(-2, -1))
    gram = matrices @ matrices.mH if rows <= columns else matrices.mH @ matrices
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt()


@torch.no_grad()
def operator_norms(stack: Stack) -> Tensor:
    """Return σ1 of every layer's matrix at the stack's input size, ``(layers,)``."""
    symbols = stack.doubles()
    unit = symbols.abs().flatten(1).amax(1).clamp_min(1e-300)
    return norms(matrices(stack, unit)) * unit


def matrices(stack: Stack, unit: Tensor) -> Tensor:
    """Return the layers' matrices for kernels divided by ``unit``, ``(layers, outputs, inputs)``.

    All kernels are output channels of one module, which is applied to the unit vectors.
    """
    kernels = stack.doubles()
    kernels = kernels / unit.reshape(-1, *[1] * (kernels.ndim - 1))
    layers = len(kernels)
    if not stack.dims:
        return kernels
    assert stack.size is not None
    groups, transposed = stack.options["groups"], stack.options["transposed"]
    cout, cin = kernels.shape[1:3]
    if transposed:  # (cin, cout / groups, ...)
        weight, channels = kernels.transpose(0, 1).flatten(1, 2), cout
    else:
        weight, channels = kernels.unflatten(1, (groups, -1)).transpose(0, 1), cin * groups
        weight = weight.flatten(0, 2)
    layer: nn.Module = module(weight.contiguous(), stack.options)
    inputs = channels * math.prod(stack.size)
    images = torch.eye(inputs, dtype=torch.float64, device=kernels.device)
    images = layer(images.reshape(inputs, channels, *stack.size))
    each = images.reshape(inputs, groups, layers, -1)  # output channels are groups · layers · own
    return each.permute(2, 1, 3, 0).reshape(layers, -1, inputs)
