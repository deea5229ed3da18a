"""Networks of training runs: built from settings, and read from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipbound.registry import unknown
from lipbound.robust.data.sets import Data
from lipbound.robust.models import MODELS, normalized
from lipbound.robust.models.shift import CertifiedNetwork
from lipbound.robust.training import checkpoints
from lipbound.robust.training.settings import PRESETS, Settings, from_dict


def build(chosen: Settings, data: Data) -> nn.Module:
    """Build the network of the settings for a data set.

    Raises:
        ValueError: If the model is unknown, is made for images of another size, or does not
            support an option.
    """
    _check_size(chosen.model, data.input_shape)
    return _build(chosen, data.classes, data.input_shape[0], data.mean, data.std)


def _check_size(model: str, shape: tuple[int, ...]) -> None:
    made = _made_for(model)
    if made[1:] in ((), shape[1:]):
        return
    fit = [
        f"--preset {name} or --model {changes['model']}"
        for name, changes in PRESETS.items()
        if _made_for(changes["model"])[1:] == shape[1:]
    ]
    raise ValueError(
        f"model {model!r} takes {_images(made)}, but the data has {_images(shape)}; use "
        f"{fit[0] if fit else 'a model of that size'}"
    )


def _made_for(model: str) -> tuple[int, ...]:
    """Return the shape of the images for which a model is made; empty if it takes any size."""
    maker = MODELS.get(model)
    kind = maker.func if isinstance(maker, partial) else maker
    if maker is None or not (isinstance(kind, type) and issubclass(kind, CertifiedNetwork)):
        return ()
    options = signature(maker).parameters
    names = ("inputs", "size", "size")
    return tuple(options[name].default for name in names) if {*names} <= options.keys() else ()


def _images(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{height}×{width} images of {channels} channel{'s' if channels > 1 else ''}"


def extras(chosen: Settings) -> dict[str, Any]:
    """Return the options of the network that the settings change."""
    return {n: getattr(chosen, n) for n in ("dropout", "bias") if getattr(chosen, n)}


def _build(
    chosen: Settings, classes: int, inputs: int, mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    if chosen.model not in MODELS:
        raise unknown("model", chosen.model, MODELS)
    options: dict[str, Any] = {"classes": classes, "inputs": inputs}
    extra = extras(chosen)
    if extra and not chosen.model.startswith(("wrn", "preact")):
        raise ValueError(
            f"model {chosen.model!r} does not support {' and '.join(extra)}; leave it out or use a "
            f"wrn or preact model"
        )
    network = MODELS[chosen.model](**options, **extra)
    return normalized(network, mean, std) if chosen.normalize else network


@dataclass(frozen=True)
class Trained:
    """A trained network that was read from disk.

    Attributes:
        path: File of the network.
        settings: Settings of the training run; ``None`` for a network of another training.
        model: The network, in eval mode and in the precision of its training.
        input_shape: Shape of one image.
        name: Name of the architecture.
    """

    path: Path
    settings: Settings | None
    model: nn.Module
    input_shape: tuple[int, ...]
    name: str = ""

    @property
    def names(self) -> dict[str, str]:
        """Return what a record says of the network."""
        arm = self.settings.arm if self.settings else ""
        model = self.settings.model if self.settings else self.name
        return {"checkpoint": self.path.name, "arm": arm, "model": model}


def load_trained(path: Path) -> Trained:
    """Load the network of a ``best`` or ``final`` file.

    Raises:
        ValueError: If the file is not a network written by ``lipbound train``.
    """
    try:
        weights, about = checkpoints.load(path)
    except ValueError as error:
        raise ValueError(
            f"{error}; use an intact best.safetensors or final.safetensors of lipbound train; "
            f"for another network give its architecture with --model, for example "
            f"--model path/to/file.py:FACTORY"
        ) from None
    if "classes" not in about:
        raise ValueError(f"{str(path)!r} is a checkpoint; use best or final.safetensors")
    try:
        shape = tuple(int(n) for n in about["input_shape"])
        chosen = from_dict(about["settings"])
        rest = int(about["classes"]), shape[0], about["mean"], about["std"]
        with torch.device("meta"):  # checks the sizes before memory is allocated
            _build(chosen, *rest).load_state_dict(weights, assign=True)
        model = _build(chosen, *rest).to(chosen.dtype)
        model.load_state_dict(weights)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        first = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{str(path)!r} is not a network written by lipbound train: {first}"
        ) from None
    return Trained(path, chosen, model.eval(), shape)


def load_model(path: Path) -> tuple[nn.Module, tuple[int, ...]]:
    """Load the network of a ``best`` or ``final`` file, and its input shape.

    The network is in eval mode and takes float32 images, or float64 ones if it was trained so.
    """
    found = load_trained(path)
    return found.model, found.input_shape
