"""Load the model, or the weights without a model, that the command line names.

Only ``--model package.module:factory`` runs code from outside this package: the user's factory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lipbound.files import PICKLED, SAFE, read_weights
from lipbound.robust.models import MODELS, digits
from lipbound.robust.training import checkpoints
from lipbound.robust.training.trained import load_trained


def network_or_weights(source: str, model: str | None) -> tuple[Any, tuple[int, ...] | None, str]:
    """Return the model to audit or only its weights, its usual input shape, and a title."""
    known = digits.network() if source == "demo" else own_model(source)
    if known is not None and model is not None:
        raise ValueError(f"--model {model} is for a weights file, not for {source!r}; leave it out")
    if source == "demo":
        return known, digits.INPUT_SHAPE, "the embedded digits CNN"
    if known is not None:
        return known, _usual(source), f"{source}, random weights"
    path = Path(source)
    if path.suffix not in SAFE | PICKLED and not path.exists():
        raise ValueError(
            f"cannot audit {source!r}: it is neither a weights file nor a known model; use 'demo', "
            f"a .safetensors or .pt file (give its architecture with --model module:factory), "
            f"resnet20, torchvision:NAME or timm:NAME"
        )
    if model is None:
        return trained(path) or (read_weights(path), None, path.name)
    network = own_model(model)
    network = factory(model) if network is None else network
    filled = fill(network, read_weights(path))
    return filled, _usual(model), f"{model}, {path.name}"


def _usual(name: str) -> tuple[int, ...] | None:
    if ":" not in name:
        return (3, 32, 32)
    return (3, 224, 224) if name.startswith(("torchvision:", "timm:")) else None


def trained(path: Path) -> tuple[nn.Module, tuple[int, ...], str] | None:
    """Return the network that ``lipbound train`` wrote to this file, its input shape, a title."""
    about = checkpoints.about(path) if path.suffix in SAFE and path.is_file() else None
    if about is None or "classes" not in about:
        return None
    found = load_trained(path)
    title = f"{found.settings.model}, {found.settings.arm}, {path.name}"
    return found.model, found.input_shape, title


def own_model(name: str) -> nn.Module | None:
    """Return a network of lipbound, torchvision or timm by name; ``None`` for other names."""
    if name in MODELS:
        return MODELS[name]()
    library, _, kind = name.partition(":")
    if library not in ("torchvision", "timm") or not kind:
        return None
    try:
        package = importlib.import_module(
            "torchvision.models" if library == "torchvision" else library
        )
    except Exception as error:
        raise ValueError(f"cannot import {library} ({error}); install it first") from None
    try:
        if library == "timm":
            return package.create_model(kind, pretrained=False)
        return package.get_model(kind, weights=None)
    except Exception as error:
        raise ValueError(f"{library} has no model {kind!r}: {error}") from None


def factory(path: str) -> nn.Module:
    """Import ``package.module:factory``, also from the current folder, and call the factory."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name or module.endswith(".py"):
        like = f"; write {module[:-3]}:{name}" if module.endswith(".py") and name else ""
        raise ValueError(f"--model {path!r} is not of the form package.module:factory{like}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(importlib.import_module(module), name)()
    except (Exception, SystemExit) as error:
        raise ValueError(f"--model {path!r}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {path!r} returned a {type(model).__name__}, not an nn.Module")
    return model


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Load the weights into the model; names and shapes must all match."""
    stripped = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    try:
        missing, unexpected = model.load_state_dict(stripped, strict=False)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: {lines[1].strip()}"
        ) from None
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    for kind, names in (("lack", missing), ("have, but the model lacks,", unexpected)):
        if names:
            shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            raise ValueError(
                f"the weights do not fit {type(model).__name__}: they {kind} {len(names)} "
                f"tensor(s): {shown}"
            )
    return model
