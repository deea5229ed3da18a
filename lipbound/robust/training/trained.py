"""Networks of training runs: made from settings, and read back from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipbound.robust.data.sets import Data
from lipbound.robust.models import MODELS, normalized
from lipbound.robust.training import checkpoints
from lipbound.robust.training.settings import Settings, from_dict


def build(chosen: Settings, data: Data) -> nn.Module:
    """The network of the settings for these images.

    Raises:
        ValueError: Naming the model, if there is none of that name.
    """
    return _build(chosen, data.classes, data.input_shape[0], data.mean, data.std)


def _build(
    chosen: Settings, classes: int, inputs: int, mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    if chosen.model not in MODELS:
        raise ValueError(f"unknown model {chosen.model!r}; there are {', '.join(MODELS)}")
    options: dict[str, Any] = {"classes": classes, "inputs": inputs}
    extra = {n: getattr(chosen, n) for n in ("dropout", "bias") if getattr(chosen, n)}
    if extra and not chosen.model.startswith(("wrn", "preact")):
        raise ValueError(f"{chosen.model} takes no {' and no '.join(extra)}")
    network = MODELS[chosen.model](**options, **extra)
    return normalized(network, mean, std) if chosen.normalize else network


@dataclass(frozen=True)
class Trained:
    """A network on disk.

    Attributes:
        path: Its file.
        settings: Of the run it comes from.
        model: In eval mode.
        input_shape: Of one image.
    """

    path: Path
    settings: Settings
    model: nn.Module
    input_shape: tuple[int, ...]


def load_trained(path: Path) -> Trained:
    """The network of a ``best`` or ``final`` file.

    Raises:
        ValueError: If the file is no such one.
    """
    weights, about = checkpoints.load(path)
    if "classes" not in about:
        raise ValueError(f"{str(path)!r} is a checkpoint; the run's best and final are networks")
    try:
        shape = tuple(int(n) for n in about["input_shape"])
        chosen = from_dict(about["settings"])
        rest = int(about["classes"]), shape[0], about["mean"], about["std"]
        with torch.device("meta"):  # first the sizes: no memory for what does not fit
            _build(chosen, *rest).load_state_dict(weights, assign=True)
        model = _build(chosen, *rest)
        model.load_state_dict(weights)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        first = " ".join(str(error).split())[:200]
        raise ValueError(f"{str(path)!r} describes no network of ours: {first}") from None
    return Trained(path, chosen, model.eval(), shape)


def load_model(path: Path) -> tuple[nn.Module, tuple[int, ...]]:
    """The network of a ``best`` or ``final`` file, in eval mode, and the shape of its input."""
    found = load_trained(path)
    return found.model, found.input_shape
