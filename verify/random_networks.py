"""Random architectures, drawn from a grammar by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from verify.random_parts import (
    Concat,
    Further,
    Gate,
    Joined,
    Larger,
    Mixed,
    Multiplied,
    Residual,
    Reuse,
    Shape,
    Shuffle,
    Sly,
)

MOST = 160  # largest number of entries of an activation
MIXED = 10_000_000  # the first seed with Mixed; networks of smaller seeds do not change
SLY = 30_000_000  # the first seed with Further and Sly
JOINED = 40_000_000  # the first seed with Joined
MULTIPLIED = 80_000_000  # the first seed with Multiplied and with domains of inputs
DOMAINS = ((-1.0, 1.0), (0.0, 1.0), (-2.2, 2.7), None)


class Grammar:
    """Draws modules for inputs of a given shape ``(channels, *spatial)``."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.dims = int(self.rng.choice([1, 2, 2, 2, 3]))
        self.mixes, self.sly, self.joins = seed >= MIXED, seed >= SLY, seed >= JOINED
        self.multiplies = seed >= MULTIPLIED

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def axes(self, options: Sequence[int]) -> Shape:
        return tuple(int(self.pick(options)) for _ in range(self.dims))

    def network(self) -> tuple[nn.Module, Shape]:
        """Draw a network and the shape of its input."""
        largest = {1: 12, 2: 6, 3: 4}[self.dims]
        shape = (int(self.pick([1, 2, 3])), *self.axes(range(2, largest + 1)))
        body = self.chain(shape, int(self.pick([1, 2, 3, 4, 5])), depth=2)
        head = self.head(_after(body, shape))
        return nn.Sequential(*body, *head), shape

    def blocks(self) -> tuple[nn.Module, Shape]:
        """Draw a chain of linear maps and activations, which the audit bounds by LipSDP."""
        if self.rng.random() < 0.2:
            shape: Shape = (int(self.pick([2, 3, 5])),)
            return nn.Sequential(*self.dense(shape[0])), shape
        shape = (int(self.pick([1, 2, 3])), *self.axes([3, 4, 5]))
        layers: list[nn.Module] = []
        after = shape
        for _ in range(int(self.pick([1, 2, 3]))):
            part = self.fitting(self.block, after)
            layers, after = [*layers, part], _after(part, after)
        if self.rng.random() < 0.5:
            return nn.Sequential(*layers, Shuffle("mean"), *self.dense(after[0])), shape
        flat = self.rng.random() < 0.5
        ending = [nn.Flatten(), nn.Linear(math.prod(after), 3)] if flat else []
        return nn.Sequential(*layers, *ending), shape

    def block(self, shape: Shape) -> nn.Module:
        """Draw a plain layer, a pooling, or a residual block with its activation in any place."""
        kind = self.pick(["plain", "plain", "pool", "after", "before", "strided", "bottleneck"])
        width = shape[0]
        if kind == "plain":
            return nn.Sequential(self.conv(shape), self.bent(shape))
        if kind == "pool":
            mean: Any = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[self.dims - 1]
            return nn.Sequential(self.bent(shape), mean(2, self.pick([1, 2])))
        inner = int(self.pick([1, 2, 3]))
        body = [self.same(width, inner), self.norm((inner,)), self.bent((inner, *shape[1:]))]
        if kind == "bottleneck":
            body += [self.same(inner, inner), self.bent((inner, *shape[1:]))]
        if kind == "before":
            body = [self.norm((width,)), self.bent(shape), *body, self.same(inner, width)]
            return Residual(nn.Sequential(*body), nn.Identity())
        if kind == "strided":
            conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dims - 1]
            out = int(self.pick([2, 3]))
            body += [conv(inner, out, 3, 2, 1), self.norm((out,))]
            skip = nn.Sequential(conv(width, out, 1, 2), self.norm((out,)))
            return nn.Sequential(Residual(nn.Sequential(*body), skip), self.bent((out,)))
        body += [self.same(inner, width), self.norm((width,))]
        return nn.Sequential(Residual(nn.Sequential(*body), nn.Identity()), self.bent(shape))

    def bent(self, shape: Shape) -> nn.Module:
        """Draw an activation; every other one is a ReLU."""
        return nn.ReLU() if self.rng.random() < 0.5 else self.activation(shape)

    def dense(self, width: int) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for _ in range(int(self.pick([0, 1, 2]))):
            out = int(self.pick([2, 4, 6]))
            layers += [nn.Linear(width, out), self.bent((out,))]
            width = out
        return [*layers, nn.Linear(width, 3)]

    def chain(self, shape: Shape, length: int, depth: int) -> nn.Sequential:
        parts: list[nn.Module] = []
        for _ in range(length):
            part = self.fitting(partial(self.part, depth=depth), shape)
            parts.append(part)
            shape = _after(part, shape)
        return nn.Sequential(*parts)

    def fitting(self, draw: Callable[[Shape], nn.Module], shape: Shape) -> nn.Module:
        """Draw modules until one accepts the shape and has an output that is small, not empty."""
        for _ in range(20):
            try:
                drawn = draw(shape)
                result = _after(drawn, shape)
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                continue
            if len(result) == len(shape) and 0 < math.prod(result) <= MOST:
                return drawn
        return nn.Identity()

    def part(self, shape: Shape, depth: int) -> nn.Module:
        kinds = [self.conv, self.conv, self.norm, self.activation, self.activation, self.pool,
                 self.resize, self.pad, self.transposed, self.small]  # fmt: skip
        if self.mixes:
            kinds += [self.mixed, self.mixed]
        if self.joins:
            kinds += [self.joined, self.joined, self.joined]
        if self.multiplies:
            kinds += 6 * [self.multiplied]
        if self.sly:
            kinds += [self.further, self.further, self.further]
            if self.rng.random() < 0.02:
                return Sly(self.pick(Sly.KINDS))
        if depth and self.rng.random() < 0.35:
            return self.composite(shape, depth - 1)
        return self.pick(kinds)(shape)

    def mixed(self, shape: Shape) -> nn.Module:
        draw = torch.Generator().manual_seed(int(self.rng.integers(1 << 30)))
        return Mixed(self.pick(Mixed.KINDS), shape, draw)

    def further(self, shape: Shape) -> nn.Module:
        draw = torch.Generator().manual_seed(int(self.rng.integers(1 << 30)))
        return Further(self.pick(Further.KINDS), shape, draw)

    def joined(self, shape: Shape) -> nn.Module:
        draw = torch.Generator().manual_seed(int(self.rng.integers(1 << 30)))
        return Joined(self.pick(Joined.KINDS), shape, draw)

    def multiplied(self, shape: Shape) -> nn.Module:
        return Multiplied(self.pick(Multiplied.KINDS))

    def composite(self, shape: Shape, depth: int) -> nn.Module:
        kind = self.pick(["residual", "residual", "shortcut", "concat", "larger", "reuse", "gate"])
        if kind == "reuse":
            return Reuse(self.keeping(shape, depth, shape[0]), int(self.pick([2, 3])))
        if kind == "gate":
            small = self.rng.random() < 0.1
            return Gate(self.keeping(shape, 0, shape[0])) if small else nn.Identity()
        if kind == "concat":
            count = int(self.pick([2, 3]))
            return Concat(*(self.keeping(shape, depth, None) for _ in range(count)))
        if kind == "larger":
            return Larger(*(self.keeping(shape, depth, shape[0]) for _ in range(2)))
        out = int(self.pick([1, 2, 4])) if kind == "shortcut" else shape[0]
        shortcut = self.keeping(shape, 0, out) if kind == "shortcut" else nn.Identity()
        scale = float(self.pick([1.0, 1.0, -1.0, 0.1]))
        return Residual(self.keeping(shape, depth, out), shortcut, scale)

    def keeping(self, shape: Shape, depth: int, out: int | None) -> nn.Module:
        """Draw a chain that keeps the spatial size and has ``out`` channels."""
        parts: list[nn.Module] = []
        wanted = out or int(self.pick([1, 2, 3]))
        for _ in range(int(self.pick([0, 1, 2]))):
            draw = partial(self.part, depth=depth)
            part = self.fitting(draw, shape)
            if _after(part, shape)[1:] == shape[1:]:
                parts.append(part)
                shape = _after(part, shape)
        if shape[0] != wanted or not parts:
            parts.append(self.same(shape[0], wanted))
        if self.rng.random() < 0.3:
            parts.append(self.norm((wanted, *shape[1:])))
        return nn.Sequential(*parts)

    def same(self, cin: int, cout: int) -> nn.Module:
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dims - 1]
        return kind(cin, cout, self.axes([1, 2, 3]), padding="same", bias=bool(self.pick([0, 1])))

    def conv(self, shape: Shape) -> nn.Module:
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dims - 1]
        groups = int(self.pick([1, 1, 1, 2, 3, shape[0]]))
        return kind(
            shape[0], groups * int(self.pick([1, 2, 3])), self.axes([1, 2, 3, 3]),
            stride=self.axes([1, 1, 2, 3]), padding=self.axes([0, 1, 1, 2]),
            dilation=self.axes([1, 1, 1, 2]), groups=groups, bias=bool(self.pick([0, 1])),
            padding_mode=self.pick(["zeros", "zeros", "circular", "reflect", "replicate"]),
        )  # fmt: skip

    def transposed(self, shape: Shape) -> nn.Module:
        kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        kind: Any = kinds[self.dims - 1]
        stride = self.axes([1, 2])
        return kind(
            shape[0], int(self.pick([1, 2, 3])), self.axes([1, 2, 3]), stride=stride,
            padding=self.axes([0, 1]), output_padding=tuple(int(t > 1) for t in stride),
            dilation=self.axes([1, 1, 2]),
        )  # fmt: skip

    def norm(self, shape: Shape) -> nn.Module:
        kind: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[self.dims - 1]
        if shape[1:] and self.rng.random() < 0.1:
            return self.pick([nn.GroupNorm(1, shape[0]), nn.LayerNorm(list(shape[1:]))])
        return kind(shape[0], affine=bool(self.pick([0, 1, 1])))

    def activation(self, shape: Shape) -> nn.Module:
        slope = float(self.pick([0.01, 0.3, -0.5, 2.0]))
        return self.pick([
            nn.ReLU(), nn.ReLU(), nn.ReLU6(), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.GELU(),
            nn.GELU(approximate="tanh"), nn.Mish(), nn.Softplus(), nn.Softsign(), nn.ELU(),
            nn.ELU(2.0), nn.CELU(0.5), nn.SELU(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(),
            nn.LogSigmoid(), nn.LeakyReLU(slope), nn.PReLU(), nn.PReLU(shape[0]), nn.Softmax(1),
            nn.LogSoftmax(1), nn.Dropout(), nn.RReLU(),
        ])  # fmt: skip

    def pool(self, shape: Shape) -> nn.Module:
        index = self.dims - 1
        largest: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[index]
        mean: Any = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[index]
        adaptive: Any = self.pick([
            (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
            (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        ])[index]  # fmt: skip
        kind = self.pick(["max", "max", "mean", "adaptive"])
        sizes, stride = self.axes([2, 3]), self.axes([1, 2])
        padding, ceil = self.axes([0, 1]), bool(self.pick([0, 1]))
        if kind == "max":
            return largest(sizes, stride, padding, dilation=self.axes([1, 1, 2]), ceil_mode=ceil)
        if kind == "mean":
            return mean(sizes, stride, padding, ceil, count_include_pad=bool(self.pick([0, 1])))
        return adaptive(self.axes([1, 2, 3]))

    def resize(self, shape: Shape) -> nn.Module:
        smooth = ("linear", "bilinear", "trilinear")[self.dims - 1]
        if self.dims == 2 and self.rng.random() < 0.3:
            return self.pick([nn.PixelShuffle(2), nn.PixelUnshuffle(2),
                              nn.Upsample(scale_factor=2, mode="bicubic")])  # fmt: skip
        if self.rng.random() < 0.5:
            return nn.Upsample(scale_factor=float(self.pick([1.5, 2.0])), mode=smooth)
        return nn.Upsample(size=self.axes([2, 3, 4]), mode="nearest")

    def pad(self, shape: Shape) -> nn.Module:
        amounts = tuple(int(self.pick([0, 1, 2])) for _ in range(2 * self.dims))
        kind = self.pick(["Zero", "Reflection", "Replication", "Circular", "Constant"])
        module: Any = getattr(nn, f"{kind}Pad{self.dims}d")
        return module(amounts, 1.5) if kind == "Constant" else module(amounts)

    def small(self, shape: Shape) -> nn.Module:
        return Shuffle(self.pick(["channels", "centre", "slice", "flip"]))

    def head(self, shape: Shape) -> list[nn.Module]:
        if self.rng.random() < 0.4:
            return []
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(shape)
        for _ in range(int(self.pick([1, 1, 2]))):
            out = int(self.pick([2, 3, 5]))
            layers += [nn.Linear(width, out)]
            layers += [self.pick([nn.BatchNorm1d(out), nn.Tanh(), nn.Softmax(1), nn.Identity()])]
            width = out
        return layers


def _after(module: nn.Module, shape: Shape) -> Shape:
    with torch.no_grad():
        return tuple(module.eval()(torch.zeros(1, *shape)).shape[1:])


def random_domain(seed: int) -> tuple[float, float] | None:
    """Return the domain of the inputs of a network; None for every input."""
    return DOMAINS[seed // 9 % len(DOMAINS)] if seed >= MULTIPLIED else None


def random_network(seed: int, blocks: bool = False) -> tuple[nn.Module, Shape]:
    """Draw a network in eval mode, with weights that differ from PyTorch's initialization.

    One in three has positive weights only. The top singular directions of its layers then align, so
    that the bound is nearly attained.

    Args:
        seed: Seed of the architecture and the weights.
        blocks: Whether to draw a chain of linear maps and activations.
    """
    torch.manual_seed(seed)
    grammar = Grammar(seed)
    model, shape = grammar.blocks() if blocks else grammar.network()
    dtype = (torch.float32, torch.float64, torch.bfloat16)[seed % 3]
    positive = seed // 3 % 3 == 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_var is not None
                assert module.running_mean is not None
                module.running_var.uniform_(0.1, 2)
                module.running_mean.normal_()
                if module.affine:
                    module.weight.normal_()
            elif isinstance(module, nn.PReLU):
                module.weight.normal_(0, 2)
            elif isinstance(module, nn.Linear) or "Conv" in type(module).__name__:
                module.weight.mul_(float(torch.rand(()) * 3))  # type: ignore[operator]
        for parameter in model.parameters() if positive else ():
            parameter.abs_()
    return model.to(dtype).eval(), shape


def code(module: nn.Module) -> str:
    """Return Python code that builds the module."""
    if isinstance(module, nn.Sequential):
        return f"nn.Sequential({', '.join(code(child) for child in module)})"
    if isinstance(module, Concat):
        return f"Concat({', '.join(code(child) for child in module.branches)})"
    if isinstance(module, Residual):
        return f"Residual({code(module.body)}, {code(module.shortcut)}, {module.scale})"
    if isinstance(module, Larger):
        return f"Larger({code(module.one)}, {code(module.other)})"
    if isinstance(module, Reuse):
        return f"Reuse({code(module.body)}, {module.times})"
    if isinstance(module, Sly | Shuffle | Multiplied):
        return f"{type(module).__name__}({module.kind!r})"
    if isinstance(module, Gate):
        return f"Gate({code(module.body)})"
    if isinstance(module, Mixed | Further | Joined):  # their buffers are not part of the code
        return f"{type(module).__name__}({module.kind!r}, shape, generator)"
    return f"nn.{module!r}"
