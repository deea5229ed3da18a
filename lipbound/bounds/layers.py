"""Certified Lipschitz constant of one layer, by its type."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lipbound.bounds.methods import bound
from lipbound.bounds.rounding import round_up
from lipbound.geometry import Convolution
from lipbound.modules import batch_norm_gains
from lipbound.runtime import wide


@singledispatch
def lipschitz(layer: object, *, method: str | None = None) -> Tensor:
    """A certified L2 Lipschitz constant of one layer, for every input size.

    For convolutions and bare kernels it is ``bound(layer, method)``, for ``nn.Linear`` σ1 of the
    matrix with every method, and for BatchNorm in eval mode max|γ|/√(var + ε).

    Other layer types can be registered; a subclass inherits the rule of its parent:

        >>> class Halve(nn.Module):
        ...     pass
        >>> @lipschitz.register
        ... def _(layer: Halve, *, method=None):
        ...     return torch.tensor(0.5)
        >>> lipschitz(Halve())
        tensor(0.5000)

    Args:
        layer: The layer.
        method: A name in ``BOUNDS``; ``None`` uses the default of :func:`lipbound.bound`.

    Raises:
        TypeError: If the layer's type has no rule.
    """
    known = sorted({t.__name__.lstrip("_") for t in lipschitz.registry if t is not object})
    raise TypeError(
        f"no Lipschitz rule for {type(layer).__name__}; layers with a rule: {', '.join(known)}. "
        f"Add yours with @lipschitz.register"
    )


@lipschitz.register(_ConvNd)
@lipschitz.register(Tensor)
@lipschitz.register(Convolution)
def _convolution(layer: nn.Module | Tensor | Convolution, *, method: str | None = None) -> Tensor:
    return bound(layer) if method is None else bound(layer, method)


@lipschitz.register(nn.Linear)
def _linear(layer: nn.Linear, *, method: str | None = None) -> Tensor:
    return bound(layer, "fantastic_four")  # without spatial axes the only reshape is the matrix


@lipschitz.register(_BatchNorm)
def _batch_norm(layer: _BatchNorm, *, method: str | None = None) -> Tensor:
    name = type(layer).__name__
    if layer.running_var is None:
        raise ValueError(
            f"{name} keeps no running statistics, so its constant depends on the batch; "
            f"use track_running_stats=True"
        )
    if layer.training:
        raise ValueError(
            f"{name} is in training mode, where its constant depends on the batch; call .eval()"
        )
    gains = batch_norm_gains(layer.running_var, layer.weight, layer.eps)
    gain = gains.abs().amax() * (1 + 2.0**-50)  # four roundings
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(gain)):
        raise ValueError(f"{name} has NaN or infinite statistics or weights; no constant exists")
    return round_up(gain, wide(layer.running_var.dtype))
