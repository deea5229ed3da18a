"""A model in eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval(model: nn.Module) -> Iterator[nn.Module]:
    """The model with every part in eval mode; each part's own mode comes back afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode
