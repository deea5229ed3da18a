"""``lipbound reproduce`` and ``lipbound bench``: the paper's tables and figures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lipbound.cli.arguments import (
    DEVICE,
    FOLDER,
    PLOT,
    check_numbers,
    check_outputs,
    check_plot,
    check_report,
    say,
)
from lipbound.report.progress import bar


@contextlib.contextmanager
def resumable(resumes: bool) -> Iterator[None]:
    """Let Ctrl-C say how to continue, if the work can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        if not resumes:
            raise
        bar.close()
        say("interrupted; repeat the command to continue")
        raise SystemExit(130) from None  # typer turns other exceptions into its own


def reproduce(
    name: Annotated[
        str, typer.Argument(help="fig1, fig2, fig3, table1, table2, table3, table4, or all.")
    ],
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            help="Weights file of a trained network (repeatable; default: the embedded network)."
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Run a small version, to check that it works.")
    ] = False,
    folder: FOLDER = None,
    tier: Annotated[
        str,
        typer.Option(
            help="Group of trainings of table2: A, O, P, B, B100, C, or the pilot A0. "
            "Default: all except the pilot."
        ),
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only this arm, for example 'at+lipreg 0.02' (repeatable)."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Pause trainings and attacks after this time, at the next step. Repeat the "
            "command to continue."
        ),
    ] = None,
    device: DEVICE = None,
    out: Annotated[Path, typer.Option(help="Folder for records and figures.")] = Path("reproduced"),
) -> None:
    """Compute a figure or table of the paper again, and write its data, figure and report."""
    check_numbers(minutes=minutes)
    from lipbound.paper import reproduce as steps
    from lipbound.paper.request import Request
    from lipbound.report.terminal import TrainingView, echo

    names = list(steps.EXPERIMENTS) if name == "all" else [name]
    request = Request(
        tiny=tiny, weights=tuple(weights or ()), out=out,
        folder=Path(folder) if folder else None, tier=tier,
        only=tuple(only or ()), minutes=minutes, device=device,
        say=lambda text: typer.echo(text, err=True), watch=TrainingView, progress=bar,
    )  # fmt: skip
    given = {
        "weights": weights, "folder": folder, "tier": tier, "only": only, "minutes": minutes,
        "device": device,
    }  # fmt: skip
    _check(name, names, {option: value for option, value in given.items() if value}, tiny)
    check_report(out)
    check_outputs(*(out / f"{each}.json" for each in names))
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for each in bar(names, "tables and figures"):
        left = None if end is None else max(0.0, end - time.monotonic()) / 60
        with resumable(each in steps.TRAININGS):
            record = steps.run(each, replace(request, minutes=left))
        steps.save(record, out)
        steps.write_figure(record, out)
        echo(steps.report(record))


def _check(name: str, names: list[str], given: dict[str, Any], tiny: bool) -> None:
    """Raise an error for options that cannot work, before anything is computed."""
    from lipbound.paper import reproduce as steps

    for each in names:
        if each not in steps.EXPERIMENTS:
            raise ValueError(
                f"unknown {each!r}; choose one of: {', '.join(steps.EXPERIMENTS)}, all"
            )
    for option in given:
        takers = steps.TAKES[option]
        if not {*takers} & {*names}:
            raise ValueError(f"{name} does not take --{option}; use it with {', '.join(takers)}")
    if tiny and "folder" in given:
        raise ValueError(f"--tiny uses scikit-learn's digits; leave out --folder {given['folder']}")
    if name == "all" and "folder" not in given and not tiny:
        raise ValueError(f"table2 needs --folder with {steps.table2.ON}; or use --tiny")


def bench(
    network: Annotated[
        list[str] | None,
        typer.Option(help="Network, for example resnet18 (repeatable; default: all 17)."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to time (repeatable; default: all): lipbound, direct, power, gram, "
            "lipbound_gradient, lipbound_autograd, direct_gradient, sgd."
        ),
    ] = None,
    device: DEVICE = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append results to this JSON Lines file. Networks already in it are skipped."
        ),
    ] = None,
    plot: PLOT = None,
) -> None:
    """Measure the time of LipBound, its gradient and other methods on whole networks."""
    from lipbound.files import append, read
    from lipbound.paper.speed import METHODS, NAMES, speed
    from lipbound.report.terminal import speed_table

    check_plot(plot)
    check_outputs(out, plot)
    names, methods = network or list(NAMES), method or list(METHODS)
    records = [
        r for r in (read(out) if out else []) if r.get("network") in names and "milliseconds" in r
    ]
    done = {r["network"] for r in records}
    left = [name for name in names if name not in done]
    measured = speed(left, device, methods)
    with resumable(out is not None), speed_table(methods) as show:
        for record in records:
            show(record)
        for _, record in zip(bar(left, "networks"), measured, strict=True):
            if out:
                append(out, record)
            show(record)
            records.append(record)
    if plot:
        from lipbound.report.figures import speed_figure

        speed_figure(records, plot)
        typer.echo(f"wrote {plot}")
