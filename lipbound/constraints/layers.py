"""Activations, shifts and centring with Lipschitz constant 1, for networks of known norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lipbound.constraints.norm_limit import constrain


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of the channels.

    Raises:
        ValueError: If the number of channels is odd.
    """
    if x.shape[dim] % 2:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} has an odd number of channels, {x.shape[dim]}, on "
            f"axis {dim}; this activation needs pairs"
        )
    first, second = x.chunk(2, dim)
    return first, second


class MinMax(nn.Module):
    """Replace each pair of channels (i, i + n/2) by its maximum and its minimum.

    Args:
        dim: Axis of the channels.
    """

    def __init__(self, dim: int = 1):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        first, second = _halves(x, self.dim)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], self.dim)


class GroupSort(nn.Module):
    """Sort the channels of each group of neighbours.

    Args:
        size: Number of channels of a group.
        dim: Axis of the channels.
    """

    def __init__(self, size: int = 2, dim: int = 1):
        super().__init__()
        self.size, self.dim = size, dim

    def forward(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        return x.unflatten(dim, (-1, self.size)).sort(dim + 1).values.flatten(dim, dim + 1)


class HalfAbs(nn.Module):
    """Take the absolute value of the first half of the channels and keep the second half.

    Args:
        dim: Axis of the channels.
    """

    def __init__(self, dim: int = 1):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        first, second = _halves(x, self.dim)
        return torch.cat([first.abs(), second], self.dim)


class CyclicShift(nn.Module):
    """Move groups of channels by a pixel each, around the border; the other channels stay.

    This permutes the entries, so its norm is 1. It is how a network of 1×1 convolutions sees
    neighbouring pixels.

    Args:
        channels: Number of channels.
        moves: Offset along every spatial axis, one tuple for each group.
        share: Each group has ``channels // share`` channels.
        dim: Axis of the channels: 1, or −1 for channels last.
    """

    def __init__(
        self, channels: int, moves: Sequence[tuple[int, ...]], share: int = 8, dim: int = 1
    ):
        super().__init__()
        part = channels // share
        if part * len(moves) > channels:
            raise ValueError(f"{len(moves)} moves need share={len(moves)} or more, not {share}")
        rest = channels - part * len(moves)
        self.sizes = [part] * len(moves) + ([rest] if rest else [])
        self.moves, self.dim = [tuple(move) for move in moves], dim

    def forward(self, x: Tensor) -> Tensor:
        parts = list(x.split(self.sizes, self.dim))
        first = 1 if self.dim == -1 else 2
        for index, move in enumerate(self.moves):
            moved = {first + axis: step for axis, step in enumerate(move) if step}
            if moved:
                parts[index] = parts[index].roll(tuple(moved.values()), tuple(moved))
        return torch.cat(parts, self.dim)


class ConvexPotential(nn.Module):
    r"""A residual layer of norm 1: :math:`x - 2 K^T \mathrm{relu}(Kx + b)` with ‖K‖ ≤ 1.

    Its Jacobian is I − 2KᵀDK with a diagonal D between 0 and 1: a symmetric matrix with
    eigenvalues between −1 and 1. With a convolution limited by ``'spectral'`` this is the convex
    potential layer of Meunier et al. (2022), with ``'sll'`` the SDP-based layer of Araujo et al.
    (2023).

    Args:
        channels: Number of channels.
        inner: Number of channels of Kx; by default the same.
        kernel: Side of the kernel.
        method: How the convolution is limited, see :func:`lipbound.constrain`.
    """

    def __init__(
        self, channels: int, inner: int | None = None, kernel: int = 3, method: str = "spectral"
    ):
        super().__init__()
        self.padding = kernel // 2
        conv = nn.Conv2d(channels, inner or channels, kernel, padding=self.padding)
        self.conv = constrain(conv, 1.0, method)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        inner = functional.conv2d(x, weight, self.conv.bias, padding=self.padding)
        return x - 2 * functional.conv_transpose2d(inner.relu(), weight, padding=self.padding)


class Centre(nn.Module):
    """Subtract the mean of every channel and add a bias; the norm is 1.

    In training the mean is that of (half of) the batch, as in BatchNorm. In eval mode it is the
    stored one, so that the layer only adds a constant.

    Args:
        channels: Number of channels, the last axis.
        momentum: Weight of a new batch in the stored mean.
    """

    mean: Tensor

    def __init__(self, channels: int, momentum: float = 0.01):
        super().__init__()
        self.momentum = momentum
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean
        if self.training:
            mean = x[: (len(x) + 1) // 2].float().mean(tuple(range(x.ndim - 1)))
            with torch.no_grad():
                self.mean.lerp_(mean.detach().to(self.mean.dtype), self.momentum)
        return x + (self.bias - mean).to(x.dtype)


class Bias(nn.Module):
    """Add a number to every channel, the last axis; the norm is 1."""

    def __init__(self, channels: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.to(x.dtype)


@torch.no_grad()
def settle(model: nn.Module, images: Tensor) -> None:
    """Set the stored means of all :class:`Centre` layers to those of ``images``."""
    centres = [m for m in model.modules() if isinstance(m, Centre)]
    before, training = [c.momentum for c in centres], model.training
    for centre in centres:
        centre.momentum = 1.0
    try:
        model.train()(images)
    finally:
        model.train(training)
        for centre, momentum in zip(centres, before, strict=True):
            centre.momentum = momentum
