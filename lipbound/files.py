"""Files: atomic writes, records of one JSON object a line, and weights that are read safely.

A file is written whole or not at all, whatever kills the process. Weights are read, never executed:
safetensors, or PyTorch files with ``weights_only``. PyTorch is imported only to read them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import unicodedata
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: the whole of it, or what was there before.

    It is written under another name, flushed to the disk and renamed. What killed processes left
    of earlier attempts goes. A link stays one, and its target is written; a pipe or a device is
    written to as it is.

    Raises:
        OSError: Naming the file; nothing half-written stays behind.
    """
    path = _target(path)
    if path.exists() and not path.is_file():
        try:
            path.write_bytes(content)
        except OSError as error:
            raise _refusal(path, error) from None
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _flush_name(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise _refusal(path, error) from None
    clean(path.parent, path.name)


def clean(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left of files they were writing; those that still run keep it.

    Args:
        folder: Where to look.
        name: Of the file; all by default.
    """
    for rest in folder.glob(f".{name if name == '*' else _literal(name)}.*.part"):
        if not _running(rest.name.split(".")[-2]):
            rest.unlink(missing_ok=True)


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a record as a line of JSON at the end: all of it, or nothing.

    A last line that a kill cut off goes first, so that the new one stands by itself.

    Raises:
        OSError: Naming the file; what was there before stays.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two processes may share the file
            end, line = _end_of_lines(file), (json.dumps(record) + "\n").encode()
            file.seek(end)
            if whole_json(file.read()) is not None:  # written by hand, without its end
                end, line = file.tell(), b"\n" + line
            try:
                file.truncate(end)
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise _refusal(path, error) from None


def rewrite(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a file of records by these, in one go."""
    write(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def whole_json(text: bytes | str) -> dict[str, Any] | None:
    """The object, if it is a whole one; no part of a line of JSON is."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: Naming the file, if there is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is no JSON ({error}); remove it") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} holds no JSON object; remove it")
    return found


SAFE = {".safetensors"}
PICKLED = {".pt", ".pth", ".bin", ".ckpt"}


def check_file(path: Path) -> None:
    """Whether there is such a file.

    Raises:
        ValueError: Saying what is there instead.
    """
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in SAFE | PICKLED)
        raise ValueError(
            f"{str(path)!r} is a folder; name a weights file"
            + (f" in it: {', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''}" if inside
               else f" instead; this folder holds none ({', '.join(sorted(SAFE | PICKLED))})")
        )  # fmt: skip
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")


def check_writable(*paths: Path | None) -> None:
    """Refuse, before the work is done, what could not be written after it.

    Raises:
        OSError: Naming the first such file.
    """
    for path in paths:
        if path is None:
            continue
        path = _target(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            if path.is_dir():
                raise IsADirectoryError(21, "it is a folder")
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(13, "it is read-only")
            if path.exists() and not path.is_file():  # a pipe, say
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
            part.unlink()
        except OSError as error:
            raise _refusal(path, error) from None


def _target(path: Path) -> Path:
    """Where a link leads."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _end_of_lines(file: Any) -> int:
    """Where the last whole line ends."""
    size, block = file.seek(0, os.SEEK_END), 1 << 16
    for start in range((size - 1) // block * block, -1, -block):
        file.seek(start)
        found = file.read(min(block, size - start)).rfind(b"\n")
        if found >= 0:
            return start + found + 1
    return 0


def _flush_name(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:
        pass  # it runs, and is another user's
    return True


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _refusal(path: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(f"cannot write {str(path)!r}: {reason}; what was there before stays")


def provenance(device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """What every record says of where it was made."""
    import torch

    from lipbound import __version__

    cuda = device.startswith("cuda")
    return {
        "seed": seed,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lipbound": __version__,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file; none if it does not exist yet.

    A last line without its end is one that a kill cut off: it was never a record.

    Raises:
        ValueError: If a line is no JSON object.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    last = whole_json(rest)
    return [*(_record(path, i, line) for i, line in enumerate(lines, 1)), *([last] if last else [])]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: {error}; remove the line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: no JSON object; remove the line")
    return record


def printable(text: str) -> str:
    r"""The text with control characters spelled out: a name cannot speak to the terminal.

    Example:
        >>> print(printable("conv\x1b[2J"))
        conv\x1b[2J
    """
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, directions, lone surrogates, line ends
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in hidden else c
        for c in text
    )


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
    import torch

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
    from torch import Tensor

    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if isinstance(content, Tensor):
        return {"weight": content}
    if not isinstance(content, Mapping):
        return {}
    return {str(name): t for name, t in content.items() if isinstance(t, Tensor)}
