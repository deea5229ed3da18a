"""The proved Lipschitz constant of a run of stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.bounds.rounding import products_above
from lipbound.network.lipsdp import newton
from lipbound.network.lipsdp.cover import NotPositive, form_of, prove
from lipbound.network.lipsdp.multipliers import Fixed, Multipliers, fixed, optimised
from lipbound.network.lipsdp.pairs import pair_constants
from lipbound.network.lipsdp.reading import Run
from lipbound.network.lipsdp.stages import Stage
from lipbound.network.rules.values import up
from lipbound.runtime import OutOfTime, Progress, check_time, first_line, silent

SLACKS = (0.0005, 0.0015, 0.005, 0.02, 0.1, 0.3)
"""Room to leave in every elimination; tried in this order, because room costs tightness."""
DENSE = (1e-9, 1e-6, *SLACKS)
"""The same without frequencies: no room is needed between them."""


@dataclass(frozen=True)
class Gain:
    """A proved Lipschitz constant.

    Attributes:
        lipschitz: Lipschitz constant of the map from the run's source to its result.
        centres: Number of frequencies at which matrices were factored.
        pairs: Lipschitz constants of the differences of two entries of the result, if they were
            asked for and proved.
    """

    lipschitz: float
    centres: int
    pairs: Tensor | None = None


def gain(run: Run, progress: Progress = silent, pairs: bool = False) -> Gain:
    """Choose multipliers for the stages of a run and prove its Lipschitz constant with them.

    Args:
        run: The stages.
        progress: Shows how far the work is.
        pairs: Whether to prove constants for the differences of two entries of the result, too.

    Raises:
        NotPositive: If no stage with some room could be proved.
        OutOfTime: If the time limit passed before the proof was complete.
    """
    first = _solved(run.stages[-1], progress, pairs) if newton.suits(run.stages) else None
    if first is not None and first[1]:
        return first[0]
    try:
        second = _searched(run, progress, pairs)
    except (NotPositive, OutOfTime):
        if first is None:
            raise
        return first[0]
    if first is None or second.lipschitz < first[0].lipschitz:
        return second
    return first[0]


def _searched(run: Run, progress: Progress, pairs: bool) -> Gain:
    """Choose multipliers by Adam, and prove the stages from the last to the first."""
    last = run.stages[-1]
    try:
        multipliers = optimised(run.stages, progress=progress)
    except torch.linalg.LinAlgError as error:
        raise NotPositive(first_line(error)) from error
    weights = torch.eye(last.sizes[-1], dtype=torch.float64, device=last.device)
    centres, numbers = 0, Fixed(weights, {}, weights, weights)
    apart = None
    for index in reversed(range(len(run.stages))):
        numbers, more = _proved(multipliers, index, weights, progress)
        centres += more
        if pairs and run.stages[index] is last:
            apart = _apart(last, numbers, progress)
        if index:
            weights = multipliers.weights_before(index, numbers)
    return _gain(numbers, centres, apart)


def _gain(numbers: Fixed, centres: int, apart: Tensor | None) -> Gain:
    """Return the constant that the multipliers of the first stage prove."""
    square = float(numbers.source.max())  # in the first stage a multiple of 1
    root = up(up(math.sqrt(square)))
    if apart is not None:
        apart = products_above(apart, root)
    return Gain(root, centres, apart)


def _solved(stage: Stage, progress: Progress, pairs: bool) -> tuple[Gain, bool] | None:
    """Return what Newton's method can prove, and whether it reached the optimum.

    ``None`` if nothing could be proved, or it did not begin.
    """
    try:
        path, complete = newton.path(stage, progress)
    except torch.linalg.LinAlgError:
        return None
    for numbers in path[:-1]:  # the last one is only its start
        try:
            centres = prove(form_of(stage, numbers), progress=progress)
        except (NotPositive, torch.linalg.LinAlgError):
            continue
        apart = _apart(stage, numbers, progress) if pairs else None
        return _gain(numbers, centres, apart), complete
    return None


def _apart(stage: Stage, numbers: Fixed, progress: Progress) -> Tensor | None:
    """Return constants of the differences of two entries of the result, or ``None``."""
    try:
        return pair_constants(stage, numbers, progress)
    except (NotPositive, OutOfTime, torch.linalg.LinAlgError):
        return None


def _proved(
    multipliers: Multipliers, index: int, weights: Tensor, progress: Progress
) -> tuple[Fixed, int]:
    """Return multipliers of one stage with which its inequality is proved at all frequencies."""
    for slack in SLACKS if multipliers.stages[index].dims else DENSE:
        check_time()  # the multipliers of a deep network take long to fix
        try:
            numbers = fixed(multipliers, index, weights, slack)
            form = form_of(multipliers.stages[index], numbers)
            return numbers, prove(form, progress=progress)
        except (NotPositive, torch.linalg.LinAlgError) as error:
            failed = NotPositive(first_line(error))
    raise failed
