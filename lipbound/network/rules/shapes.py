"""Rules for operations that move, copy, cut or join entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lipbound.geometry import NUMPY_MODES
from lipbound.network.rules.values import (
    Step,
    Unbounded,
    Value,
    axes,
    concatenated,
    register_rule,
    spread,
    up,
    windows,
)

MOVES = [
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t",
    "movedim", "squeeze", "unsqueeze", "contiguous", "clone", "alias", "detach", "_to_copy", "to",
    "slice", "select", "narrow", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "roll",
    "flip", "lift_fresh_copy", "type_as", "diagonal", "rot90", "T",
]  # fmt: skip


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
    step.read.add("self")
    _check_cast(step)
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
    return concatenated(found, step.shape, [1.0] * len(found))


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
