"""What a command line names, looked up and checked before anything is computed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lipbound.files import PICKLED, SAFE, check_file


def check_source(source: str) -> None:
    """Whether a file that is named is there: known before PyTorch is imported to read it."""
    path = Path(source)
    if path.suffix in SAFE | PICKLED:
        check_file(path)


def check_plot(plot: Path | None) -> None:
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise ValueError(f"--plot {str(plot)!r} must end in .svg or .png")
    check_report(plot)


def check_numbers(**given: float | None) -> None:
    """Whether options that were given are numbers from 0 on."""
    for name, value in given.items():
        if value is not None and not value >= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value:g} must not be negative, nor nan")


def check_report(path: Path | None) -> None:
    """Whether what figures and pages need is there, before anything is computed for them."""
    if path is None:
        return
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{str(path)!r} needs an extra ({error}): pip install 'lipbound[report]'"
        ) from None


def check_input(network: Any, shape: tuple[int, ...]) -> None:
    """Whether the network takes such an input at all."""
    import torch

    from lipbound.modes import in_eval

    like = next(network.parameters(), torch.zeros(()))
    try:
        with in_eval(network), torch.no_grad():
            network(like.new_zeros((1, *shape)))
    except Exception as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"the model does not take --input {shape}: {said}") from None


def data_set(name: str, folder: Path | None) -> Any:
    """A data set by name, those this project packs for itself among them."""
    import lipbound.experiments.packed  # noqa: F401  adds its data sets
    from lipbound.robust.data import DATA

    if name not in DATA:
        raise ValueError(f"unknown data {name!r}; there are {', '.join(DATA)}")
    return DATA[name](folder)


EVERY = 10  # seconds between two lines where there is no terminal to draw a bar on


def bar(items: Sequence[Any], what: str) -> Iterable[Any]:
    """A bar on a terminal's standard error, gone when done; elsewhere a line every 10 seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _lines(items, what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as shown:
        yield from shown.track(items, description=what)


def _lines(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Also while one item takes long: another thread writes them."""
    start, place, done = time.monotonic(), 0, threading.Event()

    def tell() -> None:
        while not done.wait(EVERY):
            spent = time.monotonic() - start
            said = f"lipbound: {what}: {place} of {len(items)} after {spent:.0f} s"
            print(said, file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        for item in items:
            yield item
            place += 1
    finally:
        done.set()


def network_or_weights(source: str, model: str | None) -> tuple[Any, tuple[int, ...] | None, str]:
    """The model to audit, or its weights alone; its usual input shape, and a title."""
    from lipbound import demo, sources

    known = demo.network() if source == "demo" else sources.own_model(source)
    if known is not None and model is not None:
        raise ValueError(
            f"--model {model} is the architecture of a weights file, not of {source!r}"
        )
    if source == "demo":
        return known, demo.INPUT_SHAPE, "the embedded digits CNN"
    if known is not None:
        return known, _usual(source), f"{source}, random weights"
    path = Path(source)
    if path.suffix not in SAFE | PICKLED and not path.exists():
        raise ValueError(
            f"cannot audit {source!r}: it is no weights file and no model this package knows; "
            f"try 'demo', a .safetensors or .pt file (its architecture by --model module:factory), "
            f"resnet20, torchvision:NAME or timm:NAME"
        )
    if model is None:
        trained = sources.trained(path)
        return trained or (sources.read_weights(path), None, path.name)
    network = sources.own_model(model)
    network = sources.factory(model) if network is None else network
    filled = sources.fill(network, sources.read_weights(path))
    return filled, _usual(model), f"{model}, {path.name}"


def _usual(name: str) -> tuple[int, ...] | None:
    if ":" not in name:
        return (3, 32, 32)
    return (3, 224, 224) if name.startswith(("torchvision:", "timm:")) else None


def moved(what: Any, device: str) -> Any:
    try:
        return what.to(device)
    except Exception as error:
        raise ValueError(f"--device {device!r}: {str(error).splitlines()[0]}; try cpu") from None


def input_shape_of(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"--input {text!r} is no shape; write 3,32,32")
    return shape
