"""Norms of a network's Jacobians: lower bounds on its Lipschitz constant."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipbound.network.capture_check import outputs
from lipbound.runtime import time_is_up

ROWS = 32  # one backward pass per output; for more outputs, power iteration is cheaper
ENOUGH = 1e-3  # stop when an iteration gains less than this share


def jacobian_norm(model: nn.Module, inputs: Tensor, iterations: int = 30, seed: int = 0) -> float:
    """Return the largest spectral norm of the network's Jacobian at the given inputs.

    The norm is exact for few outputs. For more, it is the largest ‖Jv‖ with ‖v‖ = 1 that power
    iteration finds. Both are lower bounds on the network's Lipschitz constant, up to the rounding
    of the network itself. If the inputs of a batch do not affect each other, one batch finds the
    input with the largest norm, and its norm is then computed alone, without the others' influence.
    """
    inputs = inputs.detach()
    with torch.no_grad():
        few = sum(t.numel() for t in outputs(model, inputs[:1])) <= ROWS
        together = len(inputs) > 1 and bool(alone_and_together(model, inputs)[1].all())

    def run(x: Tensor) -> Tensor:
        return torch.cat([t.reshape(len(x), -1) for t in outputs(model, x)], 1)

    def norms(some: Tensor) -> Tensor:
        return norms_by_rows(run, some) if few else _iterated(run, some, iterations, seed)

    chosen = inputs[norms(inputs).argmax()][None] if together else inputs
    return float(torch.cat([norms(one[None]) for one in chosen]).max())


def norms_by_rows(run: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Compute the Jacobian's spectral norm at every input, with one backward pass per row.

    Args:
        run: Maps inputs to ``(batch, outputs)``; each row may depend on its own input only.
        inputs: A batch of inputs.

    Returns:
        Norms ``(batch,)`` in float64; NaN if the Jacobian is not finite.
    """
    x = inputs.detach().requires_grad_()
    with torch.enable_grad():
        found = run(x)
        if not found.requires_grad:  # the outputs do not depend on the inputs
            return torch.zeros(len(x), dtype=torch.float64, device=x.device)
        rows = [
            torch.autograd.grad(column.sum(), x, retain_graph=True, materialize_grads=True)[0]
            for column in found.unbind(1)
        ]
    matrices = torch.stack(rows, 1).flatten(2).double()
    known = matrices.isfinite().flatten(1).all(1)
    norms = torch.linalg.matrix_norm(matrices.where(known[:, None, None], 0), 2)
    return norms.where(known, torch.nan)


@torch.no_grad()  # otherwise the iterations keep each other's graphs, for the network's parameters
def _iterated(
    run: Callable[[Tensor], Tensor], inputs: Tensor, iterations: int, seed: int
) -> Tensor:
    """Compute ‖Jv‖ at every input by power iteration, until it grows at no input."""
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(inputs.shape, generator=draw).to(inputs)
    pull = torch.func.vjp(run, inputs)[1]
    norms = torch.zeros(len(inputs)).to(inputs)
    for _ in range(iterations):
        before = norms
        sizes = vectors.flatten(1).norm(dim=1).clamp_min(1e-30)
        vectors = vectors / sizes.reshape(-1, *[1] * (inputs.ndim - 1))
        images = torch.func.jvp(run, (inputs,), (vectors,))[1]
        norms = images.norm(dim=1)
        if time_is_up() or bool((norms <= before * (1 + ENOUGH)).all()):
            break
        (vectors,) = pull(images)
    return norms


def alone_and_together(model: nn.Module, inputs: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the outputs for each input alone, and which of them are the same in the batch.

    Returns:
        One tensor ``(batch, ...)`` for each output, and ``(batch,)`` booleans. An output without a
        batch axis makes all of them false.
    """
    company = outputs(model, inputs)
    each = [outputs(model, one) for one in inputs.split(1)]
    rows = [(1, *t.shape[1:]) for t in company]
    batched = bool(company) and all(t.ndim and len(t) == len(inputs) for t in company)
    if not batched or any([t.shape for t in alone] != rows for alone in each):
        return company, torch.zeros(len(inputs), dtype=torch.bool)
    alone = [torch.cat(parts) for parts in zip(*each, strict=True)]
    same = [alike(mine, others) for mine, others in zip(alone, company, strict=True)]
    return alone, torch.stack(same).all(0)


def alike(ones: Tensor, others: Tensor) -> Tensor:
    """Tell which rows of two results are about the same, ``(batch,)``; rows with NaN are not."""
    ones, others = ones.reshape(len(ones), -1), others.reshape(len(others), -1)
    if not ones.shape[1]:
        return torch.ones(len(ones), dtype=torch.bool, device=ones.device)
    # The largest entry, because squares of small entries would underflow to zero.
    return (ones - others).abs().amax(1) <= 0.01 * ones.abs().amax(1)
