"""Read the part of a network between two values: what it computes, however it is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipbound.geometry import Convolution
from lipbound.network.lipsdp.laurent import Laurent
from lipbound.network.lipsdp.stages import Node
from lipbound.network.rules import RULES, Linear, Step, Value
from lipbound.network.rules.linear import folded_gains
from lipbound.network.rules.values import axes, readings, up

# The same numbers, perhaps with other axes.
SAME = {f"aten.{name}" for name in ("clone", "alias", "detach", "dropout", "feature_dropout",
        "alpha_dropout", "view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous",
        "_unsafe_view", "lift_fresh_copy")}  # fmt: skip
# Activations that never fall: their slopes lie between 0 and the constant of their rule.
RISING = {f"aten.{name}" for name in ("relu", "relu_", "relu6", "tanh", "hardtanh", "hardtanh_",
          "sigmoid", "hardsigmoid", "softsign", "elu", "elu_", "celu", "celu_", "selu", "selu_",
          "atan", "asinh", "erf", "log_sigmoid", "clamp", "clamp_min", "clamp_max",
          "threshold")}  # fmt: skip
# x·s(x) with s(x) + s(−x) = 1: the slopes at x and −x add up to 1.
MIRRORED = {"aten.gelu", "aten.silu", "aten.silu_"}
EITHER = {"aten.abs", "aten.sin", "aten.cos", "aten.mish", "aten.hardswish", "aten.hardswish_"}
LEAKY = {"aten.leaky_relu", "aten.leaky_relu_"}
PRELU = {"aten.prelu", "aten._prelu_kernel"}
ACTIVATIONS = RISING | MIRRORED | EITHER | LEAKY | PRELU
BATCH_NORM = {"aten._native_batch_norm_legit_no_training", "aten.batch_norm",
              "aten.cudnn_batch_norm", "aten.native_batch_norm"}  # fmt: skip
POOLS = {"aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d",
         "aten.mean", "aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d",
         "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d"}  # fmt: skip


class NotRead(Exception):
    """An operation that is not part of a stage; the message says which and why."""


@dataclass(eq=False)
class Piece:
    """The part of a network between two bottlenecks, as nodes; the first is its source.

    Attributes:
        source: Value at the start.
        result: Value at the end.
        nodes: The nodes; the last one is the result.
        dims: Number of spatial axes of the nodes.
        flat: Number of pixels of a channel, if the piece only flattens an image; else 0.
        pooled: Whether the result is the mean of each channel over all pixels.
    """

    source: Value
    result: Value
    dims: int
    nodes: list[Node] = field(default_factory=list)
    flat: int = 0
    pooled: bool = False

    @property
    def pointwise(self) -> bool:
        """Whether it multiplies each pixel by a matrix."""
        operators = [(op, stride) for node in self.nodes for _, op, stride in node.terms]
        linear = all(node.input < 0 for node in self.nodes)
        return linear and all(op.at_one_place and not any(t > 1 for t in s) for op, s in operators)


def slopes_of(step: Step, channels: int) -> Tensor:
    """Return the least and the greatest slope of an activation, for each channel ``(2, n)``.

    Raises:
        NotRead: If they are not known.
    """
    value, op = step.only(), step.call.op
    if step.shape != value.shape:
        raise NotRead("its argument is broadcast")
    if op in PRELU:
        weight = step["weight"].detach().double().flatten().cpu().expand(channels)
        return torch.stack([weight.clamp_max(1.0), weight.clamp_min(1.0)])
    if op in LEAKY:
        given = readings(step.arguments.get("negative_slope", 0.01), step.call.dtype)
        least, most = min(1.0, *given), max(1.0, *given)
    else:
        gain = RULES[op](step)
        gain = gain.lipschitz / value.lipschitz if isinstance(gain, Value) else float(gain)
        if not 0 < gain < math.inf:
            raise NotRead("its slopes are not known")
        most = up(up(gain))
        factors = [step.arguments.get(name) for name in ("alpha", "scale", "input_scale")]
        falls = any(number is not None and number < 0 for number in factors)  # of ELU
        least = -most
        if op in RISING and not falls:
            least = 0.0
        elif op in MIRRORED:
            least = math.nextafter(1 - most, -1)
    ends = torch.tensor([[least], [most]], dtype=torch.float64)
    return ends.expand(2, channels)


def _fits(step: Step) -> bool:
    """Whether the number of axes in the name of a pooling operation is that of its images."""
    named = step.call.op[-2] if step.call.op.endswith("d") else ""
    return not named or int(named) == len(step.only().shape) - 2


def _is_pool(step: Step) -> bool:
    """Whether a step is the mean of each channel over all its pixels."""
    if step.call.op not in POOLS or not _fits(step):
        return False
    before, after = step.only().shape, step.shape
    if len(before) < 3 or before[0] != 1 or after[:2] != before[:2]:
        return False
    if step.call.op == "aten.mean":
        dims = {int(d) % len(before) for d in step.arguments.get("dim") or ()}
        return dims == set(range(2, len(before)))
    if "adaptive" in step.call.op:
        return math.prod(after[2:]) == 1
    count = len(before) - 2
    whole = tuple(axes(step["kernel_size"], count)) == before[2:]
    padded = any(axes(step["padding"], count)) or step.arguments.get("divisor_override")
    return whole and not padded and math.prod(after[2:]) == 1


class Reader:
    """Reads the piece between two values.

    Args:
        source: The value at the start.
        result: The value at the end.
        spills: Whether the source has entries outside the image in the stage before it.
        device: Device of the operators.
    """

    def __init__(self, source: Value, result: Value, spills: bool, device: torch.device):
        self.device = device
        shape = source.shape
        if len(shape) < 2 or shape[0] != 1 or not math.prod(shape):
            raise NotRead(f"its input has no batch axis, its shape is {shape}")
        self.dims = len(shape) - 2
        self.piece = Piece(source, result, self.dims)
        self.memo: dict[int, int] = {id(source): 0}
        self.piece.nodes.append(Node(shape[1], (1,) * self.dims, spills=spills))
        if self._flattens():
            self.piece.flat = math.prod(shape[2:])
        elif self.read(result) != len(self.piece.nodes) - 1:
            raise NotRead("the result is computed before other values of the piece")

    def _flattens(self) -> bool:
        """Whether the piece only changes an image to a vector, channel by channel."""
        step, before, after = self.piece.result.origin, self.piece.source, self.piece.result
        if after.linear is not None or step is None or step.call.op not in SAME or not self.dims:
            return False
        return after.shape == (1, math.prod(before.shape[1:])) and step.only() is before

    def add_linear(self, channels: int, terms: list[tuple[int, Laurent, tuple[int, ...]]]) -> int:
        """Add a linear node; an operator that reads beyond the image needs its source cut there."""
        nodes = self.piece.nodes
        if not channels:
            raise NotRead("it has no channels")
        strides = [
            tuple(a * b for a, b in zip(nodes[j].stride, s, strict=True)) for j, _, s in terms
        ]
        if len({*strides}) != 1:
            raise NotRead("its terms have different strides")
        spills = any(nodes[j].spills or not op.at_one_place for j, op, _ in terms)
        nodes.append(Node(channels, strides[0], terms, spills=spills))
        return len(nodes) - 1

    def add_pointwise(
        self, node: int, matrix: Tensor, roundings: float = 0.0, slack: float = 0.0
    ) -> int:
        """Add the node that multiplies each pixel of another node by a matrix."""
        return self.add_linear(len(matrix), [self.term(node, matrix, roundings, slack)])

    def term(
        self, node: int, matrix: Tensor, roundings: float = 0.0, slack: float = 0.0
    ) -> tuple[int, Laurent, tuple[int, ...]]:
        """Return a term of a linear node that multiplies each pixel by a matrix."""
        operator = Laurent.pointwise(matrix.to(self.device), self.dims, roundings, slack)
        return node, operator, (1,) * self.dims

    def cut(self, node: int) -> int:
        """Return the node restricted to the image."""
        nodes = self.piece.nodes
        if not nodes[node].spills:
            return node
        whole = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        slopes = whole.expand(2, nodes[node].channels)
        nodes.append(Node(nodes[node].channels, nodes[node].stride, input=node, slopes=slopes))
        return len(nodes) - 1

    def read(self, value: Value) -> int:
        """Return the node of a value."""
        if id(value) not in self.memo:
            if value.error if isinstance(value.error, float) else True:
                raise NotRead("it is only near a Lipschitz function")
            self.memo[id(value)] = self._read(value)
        return self.memo[id(value)]

    def _read(self, value: Value) -> int:
        if value.linear is not None:
            return self._convolution(value, value.linear)
        step = value.origin
        if step is None:
            raise NotRead("it does not depend on the source alone")
        op = step.call.op
        if op in ("aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.rsub"):
            return self._sum(step)
        if op in ACTIVATIONS:
            return self._activation(step)
        if op in SAME and step.only().shape == value.shape:
            return self.read(step.only())
        if op in ("aten.mul", "aten.mul_", "aten.div", "aten.div_"):
            return self._product(step)
        if op in BATCH_NORM:
            return self._batch_norm(step)
        if op == "aten.slice":
            return self._slice(step)
        if value.padding is not None:
            return self._padded(value)
        if op == "aten.cat":
            return self._joined(step)
        if op in POOLS:
            return self._pool(step)
        raise NotRead("it is neither linear nor an activation with bounded slopes")

    def _convolution(self, value: Value, linear: Linear) -> int:
        conv, shape = linear.conv, linear.anchor.shape
        if len(shape) != conv.dims + 2 or shape[0] != 1:
            raise NotRead("its channels are not on the second axis")
        node = self.read(linear.anchor)
        if conv.dims != self.dims or conv.padding_mode != "zeros" or conv.transposed:
            raise NotRead("it is transposed, or its padding is not zero")
        padded = any(any(pair) for pair in conv.padding)
        node = self.cut(node) if padded else node
        taps = dense_kernel(conv)
        rounded = linear.rounded * 2.0**53
        op = Laurent.of(taps, [-before for before, _ in conv.padding], rounded, linear.slack)
        return self.add_linear(taps.shape[0], [(node, op, tuple(conv.stride))])

    def _sum(self, step: Step) -> int:
        alpha = step.arguments.get("alpha")
        alpha = 1.0 if alpha is None else float(alpha)
        if alpha not in (1.0, -1.0):
            raise NotRead(f"alpha={alpha} is not 1")
        sign = -alpha if "sub" in step.call.op else alpha
        pair = [(step["self"], 1.0), (step["other"], sign)]
        if step.call.op == "aten.rsub":
            pair = [(step["self"], -alpha), (step["other"], 1.0)]
        terms = []
        for term, factor in pair:
            if not isinstance(term, Value):
                continue
            if term.shape != step.shape:
                raise NotRead("a term is broadcast")
            terms.append(self.term(self.read(term), factor * _eye(step.shape[1])))
        return self.add_linear(step.shape[1], terms)

    def _activation(self, step: Step) -> int:
        node = self.read(step.only())
        nodes = self.piece.nodes
        slopes = slopes_of(step, nodes[node].channels)
        if nodes[node].spills:  # the slope is 0 off the image
            slopes = torch.stack([slopes[0].clamp_max(0.0), slopes[1].clamp_min(0.0)])
        nodes.append(Node(nodes[node].channels, nodes[node].stride, input=node, slopes=slopes))
        return len(nodes) - 1

    def _diagonal(self, value: Value, gains: Tensor, slack: float, roundings: float) -> int:
        """Add the node of a value whose channels are multiplied by numbers."""
        node = self.read(value)
        if len(gains) != self.piece.nodes[node].channels:
            raise NotRead("its factors are not one for each channel")
        return self.add_pointwise(node, torch.diag(gains), roundings, slack)

    def _product(self, step: Step) -> int:
        one, other = step["self"], step["other"]
        divided = "div" in step.call.op
        if isinstance(one, Value) == isinstance(other, Value) or (
            divided and (isinstance(other, Value) or step.arguments.get("rounding_mode"))
        ):
            raise NotRead("it multiplies or divides by an activation")
        value, factor = (one, other) if isinstance(one, Value) else (other, one)
        if value.shape != step.shape:
            raise NotRead("its argument is broadcast")
        channels = value.shape[1]
        if isinstance(factor, Tensor) and factor.ndim:
            shape = [1] * (len(step.shape) - factor.ndim) + list(factor.shape)
            if any(n != 1 for axis, n in enumerate(shape) if axis != 1):
                raise NotRead("its factors are not one for each channel")
            gains = factor.detach().double().flatten().expand(channels).clone()
            gains = 1 / gains if divided else gains
            return self._diagonal(value, gains, 0.0, 1.0)
        known = readings(float(factor), step.call.dtype)
        if divided:
            known = [r for number in known for r in readings(1 / number, step.call.dtype)]
        spread = up(max(known) - min(known))
        gains = torch.full((channels,), known[0], dtype=torch.float64)
        return self._diagonal(value, gains, spread, 1.0)

    def _batch_norm(self, step: Step) -> int:
        value, variance = step["input"], step["running_var"]
        if step.arguments.get("training") or not isinstance(variance, Tensor):
            raise NotRead("it has no running statistics")
        gains, spread = folded_gains(step)
        return self._diagonal(value, gains.double(), spread, 2.0**5)  # 2^-48 of each gain

    def _slice(self, step: Step) -> int:
        value = step.only()
        axis, start = int(step["dim"]) % len(value.shape), int(step["start"] or 0)
        if axis < 2 or start or (step["end"] or 0) < value.shape[axis]:
            raise NotRead("it takes a part of an axis")
        stride = [1] * self.dims
        stride[axis - 2] = int(step["step"])
        node, same, _ = self.term(self.read(value), _eye(value.shape[1]))
        return self.add_linear(value.shape[1], [(node, same, tuple(stride))])

    def _padded(self, value: Value) -> int:
        assert value.padding is not None
        inner, mode, pairs = value.padding
        if mode != "zeros" or len(pairs) != self.dims + 1 or any(p != (0, 0) for p in pairs[1:]):
            raise NotRead("it pads more than channels")
        before, after = pairs[0]
        matrix = torch.nn.functional.pad(_eye(inner.shape[1]), (0, 0, before, after))
        return self.add_pointwise(self.read(inner), matrix)

    def _joined(self, step: Step) -> int:
        found = step.inputs()
        if int(step.arguments.get("dim") or 0) % len(step.shape) != 1:
            raise NotRead("it joins values along another axis than the channels")
        if sum(v.shape[1] for v in found) != step.shape[1]:
            raise NotRead("it joins values with constants")
        terms, start = [], 0
        for value in found:
            count = value.shape[1]
            rows = _eye(step.shape[1])[:, start : start + count]
            terms.append(self.term(self.read(value), rows))
            start += count
        return self.add_linear(step.shape[1], terms)

    def _pool(self, step: Step) -> int:
        value = step.only()
        eye = _eye(value.shape[1])
        if _is_pool(step):
            if step is not self.piece.result.origin:
                raise NotRead("other values of the same part of the network are not averaged")
            self.piece.pooled = True
            # The squared mean of n numbers is at most the sum of their squares over n.
            share = up(1 / math.sqrt(math.prod(value.shape[2:])))
            return self.add_pointwise(self.read(value), eye * share, roundings=4.0)
        if "avg_pool" not in step.call.op or "adaptive" in step.call.op or not _fits(step):
            raise NotRead("it is not an average over windows of one size")
        sizes = axes(step["kernel_size"], self.dims)
        stride = axes(step["stride"] or sizes, self.dims)
        padding = axes(step["padding"], self.dims)
        if step["ceil_mode"] or (any(padding) and not step["count_include_pad"]):
            raise NotRead("its windows have different sizes")
        node = self.read(value)
        node = self.cut(node) if any(padding) else node
        divisor = float(step.arguments.get("divisor_override") or math.prod(sizes))
        window = torch.full(tuple(sizes), 1 / divisor, dtype=torch.float64)
        taps = (eye.reshape(*eye.shape, *[1] * self.dims) * window).to(self.device)
        operator = Laurent.of(taps, [-p for p in padding], 2.0**30)  # 1/count may be a float32
        return self.add_linear(len(eye), [(node, operator, tuple(stride))])


def _eye(count: int) -> Tensor:
    return torch.eye(count, dtype=torch.float64)


def dense_kernel(conv: Convolution) -> Tensor:
    """Return the kernel without groups and without dilation."""
    kernel = conv.kernel
    if conv.groups > 1:
        rows, columns = kernel.shape[:2]
        whole = kernel.new_zeros(rows, columns * conv.groups, *kernel.shape[2:])
        share = rows // conv.groups
        for group in range(conv.groups):
            part = slice(group * share, (group + 1) * share)
            whole[part, group * columns : (group + 1) * columns] = kernel[part]
        kernel = whole
    if any(a != 1 for a in conv.dilation):
        sizes = [a * (n - 1) + 1 for a, n in zip(conv.dilation, kernel.shape[2:], strict=True)]
        wide = kernel.new_zeros(*kernel.shape[:2], *sizes)
        wide[:, :, *[slice(None, None, a) for a in conv.dilation]] = kernel
        kernel = wide
    return kernel
