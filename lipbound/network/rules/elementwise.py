"""Rules for activations, arithmetic with constants, reductions and normalizations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.bounds.rounding import norm_above
from lipbound.network.rules.potentials import made_by, potential_of
from lipbound.network.rules.products import product, quotient
from lipbound.network.rules.values import (
    Step,
    Unbounded,
    Value,
    concatenated,
    readings,
    register_rule,
    smallest,
    spread,
    steepest,
    summed,
    up,
)

ROUNDED = 1 + 2.0**-20  # PyTorch's kernels store constants such as √2/2 in float32
SIXTH = 0.16666667163372043  # torch's 1/6 is a float32
# Largest |slope| of operations for which it is a fixed number.
SLOPES = {
    **dict.fromkeys(
        [
            "relu", "relu_", "relu6", "tanh", "hardtanh", "hardtanh_", "softsign",
            "log_sigmoid_forward", "log_sigmoid", "abs", "neg", "sin", "cos", "atan", "asinh",
            "logsumexp", "sort", "topk", "median", "kthvalue", "tril", "triu",
        ],
        1.0,
    ),
    "silu": 1.0998393201288669 * ROUNDED,
    "silu_": 1.0998393201288669 * ROUNDED,
    "mish": 1.0884981612517279 * ROUNDED,
    "hardswish": 9 * SIXTH,
    "hardswish_": 9 * SIXTH,
    "hardsigmoid": SIXTH,
    "selu": 1.7580993408473769 * ROUNDED,
    "selu_": 1.7580993408473769 * ROUNDED,
    "sigmoid": 0.25,
    "erf": 2 / math.sqrt(math.pi) * ROUNDED,
    "softmax": 0.5,
    "_softmax": 0.5,
}  # fmt: skip
GELU = {"none": 1.1289041451851548 * ROUNDED, "tanh": 1.1289930686587718 * ROUNDED}
JUMP = 1e-6  # an implementation that jumps by more counts as discontinuous


def _slope(name: str, slope: float) -> None:
    register_rule(f"aten.{name}")(lambda step: slope if slope == 1 else up(slope))


for _name, _value in SLOPES.items():
    _slope(_name, _value)


@register_rule("aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.clip")
def _clamp(step: Step) -> Value:
    value = step.only()
    return value.times(spread(value, step.shape), step.shape)


@register_rule("aten.gelu")
def _gelu(step: Step) -> float:
    return up(GELU[step["approximate"]])


@register_rule("aten.leaky_relu", "aten.leaky_relu_")
def _leaky(step: Step) -> float:
    return steepest(1.0, step.size("negative_slope", 0.01))


@register_rule("aten.prelu", "aten._prelu_kernel")
def _prelu(step: Step) -> float:
    weight = step["weight"]
    if not isinstance(weight, Tensor):
        raise Unbounded("the slope depends on the input")
    return steepest(1.0, float(weight.abs().max()))


@register_rule("aten.dropout", "aten.native_dropout", "aten.feature_dropout", "aten.alpha_dropout")
def _dropout(step: Step) -> float:
    if step["train"] is not False:  # native_dropout treats None as True
        raise Unbounded("dropout is active even in eval mode; pass training=self.training")
    return 1.0


@register_rule("aten.rrelu")
def _rrelu(step: Step) -> float:
    if step["training"]:
        raise Unbounded("RReLU in training mode is random")
    mean = (step["lower"] + step["upper"]) / 2
    return steepest(1.0, *(up(abs(slope)) for slope in readings(mean, step.call.dtype)))


@register_rule("aten.elu", "aten.elu_")
def _elu(step: Step) -> float:
    if step["input_scale"] < 0:
        raise Unbounded(f"ELU with input_scale={step['input_scale']} grows exponentially")
    scale = step.size("scale")
    slope = up(up(scale * step.size("alpha")) * step.size("input_scale"))
    return steepest(scale, up(slope * ROUNDED))  # ROUNDED, because PyTorch rounds these products


@register_rule("aten.celu", "aten.celu_")
def _celu(step: Step) -> float:
    if step["alpha"] < 0:
        raise Unbounded(f"CELU with alpha={step['alpha']} grows exponentially")
    return ROUNDED  # α·(1/α) need not be 1


@register_rule("aten.softplus")
def _softplus(step: Step) -> Value:
    """Bound softplus by 1, with an error: torch jumps to the identity at βx > threshold.

    The network's precision rounds the threshold, so the jump can come a little earlier.
    """
    threshold = step["threshold"] - abs(step["threshold"]) * 2.0**-20
    jump = up(up(math.log1p(math.exp(-threshold))) / abs(step["beta"]) * ROUNDED)
    if not jump <= JUMP:
        raise Unbounded(
            f"softplus jumps by {jump:.1e} at its threshold {step['threshold']:g}, but at most "
            f"{JUMP:g} is allowed; use the default threshold of 20"
        )
    step.note(f"each entry of softplus jumps by {jump:.1e} at its threshold")
    value = step.only()
    return value.times(1.0, step.shape, apart=up(jump * up(math.sqrt(math.prod(step.shape)))))


@register_rule(
    "aten.hardshrink", "aten.round", "aten.sign", "aten.floor", "aten.ceil", "aten.trunc"
)
def _jumps(step: Step) -> float:
    raise Unbounded("the operation is discontinuous")


@register_rule("aten.threshold")
def _threshold(step: Step) -> float:
    if step["threshold"] != step["value"]:
        raise Unbounded("the operation is discontinuous")
    return 1.0  # max(x, threshold)


@register_rule("aten.log_softmax", "aten._log_softmax")
def _log_softmax(step: Step) -> float:
    return up(math.sqrt(step.shape[step["dim"]]))


@register_rule("aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.rsub")
def add(step: Step) -> Value:
    """Bound a sum. α scales the second term (in rsub the first); both may be broadcast."""
    alpha = step.size("alpha")
    sign = -1.0 if "sub" in step.call.op else 1.0
    terms = [(step["self"], 1.0), (step["other"], alpha)]
    if step.call.op == "aten.rsub":
        terms = [(step["self"], alpha), (step["other"], 1.0)]
    present = [(t, a) for t, a in terms if isinstance(t, Value)]
    gains = [a if spread(t, step.shape) == 1 else up(a * spread(t, step.shape)) for t, a in present]
    result = summed([t for t, _ in present], step.shape, gains)
    if len(present) == 2 and result.lipschitz < math.inf:
        given = step.arguments.get("alpha")
        merged = _merged(step, sign * float(1.0 if given is None else given))
        if merged is not None and merged.lipschitz < result.lipschitz:
            return merged
        potential = potential_of(step)
        if potential is not None and potential.lipschitz < result.lipschitz:
            return potential
    return result


def _merged(step: Step, factor: float) -> Value | None:
    """Bound the sum as one convolution, for each value to which the factor may be rounded."""
    from lipbound.network.rules.linear import sum_of_linears

    found: list[Value] = []
    for alpha in dict.fromkeys(readings(factor, step.call.dtype)):
        pair = (alpha, 1.0) if step.call.op == "aten.rsub" else (1.0, alpha)
        merged = sum_of_linears(step["self"], pair[0], step["other"], pair[1], step)
        if merged is None or merged.linear is None:
            return None
        found.append(merged)
    most = max(found, key=lambda merged: merged.lipschitz)
    kernels = [merged.linear.conv.kernel for merged in found if merged.linear is not None]
    if len(found) > 1 and most.linear is not None:  # the kernel of one reading stands for all
        apart = kernels[0] - kernels[1]
        size = up(math.sqrt(math.prod(apart.shape[2:]))) * norm_above(apart) * (1 + 1e-12)
        linear = replace(most.linear, slack=up(most.linear.slack + up(size)))
        most = replace(most, linear=linear)
    return most


def _is_one_plus_abs(value: Value, of: Any) -> bool:
    """Tell whether a value was computed as 1 + |x| from exactly this x."""
    if value.origin is None or value.origin.call.op != "aten.add":
        return False
    inner, other, alpha = (value.origin.arguments.get(k) for k in ("self", "other", "alpha"))
    return (
        isinstance(other, int | float)
        and other == 1
        and alpha in (None, 1)
        and isinstance(inner, Value)
        and inner.origin is not None
        and inner.origin.call.op == "aten.abs"
        and inner.origin["self"] is of
    )


def _self_gated(one: Value, other: Value) -> Value | None:
    """Return x·σ(x) or x·hardsigmoid(x), which are SiLU and hard swish, if this is one of them."""
    for inner, gate in ((one, other), (other, one)):
        for name, same in (("sigmoid", "silu"), ("hardsigmoid", "hardswish")):
            same_x = made_by(gate, f"aten.{name}").get("self") is inner
            if same_x and not np.any(inner.error) and not np.any(gate.error):
                return inner.times(up(SLOPES[same]))
    return None


@register_rule("aten.mul", "aten.mul_", "aten.div", "aten.div_")
def _multiply(step: Step) -> Value:
    one, other = step["self"], step["other"]
    divided = "div" in step.call.op
    if divided and step.arguments.get("rounding_mode"):
        raise Unbounded("the operation is discontinuous")
    if divided and isinstance(other, Value) and _is_one_plus_abs(other, one):
        return one.times(1.0, step.shape)  # softsign
    if not divided and isinstance(one, Value) and isinstance(other, Value):
        gate = _self_gated(one, other)
        return product(step, "self", "other") if gate is None else gate
    if divided and isinstance(other, Value):
        return quotient(step, "self", "other")
    value, factor = (one, other) if isinstance(one, Value) else (other, one)
    gain = max(_gain(factor, divided, step.call.dtype))
    return value.times(up(gain * spread(value, step.shape)), step.shape)


def _gain(factor: Any, divided: bool, dtype: torch.dtype | None) -> list[float]:
    """Return the largest |factor| or 1/|factor|, in each precision PyTorch may round it to."""
    if isinstance(factor, Tensor) and not factor.ndim and factor.dtype != dtype:
        factor = float(factor)  # a tensor without axes is rounded like a number
    if isinstance(factor, Tensor):
        sizes = factor.double().abs()
        found = float((1 / sizes if divided else sizes).max()) if sizes.numel() else 0.0
        if math.isnan(found):
            raise Unbounded("a constant factor is not a number")
        return [up(found) if divided else found]
    known = [abs(number) for number in readings(factor, dtype)]
    if not divided:
        return known
    if not all(known):
        raise Unbounded("it divides by zero")
    return [up(one) for number in known for one in readings(1 / number, dtype)]


@register_rule("aten.maximum", "aten.minimum")
def _extremum(step: Step) -> Value:
    found = step.inputs()
    return concatenated(found, step.shape, [spread(v, step.shape) for v in found])


@register_rule("aten.max", "aten.min")
def _largest(step: Step) -> Value:
    """Bound a maximum over all entries, over an axis, or of two tensors entry by entry."""
    return _extremum(step) if "other" in step.arguments else step.only().times(1.0, step.call.shape)


def _is_softshrink(condition: Value, one: Any, other: Any) -> Value | None:
    """Return x if this is |x| > λ ? x − λ sign(x) : 0·x, the captured form of softshrink."""
    test = made_by(condition, "aten.gt")
    inner = made_by(test.get("self"), "aten.abs").get("self")
    outside = made_by(one, "aten.sub")
    step = made_by(outside.get("other"), "aten.mul")
    inside = made_by(other, "aten.mul")
    fits = (
        isinstance(inner, Value)
        and outside.get("self") is inner
        and outside.get("alpha") in (None, 1)
        and made_by(step.get("self"), "aten.sign").get("self") is inner
        and isinstance(limit := step.get("other"), int | float)
        and limit >= 0
        and test.get("other") == limit
        and inside.get("self") is inner
        and isinstance(inside.get("other"), int | float)
        and inside.get("other") == 0
    )
    return inner if fits else None


@register_rule("aten.where")
def _where(step: Step) -> Value:
    if isinstance(step["condition"], Value):
        inner = _is_softshrink(step["condition"], step["self"], step["other"])
        if inner is None:
            raise Unbounded("a condition that depends on the input is discontinuous")
        return inner.times(1.0, step.shape)
    return _extremum(step)


@register_rule("aten.masked_fill", "aten.masked_fill_")
def _masked_fill(step: Step) -> Value:
    if isinstance(step["mask"], Value) and step["mask"].lipschitz > 0:
        raise Unbounded("a mask that depends on the input is discontinuous")
    return _extremum(step)


@register_rule("aten.cumsum")
def _cumsum(step: Step) -> float:
    """Return σ1 of the n×n triangular matrix of ones: 1/(2 sin(π/(4n + 2)))."""
    size = step.shape[step["dim"]] if step.shape else 1
    return up(0.5 / math.sin(math.pi / (4 * size + 2)) * (1 + 2.0**-48))


@register_rule("aten.mean", "aten.sum", "aten.amax", "aten.amin", "aten.linalg_vector_norm")
def _reduce(step: Step) -> Value:
    value = step.only()
    count = math.prod(value.shape) / max(1, math.prod(step.shape))
    if step.call.op == "aten.linalg_vector_norm" and step["ord"] != 2:
        raise Unbounded(f"there is no rule for a norm of order {step['ord']}")
    root = up(math.sqrt(count))
    mean = up(root * max(readings(1 / count, step.call.dtype)))
    return value.times({"aten.mean": mean, "aten.sum": root}.get(step.call.op, 1.0), step.shape)


def _normalized(step: Step, count: int) -> float:
    """Bound by ‖diag(γ)P‖/√ε ≤ max|γ|/√ε: x ↦ Px/√(var + ε) is steepest at var = 0."""
    weight, eps = step["weight"], smallest(step["eps"], step.call.dtype)
    if not eps > 0:
        raise Unbounded("a normalization with eps=0 is arbitrarily steep near constant inputs")
    gamma = 1.0 if weight is None else float(weight.abs().max())
    return 0.0 if count == 1 else up(gamma / math.sqrt(eps) * (1 + 1e-12))


@register_rule("aten.layer_norm", "aten.native_layer_norm")
def _layer_norm(step: Step) -> float:
    return _normalized(step, math.prod(step["normalized_shape"]))


@register_rule("aten.group_norm")
def _group_norm(step: Step) -> float:
    return _normalized(step, math.prod(step.shape[1:]) // step["num_groups"])


@register_rule("aten.instance_norm")
def _instance_norm(step: Step) -> Any:
    if step["use_input_stats"]:
        return _normalized(step, math.prod(step.shape[2:]))
    from lipbound.network.rules.linear import batch_norm

    return batch_norm(step)  # with running statistics it is a BatchNorm
