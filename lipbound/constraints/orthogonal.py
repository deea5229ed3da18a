r"""Matrices with orthonormal rows, kept so by the optimizer: project the gradient, step, retract.

The gradient is projected on the tangent space of the matrices with orthonormal rows, any optimizer
takes its step, and two Newton–Schulz iterations :math:`W \leftarrow \frac32 W - \frac12 WW^TW` lead
back. They map every singular value s to :math:`\frac32 s - \frac12 s^3`, which converges to 1 from
everywhere in (0, √3). All of it is matrix products, so it is fast on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class OrthogonalLinear(nn.Linear):
    """A Linear layer without bias whose weight has orthonormal rows, or columns if it is tall.

    The layer starts orthogonal. :class:`Retraction` keeps it so while it trains.

    Args:
        inputs: Number of input features.
        outputs: Number of output features.
        angle: If given and the matrix is square, start near the identity: at the exponential of a
            random skew-symmetric matrix of about this norm. 0 starts at the identity.
    """

    def __init__(self, inputs: int, outputs: int, angle: float | None = None):
        self.angle = angle
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw a random orthogonal matrix, or one near the identity."""
        if self.angle is None or self.in_features != self.out_features:
            nn.init.orthogonal_(self.weight)
            return
        with torch.no_grad():
            random = torch.randn_like(self.weight) * (self.angle / self.in_features**0.5)
            self.weight.copy_(torch.linalg.matrix_exp(random - random.mT))


def newton_schulz(matrices: Tensor, steps: int = 2) -> Tensor:
    """Move singular values in (0, √3) towards 1; ``matrices`` may be a batch, wide or tall.

    Example:
        >>> wide = torch.tensor([[0.9, 0.0, 0.1], [0.0, 1.1, 0.0]], dtype=torch.float64)
        >>> torch.linalg.svdvals(newton_schulz(wide, 6))
        tensor([1., 1.], dtype=torch.float64)
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    rows = matrices.mT if tall else matrices
    for _ in range(steps):
        rows = 1.5 * rows - 0.5 * (rows @ rows.mT) @ rows
    return rows.mT if tall else rows


def tangent(matrices: Tensor, gradients: Tensor) -> Tensor:
    """Project gradients on the tangent space of the matrices with orthonormal rows or columns."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return tangent(matrices.mT, gradients.mT).mT
    inner = gradients @ matrices.mT
    return gradients - 0.5 * (inner + inner.mT) @ matrices


def orthogonal_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that are kept orthogonal, whose norm is 1."""
    return [name for name, module in model.named_modules() if isinstance(module, OrthogonalLinear)]


class Retraction:
    """Keep the weights of all :class:`OrthogonalLinear` layers of a model orthogonal.

    Call :meth:`project_` after ``loss.backward()`` and :meth:`retract_` after ``optimizer.step()``.
    Weights of the same shape are processed together. A step must not move a singular value out of
    (0, √3); learning rates of about 1e-3 for Adam do not.

    Example:
        >>> model = nn.Sequential(OrthogonalLinear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> optimizer, keep = torch.optim.Adam(model.parameters()), Retraction(model)
        >>> model(torch.randn(8, 4)).square().sum().backward()
        >>> keep.project_(); _ = optimizer.step(); keep.retract_()
        >>> bool(torch.linalg.svdvals(model[0].weight.detach()).max() < 1.00001)
        True
    """

    def __init__(self, model: nn.Module):
        layers = (m for m in model.modules() if isinstance(m, OrthogonalLinear))
        self.weights: list[Tensor] = [layer.weight for layer in layers]
        alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for weight in self.weights:
            alike.setdefault((weight.shape, weight.dtype), []).append(weight)
        self._groups = list(alike.values())

    @torch.no_grad()
    def project_(self) -> None:
        """Project the gradients of the weights on the tangent space."""
        for group in self._groups:
            own = [(w, w.grad) for w in group if w.grad is not None]
            if own:
                weights, gradients = ([pair[i] for pair in own] for i in range(2))
                _copy_(gradients, tangent(torch.stack(weights), torch.stack(gradients)))

    @torch.no_grad()
    def retract_(self, steps: int = 2) -> None:
        """Make the weights orthogonal again, by ``steps`` iterations of Newton and Schulz."""
        for group in self._groups:
            _copy_(group, newton_schulz(torch.stack([w.detach() for w in group]), steps))

    @torch.no_grad()
    def polish_(self) -> None:
        """Make the weights orthogonal to the precision of their type, computing in float64."""
        for weight in self.weights:
            weight.copy_(newton_schulz(weight.double(), 8))


def _copy_(targets: Iterable[Tensor], values: Tensor) -> None:
    torch._foreach_copy_([t.detach() for t in targets], list(values.unbind()))
