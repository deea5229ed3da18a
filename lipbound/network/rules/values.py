"""Values inside a network with their Lipschitz bounds, and the table of rules."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from lipbound.bounds import Bracket, bound, bracket
from lipbound.bounds.rounding import norm_above
from lipbound.geometry import Convolution, Layer, convolution
from lipbound.network.graph import Call, Reference

if TYPE_CHECKING:
    from lipbound.network.rules.ranges import Range, Ranges

Error = float | NDArray[np.float64]
"""Bound on an error: a number that holds for all inputs, or one for the ball around each input."""
Number = TypeVar("Number", float, NDArray[np.float64], Error)


@dataclass(frozen=True)
class Options:
    """Options of an audit, and results to reuse.

    Attributes:
        rtol: Relative width of the layers' certified intervals.
        effort: ``'low'``, ``'normal'`` or ``'high'``, see :func:`lipbound.audit`.
        method: Name of the bound to use for each layer.
        done: Intervals found so far, by a key of the layer.
        notes: Assumptions to report to the user.
        domain: Limits of the inputs' entries; ``None`` for any input.
        ranges: Ranges of the network's values, as far as they are known.
        limit: Norm to assume for layers whose norm is larger.
    """

    rtol: float = 1e-3
    effort: str = "normal"
    method: str = "spectral"
    done: dict[tuple[Any, ...], Bracket] = field(default_factory=dict, compare=False, repr=False)
    notes: dict[str, None] = field(default_factory=dict, compare=False, repr=False)
    domain: tuple[float, float] | None = None
    ranges: Ranges | None = field(default=None, compare=False, repr=False)
    limit: float = math.inf

    def keep(self, layer: Layer, found: Bracket) -> None:
        """Store a layer's interval, so that an equal layer in the graph needs no second search."""
        self.done[_identity(convolution(layer))] = found


def _identity(conv: Convolution) -> tuple[Any, ...]:
    """Return a key that is equal for equal geometry and numbers, independent of their type."""
    numbers = conv.kernel.detach().double().cpu().contiguous().numpy()
    geometry = [getattr(conv, part.name) for part in fields(conv) if part.name != "kernel"]
    return hashlib.blake2b(numbers.data).digest(), numbers.shape, *geometry


def layer_bracket(layer: Layer, options: Options) -> Bracket:
    """Return a certified interval of a layer's norm; it starts at 0 unless it is a bracket.

    A matrix is bracketed with every method.
    """
    conv = convolution(layer)
    known = options.done.get(_identity(conv))
    if known is not None:
        return known
    if options.method == "spectral" or conv.dims == 0:
        found = bracket(conv, options.rtol)
    else:
        found = Bracket(0.0, float(bound(conv, options.method).detach()), (), 0)
    options.keep(layer, found)
    return found


@dataclass(eq=False)
class Linear:
    """A value that is a convolution (or matrix) of an earlier one, plus a constant.

    It is bounded late, so that a BatchNorm can be folded in and parallel branches can be added.

    Attributes:
        anchor: The earlier value.
        conv: The operator, with its input size; D = 0 for a matrix.
        options: Options of the audit.
        slack: Bound on the norm of the kernel's absolute rounding errors.
        rounded: Bound on the rounding error of each kernel entry, relative to its size.
    """

    anchor: Value
    conv: Convolution
    options: Options
    slack: float = 0.0
    rounded: float = 0.0

    @property
    def error(self) -> float:
        """Bound the norm of the rounding errors in ``conv``, which must be a matrix."""
        if not self.slack and not self.rounded:
            return 0.0
        return up(self.slack + up(self.rounded * norm_above(self.conv.kernel)))

    @cached_property
    def norm(self) -> float:
        """Return a certified bound on the norm at this input size.

        With zero padding the bound holds for every size, which makes it hardly larger.

        The factor covers one rounding of every entry (by a folded BatchNorm), ``slack`` covers
        the roundings of a sum.
        """
        zeros = self.conv.padding_mode == "zeros"
        operator = replace(self.conv, input_size=None) if zeros else self.conv
        upper = min(layer_bracket(operator, self.options).upper, self.options.limit)
        return up(upper * (1 + 2.0**-40) + self.slack)


@dataclass(frozen=True, eq=False)
class Part:
    """Where a value comes from: a function of some entries of an earlier value.

    Attributes:
        source: The earlier value.
        axis: Axis of the earlier value along which the entries were selected.
        taken: The selected positions along that axis.
        gain: Lipschitz constant of the function.
        apart: Error since the earlier value.
    """

    source: Value
    axis: int
    taken: range
    gain: float = 1.0
    apart: Error = 0.0

    def then(self, gain: float, apart: Error = 0.0) -> Part:
        """Return the part after a further operation."""
        before = scaled(gain, self.apart)
        return replace(
            self, gain=self.gain if gain == 1 else up(self.gain * gain), apart=total(before, apart)
        )


@dataclass(eq=False)
class Value:
    """A value that depends on the network's input.

    Some function of the inputs with the Lipschitz constant ``lipschitz`` stays within ``error`` of
    the value everywhere, both in the L2 norm. An error is a deviation of the implementation from
    the mathematical function. For example torch's softplus jumps a little. Rounding is another
    error, which :mod:`lipbound.network.rounding` bounds near given inputs.

    Attributes:
        shape: Shape with the batch axis, which has one entry.
        constant: The Lipschitz constant; ``None`` if it follows from ``linear``.
        apart: The error; if ``linear`` is given, the error since the earlier value.
        own: The share of the error that the last operation added.
        linear: The value as a convolution of an earlier one.
        reason: Why the constant is infinite.
        padding: If the value is a padded earlier value: that value, the mode, the amounts.
        part: The entries of an earlier value on which it depends, if it does not depend on all.
        origin: The step that computed it.
    """

    shape: tuple[int, ...]
    constant: float | None = None
    linear: Linear | None = None
    reason: str = ""
    apart: Error = 0.0
    own: Error = 0.0
    padding: tuple[Value, str, tuple[tuple[int, int], ...]] | None = field(default=None, repr=False)
    part: Part | None = field(default=None, repr=False)
    origin: Step | None = field(default=None, repr=False)

    @cached_property
    def lipschitz(self) -> float:
        if self.linear is not None:
            return up(self.linear.anchor.lipschitz * self.linear.norm)
        assert self.constant is not None
        return self.constant

    @cached_property
    def error(self) -> Error:
        if self.linear is None:
            return self.apart
        before = self.linear.anchor.error
        return total(up(before * self.linear.norm) if np.any(before) else 0.0, self.apart)

    @property
    def why(self) -> str:
        """Return why there is no bound; empty if there is one."""
        return self.reason or (self.linear.anchor.why if self.linear else "")

    def times(self, gain: float, shape: Sequence[int] | None = None, apart: Error = 0.0) -> Value:
        """Return the value after a ``gain``-Lipschitz operation with the error ``apart``."""
        exact = gain in (0, 1) or (not self.lipschitz and gain < math.inf)
        product = gain * self.lipschitz if gain else 0.0
        after = self.shape if shape is None else tuple(shape)  # () is the shape of a number
        why = self.why or ("" if gain < math.inf else INFINITE)
        error = total(scaled(gain, self.error), apart)
        part = None if self.part is None else self.part.then(gain, apart)
        constant = product if exact else up(product)
        return Value(after, constant, reason=why, apart=error, own=apart, part=part)

    def divide(self, factor: float) -> None:
        """Divide the constant; of a linear map, that of the earlier value must be divided."""
        self.__dict__.pop("lipschitz", None)
        if self.constant is not None:
            self.constant = up(self.constant / factor) if self.constant else 0.0

    def rounded(self, error: Error) -> Value:
        """Return the value with a further error of its last operation."""
        if not np.any(error):
            return self
        part = None if self.part is None else self.part.then(1.0, error)
        own, apart = total(self.own, error), total(self.apart, error)
        return replace(self, apart=apart, own=own, part=part)


@dataclass
class Step:
    """One call with its arguments, the input of a rule.

    Attributes:
        call: The call.
        arguments: Arguments by name: a :class:`Value` depends on the input, a tensor is constant.
        options: Options of the audit.
    """

    call: Call
    arguments: dict[str, Any]
    options: Options
    read: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.arguments[name]

    def unread(self) -> list[str]:
        """Return the arguments that depend on the input and that the rule has not read."""
        return [
            name for name, argument in self.arguments.items()
            if name not in self.read
            and any(isinstance(leaf, Value) for leaf in tree_leaves(argument))
        ]  # fmt: skip

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.call.shape is not None
        return self.call.shape

    def inputs(self) -> list[Value]:
        """Return the arguments that depend on the input, in order."""
        self.read |= self.arguments.keys()
        leaves = tree_leaves(list(self.arguments.values()))
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    def size(self, name: str, default: float = 1.0) -> float:
        """Return the largest absolute value that a number may have after rounding.

        A Python number is a float64; a network of another precision rounds it to its own, or to
        float32.

        Raises:
            Unbounded: If the argument is NaN.
        """
        given = self.arguments.get(name)
        return max(map(abs, readings(default if given is None else given, self.call.dtype)))

    def range(self, name: str, index: int | None = None) -> Range:
        """Return the range of an argument, or of an entry of a list, that depends on the input.

        Raises:
            Unbounded: If it has none.
        """
        place = self.call.arguments()[name]
        place = place if index is None else place[index]
        ranges = self.options.ranges
        found = None if ranges is None else ranges[place.name]
        if found is None and self.options.domain is not None:
            raise Unbounded(f"the range of {place.name} is not known, or above 1.8e308")
        if found is None:
            raise Unbounded(
                f"the range of {place.name} is not known, so there is no global Lipschitz "
                f"constant; give the smallest and the largest number of your inputs, for "
                f"example domain=(0, 1), or --domain 0,1"
            )
        return found

    def note(self, text: str) -> None:
        """Add a note about this call to the audit."""
        place = f" (module {self.call.module})" if self.call.module else ""
        self.options.notes[text + place] = None

    def only(self) -> Value:
        """Return the only argument that depends on the input."""
        found = self.inputs()
        if len(found) != 1:
            raise Unbounded(f"its rule takes one activation, but there are {len(found)}")
        return found[0]


COMPARISONS = {f"aten.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "logical_not")}
INFINITE = "its Lipschitz constant is not finite"


class Unbounded(Exception):
    """Raised by a rule for an operation without a known Lipschitz constant, with the reason."""


Rule = Callable[[Step], Any]
RULES: dict[str, Rule] = {}
"""Operation → rule. A rule maps a :class:`Step` to one or more :class:`Value`, or to a gain."""


def register_rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a Lipschitz rule for operations, for example ``'aten.relu'`` or ``'mylib.myop'``.

    The rule gets a :class:`Step` and returns a :class:`Value`, or the L2 Lipschitz constant in the
    only argument that depends on the input, as a number. It may raise :class:`Unbounded`. For
    certificates of the network as it runs, an operation also needs a bound on its rounding, see
    :func:`lipbound.network.rules.rounding.register_rounding`.

    Example:
        >>> @register_rule("mylib.halve")
        ... def halve(step):
        ...     return 0.5
        >>> _ = RULES.pop("mylib.halve")
    """

    for op in ops:
        if not isinstance(op, str) or "." not in op or "::" in op:
            raise ValueError(
                f"register_rule: {op!r} is not the name of an operation; write library and name "
                f"with a dot, for example 'mylib.halve'"
            )

    def add(rule: Rule) -> Rule:
        for op in ops:
            RULES[op] = rule
        return rule

    return add


def follow(
    call: Call,
    values: dict[str, Any],
    options: Options,
    after: Callable[[Step, Any], Any] = lambda _, result: result,
) -> Any:
    """Apply the rule to a call; return a :class:`Value`, or a list for several results.

    ``after`` may change what the rule returns, for example to add an error.
    """
    arguments = {name: _known(value, values) for name, value in call.arguments().items()}
    step = Step(call, arguments, options)
    if call.op == "getitem":
        part: Value = arguments["0"][arguments["1"]]
        if not call.floating:
            return Value(call.shape or (), math.inf, reason=f"integers jump ({call.module})")
        # A part of a split needs its own shape for broadcasting.
        return part if part.shape == call.shape else part.times(1.0, call.shape)
    shape = call.shape or ()
    try:
        if call.op in COMPARISONS and all(
            v.lipschitz == 0 and not np.any(v.error) for v in step.inputs()
        ):
            return Value(shape, 0.0, origin=step)  # a comparison of constants, such as a mask
        if not call.floating:
            raise Unbounded("its result is not real floating point: it jumps or has no rule")
        if call.op not in RULES:
            raise Unbounded(
                f"lipbound has no rule for {call.op}; add one with "
                f"@lipbound.register_rule({call.op!r})"
            )
        result = after(step, _ruled(step))
        if isinstance(result, Value) and result.reason == INFINITE:
            raise Unbounded(INFINITE)
    except Unbounded as error:
        earlier = [v.why for v in step.inputs() if v.lipschitz == math.inf and v.why]
        place = ", ".join(part for part in (call.module, call.source) if part)
        reason = earlier[0] if earlier else f"{error} ({call.op}{' in ' if place else ''}{place})"
        result = Value(shape, math.inf, reason=reason)
    if call.shape is None and isinstance(result, Value):
        why = result.why or f"only the first result of {call.op} has a rule"
        result = [result, *[Value((), math.inf, reason=why)] * (call.results - 1)]
    if isinstance(result, Value):
        result.origin = step
        result = _with_error(result, step)
    return result


def _with_error(result: Value, step: Step) -> Value:
    """Refuse a result without an error if the call's arguments have one."""
    if (
        not any(np.any(v.error) for v in step.inputs())
        or np.any(result.error)
        or not 0 < result.lipschitz < math.inf
    ):
        return result
    return Value(
        result.shape, math.inf, origin=step,
        reason=f"the rule for {step.call.op} returns a Value without the error of its argument; "
        f"use step.only().times(gain)",
    )  # fmt: skip


def _ruled(step: Step) -> Any:
    """Call the rule, and refuse its result if the rule has not read every activation."""
    try:
        result = RULES[step.call.op](step)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        first = (str(e).strip() or type(e).__name__).splitlines()[0][:120]
        raise Unbounded(f"its rule cannot read these arguments ({first})") from e
    if isinstance(result, int | float):
        if result < 0:
            raise Unbounded(f"its rule returns the negative constant {result}")
        value = step.only()
        others = [a for a in list(step.arguments.values())[:1] if a is not value]
        if step.call.op.startswith("aten.") and others:
            raise Unbounded("its rule needs an activation as the first argument")
        return value.times(float(result), step.call.shape)
    if step.unread():
        raise Unbounded(f"no rule for {step.unread()[0]!r} that depends on the input")
    return result


def up(number: Number) -> Number:
    """Return the next larger float, an upper bound on a rounded product or sum of numbers ≥ 0.

    NaN (from 0·∞ or from a constant) becomes ∞, because nothing is known about it.
    """
    if isinstance(number, np.ndarray):
        return np.where(np.isnan(number), math.inf, np.nextafter(number, math.inf))
    return math.inf if math.isnan(number) else math.nextafter(number, math.inf)


def scaled(gain: float, error: Error) -> Error:
    """Return gain·error, rounded up; 0 if one of them is 0."""
    if not gain or not np.any(error):
        return 0.0
    return error if gain == 1 else up(gain * error)


def total(*errors: Error) -> Error:
    """Return the sum, rounded up."""
    result: Error = 0.0
    for error in errors:
        if np.any(error):
            result = up(result + error) if np.any(result) else error
    return result


def readings(number: Any, dtype: torch.dtype | None = None) -> list[float]:
    """Return a Python number as a network may round it: exact, float32, or the network's type.

    A float64 network does not round it.

    Raises:
        Unbounded: If the number is NaN.
    """
    exact = torch.tensor(float(number), dtype=torch.float64)
    if bool(exact.isnan()):
        raise Unbounded("a constant factor is not a number")
    half = dtype in (torch.float16, torch.bfloat16)
    types = [] if dtype == torch.float64 else [torch.float32, *([dtype] if half else [])]
    rounded = [float(exact.to(kind)) for kind in types]
    return [float(exact), *(r for r in rounded if 0 < abs(r) < math.inf)]


def smallest(number: float, dtype: torch.dtype | None) -> float:
    """Return the smallest value that a network may round a number ≥ 0 to, which may be 0."""
    types = [torch.float64, *([] if dtype in (None, torch.float64) else [torch.float32, dtype])]
    return min(float(torch.tensor(number, dtype=torch.float64).to(kind)) for kind in types)


def summed(values: Sequence[Value], shape: Sequence[int], gains: Sequence[float]) -> Value:
    """Return Σ gainᵢ·valueᵢ, whose constants and errors add."""
    pairs = list(zip(values, gains, strict=True))
    constant = 0.0
    for value, gain in pairs:
        if value.lipschitz or not gain < math.inf:  # a constant stays one
            constant = up(constant + up(gain * value.lipschitz))
    error = total(*[scaled(gain, value.error) for value, gain in pairs])
    reason = next((v.why for v in values if v.why), "")
    return Value(tuple(shape), constant, reason=reason, apart=error)


def concatenated(values: Sequence[Value], shape: Sequence[int], gains: Sequence[float]) -> Value:
    """Return the concatenation of gainᵢ·valueᵢ, whose squared constants and errors add."""
    pairs = list(zip(values, gains, strict=True))
    constant = root_sum([v.lipschitz if g == 1 else up(g * v.lipschitz) for v, g in pairs])
    error = root_sum_of_errors([scaled(gain, value.error) for value, gain in pairs])
    reason = next((v.why for v in values if v.why), "")
    return Value(tuple(shape), constant, reason=reason, apart=error)


def steepest(*slopes: float) -> float:
    """Return the largest |slope|."""
    if any(map(math.isnan, slopes)):
        raise Unbounded("a slope is not a number")
    return max(map(abs, slopes))


def root_sum(numbers: Sequence[float]) -> float:
    """Return √Σx², rounded up."""
    return up(up(math.hypot(*numbers))) if any(numbers) else 0.0


def root_sum_of_errors(errors: Sequence[Error]) -> Error:
    """Return √Σx², rounded up."""
    present = [error for error in errors if np.any(error)]
    if len(present) < 2:
        return present[0] if present else 0.0
    result = present[0]
    for error in present[1:]:
        result = up(up(np.hypot(result, error)))
    return result


def _known(argument: Any, values: dict[str, Any]) -> Any:
    if isinstance(argument, Reference):
        return values[argument.name]
    if isinstance(argument, list | tuple):
        return [_known(value, values) for value in argument]
    return argument


def spread(value: Value, shape: Sequence[int]) -> float:
    """Return √(number of copies that broadcasting to ``shape`` makes of every entry)."""
    copies = math.prod(shape) / max(1, math.prod(value.shape))
    return up(math.sqrt(copies)) if copies > 1 else 1.0


def axes(value: int | Sequence[int], dims: int) -> list[int]:
    """Return one number per axis; a single number counts for all axes."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def windows(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool = False
) -> int:
    """Return the largest number of windows that contain one entry of an axis."""
    count = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 + ceil
    seen = np.arange(count)[:, None] * stride - padding + np.arange(kernel)[None, :] * dilation
    inside = seen[(seen >= 0) & (seen < size)]
    return int(np.bincount(inside, minlength=1).max())
