"""Train the digits network that the package embeds (seed 0, CPU, seconds); write its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lipbound.robust.models.digits import WEIGHTS, DigitsNet


def train(epochs: int = 40, seed: int = 0) -> tuple[DigitsNet, float]:
    """Train from scratch; return the network and its accuracy on the held-out fifth."""
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
    path = Path(str(WEIGHTS))
    np.savez_compressed(path, **{k: v.numpy() for k, v in trained.state_dict().items()})
    print(f"accuracy on held-out digits: {held_out:.3f}; weights written to {path.name}")
