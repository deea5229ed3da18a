"""``lipbound certify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lipbound.cli.arguments import (
    DATA,
    DEVICE,
    EFFORT,
    FOLDER,
    JSON,
    MODEL,
    OUT,
    PLOT,
    check_effort,
    check_numbers,
    check_outputs,
    check_plot,
    check_report,
    check_source,
    radius_of,
    say,
)
from lipbound.report.progress import bar

ARITHMETICS = ("real", "float64", "float32")
RADII = ("36/255", "72/255", "108/255")


def certify(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Folder of a training run (its final network), one of its .safetensors files, "
            "the weights of another network (with --model), or a factory that loads its weights."
        ),
    ],
    model: MODEL = None,
    radius: Annotated[
        list[str] | None,
        typer.Option(
            help="L2 radius, a number or a fraction such as 36/255 (repeatable). Default: 36/255, "
            "72/255 and 108/255."
        ),
    ] = None,
    data: DATA = None,
    folder: FOLDER = None,
    arithmetic: Annotated[
        str,
        typer.Option(
            help="What to certify: the network in real arithmetic (real), or as it runs (float64, "
            "float32)."
        ),
    ] = "real",
    effort: EFFORT = "normal",
    count: Annotated[int, typer.Option(help="Number of test images (0: all).")] = 0,
    attacked: Annotated[
        int,
        typer.Option(help="Number of images to attack at each radius, for comparison (0: none)."),
    ] = 200,
    batch: Annotated[int, typer.Option(help="Number of images per batch.")] = 250,
    device: DEVICE = None,
    json_: JSON = False,
    out: OUT = None,
    plot: PLOT = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the table and the curve to this file.")
    ] = None,
) -> None:
    """Prove which test images keep their class within a radius, and attack some for comparison."""
    from lipbound.files import append, write

    check_source(checkpoint)
    radii = [radius_of(text) for text in radius or RADII]
    check_numbers(count=count, attacked=attacked)
    if batch < 1:
        raise ValueError(f"--batch {batch} must be 1 or larger")
    if arithmetic not in ARITHMETICS:
        from lipbound.registry import unknown

        raise unknown("arithmetic", arithmetic, ARITHMETICS)
    check_effort(effort)
    check_plot(plot)
    check_report(html)
    check_outputs(out, plot, html)
    from lipbound.cli.models import evaluated
    from lipbound.report.certificates import certificate_table
    from lipbound.report.terminal import echo
    from lipbound.robust.certification import certification
    from lipbound.runtime import pick_device

    found, images, name = evaluated(checkpoint, model, data, folder, count, say)
    network = found[-1]  # the final one of a run
    record = certification(
        network, images, radii, pick_device(device),
        arithmetic=arithmetic, effort=effort, attacked=attacked, batch=batch, progress=bar,
        say=lambda what: typer.echo(f"{what} ...", err=True),
    )  # fmt: skip
    record["data"] = name
    if json_:
        echo(json.dumps(record, indent=1))
    else:
        certificate_table(record)
    if out is not None:
        append(out, record)
        typer.echo(f"wrote {out}", err=True)
    if plot is not None:
        from lipbound.report.figures import certificate_figure

        certificate_figure(record, plot)
        typer.echo(f"wrote {plot}", err=True)
    if html is not None:
        from lipbound.report.certificates import certificate_page

        write(html, certificate_page(record).encode())
        typer.echo(f"wrote {html}", err=True)
    if record["lipschitz"] is None:
        say("there is no bound of the network, so nothing is certified")
        raise typer.Exit(1)
