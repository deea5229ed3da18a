"""Compare the bounds on rounding with the rounding itself, at every value of random networks.

A small network runs at an input and at points of the ball around it, in its own precision. Each of
its values is compared with the one in arithmetic of 256 bits (see ``verify.exact``): the distance
must be at most the bound that a certificate uses. Large networks are compared with themselves in
float64: the distance must be at most the sum of both bounds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lipbound.modules import in_float64
from lipbound.network.graph import Call, Graph, NotCaptured
from lipbound.network.kernels import ordinary_kernels
from lipbound.network.rounding import Executed
from lipbound.network.rules import Value
from lipbound.network.rules.rounding import NotProved
from lipbound.robust.models import MODELS
from verify.exact import DTYPES, NoValue, errors, network, real_values
from verify.random_parts import Sly
from verify.real_operations import NoOperation
from verify.tally import Tally

RADII = (0.0, 1e-3, 1.0)
EACH = 200  # seeds for one large network
LARGE = ("resnet20", "wrn-10-1", "shift-128x8", "liresnet-128x4", "cnn", "resnet56")
SHAPE = (1, 3, 32, 32)


@dataclass
class Compared:
    """What a network's values showed.

    Attributes:
        outcome: Whether they were compared, and why not otherwise.
        margins: 1 − rounding/bound of each value; the smallest possible margin is 0.
        unbounded: Number of values without a bound.
        wrong: Values that are further off than their bound.
    """

    outcome: str = "compared"
    margins: list[float] = field(default_factory=list)
    unbounded: int = 0
    wrong: list[str] = field(default_factory=list)

    def saw(self, call: Call, apart: float, limit: float) -> None:
        if not limit < math.inf:
            self.unbounded += 1
            return
        self.margins.append(1 - apart / limit if limit else math.inf)
        if not apart <= limit:
            self.wrong.append(f"{call.op}: {apart:.3e} above {limit:.3e}")


def limits(graph: Graph, bounds: dict[str, Any]) -> list[tuple[Call, float]]:
    """Return the calls that round, with their bounds; ∞ where there is none."""
    found = [(call, bounds[call.name]) for call in graph.calls if call.floating]
    return [
        (call, float(np.max(bound.error)) if bound.lipschitz < math.inf else math.inf)
        for call, bound in found
        if isinstance(bound, Value) and call.shape is not None
    ]


def check(seed: int, dtype: torch.dtype, device: str = "cpu") -> Compared:
    """Compare all values of a small random network."""
    model, centre = network(seed, dtype)
    if any(isinstance(m, Sly) for m in model.modules()):
        return Compared("it runs another function than it shows")
    return compare(model.to(device), centre.to(device), seed=seed)


@torch.no_grad()
@ordinary_kernels()
def compare(model: nn.Module, *centres: Tensor, seed: int = 0) -> Compared:
    """Compare all values of a network at some centres, and at two points of each ball around them.

    The values in real arithmetic are the truth.
    """
    result, draw = Compared(), torch.Generator().manual_seed(seed)
    try:
        ready = Executed(model, (), centres[0])
        for centre in centres:
            measured = ready.measure(centre)
            for radius in RADII:
                rounding = limits(ready.graph, ready.values(measured, np.array([radius])))
                for point in points(centre, radius, draw):
                    computed, real = (
                        run(ready.graph, point),
                        real_values(ready.graph, point.cpu(), "exact"),
                    )
                    for call, limit in rounding:
                        one, other = computed[call.name].cpu(), real[call.name]
                        bounded = limit < math.inf  # otherwise values may be infinite
                        apart = length(errors(one, other)) if bounded else math.inf
                        result.saw(call, apart, limit)
    except NotCaptured:
        return Compared("not captured")
    except NotProved as error:
        return Compared(refused(error))
    except (NoValue, NoOperation) as error:
        return Compared(f"no real value: {error}")
    return result


def refused(error: NotProved) -> str:
    """Return why a network was refused, without its sizes and the name of its module."""
    said = str(error).split(" in ")[0]
    return "refused: " + re.sub(r" from \([\d, ]*\) to \([\d, ]*\) pixels", "", said)


def length(numbers: NDArray[np.float64]) -> float:
    """Return the L2 norm; its squares neither underflow nor overflow."""
    most = float(np.max(numbers, initial=0.0))
    return most * float(np.linalg.norm(numbers / most)) if 0 < most < math.inf else most


@torch.no_grad()
@ordinary_kernels()
def compare_formats(seed: int, device: str = "cpu") -> Compared:
    """Compare all values of a large network in float32 with those in float64."""
    turn = seed // EACH
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[LARGE[turn % len(LARGE)]]().eval().to(device)
    size = (0.1, 1.0, 10.0)[turn % 3]
    centre = (size * torch.randn(SHAPE, generator=draw)).to(device)
    single = Executed(model, (), centre)
    double = Executed(in_float64(model), (), centre.double())
    measured = double.measure(centre)
    result = Compared(LARGE[turn % len(LARGE)])
    for radius in RADII:
        both = [limits(e.graph, e.values(measured, np.array([radius]))) for e in (single, double)]
        for point in points(centre, radius, draw):
            narrow, wide = run(single.graph, point), run(double.graph, point.double())
            for (call, limit), (same, other) in zip(*both, strict=True):
                apart = float((narrow[call.name].double() - wide[same.name]).norm())
                result.saw(call, apart, limit + other)
    return result


def points(centre: Tensor, radius: float, draw: torch.Generator) -> list[Tensor]:
    """Return the centre, or two points whose distance from it is at most the radius."""
    if not radius:
        return [centre]
    found = []
    for size in (1.0, 0.3):
        away = torch.randn(centre.shape, generator=draw, dtype=torch.float64).to(centre.device)
        moved = (centre + size * radius * 0.999 * away / away.norm()).to(centre.dtype)
        found.append(moved if float((moved - centre).double().norm()) <= radius else centre)
    return found


def run(graph: Graph, point: Tensor) -> dict[str, Any]:
    """Run a captured network in its own precision; return all values."""
    (name,) = graph.inputs
    values: dict[str, Any] = {name: point}
    for call in graph.calls:
        values[call.name] = call.run(call.given(values))
    return values


def check_rounding(seeds: range, device: str = "cpu") -> Tally:
    """Check a small network per seed in both precisions, and a large one for some seeds."""
    tally = Tally(count=len(seeds), counts={"outcomes": Counter(), "values": Counter()})
    for seed in seeds:
        for name, dtype in DTYPES.items():
            _add(tally, name, seed, check(seed, dtype, device))
        if seed % EACH == 0:
            _add(tally, "large", seed, compare_formats(seed, device))
    return tally


def _add(tally: Tally, kind: str, seed: int, found: Compared) -> None:
    claim = f"rounding, {kind}"
    tally.counts["outcomes"][f"{kind}: {found.outcome}"] += 1
    tally.counts["values"][f"{kind}: without a bound"] += found.unbounded
    tally.saw(claim, found.margins, [seed])
    for said in found.wrong:
        tally.violated(claim, [seed], said)
