"""The convolutions of ResNets, by shape alone: no torchvision needed."""

from __future__ import annotations

import torch
from torch import nn

BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


def resnet_convolutions(depth: int, seed: int = 0) -> dict[str, nn.Conv2d]:
    """Name → convolution as in torchvision's ResNets, He-initialised (fan out), float32, CPU."""
    torch.manual_seed(seed)
    layers: dict[str, nn.Conv2d] = {}

    def conv(name: str, cin: int, cout: int, size: int, stride: int = 1) -> None:
        layer = nn.Conv2d(cin, cout, size, stride, size // 2, bias=False)
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        layers[name] = layer.requires_grad_(False)

    conv("conv1", 3, 64, 7, 2)
    wide = 1 if depth < 50 else 4
    cin = 64
    for stage, count in enumerate(BLOCKS[depth]):
        width = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            name = f"layer{stage + 1}.{block}"
            if wide == 1:
                conv(f"{name}.conv1", cin, width, 3, stride)
                conv(f"{name}.conv2", width, width, 3)
            else:
                conv(f"{name}.conv1", cin, width, 1)
                conv(f"{name}.conv2", width, width, 3, stride)
                conv(f"{name}.conv3", width, width * wide, 1)
            if stride > 1 or cin != width * wide:
                conv(f"{name}.downsample", cin, width * wide, 1, stride)
            cin = width * wide
    return layers
