"""LiResNet: convolutions that start at the identity, and no activation inside a residual branch.

A block is x ↦ MinMax(x + Wx + b). The sum x + Wx is one convolution with the kernel I + W, so the
block's norm is that of one convolution, and not 1 + ‖W‖ (Hu et al. 2023). We store I + W.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipbound.constraints.layers import MinMax
from lipbound.robust.models.shift import CertifiedNetwork


class ChannelsLast(nn.Sequential):
    """Layers on images with pixels around 0, whose result has its channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.5).permute(0, 2, 3, 1)


class LiResNet(CertifiedNetwork):
    """A strided stem and blocks of one convolution each, for images of ``size``×``size`` pixels.

    Args:
        classes: Number of outputs.
        inputs: Number of image channels.
        size: Height and width of the images.
        width: Number of channels.
        depth: Number of blocks.
        kernel: Height and width of the stem's kernel.
        stride: Stride of the stem.
        ending: Options of :class:`lipbound.robust.models.shift.CertifiedNetwork`.
    """

    def __init__(
        self, classes: int = 10, inputs: int = 3, *, size: int = 32, width: int = 256,
        depth: int = 6, kernel: int = 5, stride: int = 2, **ending: int,
    ):  # fmt: skip
        ending = {"cells": 4, "dense": 2, "dense_width": 1024, **ending}
        stem = nn.Conv2d(inputs, width, kernel, stride, (kernel - stride + 1) // 2)
        blocks: list[nn.Module] = [stem, MinMax()]
        for _ in range(depth):
            conv = nn.Conv2d(width, width, 3, padding=1)
            with torch.no_grad():
                conv.weight.mul_(0.1)
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
                conv.weight[:, :, 1, 1] += torch.eye(width)
            blocks += [conv, MinMax()]
        super().__init__(ChannelsLast(*blocks), classes, size // stride, width, **ending)
