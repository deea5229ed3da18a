"""Options shared by the commands, and checks that run before anything is computed."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from lipbound.files import check_writable
from lipbound.weights import check_file, is_weights

DATA = Annotated[str | None, typer.Option(help="Data set. Default: the one of the training run.")]
DEVICE = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if available.")]
EFFORTS = ("low", "normal", "high")  # as in lipbound.network.audits, whose import is slow
EFFORT = Annotated[
    str,
    typer.Option(
        help="low, normal or high. 'low' bounds every operation by itself. 'normal' merges "
        "linear operations first. 'high' bounds chains of layers together by LipSDP, which "
        "is tighter and takes 5 to 9 minutes for a ResNet-20, 90 for a ResNet-56."
    ),
]
FOLDER = Annotated[
    str | None,
    typer.Option(help="Folder that holds the image data; for shards also s3://bucket/folder."),
]
JSON = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]
MODEL = Annotated[
    str | None,
    typer.Option(
        help="Architecture of a weights file that lipbound did not write: a model's name, "
        "package.module:FACTORY or path/to/file.py:FACTORY. It gets pixels between 0 and 1, so it "
        "must normalize them itself. Needs --data."
    ),
]
OUT = Annotated[Path | None, typer.Option(help="Append the record to this JSON Lines file.")]
PLOT = Annotated[Path | None, typer.Option(help="Draw a figure to this .svg or .png file.")]


def say(line: str) -> None:
    """Tell the user something on standard error."""
    typer.echo(f"lipbound: {line}", err=True)


def check_source(source: str) -> None:
    """Check that a named file exists, before the slow import of PyTorch that reads it."""
    path = Path(source)
    if is_weights(path):
        check_file(path)


def check_outputs(*paths: Path | None) -> None:
    """Check that the output files can be written, and say which folders are made for them."""
    folders = dict.fromkeys(path.parent for path in paths if path is not None)
    missing = [folder for folder in folders if not os.path.exists(folder)]
    check_writable(*paths)
    for folder in missing:
        say(f"made the folder {str(folder)!r}")


def check_plot(plot: Path | None) -> None:
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise ValueError(f"--plot {str(plot)!r} must end in .svg or .png")
    check_report(plot)


def check_numbers(**given: float | None) -> None:
    """Check that the given options are not negative and not NaN."""
    for name, value in given.items():
        if value is not None and not value >= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value:g} must be 0 or larger")


def check_effort(effort: str) -> None:
    if effort not in EFFORTS:
        raise ValueError(f"--effort {effort!r} is not one of {', '.join(EFFORTS)}")


def check_report(path: Path | None) -> None:
    """Check that the packages for figures and pages are installed, before the computation."""
    if path is None:
        return
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"writing {str(path)!r} needs an extra ({error}): pip install 'lipbound[report]'"
        ) from None


def domain_of(text: str) -> tuple[float, float]:
    """Read two numbers."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low = high = 0.0
    if not -float("inf") < low < high < float("inf"):
        raise ValueError(f"--domain {text!r} is not a smaller and a larger number; write 0,1")
    return low, high


def input_shape_of(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.strip("()[] ").replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"--input {text!r} is not a shape; write for example 3,32,32")
    return shape


def radius_of(text: str) -> float:
    """Read a number or a fraction.

    Example:
        >>> radius_of("51/255")
        0.2
    """
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        value = 0.0
    if not value > 0:
        raise ValueError(f"--radius {text!r} is not a positive number; write 0.25 or 36/255")
    return value
