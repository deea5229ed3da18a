"""Residual networks of pre-activation blocks: Wide ResNets and PreActResNet-18."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class PreActivationBlock(nn.Module):
    """Residual block: BN, ReLU, 3×3, BN, ReLU, 3×3, added to the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float, bias: bool):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=bias)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=bias)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.bn1(x))
        out = functional.relu(self.bn2(self.conv1(active)))
        out = self.conv2(out if self.dropout is None else self.dropout(out))
        return out + (x if self.shortcut is None else self.shortcut(active))


class PreActivationNet(nn.Module):
    """A 3×3 convolution, stages of pre-activation blocks, BN, ReLU, mean and a Linear layer.

    Args:
        channels: Output channels of the first convolution and of every stage. Each stage except the
            first halves the image.
        blocks: Number of blocks per stage.
        classes: Number of outputs.
        inputs: Number of image channels.
        dropout: Dropout rate between the convolutions of a block.
        bias: Whether convolutions have a bias. It has no effect if a BatchNorm follows.
    """

    def __init__(
        self, channels: Sequence[int], blocks: int, classes: int = 10,
        *, inputs: int = 3, dropout: float = 0.0, bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels[0], 3, 1, 1, bias=bias)
        layers = []
        for stage, (before, after) in enumerate(pairwise(channels)):
            for index in range(blocks):
                stride = 2 if index == 0 and stage > 0 else 1
                width = before if index == 0 else after
                layers.append(PreActivationBlock(width, after, stride, dropout, bias))
        self.blocks = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels[-1])
        self.linear = nn.Linear(channels[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        features = functional.relu(self.bn(self.blocks(self.conv1(x))))
        return self.linear(torch.flatten(functional.adaptive_avg_pool2d(features, 1), 1))


class WideResNet(PreActivationNet):
    """Wide ResNet WRN-depth-widen (Zagoruyko & Komodakis 2016).

    Args:
        depth: Number of layers, 6n + 4.
        widen: Factor of the channels 16, 32, 64.
        options: Options of :class:`PreActivationNet`.

    Example:
        >>> WideResNet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 28, widen: int = 10, classes: int = 10, **options: Any):
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth} must be 6n + 4, such as 10, 16, 28 or 40")
        channels = (16, 16 * widen, 32 * widen, 64 * widen)
        super().__init__(channels, (depth - 4) // 6, classes, **options)


class PreActResNet18(PreActivationNet):
    """ResNet-18 with pre-activation blocks, for small images (He et al. 2016b)."""

    def __init__(self, classes: int = 10, **options: Any):
        super().__init__((64, 64, 128, 256, 512), 2, classes, **options)
