"""Bound a whole network operation by operation along its graph."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

from lipbound.bounds.rounding import products_above
from lipbound.network.capture_check import COMPARED
from lipbound.network.findings import Audit, StepReport, joined
from lipbound.network.floors import floor
from lipbound.network.graph import Call, Graph
from lipbound.network.lipsdp.cover import NotPositive
from lipbound.network.lipsdp.gains import Gain, gain
from lipbound.network.lipsdp.reading import runs
from lipbound.network.rules import RULES, Options, Value, follow
from lipbound.network.rules.ranges import Ranges
from lipbound.network.rules.values import root_sum_of_errors, up
from lipbound.results import digits
from lipbound.runtime import OutOfTime, Progress, silent

SHIFT = 600  # power of two by which constants near the largest float64 are divided
TOO_LARGE = "the bound is above the largest float64, 1.8e308"


def log10_bound(graph: Graph, options: Options) -> float:
    """Return log10 of the network's bound, rounded up, however large it is.

    Whenever a constant comes near the largest float64, all constants are divided by a power of two.
    """
    values: dict[str, Any] = {n: Value(shape, constant=1.0) for n, shape in graph.inputs.items()}
    ranges = Ranges(graph, values, options, options.domain)
    options = replace(options, ranges=ranges, notes={})
    for call in graph.calls:
        values[call.name] = found = follow(call, values, options)
        if 2.0**SHIFT < _largest(found) < math.inf:
            ranges.exponent += SHIFT
            for value in {id(v): v for v in tree_leaves(list(values.values()))}.values():
                value.divide(2.0**SHIFT)
    total = up(math.hypot(*[values[name].lipschitz for name in graph.outputs]))
    return (math.log10(total) + ranges.exponent * math.log10(2)) * (1 + 1e-12)


def compose(graph: Graph, options: Options, progress: Progress = silent) -> Audit:
    """Bound the network and each of its operations; the result has no layer reports.

    Several inputs or outputs count as one vector.
    """
    values: dict[str, Any] = {
        name: Value(shape, constant=1.0) for name, shape in graph.inputs.items()
    }
    options = replace(options, ranges=Ranges(graph, values, options, options.domain))
    for call in progress(graph.calls, "graph"):
        found = follow(call, values, options)
        if options.effort == "low" and call.name not in graph.outputs:
            found = tree_map(_alone, found)
        values[call.name] = found
    steps = _kept(graph, values)
    sources = _sources(graph, {call.name for call in steps})
    ops = {call.name: call.op for call in graph.calls}
    reports = []
    for call in steps:
        value = values[call.name]
        inputs = [_largest(values[name]) for name in call.references() if name in values]
        base = max(inputs) if value.linear is None else value.linear.anchor.lipschitz
        reports.append(
            StepReport(
                call.name, _shown(call, ops), call.module, sources[call.name],
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
        reason = TOO_LARGE
    ignored = _ignored(graph, values) if not reason or reason == TOO_LARGE else ""
    if ignored:
        total, reason = math.inf, ignored
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
    if options.effort != "high":
        return audit
    return _tightened(graph, audit, values, options, progress)


HARMLESS = {*COMPARED, "getitem", "aten._assert_tensor_metadata"}
"""Operations without a rule that do not fail for any value."""


def _ignored(graph: Graph, values: dict[str, Any]) -> str:
    """Describe an operation that may fail and whose values are ignored; empty if there is none.

    The network could catch the failure and compute something else.
    """
    floating = {call.name: call.floating for call in graph.calls}
    for call in graph.calls:
        whole = all(floating.get(name, True) for name in call.references())
        safe = call.op in HARMLESS or (call.op in RULES and whole)
        if not safe and _largest(values[call.name]) == math.inf:
            return (
                f"it runs {call.op}, which may fail for some inputs, and ignores its values "
                f"({', '.join(part for part in (call.module, call.source) if part)})"
            )
    return ""


def _alone(value: Any) -> Any:
    """Return a value without its linear map, so that the next one is not merged with it."""
    if not isinstance(value, Value) or value.linear is None:
        return value
    return replace(
        value, constant=value.lipschitz, linear=None, reason=value.why, apart=value.error
    )


def _tightened(
    graph: Graph, audit: Audit, values: dict[str, Any], options: Options, progress: Progress
) -> Audit:
    """Bound the chains of linear maps and activations by LipSDP, and everything else as before."""
    if len(graph.outputs) != 1 or not audit.upper < math.inf:
        why = audit.reason or "it has several outputs"
        return _noted(audit, f"effort='high' had no effect: {why}")
    output = values[graph.outputs[0]]
    found, left_out = runs(output, graph.device)
    gains: dict[int, tuple[Value, Gain]] = {}
    failed: list[str] = []
    logits = len(output.shape) == 2 and output.shape[0] == 1
    for run in found:
        last = run.stages[-1].sizes[-1]  # the channels, if an image is only flattened at the end
        pairs = logits and run.result is output and last == output.shape[1]
        try:
            gains[id(run.result)] = run.source, gain(run, progress, pairs)
        except NotPositive as error:
            failed.append(f"{_named(run.source, graph, values)}: {error}")
        except OutOfTime:
            failed.append("the time limit passed before the proof was complete")
    names = {id(value): name for name, value in reversed(values.items())}
    again: dict[str, Any] = {name: values[name] for name in graph.inputs}
    lowered, apart = False, None
    for call in graph.calls:
        new = follow(call, again, options)
        old = values[call.name]
        if id(old) in gains:
            source, proved = gains[id(old)]
            before = again[names[id(source)]].lipschitz
            constant = up(proved.lipschitz * before)
            if proved.pairs is not None and not audit.error:
                apart = products_above(proved.pairs, before)
            if constant < new.lipschitz:
                new, lowered = Value(new.shape, constant, origin=new.origin), True
        again[call.name] = new
    upper = again[graph.outputs[0]].lipschitz
    least = near = 0.0
    if not left_out and len(graph.inputs) == 1:
        least, near = floor(graph, values, graph.device, progress)
    centres = sum(proved.centres for _, proved in gains.values())
    parts = ", ".join(left_out)
    without = ", ".join(failed)
    said = "effort='high' did not lower the bound"
    if lowered and upper < audit.upper:
        before, after = (digits(bound, 4, "up") for bound in (audit.upper, upper))
        said = (
            f"effort='high' lowered the bound from {before} to {after}, proved by "
            f"LipSDP with {centres:,} {'matrix' if centres == 1 else 'matrices'}"
        )
    said = joined(said, f"LipSDP gave no bound: {without}" if without else "")
    said = joined(said, f"not part of a chain: {parts}" if parts else "")
    if near > 0 and not least:
        seen = f"with freely chosen slopes a Jacobian norm of about {near:.2g} was found"
        said = joined(said, f"{seen}, but rounding is too large to prove it")
    tighter = replace(audit, upper=min(upper, audit.upper), floor=least, pairs=apart)
    return _noted(tighter, said)


def _noted(audit: Audit, note: str) -> Audit:
    return replace(audit, note=joined(audit.note, note))


def _named(value: Value, graph: Graph, values: dict[str, Any]) -> str:
    name = next((name for name, other in values.items() if other is value), "")
    return next((call.module for call in graph.calls if call.name == name and call.module), name)


def _shown(call: Call, ops: dict[str, str]) -> str:
    """Return the operation's name; for one of several results, that of their operation."""
    op = ops.get(call.references()[0], call.op) if call.op == "getitem" else call.op
    return "aten.batch_norm" if "batch_norm" in op else op


def _sources(graph: Graph, kept: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the inputs and the kept calls that each call reads, through calls that are not."""
    found: dict[str, tuple[str, ...]] = {name: () for name in graph.inputs}
    for call in graph.calls:
        read = [
            (name,) if name in kept or name in graph.inputs else found[name]
            for name in call.references()
        ]
        found[call.name] = tuple(dict.fromkeys(name for names in read for name in names))
    return found


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
