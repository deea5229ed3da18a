"""The mean of several networks, which is as robust as they are on average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn


class Member(Protocol):
    """A network that ends with a linear head."""

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head, ``(batch, width)``."""
        ...


class Averaged(nn.Module):
    """The mean of networks' logits, over each image and its mirror image if asked for.

    Mirroring keeps lengths, so a network and its mean over mirror images have the same Lipschitz
    bound, and the mean of several networks has the mean of their bounds. The margins of the mean
    vary less from image to image, so more of them exceed what a certificate needs.

    Args:
        members: Networks with the same classes, each with ``features`` and a linear ``head``.
        mirror: Whether to average over each image and its mirror image.

    Raises:
        ValueError: If there are no networks, or they differ in their classes.

    Example:
        >>> from lipbound.robust.models import MODELS
        >>> network = MODELS["shift-digits"](inputs=1)
        >>> Averaged([network, network])(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, members: Sequence[nn.Module], mirror: bool = True):
        super().__init__()
        heads = [cast(Member, member).head for member in members]
        classes = {head.out_features for head in heads}
        if len(classes) != 1:
            raise ValueError(
                f"cannot average {len(heads)} networks of {sorted(classes)} classes; pass networks "
                f"of the same classes"
            )
        self.members = nn.ModuleList(members)
        self.mirror = mirror
        weight = torch.cat([head.weight.detach() for head in heads], 1) / len(heads)
        bias = torch.stack([head.bias.detach() for head in heads]).mean(0)
        self.head = nn.Linear(*weight.shape[::-1])
        self.head.weight, self.head.bias = nn.Parameter(weight), nn.Parameter(bias)

    def features(self, x: Tensor) -> Tensor:
        """Return the features of all networks, side by side."""
        return torch.cat([self._seen(cast(Member, member), x) for member in self.members], 1)

    def _seen(self, member: Member, x: Tensor) -> Tensor:
        features = member.features(x)
        return 0.5 * (features + member.features(x.flip(-1))) if self.mirror else features

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
