"""Small networks for 8×8 digits; the package contains trained weights for one of them."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import nn

WEIGHTS = files("lipbound") / "data" / "digits.npz"
INPUT_SHAPE = (1, 8, 8)


class SmallCNN(nn.Sequential):
    """Three 3×3 convolutions, the last two with stride 2, then a mean and a Linear layer.

    Args:
        classes: Number of outputs.
        inputs: Number of image channels.
        batchnorm: Whether a BatchNorm follows each convolution.
    """

    def __init__(self, classes: int = 10, inputs: int = 3, batchnorm: bool = True):
        layers: list[nn.Module] = []
        for before, after, stride in ((inputs, 16, 1), (16, 32, 2), (32, 64, 2)):
            layers.append(nn.Conv2d(before, after, 3, stride, 1, bias=not batchnorm))
            layers += [nn.BatchNorm2d(after)] if batchnorm else []
            layers.append(nn.ReLU())
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class DigitsNet(nn.Sequential):
    """A CNN with the common kinds of convolution: plain, strided, depthwise, dilated and 1×1."""

    def __init__(self) -> None:
        def block(name: str, conv: nn.Conv2d) -> dict[str, nn.Module]:
            norm = nn.BatchNorm2d(conv.out_channels)
            return {name: conv, f"{name}_norm": norm, f"{name}_relu": nn.ReLU()}

        layers = {
            **block("stem", nn.Conv2d(1, 16, 3, padding=1, bias=False)),
            **block("down", nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)),
            **block("depthwise", nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False)),
            **block("pointwise", nn.Conv2d(32, 32, 1, bias=False)),
            **block("dilated", nn.Conv2d(32, 32, 3, padding=2, dilation=2, bias=False)),
            "pool": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
            "head": nn.Linear(32, 10),
        }
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def network() -> DigitsNet:
    """Load the trained network, in eval mode."""
    model = DigitsNet()
    with WEIGHTS.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        state = {name: torch.from_numpy(stored[name]) for name in stored.files}
    model.load_state_dict(state)
    return model.eval()
