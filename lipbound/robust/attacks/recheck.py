"""Check the inputs of an evaluation, and check adversarial images again in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipbound.robust.attacks.pgd import Found, perturbation_norms


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32. An image that is broken only by TF32's rounding does not count."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def check(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 500) -> Tensor:
    """Return the logits; raise ValueError if the inputs cannot be attacked."""
    if any(m.training for m in model.modules()):
        raise ValueError("the model is in training mode; call model.eval() first")
    if images.ndim != 4 or len(images) != len(labels) or len(images) == 0:
        raise ValueError(
            f"images {tuple(images.shape)} and labels {tuple(labels.shape)} do not match; pass "
            f"(count, channels, height, width) and (count,)"
        )
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"pixels lie in [{low:.3g}, {high:.3g}], not in [0, 1]; put the normalization inside "
            f"the model"
        )
    with torch.no_grad():
        logits = torch.cat([model(part).float() for part in images.split(batch)])
    if logits.ndim != 2:
        raise ValueError(f"the model returns {tuple(logits.shape)}; it must be (count, classes)")
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the logits are not all finite numbers")
    if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
        raise ValueError(
            f"labels lie in [{int(labels.min())}, {int(labels.max())}], but there are "
            f"{logits.shape[1]} classes"
        )
    return logits


@tf32(False)
@torch.no_grad()
def verified(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    """Whether images are misclassified in float32 without TF32; NaN logits do not count."""
    logits = torch.cat([model(x.float()).float() for x in images.split(batch)])
    return (logits.argmax(1) != labels) & logits.isfinite().all(1)


@dataclass(frozen=True)
class Examples:
    """The images on which attacks are measured.

    Attributes:
        images: ``(count, channels, height, width)``, pixels in [0, 1].
        labels: True classes, ``(count,)``.
        mistakes: Whether the network misclassifies the image without attack.
    """

    images: Tensor
    labels: Tensor
    mistakes: Tensor

    def __getitem__(self, which: slice) -> Examples:
        return Examples(self.images[which], self.labels[which], self.mistakes[which])


def valid(
    model: nn.Module, found: Found, on: Examples, ball: str, radius: float, batch: int
) -> Tensor:
    """Whether each image is misclassified, without attack or by a valid perturbation."""
    sizes = perturbation_norms(found.images, on.images, ball)
    inside = sizes <= radius * (1 + 1e-5) + 1e-7
    in_range = ((found.images >= 0) & (found.images <= 1)).flatten(1).all(1)
    broken = verified(model, found.images, on.labels, batch) & inside & in_range
    return broken | on.mistakes
