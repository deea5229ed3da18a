"""Bounds on the rounding of each operation near given inputs.

Model of arithmetic: an addition, multiplication, division or square root returns the exact result
times 1 + δ with |δ| ≤ u, or loses at most the smallest normal number. Sums are in any order, with
or without fused multiply-add. Elementary functions such as exp are within 4 units in the last
place. A rule bounds the L2 distance between what an operation computes from its computed arguments
and the exact result for the same arguments, for all inputs in a ball. The page "Certificates of the
network as it runs" in the documentation derives the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lipbound.bounds.rounding import norm_above
from lipbound.modules import batch_norm_gains
from lipbound.network.rules.values import (
    RULES,
    Error,
    Step,
    Value,
    axes,
    scaled,
    smallest,
    spread,
    total,
    up,
)

Array = NDArray[np.float64]
ELEMENTARY = 8  # a function within 4 units in the last place has a relative error of 8u
ROOM = 1.02  # for products of roundings: every rule has c·u ≤ 0.01, so that (1 + u)^c ≤ 1 + 1.02cu
MOST = 0.01  # the largest c·u
SAFE = 8.0  # a bound this many times below the largest number excludes overflow


class NotProved(ValueError):
    """There is no bound on the rounding of an operation, with the reason."""


@dataclass(frozen=True)
class Arithmetic:
    """A floating-point format.

    Attributes:
        name: ``'float32'`` or ``'float64'``.
        dtype: Type of the tensors.
        unit: The unit roundoff u.
        tiny: The smallest normal number; an operation may lose this much by underflow.
        largest: The largest finite number.
    """

    name: str
    dtype: torch.dtype
    unit: float
    tiny: float
    largest: float

    def gamma(self, count: float) -> float:
        """Return 1.02·count·u ≥ (1 + u)^count − 1; ∞ if that is too large to be proved."""
        return ROOM * count * self.unit if count * self.unit <= MOST else math.inf


FORMATS = {
    "float32": Arithmetic("float32", torch.float32, 2.0**-24, 2.0**-126, 2.0**127),
    "float64": Arithmetic("float64", torch.float64, 2.0**-53, 2.0**-1022, 2.0**1023),
}


@dataclass
class Near:
    """Sizes of a network's values for all inputs in a ball around each given input.

    Attributes:
        arithmetic: The format in which the network runs.
        radius: Radius of each ball.
        norms: Call → L2 norms of its result, measured at the given inputs in float64.
        absolute: Linear call → L2 norms of the result with |weights|, |bias| and |input|.
        gains: Linear call → bound on the norm of its matrix of absolute values.
        names: Identity of a value → the call or input that made it.
    """

    arithmetic: Arithmetic
    radius: Array
    norms: dict[str, Array]
    absolute: dict[str, Array]
    gains: dict[str, float]
    names: dict[int, str] = field(default_factory=dict)

    def moved(self, value: Value) -> Array:
        """Bound the distance between a computed value in the ball and the measured one.

        Both differ from the exact ones by at most the error, and the exact ones from each other by
        the Lipschitz constant times the radius.
        """
        with np.errstate(invalid="ignore"):
            moves = (self.radius > 0) & (value.lipschitz > 0)
            reach = np.where(moves, value.lipschitz * self.radius, 0.0)
            return up(up(reach * (1 + 2.0**-50) + 2 * value.error))

    def size(self, value: Value) -> Array:
        """Bound the L2 norm of a computed value in the ball; ∞ if it was not measured."""
        known = self.norms.get(self.names.get(id(value), ""))
        if known is None:
            return np.full_like(self.radius, math.inf)
        return up(known + self.moved(value))

    def sizes(self, argument: Any, shape: Sequence[int]) -> Error:
        """Bound the L2 norm of an argument (value, tensor, number) that is broadcast to a shape."""
        if isinstance(argument, Value):
            return scaled(spread(argument, shape), self.size(argument))
        if isinstance(argument, Tensor):
            copies = math.prod(shape) / max(1, argument.numel())
            return up(up(math.sqrt(max(1.0, copies))) * norm_above(argument))
        return 0.0 if argument is None else up(abs(float(argument)) * root(shape))

    def relative(self, step: Step, result: Value, count: float) -> Error:
        """Bound an operation whose every entry has a relative error of at most count·u.

        ``result`` has the errors of the arguments. With them, the exact result for the computed
        arguments is within ``moved`` of the measured result, whose own rounding is ``ROOM``.
        """
        known = self.norms.get(step.call.name)
        if known is None:
            return math.inf
        size = up(known + self.moved(result))
        return self.checked(total(scaled(self.arithmetic.gamma(count * ROOM), size),
                                  self.lost(step.call.shape or (), 4)), size)  # fmt: skip

    def lost(self, shape: Sequence[int], count: float) -> float:
        """Bound what underflow takes from a tensor of this shape in ``count`` operations each."""
        return up(up(root(shape) * count) * self.arithmetic.tiny)

    def checked(self, error: Error, *sizes: Error) -> Error:
        """Return the error, or ∞ where a size could overflow."""
        for size in sizes:
            error = np.where(np.asarray(size) * SAFE < self.arithmetic.largest, error, math.inf)
        return error


Rounding = Callable[[Step, Near, Value], Error]
ROUNDINGS: dict[str, Rounding | str] = {}
"""Operation → bound on its rounding, or the reason why there is none."""


def register_rounding(*ops: str) -> Callable[[Rounding], Rounding]:
    """Register a bound on the rounding of operations that have a Lipschitz rule.

    The function is called as ``rounding(step, near, result)``. It returns a bound on the L2
    distance between what the operation computes from its arguments and the exact result for the
    same arguments, for all inputs in a ball: a number, or a float64 array with one number for each
    image. The errors of the arguments are added to it.

    - ``step`` has the arguments (``step.only()`` is the activation) and the result's ``shape``.
    - ``near.arithmetic.unit`` is the unit roundoff u, 2^-24 for float32.
    - ``near.size(value)`` bounds the L2 norm of a value in each ball.
    - ``near.relative(step, result, count)`` is the bound for an operation whose result has the
      relative error count·u in every entry, with underflow.
    - ``near.lost(shape, count)`` bounds what underflow takes from an operation.

    Args:
        ops: Names of operations, for example ``'mylib.shrink'``. Register their rules first.

    Example:
        An operation x ↦ 0.9·max(x, 0.1) + x rounds its product and its sum. Both terms are at most
        as large as |x| + 0.1 in every entry.

        >>> from lipbound import register_rule
        >>> @register_rule("mylib.lift")
        ... def lift(step):
        ...     return 1.9
        >>> @register_rounding("mylib.lift")
        ... def lift_rounding(step, near, result):
        ...     size = near.size(step.only()) + 0.1 * math.sqrt(math.prod(step.shape))
        ...     return 4 * near.arithmetic.unit * size + near.lost(step.shape, 2)
        >>> del RULES["mylib.lift"], ROUNDINGS["mylib.lift"]
    """
    for op in ops:
        if op not in RULES:
            raise ValueError(
                f"register_rounding: {op!r} has no Lipschitz rule; register one first with "
                f"@lipbound.register_rule({op.replace('::', '.')!r})"
            )

    def add(rounding: Rounding) -> Rounding:
        for op in ops:
            ROUNDINGS[op] = rounding
        return rounding

    return add


def rounded(step: Step, near: Near, result: Any) -> Any:
    """Add the rounding of a step to its result.

    Raises:
        NotProved: If the operation has no bound, or computes in another format.
    """
    first = result[0] if isinstance(result, list) else result
    if not isinstance(first, Value) or not first.lipschitz < math.inf:
        return result
    rule = ROUNDINGS.get(step.call.op, "add a bound with lipbound.register_rounding")
    place = f" in {step.call.module}" if step.call.module else ""
    if isinstance(rule, str):
        raise NotProved(f"the rounding of {step.call.op}{place} is not bounded: {rule}")
    if step.call.dtype != near.arithmetic.dtype:
        raise NotProved(
            f"{step.call.op}{place} computes in {step.call.dtype}, but the certificate is for "
            f"{near.arithmetic.name}; remove the cast"
        )
    _check_constants(step, near.arithmetic, place)
    error = rule(step, near, first)
    kinds = isinstance(error, int | float | np.number | np.ndarray)
    if not kinds or not bool((np.asarray(error) >= 0).all() or np.isnan(error).any()):
        raise NotProved(
            f"the bound on the rounding of {step.call.op}{place} must be a number or an array of "
            f"numbers, 0 or larger, but it is {error!r}; mend its function"
        )
    if not isinstance(result, list):
        return first.rounded(error)
    return [v.rounded(error) if v.lipschitz < math.inf else v for v in result]


ARITHMETIC = {
    f"aten.{name}{place}" for name in ("add", "sub", "rsub", "mul", "div") for place in ("", "_")
}
"""Operations whose bounds count the rounding of a number or of a tensor without axes."""


def _check_constants(step: Step, arithmetic: Arithmetic, place: str) -> None:
    """Check that constants have the same value in the format of the network.

    Raises:
        NotProved: If a constant is rounded to a value that the bounds do not count.
    """
    for name, argument in step.arguments.items():
        for leaf in [] if name in ("index", "indices", "mask") else tree_leaves(argument):
            if isinstance(leaf, float) and 0 < abs(leaf) < arithmetic.tiny:
                raise NotProved(
                    f"{step.call.op}{place} has the number {leaf:g}, which is below the smallest "
                    f"normal number of {arithmetic.name}; use a larger one"
                )
            if isinstance(leaf, int | float) and arithmetic.largest < abs(leaf) < math.inf:
                raise NotProved(
                    f"{step.call.op}{place} has the number {leaf:g}, which is above the largest "
                    f"number of {arithmetic.name}; use a smaller one"
                )
            if not isinstance(leaf, Tensor) or leaf.dtype in (arithmetic.dtype, torch.bool):
                continue
            counted = not leaf.ndim and step.call.op in ARITHMETIC
            tiny = bool(((leaf != 0) & (leaf.abs() < arithmetic.tiny)).any())
            huge = bool((leaf.abs() > arithmetic.largest).any())
            same = leaf.to(arithmetic.dtype).to(leaf.dtype) == leaf
            if tiny or huge or not (counted or bool(same.all())):
                raise NotProved(
                    f"{step.call.op}{place} has a constant of type {leaf.dtype} that "
                    f"{arithmetic.name} does not represent; convert it to {arithmetic.name}"
                )


def root(shape: Sequence[int]) -> float:
    """Return √(number of entries), rounded up."""
    return up(math.sqrt(math.prod(shape)))


def _exact(*names: str) -> None:
    for name in names:
        ROUNDINGS[f"aten.{name}"] = lambda step, near, result: 0.0


def _relative(count: float, *names: str) -> None:
    for name in names:
        ROUNDINGS[f"aten.{name}"] = lambda step, near, result: near.relative(step, result, count)


def _refused(reason: str, *names: str) -> None:
    for name in names:
        ROUNDINGS[f"aten.{name}"] = reason


_exact(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t",
    "movedim", "squeeze", "unsqueeze", "contiguous", "clone", "alias", "detach", "_to_copy", "to",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "roll", "flip", "lift_fresh_copy",
    "type_as", "diagonal", "rot90", "T", "zeros_like", "ones_like", "copy", "copy_", "split",
    "chunk", "split_with_sizes", "unbind", "tensor_split", "slice", "select", "narrow", "expand",
    "expand_as", "repeat", "repeat_interleave", "cat", "stack", "concat", "select_scatter",
    "slice_scatter", "diagonal_scatter", "im2col", "index_select", "index", "new_zeros",
    "new_ones", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "relu", "relu_", "abs", "neg", "sort", "topk",
    "median", "kthvalue", "tril", "triu", "dropout", "native_dropout", "feature_dropout",
    "alpha_dropout", "maximum", "minimum", "max", "min", "amax", "amin", "max_pool1d",
    "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
_relative(ELEMENTARY, "tanh", "erf", "atan", "asinh")
_relative(2 * ELEMENTARY, "sigmoid")
_relative(4, "softsign", "leaky_relu", "leaky_relu_", "prelu", "_prelu_kernel", "rrelu")
_relative(3, "mul", "mul_")
_relative(5, "div", "div_")
_refused(
    "the positions of pixels are rounded too, and their effect is not derived",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
_refused(
    "it is Lipschitz on a range only, and its rounding is not derived",
    "exp", "glu", "log", "pow", "reciprocal", "rsqrt", "scaled_dot_product_attention", "sqrt",
    "square",
)  # fmt: skip
_refused("the rounding of the number is not derived", "fill")
_refused(
    "the operation has no Lipschitz constant", "hardshrink", "round", "sign", "floor", "ceil",
    "trunc",
)  # fmt: skip


@register_rounding("aten.upsample_nearest1d", "aten.upsample_nearest2d",
                   "aten.upsample_nearest3d", "aten._upsample_nearest_exact1d",
                   "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d")  # fmt: skip
def _nearest(step: Step, near: Near, result: Value) -> Error:
    """Repeating every pixel the same number of times is exact; other positions are rounded."""
    before, after = step.only().shape[2:], step.shape[2:]
    if not all(
        _repeats(step, axis, n, m) for axis, (n, m) in enumerate(zip(before, after, strict=False))
    ):
        raise NotProved(
            f"{step.call.op} from {tuple(before)} to {tuple(after)} pixels rounds positions, so "
            f"float32 and float64 may take different pixels; use repeat_interleave"
        )
    return 0.0


def _repeats(step: Step, axis: int, before: int, after: int) -> bool:
    """Tell whether every pixel is repeated along an axis, in both formats, alone and batched."""
    if after % before:
        return False
    shape = step.only().shape
    line = [-1 if a == axis + 2 else 1 for a in range(len(shape))]
    exact = torch.arange(before).repeat_interleave(after // before).reshape(line)
    operation = getattr(torch.ops.aten, step.call.op.removeprefix("aten."))
    run = getattr(operation, step.call.overload)
    names = [argument.name for argument in step.call.schema.arguments]

    def resized(pixels: Tensor) -> Tensor:
        given: Tensor = run(pixels, *[step.arguments[name] for name in names[1:]])
        return given

    for dtype in (torch.float32, torch.float64):
        pixels = torch.arange(before, dtype=dtype).reshape(line).expand(1, 1, *shape[2:])
        for seen in (resized(pixels), torch.func.vmap(resized)(pixels[None])[0]):
            if not bool((seen == exact).all()):
                return False
    return True


@register_rounding("aten.silu", "aten.silu_")
def _silu(step: Step, near: Near, result: Value) -> Error:
    """x/(1 + exp(−x)) has a small relative error, but is 0 where the exponential overflows."""
    gone = scaled(4 / near.arithmetic.largest, near.size(step.only()))
    return total(near.relative(step, result, 3 * ELEMENTARY), gone)


def _numbers(step: Step, near: Near, *names: str) -> Error:
    """Bound the rounding of Python numbers that are written to entries of the result."""
    found = [step.arguments.get(name) for name in names]
    numbers = [float(n) for n in found if isinstance(n, int | float) and math.isfinite(n)]
    off = [abs(float(torch.tensor(n, dtype=near.arithmetic.dtype)) - n) for n in numbers]
    most = max(off, default=0.0)
    return up(up(most) * root(step.call.shape or ())) if most else 0.0


@register_rounding("aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.clip", "aten.hardtanh",
                   "aten.hardtanh_", "aten.relu6", "aten.threshold", "aten.masked_fill",
                   "aten.masked_fill_", "aten.pad", "aten.constant_pad_nd", "aten.full_like",
                   "aten.new_full")  # fmt: skip
def _written(step: Step, near: Near, result: Value) -> Error:
    names = ("min", "max", "min_val", "max_val", "threshold", "value", "fill_value")
    return _numbers(step, near, *names)


@register_rounding("aten.where")
def _where(step: Step, near: Near, result: Value) -> Error:
    """A selection is exact; softshrink subtracts a rounded number and compares with one."""
    condition = step.arguments["condition"]
    if not isinstance(condition, Value) or condition.origin is None:
        return _numbers(step, near, "self", "other")
    limit = abs(float(condition.origin.arguments["other"]))
    around = scaled(near.arithmetic.gamma(4), up(limit * root(step.shape)))
    return total(near.relative(step, result, 4), around)


@register_rounding("aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.rsub")
def _add(step: Step, near: Near, result: Value) -> Error:
    """One rounding of the sum; a factor or a Python number adds one of its term, and its own."""
    alpha = step.arguments.get("alpha")
    alpha = 1.0 if alpha is None else float(alpha)
    error = near.relative(step, result, 1)
    terms = {"self": 1.0, "other": alpha}
    if step.call.op == "aten.rsub":
        terms = {"self": alpha, "other": 1.0}
    sizes = [
        scaled(up(abs(factor)), near.sizes(step.arguments[name], step.shape))
        for name, factor in terms.items()
    ]
    for (name, factor), size in zip(terms.items(), sizes, strict=True):
        term = step.arguments[name]
        number = isinstance(term, int | float) or (isinstance(term, Tensor) and not term.ndim)
        if factor != 1 or number:
            error = total(error, scaled(near.arithmetic.gamma(3), size))
    return near.checked(total(error, near.lost(step.shape, 4)), *sizes)


LINEAR = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "einsum", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "mean", "sum",
    "cumsum", "col2im",
)  # fmt: skip
"""Operations that are a matrix of the value, plus a constant; each entry is a sum of products."""


@register_rounding(*[f"aten.{name}" for name in LINEAR])
def _sums(step: Step, near: Near, result: Value) -> Error:
    """|computed − exact| ≤ γ(|W||x| + |b|), where γ counts the roundings on the way of a product.

    The sum at the given input is measured. In the ball |W||x| grows by at most ‖|W|‖ times the
    distance of x from the measured one.
    """
    (value,) = step.inputs()
    name = step.call.name
    gain = near.gains.get(name, math.inf)
    if name not in near.absolute:
        return math.inf
    for factor in ("alpha", "beta"):
        if step.arguments.get(factor) not in (None, 1):
            raise NotProved(
                f"{step.call.op} with {factor}={step.arguments[factor]} may multiply by it before "
                f"or after the sum; multiply the weight instead"
            )
    products = terms(step, value)
    count = products + 8  # bias, the mean's division and its number
    size = up(near.absolute[name] + scaled(gain, near.moved(value)))
    tensors = [t for t in tree_leaves(list(step.arguments.values())) if isinstance(t, Tensor)]
    weight = max((float(t.abs().max()) for t in tensors if t.numel()), default=1.0)
    lost = scaled(up(near.lost(step.shape, count) * 2), total(2.0 + weight, near.size(value)))
    mean = "pool" in step.call.op or "mean" in step.call.op  # it divides after the sum
    divisor = abs(float(step.arguments.get("divisor_override") or 1))
    largest = scaled(max(products, divisor), size) if mean else size
    if "einsum" in step.call.op:  # it may sum the value before it multiplies
        largest = total(largest, scaled(root(value.shape), near.size(value)))
    return near.checked(total(scaled(near.arithmetic.gamma(count), size), lost), largest)


def terms(step: Step, value: Value) -> float:
    """Return the largest number of products that are added to one entry."""
    op = step.call.op.removeprefix("aten.")
    given = step.arguments
    if "conv" in op:
        weight = given["weight"]
        transposed = "transpose" in op or given.get("transposed")
        inputs = weight.shape[0] / given["groups"] if transposed else weight.shape[1]
        return float(inputs * math.prod(weight.shape[2:]))
    if op in ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "einsum", "cumsum", "sum",
              "mean"):  # fmt: skip
        if op in ("sum", "mean"):
            return math.prod(value.shape) / max(1, math.prod(step.shape))
        if op == "einsum":
            letters, _, result = given["equation"].replace(" ", "").partition("->")
            place = next(i for i, o in enumerate(given["tensors"]) if isinstance(o, Value))
            mine = letters.split(",")[place]
            if any(c not in mine and c not in result for c in letters.replace(",", "")):
                raise NotProved(
                    f"einsum {given['equation']!r} sums the constant alone; sum it beforehand"
                )
            return float(math.prod(value.shape))
        return float(max(value.shape, default=1))  # every inner size is one of the value's
    if op == "col2im":
        return float(math.prod(axes(given["kernel_size"], 2)))
    dims = int(op[-2])
    if "adaptive" in op:
        sizes = zip(value.shape[-dims:], axes(given["output_size"], dims), strict=True)
        return float(math.prod(n // m + 2 for n, m in sizes))
    return float(math.prod(axes(given["kernel_size"], dims)))


@register_rounding("aten._native_batch_norm_legit_no_training", "aten.batch_norm",
                   "aten.native_batch_norm")  # fmt: skip
def _batch_norm(step: Step, near: Near, result: Value) -> Error:
    """Bound γ(x − μ)/√(σ² + ε) + β in any of the forms that PyTorch computes.

    Every form adds x·a, μ·a and β with a = γ/√(σ² + ε). The factor a has at most 10 roundings
    (a reciprocal square root may be off by 2 units in the last place), and the products and sums
    have 4 more.
    """
    eps = smallest(step["eps"], step.call.dtype)
    gains = batch_norm_gains(step["running_var"], step["weight"], eps).double().cpu().abs()
    (value,) = step.inputs()
    shift = step["running_mean"].double().cpu().abs() * gains
    if step["bias"] is not None:
        shift = shift + step["bias"].double().cpu().abs()
    copies = math.prod(result.shape) / max(1, len(gains))
    fixed = up(up(math.sqrt(copies)) * norm_above(shift))
    size = total(scaled(up(float(gains.max()) * (1 + 1e-12)), near.size(value)), fixed)
    lost = scaled(near.lost(result.shape, 16), 1.0 + float(gains.max()))
    means = up(up(math.sqrt(copies)) * norm_above(step["running_mean"]))
    factors = scaled(16 * near.arithmetic.tiny, total(near.size(value), means))  # a may underflow
    error = total(scaled(near.arithmetic.gamma(16), size), lost, factors)
    least, most = (float(v) + eps for v in step["running_var"].double().aminmax())
    if least < eps or eps < 0:
        raise NotProved(
            f"{step.call.op} has a running variance or an eps that is not positive, so their sum "
            f"may cancel; use positive ones"
        )
    steep = 1.0 if step["weight"] is None else float(step["weight"].abs().max())
    centred = total(near.size(value), means)
    forms = [scaled(up(factor), centred) for factor in (1 / math.sqrt(least), steep)]
    return near.checked(error, size, centred, *forms, most)


ROUNDINGS["aten.cudnn_batch_norm"] = "cuDNN's kernels are not known; use cudnn.enabled = False"


@register_rounding("aten.layer_norm", "aten.native_layer_norm", "aten.group_norm",
                   "aten.instance_norm")  # fmt: skip
def _normalization(step: Step, near: Near, result: Value) -> Error:
    """Bound γ(x − μ)/√(var + ε) + β, where mean and variance are sums over n entries in any form.

    The mean is off by γₙ‖x‖/√n in each of n entries, which 1/√ε passes on. The variance, even as
    E[x²] − μ², is off by γ₂ₙ‖x‖²/n, which changes 1/√(var + ε) by that share of 2ε. The normalized
    entries have a norm of at most √n.
    """
    if step.call.op == "aten.instance_norm" and not step["use_input_stats"]:
        return _batch_norm(step, near, result)
    (value,) = step.inputs()
    count = _normalized_entries(step)
    eps = smallest(step["eps"], step.call.dtype)
    weight, bias = step["weight"], step["bias"]
    steep = 1.0 if weight is None else float(weight.abs().max())
    size, whole = near.size(value), root(value.shape)
    gamma = near.arithmetic.gamma
    shift = scaled(up(steep / math.sqrt(eps) * (1 + 1e-9) * gamma(2 * count + 8)), size)
    with np.errstate(over="ignore"):
        off = up(np.asarray(scaled(gamma(4 * count + 16) / count * ROOM, size * size)))
    share = np.where(off <= eps / 8, total(off / eps, gamma(16)), math.inf)
    constant = near.sizes(bias, ()) if bias is None else norm_above(bias) * whole
    out = total(up(steep * whole), constant)
    factors = scaled(32 * near.arithmetic.tiny, size)  # γ/√(var + ε) may underflow
    error = total(shift, scaled(up(steep * whole), share), scaled(gamma(8), out), factors,
                  scaled(near.lost(value.shape, 16 * count), 1.0 + steep / eps))  # fmt: skip
    factor = up(steep / math.sqrt(eps) * (1 + 1e-12))
    forms = [scaled(up(f), total(size, size, 1.0)) for f in (factor, steep, 1 / math.sqrt(eps))]
    return near.checked(error, up(np.asarray(size * size)), out, size, *forms)


def _normalized_entries(step: Step) -> int:
    shape = step.inputs()[0].shape
    if "layer_norm" in step.call.op:
        return math.prod(step["normalized_shape"])
    if "group_norm" in step.call.op:
        return math.prod(shape[1:]) // int(step["num_groups"])
    return math.prod(shape[2:])


@register_rounding("aten.gelu", "aten.mish", "aten.hardswish", "aten.hardswish_")
def _gated(step: Step, near: Near, result: Value) -> Error:
    """Bound x·g(x) with 0 ≤ g ≤ 1 by 40u‖x‖; torch's 1/6 in hardswish is rounded to float32."""
    (value,) = step.inputs()
    sixth = 2.0**-24 if "hardswish" in step.call.op else 0.0
    size = near.size(value)
    error = scaled(near.arithmetic.gamma(40) + sixth, size)
    return near.checked(total(error, near.lost(step.shape, 8)), scaled(8.0, size))


@register_rounding("aten.hardsigmoid", "aten.sin", "aten.cos")
def _up_to_one(step: Step, near: Near, result: Value) -> Error:
    """Bound functions with values up to 1 by an absolute error; hardsigmoid has torch's 1/6."""
    sixth = 2.0**-24 if "hardsigmoid" in step.call.op else 0.0
    return scaled(up(near.arithmetic.gamma(2 * ELEMENTARY) + sixth), root(step.shape))


@register_rounding("aten.softplus", "aten.log_sigmoid", "aten.log_sigmoid_forward")
def _soft(step: Step, near: Near, result: Value) -> Error:
    """Bound log(1 + exp(βx))/β: the exponent is off by u|βx|, exp and log by 8u."""
    (value,) = step.inputs()
    beta = abs(float(step.arguments.get("beta") or 1.0))
    size = total(near.size(value), up(root(value.shape) / beta))
    error = scaled(near.arithmetic.gamma(3 * ELEMENTARY), size)
    if "softplus" in step.call.op:  # exp(βx) is computed up to the threshold
        exponent = np.minimum(beta * near.size(value), abs(float(step["threshold"])) * 1.001)
        error = np.where(exponent < 0.99 * math.log(near.arithmetic.largest), error, math.inf)
    return near.checked(total(error, near.lost(value.shape, 8 * (1 + 1 / beta))), size)


@register_rounding("aten.elu", "aten.elu_", "aten.selu", "aten.selu_", "aten.celu", "aten.celu_")
def _exponential(step: Step, near: Near, result: Value) -> Error:
    """Bound α(exp(x) − 1) below zero, which is off by 16u|α|, and a product above."""
    alpha = 1.7580993408473769 if "selu" in step.call.op else abs(float(step["alpha"]))
    alpha *= abs(float(step.arguments.get("scale") or 1.0))
    below = scaled(near.arithmetic.gamma(2 * ELEMENTARY), up(alpha * root(step.shape)))
    return near.checked(total(below, near.relative(step, result, 4)), alpha)


@register_rounding("aten.softmax", "aten._softmax")
def _softmax(step: Step, near: Near, result: Value) -> Error:
    """Bound exp(x − max)/Σ: an exponent t is off by ut, and t·exp(−t) ≤ 0.4; see the page."""
    lost = near.lost(step.shape, 4)
    return total(scaled(_share(step, near), math.sqrt(_rows(step)) * (1 + 1e-9)), lost)


@register_rounding("aten.log_softmax", "aten._log_softmax", "aten.logsumexp")
def _log_of_sum(step: Step, near: Near, result: Value) -> Error:
    """Bound x − max − log Σ, and max + log Σ."""
    (value,) = step.inputs()
    size = scaled(2 * up(math.sqrt(_length(step))), near.size(value))
    error = total(scaled(_share(step, near), root(value.shape)),
                  scaled(near.arithmetic.gamma(ELEMENTARY), size))  # fmt: skip
    return near.checked(error, size)


def _length(step: Step) -> int:
    shape = step.inputs()[0].shape
    dims = step["dim"]
    named = [dims] if isinstance(dims, int) else list(dims)
    return math.prod(shape[d] for d in named) if shape else 1


def _rows(step: Step) -> float:
    return math.prod(step.inputs()[0].shape) / _length(step)


def _share(step: Step, near: Near) -> float:
    """Bound the relative error of Σ exp(x − max), and the absolute one of its logarithm."""
    return near.arithmetic.gamma(2 * _length(step) + 5 * ELEMENTARY)


@register_rounding("aten.linalg_vector_norm")
def _norm(step: Step, near: Near, result: Value) -> Error:
    """Bound √Σx²: the squares may underflow, which changes the root by at most √(n·tiny)."""
    (value,) = step.inputs()
    count = math.prod(value.shape) / max(1, math.prod(step.shape))
    lost = up(root(step.shape) * up(math.sqrt(count * near.arithmetic.tiny)) * 2)
    size = near.size(value)
    with np.errstate(over="ignore"):
        return near.checked(total(near.relative(step, result, count + 4), lost), size * size)
