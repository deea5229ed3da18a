"""The shapes of the layers of the 17 networks in the paper's efficiency table.

``python -m tools.networks`` writes the table of shapes from torchvision's definitions. The package
contains this table, so torchvision need not be installed.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import torch
from torch import nn

from lipbound.registry import unknown

NAMES = (
    "alexnet", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
    "densenet121", "densenet161", "densenet169", "densenet201",
    "vgg11", "vgg13", "vgg16", "vgg19", "wide_resnet50_2", "squeezenet1_0", "squeezenet1_1",
)  # fmt: skip


def table() -> dict[str, Any]:
    """Return name → shapes of the convolutions, BatchNorms and Linear layers, in order."""
    text = resources.files("lipbound").joinpath("data/networks.json").read_text()
    return json.loads(text)["networks"]


class Layers(nn.Module):
    """The He-initialised layers of a network, without its forward: it can only be measured.

    Attributes:
        names: Names of the convolutions in torchvision's network.
        inputs: Spatial input sizes of the convolutions.
    """

    def __init__(self, name: str, seed: int = 0):
        super().__init__()
        known = table()
        if name not in known:
            raise unknown("network", name, known)
        draw = torch.Generator().manual_seed(seed)
        shapes = known[name]
        lines = shapes["convolutions"]
        self.names = [line[0] for line in lines]
        self.inputs = [tuple(line[9]) for line in lines]
        layers = [nn.Conv2d(i, o, k, s, p, d, g, bias) for _, i, o, k, s, p, d, g, bias, _ in lines]
        with torch.no_grad():
            for layer in layers:
                fan = layer.weight[:, 0].numel()
                layer.weight.normal_(0, (2 / fan) ** 0.5, generator=draw)
        self.convolutions = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in shapes["norms"])
        self.linears = nn.ModuleList(nn.Linear(i, o) for i, o in shapes["linears"])
