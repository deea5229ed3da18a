"""Train a network into a folder: steps, records, checkpoints, best and final weights."""

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
from lipbound.robust.training.settings import Settings, as_dict


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
    """Train, and write checkpoints, ``best`` and ``final`` weights and records to a folder.

    Args:
        chosen: What to do.
        data: On what.
        out: The run's folder. Its ``records.jsonl`` gets a line per epoch.
        resume: Go on from the newest good checkpoint there, if there is one.
        device: ``cpu`` or ``cuda``; the GPU if there is one.
        time_limit: Seconds after which to stop with a checkpoint.
        save_every: Steps between checkpoints, besides the one after every epoch.
        watcher: Is told how it goes.

    Returns:
        The summary, as in ``summary.json``: accuracies on the test set of the best and the final
        weights, the Lipschitz product, the time of a step. ``stopped`` says why, if it is not done.

    Raises:
        ValueError: If the folder holds a run already (and ``resume`` is not set) or another one.
        FloatingPointError: If the loss is no longer finite; no checkpoint holds that.
    """
    # In functions of their own: everything that talks to the others is gone before they part.
    with team(device) as who, _signals(partial(_say, watcher, who)) as stop:
        return _trained(
            chosen, data, out, resume, _Limits(who, stop, time_limit, save_every, watcher)
        )


@dataclass
class _Limits:
    """With whom a run trains, who watches, and when it stops or saves."""

    who: Team
    stop: list[str]
    time_limit: float | None
    save_every: int
    watcher: Watcher | None
    started: float = field(default_factory=time.monotonic)

    def reason(self, step: int) -> str:
        """Why to stop before this step, agreed upon by all processes; empty to go on."""
        reason = self.stop[0] if self.stop else ""
        if self.time_limit is not None and time.monotonic() - self.started >= self.time_limit:
            reason = reason or "time limit"
        asked = (self.who.size == 1 or step % 8 == 0) and self.who.any(bool(reason))
        return (reason or "another process stopped") if asked else ""


def _trained(
    chosen: Settings, data: Data, out: Path, resume: bool, limits: _Limits
) -> dict[str, Any]:
    run = Run(chosen, data, limits.who, limits.stop)  # what cannot be built leaves no folder
    with RunFolder(out, limits.who.first) as folder:
        state = folder.open(as_dict(chosen), resume)
        if state is not None:
            run.load(*state[:2])
            for said in state[2]:
                _say(limits.watcher, limits.who, f"{said}; going on from step {run.step}")
        done = folder.finished()
        if done is not None and run.step == run.steps:
            return done
        folder.cut_records(run.step, run.due)
        stopped = _steps(run, folder, limits)
        if stopped:
            return {**run.summary(), "stopped": stopped}
        summary = run.summary()
        limits.who.wait()  # for the files of the first
        try:
            for name in ("best", "final"):
                summary[name] = run.test(folder.load_weights(name))
        except Stopped:  # the last checkpoint is written
            return {**run.summary(), "stopped": limits.stop[0]}
        folder.finish(summary)
        return summary


def _steps(run: Run, folder: RunFolder, limits: _Limits) -> str:
    """Train to the end; or to a checkpoint, and say why it stopped there."""
    while run.step < run.steps or run.due:
        reason = limits.reason(run.step)
        if reason:
            folder.save(run.step, *run.state())
            return reason
        if not run.due:
            run.advance(limits.watcher)
        if run.due:
            with contextlib.suppress(Stopped):  # the next run begins with this check
                _checked(run, folder, limits)
        elif limits.save_every and run.step % limits.save_every == 0:
            folder.save(run.step, *run.state())
    return ""


def _checked(run: Run, folder: RunFolder, limits: _Limits) -> None:
    """An epoch's record, weights and checkpoint."""
    record, better = run.check()
    folder.record(record)
    if limits.watcher is not None and limits.who.first:
        limits.watcher.epoch(record)
    if better:
        folder.weights("best", run.weights(), run.about(record))
    if run.step == run.steps:
        folder.weights("final", run.weights(), run.about(record))
    folder.save(run.step, *run.state())


@contextlib.contextmanager
def _signals(tell: Callable[[str], None]) -> Iterator[list[str]]:
    """A list that gets the reason when the process is asked to stop; a second time it stops now."""
    stop: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append("interrupted" if number == signal.SIGINT else "terminated")
        with contextlib.suppress(RuntimeError):  # if it came while something was being written
            tell("Stopping after this step. Press Ctrl-C again to stop immediately.")

    heard = [  # a background job may be told to ignore them
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
