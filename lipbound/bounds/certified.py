"""Certify sup σ1(F) on both sides: ``bracket``, ``brackets`` and the bound ``spectral``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lipbound.bounds.finite import attained, embedding, grid_maximum, single_tap_gain
from lipbound.bounds.flat import flat
from lipbound.bounds.rounding import UNIT, Scaled, double, gamma
from lipbound.bounds.supremum.cells import Cover
from lipbound.bounds.supremum.field import LAG_BYTES, Field, lag_bytes
from lipbound.bounds.supremum.search import Search
from lipbound.geometry import Convolution, Layer, convolution, named, own_forward
from lipbound.results import Result, digits
from lipbound.runtime import OutOfTime, Progress, check_time, in_pieces, piece, silent
from lipbound.symbols import evaluate, taps

TOGETHER = 1024  # layers of one shape at once; more are no faster and delay the progress bar
LIMIT = 5e9  # limit of cells × (n³ + 1e5); a flat symbol of three axes would never end


@dataclass(frozen=True)
class Bracket(Result):
    """A certified interval: ``lower`` ≤ the true value ≤ ``upper``, in real arithmetic.

    Attributes:
        lower: Lower end, proved: a Rayleigh quotient attained at ``frequency``, rounded down, or a
            bound for every frequency if the symbol is flat.
        upper: Upper end, proved.
        frequency: Frequency of the largest singular value found, radians per axis.
        evaluations: Number of symbols evaluated.
        certified: Whether both ends are proved.
    """

    lower: float
    upper: float
    frequency: tuple[float, ...]
    evaluations: int
    certified: bool = True

    @property
    def width(self) -> float:
        """Relative width, upper/lower − 1."""
        return self.upper / self.lower - 1 if self.lower > 0 else float(self.upper > 0)

    def rows(self) -> list[dict[str, Any]]:
        """Return a single row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        what = "certified" if self.certified else "not certified"
        ends = f"{digits(self.lower, 6, 'down')} to {digits(self.upper, 6, 'up')}"
        return f"{ends} ({what}, relative width {self.width:.1e})"


@dataclass
class _Problem:
    """One layer's symbols, divided by a power of two, which is the product of ``scales``."""

    conv: Convolution
    taps: Tensor  # (groups, n, N, *m), n ≤ N, float64, no gradient
    scales: tuple[float, float]
    zero: bool  # whether the kernel is zero; its taps are then ones
    spread: float  # largest deviation of a row's energy from the mean of its group, relative


@torch.no_grad()
def _problems(
    convs: Mapping[str, Convolution], device: torch.device | str | None = None
) -> dict[str, _Problem]:
    """Normalise the symbols; layers of equal geometry are read together as groups of one layer."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, conv in convs.items():
        kernel = conv.kernel
        kind = (kernel.shape, kernel.dtype, kernel.device, conv.groups, conv.symbol_stride())
        alike.setdefault(kind, []).append(name)
    problems = {}
    for names in alike.values():
        kernels = torch.cat([convs[name].kernel for name in names]).to(device)
        first = convs[names[0]]
        whole = replace(first, kernel=kernels, groups=first.groups * len(names))
        coefficients = _wide(double(taps(whole))).unflatten(0, (len(names), -1))
        largest = torch.linalg.vector_norm(coefficients.flatten(1), math.inf, dim=1).tolist()
        exponents = [math.frexp(most or 1.0)[1] - 1 for most in largest]
        halves = [(2.0 ** (e // 2), 2.0 ** (e - e // 2)) for e in exponents]  # 2^-e may overflow
        for scale in torch.tensor(halves, dtype=torch.float64).to(coefficients.device).unbind(1):
            coefficients = coefficients / scale.reshape(-1, *[1] * (coefficients.ndim - 1))
        zeros = [most == 0 for most in largest]
        coefficients[torch.tensor(zeros)] = 1.0
        energies = torch.linalg.vector_norm(coefficients.flatten(3), dim=3).square()
        level = energies.mean(2, keepdim=True).clamp_min(1e-300)
        spreads = ((energies - level).abs() / level).amax((1, 2)).tolist()
        for name, *parts in zip(names, coefficients, halves, zeros, spreads, strict=True):
            problems[name] = _Problem(convs[name], *parts)
    return {name: problems[name] for name in convs}


def _wide(taps: Tensor) -> Tensor:
    return taps if taps.shape[1] <= taps.shape[2] else taps.transpose(1, 2)


@dataclass
class _Found:
    """Result of the search for one layer, in normalised units."""

    lower: float
    upper: float
    group: int
    frequency: tuple[float, ...]
    left: NDArray[np.complex128]
    evaluations: int


@torch.no_grad()
def _search(problems: Sequence[_Problem], rtol: float, polish: bool = False) -> list[_Found]:
    """Solve problems of one shape together, as many at a time as memory allows."""
    _, rows, _, *sizes = problems[0].taps.shape
    room = max(1, piece(LAG_BYTES) // 2 // lag_bytes(rows, sizes))
    batches: list[list[_Problem]] = []
    blocks = room
    for problem in problems:
        blocks += len(problem.taps)
        if blocks > room:
            batches.append([])
            blocks = len(problem.taps)
        batches[-1].append(problem)
    return [one for batch in batches for one in _solve(batch, rtol, polish)]


def _solve(problems: Sequence[_Problem], rtol: float, polish: bool) -> list[_Found]:
    found = [_flat(problem, rtol, polish) for problem in problems]
    rest = [problem for problem, known in zip(problems, found, strict=True) if known is None]
    if not rest:
        return [known for known in found if known is not None]
    try:
        searched = iter(_searched(rest, rtol, polish))
    except OutOfTime:
        searched = iter(_unsearched(problem) for problem in rest)
    return [next(searched) if known is None else known for known in found]


def _flat(problem: _Problem, rtol: float, polish: bool) -> _Found | None:
    """Bracket a layer whose singular values are all equal, but for rounding.

    ``polish`` also finds the singular vector to which a gradient belongs, at frequency 0.
    """
    found = None if problem.spread > rtol else flat(problem.taps, rtol)
    if found is None:
        return None
    lower, upper, group = found
    left = np.zeros(problem.taps.shape[1], dtype=np.complex128)
    left[0] = 1
    if polish:
        symbol = problem.taps[group].reshape(*problem.taps.shape[1:3], -1).sum(2)
        left[:] = torch.linalg.eigh(symbol @ symbol.mT)[1][:, -1].cpu().numpy()
    return _Found(lower, upper, group, (0.0,) * (problem.taps.ndim - 3), left, 1)


def _unsearched(problem: _Problem) -> _Found:
    """Bound in one pass over the taps, without search: σ1(F) ≤ σ1(Σ|K|), bounded in two ways."""
    _, rows, columns, *sizes = problem.taps.shape
    sums = problem.taps.reshape(*problem.taps.shape[:3], -1).abs().sum(-1)  # (groups, n, N)
    energy = torch.linalg.vector_norm(sums.flatten(1), dim=1)
    lines = (sums.sum(1).amax(1) * sums.sum(2).amax(1)).sqrt()
    upper = float(torch.minimum(energy, lines).amax())
    slack = 1 + gamma(math.prod(sizes) + rows * columns + 64)
    left = np.zeros(rows, dtype=np.complex128)
    return _Found(0.0, upper * slack, 0, (0.0,) * len(sizes), left, 0)


def _searched(problems: Sequence[_Problem], rtol: float, polish: bool) -> list[_Found]:
    counts = np.array([len(p.taps) for p in problems])
    owner = np.arange(len(problems)).repeat(counts)
    first = counts.cumsum() - counts
    field = Field(torch.cat([p.taps for p in problems]))
    limit = max(5_000 * len(problems), int(LIMIT / (field.rows**3 + 1e5)))
    search = Search(field, owner, len(problems), rtol, limit=limit)
    cover = Cover([field.sizes] * field.blocks)
    upper = search.run(cover.start(field), cover.divide)
    peak = search.peak
    if polish:
        peak.polish()
    return [
        _Found(
            float(peak.lower[i]),
            float(upper[i]),
            int(peak.block[i] - first[i]),
            tuple(peak.frequency[i].tolist()),
            peak.left[i],
            int(peak.evaluations[i]),
        )
        for i in range(len(problems))
    ]


def _check_rtol(rtol: float) -> None:
    if not isinstance(rtol, int | float) or not 0 < rtol < 1:
        raise ValueError(f"rtol={rtol!r} must lie between 0 and 1; 1e-3 is the default")


def bracket(
    layer: Layer,
    rtol: float = 1e-3,
    *,
    device: torch.device | str | None = None,
    **geometry: object,
) -> Bracket:
    r"""Certified bounds on both sides of :math:`\sup_\omega \sigma_1(F(\omega))`.

    For zero padding this supremum is the limit of the layer's σ1 as the input grows, and at least
    σ1 for every size. See :mod:`lipbound.bounds.supremum.search` for the proof.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        rtol: Target relative width, upper/lower − 1.
        device: Device to compute on; the weights' device by default.
        geometry: Options of a bare kernel; ``input_shape`` to bracket the layer's own σ1 at that
            size instead, see :mod:`lipbound.bounds.finite`.

    Example:
        >>> found = bracket(torch.ones(1, 1, 3, 3))
        >>> found.lower <= 9 <= found.upper <= 9.01, found.certified
        (True, True)
    """
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    return brackets({"": conv}, rtol, device=device)[""]


def brackets(
    model: nn.Module | Mapping[str, Layer],
    rtol: float = 1e-3,
    *,
    device: torch.device | str | None = None,
    progress: Progress = silent,
) -> dict[str, Bracket]:
    """Bracket every convolution and Linear layer of a network; equal shapes are solved together.

    Layers that override ``forward`` are left out, because they may not use their weight unchanged.

    Args:
        model: A module, or a mapping from names to layers.
        rtol: Target relative width, upper/lower − 1.
        device: Device to compute on; the weights' device by default.
        progress: Function that shows the progress, see :class:`lipbound.runtime.Progress`.

    Example:
        >>> list(brackets(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))))
        ['0', '2']
    """
    _check_rtol(rtol)
    if isinstance(model, nn.Module):
        modules = model.named_modules()
        known = (_ConvNd, nn.Linear)
        layers = {n: m for n, m in modules if isinstance(m, known) and not own_forward(m)}
    else:
        layers = dict(model)
    groups: dict[tuple[object, ...], list[str]] = {}
    convs = {name: named(name, layer) for name, layer in layers.items()}
    problems = _problems(convs, device)
    for name, problem in problems.items():
        shape, place = problem.taps.shape[1:], problem.taps.device
        groups.setdefault((tuple(shape), place), []).append(name)
    found: dict[str, Bracket] = {}
    parts = [
        names[start : start + TOGETHER]
        for names in groups.values()
        for start in range(0, len(names), TOGETHER)
    ]
    for names in progress(parts, "layers"):
        found |= in_pieces(partial(_bracketed, {name: problems[name] for name in names}, rtol))
    return {name: found[name] for name in layers}


def _bracketed(problems: Mapping[str, _Problem], rtol: float) -> dict[str, Bracket]:
    results = _search(list(problems.values()), rtol)
    pairs = zip(problems.items(), results, strict=True)
    return {name: _finish(problem, result, rtol) for (name, problem), result in pairs}


@torch.no_grad()
def _finish(problem: _Problem, found: _Found, rtol: float) -> Bracket:
    """Convert the normalised result to the layer: scale, padding, and the input size, if any."""
    conv, frequency = problem.conv, found.frequency
    tap_gain = single_tap_gain(conv)
    if problem.zero or tap_gain == 0:
        return Bracket(0.0, 0.0, frequency, found.evaluations)
    big, small = problem.scales
    lower, upper, evaluations = found.lower, found.upper * (1 + 8 * UNIT), found.evaluations
    gain = conv.padding_gain() if tap_gain is None else tap_gain
    if tap_gain is not None:
        lower = lower * gain * (1 - 8 * UNIT)
    elif conv.input_size is not None:
        lower = 0.0
        try:
            grid = embedding(conv, frequency)
            if grid is not None:
                proved, spent = grid_maximum(Field(problem.taps), grid, upper, rtol)
                upper, evaluations = min(upper, proved), evaluations + spent
            check_time()
            # The operator is scaled like the symbol, so that tiny weights do not underflow.
            lower = attained(replace(conv, kernel=conv.kernel.double() / big / small), rtol)
        except OutOfTime:
            pass
    elif conv.symbol_stride() != replace(conv, padding_mode="zeros").symbol_stride():
        # Circular padding of unknown size: the symbol without stride is only an upper bound. Long
        # inputs approach the supremum of the strided symbol, as for zero padding.
        kernel = conv.kernel.double() / big / small
        inner = bracket(replace(conv, padding_mode="zeros", kernel=kernel), rtol)
        lower, frequency = inner.lower, inner.frequency
    upper = upper * gain * (1 + 8 * UNIT)
    # Scaling back rounds if the result is subnormal, and overflows if it exceeds every float.
    lower = math.nextafter(lower * big * small, 0.0)
    upper = math.nextafter(upper * big * small, math.inf)
    return Bracket(lower, upper, frequency, evaluations)


def spectral(layer: Layer, rtol: float = 1e-3, **geometry: object) -> Tensor:
    r"""The upper end of :func:`bracket`: at most (1 + rtol) times :math:`\sup_\omega\sigma_1(F)`.

    Differentiable: the gradient is that of u*F(ω*)v at the maximizer and its singular vectors.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        rtol: Target relative excess over the supremum.
        geometry: Options of a bare kernel, or ``input_shape``.

    Returns:
        The bound, a scalar, at least σ1 for every input size.

    Example:
        >>> spectral(torch.ones(1, 1, 3, 3))
        tensor(9.0088)
    """
    _check_rtol(rtol)
    if torch.compiler.is_compiling():  # the search would break the graph at every level
        return torch.compiler.disable(_spectral)(layer, rtol, geometry)
    return _spectral(layer, rtol, geometry)


def _spectral(layer: Layer, rtol: float, geometry: Mapping[str, object]) -> Tensor:
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    scaled = Scaled(conv)
    problem = _problems({"": conv})[""]
    found = _search([problem], rtol, polish=scaled.kernel.requires_grad)[0]
    upper = _finish(problem, found, rtol).upper / scaled.gain
    upper = upper / float(scaled.scale) * (1 + 8 * UNIT)
    coefficients = _wide(scaled.taps())[found.group]
    frequency = torch.tensor(found.frequency, dtype=torch.float64)
    left = torch.from_numpy(found.left).to(coefficients.device)
    value = _attained(coefficients, frequency, left)
    return scaled.finish(value * (upper / value.detach()), relative=0.0)


def _attained(coefficients: Tensor, frequency: Tensor, left: Tensor) -> Tensor:
    """u*F(ω*)v with v = F*u normalised, differentiable in the taps ``(n, N, *m)``."""
    symbol = evaluate(coefficients[None], frequency[None])[0, 0]  # (n, N)
    with torch.no_grad():
        right = symbol.mH @ left
        right = right / torch.linalg.vector_norm(right)
    return (left.conj() @ symbol @ right).real
