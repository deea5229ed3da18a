"""Activations by their largest slope, arithmetic with constants, reductions, normalizations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lipbound.rules.values import (
    Step,
    Unbounded,
    Value,
    register_rule,
    root_sum,
    spread,
    steepest,
    up,
)

# Largest |slope| where it is one number.
SLOPES = {
    **dict.fromkeys(
        [
            "relu", "relu_", "relu6", "tanh", "hardtanh", "hardtanh_", "softsign",
            "log_sigmoid_forward", "log_sigmoid", "abs", "neg", "sin", "cos", "atan", "asinh",
            "logsumexp",
        ],
        1.0,
    ),
    "silu": 1.0998393201288669,
    "silu_": 1.0998393201288669,
    "mish": 1.0884981612517279,
    "hardswish": 1.5,
    "hardswish_": 1.5,
    "hardsigmoid": 0.16666667163372043,  # torch's 1/6 is a float32
    "selu": 1.7580993408473769,
    "selu_": 1.7580993408473769,
    "sigmoid": 0.25,
    "erf": 2 / math.sqrt(math.pi),
    "softmax": 0.5,
    "_softmax": 0.5,
}  # fmt: skip
GELU = {"none": 1.1289041451851548, "tanh": 1.1289930686587718}


def _slope(name: str, slope: float) -> None:
    register_rule(f"aten.{name}")(lambda step: slope if slope == 1 else up(slope))


for _name, _value in SLOPES.items():
    _slope(_name, _value)


@register_rule("aten.clamp", "aten.clamp_min", "aten.clamp_max")
def _clamp(step: Step) -> Value:
    value = step.only()
    return value.times(spread(value, step.shape), step.shape)


@register_rule("aten.gelu")
def _gelu(step: Step) -> float:
    return up(GELU[step["approximate"]])


@register_rule("aten.leaky_relu", "aten.leaky_relu_")
def _leaky(step: Step) -> float:
    return steepest(1.0, step["negative_slope"])


@register_rule("aten.prelu", "aten._prelu_kernel")
def _prelu(step: Step) -> float:
    weight = step["weight"]
    if not isinstance(weight, Tensor):
        raise Unbounded("a slope that depends on the input")
    return steepest(1.0, float(weight.abs().max()))


@register_rule("aten.dropout", "aten.native_dropout", "aten.feature_dropout", "aten.alpha_dropout")
def _dropout(step: Step) -> float:
    if step["train"] is not False:  # native_dropout takes None for True
        raise Unbounded("dropout is active even in eval mode: pass training=self.training")
    return 1.0


@register_rule("aten.rrelu")
def _rrelu(step: Step) -> float:
    if step["training"]:
        raise Unbounded("RReLU in training mode is random")
    return steepest(1.0, up(abs((step["lower"] + step["upper"]) / 2)))


@register_rule("aten.elu", "aten.elu_")
def _elu(step: Step) -> float:
    if step["input_scale"] < 0:
        raise Unbounded(f"ELU with input_scale={step['input_scale']} grows exponentially")
    scale = abs(step["scale"])
    return up(steepest(scale, up(scale * abs(step["alpha"] * step["input_scale"]))))


@register_rule("aten.celu", "aten.celu_")
def _celu(step: Step) -> float:
    if step["alpha"] < 0:
        raise Unbounded(f"CELU with alpha={step['alpha']} grows exponentially")
    return 1.0


@register_rule("aten.softplus")
def _softplus(step: Step) -> float:
    # torch switches to the identity at beta·x > threshold: a jump of log(1 + e^-threshold)/beta.
    if math.log1p(math.exp(-step["threshold"])) / abs(step["beta"]) > 1e-6:
        raise Unbounded(f"softplus jumps at its threshold {step['threshold']}")
    return 1.0


@register_rule("aten.hardshrink", "aten.threshold", "aten.round", "aten.sign", "aten.floor")
def _jumps(step: Step) -> float:
    raise Unbounded("it is discontinuous")


@register_rule("aten.log_softmax", "aten._log_softmax")
def _log_softmax(step: Step) -> float:
    return up(math.sqrt(step.shape[step["dim"]]))


@register_rule("aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.rsub")
def add(step: Step) -> Value:
    """α scales the second (of rsub the first); both may be spread by broadcasting."""
    from lipbound.rules.linear import sum_of_linears

    given = step.arguments.get("alpha")
    alpha = 1.0 if given is None else float(given)
    sign = -1.0 if "sub" in step.call.op else 1.0
    terms = [(step["self"], 1.0), (step["other"], sign * alpha)]
    if step.call.op == "aten.rsub":
        terms = [(step["self"], -alpha), (step["other"], 1.0)]
    present = [(t, a) for t, a in terms if isinstance(t, Value)]
    total = 0.0
    for term, factor in present:
        total = up(total + up(abs(factor) * up(term.lipschitz * spread(term, step.shape))))
    result = Value(step.shape, total, reason=next((t.why for t, _ in present if t.why), ""))
    if len(present) == 2 and total < math.inf:
        merged = sum_of_linears(*present[0], *present[1], step)
        if merged is not None and merged.lipschitz < result.lipschitz:
            return merged
    return result


def _is_one_plus_abs(value: Value, of: Any) -> bool:
    """Whether a value was computed as 1 + |x| of that very x."""
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


@register_rule("aten.mul", "aten.mul_", "aten.div", "aten.div_")
def _multiply(step: Step) -> Value:
    one, other = step["self"], step["other"]
    divided = "div" in step.call.op
    if divided and step.arguments.get("rounding_mode"):
        raise Unbounded("it is discontinuous")
    if divided and isinstance(other, Value) and _is_one_plus_abs(other, one):
        return one.times(1.0, step.shape)  # softsign
    if not divided and isinstance(one, Value) and isinstance(other, Value):
        raise Unbounded("a product of two activations has no global Lipschitz constant")
    if divided and isinstance(other, Value):
        raise Unbounded("division by an activation has no global Lipschitz constant")
    value, factor = (one, other) if isinstance(one, Value) else (other, one)
    gain = max(float((1 / sizes if divided else sizes).max()) for sizes in _sizes(factor))
    if math.isnan(gain):
        raise Unbounded("a constant that it multiplies with is not a number")
    return value.times(up(gain * spread(value, step.shape)), step.shape)


def _sizes(factor: Any) -> list[Tensor]:
    """|factor|; of a Python number also what a float32 network makes of it."""
    if isinstance(factor, Tensor):
        return [factor.double().abs()]
    exact = torch.tensor(float(factor), dtype=torch.float64).abs()
    rounded = exact.float().double()
    return [exact, rounded] if 0 < rounded < math.inf else [exact]


@register_rule("aten.maximum", "aten.minimum")
def _extremum(step: Step) -> Value:
    found = step.inputs()
    sizes = [up(v.lipschitz * spread(v, step.shape)) for v in found]
    return Value(step.shape, root_sum(sizes), reason=next((v.why for v in found if v.why), ""))


@register_rule("aten.where")
def _where(step: Step) -> Value:
    if isinstance(step["condition"], Value):
        raise Unbounded("a choice that depends on the input is discontinuous")
    return _extremum(step)


@register_rule("aten.mean", "aten.sum", "aten.amax", "aten.amin", "aten.linalg_vector_norm")
def _reduce(step: Step) -> Value:
    value = step.only()
    count = math.prod(value.shape) / max(1, math.prod(step.shape))
    if step.call.op == "aten.linalg_vector_norm" and step["ord"] != 2:
        raise Unbounded(f"a norm of order {step['ord']} has no rule")
    gains = {"aten.mean": 1 / math.sqrt(count), "aten.sum": math.sqrt(count)}
    return value.times(up(gains.get(step.call.op, 1.0)), step.shape)


def _normalized(count: int, weight: Any, eps: float) -> float:
    """‖diag(γ)P‖/√ε ≤ max|γ|/√ε: x ↦ Px/√(var + ε) has its steepest point at var = 0."""
    if not eps > 0:
        raise Unbounded("a normalization with eps=0 is arbitrarily steep near constant inputs")
    gamma = 1.0 if weight is None else float(weight.abs().max())
    return 0.0 if count == 1 else up(gamma / math.sqrt(eps) * (1 + 1e-12))


@register_rule("aten.layer_norm", "aten.native_layer_norm")
def _layer_norm(step: Step) -> float:
    return _normalized(math.prod(step["normalized_shape"]), step["weight"], step["eps"])


@register_rule("aten.group_norm")
def _group_norm(step: Step) -> float:
    count = math.prod(step.shape[1:]) // step["num_groups"]
    return _normalized(count, step["weight"], step["eps"])


@register_rule("aten.instance_norm")
def _instance_norm(step: Step) -> float:
    if not step["use_input_stats"]:
        raise Unbounded("InstanceNorm with running statistics has no rule")
    return _normalized(math.prod(step.shape[2:]), step["weight"], step["eps"])


@register_rule("aten.scaled_dot_product_attention")
def _attention(step: Step) -> float:
    raise Unbounded("attention multiplies activations and has no global Lipschitz constant")


@register_rule("aten.bmm", "aten.baddbmm")
def _batched_product(step: Step) -> float:
    if len(step.inputs()) > 1:
        raise Unbounded("a product of two activations has no global Lipschitz constant")
    raise Unbounded("a product with a batch of matrices has no rule")
