"""Input normalization as the first layer of a network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """Compute (x − mean)/std per channel inside the network, so that attacks work on pixels."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def normalized(network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Return the network with a normalization layer in front."""
    return nn.Sequential(OrderedDict(normalize=Normalize(mean, std), network=network))
