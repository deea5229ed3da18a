"""Shift networks: every layer but the first has a known norm of 1, so the network's bound is small.

A block is an orthogonal matrix on the channels, a centring, half-abs, and a cyclic shift of some
channels by a pixel. The Lipschitz constant of the features is the norm of the first convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipbound.constraints.layers import Bias, Centre, CyclicShift, HalfAbs, MinMax
from lipbound.constraints.orthogonal import OrthogonalLinear

MOVES = [(1, 0), (-1, 0), (0, 1), (0, -1)]


class Stem(nn.Module):
    """A strided convolution of any norm, a centring, half-abs, and a bias for every place.

    Args:
        inputs: Number of image channels.
        width: Number of channels afterwards.
        kernel: Height and width of the kernel.
        stride: Stride of the convolution.
        side: Height and width of the result, whose channels are last.
    """

    def __init__(self, inputs: int, width: int, kernel: int, stride: int, side: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, kernel, stride, (kernel - stride + 1) // 2, bias=False)
        nn.init.orthogonal_(self.conv.weight.flatten(1))
        self.centre = Centre(width)
        self.activation = HalfAbs(-1)
        self.place = nn.Parameter(torch.zeros(side, side, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.centre(self.conv(x - 0.5).permute(0, 2, 3, 1)))
        return x + self.place.to(x.dtype)


class ShiftBlock(nn.Module):
    """x ↦ shift(|Wx + b − mean|), channels last, where half of the absolute values are left out.

    Args:
        width: Number of channels.
        back: Whether to shift into the opposite direction, as every other block does.
        angle: Norm of the random rotation at which the matrix starts.
    """

    def __init__(self, width: int, back: bool, angle: float = 0.02):
        super().__init__()
        self.mix = OrthogonalLinear(width, width, angle)
        self.centre = Centre(width)
        self.activation = HalfAbs(-1)
        moves = [(-a, -b) if back else (a, b) for a, b in MOVES]
        self.shift = CyclicShift(width, moves, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.activation(self.centre(self.mix(x))))


class Neck(nn.Module):
    """Cut the image into ``cells``×``cells`` squares and map each by one orthogonal matrix.

    Args:
        side: Height and width of the image.
        cells: Number of squares along an axis.
        width: Number of channels before and after.
    """

    def __init__(self, side: int, cells: int, width: int):
        super().__init__()
        self.cells, self.size = cells, side // cells
        self.mix = OrthogonalLinear(self.size**2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(2, (self.cells, self.size)).unflatten(1, (self.cells, self.size))
        return self.mix(rows.transpose(2, 3).flatten(3))


class CertifiedNetwork(nn.Module):
    """A network of known norm: a trunk, a neck, orthogonal dense layers and a head.

    Args:
        trunk: Maps images to features whose channels are last.
        classes: Number of outputs.
        side: Height and width of the trunk's result.
        width: Its number of channels, the last axis.
        cells: Number of squares along an axis into which the neck cuts it.
        dense: Number of orthogonal matrices after the neck.
        dense_width: Their size.
    """

    def __init__(
        self, trunk: nn.Module, classes: int, side: int, width: int, *, cells: int, dense: int,
        dense_width: int,
    ):  # fmt: skip
        super().__init__()
        self.trunk = trunk
        self.neck = Neck(side, cells, width)
        layers: list[nn.Module] = [OrthogonalLinear(cells**2 * width, dense_width)]
        layers += [Centre(dense_width), MinMax(-1)]
        for _ in range(dense):
            layers += [OrthogonalLinear(dense_width, dense_width, 0.0), Bias(dense_width)]
            layers += [MinMax(-1)]
        self.dense = nn.Sequential(*layers)
        self.head = nn.Linear(dense_width, classes)
        nn.init.normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        """Return the features before the head, ``(batch, dense_width)``."""
        return self.dense(self.neck(self.trunk(x)).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class ShiftNetwork(CertifiedNetwork):
    """A network of orthogonal matrices and cyclic shifts for images of ``size``×``size`` pixels.

    Args:
        classes: Number of outputs.
        inputs: Number of image channels.
        size: Height and width of the images.
        width: Number of channels.
        depth: Number of blocks.
        kernel: Height and width of the first convolution's kernel.
        stride: Stride of the first convolution.
        cells: See :class:`CertifiedNetwork`, as for the following.
        dense: Number of dense layers.
        dense_width: Their size.
    """

    def __init__(
        self, classes: int = 10, inputs: int = 3, *, size: int = 32, width: int = 512,
        depth: int = 12, kernel: int = 5, stride: int = 2, cells: int = 4, dense: int = 4,
        dense_width: int = 1024,
    ):  # fmt: skip
        side = size // stride
        stem = Stem(inputs, width, kernel, stride, side)
        trunk = nn.Sequential(stem, *[ShiftBlock(width, bool(i % 2)) for i in range(depth)])
        ending = {"cells": cells, "dense": dense, "dense_width": dense_width}
        super().__init__(trunk, classes, side, width, **ending)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the parts one by one: all blocks share one or two compiled functions."""
        for part in (*self.trunk.children(), self.neck, self.dense):
            part.compile(*args, **options)
