"""The largest Jacobian over freely chosen slopes.

A bound that knows of the activations only that their slopes lie in an interval, as LipSDP does,
holds for every network with such slopes. So it is at least as large as the norm of the Jacobian
with any slopes in the intervals. The search maximizes this norm; what it finds is a network of
linear maps and fixed slopes, whose gain is rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipbound.network.graph import Graph, NotCaptured
from lipbound.network.kernels import ordinary_kernels
from lipbound.network.lipsdp.pieces import ACTIVATIONS, NotRead, slopes_of
from lipbound.network.rounding import Executed
from lipbound.network.rules import Value
from lipbound.network.rules.rounding import NotProved
from lipbound.runtime import Progress, silent, time_is_up

ROUNDS = 30
POLISH = 40  # power iterations with the final slopes
GROUPS = 4  # of activations, whose slopes are chosen one group after the other
STARTS, SMALL = 8, 1000  # random starts of networks with at most so many slopes
SETTLED = 1.002  # growth of the norm in three rounds at which the search stops
LARGE = 2.0**30  # norm of the input, in comparison with which biases do not matter


class Freed(nn.Module):
    """A captured network with fixed slopes in place of its activations."""

    def __init__(self, graph: Graph, slopes: dict[str, Tensor]):
        super().__init__()
        self.graph, self.names = graph, list(slopes)
        self.calls = [call.in_float64() for call in graph.calls]
        self.slopes = nn.ParameterList(slopes.values())

    def choose(self, slopes: list[Tensor]) -> None:
        """Use these slopes from now on."""
        for mine, chosen in zip(self.slopes, slopes, strict=True):
            mine.data = chosen.clone()

    def forward(self, x: Tensor) -> Tensor:
        (first,) = self.graph.inputs
        chosen = dict(zip(self.names, self.slopes, strict=True))
        values = {first: x}
        for call in self.calls:
            if call.name in chosen:
                values[call.name] = values[call.references()[0]] * chosen[call.name]
            else:
                values[call.name] = call.run(call.given(values))
        result: Tensor = values[self.graph.outputs[0]]
        return result


def floor(
    graph: Graph, values: dict[str, Any], device: torch.device, progress: Progress = silent
) -> tuple[float, float]:
    """Return a number below which no bound is valid that only knows the limits of the slopes.

    Also return the estimate that was rounded down.

    The limits are those of :func:`slopes_of`; some activations have slopes in a smaller interval.
    The number is 0 if the rounding of the network is too large to say more, or if its slopes are
    not known.

    Args:
        graph: A network of linear maps and activations alone, with one input and one output.
        values: Its values, from which the slopes are read.
        device: Device of its weights.
        progress: Shows the progress.
    """
    try:
        free, ends = _freed(graph, values, device)
        (shape,) = graph.inputs.values()
        zero = torch.zeros(shape, device=device).double()
        starts = [[slope.detach().clone() for slope in free.slopes], *_random(free, ends)]
        found = [_searched(free, ends, start, zero, progress) for start in starts]
        best, vector, slopes = max(found, key=lambda one: one[0])
        free.choose(slopes)
        return _rounded_down(free, vector), best
    except (NotRead, NotCaptured, NotProved, RuntimeError, ValueError, ArithmeticError):
        return 0.0, 0.0


def _freed(
    graph: Graph, values: dict[str, Any], device: torch.device
) -> tuple[Freed, list[tuple[Tensor, Tensor]]]:
    """Return the network with its greatest slopes, and the ends of the slopes of each entry."""
    slopes, ends = {}, []
    for call in graph.calls:
        step = values[call.name].origin if isinstance(values[call.name], Value) else None
        if call.op not in ACTIVATIONS or step is None or call.shape is None:
            continue
        if len(call.shape) < 2:
            raise NotRead("an activation without a channel axis")
        low, high = slopes_of(step, call.shape[1]).reshape(2, 1, -1, *[1] * (len(call.shape) - 2))
        low, high = low.to(device), high.to(device)
        slopes[call.name] = high.expand(call.shape).clone()
        ends.append((low, high))
    return Freed(graph, slopes), ends


def _random(free: Freed, ends: list[tuple[Tensor, Tensor]]) -> Iterator[list[Tensor]]:
    """Draw slopes at their ends: several times for a small network, once for a large one."""
    draw = torch.Generator().manual_seed(0)
    shapes = [slope.shape for slope in free.slopes]
    for _ in range(STARTS if sum(map(math.prod, shapes)) <= SMALL else 1):
        drawn = [torch.rand(shape, generator=draw) < 0.5 for shape in shapes]
        yield [
            torch.where(d.to(low.device), high, low)
            for d, (low, high) in zip(drawn, ends, strict=True)
        ]


def _searched(
    free: Freed,
    ends: list[tuple[Tensor, Tensor]],
    start: list[Tensor],
    zero: Tensor,
    progress: Progress,
) -> tuple[float, Tensor, list[Tensor]]:
    """Choose slopes and an input of norm 1 for which the change of the output is large.

    Return the norm of the change, the input and the slopes.

    For a given input and direction of the output, each slope is best at one of its ends. The slopes
    of some activations at a time are chosen so, between steps of power iteration. This ends in a
    local maximum, so it is begun from several slopes.
    """
    draw = torch.Generator().manual_seed(0)
    vector = torch.randn(zero.shape, generator=draw, dtype=torch.float64).to(zero)
    free.choose(start)
    vector, left, best = _power(free, vector / vector.norm(), 8)
    kept, recent = (vector, [s.detach().clone() for s in free.slopes]), [best]
    for _ in progress(range(ROUNDS), "floor"):
        if time_is_up() or (len(recent) > 3 and recent[-1] < SETTLED * recent[-4]):
            break
        for group in range(min(GROUPS, len(ends))):
            some = range(group, len(ends), GROUPS)
            change = ((free(vector) - free(zero)) * left).sum()
            grads = torch.autograd.grad(change, [free.slopes[i] for i in some], allow_unused=True)
            for i, grad in zip(some, grads, strict=True):
                if grad is not None:
                    free.slopes[i].data = torch.where(grad > 0, ends[i][1], ends[i][0])
            vector, left, norm = _power(free, vector, 1)
        vector, left, norm = _power(free, vector, 2)
        if norm > best:
            best, kept = norm, (vector, [s.detach().clone() for s in free.slopes])
        recent.append(norm)
    free.choose(kept[1])
    vector, _, best = _power(free, kept[0], POLISH)
    return best, vector, kept[1]


def _power(free: Freed, vector: Tensor, steps: int) -> tuple[Tensor, Tensor, float]:
    """Return input and output direction after some power iterations, and the gain before them."""
    gain, left = 0.0, vector
    with torch.no_grad():
        base = free(torch.zeros_like(vector))
    for _ in range(steps):
        point = vector.detach().requires_grad_()
        result = free(point)
        change = (result - base).detach()
        gain = float(change.norm())
        left = change / max(gain, 1e-300)
        (pulled,) = torch.autograd.grad((result * left).sum(), point)
        vector = pulled / pulled.norm().clamp_min(1e-300)
    return vector, left, gain


@torch.no_grad()
@ordinary_kernels()
def _rounded_down(free: Freed, vector: Tensor) -> float:
    """Return a number that is at most the gain of the network in a direction."""
    free.requires_grad_(False)
    points = torch.cat([vector * LARGE, torch.zeros_like(vector)])
    ready = Executed(free, (), points[:1])
    bounds = ready.errors(ready.measure(points), np.zeros(2)).logits
    results = torch.cat([free(point[None]) for point in points])
    change = float((results[0] - results[1]).norm()) * (1 - 1e-12)
    length = float(points[0].norm()) * (1 + 1e-12)
    return max(0.0, (change - float(bounds.sum()) * (1 + 1e-12)) / length * (1 - 1e-12))
