"""Files that are whole or not there at all, whatever kills the process that writes them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
    for rest in path.parent.glob(f".{_literal(path.name)}.*.part"):
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
