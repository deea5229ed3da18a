"""``lipbound attack``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lipbound.cli.arguments import (
    DATA,
    DEVICE,
    FOLDER,
    JSON,
    MODEL,
    OUT,
    PLOT,
    check_numbers,
    check_outputs,
    check_plot,
    check_report,
    check_source,
    radius_of,
    say,
)
from lipbound.report.progress import bar


def attack(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Folder of a training run, one of its .safetensors files, or the weights of "
            "another network (with --model)."
        ),
    ],
    model: MODEL = None,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            help="Attack to run (repeatable): pgd, cw, cw-projected, apgd-l2, autoattack. Default: "
            "pgd.",
        ),
    ] = None,
    data: DATA = None,
    folder: FOLDER = None,
    count: Annotated[int, typer.Option(help="Number of test images (0: all).")] = 1000,
    ball: Annotated[
        str | None, typer.Option(help="Norm of the perturbation: linf or l2. Default: the run's.")
    ] = None,
    radius: Annotated[
        str | None,
        typer.Option(
            help="Largest norm of the perturbation, a number or a fraction such as 8/255. Default: "
            "the run's."
        ),
    ] = None,
    iterations: Annotated[int, typer.Option(help="Number of PGD iterations.")] = 200,
    restarts: Annotated[int, typer.Option(help="Number of PGD restarts.")] = 10,
    step: Annotated[float, typer.Option(help="PGD step size, as a fraction of the radius.")] = 0.2,
    loss: Annotated[
        str,
        typer.Option(help="PGD loss: cross-entropy, margin, or alternate (both in turn)."),
    ] = "alternate",
    decay: Annotated[
        bool, typer.Option("--decay", help="Make the PGD steps smaller towards the end.")
    ] = False,
    l2_radius: Annotated[
        list[float] | None,
        typer.Option(
            help="L2 radius at which to report the accuracy under cw, cw-projected and apgd-l2 "
            "(repeatable; default 0.6 and 0.8)."
        ),
    ] = None,
    jacobians: Annotated[
        int, typer.Option(help="Number of images at which to measure the Jacobian.")
    ] = 100,
    certify: Annotated[
        bool, typer.Option("--certify", help="Audit the network and report certified accuracies.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Number of images per batch.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed for the attacks' random starts.")] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of the attacks: float32, tf32, float16 or bfloat16. Results are "
            "always re-checked in float32."
        ),
    ] = "float32",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Run the attacks with torch.compile.")
    ] = False,
    graphs: Annotated[bool, typer.Option(help="Use CUDA graphs to run the attacks faster.")] = True,
    device: DEVICE = None,
    json_: JSON = False,
    out: OUT = None,
    plot: PLOT = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with the tables and the curves to this file."),
    ] = None,
) -> None:
    """Measure accuracy under attack, and warn if an attack looks too weak to be trusted."""
    from lipbound.files import append, write

    check_source(checkpoint)
    check_numbers(count=count, jacobians=jacobians)
    size = None if radius is None else radius_of(radius)
    check_plot(plot)
    check_report(html)
    check_outputs(out, plot, html)
    from lipbound.cli.models import evaluated
    from lipbound.report.terminal import echo, result_table
    from lipbound.robust.attacks.plan import Plan
    from lipbound.robust.training.assess import assess
    from lipbound.robust.training.distributed import team
    from lipbound.robust.training.settings import Settings

    paths, images, name = evaluated(checkpoint, model, data, folder, count, say)
    if any(p.element_size() > 4 for path in paths for p in path.model.parameters()):
        say("converted the network to float32, in which attacks run")
    trained = paths[0].settings or Settings()
    plan = Plan(
        attacks=tuple(attacks or ["pgd"]), ball=ball or trained.ball,
        radius=trained.radius if size is None else size, step=step, iterations=iterations,
        restarts=restarts, loss=loss, decay=decay, radii=tuple(l2_radius or (0.6, 0.8)),
        batch=batch, seed=seed, precision=precision, compile=compile_, graphs=graphs,
    )  # fmt: skip
    if paths[0].settings is None and (ball is None or size is None):
        say(f"attacking in the {plan.ball} ball of radius {plan.radius:.4g}; see --ball, --radius")
    records = []
    with team(device) as who:
        for path in paths:
            # Each network is also tested on adversarial examples of the other one.
            other = next((p for p in paths if p is not path), None)
            record = assess(
                path, other, images, plan, who.device, certify=certify, jacobians=jacobians,
                say=lambda what: typer.echo(f"{what} ...", err=True), progress=bar,
            )  # fmt: skip
            record["data"] = name
            records.append(record)
            if json_:
                echo(json.dumps(record, indent=1))
            else:
                result_table(record)
            if out is not None:
                append(out, record)
                typer.echo(f"wrote {out}", err=True)
    if plot is not None:
        from lipbound.report.figures import attack_figure

        attack_figure(records, plot)
        typer.echo(f"wrote {plot}", err=True)
    if html is not None:
        from lipbound.report.attacks import attack_page

        write(html, attack_page(records).encode())
        typer.echo(f"wrote {html}", err=True)
