"""LiResNet: convolutions that start at the identity, and no activation inside a residual branch.

A block is x ↦ MinMax(x + Wx + b). The sum x + Wx is one convolution with the kernel I + W, so the
block's norm is that of one convolution, and not 1 + ‖W‖ (Hu et al. 2023). We store I + W.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipbound.constraints.layers import MinMax
from lipbound.constraints.orthogonal import OrthogonalLinear
from lipbound.robust.models.shift import Neck


class LiResNet(nn.Module):
    """A strided stem, blocks of one convolution each, an orthogonal neck, dense layers and a head.

    Args:
        classes: Number of outputs.
        inputs: Number of image channels.
        size: Height and width of the images.
        width: Number of channels.
        depth: Number of blocks.
        kernel: Side of the stem's kernel.
        stride: Stride of the stem.
        cells: Number of squares along an axis into which the neck cuts the image.
        dense: Number of orthogonal matrices after the neck.
        dense_width: Their size.
    """

    def __init__(
        self,
        classes: int = 10,
        inputs: int = 3,
        *,
        size: int = 32,
        width: int = 256,
        depth: int = 6,
        kernel: int = 5,
        stride: int = 2,
        cells: int = 4,
        dense: int = 2,
        dense_width: int = 1024,
    ):
        super().__init__()
        padding = (kernel - stride + 1) // 2
        self.stem = nn.Conv2d(inputs, width, kernel, stride, padding)
        blocks: list[nn.Module] = [MinMax()]
        for _ in range(depth):
            conv = nn.Conv2d(width, width, 3, padding=1)
            with torch.no_grad():
                conv.weight.mul_(0.1)
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
                conv.weight[:, :, 1, 1] += torch.eye(width)
            blocks += [conv, MinMax()]
        self.blocks = nn.Sequential(*blocks)
        self.neck = Neck(size // stride, cells, width)
        layers: list[nn.Module] = [OrthogonalLinear(cells**2 * width, dense_width), MinMax(-1)]
        for _ in range(dense):
            layers += [OrthogonalLinear(dense_width, dense_width, 0.0), MinMax(-1)]
        self.dense = nn.Sequential(*layers)
        self.head = nn.Linear(dense_width, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the features before the head, ``(batch, dense_width)``."""
        x = self.blocks(self.stem(x - 0.5)).permute(0, 2, 3, 1)
        return self.dense(self.neck(x).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
