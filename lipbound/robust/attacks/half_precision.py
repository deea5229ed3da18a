"""A network in half precision, for searches: quick, and with gradients that do not vanish.

float16 has the digits of TF32 at twice its speed but few exponents, and the gradient of an image
the network is sure of is tiny. So what comes back at the logits is brought to one size, image by
image and by powers of two, and what arrives at the image is brought back: rounding aside, the
gradient is float32's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipbound.robust.attacks.pgd import Logits, ascent, margin

LIFT = 5  # gradients at the logits are brought to about 2^LIFT: room for layers on both sides


class Rough(nn.Module):
    """Logits computed by autocast to a half precision; float32 goes in and comes out.

    Args:
        logits: From images to logits.
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
        sizes: list[Tensor] = []  # of the gradients on their way, one per image
        images = _Back.apply(images, sizes)
        with torch.autocast(images.device.type, self.dtype):
            scores = self.logits(images)
        return _Lifted.apply(scores.float(), sizes)


@torch.no_grad()
def faithful(model: nn.Module, images: Tensor, dtype: torch.dtype) -> bool:
    """Whether a network's gradients in half precision are about those of float32.

    They are not where its activations or inner derivatives leave the range: an attack would stand
    still there, and the image would count as one that withstands it.
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


class _Through(torch.autograd.Function):
    """What goes in, as it is; what is done to its gradient is up to the class."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sizes: list[Tensor]) -> Tensor:
        ctx.sizes = sizes
        return values.view_as(values)


class _Lifted(_Through):
    """The logits; their gradient is brought to one size."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        largest = gradient.abs().amax(1)
        sound = (largest > 0) & largest.isfinite()
        exponent = torch.where(sound, torch.frexp(largest).exponent - LIFT, 0).clamp(-100, 100)
        ctx.sizes[:] = [exponent]
        return torch.ldexp(gradient, -exponent[:, None]), None


class _Back(_Through):
    """The images; their gradient gets its own size again."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (exponent,) = ctx.sizes
        return torch.ldexp(gradient, exponent.reshape(-1, *[1] * (gradient.ndim - 1))), None
