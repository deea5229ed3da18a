"""Interval arithmetic: the range of each operation's result from the ranges of its arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lipbound.bounds.rounding import norm_above
from lipbound.geometry import convolution
from lipbound.modules import batch_norm_gains
from lipbound.network.graph import Reference
from lipbound.network.rules.ranges import (
    ROOM,
    TINY,
    UNIT,
    Range,
    Ranged,
    inverse,
    register,
    widened,
)
from lipbound.network.rules.shapes import MOVES
from lipbound.network.rules.values import Unbounded, layer_bracket, up


@register("getitem")
def _one_of_several(step: Ranged) -> Any:
    return step["0"][step["1"]]


# Each entry of the result is an entry of an argument, and no entry is taken twice.
ONCE = [
    *MOVES, "slice", "select", "narrow", "split", "chunk", "split_with_sizes", "unbind",
    "tensor_split", "dropout", "native_dropout", "feature_dropout", "alpha_dropout",
]  # fmt: skip
TWICE = [
    "cat", "stack", "concat", "expand", "expand_as", "repeat", "index_select", "index", "im2col",
    "constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
    "replication_pad2d", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices",
    "amax", "amin", "maximum", "minimum", "sort", "topk",
]  # fmt: skip


@register(*ONCE, *TWICE)
def _taken(step: Ranged) -> Any:
    """Range of an operation that only selects entries: its result grows with every entry."""
    ranges = step.ranges()
    low, high = step.run(lambda r: r.low), step.run(lambda r: r.high)
    once = step.call.op.removeprefix("aten.") in ONCE
    norm = ranges[0].norm if once else math.inf
    if "pad" in step.call.op:  # the network may round the number with which it pads
        return widened(low, high, step.slack() * torch.maximum(low.abs(), high.abs()))
    if isinstance(low, Tensor):
        return Range.of(low, high, norm)
    pairs = zip(low, high, strict=True)
    return [Range.of(a, b, norm) if a.is_floating_point() else None for a, b in pairs]


GROWING = [
    "relu", "relu_", "relu6", "tanh", "hardtanh", "hardtanh_", "log_sigmoid", "selu", "sigmoid",
    "hardsigmoid", "erf", "atan", "asinh", "celu", "elu", "clamp", "clamp_min",
    "clamp_max", "clip", "exp", "logsumexp", "leaky_relu", "leaky_relu_",
]  # fmt: skip
NEARER_TO_0 = {"aten.relu", "aten.relu_", "aten.relu6", "aten.tanh", "aten.atan", "aten.asinh"}


@register(*GROWING)
def _growing(step: Ranged) -> Range:
    """Range of an increasing function. Nothing need be known about its argument."""
    if step.call.op.startswith("aten.leaky_relu") and step["negative_slope"] < 0:
        raise Unbounded("it does not increase")
    if step.call.op == "aten.elu" and min(step[n] for n in ("alpha", "scale", "input_scale")) < 0:
        raise Unbounded("it does not increase")
    if step.call.op == "aten.celu" and step["alpha"] < 0:
        raise Unbounded("it does not increase")
    given = step.call.arguments()
    (name,) = [n for n, argument in given.items() if isinstance(argument, Reference)]
    before, terms = step[name], 1
    if step.call.op == "aten.logsumexp":
        terms = step.known(name).low.numel()
    elif before is None:
        shape = step.call.shape or ()
        everything = torch.full(shape, math.inf, dtype=torch.float64, device=step.device)
        before = Range(-everything, everything, math.inf)
        step.given[name] = before
    low, high = step.run(lambda r: r.low), step.run(lambda r: r.high)
    by = step.slack(terms) * (1 + torch.maximum(low.abs(), high.abs()))
    norm = before.norm * ROOM if step.call.op in NEARER_TO_0 else math.inf
    return widened(low, high, by, norm)


LEAST = {
    "aten.silu": (-0.27847, -1.279, -1.278), "aten.gelu": (-0.17005, -0.753, -0.751),
    "aten.mish": (-0.30885, -1.193, -1.192), "aten.hardswish": (-0.37501, -1.501, -1.499),
}  # fmt: skip
"""Operation → a number below its least value, and two between which it is attained."""


@register(*LEAST, "aten.silu_", "aten.hardswish_")
def _dipping(step: Ranged) -> Range:
    """Range of a function that falls to its least value, below 0, and then grows."""
    before = step.ranges()[0]
    ends = step.run(lambda r: r.low), step.run(lambda r: r.high)
    high = torch.maximum(*ends)
    least, left, right = LEAST[step.call.op.removesuffix("_")]
    one_side = (before.high <= left) | (before.low >= right)
    low = torch.where(one_side, torch.minimum(*ends), least)
    by = step.slack() * (before.size + high.abs())
    return widened(low, high, by, before.norm * (1 + 1e-6))  # 6·(1/6) may be above 1


@register("abs", "neg", "sin", "cos", "softsign")
def _simple(step: Ranged) -> Range:
    name = step.call.op.removeprefix("aten.")
    if name in ("sin", "cos", "softsign"):
        one = torch.ones(step.call.shape or (), dtype=torch.float64, device=step.device)
        return Range.of(-one, one)
    before = step.ranges()[0]
    if name == "neg":
        return Range(-before.high, -before.low, before.norm)
    inside = (before.low <= 0) & (before.high >= 0)
    least = torch.where(inside, 0.0, torch.minimum(before.low.abs(), before.high.abs()))
    return Range(least, before.size, before.norm)


@register(
    "mean", "sum", "cumsum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d",
)  # fmt: skip
def _averaged(step: Ranged) -> Range:
    """Range of a sum with weights ≥ 0, which grows with every entry."""
    before = step.ranges()[0]
    size = step.run(lambda r: r.size)
    low, high = step.run(lambda r: r.low), step.run(lambda r: r.high)
    if (step.given.get("divisor_override") or 1) < 0:
        raise Unbounded("its weights are negative")
    divided = 0.01 if step.call.dtype in (torch.float16, torch.bfloat16) else 1e-6
    return widened(low, high, (step.slack(before.low.numel()) + divided) * size.abs())


@register("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
          "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
          "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")  # fmt: skip
def _interpolated(step: Ranged) -> Range:
    """Each entry is a mean of entries of its channel; which ones depends on rounding."""
    before, shape = step.ranges()[0], step.call.shape or ()
    places = tuple(range(2, len(shape)))
    low, high = before.low.amin(places, True), before.high.amax(places, True)
    by = 1e-6 * torch.maximum(low.abs(), high.abs())
    return widened(low.expand(shape), high.expand(shape), by)


def _affine(
    step: Ranged, name: str, without: dict[str, Any], terms: int, norm: float = math.inf
) -> Range:
    """Range of an operation that is linear in one argument and has constants otherwise.

    Args:
        step: The call.
        name: The argument with a range.
        without: Arguments that make it the sum of sizes: no bias, and sizes of the weights.
        terms: Number of terms of a sum.
        norm: Limit of the norm.
    """
    before = step.known(name)
    middle = (before.low + before.high) / 2
    radius = torch.maximum(before.high - middle, middle - before.low) * (1 + 4 * UNIT)
    slack = step.slack(terms)
    at = step.run(lambda _: middle)
    wide = step.run(lambda _: radius + slack * (middle.abs() + radius) + TINY, **without)
    by = wide.abs() * (1 + slack) + slack * at.abs()  # alpha of addmm may be negative
    return widened(at - by, at + by, UNIT * at.abs(), norm)


@register("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
           "conv_transpose3d", "convolution")  # fmt: skip
def _convolved(step: Ranged) -> Range:
    weight = _constant(step["weight"])
    return _affine(step, "input", {"weight": weight.abs(), "bias": None}, weight.numel())


@register("linear", "addmm", "mm", "matmul", "bmm", "baddbmm")
def _matrix(step: Ranged) -> Range:
    names = {"linear": ("input", "weight"), "addmm": ("mat1", "mat2"), "mm": ("self", "mat2"),
             "matmul": ("self", "other"), "bmm": ("self", "mat2"),
             "baddbmm": ("batch1", "batch2")}[step.call.op.removeprefix("aten.")]  # fmt: skip
    left, right = (step[name] for name in names)
    bias = {"linear": "bias", "addmm": "self", "baddbmm": "self"}.get(
        step.call.op.removeprefix("aten."), ""
    )
    if bias and step[bias] is not None:
        _constant(step[bias])
    if isinstance(left, Range) and isinstance(right, Range):
        if bias and step[bias] is not None:
            raise Unbounded("a sum with a product of two activations has no range")
        size = step.run(lambda r: r.size)
        wide = size * (1 + step.slack(left.low.shape[-1])) + TINY
        return Range.of(-wide, wide, up(left.norm * right.norm) * ROOM)
    value, matrix = names if isinstance(left, Range) else names[::-1]
    weight = _constant(step[matrix])
    zero = {} if not bias else {bias: None if bias == "bias" else torch.zeros_like(step[bias])}
    norm = math.inf
    if step.call.op == "aten.linear":
        extra = 0.0
        if step["bias"] is not None:
            rows = math.prod(step.known("input").low.shape[:-1])
            extra = up(norm_above(step["bias"]) * up(math.sqrt(rows)))
        gain = layer_bracket(convolution(weight), step.options).upper
        norm = up(up(gain * step.known("input").norm) + extra) * ROOM
    return _affine(step, value, {matrix: weight.abs(), **zero}, weight.numel(), norm)


def _constant(given: Any) -> Tensor:
    if not isinstance(given, Tensor):
        raise Unbounded("not a constant")
    return given


@register("_native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm",
           "native_batch_norm")  # fmt: skip
def _batch_norm(step: Ranged) -> Any:
    before = step.known("input")
    mean, variance = _constant(step["running_mean"]), _constant(step["running_var"])
    gains = batch_norm_gains(variance, step["weight"], step["eps"])
    tail = [-1, *[1] * (before.low.ndim - 2)]
    gains, mean = gains.reshape(tail), mean.reshape(tail)
    shift = 0.0 if step["bias"] is None else step["bias"].reshape(tail)
    ends = [(end - mean) * gains + shift for end in (before.low, before.high)]
    slack = step.slack()
    by = slack * ((before.size + mean.abs()) * gains.abs() + torch.as_tensor(shift).abs())
    found = widened(torch.minimum(*ends), torch.maximum(*ends), by)
    return found if step.call.results == 1 else [found, *[None] * (step.call.results - 1)]


@register("add", "add_", "sub", "sub_", "rsub")
def _added(step: Ranged) -> Range:
    alpha = step["alpha"] if step["alpha"] is not None else 1
    factors = {"self": 1.0, "other": float(alpha) * (-1 if "sub" in step.call.op else 1)}
    if step.call.op == "aten.rsub":
        factors = {"self": -float(alpha), "other": 1.0}
    low = high = size = torch.zeros((), dtype=torch.float64, device=step.device)
    norm = 0.0
    for name, factor in factors.items():
        one = _as_range(step, name)
        ends = one.low * factor, one.high * factor
        low, high = low + torch.minimum(*ends), high + torch.maximum(*ends)
        size = size + one.size * abs(factor)
        norm = norm + abs(factor) * one.norm if one.low.shape == step.call.shape else math.inf
    return widened(low, high, step.slack() * size, norm * (1 + step.slack()) * ROOM)


def _as_range(step: Ranged, name: str) -> Range:
    """Return the range of an argument; a constant is one."""
    given = step[name]
    if isinstance(given, int | float):
        given = torch.tensor(float(given), dtype=torch.float64, device=step.device)
    if isinstance(given, Tensor):  # also of integers, whose sizes could overflow
        return Range.of(given.double(), given.double())
    return step.known(name)


@register("mul", "mul_", "div", "div_")
def _multiplied(step: Ranged) -> Range:
    one, other = _as_range(step, "self"), _as_range(step, "other")
    if "div" in step.call.op:
        if step.given.get("rounding_mode"):
            raise Unbounded("it jumps")
        other = inverse(other)
    corners = torch.stack([a * b for a in (one.low, one.high) for b in (other.low, other.high)])
    by = step.slack() * corners.abs().amax(0)
    norms = [up(a.norm * b.largest) for a, b in ((one, other), (other, one))
             if a.low.shape == step.call.shape]  # fmt: skip
    norm = min(norms, default=math.inf) * (1 + step.slack()) * ROOM
    return widened(corners.amin(0), corners.amax(0), by, norm)


@register("pow", "square")
def _power(step: Ranged) -> Range:
    before, power = step.known("self"), step.given.get("exponent", 2)
    if not isinstance(power, int | float) or power != int(power) or power < 1:
        raise Unbounded("only for whole exponents")
    ends = before.low**power, before.high**power
    low = torch.minimum(*ends)
    if int(power) % 2 == 0:
        low = torch.where((before.low <= 0) & (before.high >= 0), 0.0, low)
    high = torch.maximum(*ends)
    return widened(low, high, step.slack() * power * high.abs().maximum(low.abs()))


@register("sqrt", "rsqrt", "reciprocal", "log")
def _positive(step: Ranged) -> Range:
    """Range of a monotone function of numbers > 0."""
    before = step.known("self")
    if not bool((before.low > 0).all()):
        raise Unbounded("its argument may be 0")
    ends = step.run(lambda r: r.low), step.run(lambda r: r.high)
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    return widened(low, high, step.slack() * torch.maximum(low.abs(), high.abs()))


@register("softmax", "_softmax")
def _softmax(step: Ranged) -> Range:
    """Numbers in [0, 1] with sum 1 have norm at most 1."""
    shape = step.call.shape or ()
    count = math.prod(shape) / max(1, shape[step["dim"]] if shape else 1)
    zeros = torch.zeros(shape, dtype=torch.float64, device=step.device)
    return Range.of(zeros, torch.ones_like(zeros), up(math.sqrt(count)))


@register("layer_norm", "native_layer_norm", "group_norm", "instance_norm")
def _normalized(step: Ranged) -> Any:
    """Numbers of mean 0 and variance at most 1 have norm at most √n, and entries at most √(n−1)."""
    shape = step.call.shape
    if shape is None:
        raise Unbounded("its shape is not known")
    if step.call.op == "aten.instance_norm" and not step["use_input_stats"]:
        return _batch_norm(step)
    layer = "layer_norm" in step.call.op
    count = math.prod(step["normalized_shape"]) if layer else math.prod(shape[2:])
    if step.call.op == "aten.group_norm":
        count = math.prod(shape[1:]) // step["num_groups"]
    entry, groups = up(math.sqrt(max(0, count - 1))), math.prod(shape) / count
    weight, bias = step["weight"], step["bias"]
    tail = [] if layer else [1] * (len(shape) - 2)
    one = torch.ones((), dtype=torch.float64, device=step.device)
    gamma = one if weight is None else weight.reshape(*weight.shape, *tail)
    beta = 0 * one if bias is None else bias.reshape(*bias.shape, *tail)
    size = (entry * (1 + 1e-9) * gamma.abs()).expand(shape)
    slack = 1e-9 * (size + beta.abs())
    shift = 0.0 if bias is None else norm_above(bias) * math.sqrt(math.prod(shape) / bias.numel())
    norm = float(gamma.abs().max()) * math.sqrt(count * groups) + shift
    return widened(beta - size, beta + size, slack, norm * ROOM)


@register("scaled_dot_product_attention")
def _attended(step: Ranged) -> Range:
    """Each row is a mean of the rows of the value, or 0 if all of them are masked."""
    value, shape = step.known("value"), step.call.shape or ()
    low, high = value.low.amin(-2, True).clamp_max(0), value.high.amax(-2, True).clamp_min(0)
    low, high = low.expand(shape), high.expand(shape)
    return widened(low, high, 1e-9 * torch.maximum(low.abs(), high.abs()))


@register("glu")
def _gated(step: Ranged) -> Range:
    """Each entry is one of the first half times a number in [0, 1]."""
    before = step.known("self")
    low, high = (end.chunk(2, step["dim"])[0] for end in (before.low, before.high))
    return Range.of(low.clamp_max(0), high.clamp_min(0), before.norm)
