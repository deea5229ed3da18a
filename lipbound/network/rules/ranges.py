r"""Ranges of the values inside a network, which bound products of activations.

Some values have a range for every input: a sigmoid lies in [0, 1], a softmax has norm at most 1,
and a LayerNorm with n entries has norm at most √n·max|γ| + ‖β‖. Others have one if the network's
inputs lie in a domain. Both follow from interval arithmetic, operation by operation. On a domain
with centre x₀ and radius R a value u also satisfies :math:`|u(x) - u(x_0)| \le L R`, where L is its
Lipschitz constant there, and the smaller of both ranges is used.

A product then has a Lipschitz constant: :math:`\|\Delta(ab)\| \le \|b\|_\infty \|\Delta a\| +
\|a\|_\infty \|\Delta b\|`.

Everything is computed in float64 and widened by more than its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lipbound.network.graph import Call, Graph, Reference
from lipbound.network.rules.values import Options, Unbounded, Value, readings, up

UNIT = 2.0**-52
TINY = 1e-300  # more than what underflow loses
ROOM = 1 + 1e-9  # for the rounding of a norm


@dataclass(frozen=True)
class Range:
    """Limits of a value's entries, and of its L2 norm.

    Attributes:
        low: Lower limits, in the shape of the value.
        high: Upper limits.
        norm: Upper limit of the norm; it is at most that of the largest entries.
    """

    low: Tensor
    high: Tensor
    norm: float

    @staticmethod
    def of(low: Tensor, high: Tensor, norm: float = math.inf) -> Range:
        """Return a range whose norm is at most that of its largest entries."""
        size = torch.maximum(low.abs(), high.abs())
        return Range(low, high, min(norm, _norm(size)))

    @property
    def size(self) -> Tensor:
        """Limits of the sizes of all entries."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def largest(self) -> float:
        """Limit of the size of the largest entry."""
        return min(float(self.size.max()) if self.size.numel() else 0.0, self.norm)

    def met(self, other: Sequence[int], shape: Sequence[int]) -> float:
        """Limit the norm of the entries by which one entry of another factor is multiplied.

        Args:
            other: Shape of the other factor.
            shape: Shape of the product, to which both are broadcast.
        """
        wide = [*[1] * (len(shape) - len(other)), *other]
        axes = [axis for axis, (n, m) in enumerate(zip(wide, shape, strict=True)) if n < m]
        if not axes:
            return self.largest
        copies = math.prod(shape) / max(1, self.low.numel())
        sizes = self.size.expand(tuple(shape))
        return min(_norm(sizes, axes), up(self.norm * up(math.sqrt(copies))))

    def matrices(self) -> float:
        """Limit the norms of the matrices in the last two axes."""
        return min(self.norm, _norm(self.size, [-2, -1]))


def _norm(size: Tensor, axes: Sequence[int] | None = None) -> float:
    """Return an upper bound on the largest norm over some axes of numbers ≥ 0."""
    most = float(size.max()) if size.numel() else 0.0
    if not 0 < most < math.inf:
        return most
    squares = (size / most).square()
    found = squares.sum() if axes is None else squares.sum(tuple(axes))
    return most * math.sqrt(float(found.max())) * ROOM + TINY


class Ranges:
    """The ranges of a graph's values, each computed when it is asked for.

    Args:
        graph: The network.
        values: The bounds of its values, which are being computed.
        options: Options of the audit.
        domain: Limits of all entries of the inputs; ``None`` for any input.
    """

    def __init__(
        self,
        graph: Graph,
        values: dict[str, Any],
        options: Options,
        domain: tuple[float, float] | None = None,
    ):
        self.values, self.options = values, options
        self.calls = {call.name: call for call in graph.calls}
        self.known: dict[str, Any] = dict.fromkeys(graph.inputs)
        self.centre: Ranges | None = None
        self.exponent = 0  # of the power of two by which all constants were divided
        self.device = graph.device
        if domain is None:
            return
        low, high = domain
        for name, shape in graph.inputs.items():
            whole = torch.ones(shape, dtype=torch.float64, device=self.device)
            self.known[name] = Range.of(low * whole, high * whole)
        if low < high:
            middle = low / 2 + high / 2  # their sum may overflow
            self.centre = Ranges(graph, {}, options, (middle, middle))
            entries = sum(math.prod(shape) for shape in graph.inputs.values())
            self.radius = up(up(max(high - middle, middle - low)) * up(math.sqrt(entries)))

    def __getitem__(self, name: str) -> Any:
        """Return the range of a value, ``None`` if it has none, a list for several results."""
        todo = [name]
        while todo:
            call = self.calls.get(todo[-1])
            before = [] if call is None else [n for n in call.references() if n not in self.known]
            if todo[-1] in self.known:
                todo.pop()
            elif before:
                todo += before
            else:
                assert call is not None
                self.known[todo.pop()] = self._nearer(call, self._range(call))
        return self.known[name]

    @torch.no_grad()
    def _range(self, call: Call) -> Any:
        rule = INTERVALS.get(call.op)
        if rule is None or not (call.floating or call.op == "getitem"):
            return None
        wide = call.in_float64()
        try:
            with torch.backends.cudnn.flags(enabled=False):  # sums without transforms
                found = rule(Ranged(wide, wide.given(self.known), self.options, self.device))
        except torch.OutOfMemoryError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, Unbounded,
                ValueError):  # fmt: skip
            return None
        return [_finite(one) for one in found] if isinstance(found, list) else _finite(found)

    def _nearer(self, call: Call, found: Any) -> Any:
        """Return the smaller one of a range and of what the Lipschitz constant allows."""
        value = self.values.get(call.name)
        if self.centre is None or not isinstance(value, Value) or isinstance(found, list):
            return found
        constant = value.lipschitz * 2.0**self.exponent if self.exponent < 1000 else math.inf
        reach, middle = up(constant * self.radius), self.centre[call.name]
        if not reach < math.inf or middle is None or value.error:
            return found
        low, high = middle.low - reach, middle.high + reach
        low, high = low - UNIT * low.abs(), high + UNIT * high.abs()
        norm = up(middle.norm + reach)
        if found is None:
            return _finite(Range.of(low, high, norm))
        return Range.of(
            torch.maximum(low, found.low), torch.minimum(high, found.high), min(norm, found.norm)
        )


def _finite(found: Range | None) -> Range | None:
    if found is None or not bool((found.low.isfinite() & found.high.isfinite()).all()):
        return None
    return found


@dataclass
class Ranged:
    """A call with the ranges of its arguments, the input of a rule.

    Attributes:
        call: The call, for float64 numbers.
        given: Arguments by name: ranges, ``None`` for activations without one, and constants.
        options: Options of the audit.
        device: Device of the network's weights.
    """

    call: Call
    given: dict[str, Any]
    options: Options
    device: torch.device

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def known(self, name: str) -> Range:
        """Return the range of an argument.

        Raises:
            Unbounded: If it has none.
        """
        if not isinstance(self.given[name], Range):
            raise Unbounded(f"{name} has no range")
        return self.given[name]

    def run(self, part: Callable[[Range], Tensor], /, **changed: Any) -> Any:
        """Run the operation with one tensor in place of each range, and with changed arguments."""

        def chosen(leaf: Any) -> Any:
            return part(leaf).clone() if isinstance(leaf, Range) else leaf

        is_range = lambda leaf: isinstance(leaf, Range)  # noqa: E731
        given = {n: tree_map(chosen, g, is_leaf=is_range) for n, g in self.given.items()}
        return self.call.run({**given, **changed})

    def ranges(self) -> list[Range]:
        """Return the ranges of all arguments that depend on the input.

        Raises:
            Unbounded: If one has none.
        """
        names = [n for n, g in self.call.arguments().items() if _depends(g)]
        leaves = [leaf for n in names for leaf in _leaves(self.given[n])]
        if any(leaf is None for leaf in leaves):
            raise Unbounded("an argument has no range")
        return [leaf for leaf in leaves if isinstance(leaf, Range)]

    def slack(self, terms: int = 1) -> float:
        """Bound the relative rounding of a sum of products, also of the numbers in the code."""
        numbers = [
            float(leaf) for leaf in tree_leaves(self.call.arguments())
            if isinstance(leaf, int | float) or (isinstance(leaf, Tensor) and not leaf.ndim)
        ]  # fmt: skip
        dtype = self.call.dtype
        away = [
            abs(one - number) / abs(number)
            for number in numbers if number and math.isfinite(number)
            for one in readings(number, dtype)
        ]  # fmt: skip
        return (terms + 16) * UNIT + 4 * max(away, default=0.0)


def _depends(argument: Any) -> bool:
    return any(isinstance(leaf, Reference) for leaf in tree_leaves(argument))


def _leaves(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, list | tuple) else [argument]


def widened(low: Tensor, high: Tensor, by: Tensor | float, norm: float = math.inf) -> Range:
    """Return a range that is wider by a bound on its rounding."""
    return Range.of(low - by - TINY, high + by + TINY, norm)


Rule = Callable[[Ranged], Any]
INTERVALS: dict[str, Rule] = {}
"""Operation → rule, which maps a :class:`Ranged` to one or more ranges."""


def register(*ops: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        INTERVALS.update({op if "." in op or op == "getitem" else f"aten.{op}": rule for op in ops})
        return rule

    return add


def inverse(other: Range) -> Range:
    """Return the range of 1/x.

    Raises:
        Unbounded: If x may be 0.
    """
    if not bool(((other.low > 0) | (other.high < 0)).all()):
        raise Unbounded("it may divide by zero")
    low, high = 1 / other.high, 1 / other.low
    return widened(low, high, 4 * UNIT * torch.maximum(low.abs(), high.abs()))
