"""Operations that move, copy, cut or join entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gmpy2 import mpfr
from torch import Tensor
from torch.utils._pytree import tree_map

from verify.real_operations.steps import Array, Step, entries, operation


@operation(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "T",
    "movedim", "squeeze", "unsqueeze", "contiguous", "clone", "alias", "detach", "lift_fresh_copy",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "roll", "flip", "rot90", "diagonal",
    "split", "chunk", "split_with_sizes", "unbind", "tensor_split", "slice", "select", "narrow",
    "expand", "expand_as", "repeat", "repeat_interleave", "cat", "stack", "concat", "copy",
    "select_scatter", "slice_scatter", "diagonal_scatter", "index_select", "index", "gather",
    "im2col", "tril", "triu", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
)  # fmt: skip
def _moved(step: Step) -> Any:
    """Number the entries of all arguments, let PyTorch move the numbers, and take the entries.

    Number 0 is a zero, which stands in padding and outside of a triangle.
    """
    if step.call.overload == "dtype":
        raise step.unknown("a cast")
    pool: list[Any] = [mpfr(0)]

    def numbered(argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            argument = step.real(argument)
        if not isinstance(argument, np.ndarray):
            return argument
        if argument.dtype != object:
            return torch.from_numpy(argument)
        first = len(pool)
        pool.extend(argument.ravel())
        assert len(pool) < 1 << 24  # numbers that a float32 holds
        return torch.arange(first, len(pool), dtype=step.dtype).reshape(argument.shape)

    run = getattr(getattr(torch.ops.aten, step.name), step.call.overload)
    args, kwargs = tree_map(numbered, (step.call.args, step.call.kwargs))
    taken = np.empty(len(pool), dtype=object)
    taken[:] = pool
    return tree_map(lambda places: entries(taken[places.long().numpy()]), run(*args, **kwargs))


@operation("pad", "constant_pad_nd")
def _pad(step: Step) -> Array:
    """Pad with a constant, or with copies, which PyTorch chooses."""
    value, mode = step.array("self"), step["mode"] or "constant"
    places = torch.arange(1, value.size + 1, dtype=step.dtype).reshape(value.shape)
    if mode == "constant":
        padded = torch.nn.functional.pad(places, step["pad"], value=0)
    else:
        padded = torch.nn.functional.pad(places, step["pad"], mode)
    pool = np.empty(value.size + 1, dtype=object)
    pool[0], pool[1:] = step.number("value", 0.0), value.ravel()
    return entries(pool[padded.long().numpy()])


@operation("_to_copy", "to", "type_as")
def _cast(step: Step) -> Array:
    if step.call.dtype not in (torch.float32, torch.float64):
        raise step.unknown(f"the type {step.call.dtype}")
    return step.array("self")  # a cast to float32 only rounds


@operation("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def _constant(step: Step) -> Array:
    fill = 0.0 if "zeros" in step.name else 1.0 if "ones" in step.name else step["fill_value"]
    assert step.call.shape is not None
    return np.full(step.call.shape, step.read(fill), dtype=object)


@operation("dropout", "native_dropout", "feature_dropout", "alpha_dropout")
def _dropout(step: Step) -> Any:
    if step["train"] is not False:
        raise step.unknown("train=True")
    given = step.array("self" if step["self"] is not None else "input")
    return given if step.call.results == 1 else [given, np.ones(given.shape, dtype=bool)]
