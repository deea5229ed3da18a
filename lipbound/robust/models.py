"""Networks for images, readable from top to bottom, by name in ``MODELS``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Normalize(nn.Module):
    """(x − mean)/std per channel: inside the network, so that attacks work on pixels."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def normalized(network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """The network with its normalization in front."""
    return nn.Sequential(OrderedDict(normalize=Normalize(mean, std), network=network))


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
    """A 3×3 convolution, stages of pre-activation blocks, BN, ReLU, mean, Linear.

    Args:
        channels: Of the first convolution, then of every stage; each stage but the first halves
            the image.
        blocks: Per stage.
        classes: Number of outputs.
        inputs: Channels of the image.
        dropout: Between a block's convolutions.
        bias: Whether convolutions have one; beside BatchNorm it does nothing.
    """

    def __init__(
        self,
        channels: Sequence[int],
        blocks: int,
        classes: int = 10,
        inputs: int = 3,
        dropout: float = 0.0,
        bias: bool = False,
    ):
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
    """WRN-depth-widen (Zagoruyko & Komodakis 2016).

    Args:
        depth: 6n + 4.
        widen: Multiplies the channels 16, 32, 64.
        options: Of :class:`PreActivationNet`.

    Example:
        >>> WideResNet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 28, widen: int = 10, classes: int = 10, **options: Any):
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth} must be 6n + 4: 10, 16, 22, 28, 34, 40 ...")
        channels = (16, 16 * widen, 32 * widen, 64 * widen)
        super().__init__(channels, (depth - 4) // 6, classes, **options)


class PreActResNet18(PreActivationNet):
    """ResNet-18 with pre-activation blocks, for small images (He et al. 2016b)."""

    def __init__(self, classes: int = 10, **options: Any):
        super().__init__((64, 64, 128, 256, 512), 2, classes, **options)


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

    def __init__(self, depth: int = 20, classes: int = 10, inputs: int = 3):
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth={depth} must be 6n + 2: 8, 14, 20, 32, 44, 56 ...")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(inputs, 16, 3, 1, 1, bias=False)
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


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 with four times the channels, each with BN, added to the shortcut, ReLU."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return functional.relu(out + (x if self.downsample is None else self.downsample(x)))


class ImageNetResNet(nn.Module):
    """ResNet of bottleneck blocks for large images: (3, 4, 23, 3) is ResNet-101."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 23, 3), classes: int = 1000, inputs: int = 3):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        layers: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            for index in range(count):
                layers.append(Bottleneck(channels, width, 2 if stage and index == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(self.blocks(x), 1), 1))


class SmallCNN(nn.Sequential):
    """Three 3×3 convolutions, the last two with stride 2, mean, Linear.

    Args:
        classes: Number of outputs.
        inputs: Channels of the image.
        batchnorm: Whether a BatchNorm follows each convolution.
    """

    def __init__(self, classes: int = 10, inputs: int = 3, batchnorm: bool = True):
        layers: list[nn.Module] = []
        for before, after, stride in ((inputs, 16, 1), (16, 32, 2), (32, 64, 2)):
            layers.append(nn.Conv2d(before, after, 3, stride, 1, bias=not batchnorm))
            layers += [nn.BatchNorm2d(after)] if batchnorm else []
            layers.append(nn.ReLU())
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": SmallCNN,
    "cnn-plain": partial(SmallCNN, batchnorm=False),
    "resnet20": partial(ResNet, 20),
    "resnet32": partial(ResNet, 32),
    "resnet44": partial(ResNet, 44),
    "resnet56": partial(ResNet, 56),
    "preact-resnet18": PreActResNet18,
    "resnet50": partial(ImageNetResNet, (3, 4, 6, 3)),
    "resnet101": ImageNetResNet,
    "wrn-10-1": partial(WideResNet, 10, 1),
    "wrn-16-4": partial(WideResNet, 16, 4),
    "wrn-28-4": partial(WideResNet, 28, 4),
    "wrn-28-10": partial(WideResNet, 28, 10),
}
"""Name → constructor, which takes ``classes`` and ``inputs`` (the image's channels)."""
