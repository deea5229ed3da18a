r"""Losses that train margins: how far a class score is ahead, compared with the Lipschitz constant.

A perturbation of norm r changes the difference of two logits by at most :math:`r L_{ij}`, where
:math:`L_{ij}` is a Lipschitz constant of :math:`f_i - f_j`. Each loss lets the other classes gain
what they could gain within the radius, and then takes the cross entropy. A network that was
trained so has certificates that are not zero, provided that its constants are proved afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

TEMPERATURE, OFFSET, POWER = 0.75, 2.0, 5.0  # of logit annealing

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def pair_constants(features: Tensor, head: Tensor) -> Tensor:
    r"""Return :math:`L_{ij} = L \|w_i - w_j\|`, ``(classes, classes)``; differentiable.

    Args:
        features: Lipschitz constant L of the features, a scalar.
        head: Weight of the last Linear layer, ``(classes, features)``.
    """
    squares = (head[:, None] - head[None]).square().sum(-1)
    return features * squares.clamp_min(1e-12).sqrt()  # the root has no slope at 0


def certified_radii(logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
    """Estimate the radii of correct predictions from estimated constants; 0 for wrong ones."""
    best = logits.argmax(1)
    gaps = (logits.amax(1, keepdim=True) - logits) / constants[best].clamp_min(1e-30)
    radii = gaps.masked_fill(_one_hot(best, logits), torch.inf).amin(1)
    return torch.where(best == labels, radii, 0.0)


def lipschitz_margin(logits: Tensor, labels: Tensor, constants: Tensor, radius: Tensor) -> Tensor:
    """Lipschitz-margin training (Tsuzuku, Sato & Sugiyama 2018).

    Every other class gains all that it could gain within the radius.
    """
    return functional.cross_entropy(_gained(logits, labels, radius * constants[labels]), labels)


def gloro(logits: Tensor, labels: Tensor, constants: Tensor, radius: Tensor) -> Tensor:
    """GloRo (Leino, Wang & Fredrikson 2021): an extra class wins where nothing is certified.

    The extra logit is the largest that another class than the predicted one could reach.
    """
    best = logits.argmax(1)
    reached = logits + radius * constants[best]
    other = reached.masked_fill(_one_hot(best, logits), -torch.inf).amax(1, keepdim=True)
    return functional.cross_entropy(torch.cat([logits, other], 1), labels)


def emma(logits: Tensor, labels: Tensor, constants: Tensor, radius: Tensor) -> Tensor:
    """EMMA (Hu, Zou, Wang, Leino & Fredrikson 2023): no class gains more than the margin left.

    The allowance of a class ends where it would overtake the true one, so images without any
    margin are trained on, and not given up.
    """
    return functional.cross_entropy(_emma(logits, labels, constants, radius), labels)


def annealing(logits: Tensor, labels: Tensor, constants: Tensor, radius: Tensor) -> Tensor:
    """Logit annealing (Lai et al. 2025): images with a large margin lose their weight.

    It uses neither the constants nor the radius. The features must have a fixed constant.
    """
    return _annealed(logits, labels)


def emma_annealing(logits: Tensor, labels: Tensor, constants: Tensor, radius: Tensor) -> Tensor:
    """Logit annealing of EMMA's logits, which favours large radii."""
    return _annealed(_emma(logits, labels, constants, radius), labels)


LOSSES: dict[str, Loss] = {
    "lipschitz-margin": lipschitz_margin,
    "gloro": gloro,
    "emma": emma,
    "annealing": annealing,
    "emma+annealing": emma_annealing,
}
"""Name → loss of logits ``(batch, classes)``, labels, constants ``(classes, classes)``, radius."""


def _one_hot(labels: Tensor, logits: Tensor) -> Tensor:
    return functional.one_hot(labels, logits.shape[1]).bool()


def _gained(logits: Tensor, labels: Tensor, gains: Tensor) -> Tensor:
    """Add gains to all logits except that of the true class, which becomes 0."""
    relative = logits - logits.gather(1, labels[:, None])
    return torch.where(_one_hot(labels, logits), 0.0, relative + gains)


def _emma(logits: Tensor, labels: Tensor, constants: Tensor, radius: Tensor) -> Tensor:
    gains = radius * constants[labels]
    left = logits.gather(1, labels[:, None]) - logits
    share = (left / gains.clamp_min(1e-8)).clamp(0.01, 1).detach()
    return _gained(logits, labels, share * gains)


def _annealed(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = (logits - OFFSET * _one_hot(labels, logits)) / TEMPERATURE
    losses = functional.cross_entropy(shifted, labels, reduction="none")
    weights = (1 - torch.exp(-losses)).clamp_min(1e-6) ** POWER
    return TEMPERATURE * (weights * losses).mean()
