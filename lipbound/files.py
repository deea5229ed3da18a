"""Atomic writes, and records with one JSON object per line.

A file is written completely or not at all, even if the process is killed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import shutil
import threading
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: afterwards it has either the new content or the old one.

    The content is written under another name, flushed to disk and renamed. Partial files of killed
    processes are removed. A link is kept and its target is written; a pipe or a device is written
    directly.

    Raises:
        OSError: If the file cannot be written. No partial file is left behind.
    """
    path = _target(path)
    if path.exists() and not path.is_file():
        try:
            path.write_bytes(content)
        except OSError as error:
            raise _refusal(path, error) from None
        return
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
        _flush_name(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise _refusal(path, error) from None
    clean(path.parent, path.name)


def clean(folder: Path, name: str = "*") -> None:
    """Remove partial files of killed processes; those of running processes are kept.

    Args:
        folder: Folder to search.
        name: Name of the file that was being written; all files by default.
    """
    for rest in folder.glob(f".{name if name == '*' else glob.escape(name)}.*.part"):
        if not _running(rest.name.split(".")[-2].split("-")[0]):
            with contextlib.suppress(OSError):
                rest.unlink(missing_ok=True)


def append(path: Path, record: dict[str, Any]) -> None:
    """Append a record as one line of JSON: all of it, or nothing.

    An incomplete last line, left by a killed process, is removed first.

    Raises:
        OSError: If the file cannot be written. Its old records are kept.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two processes may share the file
            end, line = _end_of_lines(file), (json.dumps(record) + "\n").encode()
            file.seek(end)
            if whole_json(file.read()) is not None:  # a complete record without newline
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
    """Replace a file of records atomically."""
    write(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def whole_json(text: bytes | str) -> dict[str, Any] | None:
    """Parse a complete JSON object; return ``None`` for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: If the file does not hold a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}); remove it") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} does not hold a JSON object; remove it")
    return found


def check_writable(*paths: Path | None) -> None:
    """Check before a long computation that its output files can be written.

    Raises:
        OSError: If one cannot be written. The message names the first such file.
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
            if path.exists() and not path.is_file():  # for example a pipe
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
            part.unlink()
        except OSError as error:
            raise _refusal(path, error) from None


def _target(path: Path) -> Path:
    """Resolve a symbolic link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _end_of_lines(file: Any) -> int:
    """Offset at which the last complete line ends."""
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
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, OSError):
        pass  # no process of ours wrote it, or it runs and belongs to another user
    return True


def _refusal(path: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(f"cannot write {str(path)!r}: {reason}; its old content is unchanged")


def provenance(device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Describe the software and hardware, for every record."""
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
    """Read all records of a file; return an empty list if it does not exist.

    An incomplete last line, left by a killed process, is ignored.

    Raises:
        ValueError: If a line is not a JSON object.
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
        raise ValueError(f"{path}, line {number}: not a JSON object; remove the line")
    return record


def printable(text: str) -> str:
    r"""Escape control characters, so that a name cannot send commands to the terminal.

    Example:
        >>> print(printable("conv\x1b[2J"))
        conv\x1b[2J
    """
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, directions, lone surrogates, line ends
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in hidden else c
        for c in text
    )
