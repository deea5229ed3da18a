"""Rules for convolutions, matrices and BatchNorm, which are merged as long as possible."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lipbound.bounds.rounding import UNIT, norm_above, normalised, spectral_norm_above
from lipbound.geometry import Convolution, convolution
from lipbound.modules import batch_norm_gains
from lipbound.network.rules.products import exact, matrix_product
from lipbound.network.rules.values import (
    Linear,
    Step,
    Unbounded,
    Value,
    axes,
    readings,
    register_rule,
    scaled,
    smallest,
    summed,
    total,
    up,
)


@register_rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def _conv(step: Step) -> Value:
    return _linear(step, step["input"], step["weight"], transposed=False)


@register_rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def _conv_transpose(step: Step) -> Value:
    return _linear(step, step["input"], step["weight"], transposed=True)


@register_rule("aten.convolution")
def _convolution(step: Step) -> Value:
    return _linear(step, step["input"], step["weight"], transposed=step["transposed"])


def _linear(step: Step, value: Any, weight: Any, transposed: bool) -> Value:
    if not isinstance(value, Value) or not isinstance(weight, Tensor):
        raise Unbounded("the kernel of a convolution depends on the input")
    dims = weight.ndim - 2
    padding = step["padding"]
    options: dict[str, Any] = {
        "stride": axes(step["stride"], dims),
        "dilation": axes(step["dilation"], dims),
        "groups": step["groups"],
        "padding": padding if isinstance(padding, str) else axes(padding, dims),
        "transposed": transposed,
    }
    if transposed:
        options["output_padding"] = axes(step["output_padding"], dims)
    conv = convolution(weight.double(), **options)
    anchor = value
    if value.padding is not None and not transposed and all(p == (0, 0) for p in conv.padding):
        # nn.Conv2d(padding_mode='circular') pads in a separate operation.
        source, mode, pairs = value.padding
        if len(pairs) == dims:
            anchor = source
            conv = replace(conv, padding=pairs, padding_mode=mode)
    sized = replace(conv, input_size=tuple(anchor.shape[-dims:]))
    return Value(step.shape, linear=Linear(anchor, sized, step.options))


@register_rule("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")
def _matrix(step: Step) -> Value:
    names = {"aten.linear": ("input", "weight"), "aten.addmm": ("mat1", "mat2"),
             "aten.mm": ("self", "mat2"), "aten.matmul": ("self", "other")}  # fmt: skip
    left, right = (step[name] for name in names[step.call.op])
    if isinstance(left, Value) and isinstance(right, Value):
        return matrix_product(step, *names[step.call.op])
    value, matrix = (left, right) if isinstance(left, Value) else (right, left)
    if not isinstance(value, Value):
        raise Unbounded("a bias that depends on the input has no rule")
    if matrix.ndim == 1:
        return value.times(norm_above(matrix), step.shape)
    if matrix.ndim != 2:
        return value.times(up(stack_norm(matrix) * _met(value, matrix)), step.shape)
    rows = matrix.double() if step.call.op == "aten.linear" else matrix.double().mT
    linear = Linear(value, replace(convolution(rows.contiguous()), input_size=()), step.options)
    if value is left and step.arguments.get("alpha") in (None, 1):  # of addmm
        return Value(step.shape, linear=linear)
    return value.times(up(step.size("alpha") * linear.norm), step.shape)  # or from the left


def _met(value: Value, matrices: Tensor) -> float:
    """Return √(number of matrices with which each matrix of the value is multiplied)."""
    together = torch.broadcast_shapes(value.shape[:-2], matrices.shape[:-2])
    return up(math.sqrt(math.prod(together) / math.prod(value.shape[:-2])))


def stack_norm(matrices: Tensor) -> float:
    """Return an upper bound on the largest σ1 of a batch of matrices."""
    near_one, power = normalised(matrices)
    flat = near_one.reshape(-1, *near_one.shape[-2:])
    return up(up(float(spectral_norm_above(flat).max())) * power)


@register_rule("aten.bmm", "aten.baddbmm")
def _batched_product(step: Step) -> Value:
    names = ("self", "mat2") if step.call.op == "aten.bmm" else ("batch1", "batch2")
    left, right = (step[name] for name in names)
    if isinstance(left, Value) and isinstance(right, Value):
        return matrix_product(step, *names)
    value, matrices = (left, right) if isinstance(left, Value) else (right, left)
    if not isinstance(value, Value):
        raise Unbounded("a bias that depends on the input has no rule")
    return value.times(up(step.size("alpha") * stack_norm(matrices)), step.shape)


@register_rule("aten.einsum")
def _einsum(step: Step) -> Value:
    """Bound einsum of one value and one constant, which is a batch of matrix products.

    A letter in both operands and the result numbers the batch. A letter in both operands only is
    summed in the product. A letter in one operand and the result is a new axis (constant) or is
    carried along (value). A letter in one operand only is summed, which costs √n.
    """
    operands = step["tensors"]
    terms, arrow, result = step["equation"].replace(" ", "").partition("->")
    letters = terms.split(",")
    values = [o for o in operands if isinstance(o, Value)]
    plain = arrow and "." not in terms and all(len({*term}) == len(term) for term in letters)
    if not values or len(operands) > 2 or not plain:
        raise Unbounded(
            f"there is no rule for einsum {step['equation']!r}, only for two operands, with '->' "
            f"and without '...' or repeated letters"
        )
    place = operands.index(values[0])
    if len(values) == 2:
        return _contracted(step, values, letters, result)
    mine, sizes = letters[place], dict(zip(letters[place], values[0].shape, strict=True))
    theirs, constant = "", torch.ones(())
    if len(operands) == 2:
        theirs, constant = letters[1 - place], operands[1 - place]
    for letter, size in zip(theirs, constant.shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            raise Unbounded(f"no rule for einsum {step['equation']!r} with a broadcast axis")
    batch = [c for c in theirs if c in mine and c in result]
    inner = [c for c in theirs if c in mine and c not in result]
    outer = [c for c in theirs if c not in mine]
    order = [theirs.index(c) for c in (*batch, *outer, *inner)]
    rows, columns = (math.prod(sizes[c] for c in some) for some in (outer, inner))
    gain = stack_norm(constant.permute(order).reshape(-1, rows, columns))
    lost = [c for c in (*mine, *outer) if c not in result and c not in inner]
    summed = math.prod(sizes[c] for c in lost)
    return values[0].times(up(gain * up(math.sqrt(summed))), step.shape)


def _contracted(step: Step, values: list[Value], letters: list[str], result: str) -> Value:
    """Bound einsum of two activations: its norm is at most the product of theirs.

    A letter in one operand only that is summed costs √n.
    """
    one, other = values
    sizes = dict(zip(letters[0], one.shape, strict=True))
    if any(sizes.setdefault(c, n) != n for c, n in zip(letters[1], other.shape, strict=True)):
        raise Unbounded(f"no rule for einsum {step['equation']!r} with a broadcast axis")
    alone = [c for c in {*letters[0]} ^ {*letters[1]} if c not in result]
    root = up(math.sqrt(math.prod(sizes[c] for c in alone)))
    gains = [up(step.range("tensors", 1 - i).norm * root) for i in range(2)]
    return summed([exact(value) for value in values], step.shape, gains)


@register_rule("aten._native_batch_norm_legit_no_training", "aten.batch_norm",
               "aten.cudnn_batch_norm", "aten.native_batch_norm")  # fmt: skip
def batch_norm(step: Step) -> Any:
    """Bound BatchNorm with running statistics, which multiplies each channel by a constant."""
    value = step["input"]
    variance = step["running_var"]
    if step.arguments.get("training") or not isinstance(variance, Tensor):
        raise Unbounded("BatchNorm without running statistics mixes the batch; use .eval()")
    gains, spread = folded_gains(step)
    if not bool(torch.isfinite(gains).all()):
        raise Unbounded("BatchNorm's statistics or weights do not give finite gains")
    result = _scaled(value, gains, spread, step) if value.linear is not None else None
    if result is None:
        result = value.times(up(float(gains.abs().max()) * (1 + 1e-15)), value.shape)
        result.origin = step
    return result if step.call.results == 1 else [result] * step.call.results


def folded_gains(step: Step) -> tuple[Tensor, float]:
    """Return the gains of a BatchNorm, and how much they depend on the rounding of ε."""
    low = smallest(step["eps"], step.call.dtype)
    high = max(readings(step["eps"], step.call.dtype))
    gains = batch_norm_gains(step["running_var"], step["weight"], low)
    if high == low:
        return gains, 0.0
    others = batch_norm_gains(step["running_var"], step["weight"], high)
    spread = float((gains - others).abs().max()) if gains.numel() else 0.0
    return gains, up(spread) if math.isfinite(spread) else math.inf


def _scaled(value: Value, gains: Tensor, spread: float, step: Step) -> Value | None:
    """Fold the gains of the output channels into the convolution."""
    assert value.linear is not None
    conv, slack = value.linear.conv, value.linear.slack
    if conv.out_channels != len(gains) or len(value.shape) != conv.dims + 2 or value.shape[0] != 1:
        return None  # tokens, or no batch axis: BatchNorm's channels are not the convolution's
    tail = [1] * conv.dims
    if conv.transposed:  # the weight is (inputs, outputs / groups, ...)
        shares = gains.reshape(conv.groups, 1, -1)
        inputs = conv.kernel.shape[0] // conv.groups
        factor = shares.expand(conv.groups, inputs, -1).reshape(conv.kernel.shape[0], -1, *tail)
    else:
        factor = gains.reshape(-1, 1, *tail)
    folded = replace(conv, kernel=conv.kernel * factor)
    if not bool(torch.isfinite(folded.kernel).all()):
        return None
    slack = up(slack * float(gains.abs().max()) * (1 + 1e-15)) if slack else 0.0
    slack = slack + _lost(conv.kernel, factor)
    if spread:  # the norm of the symbol is at most √taps times that of the kernel
        root = up(math.sqrt(math.prod(conv.kernel.shape[2:])))
        slack = up(slack + up(up(spread * root) * norm_above(conv.kernel)))
    rounded = value.linear.rounded + 2.0**-48
    linear = Linear(value.linear.anchor, folded, step.options, slack, rounded)
    apart = scaled(up(float(gains.abs().max()) * (1 + 1e-15)), value.apart)
    return Value(value.shape, linear=linear, apart=apart)


def _lost(kernel: Tensor, factor: Tensor | float) -> float:
    """Bound the norm of what underflow removes from the product of kernel and factor."""
    factor = torch.as_tensor(factor, dtype=kernel.dtype, device=kernel.device)
    gone = ((kernel * factor).abs() < 2.0**-1000) & (kernel != 0) & (factor != 0)
    return kernel.numel() * 2.0**-1074 if bool(gone.any()) else 0.0


def sum_of_linears(
    one: Value, first: float, other: Value, second: float, step: Step
) -> Value | None:
    """Add two convolutions of the same value to one; ``None`` if they are not of that form.

    The value itself counts as a convolution with a kernel of one tap: x + W x is bounded by the
    symbol of I + W, which can be far below 1 + ‖W‖.
    """
    for a, b in ((one, other), (other, one)):
        if a.linear is None:
            continue
        anchor = a.linear.anchor
        if b is anchor or (b.linear is not None and b.linear.anchor is anchor):
            device = a.linear.conv.kernel.device
            mine, yours = _dense(one, first, anchor, device), _dense(other, second, anchor, device)
            if mine is None or yours is None or mine.ndim != yours.ndim or one.shape != other.shape:
                return None  # mine.ndim: tokens, or an image without its batch axis
            kernel = _aligned(mine, yours)
            dims = kernel.ndim - 2
            pads = [(s - 1) // 2 for s in kernel.shape[2:]]
            conv = convolution(kernel, padding=pads if dims else "same")
            sized = replace(conv, input_size=tuple(anchor.shape[-dims:]) if dims else ())
            size = up(norm_above(mine) + norm_above(yours))
            slack = up(up(4 * UNIT * math.sqrt(kernel[0, 0].numel())) * size)
            for value, factor in ((one, first), (other, second)):
                if value.linear is None:
                    continue
                inner = value.linear.slack
                slack = up(slack + up(abs(factor) * inner)) if inner else slack
                slack = slack + _lost(value.linear.conv.kernel, factor)
            if not bool(torch.isfinite(kernel).all()):
                return None
            both = (v.linear.rounded for v in (one, other) if v.linear is not None)
            linear = Linear(anchor, sized, step.options, slack, max(both))
            pairs = [(v, f) for v, f in ((one, first), (other, second)) if v is not anchor]
            apart = total(*[scaled(abs(f), v.apart) for v, f in pairs])
            return Value(step.shape, linear=linear, apart=apart)
    return None


def _dense(value: Value, factor: float, anchor: Value, device: torch.device) -> Tensor | None:
    """Return the kernel relative to the anchor, centred, of odd size; ``None`` with a stride."""
    if value is anchor:
        dims = len(value.shape) - 2
        eye = torch.eye(value.shape[1], dtype=torch.float64, device=device)
        return factor * eye.reshape(*eye.shape, *[1] * dims)
    assert value.linear is not None
    conv: Convolution = value.linear.conv
    simple = conv.padding_mode == "zeros" and not conv.transposed and conv.groups == 1
    if not simple or any(n != 1 for n in (*conv.stride, *conv.dilation)):
        return None
    if tuple(value.shape[2:]) != tuple(anchor.shape[2:]):
        return None
    kernel = factor * conv.kernel
    amounts: list[int] = []
    for size, (before, _) in zip(conv.kernel.shape[2:], conv.padding, strict=True):
        # Tap h is at h − before: the taps reach from −before to size − 1 − before; pad to symmetry.
        reach = max(before, size - 1 - before)
        amounts = [reach - before, reach - (size - 1 - before), *amounts]
    return functional.pad(kernel, amounts)


def _aligned(one: Tensor, other: Tensor) -> Tensor:
    """Add two centred kernels of odd sizes."""
    sizes = [max(a, b) for a, b in zip(one.shape[2:], other.shape[2:], strict=True)]
    padded = []
    for kernel in (one, other):
        amounts: list[int] = []
        for size, have in zip(sizes, kernel.shape[2:], strict=True):
            amounts = [(size - have) // 2, (size - have) // 2, *amounts]
        padded.append(functional.pad(kernel, amounts))
    return padded[0] + padded[1]
