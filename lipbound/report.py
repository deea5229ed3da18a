"""Show what was computed; compute nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.modules.conv import _ConvNd

from lipbound.survey import Row

Record = dict[str, Any]


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
"""Contender → heading; what they are says :mod:`lipbound.experiments.speed`."""


@contextmanager
def speed_table(methods: Sequence[str]) -> Iterator[Callable[[Record], None]]:
    """A table in milliseconds that grows as networks are measured, then the geometric means."""
    shown = [m for m in SPEED_COLUMNS if m in methods or m == "floor"]
    print(f"{'milliseconds':15}", *[f"{SPEED_COLUMNS[m]:>8}" for m in shown], flush=True)
    ratios: dict[str, list[float]] = {}

    def show(record: Record) -> None:
        times = record["milliseconds"]
        cells = [f"{times[m]:8.4g}" if m in times else " " * 8 for m in shown]
        print(f"{record['network']:15}", *cells, flush=True)
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
            f"at least 1 on {faster} of {len(values)}"
        )


RATIOS = {
    "direct": "lipbound",
    "power": "lipbound",
    "gram": "lipbound",
    "direct_gradient": "lipbound_gradient",
    "sgd": "lipbound_gradient",
}
"""Whose time is divided by which of ours."""


def layer_table(rows: Iterable[Row], title: str, console: Console | None = None) -> None:
    """Print one line per layer; plain text when the output is no terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=120, no_color=True)
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for heading in ("layer", "geometry", "input"):
        table.add_column(heading, no_wrap=True)
    table.add_column("σ1", justify="right", style="green")
    for heading in ("lower", "upper", "LipBound"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = (row.exact, row.bracket.lower, row.bracket.upper, row.lipbound)
        cells = ["" if value is None else f"{value:.4f}" for value in numbers]
        size = "×".join(map(str, row.input_shape))
        table.add_row(row.name, geometry(row.layer), size, *cells)
    console.print(table)


def geometry(layer: nn.Module) -> str:
    """A layer in a few characters: ``16→32 3×3``, ``/2`` stride, ``·2`` dilation, ``g4`` groups."""
    if isinstance(layer, nn.Linear):
        return f"{layer.in_features}→{layer.out_features} linear"
    if not isinstance(layer, _ConvNd):
        return type(layer).__name__
    parts = [f"{layer.in_channels}→{layer.out_channels}", "×".join(map(str, layer.kernel_size))]
    for mark, values in (("/", layer.stride), ("·", layer.dilation)):
        if any(value != 1 for value in values):
            parts.append(mark + "×".join(map(str, sorted(set(values)))))
    if layer.groups > 1:
        parts.append(f"g{layer.groups}")
    if layer.transposed:
        parts.append("transposed")
    if layer.padding_mode != "zeros":
        parts.append(layer.padding_mode)
    return " ".join(parts)
