"""Bound a whole network operation by operation along its graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lipbound.bounds import bracket
from lipbound.bounds.rounding import norm_above
from lipbound.network.blocks import certified, find_chain, optimised
from lipbound.network.findings import Audit, StepReport, joined
from lipbound.network.graph import Call, Graph
from lipbound.network.rules import Options, Value, follow
from lipbound.network.rules.values import root_sum_of_errors, up
from lipbound.runtime import Progress, silent


def compose(graph: Graph, options: Options, progress: Progress = silent) -> Audit:
    """Bound the network and each of its operations; the result has no layer reports.

    Several inputs or outputs count as one vector.
    """
    values: dict[str, Any] = {
        name: Value(shape, constant=1.0) for name, shape in graph.inputs.items()
    }
    for call in progress(graph.calls, "graph"):
        values[call.name] = follow(call, values, options)
    steps = _kept(graph, values)
    ops = {call.name: call.op for call in graph.calls}
    reports = []
    for call in steps:
        value = values[call.name]
        inputs = [_largest(values[name]) for name in call.references() if name in values]
        base = max(inputs) if value.linear is None else value.linear.anchor.lipschitz
        reports.append(
            StepReport(
                call.name, _shown(call, ops), call.module, tuple(call.references()),
                value.shape[1:], value.lipschitz,
                value.lipschitz / base if 0 < base < math.inf else math.nan,
                value.why if value.lipschitz == math.inf else "",
            )
        )  # fmt: skip
    outputs = [values[name] for name in graph.outputs]
    total = up(math.hypot(*[v.lipschitz for v in outputs]))
    error = float(root_sum_of_errors([v.error for v in outputs]))
    reason = next((v.why for v in outputs if v.lipschitz == math.inf), "")
    if total == math.inf and not reason:
        reason = "the bound is above the largest float64, 1.8e308"
    notes = [*options.notes]
    if graph.left_out:
        notes.append(f"{len(graph.left_out)} integer output(s) are not included in the bound")
    audit = Audit(
        (), total, 0.0, reason, tuple(reports), math.inf, None, note="; ".join(notes),
        error=error,
    )  # fmt: skip
    last = outputs[0].linear
    rows = len(outputs) == 1 and len(outputs[0].shape) == 2 and outputs[0].shape[0] == 1
    if rows and last is not None and last.conv.dims == 0:
        audit = replace(
            audit, features=last.anchor.lipschitz, head=last.conv.kernel,
            features_error=float(last.anchor.error), head_error=last.error,
        )  # fmt: skip
    return audit if options.effort == "normal" else _weighted(audit, outputs, options, progress)


def _weighted(
    audit: Audit, outputs: Sequence[Value], options: Options, progress: Progress
) -> Audit:
    """Use the bound by weighted blocks if the network is a chain of them and it is smaller."""
    exact = len(outputs) == 1 and not audit.error
    chain = find_chain(outputs[0]) if exact else None
    if chain is None:
        note = "effort='high' had no effect: the network is not a chain of residual blocks"
        return replace(audit, note=joined(audit.note, note))
    features, head = certified(chain, optimised(chain, progress=progress), options.rtol, progress)
    matrix = bracket(head, options.rtol)
    upper = up(features * up(matrix.upper * (1 + 2.0**-40)))
    note = f"effort='high' used two weighted norms in each of {len(chain.blocks)} residual blocks"
    note = note if upper < audit.upper else f"{note}, but did not lower the bound"
    note = joined(audit.note, note)
    if upper >= audit.upper:
        return replace(audit, note=note)
    lost = up(2.0**-48 * norm_above(head) + head.numel() * 2.0**-1074)
    return replace(audit, upper=upper, features=features, head=head, note=note, head_error=lost)


def _shown(call: Call, ops: dict[str, str]) -> str:
    """Return the operation's name; for one of several results, that of their operation."""
    op = ops.get(call.references()[0], call.op) if call.op == "getitem" else call.op
    return "aten.batch_norm" if "batch_norm" in op else op


def _kept(graph: Graph, values: dict[str, Any]) -> list[Call]:
    """Return the calls that an output depends on, without those merged into a later call.

    For example a convolution before a BatchNorm is not bounded by itself: the results that use it
    are convolutions of the same value.
    """
    needed = set(graph.outputs)
    readers: dict[str, list[Any]] = {}
    for call in reversed(graph.calls):
        if call.name not in needed:
            continue
        for name in call.references():
            needed.add(name)
            readers.setdefault(name, []).append(values[call.name])

    def taken(name: str) -> bool:
        value = values[name]
        if value.linear is None or name in graph.outputs:
            return False
        later = [v[0] if isinstance(v, list) else v for v in readers.get(name, [])]
        return bool(later) and all(
            v.linear is not None and v.linear.anchor is value.linear.anchor for v in later
        )

    single = [c for c in graph.calls if c.name in needed and isinstance(values[c.name], Value)]
    return [call for call in single if not taken(call.name)]


def _largest(value: Any) -> float:
    return max(v.lipschitz for v in value) if isinstance(value, list) else value.lipschitz
