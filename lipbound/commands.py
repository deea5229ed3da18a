"""The commands. Heavy imports wait inside the command that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure, certify and control the Lipschitz constant of convolutional networks.",
)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; usage errors become ``ValueError`` with one line."""
    command = typer.main.get_command(app)
    try:
        return command.main(list(arguments), "lipbound", standalone_mode=False) or 0
    except Exception as error:
        # Typer brings its own copy of click's exceptions in some versions and click's in others.
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is already printed
            return 0
        if hasattr(error, "format_message"):
            raise ValueError(f"{error.format_message()} Try 'lipbound --help'.") from None
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from None
        raise


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Options of every command."""


@app.command()
def bench(
    network: Annotated[
        list[str] | None, typer.Option(help="A network of the paper's table; repeat. All 17.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A contender; repeat. All of them.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON lines, one per network; those already in it are not run again."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure here, .svg or .png.")] = None,
) -> None:
    """Whole networks: LipBound and its gradient beside what one would run instead."""
    from lipbound.experiments.speed import METHODS, NAMES, speed
    from lipbound.records import append, read
    from lipbound.report import speed_table

    names, methods = network or list(NAMES), method or list(METHODS)
    done = [r for r in read(out) if r["network"] in names] if out else []
    left = [name for name in names if name not in {r["network"] for r in done}]
    records = []
    measured = speed(left, device, methods)
    with speed_table(methods) as show:
        for record in done:
            show(record)
        for record in measured:
            if out:
                append(out, record)
            show(record)
            records.append(record)
    if plot:
        from lipbound.figures import speed_figure

        speed_figure([*done, *records], plot)
        typer.echo(f"wrote {plot}")


@app.command()
def audit(
    source: Annotated[str, typer.Argument(help="'demo': the network inside the package.")],
) -> None:
    """Every layer's gain: σ1 at its input size, and the certified interval for every size."""
    if source != "demo":
        raise ValueError(f"cannot audit {source!r}; this version audits the embedded 'demo'")
    from lipbound import demo
    from lipbound.report import layer_table
    from lipbound.survey import survey

    rows = survey(demo.network(), demo.INPUT_SHAPE)
    layer_table(rows, "Digits CNN: σ1 at each layer's input, certified ends for any input")
