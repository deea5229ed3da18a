"""Print results to the terminal."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape as without_markup
from rich.table import Table

from lipbound.files import printable
from lipbound.network.findings import Audit, geometry
from lipbound.report.progress import Stage, bar
from lipbound.results import Result, fixed, percent, shown, within

Record = dict[str, Any]


def unread() -> None:
    """Discard further output once the reader has gone (``| head``); the command continues."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def echo(text: str) -> None:
    """Print a text; if the reader of the pipe has gone, continue without output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        unread()


class Screen(Console):
    """A console that prints plain text of 120 columns if the output is not a terminal."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        if not self.is_terminal:
            self.width, self.no_color = 120, True

    def on_broken_pipe(self) -> None:
        unread()

    def show(self, table: Table, folds: int = 0) -> None:
        """Print a whole table. On a narrow terminal, long lines wrap instead of being cut.

        Args:
            table: The table to print.
            folds: Number of characters that the table can save by folding its text.
        """
        whole = self.measure(table, options=self.options.update(max_width=10_000)).maximum
        table.width = whole if whole - folds > self.width else None
        self.print(table, crop=False)


def escape(text: str) -> str:
    """Escape markup and control characters in a text from outside."""
    return without_markup(printable(text))


SPEED_COLUMNS = {
    "lipbound": "LipBound",
    "direct": "direct",
    "power": "power",
    "gram": "Gram",
    "floor": "floor",
    "lipbound_gradient": "LB+grad",
    "lipbound_autograd": "autograd",
    "direct_gradient": "dir+grad",
    "sgd": "SGD",
}
"""Method → heading; :mod:`lipbound.paper.speed` describes the methods."""


@contextmanager
def speed_table(methods: Sequence[str]) -> Iterator[Callable[[Record], None]]:
    """Print a table row for each measured network, in milliseconds, and then geometric means."""
    shown = [m for m in SPEED_COLUMNS if m in methods or m == "floor"]
    print(f"{'milliseconds':15}", *[f"{SPEED_COLUMNS[m]:>8}" for m in shown], flush=True)
    ratios: dict[str, list[float]] = {}

    def show(record: Record) -> None:
        times = record["milliseconds"]
        cells = [f"{times[m]:8.4g}" if m in times else " " * 8 for m in shown]
        print(f"{printable(record['network']):15}", *cells, flush=True)
        for other, ours in RATIOS.items():
            if other in times and ours in times:
                ratios.setdefault(other, []).append(times[other] / times[ours])

    yield show
    for other, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        ours = SPEED_COLUMNS[RATIOS[other]]
        faster = sum(value >= 1 for value in values)
        print(
            f"{SPEED_COLUMNS[other]:>8} / {ours}: geometric mean {mean:.3g}, "
            f"at least 1 on {faster} of {len(values)} networks"
        )


RATIOS = {
    "direct": "lipbound",
    "power": "lipbound",
    "gram": "lipbound",
    "direct_gradient": "lipbound_gradient",
    "sgd": "lipbound_gradient",
}
"""Method → the method of lipbound by whose time its time is divided."""


class TrainingView:
    """Show a training's progress: a bar on a terminal, else a line per epoch and every 30 seconds.

    Args:
        title: Name of the training.
        board: Folder for TensorBoard logs; without it none are written.
    """

    def __init__(self, title: str, board: Path | None = None):
        self.title = title
        self.console = Console(stderr=True)
        self.stage: Stage | None = None
        self.numbers = ""
        self.board: Any = None
        if board is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("--tensorboard needs: pip install 'lipbound[train]'") from None
            self.board = SummaryWriter(str(board))

    def __enter__(self) -> TrainingView:
        self.stage = bar.begin(f"steps of {printable(self.title)}")
        return self

    def __exit__(self, *error: object) -> None:
        if self.stage is not None:
            bar.end(self.stage)
        if self.board is not None:
            self.board.close()

    def step(self, step: int, steps: int, loss: float) -> None:
        if self.stage is not None:
            bar.move(self.stage, step, steps, f"loss {loss:.3f}{self.numbers}")
        if self.board is not None:
            self.board.add_scalar("loss", loss, step)

    def epoch(self, record: Record) -> None:
        clean, robust = record["held_out_accuracy"], record["held_out_pgd_accuracy"]
        estimate = record.get("held_out_certified_estimate")
        held = "" if clean is None else f"  clean {clean:.3f}"
        held += "" if robust is None else f"  pgd {robust:.3f}"
        held += "" if estimate is None else f"  certified (estimate) {estimate:.3f}"
        self.numbers = f"{held}  product 10^{fixed(record['log10_product'], 2, 'up')}"
        if not self.console.is_terminal:
            line = f"{self.title}  epoch {record['epoch']}  loss {record['loss']:.3f}"
            bar.say(f"{line}{self.numbers}")
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name not in ("step", "loss"):
                    self.board.add_scalar(name, value, record["step"])

    def say(self, text: str) -> None:
        self.console.print(f"[yellow]{escape(f'lipbound: {text}')}[/]", soft_wrap=True)


def training_table(summaries: Sequence[Record]) -> None:
    """Print one line per training: accuracies of the best and final weights, product, time."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("\narm", no_wrap=True)
    for which in ("best", "final"):
        for heading in (f"{which}\naccuracy", "\nPGD", "\nproduct"):
            table.add_column(heading, justify="right", no_wrap=True)
    done = [row["final"] for row in summaries if not row["stopped"]]
    proved = {row["certified_radius"] for row in done if "certified_radius" in row}
    if proved:
        table.add_column("\ncertified", justify="right", no_wrap=True)
    table.add_column("\nms/step", justify="right", no_wrap=True)
    for row in summaries:
        if row["stopped"]:
            continue
        cells = []
        for which in ("best", "final"):
            found = row[which]
            for name in ("test_accuracy", "test_pgd_accuracy"):
                cells.append("" if found[name] is None else percent(found[name]))
            cells.append(f"10^{fixed(found['log10_product'], 2, 'up')}")
        if proved:
            share = row["final"].get("certified_accuracy")
            cells.append("" if share is None else percent(share, "down"))
        table.add_row(escape(row["arm"]), *cells, f"{row['step_ms']:.1f}")
    Screen().show(table)
    if len(proved) == 1:
        echo(
            f"certified: test images that are proved to keep their right class at every point "
            f"within the L2 radius {within(proved.pop())}. PGD attacks in the norm and radius of "
            f"the settings (by default L∞), so it may be below."
        )


def titled(title: str) -> Table:
    """Return an empty table with a title."""
    return Table(title=escape(title), title_justify="left", header_style="bold", box=None,
                 pad_edge=False)  # fmt: skip


def result_table(found: Result) -> None:
    """Print the rows of a result, and then its sentences."""
    console = Screen()
    table = titled(found.title())
    rows = found.rows()
    texts = found.texts(rows[:ROWS])
    for name in texts[0] if texts else ():
        if name == "layer":
            table.add_column(name, overflow="fold")
        else:
            side: Literal["left", "right"] = (
                "left" if name in ("attack", "geometry", "network") else "right"
            )
            table.add_column(name, justify=side, no_wrap=True)
    for row in texts:
        table.add_row(*map(escape, row.values()))
    longest = max((len(row.get("layer", "")) for row in texts), default=0)
    console.show(table, folds=max(0, longest - 20))
    if len(rows) > ROWS:
        console.print(f"{len(rows) - ROWS:,} more rows are not shown; --json lists all")
    for text in found.summary():
        console.print(escape(text), style=SIGNS.get(text.partition(": ")[0]))


SIGNS = {"doubt": "yellow", "contradiction": "red"}
"""First word of a sentence → the colour that it is printed in."""
ROWS = 400  # largest number of rows of a printed table


def audit_table(audit: Audit, title: str, console: Screen | None = None) -> None:
    """Print one line per layer, then a summary of the network."""
    console = console or Screen()
    table = titled(title)
    table.add_column("layer", overflow="fold")
    table.add_column("geometry", no_wrap=True)
    for heading in ("lower", "upper", "LipBound"):
        table.add_column(heading, justify="right", no_wrap=True)
    floor = sorted((row.bracket.upper for row in audit.layers), reverse=True)[:ROWS][-1:] or [0.0]
    rows = [row for row in audit.layers if row.bracket.upper >= floor[0]][:ROWS]
    for row in rows:
        ends = shown(row.bracket.lower, "down"), shown(row.bracket.upper, "up")
        cells = [*ends, shown(row.lipbound, "up")]
        table.add_row(escape(row.name), geometry(row.layer), *cells)
    longest = max((len(printable(row.name)) for row in rows), default=0)
    console.show(table, folds=max(0, longest - 20))
    if len(rows) < len(audit.layers):
        left = len(audit.layers) - len(rows)
        console.print(f"{left:,} layers with smaller upper bounds are not shown; --json lists all")
    for line in audit.summary():
        console.print(escape(line))
