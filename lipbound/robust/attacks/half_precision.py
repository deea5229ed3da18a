"""Run a network in half precision for fast searches, without vanishing gradients.

float16 has as many digits as TF32 at twice its speed, but a small range of exponents, and the
gradient of a confidently classified image is tiny. The gradient at the logits is therefore scaled
to one size by a power of two for each image, and the gradient at the image is scaled back. Except
for rounding, it equals the float32 gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipbound.robust.attacks.pgd import Logits, ascent, margin

LIFT = 5  # gradients at the logits are scaled to about 2^LIFT, with room on both sides


class Rough(nn.Module):
    """Logits computed by autocast to a half precision, with float32 inputs and outputs.

    Args:
        logits: Network from images to logits.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Example:
        >>> rough = Rough(nn.Linear(2, 2), torch.float16)
        >>> rough(torch.ones(1, 2)).dtype
        torch.float32
    """

    def __init__(self, logits: Logits, dtype: torch.dtype):
        super().__init__()
        self.logits, self.dtype = logits, dtype
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        sizes: list[Tensor] = []  # scale of each image's gradient
        images = _Back.apply(images, sizes)
        with torch.autocast(images.device.type, self.dtype):
            scores = self.logits(images)
        return _Lifted.apply(scores.float(), sizes)


@torch.no_grad()
def faithful(model: nn.Module, images: Tensor, dtype: torch.dtype) -> bool:
    """Whether a network's gradients in half precision are close to those in float32.

    They differ if activations or inner derivatives leave the range of the format. An attack would
    then make no progress, and the image would wrongly count as robust.
    """
    labels = model(images).argmax(1)
    exact, rough = (
        ascent(logits, images, labels, margin)[2].flatten(1).double()
        for logits in (model, Rough(model, dtype))
    )
    sizes = exact.norm(dim=1)
    angles = (exact * rough).sum(1) / (sizes * rough.norm(dim=1)).clamp_min(1e-300)
    right = (angles > 0.8) | (sizes == 0) | ~sizes.isfinite()
    return float(right.double().mean()) > 0.95


@torch.no_grad()
def lost(
    model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype, batch: int
) -> Tensor:
    """Whether an image's logits or its gradient in half precision are not finite numbers.

    A search makes no progress there, so it says nothing about the image.
    """
    rough, found = Rough(model, dtype), []
    for part, classes in zip(images.split(batch), labels.split(batch), strict=True):
        part = part.detach().requires_grad_()
        with torch.enable_grad():
            scores = rough(part)
            (gradient,) = torch.autograd.grad(margin(scores, classes).sum(), part)
        found.append(~(scores.isfinite().all(1) & gradient.flatten(1).isfinite().all(1)))
    return torch.cat(found)


class _Through(torch.autograd.Function):
    """The identity; subclasses change its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sizes: list[Tensor]) -> Tensor:
        ctx.sizes = sizes
        return values.view_as(values)


class _Lifted(_Through):
    """The identity on logits, which scales their gradient to one size."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        largest = gradient.abs().amax(1)
        sound = (largest > 0) & largest.isfinite()
        exponent = torch.where(sound, torch.frexp(largest).exponent - LIFT, 0).clamp(-100, 100)
        ctx.sizes[:] = [exponent]
        return torch.ldexp(gradient, -exponent[:, None]), None


class _Back(_Through):
    """The identity on images, which scales their gradient back."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (exponent,) = ctx.sizes
        return torch.ldexp(gradient, exponent.reshape(-1, *[1] * (gradient.ndim - 1))), None
