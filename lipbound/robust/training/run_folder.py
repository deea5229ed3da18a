"""The folder of a run: settings, checkpoints, weights and records, locked for one run."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from weakref import WeakSet

import torch
from torch import Tensor

from lipbound.files import append, clean, read, read_json, rewrite, write
from lipbound.robust.training import checkpoints
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.settings import decisive, filled

_held: WeakSet[IO[str]] = WeakSet()


def _let_go() -> None:
    for file in list(_held):
        file.close()


# A forked process (a worker that loads images) must not keep the lock if its parent is killed.
os.register_at_fork(after_in_child=_let_go)


def lock(path: Path) -> IO[str] | None:
    """Lock a file while the result is open; return ``None`` if another process has locked it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    _held.add(file)
    return file


class RunFolder:
    """The files of a run. Only the first process reads and writes them, and tells the others.

    Args:
        root: Path of the folder on the first process's machine.
        who: The processes of the run; by default this one alone.
    """

    def __init__(self, root: Path, who: Team | None = None):
        self.root, self.who = root, who or Team(torch.device("cpu"))
        self.writes = self.who.first
        self.checkpoints = checkpoints.Folder(root / "checkpoints")
        self.records = root / "records.jsonl"
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        self.who.at_first(self._take)
        return self

    def _take(self) -> None:
        try:
            self._lock = lock(self.root / ".lock")
        except OSError as error:
            said = "it is a file, not a folder" if self.root.is_file() else error.strerror
            raise OSError(f"cannot write in {str(self.root)!r}: {said}") from None
        if self._lock is None:
            raise ValueError(f"another run is using {str(self.root)!r}; choose another folder")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def open(
        self, settings: dict[str, Any], resume: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """Return the state to continue from, or ``None``.

        A process that ``torchrun --max-restarts`` started again continues by itself.

        Raises:
            ValueError: If the folder holds a run with other settings, or ``resume`` is not set.
        """
        state = self.who.at_first(lambda: self._opened(settings, resume))
        rest = self.who.told(state and state[1:])
        if rest is None:
            return None
        return self.who.received(state[0] if state else {}), *rest

    def _opened(
        self, settings: dict[str, Any], resume: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        path, launcher = self.root / "settings.json", self.root / ".launcher"
        there = path.exists() or bool(self.checkpoints.all())
        own = str(os.getppid())  # torchrun, which is the same after a restart
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and launcher.exists():
            resume = resume or launcher.read_text() == own
        if there and not resume:
            raise ValueError(
                f"{str(self.root)!r} already holds a run; add --resume to continue, or change --out"
            )
        if path.exists():
            stored = filled(read_json(path))
            for name in decisive({**stored, **settings}):
                mine, theirs = settings.get(name), stored.get(name)
                if mine != theirs:
                    raise ValueError(
                        f"{str(self.root)!r} holds another run: its {name} is {theirs!r}, "
                        f"not {mine!r}; use the same settings, or another --out"
                    )
        else:
            write(path, json.dumps(settings, indent=1).encode())
        if "TORCHELASTIC_RESTART_COUNT" in os.environ:
            write(launcher, own.encode())
        clean(self.root)
        return self.checkpoints.newest(settings)

    def cut_records(self, step: int, due: bool = False) -> None:
        """Drop records that will be made again, including this step's if it is ``due``.

        A line that was truncated by a kill is dropped too.
        """
        if self.writes and self.records.exists():
            kept = [r for r in read(self.records) if r.get("step", 0) <= step - due]
            rewrite(self.records, kept)

    def record(self, record: dict[str, Any]) -> None:
        if self.writes:
            append(self.records, record)

    def save(self, step: int, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        if self.writes:
            self.checkpoints.save(step, tensors, about)

    def weights(self, name: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        if self.writes:
            checkpoints.save(self.root / f"{name}.safetensors", tensors, about)

    def load_weights(self, name: str) -> dict[str, Tensor]:
        path = self.root / f"{name}.safetensors"
        return self.who.received(self.who.at_first(lambda: checkpoints.load(path)[0]) or {})

    def finished(self) -> dict[str, Any] | None:
        """Return the summary if the run is complete."""
        path = self.root / "summary.json"
        return self.who.told(self.who.at_first(lambda: read_json(path) if path.exists() else None))

    def finish(self, summary: dict[str, Any]) -> None:
        if self.writes:
            write(self.root / "summary.json", json.dumps(summary, indent=1).encode())
