r"""Choose the multipliers of the stages: any positive ones give a bound, good ones a small bound.

A stage has variables: its source z₀ and its activations aᵢ = Dᵢuᵢ, where uᵢ is linear in earlier
variables and the slopes Dᵢ lie in [l, h]. For positive diagonal Tᵢ the form

.. math:: m_i = 2(l + h)\,\mathrm{Re}\, a_i^*T_iu_i - 2a_i^*T_ia_i - 2lh\,u_i^*T_iu_i

is a sum of numbers 2t(h − d)(d − l)|u|² ≥ 0. So if z₀*Pz₀ − y*Xy − Σmᵢ ≥ 0 for all values of the
variables, where y is the result of the stage, then y*Xy ≤ z₀*Pz₀ on all differences. P of one stage
is X of the stage before it: any symmetric matrix on the channels, the same for all pixels. It need
not be a diagonal, because no slopes are between the stages. The form splits into one for each
frequency.

Eliminating the variables from the last to the first gives the smallest P for given multipliers: a
linear value is replaced by what it is, and an activation by its maximizer. Then
Tᵢ = λ·exp(tᵢ)·(1 + exp(εᵢ))/2, with λ the largest eigenvalue of exp(−tᵢ/2)·Q·exp(−tᵢ/2), always
makes the maximum finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipbound.network.lipsdp.laurent import Laurent
from lipbound.network.lipsdp.stages import Stage
from lipbound.runtime import Progress, check_time, silent, time_is_up
from lipbound.symbols import grid, radians

STEPS = 200  # at least
EACH = 13  # steps for each activation of a deep network
RATE = 0.08  # of Adam
MIXING = 4.0  # rate of the entries of a matrix P, relative to that of a logarithm over its size
EVERY = 5  # steps between searches for the frequencies that decide
KEPT = 6  # searches whose frequencies are kept
MEAN = 0.75  # share of the steps after which the mean of the multipliers begins
NOTHING = 1e-12  # share of a matrix in the largest eigenvalue that counts as 0
FINE = 35  # samples of the grid on which multipliers are fixed
Largest = Callable[[Tensor], Tensor]
"""Maps Hermitian matrices ``(P, n, n)`` ≥ 0 to the logarithm of their largest eigenvalue."""


@dataclass
class Fixed:
    """Multipliers of one stage: ``weights`` of its result, ``inner`` of activations, ``source``."""

    weights: Tensor  # X: a symmetric matrix
    inner: dict[int, Tensor]  # Tᵢ: diagonals
    source: Tensor  # P: a symmetric matrix
    basis: Tensor  # S with S*PS near the identity

    def scaled(self, op: Laurent, variable: int) -> Laurent:
        """Return an operator on a variable that is scaled so that its multiplier is near 1."""
        if variable:
            return op.scaled(right=self.inner[variable].rsqrt())
        return op @ Laurent.pointwise(self.basis, op.taps.ndim - 2)


class Multipliers:
    """Free parameters of the multipliers of consecutive stages.

    They are logarithms of diagonals and, for the matrices P, the entries below the diagonal. The
    first stage's P is a multiple of the identity, and the last one's X is the identity.
    """

    def __init__(self, stages: Sequence[Stage]):
        self.stages = list(stages)
        device = stages[0].device

        def free(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.float64, device=device, requires_grad=True)

        self.inner = [
            {i: (free(int(s.ties[i].max()) + 1), free(1)) for i in s.activations} for s in stages
        ]
        channels = [int(s.ties[0].max()) + 1 for s in stages]
        self.sources = [free(n) for n in channels]
        self.mixing = [free(n, n) if index else free(0, 0) for index, n in enumerate(channels)]
        sizes = [op.norm() for s in stages for terms in s.terms for _, op in terms]
        usual = all(1e-3 < size < 1e4 for size in sizes)
        self.dtype = torch.complex64 if usual else torch.complex128

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameters with their rates; many entries of a matrix change together."""
        pairs = [pair for inner in self.inner for pair in inner.values()]
        numbers = [*self.sources[1:], *(number for pair in pairs for number in pair)]
        return [
            {"params": numbers, "lr": RATE},
            *({"params": [m], "lr": MIXING * RATE / len(m)} for m in self.mixing[1:]),
        ]

    def root(self, index: int) -> Tensor:
        """Return B of a stage, lower triangular: its P is a multiple of BBᵀ at every pixel."""
        eye = torch.eye(len(self.sources[index]), dtype=torch.float64).to(self.sources[index])
        if not index:
            return eye
        return (self.sources[index] / 2).exp()[:, None] * (eye + self.mixing[index].tril(-1))

    def log_bound(self, points: Sequence[Tensor], largest: Sequence[Largest]) -> Tensor:
        """Return log L² from frequencies ``(P, D)`` of each stage, and a function for each."""
        logs, weights = torch.zeros((), dtype=torch.float64), None
        for index in reversed(range(len(self.stages))):
            stage = self.stages[index]
            if weights is None:
                weights = torch.eye(stage.sizes[-1], dtype=torch.float64, device=stage.device)
            with torch.no_grad():
                size = weights.diagonal().max().clamp_min(1e-300)
            form, _ = eliminated(
                stage, weights / size, points[index], self.inner[index], largest[index],
                dtype=self.dtype,
            )  # fmt: skip
            if index:
                root = self.root(index)
                form = _whitened(form, stage, root)
                weights = root @ root.mT
            logs = logs + size.log() + largest[index](form)
        return logs

    def weights_before(self, index: int, fixed: Fixed) -> Tensor:
        """Return X of the stage before a stage with these multipliers."""
        first = self.stages[index].places == 0
        return fixed.source[first][:, first]


def _weighted(form: Tensor, logs: Tensor) -> Tensor:
    root = (-logs / 2).exp()
    return form * (root[:, None] * root[None, :]).to(form.dtype)


def _whitened(form: Tensor, stage: Stage, root: Tensor) -> Tensor:
    """Return B⁻¹·form·B⁻ᵀ, with a lower triangular B on the channels of the source."""
    inverse = _inverse(stage, root).to(form)
    return inverse @ form @ inverse.mT


def _inverse(stage: Stage, root: Tensor) -> Tensor:
    eye = torch.eye(len(root)).to(root)
    return stage.at_every_pixel(torch.linalg.solve_triangular(root, eye, upper=False))


def eliminated(
    stage: Stage,
    weights: Tensor,
    frequencies: Tensor,
    parameters: dict[int, tuple[Tensor, Tensor]],
    largest: Largest,
    slack: float = 0.0,
    dtype: torch.dtype = torch.complex128,
    timed: bool = False,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return max (y*Xy + Σmᵢ) as a form in the source, ``(P, n, n)``, and the multipliers.

    The form is multiplied by 1 + slack before each elimination. If ``timed``, a time limit that
    has passed ends it.
    """
    last = len(stage.sizes) - 1
    form = Blocks({(last, last): weights.to(dtype)[None]})
    chosen: dict[int, Tensor] = {}
    for node in reversed(range(1, last + 1)):
        if not form.has(node):
            continue
        if timed:
            check_time()
        own, across = form.pop(node)
        if stage.inputs[node] < 0:
            symbols = [(j, _symbol(op, frequencies, dtype)) for j, op in stage.terms[node]]
            for j, one in symbols:
                for k, block in across.items():
                    # z*Qx + x*Q*z becomes a block of its own, or twice one on the diagonal.
                    form.add(j, k, _times(block.mH, one).mH * (2.0 if j == k else 1.0))
                product = _times(own, one)
                for k, other in symbols:
                    if k <= j:
                        form.add(j, k, _times(product.mH, other))
            continue
        own = own * (1 + slack)
        tie = stage.ties[node]
        shape, excess = parameters[node]
        level = largest(_weighted(own, shape[tie]))
        number = (shape[tie] + level).exp() * (1 + excess.exp()) / 2
        chosen[node] = number
        before, slopes = stage.inputs[node], stage.slopes[node]
        assert slopes is not None
        low, high = slopes
        if before in across:
            across[before] = across[before] + torch.diag((low + high) * number).to(dtype)
        else:
            across[before] = torch.diag((low + high) * number).to(dtype)[None]
        pivot = torch.diag(2 * number).to(dtype) - own
        factor, failed = torch.linalg.cholesky_ex(pivot)
        if bool(failed.any()):  # only for numbers near the end of the range
            factor = torch.full_like(factor, math.nan)
        solved = {
            k: torch.linalg.solve_triangular(factor, r, upper=False) for k, r in across.items()
        }
        for j, one in solved.items():
            for k, other in solved.items():
                if k <= j:
                    form.add(j, k, one.mH @ other)
        if bool((low * high != 0).any()):
            form.add(before, before, torch.diag(-2 * low * high * number).to(dtype)[None])
    return form.pop(0)[0] * (1 + slack), chosen


class Blocks:
    """A Hermitian form on several nodes: its blocks on and below the diagonal."""

    def __init__(self, blocks: dict[tuple[int, int], Tensor]):
        self.blocks = blocks

    def has(self, node: int) -> bool:
        return (node, node) in self.blocks

    def add(self, row: int, column: int, block: Tensor) -> None:
        """Add a block, and its adjoint on the other side of the diagonal.

        A block on the diagonal counts by its Hermitian part.
        """
        if row < column:
            row, column, block = column, row, block.mH
        known = self.blocks.get((row, column))
        self.blocks[row, column] = block if known is None else known + block

    def pop(self, node: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Remove the last node; return its own block, and its row of blocks with the others."""
        own = self.blocks.pop((node, node))
        own = (own + own.mH) / 2
        names = [k for j, k in self.blocks if j == node]
        return own, {k: self.blocks.pop((node, k)) for k in names}


def _symbol(op: Laurent, frequencies: Tensor, dtype: torch.dtype) -> Tensor | float:
    """Return the symbol of an operator, or a number for a multiple of the identity."""
    if op.multiple is not None:
        return op.multiple
    return op.symbol(frequencies, dtype)


def _times(block: Tensor, symbol: Tensor | float) -> Tensor:
    return block * symbol if isinstance(symbol, float) else block @ symbol


class Peaks:
    """The logarithm of the largest eigenvalue of all matrices; remembers which matrix had it."""

    def __init__(self) -> None:
        self.places: set[int] = set()

    def __call__(self, matrices: Tensor) -> Tensor:
        above = LogSchatten.traces(matrices, 8)[0] / 2**8  # at least the logarithm of each
        best, place = torch.full_like(above[0], -math.inf), 0
        for some in above.argsort(descending=True).split(8):  # eigvalsh is slow
            if above[some[0]] <= best:
                break
            values = torch.linalg.eigvalsh(matrices[some])[:, -1].double().clamp_min(1e-280).log()
            if values.max() > best:
                best, place = values.max(), int(some[values.argmax()])
        if len(matrices) > 1:
            self.places.add(place)
        return best


def smoothly(powers: int) -> Largest:
    """Return a smooth function that is at least as large: log Σ tr(G^q) / q, q = 2^powers."""

    def largest(matrices: Tensor) -> Tensor:
        if len(matrices) > 1:  # squaring is faster than a batch of eigenvalue problems
            return LogSchatten.apply(matrices, powers)
        if not bool(matrices.detach().abs().sum().isfinite()):
            return torch.full((), math.nan, dtype=torch.float64)  # eigvalsh would raise an error
        values = torch.linalg.eigvalsh(matrices[0]).double().clamp_min(1e-280)
        return (2**powers * values.log()).logsumexp(0) / 2**powers

    return largest


def _diagonals(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).real


def _positive(number: Tensor) -> Tensor:
    """Replace 0 by 1: a layer can be zero."""
    return number.where(number > 0, 1)


class LogSchatten(torch.autograd.Function):
    """log Σ tr(G^q) / q with q = 2^powers, over Hermitian G ≥ 0, by squaring.

    Powers of G commute, so the gradient needs one matrix product per squaring. Each matrix is
    scaled by itself before it is squared, and matrices that do not matter have gradient 0: so no
    number becomes subnormal, which is slow.
    """

    @staticmethod
    def traces(matrices: Tensor, powers: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Return log tr(G^q) for each matrix, and what the gradient needs."""
        kept, scales = [], []
        logs = torch.zeros(len(matrices), dtype=torch.float64, device=matrices.device)
        for power in range(powers):
            scale = _positive(_diagonals(matrices).amax(-1))  # no entry is larger
            matrices = matrices / scale[:, None, None]
            kept.append(matrices)
            scales.append(scale)
            logs = logs + scale.double().log() * 2.0 ** (powers - power)
            matrices = matrices @ matrices
        total = _positive(_diagonals(matrices).sum(-1))
        return logs + total.double().log(), total, kept, scales

    @staticmethod
    def forward(ctx: Any, matrices: Tensor, powers: int) -> Tensor:
        logs, total, kept, scales = LogSchatten.traces(matrices, powers)
        ctx.save_for_backward(logs, total, *kept, *scales)
        return logs.logsumexp(0) / 2**powers

    @staticmethod
    def backward(ctx: Any, grown: Tensor) -> tuple[Tensor, None]:
        logs, total, *rest = ctx.saved_tensors
        powers = len(rest) // 2
        shares = logs.softmax(0)
        shares = shares.where(shares > NOTHING, 0.0).to(total)
        slope = None
        for matrices, scale in zip(reversed(rest[:powers]), reversed(rest[powers:]), strict=True):
            factor = (2 / scale)[:, None, None]
            slope = (matrices if slope is None else matrices @ slope) * factor
        assert slope is not None
        return slope * (shares * grown / (total * 2**powers))[:, None, None], None


def frequencies(stage: Stage, samples: int, draw: torch.Generator | None = None) -> Tensor:
    """Return a grid of frequencies, shifted at random if a generator is given."""
    operators = [op for terms in stage.terms for _, op in terms]
    reach = [
        max((max(abs(op.first[axis]), abs(op.last[axis])) for op in operators), default=0)
        for axis in range(stage.dims)
    ]
    counts = tuple(samples * max(1, r) if r else 1 for r in reach)
    points = radians(grid(counts, half=True), counts)
    if draw is not None and stage.dims:
        points = points + torch.rand(stage.dims, generator=draw, dtype=torch.float64) * (
            2 * math.pi / torch.tensor(counts, dtype=torch.float64)
        )
    return points.to(stage.device)


def optimised(
    stages: Sequence[Stage],
    steps: int | None = None,
    samples: int = 7,
    progress: Progress = silent,
) -> Multipliers:
    """Minimize the bound over the multipliers by Adam.

    A coarse grid that is shifted at random misses the highest peaks. So every few steps a finer
    grid is searched for the frequencies that decide the bound, and these are kept for a while. The
    frequency that decides changes from step to step, so the multipliers swing; their mean over the
    last steps is better than the last ones. It stops early when the bound has not fallen for some
    time.
    """
    found = Multipliers(stages)
    groups = found.groups()
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not parameters:  # a single stage without activations
        return found
    dense = not any(stage.dims for stage in stages)
    depth = sum(len(stage.activations) for stage in stages)
    steps = steps or max(STEPS, EACH * depth)
    found.dtype = torch.float64 if dense else found.dtype
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-3)
    draw = torch.Generator().manual_seed(0)
    recent: list[float] = []
    peaks: list[list[Tensor]] = [[] for _ in stages]
    means, summed = [torch.zeros_like(p) for p in parameters], 0
    for step in progress(range(steps), "multipliers"):
        if time_is_up() or _settled(recent):  # any multipliers are valid
            break
        powers = round(5 + 4 * min(1.0, 1.25 * step / steps))
        if step % EVERY == EVERY - 1 and not dense:
            for kept, new in zip(peaks, deciding(found, samples * 3, draw), strict=True):
                kept.append(new)
                del kept[:-KEPT]
        points = [
            torch.cat([frequencies(stage, samples, draw), *kept])
            for stage, kept in zip(stages, peaks, strict=True)
        ]
        optimizer.zero_grad()
        loss = found.log_bound(points, [smoothly(powers)] * len(stages))
        if not bool(torch.isfinite(loss)):
            break
        loss.backward()
        optimizer.step()
        schedule.step()
        recent.append(float(loss.detach()))
        if step >= MEAN * steps:
            summed += 1
            for mean, parameter in zip(means, parameters, strict=True):
                mean += (parameter.detach() - mean) / summed
    if summed:
        for mean, parameter in zip(means, parameters, strict=True):
            parameter.data.copy_(mean)
    return found


@torch.no_grad()
def deciding(found: Multipliers, samples: int, draw: torch.Generator) -> list[Tensor]:
    """Return for each stage the frequencies of a fine grid at which eigenvalues are largest."""
    points = [frequencies(stage, samples, draw) for stage in found.stages]
    peaks = [Peaks() for _ in found.stages]
    found.log_bound(points, peaks)
    return [p[sorted(peak.places)] for p, peak in zip(points, peaks, strict=True)]


def _settled(recent: Sequence[float], span: int = 40) -> bool:
    """Tell whether the mean over the last steps is as high as that before them."""
    if len(recent) < 3 * span:
        return False
    noise = max(recent[-span:]) - min(recent[-span:])  # of the grids, which are drawn at random
    late, soon = sum(recent[-span:]) / span, sum(recent[-2 * span : -span]) / span
    return late > soon - 1e-4 and noise < 1e-2


@torch.no_grad()
def fixed(multipliers: Multipliers, index: int, weights: Tensor, slack: float) -> Fixed:
    """Return the multipliers of a stage as numbers, which hold on a fine grid with some room."""
    stage = multipliers.stages[index]
    points = frequencies(stage, FINE)
    form, inner = eliminated(
        stage, weights, points, multipliers.inner[index], Peaks(), slack, timed=True
    )
    root = multipliers.root(index)
    if index:
        form = _whitened(form, stage, root)
    level = Peaks()(form) + math.log1p(slack)
    number = root @ root.mT * level.exp()
    source = stage.at_every_pixel((number + number.mT) / 2)
    return Fixed(weights, inner, source, _inverse(stage, root).mT * (-level / 2).exp())
