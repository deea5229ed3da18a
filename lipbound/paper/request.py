"""Options for computing an experiment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from lipbound.robust.training.run import Watcher
from lipbound.runtime import Progress, silent

Watch = Callable[[str], AbstractContextManager[Watcher | None]]


def unseen(title: str) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()


@dataclass(frozen=True)
class Request:
    """Options for computing an experiment.

    Attributes:
        tiny: Whether to run a small version, which only shows that the program works.
        weights: Weights files of trained networks, for experiments on kernels.
        out: Folder for records, figures and training runs.
        folder: Folder of the image data.
        tier: Tier of the table to train; all tiers by default.
        only: Arms to train; all arms by default.
        minutes: Minutes after which trainings and attacks stop.
        device: ``cpu`` or ``cuda``; by default the GPU if there is one.
        say: Called with a message when something begins.
        watch: Called with the name of a training, to show its progress.
        progress: Shows the progress of everything else.
    """

    tiny: bool = False
    weights: tuple[Path, ...] = ()
    out: Path = Path("reproduced")
    folder: Path | None = None
    tier: str = ""
    only: tuple[str, ...] = ()
    minutes: float | None = None
    device: str | None = None
    say: Callable[[str], None] = lambda _: None
    watch: Watch = unseen
    progress: Progress = silent
