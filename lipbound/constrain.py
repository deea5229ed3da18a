r"""``constrain(layer)``: keep the true norm of a layer at most a given number while it trains.

The weight becomes :math:`K \cdot \min(1, \mathrm{norm}/\hat\sigma)`. In training
:math:`\hat\sigma` follows the layer's σ1 by a warm-started iteration on the symbol, one product a
step, differentiable: an estimate from below, so the norm may exceed the limit by what the
iteration lags behind. In eval mode, on removal and in an exported graph it is the certified upper
end of a bracket: the norm then is at most the limit, proved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from lipbound.bounds import BOUNDS, bound, bracket
from lipbound.follow import Climb
from lipbound.geometry import convolution
from lipbound.kernels.plain import working
from lipbound.symbol import taps

M = TypeVar("M", bound=nn.Module)


class Constrained(nn.Module):
    """The parametrization: from a free weight to one whose layer has at most the given norm.

    Args:
        layer: The convolution or Linear layer.
        norm: The limit.
        method: A name in ``BOUNDS``. All but ``'spectral'`` are bounds at every step, and are
            evaluated at every step.
        rtol: Relative width of the certified bracket; what the norm may stay below the limit by.
    """

    scale: Tensor
    frequency: Tensor
    left: Tensor

    def __init__(self, layer: nn.Module, norm: float, method: str, rtol: float):
        super().__init__()
        if method not in BOUNDS:
            raise ValueError(f"unknown bound method {method!r}; there are {', '.join(BOUNDS)}")
        if not norm > 0:
            raise ValueError(f"norm={norm!r} must be positive")
        self.norm, self.method, self.rtol = float(norm), method, rtol
        conv = convolution(layer)
        conv = replace(conv, kernel=conv.kernel.detach())
        # The geometry alone is kept: the weight comes anew at every call.
        self.conv = replace(conv, kernel=conv.kernel[:0])
        self.register_buffer("scale", torch.ones((), device=conv.kernel.device))
        self._certified: tuple[int, int] | None = None  # which weight the scale is for
        self._seen: tuple[Tensor, ...] = ()
        if method == "spectral":
            first = taps(replace(conv, kernel=working(conv.kernel)))
            self.climb = Climb(first.shape[1:])
            state = self.climb(first, None, 1)[1]
            self.register_buffer("frequency", state[0])
            self.register_buffer("left", state[1])

    def forward(self, weight: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        if not traced:
            self._seen = (weight,)
        if self.training:
            with torch.autocast(weight.device.type, enabled=False):
                return weight * (self.norm / self._estimate(weight)).clamp_max(1.0).to(weight.dtype)
        if not traced and self._certified != _stamp(weight):
            self._certify(weight)
        return weight * self.scale.to(weight.dtype)

    def train(self, mode: bool = True) -> Constrained:
        """Leaving training mode certifies, so that a graph captured afterwards holds a number."""
        if not mode and self._seen and self._certified != _stamp(self._seen[0]):
            self._certify(self._seen[0])
        return super().train(mode)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Any weight may be assigned; it is scaled when it is read."""
        return weight

    def _estimate(self, weight: Tensor) -> Tensor:
        conv = replace(self.conv, kernel=working(weight))
        if self.method != "spectral":
            return bound(conv, self.method).clamp_min(1e-30)
        start = self.frequency.clone(), self.left.clone()
        values, (frequency, left) = self.climb(taps(conv), start, 1)
        with torch.no_grad():
            self.frequency.copy_(frequency)
            self.left.copy_(left)
        return (values.amax() * conv.padding_gain()).clamp_min(1e-30)

    @torch.no_grad()
    def _certify(self, weight: Tensor) -> None:
        """A scale at which the product, rounded, is proved to keep the limit."""
        kind, unit = weight.dtype, torch.finfo(weight.dtype).eps
        scale = 1.0
        while True:
            rounded = weight.detach() * torch.tensor(scale, dtype=kind, device=weight.device)
            conv = replace(self.conv, kernel=rounded)
            spectral = self.method == "spectral"
            upper = bracket(conv, self.rtol).upper if spectral else float(bound(conv, self.method))
            if upper <= self.norm * (1 + 1e-7):
                break
            least = scale * (1 - unit)  # rounding must not stop it
            scale = float(torch.tensor(min(scale * self.norm / upper, least), dtype=kind))
        self.scale.fill_(scale)
        self._certified = _stamp(weight)

    def extra_repr(self) -> str:
        return f"norm={self.norm:g}, {self.method!r}"


def _stamp(weight: Tensor) -> tuple[int, int]:
    """Changes when the weight does (unless it is changed through ``.data``)."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def constrain(module: M, norm: float = 1.0, method: str = "spectral", *, rtol: float = 1e-3) -> M:
    r"""Keep the norm of a layer, or of every convolution and Linear layer of a model, at most so.

    Strides, groups, dilation and transposition count: it is the layer's norm, for every input
    size, that is limited, not that of its weight as a matrix.

    Args:
        module: ``nn.Conv*d``, ``nn.ConvTranspose*d``, ``nn.Linear``, or a model with some.
        norm: The limit.
        method: What measures the layer, a name in ``BOUNDS``.
        rtol: Relative width of the bracket that certifies in eval mode.

    Returns:
        The same module. Undo it with :func:`unconstrain`, which leaves certified weights.

    Raises:
        ValueError: If there is no such layer, or one is constrained already.

    Example:
        >>> layer = constrain(nn.Conv2d(3, 8, 3, stride=2)).eval()
        >>> bracket(layer).upper <= 1.000001
        True
    """
    found = {name: m for name, m in module.named_modules() if isinstance(m, _ConvNd | nn.Linear)}
    if not found:
        raise ValueError(f"{type(module).__name__} has no convolution or Linear layer")
    for name, layer in found.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(
                f"the weight of {name or type(layer).__name__} is parametrized already"
            )
    for layer in found.values():
        constraint = Constrained(layer, norm, method, rtol)
        parametrize.register_parametrization(layer, "weight", constraint.train(layer.training))
    return module


def unconstrain(module: M) -> M:
    """Undo :func:`constrain`: plain weights again, at most the limit, certified.

    Example:
        >>> layer = unconstrain(constrain(nn.Conv2d(3, 8, 3), 0.5))
        >>> type(layer.weight).__name__, bracket(layer).upper <= 0.500001
        ('Parameter', True)
    """
    for layer in list(module.modules()):
        if parametrize.is_parametrized(layer, "weight") and any(
            isinstance(p, Constrained)
            for p in layer.parametrizations["weight"]  # type: ignore[index]
        ):
            for constraint in layer.parametrizations["weight"]:  # type: ignore[index]
                constraint.eval()
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return module
