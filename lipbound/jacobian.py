"""Norms of Jacobians: what a network does amplify, somewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def jacobian_norm(model: nn.Module, inputs: Tensor, iterations: int = 30, seed: int = 0) -> float:
    """The largest ‖Jv‖, ‖v‖ = 1, that power iteration finds at the given inputs.

    A lower bound on the network's Lipschitz constant, up to the rounding of the network itself.
    The inputs go through together: in eval mode they do not know of each other.
    """
    inputs = inputs.detach()
    with torch.no_grad():
        given = inputs.clone()  # the network may write to what it gets
        apart = any(t.ndim == 0 or len(t) != len(inputs) for t in _tensors(model(given)))
    if apart and len(inputs) > 1:  # an output without a batch axis
        return max(jacobian_norm(model, one[None], iterations, seed) for one in inputs)
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(inputs.shape, generator=draw).to(inputs)

    def run(x: Tensor) -> Tensor:
        parts = [t for t in _tensors(model(x.clone())) if t.is_floating_point()]
        return torch.cat([t.reshape(len(x), -1) for t in parts], 1)

    pull = torch.func.vjp(run, inputs)[1]
    norms = torch.zeros(len(inputs))
    for _ in range(iterations):
        sizes = vectors.flatten(1).norm(dim=1).clamp_min(1e-30)
        vectors = vectors / sizes.reshape(-1, *[1] * (inputs.ndim - 1))
        images = torch.func.jvp(run, (inputs,), (vectors,))[1]
        norms = images.norm(dim=1)
        (vectors,) = pull(images)
    return float(norms.detach().max())


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
