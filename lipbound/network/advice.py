"""What an audit suggests: where the bound comes from, and what would lower it."""

from __future__ import annotations

import math
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lipbound.network.findings import Audit, LayerReport, StepReport, log10
from lipbound.results import digits

MOST = 5  # layers to name
ADDS = ("aten.add", "aten.add_")


def contributions(audit: Audit) -> list[tuple[LayerReport, float]]:
    """Return the layers with the decimal logarithms of their upper ends, the largest first.

    For a network without branches, these logarithms add up to that of the product of the layers.
    """
    found = [(row, log10(row.bracket.upper)) for row in audit.layers]
    return sorted(found, key=lambda pair: -pair[1])


def blocks(audit: Audit) -> list[dict[str, Any]]:
    """Return the gain of every residual block, in the order of the network.

    A block ends with a sum of two or more values, and begins with the last value from which all of
    them are computed.
    """
    places = {step.name: place for place, step in enumerate(audit.steps)}
    above: list[frozenset[int]] = []  # places from which each step is computed, itself included
    found = []
    for place, step in enumerate(audit.steps):
        inputs = [places[name] for name in step.inputs if name in places]
        above.append(frozenset({place}).union(*(above[i] for i in inputs)))
        if not _is_sum(step, inputs):
            continue
        shared = frozenset.intersection(*(above[i] for i in inputs))
        source = audit.steps[max(shared)] if shared else None
        base = 1.0 if source is None else source.lipschitz
        if 0 < base < math.inf and step.lipschitz < math.inf:
            found.append(
                {
                    "block": step.module or step.name,
                    "from": "the input" if source is None else source.name,
                    "to": step.name,
                    "gain": step.lipschitz / base,
                }
            )
    return found


def _is_sum(step: StepReport, inputs: list[int]) -> bool:
    return f"aten.{step.op.removeprefix('aten.')}".split(" ")[0] in ADDS and len(inputs) > 1


def advice(audit: Audit) -> list[str]:
    """Say in a few sentences which layers make the bound large, and what would lower it."""
    ranked = [(row, power) for row, power in contributions(audit) if power > 0]
    plain = [pair for pair in ranked if not isinstance(pair[0].layer, _BatchNorm)]
    norms = [row.name for row, _ in ranked if isinstance(row.layer, _BatchNorm)]
    if not plain or not 1 < audit.upper < math.inf:
        return []
    total, count, reached = sum(power for _, power in plain), 0, 0.0
    while reached < total / 2:
        reached += plain[count][1]
        count += 1
    names = [
        f"{row.name or 'the layer'} ({digits(row.bracket.upper, 3, 'up')})"
        for row, _ in plain[:count]
    ]
    said = [
        f"Half of the logarithm of the product of the norms above 1, without BatchNorm, comes "
        f"from {count} of "
        f"{len(plain)} layers: "
        f"{_some(names)}."
    ]
    if audit.at_one < math.inf:
        left = " with the BatchNorm layers as they are" if norms else ""
        said.append(
            f"If every convolution and Linear layer had a norm of at most 1, which "
            f"lipbound.constrain(model) ensures, the bound would be at most "
            f"{digits(audit.at_one, 3, 'up')}{left}."
        )
    if norms:
        said.append(
            f"{len(norms)} BatchNorm {'layers amplify' if len(norms) > 1 else 'layer amplifies'} "
            f"({_some(norms)}), and constrain does not limit them. For a small bound, use none."
        )
    said.append(
        "To lower the norms while you train, add lipbound.Penalty(model) to the loss. Certified "
        "radii far from 0 need a network trained for them: lipbound train --arm certified."
    )
    return said


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
