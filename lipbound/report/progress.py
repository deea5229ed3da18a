"""Show how far a long command is: bars on a terminal, else a line at most every 30 seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

EVERY = 30.0  # least number of seconds between two lines
LOOK = 1.0  # seconds between two looks at the clock


@dataclass(eq=False)
class Stage:
    """A part of the work.

    Attributes:
        what: Description of what is counted.
        began: When it began.
        total: How much there is to do; ``None`` if that is not known yet.
        done: How much is done.
        more: Further numbers to show.
        task: Number of its bar on a terminal.
    """

    what: str
    began: float
    total: int | None = None
    done: int = 0
    more: str = ""
    task: Any = None


class Shown:
    """Shows the stages of the work, each inside the one before it.

    Called with items and their description, it yields the items and shows how many are done, see
    :class:`lipbound.runtime.Progress`.

    Args:
        clock: Returns the time in seconds.
        write: Writes a line to standard error.
        watched: Whether a second thread looks at the clock, so that lines also appear during a
            long item.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] | None = None,
        watched: bool = True,
    ):
        self.clock, self.write, self.watched = clock, write or _to_stderr, watched
        self.stages: list[Stage] = []
        self.told = clock()
        self.bars: Any = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to count the time of a command."""
        self.close()
        self.told = self.clock()

    def __call__(self, items: Sequence[T], what: str) -> Iterable[T]:
        stage = self.begin(what, len(items))
        try:
            for item in items:
                yield item
                self.move(stage, stage.done + 1)
        finally:
            self.end(stage)

    def begin(self, what: str, total: int | None = None) -> Stage:
        """Begin a stage and show it."""
        stage = Stage(what, self.clock(), total)
        if not self.stages:
            if sys.stderr.isatty():
                self.bars = _bars()
                self.bars.start()
            elif self.watched and self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        if self.bars is not None:
            stage.task = self.bars.add_task(what, total=total, more="")
        self.stages.append(stage)
        return stage

    def move(self, stage: Stage, done: int, total: int | None = None, more: str = "") -> None:
        """Say how much of a stage is done."""
        stage.done, stage.total, stage.more = done, total or stage.total, more
        if self.bars is not None:
            self.bars.update(stage.task, completed=done, total=stage.total, more=more)
        self.look()

    def end(self, stage: Stage) -> None:
        """End a stage."""
        if stage not in self.stages:  # after close
            return
        self.stages.remove(stage)
        if self.bars is not None:
            self.bars.remove_task(stage.task)
            if not self.stages:
                self.bars.stop()
                self.bars = None

    def close(self) -> None:
        """End all stages, for example before an error message."""
        for stage in self.stages[::-1]:
            self.end(stage)

    def say(self, line: str) -> None:
        """Write a line that counts as one of the lines that show the progress."""
        self.told = self.clock()
        self.write(line)

    def look(self) -> None:
        """Write a line if the last one is 30 seconds old, and there are no bars."""
        with self._lock:
            now, stages = self.clock(), list(self.stages)
            if self.bars is None and stages and now - self.told >= EVERY:
                self.say("lipbound: " + "; ".join(_line(stage, now) for stage in stages))

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK)
            self.look()


def _line(stage: Stage, now: float) -> str:
    total = "" if stage.total is None else f" of {stage.total:,}"
    more = f" ({stage.more})" if stage.more else ""
    return f"{stage.what}: {stage.done:,}{total} after {duration(now - stage.began)}{more}"


def duration(seconds: float) -> str:
    """Write a time in the units that a reader needs.

    Example:
        >>> [duration(seconds) for seconds in (42, 90, 3_720)]
        ['42 s', '1 min 30 s', '1 h 02 min']
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _to_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[more]}", markup=False),
        console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip


bar = Shown()
"""The progress of this process."""
