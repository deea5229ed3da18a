"""The size at which each layer of a network works."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lipbound.modes import in_eval

LINEAR_LAYERS = (_ConvNd, nn.Linear, _BatchNorm)


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
        with torch.no_grad(), in_eval(model):  # in training BatchNorm would learn from zeros
            model(torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device))
    finally:
        for hook in hooks:
            hook.remove()
    return seen
