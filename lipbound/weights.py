"""Read the weights of a network from a file, in the forms that people save.

Nothing from a file is executed: weights are read from safetensors, or from PyTorch files with
``weights_only``. Files that only code could read, such as TorchScript, are refused with the way
out.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from lipbound.files import printable, read_json

if TYPE_CHECKING:
    from torch import Tensor

SAFE = {".safetensors"}
PICKLED = {".pt", ".pth", ".th", ".bin", ".ckpt", ".tar", ".pkl"}
INDEX = ".index.json"  # end of the file that lists the parts of a model saved in several files
EXPORTED = (
    "{!r} is an exported program, and reading it would evaluate expressions from the file. Save "
    "its weights: torch.save(torch.export.load(FILE).state_dict, 'weights.pt')"
)
ONNX = "{!r} is an ONNX program, which has its architecture; leave out --model: lipbound audit FILE"
NUMPY = (
    "{!r} is a NumPy file, which does not say how its axes are ordered. Write its arrays, with "
    "the axes (out, in, *spatial), with torch.save({{name: torch.from_numpy(array)}}, 'weights.pt')"
)
PARTED = (
    "{!r} is a part of a distributed checkpoint. Join its folder: python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt"
)
REFUSED = {".pt2": EXPORTED, ".onnx": ONNX, ".npz": NUMPY, ".npy": NUMPY, ".distcp": PARTED}
"""Recognised, to say what to do instead."""
SIGNS = {
    "is a web page and not the weights; open it in a browser to see why, and download the file "
    "again (on GitHub and Hugging Face with 'raw' or 'resolve' in its address)":
        (b"<!doctype html", b"<html", b"<?xml"),
    "is a Git LFS pointer to the weights; run: git lfs pull": (b"version https://git-lfs",),
    "is compressed; unpack it first, for example with gunzip, unxz or 7z":
        (b"\x1f\x8b", b"\xfd7zxz", b"bzh", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd", b"rar!"),
    "is a pickle that PyTorch did not write; load it where it was made, and write "
    "model.state_dict() with torch.save": (b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    "is an HDF5 file, of Keras for example; copy its weights into a PyTorch model, and save its "
    "state_dict()": (b"\x89hdf",),
}  # fmt: skip
"""What a file is instead of weights → how it begins, in lower case."""
ROOM, MOST = 1 << 28, 16  # tensors may take ROOM bytes, or MOST times the file's size
PARTS = re.compile(r"-(\d{5})-of-(\d{5})\.\w+$")
PARAMETRIZED = re.compile(
    # PyTorch's own old forms end like this, and a public implementation of spectral_norm
    r"(^|\.)(parametrizations\.|\w+_orig$|weight_g$|weight_bar$)"
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
        raise ValueError(f"{str(path)!r} is empty; download or copy it again")
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
    if path.suffix in REFUSED:
        raise ValueError(REFUSED[path.suffix].format(str(path)))
    if path.suffix not in SAFE | PICKLED:
        if path.suffix == ".py":
            raise ValueError(f"{str(path)!r} is code; name a function in it: {path}:FUNCTION")
        known = ", ".join(sorted(SAFE | PICKLED))
        raise ValueError(
            f"cannot read {str(path)!r}; supported formats are {known}; save the weights as one "
            f"of them"
        )
    _refuse_other_content(path)
    content: Any = _safetensors(path) if _is_safetensors(path) else _pickled(path, say)
    tensors = _found(path, content, say)
    if not tensors:
        raise ValueError(f"{str(path)!r} holds no weights{_instead(content)}")
    # A few bytes can describe a tensor of any size whose entries share memory.
    claimed = sum(t.numel() * t.element_size() for t in tensors.values())
    if claimed > max(ROOM, MOST * path.stat().st_size):
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size:,} bytes, but its tensors claim {claimed:,}; "
            f"save them with .contiguous()"
        )
    return tensors


def _refuse_other_content(path: Path) -> None:
    """Raise if the file begins as something else than weights, whatever its name says.

    Raises:
        ValueError: With what the file is, and what to do.
    """
    with path.open("rb") as file:
        start = file.read(300)
    if start[257:262] == b"ustar":
        raise ValueError(f"{str(path)!r} is an archive; unpack it, and name the file with weights")
    low = start.lstrip().lower()
    for what, signs in SIGNS.items():
        if low.startswith(signs):
            raise ValueError(f"{str(path)!r} {what}")
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start):
        shown = shorten(printable(start.decode("ascii").strip()), 60, placeholder=" ...")
        raise ValueError(f"{str(path)!r} is a text file ({shown}); name the file with the weights")


def _is_safetensors(path: Path) -> bool:
    """Tell by the content, because files of both kinds are called ``.bin``."""
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix in SAFE:
        return not start.startswith((b"PK\x03\x04", b"\x80\x02"))  # how torch.save begins
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def _instead(content: Any) -> str:
    """Describe what a file without weights holds."""
    if isinstance(content, Foreign):
        return ", but a pickled object; save model.state_dict()"
    if not isinstance(content, Mapping):
        return f", but a {type(content).__name__}; save model.state_dict()"
    keys = ", ".join(repr(str(key)) for key in list(content)[:3])
    more = " ..." if len(content) > 3 else ""
    return f"; it has {f'only {keys}{more}' if keys else 'no entries'}. Save model.state_dict()"


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
        part = _read(path.with_name(name), say)
        for tensor in part:
            if places.get(tensor) != name:
                where = f"puts it in {places[tensor]!r}" if tensor in places else "does not list it"
                raise ValueError(
                    f"{name!r} holds {tensor!r}, and {str(path)!r} {where}; download or save the "
                    f"model again"
                )
        found |= part
    lost = [name for name in places if name not in found]
    if lost:
        raise ValueError(
            f"{str(path)!r} lists {lost[0]!r}, which {places[lost[0]]!r} does not hold; download "
            f"or save the model again"
        )
    more = _unnamed_part(path, places.values())
    if more:
        raise ValueError(
            f"{more!r} is beside {str(path)!r}, which does not name it; if it is of another model, "
            f"move it away, otherwise download or save the model again"
        )
    return {name: found[name] for name in places}


def _unnamed_part(path: Path, named: Collection[str]) -> str:
    """Return a file beside the index that has the name of a part, but is not in the index."""
    stems = {PARTS.sub("", name) for name in named if PARTS.search(name)}
    beside = sorted(p.name for p in path.parent.iterdir() if PARTS.search(p.name))
    suffixes = {Path(name).suffix for name in named}
    return next(
        (name for name in beside if name not in named and PARTS.sub("", name) in stems
         and Path(name).suffix in suffixes), "",
    )  # fmt: skip


def parametrized(weights: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor from which a weight is computed; empty if there is none."""
    return next((k for k in weights if PARAMETRIZED.search(k) or _is_magnitude(k, weights)), "")


def _is_magnitude(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Tell whether a tensor is what ``weight_norm`` of any parameter multiplies directions with."""
    size, direction = weights[name], weights.get(name.removesuffix("_g") + "_v")
    if not name.endswith("_g") or direction is None or size.is_nested or direction.is_nested:
        return False
    return size.ndim in (0, direction.ndim) and size.numel() == max(size.shape, default=1)


class Foreign:
    """Stands for an object of a class that is not read: it takes anything and does nothing."""

    def __new__(cls, *values: Any, **named: Any) -> Any:
        """Make one from any arguments."""
        return super().__new__(cls)

    def __init__(self, *values: Any, **named: Any) -> None:
        """Forget the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Forget the state."""


class ForeignMapping:
    """Stands for an object of a class of mappings, whose items the reader sets."""

    def __new__(cls, *values: Any) -> Any:
        """Make an ``OrderedDict``, marked by an entry; the reader sets items of no other type."""
        return OrderedDict({None: Foreign()})


def _pickled(path: Path, say: Say) -> Any:
    """Load a PyTorch file without running code from it.

    Objects beside the weights, such as an ``argparse.Namespace``, become :class:`Foreign`.

    Raises:
        ValueError: If it holds objects in place of weights, or is damaged.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    others: list[str] = []
    try:
        _refuse_program(path)
        if zipfile.is_zipfile(path):
            others = sorted(get_unsafe_globals_in_checkpoint(path))
        standing: list[Any] = [
            (ForeignMapping if name.lower().endswith("dict") else Foreign, name) for name in others
        ]
        with warnings.catch_warnings(action="ignore"), safe_globals(standing), path.open("rb") as f:
            content = torch.load(f, map_location="cpu", weights_only=True)
    except _Refused as refused:
        raise ValueError(str(refused)) from None
    except Exception as error:  # a damaged file may raise any exception
        named = re.search(r"GLOBAL \S+", str(error))  # the object it refers to
        if named:
            raise ValueError(_objects(path, named[0])) from None
        first = shorten(str(error).strip().partition("\n")[0], 120, placeholder=" ...")
        raise ValueError(
            f"{str(path)!r} is damaged, or no file of weights ({type(error).__name__} {first}); "
            f"none of its code was run. Download or copy it again, or save model.state_dict()"
        ) from None
    if others and not _found(path, content, silent):
        raise ValueError(_objects(path, f"GLOBAL {others[0]}"))
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        say(f"ignored objects beside the weights ({others[0]}{more}); none of their code was run")
    return content


def _objects(path: Path, said: str) -> str:
    return (
        f"{str(path)!r} holds objects other than weights ({said}); none of its code was run. Save "
        f"model.state_dict(), preferably as safetensors"
    )


class _Refused(ValueError):
    """Raised for a file that does not hold the weights, or not clearly."""


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
    if not any(name.endswith("/data.pkl") for name in names):
        raise _Refused(f"{str(path)!r} is an archive; unpack it, and name the file with weights")
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
        raise ValueError(
            f"{str(path)!r} is not a complete safetensors file ({error}); download or copy it again"
        ) from None


def _found(path: Path, content: Any, say: Say) -> dict[str, Tensor]:
    """Find the tensors in what a file holds.

    Raises:
        ValueError: If it is not clear which ones are the weights.
    """
    try:
        return _tensors(content, say)
    except _Refused as refused:
        raise ValueError(f"{str(path)!r} {refused}") from None
    except RecursionError:
        raise ValueError(
            f"{str(path)!r} has too many mappings inside one another; save model.state_dict()"
        ) from None


def _tensors(content: Any, say: Say) -> dict[str, Tensor]:
    """Find the tensors in what a file holds; a mapping that has none is searched for others.

    Raises:
        _Refused: If two tensors have one name, or if tensors and mappings of them are mixed.
    """
    from torch import Tensor

    if isinstance(content, Tensor):
        return {"weight": content}
    if not isinstance(content, Mapping) or None in content:
        return {}
    inner = {
        str(key): value for key, value in content.items()
        if isinstance(value, Mapping) and isinstance(key, str)  # an optimizer's keys are numbers
        and (key in NESTED or any(isinstance(t, Tensor) for t in value.values()))
        and None not in value and any(_inside(value))
    }  # fmt: skip
    own = _united((str(name), t) for name, t in content.items() if isinstance(t, Tensor))
    known = [key for key in NESTED if key in inner]
    wide = [name for name, t in own.items() if t.ndim > 1]
    deep = [key for key, value in inner.items() if any(t.ndim > 1 for _, t in _inside(value))]
    if wide and deep:
        raise _Refused(
            f"holds the tensor {wide[0]!r} beside others under {deep[0]!r}; save all weights of "
            f"the network in one mapping, as model.state_dict() does, and nothing beside it"
        )
    if (own and not deep and (wide or not known)) or not inner:
        # An object in place of a tensor could be a weight that would silently be missing.
        if any(isinstance(value, Foreign) for value in content.values()):
            return {}
        rest = {key: t for key, t in content.items() if not isinstance(t, Tensor)}
        found = own
    elif known or len(inner) == 1:
        name = known[0] if known else next(iter(inner))
        others = [key for key in inner if key != name]
        if others or not known:
            more = f", not under {', '.join(map(repr, others))}" if others else ""
            say(f"took the weights under {name!r}{more}")
        rest = {key: value for key, value in content.items() if key not in inner}
        found = _tensors(inner[name], say)
    else:
        say(f"joined the weights under {', '.join(map(repr, inner))}")
        rest = {key: value for key, value in content.items() if key not in inner}
        found = _united(
            (f"{prefix}.{name}", tensor)
            for prefix, value in inner.items()
            for name, tensor in _tensors(value, say).items()
        )
    left = [name for name, tensor in _inside(rest) if tensor.ndim > 0] if found else []
    if left:
        say(f"left out {len(left)} other tensors such as {left[0]!r}")
    return found


def _united(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by name.

    Raises:
        _Refused: If two have the same name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        if name in found:
            raise _Refused(f"holds two tensors of the name {name!r}; give each a name of its own")
        found[name] = tensor
    return found


def _inside(content: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors at any depth with their names, except those of an optimizer's state."""
    from torch import Tensor

    left, seen = [("", content)], set()
    while left:
        name, value = left.pop()
        if isinstance(value, Tensor):
            yield name, value
        elif id(value) not in seen:
            seen.add(id(value))  # a mapping can be in many others, and in itself
            if isinstance(value, Mapping):
                optimizer = {"state", "param_groups"} if "param_groups" in value else set()
                within = [(key, one) for key, one in value.items() if key not in optimizer]
            else:
                many = isinstance(value, list | tuple | set | frozenset)
                within = list(enumerate(value)) if many else []
            left += [(f"{name}.{key}" if name else str(key), one) for key, one in within[::-1]]
