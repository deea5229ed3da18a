"""One row per layer of a network: its type, its input size, σ1 there, and the bounds above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lipbound.bounds import BOUNDS, bound
from lipbound.layers import lipschitz
from lipbound.toeplitz import exact

LINEAR_LAYERS = (_ConvNd, nn.Linear, _BatchNorm)


@dataclass(frozen=True)
class Row:
    """One layer: ``bounds`` by method for convolutions, by ``'lipschitz'`` for the others."""

    name: str
    layer: nn.Module
    input_shape: tuple[int, ...]
    exact: float
    bounds: dict[str, float]


def input_shapes(model: nn.Module, input_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """What reaches each convolution, Linear and BatchNorm in one forward pass, less the batch."""
    seen: dict[str, tuple[int, ...]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, LINEAR_LAYERS):

            def record(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                seen.setdefault(name, tuple(inputs[0].shape[1:]))

            hooks.append(layer.register_forward_pre_hook(record))
    try:
        parameter = next(model.parameters())
        with torch.no_grad():
            model(torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def survey(model: nn.Module, input_shape: Sequence[int]) -> Iterator[Row]:
    """Rows in the order the layers run, each computed when asked for."""
    for name, shape in input_shapes(model, input_shape).items():
        layer = model.get_submodule(name)
        if isinstance(layer, _ConvNd):
            bounds = {method: float(bound(layer, method)) for method in BOUNDS}
            yield Row(name, layer, shape, exact(layer, shape), bounds)
        else:
            value = float(lipschitz(layer))
            truth = exact(layer, shape) if isinstance(layer, nn.Linear) else value
            yield Row(name, layer, shape, truth, {"lipschitz": value})
