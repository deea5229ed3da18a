"""Networks for images, by name in ``MODELS``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from lipbound.robust.models.averaged import Averaged
from lipbound.robust.models.digits import DigitsNet, SmallCNN
from lipbound.robust.models.liresnet import LiResNet
from lipbound.robust.models.normalization import Normalize, normalized
from lipbound.robust.models.resnet import ImageNetResNet, ResNet
from lipbound.robust.models.shift import ShiftNetwork
from lipbound.robust.models.wide_resnet import PreActResNet18, WideResNet

__all__ = [
    "MODELS",
    "Averaged",
    "DigitsNet",
    "ImageNetResNet",
    "LiResNet",
    "Normalize",
    "PreActResNet18",
    "ResNet",
    "ShiftNetwork",
    "SmallCNN",
    "WideResNet",
    "normalized",
]

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
    "liresnet-digits": partial(
        LiResNet,
        size=8,
        width=32,
        depth=2,
        kernel=3,
        stride=1,
        cells=2,
        dense=1,
        dense_width=128,
    ),
    "liresnet-128x4": partial(LiResNet, width=128, depth=4, dense_width=512),
    "liresnet-256x6": LiResNet,
    "shift-digits": partial(
        ShiftNetwork,
        size=8,
        width=64,
        depth=4,
        kernel=3,
        stride=1,
        cells=2,
        dense=1,
        dense_width=128,
    ),
    "shift-128x8": partial(ShiftNetwork, width=128, depth=8, dense=2, dense_width=512),
    "shift-256x8": partial(ShiftNetwork, width=256, depth=8, dense=2, dense_width=256),
    "shift-256x16": partial(ShiftNetwork, width=256, depth=16, dense=2, dense_width=256),
    "shift-512x4": partial(ShiftNetwork, width=512, depth=4, dense=2, dense_width=256),
    "shift-512x12": ShiftNetwork,
    "shift-1024x12": partial(ShiftNetwork, width=1024),
    "wrn-10-1": partial(WideResNet, 10, 1),
    "wrn-16-4": partial(WideResNet, 16, 4),
    "wrn-28-4": partial(WideResNet, 28, 4),
    "wrn-28-10": partial(WideResNet, 28, 10),
}
"""Name → constructor, which takes ``classes`` and ``inputs`` (the number of image channels)."""
