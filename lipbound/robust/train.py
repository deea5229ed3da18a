"""Train a network into a folder: steps, records, checkpoints, best and final weights."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lipbound.robust.data import Data
from lipbound.robust.folder import RunFolder
from lipbound.robust.run import Run, Stopped, Watcher
from lipbound.robust.settings import Settings, as_dict
from lipbound.robust.team import Team, team


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
    # In a function of its own: everything that talks to the others is gone before they part.
    with team(device) as who:
        return _trained(chosen, data, out, who, resume, time_limit, save_every, watcher)


def _trained(
    chosen: Settings,
    data: Data,
    out: Path,
    who: Team,
    resume: bool,
    time_limit: float | None,
    save_every: int,
    watcher: Watcher | None,
) -> dict[str, Any]:
    tell = partial(_say, watcher, who)
    with _signals(tell) as stop, contextlib.ExitStack() as opened:
        run = Run(chosen, data, who, stop)  # what cannot be built leaves no folder behind
        folder = opened.enter_context(RunFolder(out, who.first))
        state = folder.open(as_dict(chosen), resume)
        if state is not None:
            run.load(*state[:2])
            for said in state[2]:
                tell(f"{said}; going on from step {run.step}")
        done = folder.finished()
        if done is not None and run.step == run.steps:
            return done
        folder.cut_records(run.step, run.due)
        started = time.monotonic()
        while run.step < run.steps or run.due:
            reason = stop[0] if stop else ""
            if time_limit is not None and time.monotonic() - started >= time_limit:
                reason = reason or "time limit"
            if (who.size == 1 or run.step % 8 == 0) and who.any(bool(reason)):
                folder.save(run.step, *run.state())
                return {**run.summary(), "stopped": reason or "another process stopped"}
            if not run.due:
                run.advance(watcher)
            if run.due:
                try:
                    record, better = run.check()
                except Stopped:  # the next run begins with this check
                    continue
                folder.record(record)
                if watcher is not None and who.first:
                    watcher.epoch(record)
                if better:
                    folder.weights("best", run.weights(), run.about(record))
                if run.step == run.steps:
                    folder.weights("final", run.weights(), run.about(record))
                folder.save(run.step, *run.state())
            elif save_every and run.step % save_every == 0:
                folder.save(run.step, *run.state())
        summary = run.summary()
        who.wait()  # for the files of the first
        try:
            for name in ("best", "final"):
                summary[name] = run.test(folder.load_weights(name))
        except Stopped:  # the last checkpoint is written
            return {**run.summary(), "stopped": stop[0]}
        folder.finish(summary)
        return summary


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
            tell("stopping after this step; asked again, at once")

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
