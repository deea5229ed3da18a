"""Activations and arithmetic entry by entry."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import gmpy2
import numpy as np
from gmpy2 import mpfr
from torch import Tensor

from verify.real_operations.steps import Array, Step, entries, mapped, operation

SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _sigmoid(x: mpfr) -> mpfr:
    return 1 / (1 + gmpy2.exp(-x))


def _softplus(x: mpfr) -> mpfr:
    return max(x, mpfr(0)) + gmpy2.log1p(gmpy2.exp(-abs(x)))


def _sixths(x: mpfr) -> mpfr:
    return min(max(x + 3, mpfr(0)), mpfr(6)) / 6


ENTRYWISE: dict[str, Callable[[mpfr], Any]] = {
    "relu": lambda x: max(x, mpfr(0)),
    "relu6": lambda x: min(max(x, mpfr(0)), mpfr(6)),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * gmpy2.tanh(_softplus(x)),
    "log_sigmoid": lambda x: -_softplus(-x),
    "softsign": lambda x: x / (1 + abs(x)),
    "hardsigmoid": _sixths,
    "hardswish": lambda x: x * _sixths(x),
    "abs": abs,
    "neg": operator.neg,
    "sign": lambda x: mpfr(gmpy2.sign(x)),
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / gmpy2.sqrt(x),
    "round": gmpy2.rint,
    **{
        name: getattr(gmpy2, name)
        for name in (
            "tanh", "sin", "cos", "atan", "asinh", "erf", "exp", "expm1", "log", "log1p", "sqrt",
            "floor", "ceil", "trunc", "square",
        )
    },
}  # fmt: skip


def _entrywise(name: str, function: Callable[[mpfr], Any]) -> None:
    operation(name)(lambda step: mapped(function, step.array("self")))


for _name, _function in ENTRYWISE.items():
    _entrywise(_name, _function)


@operation("log_sigmoid_forward")
def _log_sigmoid_forward(step: Step) -> list[Any]:
    return [mapped(ENTRYWISE["log_sigmoid"], step.array("self")), None]


@operation("gelu")
def _gelu(step: Step) -> Array:
    if step["approximate"] == "tanh":
        inner, cubic = gmpy2.sqrt(2 / gmpy2.const_pi()), step.read(0.044715)

        def gelu(x: mpfr) -> mpfr:
            return x * (1 + gmpy2.tanh(inner * (x + cubic * x**3))) / 2
    else:
        root = gmpy2.sqrt(mpfr(2))

        def gelu(x: mpfr) -> mpfr:
            return x * gmpy2.erfc(-x / root) / 2

    return mapped(gelu, step.array("self"))


@operation("leaky_relu")
def _leaky(step: Step) -> Array:
    return _bent(step.array("self"), step.number("negative_slope", 0.01))


def _bent(x: Array, slope: Any) -> Array:
    return mapped(lambda x, a: x if x > 0 else a * x, x, entries(slope))


@operation("rrelu")
def _rrelu(step: Step) -> Array:
    if step["training"]:
        raise step.unknown("training=True")
    return _bent(step.array("self"), step.read((step["lower"] + step["upper"]) / 2))


@operation("prelu", "_prelu_kernel")
def _prelu(step: Step) -> Array:
    x, weight = step.array("self"), step.array("weight")
    if step.name == "prelu" and x.ndim > 1:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return _bent(x, weight)


@operation("elu", "celu", "selu")
def _elu(step: Step) -> Array:
    alpha, scale, inside = (step.number(name) for name in ("alpha", "scale", "input_scale"))
    if step.name.startswith("celu"):
        inside = step.read(1 / (1.0 if step["alpha"] is None else step["alpha"]))
    if step.name.startswith("selu"):
        alpha, scale = map(step.read, SELU)
    below = scale * alpha
    return mapped(
        lambda x: scale * x if x > 0 else below * gmpy2.expm1(inside * x), step.array("self")
    )


@operation("softplus")
def _softplus_step(step: Step) -> Array:
    """Return softplus with PyTorch's jump: beyond the threshold it is x."""
    beta, most = step.number("beta"), step.number("threshold", 20.0)
    return mapped(
        lambda x: x if beta * x > most else _softplus(beta * x) / beta, step.array("self")
    )


@operation("threshold")
def _threshold(step: Step) -> Array:
    least, other = step.number("threshold"), step.number("value")
    return mapped(lambda x: x if x > least else other, step.array("self"))


@operation("hardshrink")
def _hardshrink(step: Step) -> Array:
    least = step.number("lambd", 0.5)
    return mapped(lambda x: mpfr(0) if -least <= x <= least else x, step.array("self"))


@operation("hardtanh")
def _hardtanh(step: Step) -> Array:
    low, high = step.number("min_val", -1.0), step.number("max_val", 1.0)
    return mapped(lambda x: min(max(x, low), high), step.array("self"))


@operation("clamp", "clamp_min", "clamp_max", "clip")
def _clamp(step: Step) -> Array:
    x = step.array("self")
    if step["min"] is not None:
        x = np.maximum(x, step.array("min"))
    return entries(x if step["max"] is None else np.minimum(x, step.array("max")))


@operation("pow")
def _pow(step: Step) -> Array:
    return mapped(operator.pow, step.array("self"), step.array("exponent"))


@operation("add", "sub", "rsub")
def _add(step: Step) -> Array:
    alpha = step.number("alpha")
    one, other = step.array("self"), step.array("other")
    if step.name == "rsub":
        one, other = other, one
    return entries(one + alpha * other if "add" in step.name else one - alpha * other)


@operation("mul")
def _mul(step: Step) -> Array:
    return entries(step.array("self") * step.array("other"))


@operation("div")
def _div(step: Step) -> Array:
    if step["rounding_mode"]:
        raise step.unknown(f"rounding_mode={step['rounding_mode']!r}")
    return entries(step.array("self") / step.array("other"))


@operation("maximum", "minimum")
def extremum(step: Step) -> Array:
    larger = np.maximum if step.name.startswith("max") else np.minimum
    return entries(larger(step.array("self"), step.array("other")))


def _comparison(name: str) -> None:
    compared = np.frompyfunc(getattr(operator, name), 2, 1)
    operation(name)(
        lambda step: np.asarray(compared(step.array("self"), step.array("other")), dtype=bool)
    )


for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    _comparison(_name)


def _mask(value: Any) -> Array:
    """Return a condition as an array of booleans."""
    mask = value.cpu().numpy() if isinstance(value, Tensor) else value
    return np.asarray(mask, dtype=bool)


@operation("logical_not", "bitwise_not")
def _not(step: Step) -> Array:
    return np.asarray(~_mask(step["self"]))


@operation("logical_and", "bitwise_and", "__and__")
def _and(step: Step) -> Array:
    return np.asarray(_mask(step["self"]) & _mask(step["other"]))


@operation("logical_or", "bitwise_or", "__or__")
def _or(step: Step) -> Array:
    return np.asarray(_mask(step["self"]) | _mask(step["other"]))


@operation("where")
def _where(step: Step) -> Array:
    return entries(np.where(_mask(step["condition"]), step.array("self"), step.array("other")))


@operation("masked_fill")
def _masked_fill(step: Step) -> Array:
    return entries(np.where(_mask(step["mask"]), step.array("value"), step.array("self")))
