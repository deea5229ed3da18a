"""What is known of a value inside a network, and the table of rules."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lipbound.bounds import Bracket, bound, bracket
from lipbound.bounds.rounding import norm_above
from lipbound.geometry import Convolution, Layer, convolution
from lipbound.network.graph import Call, Reference


@dataclass(frozen=True)
class Options:
    """How hard to work, and what has been done.

    Attributes:
        rtol: The width of brackets.
        effort: Whether to weight blocks.
        method: The layers' bound.
        done: Intervals that were found, by what they are of.
        notes: What was assumed on the way, for a person.
    """

    rtol: float = 1e-3
    effort: str = "normal"
    method: str = "spectral"
    done: dict[tuple[Any, ...], Bracket] = field(default_factory=dict, compare=False, repr=False)
    notes: dict[str, None] = field(default_factory=dict, compare=False, repr=False)

    def keep(self, layer: Layer, found: Bracket) -> None:
        """Spare an equal layer, met again in the graph, a second search."""
        self.done[_identity(convolution(layer))] = found


def _identity(conv: Convolution) -> tuple[Any, ...]:
    """Equal for equal geometries and numbers, whatever type they are stored in."""
    numbers = conv.kernel.detach().double().cpu().contiguous().numpy()
    geometry = [getattr(conv, part.name) for part in fields(conv) if part.name != "kernel"]
    return hashlib.blake2b(numbers.data).digest(), numbers.shape, *geometry


def layer_bracket(layer: Layer, options: Options) -> Bracket:
    """A certified interval of one layer's norm; of another method than the bracket, from 0.

    A matrix has one norm, whatever the method.
    """
    conv = convolution(layer)
    known = options.done.get(_identity(conv))
    if known is not None:
        return known
    if options.method == "spectral" or conv.dims == 0:
        return bracket(conv, options.rtol)
    upper = float(bound(conv, options.method).detach())
    return Bracket(0.0, upper, (), 0)


@dataclass(eq=False)
class Linear:
    """A value that is a convolution (or matrix) of an earlier one, plus a constant.

    Kept unevaluated, so that a BatchNorm can be folded in and parallel branches be added first.

    Attributes:
        anchor: What it is a convolution of.
        conv: The operator, with its input size; D = 0 for a matrix.
        options: How hard to work.
        slack: Bounds the norm of what rounding did to the kernel, absolutely,
        rounded: and relative to each entry's size.
    """

    anchor: Value
    conv: Convolution
    options: Options
    slack: float = 0.0
    rounded: float = 0.0

    @property
    def error(self) -> float:
        """Bounds the norm of what ``conv``, a matrix here, is off by."""
        if not self.slack and not self.rounded:
            return 0.0
        return up(self.slack + up(self.rounded * norm_above(self.conv.kernel)))

    @cached_property
    def norm(self) -> float:
        """A certified bound on its norm at this input size.

        Zero padding is bounded for every size, which is hardly more.

        The factor pays for one rounding of every entry (a BatchNorm folded in), ``slack`` for
        those of a sum.
        """
        zeros = self.conv.padding_mode == "zeros"
        operator = replace(self.conv, input_size=None) if zeros else self.conv
        upper = layer_bracket(operator, self.options).upper
        return up(upper * (1 + 2.0**-40) + self.slack)


@dataclass(eq=False)
class Value:
    """A value that depends on the network's input.

    Some function of the inputs with the Lipschitz constant ``lipschitz`` stays within ``error`` of
    the value, everywhere, both in the L2 norm. An error is what an implementation adds to the
    textbook's function: torch's softplus jumps a little.

    Attributes:
        shape: With the batch axis, which has one entry.
        constant: The Lipschitz constant; ``None`` if ``linear`` says it better.
        apart: The error; without meaning where ``linear`` is.
        linear: The value as a convolution of an earlier one.
        reason: Why the constant is infinite.
        padding: If it is only a padded earlier value: that value, the mode, the amounts.
        origin: The step that made it.
    """

    shape: tuple[int, ...]
    constant: float | None = None
    linear: Linear | None = None
    reason: str = ""
    apart: float = 0.0
    padding: tuple[Value, str, tuple[tuple[int, int], ...]] | None = field(default=None, repr=False)
    origin: Step | None = field(default=None, repr=False)

    @cached_property
    def lipschitz(self) -> float:
        if self.linear is not None:
            return up(self.linear.anchor.lipschitz * self.linear.norm)
        assert self.constant is not None
        return self.constant

    @cached_property
    def error(self) -> float:
        if self.linear is None:
            return self.apart
        before = self.linear.anchor.error
        return up(before * self.linear.norm) if before else 0.0

    @property
    def why(self) -> str:
        """Why it is unbounded, if it is."""
        return self.reason or (self.linear.anchor.why if self.linear else "")

    def times(self, gain: float, shape: Sequence[int] | None = None, apart: float = 0.0) -> Value:
        """The value after an operation within ``apart`` of one that is ``gain``-Lipschitz."""
        exact = gain in (0, 1)
        product = gain * self.lipschitz if gain else 0.0
        error = 0.0
        if gain and self.error:
            error = gain * self.error if exact else up(gain * self.error)
        after = self.shape if shape is None else tuple(shape)  # () is a number, to be spread
        why = self.why or ("" if gain < math.inf else INFINITE)
        error = up(error + apart) if apart else error
        return Value(after, product if exact else up(product), reason=why, apart=error)


@dataclass
class Step:
    """One call, with what is known of its arguments.

    Attributes:
        call: The call.
        arguments: By name; values that depend on the input are :class:`Value`, tensors constants.
        options: How hard to work.
    """

    call: Call
    arguments: dict[str, Any]
    options: Options
    read: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.arguments[name]

    def unread(self) -> list[str]:
        """Arguments that depend on the input and that nobody has looked at."""
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
        """The arguments that depend on the input, in order."""
        self.read |= self.arguments.keys()
        leaves = tree_leaves(list(self.arguments.values()))
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    def size(self, name: str, default: float = 1.0) -> float:
        """The largest |number| that an argument may stand for.

        A Python number is a float64; a network of another precision rounds it to its own, or to
        float32.

        Raises:
            Unbounded: If it is not a number.
        """
        given = self.arguments.get(name)
        return max(map(abs, readings(default if given is None else given, self.call.dtype)))

    def note(self, text: str) -> None:
        """Say something of it to whoever reads the audit."""
        place = f" (module {self.call.module})" if self.call.module else ""
        self.options.notes[text + place] = None

    def only(self) -> Value:
        """The one argument that depends on the input."""
        found = self.inputs()
        if len(found) != 1:
            raise Unbounded(f"it has a rule for one activation, and was given {len(found)}")
        return found[0]


INFINITE = "its constant is not finite"


class Unbounded(Exception):
    """An operation has no Lipschitz constant, or none is known; the message says why."""


Rule = Callable[[Step], Any]
RULES: dict[str, Rule] = {}
"""Operation → rule: from a :class:`Step` to a :class:`Value`, several, or the gain as a number."""


def register_rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations by name, ``'aten.relu'`` or ``'mylib.myop'``.

    The rule gets a :class:`Step` and returns the operation's L2 Lipschitz constant (in its one
    argument that depends on the input), or a :class:`Value`. It may raise :class:`Unbounded`.

    Example:
        >>> @register_rule("mylib.halve")
        ... def halve(step):
        ...     return 0.5
        >>> _ = RULES.pop("mylib.halve")
    """

    def add(rule: Rule) -> Rule:
        for op in ops:
            RULES[op] = rule
        return rule

    return add


def follow(call: Call, values: dict[str, Any], options: Options) -> Any:
    """What is known of a call's result: a :class:`Value`, or a list for several results."""
    arguments = {name: _known(value, values) for name, value in call.arguments().items()}
    step = Step(call, arguments, options)
    if call.op == "getitem":
        part: Value = arguments["0"][arguments["1"]]
        if not call.floating:
            return Value(call.shape or (), math.inf, reason=f"integers jump ({call.module})")
        # A part of a split: its own shape decides what broadcasting does to it.
        return part if part.shape == call.shape else part.times(1.0, call.shape)
    shape = call.shape or ()
    try:
        if not call.floating:
            raise Unbounded("its result is no real floating-point tensor: it jumps, or has no rule")
        if call.op not in RULES:
            raise Unbounded(
                f"lipbound has no rule for {call.op}; write one with "
                f"@lipbound.register_rule({call.op!r})"
            )
        result = _ruled(step)
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
    """What errors its arguments have, a value must have taken into account, whoever made it."""
    if (
        not any(v.error for v in step.inputs())
        or result.error
        or not 0 < result.lipschitz < math.inf
    ):
        return result
    return Value(
        result.shape, math.inf, origin=step,
        reason=f"the rule for {step.call.op} makes a Value without the error of what it is given; "
        f"use step.only().times(gain)",
    )  # fmt: skip


def _ruled(step: Step) -> Any:
    """What the rule says. A rule answers for the activations it has looked at, and for no other."""
    try:
        result = RULES[step.call.op](step)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        first = (str(e).strip() or type(e).__name__).splitlines()[0][:120]
        raise Unbounded(f"its rule cannot read these arguments ({first})") from e
    if isinstance(result, int | float):
        value = step.only()
        others = [a for a in list(step.arguments.values())[:1] if a is not value]
        if step.call.op.startswith("aten.") and others:
            raise Unbounded("it has a rule for its first argument only, which is no activation")
        return value.times(float(result), step.call.shape)
    if step.unread():
        raise Unbounded(f"no rule for a {step.unread()[0]!r} that depends on the input")
    return result


def up(number: float) -> float:
    """The next number above: a product or sum of non-negative numbers never falls short.

    Of what is not a number (0·∞, a NaN among the constants) nothing is known: ∞.
    """
    return math.inf if math.isnan(number) else math.nextafter(number, math.inf)


def readings(number: Any, dtype: torch.dtype | None = None) -> list[float]:
    """What a Python number may be in a network: itself, in float32, or in the network's own type.

    A float64 network has it as it is.

    Raises:
        Unbounded: If it is not a number.
    """
    exact = torch.tensor(float(number), dtype=torch.float64)
    if bool(exact.isnan()):
        raise Unbounded("a constant that it multiplies with is not a number")
    half = dtype in (torch.float16, torch.bfloat16)
    types = [] if dtype == torch.float64 else [torch.float32, *([dtype] if half else [])]
    rounded = [float(exact.to(kind)) for kind in types]
    return [float(exact), *(r for r in rounded if 0 < abs(r) < math.inf)]


def summed(values: Sequence[Value], shape: Sequence[int], gains: Sequence[float]) -> Value:
    """Σ gainᵢ·valueᵢ: constants and errors add."""
    total = error = 0.0
    for value, gain in zip(values, gains, strict=True):
        total = up(total + up(gain * value.lipschitz))
        error = up(error + up(gain * value.error)) if value.error else error
    reason = next((v.why for v in values if v.why), "")
    return Value(tuple(shape), total, reason=reason, apart=error)


def concatenated(values: Sequence[Value], shape: Sequence[int], gains: Sequence[float]) -> Value:
    """Values whose entries are put beside each other, each first enlarged: squares add."""
    pairs = list(zip(values, gains, strict=True))
    total = root_sum([v.lipschitz if g == 1 else up(g * v.lipschitz) for v, g in pairs])
    error = root_sum([up(g * v.error) for v, g in pairs]) if any(v.error for v in values) else 0.0
    reason = next((v.why for v in values if v.why), "")
    return Value(tuple(shape), total, reason=reason, apart=error)


def steepest(*slopes: float) -> float:
    """The largest |slope|."""
    if any(map(math.isnan, slopes)):
        raise Unbounded("a slope is not a number")
    return max(map(abs, slopes))


def root_sum(numbers: Sequence[float]) -> float:
    """√Σx², from above."""
    return up(up(math.hypot(*numbers)))


def _known(argument: Any, values: dict[str, Any]) -> Any:
    if isinstance(argument, Reference):
        return values[argument.name]
    if isinstance(argument, list | tuple):
        return [_known(value, values) for value in argument]
    return argument


def spread(value: Value, shape: Sequence[int]) -> float:
    """√(copies) that broadcasting to ``shape`` makes of every entry."""
    copies = math.prod(shape) / max(1, math.prod(value.shape))
    return up(math.sqrt(copies)) if copies > 1 else 1.0


def axes(value: int | Sequence[int], dims: int) -> list[int]:
    """One number per axis, where an operation also takes one for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def windows(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool = False
) -> int:
    """The largest number of windows that see one entry of an axis."""
    count = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 + ceil
    seen = np.arange(count)[:, None] * stride - padding + np.arange(kernel)[None, :] * dilation
    inside = seen[(seen >= 0) & (seen < size)]
    return int(np.bincount(inside, minlength=1).max())
