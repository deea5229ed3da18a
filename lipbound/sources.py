"""From what a user names on the command line to a model, or to weights alone.

Files are read, never executed: safetensors, or PyTorch files with ``weights_only``. Only
``--model package.module:factory`` runs code, the user's own, named by the user.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.files import PICKLED, SAFE, check_file

ROOM, MOST = 1 << 28, 16  # bytes that tensors may take whatever the file's size, and times that


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; nested state dicts (``state_dict``, ``model``) are opened.

    Raises:
        ValueError: Saying what is wrong with the file.
    """
    check_file(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{str(path)!r} is empty")
    if path.suffix in SAFE:
        content: Any = _safetensors(path)
    elif path.suffix in PICKLED:
        content = _pickled(path)
    else:
        known = ", ".join(sorted(SAFE | PICKLED))
        raise ValueError(f"cannot read {str(path)!r}; weights come as {known}")
    tensors = _tensors(content)
    if not tensors:
        raise ValueError(f"{str(path)!r} holds no tensors")
    # A few bytes may stand for a tensor of any size: every entry the same one.
    claimed = sum(t.numel() * t.element_size() for t in tensors.values())
    if claimed > max(ROOM, MOST * path.stat().st_size):
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size:,} bytes, but its tensors claim {claimed:,}; "
            f"save them with .contiguous()"
        )
    return tensors


def _pickled(path: Path) -> Any:
    """What PyTorch reads of a file of its own without executing any of it.

    Raises:
        ValueError: If it holds more than weights, or is damaged.
    """
    try:
        _refuse_bomb(path)
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except _Bomb:
        raise
    except Exception as error:  # a damaged file may end in any
        named = re.search(r"GLOBAL \S+", str(error))  # what it would have called
        first = shorten(str(error).strip().partition("\n")[0], 120, placeholder=" ...")
        said = named[0] if named else f"{type(error).__name__} {first}".strip()
        raise ValueError(
            f"{str(path)!r} holds more than weights, or is damaged ({said}); nothing of "
            f"it was run. Save model.state_dict(), as safetensors if you can"
        ) from None


class _Bomb(ValueError):
    """An archive that grows."""


def _refuse_bomb(path: Path) -> None:
    """PyTorch stores without compression: an archive that grows when it is opened is none of its.

    Raises:
        ValueError: If it would.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > path.stat().st_size:
        raise _Bomb(
            f"{str(path)!r} has {path.stat().st_size:,} bytes and unpacks to {size:,}; PyTorch "
            f"does not compress its files, so it is refused. Save it again with torch.save"
        )


def trained(path: Path) -> tuple[nn.Module, tuple[int, ...], str] | None:
    """The network ``lipbound train`` wrote to this file, its input shape and a title."""
    from lipbound.robust import checkpoints
    from lipbound.robust.trained import load_trained

    about = checkpoints.about(path) if path.suffix in SAFE and path.is_file() else None
    if about is None or "classes" not in about:
        return None
    found = load_trained(path)
    title = f"{found.settings.model}, {found.settings.arm}, {path.name}"
    return found.model, found.input_shape, title


def own_model(name: str) -> nn.Module | None:
    """One of this package's networks, or of torchvision's or timm's; ``None`` if it is no name."""
    from lipbound.robust.models import MODELS

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
        raise ValueError(f"{library} does not import here ({error}); install it first") from None
    try:
        if library == "timm":
            return package.create_model(kind, pretrained=False)
        return package.get_model(kind, weights=None)
    except Exception as error:
        raise ValueError(f"{library} has no model {kind!r}: {error}") from None


def factory(path: str) -> nn.Module:
    """``package.module:factory`` called without arguments; the current folder is importable."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name or module.endswith(".py"):
        like = f"; write {module[:-3]}:{name}" if module.endswith(".py") and name else ""
        raise ValueError(f"--model {path!r} is not package.module:factory{like}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(importlib.import_module(module), name)()
    except (Exception, SystemExit) as error:
        raise ValueError(f"--model {path!r}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {path!r} gave a {type(model).__name__}, not an nn.Module")
    return model


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Load the weights; all of them must fit."""
    stripped = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    try:
        missing, unexpected = model.load_state_dict(stripped, strict=False)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: {lines[1].strip()}"
        ) from None
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    for kind, names in (("lack", missing), ("have, and the model lacks,", unexpected)):
        if names:
            shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            raise ValueError(
                f"the weights do not fit {type(model).__name__}: they {kind} {len(names)} "
                f"tensor(s): {shown}"
            )
    return model


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError("reading safetensors needs: pip install 'lipbound[cli]'") from None
    try:
        return load_file(path)
    except Exception as error:
        raise ValueError(f"{str(path)!r} is no complete safetensors file: {error}") from None


def _tensors(content: Any) -> dict[str, Tensor]:
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if isinstance(content, Tensor):
        return {"weight": content}
    if not isinstance(content, Mapping):
        return {}
    return {str(name): t for name, t in content.items() if isinstance(t, Tensor)}
