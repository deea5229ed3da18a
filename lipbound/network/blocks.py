r"""A tighter bound for chains of residual blocks, from two weighted norms per block.

A block x ↦ Sx + W₂φ(W₁x) with slopes of φ in [0, 1] moves differences by S + W₂DW₁ with D
diagonal, 0 ≤ D ≤ 1. (Zero padding is a D that vanishes outside the image: on the infinite grid
all three are Toeplitz operators with symbols.) With D = ½(I + N), ‖N‖ ≤ 1, and any positive
diagonal Q, Λ and P_i, P_o on the channels,

.. math:: P_o(S + W_2DW_1)P_i^{-1} = \begin{pmatrix} P_o(S + \tfrac12W_2W_1)Q^{-1} &
    \tfrac12P_oW_2\Lambda^{-1}\end{pmatrix} \begin{pmatrix} I & \\ & N \end{pmatrix}
    \begin{pmatrix} Q \\ \Lambda W_1 \end{pmatrix} P_i^{-1},

so its norm is at most the norm of the left factor times the norm of the right one. Both have
symbols. A ReLU after the sum commutes with the weights, so P_o of one block is P_i of the next and
the chain's bound is the product. Any weights give a valid bound: gradient descent on an estimate
chooses them, and then the norms of the symbols are bracketed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipbound.bounds import brackets
from lipbound.bounds.rounding import norm_above
from lipbound.geometry import Layer
from lipbound.network.rules import Linear, Step, Value
from lipbound.network.rules.values import up
from lipbound.runtime import Progress, silent, time_is_up
from lipbound.symbols import evaluate, grid, positions, radians

ROUNDING = 2.0**-40  # thousands of float64 roundings
RELU = ("aten.relu", "aten.relu_")
PASSES = ("aten.view", "aten.reshape", "aten.flatten", "aten.adaptive_avg_pool2d", "aten.mean",
          "aten.squeeze", "aten.clone")  # fmt: skip


@dataclass(frozen=True)
class Laurent:
    """A matrix-valued trigonometric polynomial: its taps and the position of the first one."""

    taps: Tensor  # (rows, columns, *m), float64
    first: tuple[int, ...]

    def __matmul__(self, other: Laurent) -> Laurent:
        sizes = [a + b - 1 for a, b in zip(self.taps.shape[2:], other.taps.shape[2:], strict=True)]
        result = self.taps.new_zeros(self.taps.shape[0], other.taps.shape[1], *sizes)
        for a in positions(self.taps.shape[2:]).tolist():
            where = tuple(slice(i, i + n) for i, n in zip(a, other.taps.shape[2:], strict=True))
            result[:, :, *where] += torch.einsum("ij,j...->i...", self.taps[:, :, *a], other.taps)
        first = tuple(a + b for a, b in zip(self.first, other.first, strict=True))
        return Laurent(result, first)


def together(*parts: Laurent) -> list[Tensor]:
    """Return the taps of several polynomials inside zeros, with the same size and position."""
    dims = range(len(parts[0].first))
    first = [min(p.first[d] for p in parts) for d in dims]
    last = [max(p.first[d] + p.taps.shape[2 + d] for p in parts) for d in dims]
    sizes = [b - a for a, b in zip(first, last, strict=True)]
    placed = []
    for p in parts:
        ends = zip(p.first, first, p.taps.shape[2:], strict=True)
        where = [slice(a - b, a - b + n) for a, b, n in ends]
        placed.append(p.taps.new_zeros(*p.taps.shape[:2], *sizes))
        placed[-1][:, :, *where] = p.taps
    return placed


@dataclass
class Block:
    """S, W₁, W₂ as polynomials on the lattice of the block's output."""

    shortcut: Laurent
    one: Laurent
    two: Laurent
    phases: int

    def middle(self) -> Tensor:
        """Return S + ½W₂W₁ and ½W₂ side by side, ``(out, in·phases + mid, *m)``."""
        product = self.two @ self.one
        s, p, w = together(self.shortcut, product, self.two)
        return torch.cat([s + p / 2, w / 2], 1)

    def sizes(self) -> Tensor:
        """Return :meth:`middle` of the absolute values, to which its rounding is relative."""
        s, one, two = (Laurent(x.taps.abs(), x.first) for x in (self.shortcut, self.one, self.two))
        return Block(s, one, two, self.phases).middle()

    def right(self) -> Tensor:
        """Return I stacked on W₁, ``(in·phases + mid, in·phases, *m)``."""
        columns = self.one.taps.shape[1]
        eye = torch.eye(columns, dtype=torch.float64, device=self.one.taps.device)
        identity = Laurent(
            eye.reshape(*eye.shape, *[1] * len(self.one.first)), tuple(0 for _ in self.one.first)
        )
        return torch.cat(together(identity, self.one), 0)


@dataclass
class Chain:
    """A network that consists of a convolution, ReLU, blocks, pooling and a Linear layer.

    Attributes:
        start: Lipschitz bound of the map from the network's input to the first convolution's.
        first: Taps of the first convolution's kernel, with its stride split into phases.
        blocks: The residual blocks in order.
        pool: Gain from the last block's output to the Linear layer's input.
        head: The Linear layer's matrix.
    """

    start: float
    first: Tensor
    blocks: list[Block]
    pool: float
    head: Tensor


def find_chain(output: Value) -> Chain | None:
    """Return the chain that ends in this value, or ``None`` if the network is not a chain."""
    last = output.linear
    if last is None or last.conv.dims != 0:
        return None
    value, head = last.anchor, last.conv.kernel
    if len(value.shape) != 2 or last.slack:
        return None
    pooled = value
    while value.origin is not None and value.origin.call.op in PASSES:
        if not _keeps_channels(value.origin):
            return None
        value = value.origin.inputs()[0]
    if value.shape[1] != head.shape[1] or math.prod(pooled.shape[1:]) != value.shape[1]:
        return None
    pool = pooled.lipschitz / value.lipschitz if value.lipschitz > 0 else 1.0
    blocks: list[Block] = []
    while True:
        found = _block(value)
        if found is None:
            break
        blocks.append(found[0])
        value = found[1]
    inner = _relu_input(value)
    if not blocks or inner is None or inner.linear is None:
        return None
    first = _polynomial(inner.linear)
    if first is None:
        return None
    start = inner.linear.anchor.lipschitz
    return Chain(start, first.taps, blocks[::-1], up(pool * (1 + 1e-12)), head)


def _keeps_channels(step: Step) -> bool:
    """Tell whether the step averages each channel over all pixels or only reshapes the averages.

    An equal count of numbers is not enough: each weight must meet the column of its channel.
    """
    before = step.inputs()[0].shape
    if len(before) < 2 or before[0] != 1:  # there is no batch axis
        return False
    if step.call.op == "aten.mean":
        axes = {int(d) % len(before) for d in step.arguments.get("dim") or ()}
        return axes == set(range(2, len(before)))
    if step.call.op == "aten.adaptive_avg_pool2d":
        return math.prod(step.shape[2:]) == 1
    return math.prod(before[1:]) == before[1]


def _relu_input(value: Value) -> Value | None:
    if value.origin is None or value.origin.call.op not in RELU:
        return None
    return value.origin["self"]


def _block(value: Value) -> tuple[Block, Value] | None:
    total = _relu_input(value)
    if total is None or total.origin is None or total.origin.call.op != "aten.add":
        return None
    step = total.origin
    terms = (step["self"], step["other"])
    if not all(isinstance(t, Value) and t.shape == total.shape for t in terms):
        return None
    if step["alpha"] != 1:
        return None
    for branch, skip in (terms, terms[::-1]):
        hidden = _relu_input(branch.linear.anchor) if branch.linear is not None else None
        if branch.linear is None or hidden is None or hidden.linear is None:
            continue
        source = hidden.linear.anchor
        one, two = _polynomial(hidden.linear), _polynomial(branch.linear)
        stride = hidden.linear.conv.stride
        if one is None or two is None or any(t != 1 for t in branch.linear.conv.stride):
            continue
        shortcut = _shortcut(skip, source, stride, one.taps.device)
        if shortcut is not None:
            return Block(shortcut, one, two, math.prod(stride)), source
    return None


def _polynomial(linear: Linear) -> Laurent | None:
    """Return the operator with its stride split into phases and tap h at h − padding."""
    conv = linear.conv
    if conv.padding_mode != "zeros" or conv.transposed or conv.groups != 1 or conv.dims == 0:
        return None
    if len(linear.anchor.shape) != conv.dims + 2 or linear.anchor.shape[0] != 1 or linear.slack:
        return None  # without a batch axis the second one is not the channels
    if any(a != 1 for a in conv.dilation):
        return None
    return _split(Laurent(conv.kernel, tuple(-p for p, _ in conv.padding)), conv.stride)


def _split(whole: Laurent, stride: Sequence[int]) -> Laurent:
    """Move the tap at t·k + r to position k in column block r (row by row over the axes)."""
    low = [a // t for a, t in zip(whole.first, stride, strict=True)]
    high = [
        (a + n - 1) // t for a, n, t in zip(whole.first, whole.taps.shape[2:], stride, strict=True)
    ]
    rows, columns = whole.taps.shape[:2]
    sizes = [b - a + 1 for a, b in zip(low, high, strict=True)]
    result = whole.taps.new_zeros(rows, math.prod(stride), columns, *sizes)
    for index in positions(whole.taps.shape[2:]).tolist():
        place = [a + i for a, i in zip(whole.first, index, strict=True)]
        phase = 0
        for p, t in zip(place, stride, strict=True):
            phase = phase * t + p % t
        where = tuple(p // t - a for p, t, a in zip(place, stride, low, strict=True))
        result[:, phase, :, *where] = whole.taps[:, :, *index]
    return Laurent(result.flatten(1, 2), tuple(low))


def _shortcut(
    skip: Any, source: Value, stride: Sequence[int], device: torch.device
) -> Laurent | None:
    """Return the shortcut: the source, a convolution of it, or every t-th pixel with padding."""
    zero = tuple(0 for _ in stride)
    ones = [1] * len(stride)
    if skip.linear is not None and skip.linear.anchor is source:
        return _polynomial(skip.linear) if tuple(skip.linear.conv.stride) == tuple(stride) else None
    channels = source.shape[1]
    matrix = torch.eye(channels, dtype=torch.float64, device=device)
    value = skip
    if value is not source and value.padding is not None:
        inner, mode, pairs = value.padding
        if mode != "zeros" or len(pairs) != len(stride) + 1 or any(p != (0, 0) for p in pairs[1:]):
            return None
        before, after = pairs[0]
        matrix = torch.nn.functional.pad(matrix, (0, 0, before, after))
        value = inner
    taken = list(ones)
    while value is not source:
        if value.origin is None or value.origin.call.op != "aten.slice":
            return None
        step = value.origin
        axis = int(step["dim"]) - 2
        if (
            axis < 0
            or (step["start"] or 0) != 0
            or (step["end"] or 0) < step["self"].shape[axis + 2]
        ):
            return None
        taken[axis] *= int(step["step"])
        value = step["self"]
    if tuple(taken) != tuple(stride):
        return None
    return _split(Laurent(matrix.reshape(*matrix.shape, *ones), zero), stride)


class Weights:
    """Positive weights of a chain, stored as logarithms, and the resulting factors."""

    def __init__(self, chain: Chain):
        self.chain = chain
        self.middles = [b.middle() for b in chain.blocks]
        self.rights = [b.right() for b in chain.blocks]
        widths = [chain.first.shape[0], *[len(m) for m in self.middles]]
        self.sides = [self._free(n) for n in widths]
        self.inner = [self._free(r.shape[0]) for r in self.rights]

    def _free(self, count: int) -> Tensor:
        device = self.chain.first.device
        return torch.zeros(count, dtype=torch.float64, device=device, requires_grad=True)

    def factors(self) -> list[Tensor]:
        """Return the kernels whose norms multiply to the bound: first, two per block, head."""
        chain = self.chain
        tail = [1] * (chain.first.ndim - 2)
        kernels = [self.sides[0].exp().reshape(-1, 1, *tail) * chain.first]
        for index, block in enumerate(chain.blocks):
            inner = self.inner[index].exp()
            out = self.sides[index + 1].exp()
            into = self.sides[index].exp().repeat(block.phases)
            middle, right = self.middles[index], self.rights[index]
            kernels.append(out.reshape(-1, 1, *tail) * middle / inner.reshape(1, -1, *tail))
            kernels.append(inner.reshape(-1, 1, *tail) * right / into.reshape(1, -1, *tail))
        kernels.append(chain.head / self.sides[-1].exp()[None, :])
        return kernels


def optimised(
    chain: Chain, steps: int = 240, samples: int = 7, progress: Progress = silent
) -> Weights:
    """Minimize a smooth estimate of the product of the factors' norms over the weights by Adam."""
    weights = Weights(chain)
    parameters = [*weights.sides, *weights.inner]
    optimizer = torch.optim.Adam(parameters, 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 0.002)
    for step in progress(range(steps), "weights"):
        powers = 3 if step < steps // 3 else 5 if step < 2 * steps // 3 else 7
        if time_is_up():  # any weights give a valid bound
            break
        optimizer.zero_grad()
        loss = torch.stack([_estimate(k, samples, powers) for k in weights.factors()]).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
    return weights


def _estimate(kernel: Tensor, samples: int, powers: int) -> Tensor:
    """Estimate log sup σ1 by the symbol's Schatten norm of order 2^(powers + 1) over a grid.

    float32 is enough here, because the resulting bound is proved in float64.
    """
    sizes = kernel.shape[2:]
    counts = tuple(1 if m == 1 else samples for m in sizes)
    size = kernel.detach().abs().amax().clamp_min(1e-300)
    taps = (kernel / size).float()[None]
    symbols = evaluate(taps, radians(grid(counts, half=True), counts))[0]
    if symbols.shape[-2] > symbols.shape[-1]:
        symbols = symbols.mH
    return size.log() + LogSchatten.apply(symbols @ symbols.mH, powers) / 2


def _diagonals(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).real


def _positive(number: Tensor) -> Tensor:
    """Replace 0 by 1: a layer can be zero."""
    return number.where(number > 0, 1)


class LogSchatten(torch.autograd.Function):
    """log Σ tr(G^q) / q with q = 2^powers, over Hermitian G ≥ 0, by squaring.

    Powers of G commute, so the gradient needs one matrix product per squaring.
    """

    @staticmethod
    def forward(ctx: Any, matrices: Tensor, powers: int) -> Tensor:
        log, kept, scales = 0.0, [], []
        for power in range(powers):
            scale = _positive(_diagonals(matrices).amax())  # no entry is larger
            matrices = matrices / scale
            kept.append(matrices)
            scales.append(scale)
            log = log + scale.double().log() / 2**power
            matrices = matrices @ matrices
        total = _positive(_diagonals(matrices).sum())
        ctx.save_for_backward(total, *kept, *scales)
        return log + total.double().log() / 2**powers

    @staticmethod
    def backward(ctx: Any, grown: Tensor) -> tuple[Tensor, None]:
        total, *rest = ctx.saved_tensors
        powers = len(rest) // 2
        *squared, last = rest[:powers]
        *scales, scale = rest[powers:]
        slope = last * (2 / (2**powers * total * scale))
        for matrices, scale in zip(reversed(squared), reversed(scales), strict=True):
            slope = matrices @ slope * (2 / scale)
        return slope * grown.to(slope.real.dtype), None


@torch.no_grad()
def certified(
    chain: Chain, weights: Weights, rtol: float, progress: Progress = silent
) -> tuple[float, Tensor]:
    """Bound the chain up to the Linear layer in the last weighted norm; return its matrix too.

    The bound is valid for any weights. The kernels are sums of a few hundred products in float64;
    the Frobenius norm of the absolute values bounds their rounding errors.
    """
    *kernels, head = weights.factors()
    named: dict[str, Layer] = {str(i): kernel for i, kernel in enumerate(kernels)}
    found = brackets(named, rtol, progress=progress)
    total = up(chain.start * chain.pool)
    for index, kernel in enumerate(kernels):
        size = kernel
        if index % 2 == 1:  # a left factor: its terms may be larger than their sum
            block = index // 2
            tail = [1] * (kernel.ndim - 2)
            out = weights.sides[block + 1].exp().reshape(-1, 1, *tail)
            inner = weights.inner[block].exp().reshape(1, -1, *tail)
            size = out * chain.blocks[block].sizes() / inner
        slack = up(ROUNDING * math.sqrt(kernel[0, 0].numel()) * norm_above(size))
        total = up(total * up(found[str(index)].upper + slack))
    return total, head
