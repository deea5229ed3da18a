"""Certify sup σ1(F) on both sides: ``bracket``, ``brackets`` and the bound ``spectral``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lipbound.bounds.finite import attained, embedding, grid_maximum, single_tap_gain
from lipbound.bounds.flat import flat
from lipbound.bounds.problems import Batch, Found, Problem, by_shape, normalised, wide
from lipbound.bounds.rounding import UNIT, Scaled, gamma
from lipbound.bounds.supremum import levels
from lipbound.bounds.supremum.cells import Cover
from lipbound.bounds.supremum.field import LAG_BYTES, Field, lag_bytes
from lipbound.bounds.supremum.search import Search
from lipbound.geometry import Layer, convolution, named_unchecked, own_forward
from lipbound.results import Result, digits
from lipbound.runtime import OutOfTime, Progress, check_time, in_pieces, piece, silent
from lipbound.symbols import evaluate

SIDE_BY_SIDE = 1 << 32  # bytes of lags of different shapes at once
TOGETHER = 1024  # layers of one shape at once; more are no faster and delay the progress bar
BY_LEVELS = {"cuda"}  # kinds of devices on which all shapes are searched side by side, see .levels
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


@torch.no_grad()
def _search(problems: Sequence[Problem], rtol: float, polish: bool = False) -> list[Found]:
    """Solve problems, those of one shape together, as many at a time as memory allows."""
    results = {i: _flat(problem, rtol, polish) for i, problem in enumerate(problems)}
    rest = [i for i, known in results.items() if known is None]
    levelled, done = _searched_by_levels(problems, rest, rtol, polish)
    for alike in by_shape(problems, rest):
        left = [i for i in alike if i not in done]
        results |= {i: levelled[i] for i in alike if i in done}
        if left:
            again = _searched(Batch([problems[i] for i in left]), rtol, polish, len(alike))
            results |= dict(zip(left, again, strict=True))
        for i in left:
            found = results[i]
            if found is not None and i in levelled and levelled[i].lower > found.lower:
                results[i] = replace(levelled[i], upper=found.upper)
    return [found for found in results.values() if found is not None]


def _flat(problem: Problem, rtol: float, polish: bool) -> Found | None:
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
    return Found(lower, upper, group, (0.0,) * (problem.taps.ndim - 3), left, 1)


def _unsearched(problem: Problem) -> Found:
    """Bound in one pass over the taps, without search: σ1(F) ≤ σ1(Σ|K|), bounded in two ways."""
    _, rows, columns, *sizes = problem.taps.shape
    sums = problem.taps.reshape(*problem.taps.shape[:3], -1).abs().sum(-1)  # (groups, n, N)
    energy = torch.linalg.vector_norm(sums.flatten(1), dim=1)
    lines = (sums.sum(1).amax(1) * sums.sum(2).amax(1)).sqrt()
    upper = float(torch.minimum(energy, lines).amax())
    slack = 1 + gamma(math.prod(sizes) + rows * columns + 64)
    left = np.zeros(rows, dtype=np.complex128)
    return Found(0.0, upper * slack, 0, (0.0,) * len(sizes), left, 0)


def _searched(batch: Batch, rtol: float, polish: bool, layers: int) -> list[Found]:
    """Search one batch; without time for it, bound its layers without search.

    ``layers`` is the number of layers that share the limit of cells.
    """
    try:
        field, count = Field(batch.taps()), len(batch.problems)
        limit = max(5_000 * layers, int(LIMIT / (field.rows**3 + 1e5)))
        search = Search(field, batch.owner, count, rtol, limit=limit)
        cover = Cover([field.sizes] * field.blocks)
        upper = search.run(cover.start(field), cover.divide)
        return batch.found(search.peak, upper, polish)
    except OutOfTime:
        return [_unsearched(problem) for problem in batch.problems]


def _searched_by_levels(
    problems: Sequence[Problem], chosen: Sequence[int], rtol: float, polish: bool
) -> tuple[dict[int, Found], set[int]]:
    """Search the chosen problems side by side where the device is one for that.

    Returns:
        What was found, and the problems for which this is enough. The lower ends of the others are
        proved, and their upper ends are not.
    """
    found: dict[int, Found] = {}
    done: set[int] = set()
    if not chosen or problems[chosen[0]].taps.device.type not in BY_LEVELS:
        return found, done
    alike = by_shape(problems, chosen, levels.BLOCKS)
    batches = [Batch([problems[i] for i in batch]) for batch in alike]
    try:
        for dims, together in _rounds(batches):
            symbols = [batches[k].taps(dims) for k in together]
            owners = [batches[k].owner for k in together]
            for k, result in zip(together, levels.search(symbols, owners, rtol), strict=True):
                own = batches[k].found(result.peak, result.upper, polish)
                found |= dict(zip(alike[k], own, strict=True))
                done |= {i for i, enough in zip(alike[k], result.done, strict=True) if enough}
    except OutOfTime:
        pass
    except torch.OutOfMemoryError:
        levels.release_memory()
        raise
    return found, done


def _rounds(batches: Sequence[Batch]) -> list[tuple[int, list[int]]]:
    """Numbers of axes, and the batches to search side by side, as many as memory allows.

    A search by levels takes symbols with taps on the same axes, and matrices beside them. It needs
    all lags, so batches whose lags are not kept are left out.
    """
    all_axes = [batch.axes for batch in batches]
    widest = max(all_axes, default=(), key=lambda axes: (any(axes), len(axes)))
    rounds: list[tuple[int, list[int]]] = []
    newest: dict[tuple[bool, ...], tuple[list[int], float]] = {}
    for i, batch in enumerate(batches):
        shape = batch.problems[0].taps.shape
        size = len(batch.owner) * lag_bytes(shape[1], shape[3:])
        if size > piece(LAG_BYTES):
            continue
        axes = batch.axes if any(batch.axes) else widest
        chosen, taken = newest.get(axes, ([], math.inf))
        if taken + size > piece(SIDE_BY_SIDE):
            chosen, taken = [], 0
            rounds.append((len(axes), chosen))
        chosen.append(i)
        newest[axes] = chosen, taken + size
    return rounds


def check_rtol(rtol: float) -> None:
    """Check that a relative width lies between 0 and 1."""
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
    """Find an interval that holds the largest singular value of each convolution and Linear layer.

    Layers that override ``forward`` are left out, because they may not use their weight unchanged.
    On a GPU, a call keeps memory, which makes later calls on layers of the same shapes faster;
    :func:`lipbound.release_memory` frees it.

    Args:
        model: A module, or a mapping from names to layers.
        rtol: Target relative width, upper/lower − 1.
        device: Device to compute on; the weights' device by default.
        progress: Function that shows the progress, see :class:`lipbound.runtime.Progress`.

    Returns:
        A :class:`Bracket` for each layer, by name, as :func:`bracket` gives it.

    Example:
        >>> list(brackets(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))))
        ['0', '2']
    """
    check_rtol(rtol)
    if isinstance(model, nn.Module):
        modules = model.named_modules()
        known = (_ConvNd, nn.Linear)
        layers = {n: m for n, m in modules if isinstance(m, known) and not own_forward(m)}
    else:
        layers = dict(model)
    groups: dict[tuple[object, torch.device], list[str]] = {}
    convs = {name: named_unchecked(name, layer) for name, layer in layers.items()}
    problems = in_pieces(partial(normalised, convs, device))
    for name, problem in problems.items():
        shape, place = problem.taps.shape[1:], problem.taps.device
        groups.setdefault((tuple(shape), place), []).append(name)
    found: dict[str, Bracket] = {}
    parts = [
        names[start : start + TOGETHER]
        for names in _side_by_side(groups)
        for start in range(0, len(names), TOGETHER)
    ]
    for names in progress(parts, "layers"):
        found |= in_pieces(partial(_bracketed, {name: problems[name] for name in names}, rtol))
    return {name: found[name] for name in layers}


def _side_by_side(groups: Mapping[tuple[object, torch.device], list[str]]) -> list[list[str]]:
    """The names of layers to search at once: those of one shape, or of all on a GPU."""
    if not any(place.type in BY_LEVELS for _, place in groups):
        return list(groups.values())
    places: dict[torch.device, list[str]] = {}
    for (_, place), names in groups.items():
        places.setdefault(place, []).extend(names)
    return list(places.values())


def _bracketed(problems: Mapping[str, Problem], rtol: float) -> dict[str, Bracket]:
    results = _search(list(problems.values()), rtol)
    pairs = zip(problems.items(), results, strict=True)
    return {name: _finish(problem, result, rtol) for (name, problem), result in pairs}


@torch.no_grad()
def _finish(problem: Problem, found: Found, rtol: float) -> Bracket:
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
    check_rtol(rtol)
    if torch.compiler.is_compiling():  # the search would break the graph at every level
        return torch.compiler.disable(_spectral)(layer, rtol, geometry)
    return _spectral(layer, rtol, geometry)


def _spectral(layer: Layer, rtol: float, geometry: Mapping[str, object]) -> Tensor:
    conv = convolution(layer, **geometry)  # type: ignore[arg-type]
    scaled = Scaled(conv)
    problem = normalised({"": conv})[""]
    found = _search([problem], rtol, polish=scaled.kernel.requires_grad)[0]
    upper = _finish(problem, found, rtol).upper / scaled.gain
    upper = upper / float(scaled.scale) * (1 + 8 * UNIT)
    coefficients = wide(scaled.taps())[found.group]
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
