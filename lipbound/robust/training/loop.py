"""Train a network, and write records, checkpoints and weights to a folder."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lipbound.robust.data.sets import Data
from lipbound.robust.training.distributed import Team, team
from lipbound.robust.training.run import Run, Stopped, Watcher
from lipbound.robust.training.run_folder import RunFolder
from lipbound.robust.training.settings import Settings, as_dict, decisive


def train(
    chosen: Settings,
    data: Data,
    out: Path,
    *,
    resume: bool = False,
    device: str | None = None,
    time_limit: float | None = None,
    save_every: int = 0,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Train a network, and write checkpoints, ``best`` and ``final`` weights and records.

    Args:
        chosen: Settings of the run.
        data: The data set.
        out: Folder of the run. Its ``records.jsonl`` gets a line per epoch. With several processes
            only the first one reads and writes there.
        resume: Whether to continue from the newest valid checkpoint in the folder, if there is one.
        device: ``cpu`` or ``cuda``; by default the GPU if there is one.
        time_limit: Seconds after which to write a checkpoint and stop.
        save_every: Steps between checkpoints, in addition to the one after every epoch.
        watcher: Receives the progress of the run.

    Returns:
        The summary, as in ``summary.json``: test accuracies of the best and the final weights, the
        Lipschitz product and the time per step. ``stopped`` says why an unfinished run stopped.

    Raises:
        ValueError: If the folder holds a run with other settings, or ``resume`` is not set, or if
            the processes have different settings or data.
        FloatingPointError: If the loss is no longer finite; no checkpoint is written then.
    """
    # In separate functions, so that all objects that use the process group are freed before it.
    with team(device) as who, _signals(partial(_say, watcher, who)) as stop:
        return _trained(
            chosen, data, out, resume, _Limits(who, stop, time_limit, save_every, watcher)
        )


@dataclass
class _Limits:
    """The processes and the watcher of a run, and when it stops or saves."""

    who: Team
    stop: list[str]
    time_limit: float | None
    save_every: int
    watcher: Watcher | None
    started: float = field(default_factory=time.monotonic)

    def reason(self, step: int) -> str:
        """Return why to stop before this step, the same in all processes; empty to continue."""
        reason = self.stop[0] if self.stop else ""
        if self.time_limit is not None and time.monotonic() - self.started >= self.time_limit:
            reason = reason or "time limit"
        asked = (self.who.size == 1 or step % 8 == 0) and self.who.any(bool(reason))
        return (reason or "another process stopped") if asked else ""


def _trained(
    chosen: Settings, data: Data, out: Path, resume: bool, limits: _Limits
) -> dict[str, Any]:
    run = Run(chosen, data, limits.who, limits.stop)  # before the folder is made: it may raise
    if limits.who.size > 1:  # the fingerprint reads images
        limits.who.agree({**decisive(as_dict(chosen)), "data": run.data.fingerprint()})
    with RunFolder(out, limits.who) as folder:
        state = folder.open(as_dict(chosen), resume)
        if state is not None:
            run.load(*state[:2])
            for said in state[2]:
                _say(limits.watcher, limits.who, f"{said}; continuing from step {run.step}")
        done = folder.finished()
        if done is not None and run.over:
            return done
        folder.cut_records(run.step, run.due)
        stopped = _steps(run, folder, limits)
        if stopped:
            return {**run.summary(), "stopped": stopped}
        summary = run.summary()
        try:
            for name in ("best", "final"):
                summary[name] = run.test(folder.load_weights(name))
        except Stopped:  # the last checkpoint is already written
            return {**run.summary(), "stopped": limits.stop[0]}
        folder.finish(summary)
        return summary


def _steps(run: Run, folder: RunFolder, limits: _Limits) -> str:
    """Train to the end, or write a checkpoint, stop and return the reason."""
    while not run.over or run.due:
        reason = limits.reason(run.step)
        if reason:
            folder.save(run.step, *run.state())
            return reason
        if not run.due:
            run.advance(limits.watcher)
        if run.due:
            with contextlib.suppress(Stopped):  # the resumed run begins with this check
                _checked(run, folder, limits)
        elif limits.save_every and run.step % limits.save_every == 0:
            folder.save(run.step, *run.state())
    return ""


def _checked(run: Run, folder: RunFolder, limits: _Limits) -> None:
    """Check the network after an epoch, and write its record, weights and checkpoint."""
    record, better = run.check()
    folder.record(record)
    if limits.watcher is not None and limits.who.first:
        limits.watcher.epoch(record)
    if better:
        folder.weights("best", run.weights(), run.about(record))
    if run.over:
        folder.weights("final", run.weights(), run.about(record))
    folder.save(run.step, *run.state())


@contextlib.contextmanager
def _signals(tell: Callable[[str], None]) -> Iterator[list[str]]:
    """Yield a list that gets the reason of a stop signal; a second signal stops immediately."""
    stop: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append("interrupted" if number == signal.SIGINT else "terminated")
        with contextlib.suppress(RuntimeError):  # the signal may interrupt a print
            tell("Stopping after this step. Press Ctrl-C again to stop immediately.")

    heard = [  # a background job may have been started to ignore them
        kind
        for kind in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(kind) is not signal.SIG_IGN
    ]
    before = {kind: signal.signal(kind, ask) for kind in heard}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _say(watcher: Watcher | None, who: Team, text: str) -> None:
    if watcher is not None and who.first:
        watcher.say(text)
