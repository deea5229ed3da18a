"""What is asked of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from lipbound.robust.training.run import Watcher

Watch = Callable[[str], AbstractContextManager[Watcher | None]]


def unseen(title: str) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()


@dataclass(frozen=True)
class Request:
    """How to compute an experiment.

    Attributes:
        tiny: In seconds, only to see that it works.
        weights: Trained networks' files, where kernels are wanted.
        out: Folder of records, figures and training runs.
        folder: Where image data lies.
        tier: Which of a table's trainings; all that are known without it.
        only: Arms, if not all.
        minutes: After which no training goes on.
        device: ``cpu`` or ``cuda``; the GPU if there is one.
        say: Is told what is being done.
        watch: Shows a training of that name.
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
