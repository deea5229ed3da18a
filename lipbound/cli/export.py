"""``lipbound export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipbound.cli.arguments import check_source


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Folder of a training run (its final network), or one of its .safetensors files."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
    name: Annotated[str, typer.Option(help="Name of the entry, for example Me2026Work.")],
    record: Annotated[
        Path | None,
        typer.Option(
            help="File that 'lipbound attack --attack autoattack --out FILE' wrote for this "
            "network; its accuracies go into the card."
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the paper.")] = "",
    authors: Annotated[str, typer.Option(help="Authors of the paper.")] = "",
    venue: Annotated[str, typer.Option(help="Where it was published.")] = "Unpublished",
    link: Annotated[str, typer.Option(help="Address of the paper.")] = "",
) -> None:
    """Write a trained network in the form of RobustBench: weights, definition and card."""
    check_source(checkpoint)
    if record is not None and not record.is_file():
        raise ValueError(f"there is no file {str(record)!r}; make one with lipbound attack --out")
    from lipbound.cli.models import networks
    from lipbound.files import read
    from lipbound.robust.export import export as write_files

    trained = networks(Path(checkpoint))[-1]  # the final one of a run
    found = read(record) if record is not None else []
    fit = [r for r in found if r.get("checkpoint") == trained.path.name and "autoattack" in r]
    if record is not None and not fit:
        raise ValueError(
            f"{str(record)!r} has no record of {trained.path.name} under AutoAttack; make one with "
            f"lipbound attack {checkpoint} --attack autoattack --out {record}"
        )
    about = {"name": title, "authors": authors, "venue": venue, "link": link}
    for path in write_files(trained, out, name, fit[-1] if fit else None, about):
        typer.echo(f"wrote {path}")
