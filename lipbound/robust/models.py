"""Networks for 32×32 images, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class WideBlock(nn.Module):
    """Pre-activation residual block: BN, ReLU, 3×3, BN, ReLU, 3×3, added to the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.bn1(x))
        out = self.conv2(functional.relu(self.bn2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """WRN-depth-widen (Zagoruyko & Komodakis 2016).

    Args:
        depth: 6n + 4.
        widen: Multiplies the channels 16, 32, 64.
        classes: Number of outputs.

    Example:
        >>> WideResNet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 28, widen: int = 10, classes: int = 10):
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth} must be 6n + 4: 10, 16, 22, 28, 34, 40 ...")
        channels = [16, 16 * widen, 32 * widen, 64 * widen]
        self.conv1 = nn.Conv2d(3, channels[0], 3, 1, 1, bias=False)
        blocks = []
        for stage, (inputs, outputs) in enumerate(pairwise(channels)):
            for index in range((depth - 4) // 6):
                first = index == 0
                stride = 2 if first and stage > 0 else 1
                blocks.append(WideBlock(inputs if first else outputs, outputs, stride))
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels[-1])
        self.linear = nn.Linear(channels[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        features = functional.relu(self.bn(self.blocks(self.conv1(x))))
        return self.linear(torch.flatten(functional.adaptive_avg_pool2d(features, 1), 1))


class BasicBlock(nn.Module):
    """3×3, BN, ReLU, 3×3, BN, added to the shortcut, ReLU.

    Where the size halves the shortcut takes every other pixel and pads the channels with zeros
    (He et al.'s option A): it has no weights.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1 or self.extra:
            x = x[:, :, :: self.stride, :: self.stride]
            x = functional.pad(x, (0, 0, 0, 0, self.extra, self.extra))
        return functional.relu(out + x)


class ResNet(nn.Module):
    """CIFAR ResNet of 6n + 2 layers (He et al. 2016): 20, 32, 44, 56.

    Example:
        >>> ResNet(8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 20, classes: int = 10):
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth={depth} must be 6n + 2: 8, 14, 20, 32, 44, 56 ...")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(16, 32, blocks, 2)
        self.layer3 = self._stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        rest = [BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
        return nn.Sequential(BasicBlock(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet20": partial(ResNet, 20),
    "resnet32": partial(ResNet, 32),
    "resnet44": partial(ResNet, 44),
    "resnet56": partial(ResNet, 56),
    "wrn-16-4": partial(WideResNet, 16, 4),
    "wrn-28-10": partial(WideResNet, 28, 10),
}
"""Name → constructor."""
