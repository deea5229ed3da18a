"""Compare the bounds on rounding with the rounding itself, at every value of random networks.

    python -m verify rounding --count 300 --seed 40000000 --dtype float32

A network runs at an input and at points of the ball around it, in its own precision. Each of its
values is compared with the one in arithmetic of 256 bits (see ``verify.exact``): the distance must
be at most the bound that a certificate uses.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lipbound.network.findings import Audit
from lipbound.network.graph import Call, Graph, NotCaptured, Reference
from lipbound.network.rounding import Executed, run_call
from lipbound.network.rules import Value
from lipbound.network.rules.rounding import NotProved
from verify.exact import DTYPES, NoValue, errors, network, real_values
from verify.random_networks import Sly
from verify.real_operations import NoOperation

RADII = (0.0, 1e-3, 1.0)
NONE = Audit((), math.inf, 0.0, "", (), math.inf, None)


def check(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compare all values of a random network."""
    model, centre = network(seed, dtype)
    if any(isinstance(m, Sly) for m in model.modules()):
        return {"outcome": "sly"}
    return compare(model, centre, seed=seed)


@torch.no_grad()
def compare(model: nn.Module, *centres: Tensor, seed: int = 0) -> dict[str, Any]:
    """Compare all values of a network at some centres, and at two points of each ball around them.

    Returns:
        The outcome; the number of values compared, and of values without a bound; the violations;
        the largest quotient of rounding and bound.
    """
    result: dict[str, Any] = {"outcome": "compared", "values": 0, "unbounded": 0, "wrong": []}
    result["closest"] = 0.0
    draw = torch.Generator().manual_seed(seed)
    try:
        ready = Executed(model, NONE, centres[0])
        for centre in centres:
            measured = ready.measure(centre)
            for radius in RADII:
                bounds = ready.values(measured, np.array([radius]))
                for point in points(centre, radius, draw):
                    _compare(ready.graph, point, bounds, result)
    except NotCaptured:
        return {"outcome": "not captured"}
    except NotProved as error:
        return {"outcome": "refused", "why": str(error)}
    except (NoValue, NoOperation) as error:
        return {"outcome": "no real value", "why": str(error)}
    return result


def _compare(graph: Graph, point: Tensor, bounds: dict[str, Any], result: dict[str, Any]) -> None:
    """Compare all values at one point, and add what was found to the result."""
    real = real_values(graph, point, "exact")
    computed = run(graph.calls, {next(iter(graph.inputs)): point})
    for call in graph.calls:
        bound = bounds[call.name]
        if not isinstance(bound, Value) or not call.floating or call.shape is None:
            continue
        limit = float(np.max(bound.error))
        if not limit < math.inf or not bound.lipschitz < math.inf:
            result["unbounded"] += 1
            continue
        apart = float(np.linalg.norm(errors(computed[call.name], real[call.name])))
        result["values"] += 1
        if not apart <= limit:
            result["wrong"].append(f"{call.op}: {apart:.3e} above {limit:.3e}")
        elif limit:
            result["closest"] = max(result["closest"], apart / limit)


def points(centre: Tensor, radius: float, draw: torch.Generator) -> list[Tensor]:
    """Return the centre, or two points whose distance from it is at most the radius."""
    if not radius:
        return [centre]
    found = []
    for size in (1.0, 0.3):
        away = torch.randn(centre.shape, generator=draw, dtype=torch.float64)
        moved = (centre + size * radius * 0.999 * away / away.norm()).to(centre.dtype)
        found.append(moved if float((moved - centre).double().norm()) <= radius else centre)
    return found


def run(calls: tuple[Call, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Run calls in their own precision; return all values."""
    for call in calls:
        given = tree_map(
            lambda leaf: values[leaf.name] if isinstance(leaf, Reference) else leaf,
            call.arguments(),
        )
        item = call.op == "getitem"
        values[call.name] = given["0"][given["1"]] if item else run_call(call, given)
    return values


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=300, help="number of networks (default 300)")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    record, wrong = {}, []
    for name in chosen.dtype or DTYPES:
        found: list[dict[str, Any]] = []
        for seed in range(chosen.seed, chosen.seed + chosen.count):
            one = check(seed, DTYPES[name])
            wrong += [f"{name}, seed {seed}: {text}" for text in one.get("wrong", ())]
            found.append(one)
        record[name] = {
            "outcomes": dict(Counter(one["outcome"] for one in found)),
            "why": dict(Counter(one["why"][:60] for one in found if "why" in one)),
            "values": sum(one.get("values", 0) for one in found),
            "unbounded": sum(one.get("unbounded", 0) for one in found),
            "violations": sum(len(one.get("wrong", ())) for one in found),
            "closest": max((one.get("closest", 0.0) for one in found), default=0.0),
        }
        print(name, record[name], flush=True)
    return {"dtypes": record, "count": chosen.count}, wrong
