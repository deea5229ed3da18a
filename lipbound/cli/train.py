"""``lipbound train``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipbound.cli.arguments import DEVICE, FOLDER, check_numbers
from lipbound.report.progress import bar

if TYPE_CHECKING:
    from lipbound.robust.training.settings import Settings


def train(
    out: Annotated[
        Path,
        typer.Option(help="Folder for the run. Several arms get one subfolder each."),
    ],
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="Training method (repeatable): baseline, lipreg, at, at+pm, at+lipreg, "
            "at+spectral, all (these six), trades, or certified. Default: at+lipreg."
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="Settings to start from: digits, fast, fast-wrn, paper-cifar, paper-imagenet, "
            "authors-code; for the arm certified: digits, fast, large, cifar."
        ),
    ] = "digits",
    model: Annotated[
        str | None, typer.Option(help="Network: cnn, wrn-28-10, preact-resnet18, ...")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data set: digits, cifar10, cifar100, fashion-mnist, folder, shards."),
    ] = None,
    folder: FOLDER = None,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Minutes of training steps, instead of a number of epochs. Checks and the final "
            "test come on top."
        ),
    ] = None,
    penalty: Annotated[
        str | None,
        typer.Option(help="Lipschitz penalty: lipbound, polygrid, spectral or power_iteration."),
    ] = None,
    penalty_weight: Annotated[
        float | None, typer.Option(help="Weight of the penalty, λ2 in the paper.")
    ] = None,
    fold_batchnorm: Annotated[
        bool,
        typer.Option(
            "--fold-batchnorm",
            help="In the penalty, fold each BatchNorm into the convolution before it.",
        ),
    ] = False,
    floor: Annotated[
        float | None, typer.Option(help="Do not penalize layers whose bound is below this number.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for weights, batches and attacks.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change another setting: NAME=VALUE (repeatable)."),
    ] = None,
    device: DEVICE = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint, if there is one.")
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Save a checkpoint and stop after this many seconds, at the next step. Continue "
            "with --resume."
        ),
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Also save a checkpoint every N steps (0: only after every epoch).")
    ] = 0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard logs.")
    ] = False,
) -> None:
    """Train a network: adversarially, with a Lipschitz penalty, both, neither, or certified."""
    check_numbers(time_limit=time_limit, save_every=save_every)
    if epochs is not None and minutes:
        raise ValueError(f"--epochs {epochs} and --minutes {minutes:g}: give only one of them")
    if epochs is not None:
        minutes = 0.0
    given = {
        "model": model, "data": data, "epochs": epochs, "minutes": minutes, "penalty": penalty,
        "floor": floor, "penalty_weight": penalty_weight, "seed": seed,
        "batchnorm": "folded" if fold_batchnorm else None,
    }  # fmt: skip
    runs = _runs(arm, preset, {k: v for k, v in given.items() if v is not None}, set_ or [])
    options = {
        "resume": resume, "device": device, "time_limit": time_limit, "save_every": save_every,
    }  # fmt: skip
    _report(_train(runs, folder, out, tensorboard, options))


def _runs(
    arms: list[str] | None, preset: str, changes: dict[str, Any], texts: list[str]
) -> list[Settings]:
    """Return every run's settings; with several arms, options do not change what defines one."""
    from lipbound.robust.training.settings import ARMS, PAPER_ARMS, parse, settings

    changes = changes | dict(parse(text) for text in texts)
    given = [PAPER_ARMS if arm == "all" else (arm,) for arm in arms or ["at+lipreg"]]
    names = [*dict.fromkeys(name for some in given for name in some)]
    fixed = {name: ARMS.get(name, {}) if len(names) > 1 else {} for name in names}
    return [
        settings(name, preset, **{k: v for k, v in changes.items() if k not in fixed[name]})
        for name in names
    ]


def _train(
    runs: list[Settings], folder: str | None, out: Path, tensorboard: bool, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Train one run after the other until one is stopped, and return the summaries."""
    from lipbound.report.terminal import TrainingView
    from lipbound.robust.data import data_set
    from lipbound.robust.training.loop import train as train_one

    images = data_set(runs[0].data, folder, progress=bar)
    summaries: list[dict[str, Any]] = []
    for run in runs:
        place = out if len(runs) == 1 else out / run.arm
        board = place / "tensorboard" if tensorboard else None
        shown = TrainingView(run.arm, board) if _first() else contextlib.nullcontext()
        with shown as view:
            summaries.append(train_one(run, images, place, watcher=view, **options))
        if summaries[-1]["stopped"]:
            break
    return summaries


def _first() -> bool:
    """Whether this is the process that reports, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _report(summaries: list[dict[str, Any]]) -> None:
    if not _first():
        return
    from lipbound.report.terminal import training_table

    if any(not summary["stopped"] for summary in summaries):
        training_table(summaries)
    if summaries[-1]["stopped"]:
        said = f"lipbound: {summaries[-1]['stopped']}; repeat the command with --resume to continue"
        typer.echo(said, err=True)
        # Bypass typer, which prints its own message for an interruption.
        raise SystemExit(130 if summaries[-1]["stopped"] == "interrupted" else 0)
