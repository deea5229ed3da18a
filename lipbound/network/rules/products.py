"""Rules for products of activations and other functions that are Lipschitz on a range only."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lipbound.network.rules.ranges import TINY, Range, inverse
from lipbound.network.rules.values import (
    Step,
    Unbounded,
    Value,
    readings,
    register_rule,
    summed,
    up,
)


def product(step: Step, one: str, other: str) -> Value:
    """Bound a product entry by entry; each factor may be broadcast.

    Args:
        step: The call.
        one: Name of the first factor.
        other: Name of the second factor.
    """
    left, right = exact(step[one]), exact(step[other])
    gains = [
        step.range(other).met(left.shape, step.shape),
        step.range(one).met(right.shape, step.shape),
    ]
    return summed([left, right], step.shape, gains)


def quotient(step: Step, above: str, below: str) -> Value:
    """Bound a quotient entry by entry: Δ(a/b) is Δa/b − a·Δb/b²."""
    lower = exact(step[below])
    inverted = inverse(step.range(below))
    numerator, values, gains = step[above], [lower], []
    if isinstance(numerator, Value):
        values.append(exact(numerator))
        gains.append(inverted.met(numerator.shape, step.shape))
        size = step.range(above).size
    elif isinstance(numerator, Tensor) and numerator.ndim:
        size = numerator.double().abs()
    else:
        most = max(map(abs, readings(numerator, step.call.dtype)))
        size = torch.full_like(inverted.low, most)
    size = inverted.size * size * inverted.size  # in this order, so that nothing underflows
    size = size.expand(step.shape) * (1 + 1e-12) + TINY
    return summed(values, step.shape, [Range.of(-size, size).met(lower.shape, step.shape), *gains])


def matrix_product(step: Step, one: str, other: str) -> Value:
    """Bound a product of matrices: ‖ΔA·B‖ ≤ ‖ΔA‖·‖B‖ in the Frobenius and the spectral norm."""
    left, right = exact(step[one]), exact(step[other])
    if min(len(left.shape), len(right.shape)) < 2:
        raise Unbounded("a product of two activations needs matrices")
    copies = [
        up(math.sqrt(max(1.0, math.prod(step.shape[:-2]) / math.prod(value.shape[:-2]))))
        for value in (left, right)
    ]
    factor = step.size("alpha")  # of addmm
    gains = [
        up(up(step.range(other).matrices() * copies[0]) * factor),
        up(up(step.range(one).matrices() * copies[1]) * factor),
    ]
    return summed([left, right], step.shape, gains)


def exact(value: Value) -> Value:
    """Return the value.

    Raises:
        Unbounded: If it has an error, which a product would multiply.
    """
    if np.any(value.error):
        raise Unbounded(
            "a product of activations multiplies their errors (rounding, small jumps), which "
            "is not bounded yet"
        )
    return value


@register_rule("aten.scaled_dot_product_attention")
def _attention(step: Step) -> Value:
    """Bound softmax(s·QKᵀ)·V, whose softmax has rows of sum 1, so its norm is at most √rows."""
    if step["dropout_p"]:
        raise Unbounded("dropout is active even in eval mode; pass dropout_p=0.0")
    if isinstance(step["attn_mask"], Value):
        raise Unbounded("a mask that depends on the input has no rule")
    names = ("query", "key", "value")
    if not all(isinstance(step[name], Value) for name in names):
        raise Unbounded("attention with a constant query, key or value has no rule")
    query, key, value = (exact(step[name]) for name in names)
    if not step.shape[:-2] == query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise Unbounded("attention with groups of queries has no rule")
    sizes = {name: step.range(name).matrices() for name in names}
    given = step["scale"]
    scale = 1 / math.sqrt(query.shape[-1]) if given is None else abs(given)
    scale = max(readings(scale, step.call.dtype)) * (1 + 1e-6)
    share = up(up(scale * up(sizes["value"] / 2)) * (1 + 1e-12))  # softmax is 1/2-Lipschitz
    gains = [
        up(share * sizes["key"]), up(share * sizes["query"]), up(math.sqrt(query.shape[-2])),
    ]  # fmt: skip
    return summed([query, key, value], step.shape, gains)


@register_rule("aten.glu")
def _gated(step: Step) -> float:
    """Bound a·σ(b): |∂a| ≤ 1 and |∂b| ≤ |a|/4, for the two halves a and b of the argument."""
    exact(step["self"])
    return up(math.hypot(1.0, step.range("self").largest / 4) * (1 + 1e-12))


def _least(found: Range) -> float:
    least = float(found.low.min())
    if not least > 0:
        raise Unbounded("its argument may be 0 or less")
    return least


SLOPES: dict[str, Callable[[Range], float]] = {
    "exp": lambda r: float(r.high.max().exp()),
    "log": lambda r: 1 / _least(r),
    "sqrt": lambda r: 0.5 / math.sqrt(_least(r)),
    "rsqrt": lambda r: 0.5 * _least(r) ** -1.5,
    "reciprocal": lambda r: _least(r) ** -2,
}
"""Operation → largest slope on a range."""


def _sloped(name: str, slope: Callable[[Range], float]) -> None:
    @register_rule(f"aten.{name}")
    def rule(step: Step) -> float:
        exact(step["self"])
        return up(slope(step.range("self")) * (1 + 1e-9) + TINY)


for _name, _slope in SLOPES.items():
    _sloped(_name, _slope)


@register_rule("aten.pow", "aten.square")
def _power(step: Step) -> float:
    power = step["exponent"] if "exponent" in step.arguments else 2
    if isinstance(step["self"], Tensor | float | int) or isinstance(power, Tensor | Value):
        raise Unbounded("a power has a rule for a constant exponent only")
    if power != int(power) or power < 1:
        raise Unbounded(f"a power of {power:g} has no rule; use a whole exponent of at least 1")
    exact(step["self"])
    if power == 1:
        return 1.0
    # TINY is added first, because a power that underflows may be multiplied by a large number.
    return up(power * (step.range("self").largest ** (power - 1) + TINY) * (1 + 1e-9))
