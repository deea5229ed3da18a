"""Rules for operations that move, copy, cut or join entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lipbound.geometry import NUMPY_MODES
from lipbound.network.rules.values import (
    Part,
    Step,
    Unbounded,
    Value,
    axes,
    concatenated,
    register_rule,
    root_sum,
    root_sum_of_errors,
    spread,
    up,
    windows,
)

MOVES = [
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t",
    "movedim", "squeeze", "unsqueeze", "contiguous", "clone", "alias", "detach", "_to_copy", "to",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "roll",
    "flip", "lift_fresh_copy", "type_as", "diagonal", "rot90", "T",
]  # fmt: skip


EXTREMA = {
    "aten.maximum": "max",
    "aten.minimum": "min",
    "aten.max": "max",
    "aten.min": "min",
}


@register_rule(*[f"aten.{name}" for name in MOVES])
def _move(step: Step) -> float:
    if step.call.overload == "dtype" and step.call.op in ("aten.view", "aten.alias"):
        raise Unbounded("it reinterprets the bits as another type")
    _check_cast(step)
    return 1.0


@register_rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_zeros",
               "aten.new_ones", "aten.new_full")  # fmt: skip
def _constant(step: Step) -> float:
    return 0.0  # only the shape of the value is used


def _check_cast(step: Step) -> None:
    """Note that a cast to 16 bits rounds, and refuse a cast to 8 bits, which makes steps.

    Raises:
        Unbounded: If the result has fewer than 16 bits.
    """
    dtype, given = step.call.dtype, step.arguments.get("dtype")
    if dtype is not None and dtype.itemsize < 2:
        raise Unbounded(f"a cast to {dtype} rounds so coarsely that it jumps")
    casts = given is not None or step.call.op in ("aten.copy", "aten.copy_", "aten.type_as")
    if casts and dtype in (torch.float16, torch.bfloat16):
        step.note(f"the rounding of a cast to {dtype} is not part of the bound")


@register_rule("aten.copy", "aten.copy_")
def _copy(step: Step) -> Value:
    """Bound a copy, which discards the old values and may broadcast the new ones."""
    source = step["src"]
    del step.arguments["self"]  # with its error
    _check_cast(step)
    if not isinstance(source, Value):
        return Value(step.shape, 0.0)
    return source.times(spread(source, step.shape), step.shape)


@register_rule("aten.fill")
def _fill(step: Step) -> Value:
    """Bound a tensor whose entries are all replaced by one number."""
    del step.arguments["self"]  # with its error
    if not isinstance(step["value"], Value):
        return Value(step.shape, 0.0)
    return step["value"].times(spread(step["value"], step.shape), step.shape)


@register_rule("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.unbind",
               "aten.tensor_split")  # fmt: skip
def _split(step: Step) -> list[Value]:
    """Bound the parts of a value; each remembers which entries it holds."""
    value, name = step.only(), step.call.op.removeprefix("aten.")
    axis = step.arguments.get("dim", 0) % len(value.shape)
    given = [v for k, v in step.arguments.items() if k not in ("self", "dim")]
    places = getattr(torch.ops.aten, name)(torch.arange(value.shape[axis]), *given, 0)
    return [_part(value, axis, place) for place in places]


@register_rule("aten.slice", "aten.select", "aten.narrow")
def _slice(step: Step) -> Value:
    value, name = step.only(), step.call.op.removeprefix("aten.")
    if not value.shape:
        return value.times(1.0, step.shape)
    axis = step.arguments.get("dim", 0) % len(value.shape)
    given = [v for k, v in step.arguments.items() if k not in ("self", "dim")]
    place = getattr(torch.ops.aten, name)(torch.arange(value.shape[axis]), 0, *given)
    part = _part(value, axis, place)
    part.shape = step.shape
    return part


def _part(value: Value, axis: int, places: torch.Tensor) -> Value:
    """Return the entries of a value at ``places`` along an axis, which are evenly spaced."""
    numbers = places.flatten().tolist()
    pace = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    taken = range(numbers[0], numbers[-1] + 1, pace) if numbers else range(0)
    shape = [*value.shape[:axis], *places.shape, *value.shape[axis + 1 :]]
    result = value.times(1.0, shape)
    result.part = Part(value, axis, taken)
    return result


@register_rule("aten.expand", "aten.expand_as", "aten.repeat", "aten.repeat_interleave")
def _repeat(step: Step) -> float:
    counts = step.arguments.get("repeats")
    if isinstance(counts, torch.Tensor):
        return up(math.sqrt(int(counts.max())))
    return up(math.sqrt(math.prod(step.shape) / math.prod(step.only().shape)))


@register_rule("aten.cat", "aten.stack", "aten.concat")
def _join(step: Step) -> Value:
    found = step.inputs()
    whole = concatenated(found, step.shape, [1.0] * len(found))
    terms = _regrouped(_without_pairs(found))
    if len(terms) == 1:
        joined = terms[0].times(1.0, step.shape)
    else:
        joined = concatenated(terms, step.shape, [1.0] * len(terms))
    return joined if joined.lipschitz < whole.lipschitz else whole


def _without_pairs(values: list[Value]) -> list[Value]:
    """Replace max(a, b) and min(a, b) by a and b, from which the pair has a distance-keeping map.

    Sorting two numbers never moves two pairs of numbers further apart.
    """
    extrema: dict[tuple[int, ...], dict[str, list[int]]] = {}
    for index, value in enumerate(values):
        kind, operands = _extremum_of(value)
        if kind:
            key = tuple(sorted(id(operand) for operand in operands))
            extrema.setdefault(key, {"max": [], "min": []})[kind].append(index)
    result: list[Value | None] = [*values]
    for found in extrema.values():
        for one, other in zip(found["max"], found["min"], strict=False):
            result[one], result[other] = _extremum_of(values[one])[1]
    return [value for value in result if value is not None]


def _extremum_of(value: Value) -> tuple[str, list[Value]]:
    """Return 'max' or 'min' and the two values of the same shape, if it was computed so."""
    origin = value.origin
    if origin is None or origin.call.op not in EXTREMA:
        return "", []
    operands = [origin.arguments.get("self"), origin.arguments.get("other")]
    if not all(isinstance(o, Value) and o.shape == value.shape for o in operands):
        return "", []
    return EXTREMA[origin.call.op], operands  # type: ignore[return-value]


def _regrouped(values: list[Value]) -> list[Value]:
    """Replace functions of parts of one value by one function of that value.

    If ‖Δv‖ ≤ g·‖Δ part of s‖ for every v, all v together change by at most √c·‖Δs‖, where c is the
    largest sum of g² over the parts that hold one entry of s. The error of s passes on like such a
    change, and the errors since s are of different entries.
    """
    groups: dict[tuple[int, int], list[Part]] = {}
    rest: list[Value] = []
    for value in values:
        part = _part_of(value)
        if part is None:
            rest.append(value)
        else:
            groups.setdefault((id(part.source), part.axis), []).append(part)
    for parts in groups.values():
        sums: dict[int, list[float]] = {}
        for part in parts:
            for place in part.taken:
                sums.setdefault(place, []).append(part.gain)
        counts = {tuple(gains) for gains in sums.values()}
        gains = [g[0] if len(g) == 1 else root_sum(g) for g in counts]
        apart = root_sum_of_errors([part.apart for part in parts])
        rest.append(parts[0].source.times(max(gains, default=0.0), apart=apart))
    return rest


def _part_of(value: Value) -> Part | None:
    """Return the part of an earlier value that determines this one, also through a convolution."""
    if value.linear is None:
        return value.part
    part = value.linear.anchor.part
    return None if part is None else part.then(value.linear.norm, value.apart)


@register_rule("aten.select_scatter", "aten.slice_scatter", "aten.diagonal_scatter")
def _scatter(step: Step) -> Value:
    """Bound a tensor whose entries come from one value or from the other."""
    _check_cast(step)
    return _join(step)


@register_rule("aten.im2col", "aten.col2im")
def _unfold(step: Step) -> float:
    """Return √(number of windows that contain one pixel); col2im is the adjoint of im2col."""
    image = step["output_size"] if "col2im" in step.call.op else step.only().shape[-2:]
    geometry = [axes(step[name], 2) for name in ("kernel_size", "stride", "padding", "dilation")]
    step.read |= step.arguments.keys()
    return up(math.sqrt(math.prod(map(windows, image, *geometry))))


@register_rule("aten.index_select")
def _index_select(step: Step) -> float:
    index = step["index"]
    if not isinstance(index, torch.Tensor):
        raise Unbounded("an index that depends on the input is discontinuous")
    return up(math.sqrt(int(torch.bincount(index.flatten()).max())))


@register_rule("aten.index")
def _index(step: Step) -> float:
    """Return √(largest number of times that constant indices select one entry)."""
    value = step.only()
    if step["self"] is not value:
        raise Unbounded("an index that depends on the input is discontinuous")
    numbers = torch.arange(math.prod(value.shape)).reshape(value.shape)
    indices = [None if i is None else i.cpu() for i in step["indices"]]
    taken = torch.ops.aten.index(numbers, indices)
    return up(math.sqrt(int(torch.bincount(taken.flatten()).max()))) if taken.numel() else 0.0


@register_rule("aten.pad", "aten.constant_pad_nd", "aten.reflection_pad1d", "aten.reflection_pad2d",
               "aten.replication_pad1d", "aten.replication_pad2d", "aten.reflection_pad3d",
               "aten.replication_pad3d")  # fmt: skip
def pad(step: Step) -> Value:
    """Bound by √(largest number of copies of one entry), a product over the axes."""
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
    filled = mode == "zeros" and step.arguments.get("value")  # padded with a value other than zero
    if not filled and all(p >= 0 for pair in pairs for p in pair):
        result.padding = (value, mode, pairs)  # a convolution may absorb the padding
    return result


def _copies(size: int, before: int, after: int, mode: str) -> int:
    if mode == "zeros" or (before <= 0 and after <= 0):
        return 1
    widths: Any = (max(before, 0), max(after, 0))
    return int(np.bincount(np.pad(np.arange(size), widths, NUMPY_MODES[mode])).max())  # type: ignore[call-overload]
