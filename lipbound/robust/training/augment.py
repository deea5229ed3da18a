"""Augmentation of image batches on their device; all random numbers are arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

DRAWS = 8  # random numbers per image


def augmented(images: Tensor, draws: Tensor, colour: float, share: float) -> Tensor:
    """Change colours of all images, and apply RandAugment to a share of them.

    Args:
        images: Pixels in [0, 1], ``(batch, 3, height, width)``.
        draws: Numbers in [0, 1), ``(DRAWS, batch)``.
        colour: Largest relative change of brightness, saturation and contrast.
        share: Share of the images to which RandAugment is applied.
    """
    if colour:
        images = _colours(images, draws[:3], colour)
    return _randaugment(images, draws[3:], share) if share else images


def _colours(images: Tensor, draws: Tensor, strength: float) -> Tensor:
    factors = (1 + strength * (2 * draws - 1))[:, :, None, None, None]
    grey = images.mean(1, keepdim=True)
    images = (grey + factors[0] * (images - grey)) * factors[1]
    return (0.5 + factors[2] * (images - 0.5)).clamp(0, 1)


def _randaugment(images: Tensor, draws: Tensor, share: float) -> Tensor:
    """Apply two random operations of fourteen, each with magnitude 9 of 30 (Cubuk et al. 2020).

    Four operations do nothing here: identity, posterize, and one of each pair of similar ones.
    New pixels at the border are grey.
    """
    chosen = torch.where(draws[0] < share, (14 * draws[1:3]).long(), 0)  # (2, batch)
    signs = torch.where(draws[3:5] < 0.5, -1.0, 1.0)

    def amount(operation: int) -> Tensor:
        return (signs * (chosen == operation)).sum(0)

    shear_x, shear_y = 0.09 * amount(1), 0.09 * amount(2)
    move_x, move_y = amount(3) * 4.35 / 16, amount(4) * 4.35 / 16
    angle = amount(5) * math.radians(9)
    cos, sin = angle.cos(), angle.sin()
    rows = (
        torch.stack([cos - sin * shear_y, cos * shear_x - sin, move_x], 1),
        torch.stack([sin + cos * shear_y, sin * shear_x + cos, move_y], 1),
    )
    grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    moved = functional.grid_sample(images - 0.5, grid, padding_mode="zeros", align_corners=False)

    def factor(operation: int) -> Tensor:
        return (1 + 0.27 * amount(operation))[:, None, None, None]

    images = ((moved + 0.5) * factor(6)).clamp(0, 1)
    grey = images.mean(1, keepdim=True)
    images = (grey + factor(7) * (images - grey)).clamp(0, 1)
    level = images.mean((1, 2, 3), keepdim=True)
    images = (level + factor(8) * (images - level)).clamp(0, 1)
    around = functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
    blurred = (9 * around + 4 * images) / 13
    images = (blurred + factor(9) * (images - blurred)).clamp(0, 1)
    solarized = (chosen == 11).any(0)[:, None, None, None]
    images = torch.where(solarized & (images > 0.7), 1 - images, images)
    stretched = ((chosen == 12) | (chosen == 13)).any(0)[:, None, None, None]
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(stretched, (images - low) / (high - low).clamp_min(0.05), images)
