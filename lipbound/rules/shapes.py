"""Operations that move, copy, cut or join entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lipbound.geometry import NUMPY_MODES
from lipbound.rules.values import Step, Unbounded, Value, register_rule, root_sum, spread, up

MOVES = [
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t",
    "movedim", "squeeze", "unsqueeze", "contiguous", "clone", "alias", "detach", "_to_copy", "to",
    "slice", "select", "narrow", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "roll",
    "flip", "lift_fresh_copy", "type_as", "diagonal", "rot90", "T",
]  # fmt: skip


@register_rule(*[f"aten.{name}" for name in MOVES])
def _move(step: Step) -> float:
    if step.call.overload == "dtype":
        raise Unbounded("it reads the same bits as other numbers")
    return 1.0


@register_rule("aten.copy", "aten.copy_")
def _copy(step: Step) -> Value:
    """What was there before is gone; what comes may be spread by broadcasting."""
    source = step["src"]
    step.read.add("self")
    if not isinstance(source, Value):
        return Value(step.shape, 0.0)
    return source.times(spread(source, step.shape), step.shape)


@register_rule("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.unbind",
               "aten.tensor_split")  # fmt: skip
def _split(step: Step) -> list[Value]:
    value = step.only()
    return [value.times(1.0)] * step.call.results


@register_rule("aten.expand", "aten.expand_as", "aten.repeat", "aten.repeat_interleave")
def _repeat(step: Step) -> float:
    counts = step.arguments.get("repeats")
    if isinstance(counts, torch.Tensor):
        return up(math.sqrt(int(counts.max())))
    return up(math.sqrt(math.prod(step.shape) / math.prod(step.only().shape)))


@register_rule("aten.cat", "aten.stack", "aten.concat")
def _join(step: Step) -> Value:
    found = step.inputs()
    reason = next((v.why for v in found if v.why), "")
    return Value(step.shape, root_sum([v.lipschitz for v in found]), reason=reason)


@register_rule("aten.index_select")
def _index_select(step: Step) -> float:
    index = step["index"]
    if not isinstance(index, torch.Tensor):
        raise Unbounded("an index that depends on the input is discontinuous")
    return up(math.sqrt(int(torch.bincount(index.flatten()).max())))


@register_rule("aten.pad", "aten.constant_pad_nd", "aten.reflection_pad1d", "aten.reflection_pad2d",
               "aten.replication_pad1d", "aten.replication_pad2d", "aten.reflection_pad3d",
               "aten.replication_pad3d")  # fmt: skip
def pad(step: Step) -> Value:
    """√(largest number of copies of one entry), axes multiply. A convolution may undo this."""
    value = step.only()
    mode = step.arguments.get("mode", "zeros")
    mode = "zeros" if mode == "constant" else mode
    for name in ("reflection", "replication"):
        if name in step.call.op:
            mode = {"reflection": "reflect", "replication": "replicate"}[name]
    amounts = list(step.arguments.get("pad") or step.arguments["padding"])
    pairs = tuple((amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2))[::-1]
    gain = 1.0
    for size, (before, after) in zip(value.shape[-len(pairs) :], pairs, strict=True):
        gain *= _copies(size, before, after, mode)
    result = value.times(up(math.sqrt(gain)), step.shape)
    filled = mode == "zeros" and step.arguments.get("value")  # with something else than zeros
    if not filled and all(p >= 0 for pair in pairs for p in pair):
        result.padding = (value, mode, pairs)
    return result


def _copies(size: int, before: int, after: int, mode: str) -> int:
    if mode == "zeros" or (before <= 0 and after <= 0):
        return 1
    widths: Any = (max(before, 0), max(after, 0))
    return int(np.bincount(np.pad(np.arange(size), widths, NUMPY_MODES[mode])).max())  # type: ignore[call-overload]
