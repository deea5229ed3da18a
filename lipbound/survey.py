"""One row per layer of a network: its type, its input size, σ1 there, and the bounds above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lipbound.bounds import Bracket, bound, bracket
from lipbound.layers import lipschitz
from lipbound.toeplitz import exact

LINEAR_LAYERS = (_ConvNd, nn.Linear, _BatchNorm)


@dataclass(frozen=True)
class Row:
    """One layer: what is true at its input size, and what is proved for every size.

    Attributes:
        exact: σ1 at ``input_shape``, by SVD or Lanczos.
        bracket: Certified interval of sup σ1(F); for BatchNorm its constant, twice.
        lipbound: The paper's bound, for convolutions.
    """

    name: str
    layer: nn.Module
    input_shape: tuple[int, ...]
    exact: float
    bracket: Bracket
    lipbound: float | None


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
        if isinstance(layer, _BatchNorm):
            value = float(lipschitz(layer))
            yield Row(name, layer, shape, value, Bracket(value, value, (), 0), None)
            continue
        paper = float(bound(layer, "lipbound")) if isinstance(layer, _ConvNd) else None
        yield Row(name, layer, shape, exact(layer, shape), bracket(layer), paper)
