"""Read the weights of a network from a file, in the forms that people save.

Nothing from a file is executed: weights are read from safetensors, or from PyTorch files with
``weights_only``. Files that only code could read, such as TorchScript, are refused with the way
out.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from lipbound.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

SAFE = {".safetensors"}
PICKLED = {".pt", ".pth", ".th", ".bin", ".ckpt", ".tar", ".pkl"}
INDEX = ".index.json"  # end of the file that lists the parts of a model saved in several files
EXPORTED = (
    "{!r} is an exported program, and reading it would evaluate expressions from the file. Save "
    "its weights: torch.save(torch.export.load(FILE).state_dict, 'weights.pt')"
)
ONNX = (
    "{!r} is an ONNX program. Write a function that returns it as an nn.Module, for example "
    "with onnx2torch.convert(FILE), and audit that: lipbound audit FILE.py:FUNCTION"
)
REFUSED = {".pt2": EXPORTED, ".onnx": ONNX}  # recognised, to say what to do instead
ROOM, MOST = 1 << 28, 16  # tensors may take ROOM bytes, or MOST times the file's size
PARTS = re.compile(r"-(\d{5})-of-(\d{5})\.\w+$")
PARAMETRIZED = re.compile(
    r"\.parametrizations\.|\.weight_orig$|\.weight_g$"  # torch's own old forms end like this
)
NESTED = (
    "state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params",
    "ema_state_dict", "model_ema", "ema", "params_ema",
)  # fmt: skip
"""Keys under which programs save the weights, the one to prefer first."""

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Say nothing."""


def is_weights(path: Path) -> bool:
    """Tell by the name whether a file holds weights."""
    return path.suffix in SAFE | PICKLED | REFUSED.keys() or path.name.endswith(INDEX)


def check_file(path: Path) -> None:
    """Check that the file exists.

    Raises:
        ValueError: If it does not exist, or is a folder.
    """
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if is_weights(p))
        inside.sort(key=lambda name: not name.endswith(INDEX))
        raise ValueError(
            f"{str(path)!r} is a folder; name a weights file"
            + (f" in it: {', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''}" if inside
               else f" instead; this folder holds none ({', '.join(sorted(SAFE | PICKLED))})")
        )  # fmt: skip
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")


def read_weights(path: Path, say: Say = silent) -> dict[str, Tensor]:
    """Read the tensors of a file by name, also from a nested ``state_dict`` or ``model``.

    Args:
        path: The file. For a model in several files, their index.
        say: Receives a line about each choice that was made.

    Raises:
        ValueError: If the file cannot be read. The message gives the reason.
    """
    check_file(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{str(path)!r} is empty")
    if path.name.endswith(INDEX):
        return _joined(path, say)
    part = PARTS.search(path.name)
    if part and int(part[2]) > 1:
        index = path.name[: part.start()] + path.suffix + INDEX
        raise ValueError(
            f"{str(path)!r} is part {int(part[1])} of {int(part[2])} of a model; name the index, "
            f"{str(path.with_name(index))!r}"
        )
    return _read(path, say)


def _read(path: Path, say: Say) -> dict[str, Tensor]:
    if path.suffix in SAFE:
        content: Any = _safetensors(path)
    elif path.suffix in PICKLED:
        content = _pickled(path)
    elif path.suffix in REFUSED:
        raise ValueError(REFUSED[path.suffix].format(str(path)))
    else:
        known = ", ".join(sorted(SAFE | PICKLED))
        raise ValueError(f"cannot read {str(path)!r}; supported formats are {known}")
    tensors = _tensors(content, say)
    if not tensors:
        raise ValueError(f"{str(path)!r} holds no tensors")
    # A few bytes can describe a tensor of any size whose entries share memory.
    claimed = sum(t.numel() * t.element_size() for t in tensors.values())
    if claimed > max(ROOM, MOST * path.stat().st_size):
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size:,} bytes, but its tensors claim {claimed:,}; "
            f"save them with .contiguous()"
        )
    return tensors


def _joined(path: Path, say: Say) -> dict[str, Tensor]:
    """Read a model in several files, which are beside their index."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise ValueError(f"{str(path)!r} has no 'weight_map' from names to files")
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{str(path)!r} names the file {name!r}, which is not beside it")
        check_file(path.with_name(name))
        found |= _read(path.with_name(name), say)
    lost = [name for name in places if name not in found]
    if lost:
        raise ValueError(
            f"{str(path)!r} lists {lost[0]!r}, which {places[lost[0]]!r} does not hold"
        )
    return {name: found[name] for name in places}


def parametrized(weights: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor from which a weight is computed; empty if there is none."""
    return next((name for name in weights if PARAMETRIZED.search(name)), "")


def _pickled(path: Path) -> Any:
    """Load a PyTorch file without running code from it.

    Raises:
        ValueError: If it holds objects other than weights, or is damaged.
    """
    import torch

    try:
        _refuse_program(path)
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except _Refused as refused:
        raise ValueError(str(refused)) from None
    except Exception as error:  # a damaged file may raise any exception
        named = re.search(r"GLOBAL \S+", str(error))  # the object it refers to
        first = shorten(str(error).strip().partition("\n")[0], 120, placeholder=" ...")
        said = named[0] if named else f"{type(error).__name__} {first}".strip()
        raise ValueError(
            f"{str(path)!r} holds objects other than weights, or is damaged ({said}); none of "
            f"its code was run. Save model.state_dict(), preferably as safetensors"
        ) from None


class _Refused(ValueError):
    """Raised for an archive that is not one of weights."""


def _refuse_program(path: Path) -> None:
    """Raise :class:`_Refused` for TorchScript, for an exported program, and for an archive bomb."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    names = ["/" + member.filename for member in members]
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise _Refused(
            f"{str(path)!r} is a TorchScript program, and reading it would run its code. Save its "
            f"weights: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"
        )
    exported = ("/archive_format", "/serialized_exported_program.json")
    if any(name.endswith(exported) for name in names):
        raise _Refused(EXPORTED.format(str(path)))
    size = sum(member.file_size for member in members)
    if size > path.stat().st_size:
        raise _Refused(
            f"{str(path)!r} has {path.stat().st_size:,} bytes and unpacks to {size:,}; PyTorch "
            f"does not compress its files, so it is refused. Save it again with torch.save"
        )


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError("reading safetensors needs: pip install 'lipbound[cli]'") from None
    try:
        return load_file(path)
    except Exception as error:
        raise ValueError(f"{str(path)!r} is not a complete safetensors file: {error}") from None


def _tensors(content: Any, say: Say) -> dict[str, Tensor]:
    """Find the tensors in what a file holds; a mapping that has none is searched for others."""
    from torch import Tensor

    if isinstance(content, Tensor):
        return {"weight": content}
    if not isinstance(content, Mapping):
        return {}
    inner = {
        str(key): value for key, value in content.items()
        if isinstance(value, Mapping) and _tensors(value, silent)
    }  # fmt: skip
    known = [key for key in NESTED if key in inner]
    if known:
        others = [key for key in inner if key != known[0]]
        if others and known[0] not in ("state_dict", "model_state_dict"):
            say(f"took the weights under {known[0]!r}, not under {', '.join(map(repr, others))}")
        return _tensors(inner[known[0]], say)
    return {str(name): t for name, t in content.items() if isinstance(t, Tensor)}
