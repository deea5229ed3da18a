"""The embedded network: a small CNN trained on scikit-learn's 8×8 digits, weights in the package.

``python -m lipbound.demo`` trains it again (seed 0, CPU, seconds) and rewrites the weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS = Path(__file__).parent / "data" / "digits.npz"
INPUT_SHAPE = (1, 8, 8)


class DigitsNet(nn.Sequential):
    """Every kind of convolution an engineer meets: plain, strided, depthwise, dilated, 1×1."""

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
    """The trained network, in eval mode."""
    model = DigitsNet()
    with np.load(WEIGHTS, allow_pickle=False) as stored:
        state = {name: torch.from_numpy(stored[name]) for name in stored.files}
    model.load_state_dict(state)
    return model.eval()


def train(epochs: int = 40, seed: int = 0) -> tuple[DigitsNet, float]:
    """Train from scratch; returns the network and its accuracy on the held-out fifth."""
    torch.manual_seed(seed)
    images, labels = _digits()
    order = torch.randperm(len(images))
    held, kept = order[: len(order) // 5], order[len(order) // 5 :]
    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in kept[torch.randperm(len(kept))].split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[held]).argmax(1) == labels[held]).float().mean()
    return model, float(accuracy)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    return images, torch.from_numpy(digits.target)


if __name__ == "__main__":
    trained, held_out = train()
    np.savez_compressed(WEIGHTS, **{k: v.numpy() for k, v in trained.state_dict().items()})
    print(f"accuracy on held-out digits: {held_out:.3f}; weights written to {WEIGHTS.name}")
