"""The commands. Heavy imports wait inside the command that needs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lipbound import __version__
from lipbound.given import (
    bar,
    check_input,
    check_numbers,
    check_plot,
    check_report,
    check_source,
    data_set,
    input_shape_of,
    moved,
    network_or_weights,
)

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
            said = error.format_message().rstrip(".")
            said = said.replace("Input should be", f"{_value(error, arguments)} should be")
            path = getattr(getattr(error, "ctx", None), "command_path", "lipbound")
            known = getattr(command, "commands", ())
            if path == "lipbound" and arguments and arguments[0] in known:
                path = f"lipbound {arguments[0]}"
            raise ValueError(f"{said}; try '{path} --help'") from None
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from None
        raise


def _value(error: Exception, arguments: Sequence[str]) -> str:
    """What was given for the option that an error is about, in quotes."""
    names = getattr(getattr(error, "param", None), "opts", [])
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names and (equals or place + 1 < len(arguments)):
            return repr(value if equals else arguments[place + 1])
    return "it"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lipbound {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
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
    from lipbound.files import check_writable
    from lipbound.records import append, read
    from lipbound.report import speed_table

    check_plot(plot)
    check_writable(out, plot)
    names, methods = network or list(NAMES), method or list(METHODS)
    records = read(out) if out else []
    done = [r for r in records if r.get("network") in names and "milliseconds" in r]
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
    source: Annotated[
        str,
        typer.Argument(
            help="'demo'; weights (.safetensors, .pt); a model: resnet20, resnet56, wrn-28-10, "
            "torchvision:NAME, timm:NAME."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Architecture of a weights file: package.module:factory, or a name."),
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option("--input", help="Shape of one input, 3,32,32 say.")
    ] = None,
    rtol: Annotated[float, typer.Option(help="Relative width of the brackets.")] = 1e-3,
    effort: Annotated[
        str, typer.Option(help="'high': two weighted norms per residual block; minutes.")
    ] = "normal",
    method: Annotated[
        str, typer.Option(help="What bounds each convolution: spectral, lipbound, gram ...")
    ] = "spectral",
    device: Annotated[str | None, typer.Option(help="Where to compute, cuda say.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that needs nothing else: table, pictures.")
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit with code 1 if the network's bound exceeds this number, or if there is no "
            "bound. Without an architecture the largest kernel counts."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time to search the layers for. Layers that are not done by then keep an upper "
            "end from a cheaper bound, which is proved too."
        ),
    ] = None,
    stride: Annotated[
        int, typer.Option(help="Stride to assume when only a weights file is given.")
    ] = 1,
    dilation: Annotated[
        int, typer.Option(help="Dilation to assume when only a weights file is given.")
    ] = 1,
    groups: Annotated[
        int, typer.Option(help="Groups to assume when only a weights file is given.")
    ] = 1,
) -> None:
    """Every layer's gain and the whole network's, certified."""
    check_source(source)
    from lipbound.files import check_writable
    from lipbound.network import audit as run_audit
    from lipbound.network import audit_weights
    from lipbound.report import audit_json, audit_table, echo

    if html is not None and html.exists() and os.path.exists(source) and html.samefile(source):
        raise ValueError(f"--html {str(html)!r} would overwrite the weights; name another file")
    if effort not in ("normal", "high"):
        raise ValueError(f"--effort {effort!r} is not 'normal' or 'high'")
    check_writable(html)
    check_report(html)
    check_numbers(fail_above=fail_above, minutes=minutes)
    network, shape, name = network_or_weights(source, model)
    if input_shape is not None:
        shape = input_shape_of(input_shape)
        if not isinstance(network, dict):
            check_input(network, shape)
    how: dict[str, Any] = {"method": method, "minutes": minutes, "progress": bar}
    geometry = {"stride": stride, "dilation": dilation, "groups": groups}
    if isinstance(network, dict):
        if effort != "normal":
            raise ValueError(f"--effort {effort} is for networks; name the architecture by --model")
        if input_shape is not None:
            raise ValueError(f"--input {input_shape} is for networks; name the architecture by "
                             "--model")  # fmt: skip
        placed = network if device is None else {k: moved(t, device) for k, t in network.items()}
        found = audit_weights(placed, rtol, **{**how, **geometry})
    else:
        if set(geometry.values()) != {1}:
            raise ValueError("--stride, --dilation and --groups are for weights alone, not for "
                             f"{source}, whose layers have their own")  # fmt: skip
        network = network if device is None else moved(network, device)
        found = run_audit(network, shape, rtol, effort=effort, **how)
    if json_:
        echo(audit_json(found, name))
    else:
        audit_table(found, name)
    if html is not None:
        _write_page(found, name, html)
    alone = isinstance(network, dict)  # kernels that nothing says are one network
    worst = max(r.bracket.upper for r in found.layers) if alone else found.upper
    if fail_above is not None and not worst <= fail_above:
        said = f"{worst:.6g} is above {fail_above:g}"
        if worst == float("inf"):
            said = f"there is no bound, so --fail-above {fail_above:g} fails"
        typer.echo(f"lipbound: {said}", err=True)
        raise typer.Exit(1)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the run; with several arms, of their runs.")],
    arm: Annotated[
        list[str] | None,
        typer.Option(help="baseline, lipreg, at, at+pm, at+lipreg, at+spectral; repeat; or all."),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="digits, fast, fast-wrn, paper-cifar, paper-imagenet, authors-code.")
    ] = "digits",
    model: Annotated[str | None, typer.Option(help="cnn, wrn-28-10, preact-resnet18 ...")] = None,
    data: Annotated[
        str | None, typer.Option(help="digits, cifar10, cifar100, fashion-mnist, folder.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the data lies.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Length of the run.")] = None,
    penalty: Annotated[
        str | None, typer.Option(help="lipbound, polygrid, spectral or power_iteration.")
    ] = None,
    penalty_weight: Annotated[float | None, typer.Option(help="λ2.")] = None,
    fold_batchnorm: Annotated[
        bool, typer.Option("--fold-batchnorm", help="In the penalty, into the convolution.")
    ] = False,
    floor: Annotated[
        float | None, typer.Option(help="Of the penalty: log max(bound, floor).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting, NAME=VALUE; repeat.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Stop with a checkpoint after so many seconds.")
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints, besides every epoch's.")
    ] = 0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars too.")] = False,
) -> None:
    """Train a network: adversarially, Lipschitz-regularized, both or neither."""
    from lipbound.report import TrainingView, training_table
    from lipbound.robust.settings import ARMS, parse, settings
    from lipbound.robust.train import train as run_training

    check_numbers(time_limit=time_limit, save_every=save_every)
    given = {
        "model": model, "data": data, "epochs": epochs, "penalty": penalty, "floor": floor,
        "penalty_weight": penalty_weight, "seed": seed,
        "batchnorm": "folded" if fold_batchnorm else None,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    changes |= dict(parse(text) for text in set_ or [])
    arms = list(ARMS) if "all" in (arm or ()) else [*dict.fromkeys(arm or ["at+lipreg"])]
    if len(arms) > 1:  # what one arm is about is not changed by an option for all
        own = {
            name: {k: v for k, v in changes.items() if k not in ARMS.get(name, {})} for name in arms
        }
    else:
        own = {arms[0]: changes}
    runs = [settings(name, preset, **own[name]) for name in arms]
    images = data_set(runs[0].data, folder)
    summaries = []
    for chosen in runs:
        place = out if len(runs) == 1 else out / chosen.arm.replace("+", "-")
        with TrainingView(chosen.arm, place / "tensorboard" if tensorboard else None) as view:
            summary = run_training(
                chosen, images, place, resume=resume, device=device, time_limit=time_limit,
                save_every=save_every, watcher=view,
            )  # fmt: skip
        summaries.append(summary)
        if summary["stopped"]:
            break
    if os.environ.get("RANK", "0") != "0":
        return
    if any(not summary["stopped"] for summary in summaries):
        training_table(summaries)
    if summaries[-1]["stopped"]:
        typer.echo(f"lipbound: {summaries[-1]['stopped']}; --resume goes on", err=True)
        # Past typer, which has its own words for an interruption.
        raise SystemExit(130 if summaries[-1]["stopped"] == "interrupted" else 0)


@app.command()
def attack(
    checkpoint: Annotated[
        Path, typer.Argument(help="A training run's folder, or its best or final.safetensors.")
    ],
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", help="pgd, cw, cw-projected, autoattack; repeat."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="The run's own by default.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the data lies.")] = None,
    count: Annotated[int, typer.Option(help="Test images; 0 for all.")] = 1000,
    ball: Annotated[str | None, typer.Option(help="linf or l2; the run's own by default.")] = None,
    radius: Annotated[float | None, typer.Option(help="The run's own by default.")] = None,
    iterations: Annotated[int, typer.Option(help="Of PGD.")] = 200,
    restarts: Annotated[int, typer.Option(help="Of PGD.")] = 10,
    step: Annotated[float, typer.Option(help="Of PGD, as part of the radius.")] = 0.2,
    loss: Annotated[
        str, typer.Option(help="Of PGD: cross-entropy, margin, or alternate by restart.")
    ] = "alternate",
    decay: Annotated[bool, typer.Option("--decay", help="Let PGD's steps shrink.")] = False,
    l2_radius: Annotated[
        list[float] | None, typer.Option(help="Where Carlini & Wagner counts; repeat. 0.6, 0.8.")
    ] = None,
    jacobians: Annotated[int, typer.Option(help="Images at which to measure the Jacobian.")] = 100,
    certify: Annotated[
        bool, typer.Option("--certify", help="Audit the network, for certified accuracies.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 500,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    precision: Annotated[
        str,
        typer.Option(help="Of the searches: float32 (has the last word), tf32, float16, bfloat16."),
    ] = "float32",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the network for the searches.")
    ] = False,
    graphs: Annotated[bool, typer.Option(help="Replay the searches as CUDA graphs.")] = True,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
    out: Annotated[Path | None, typer.Option(help="Append the record to JSON lines.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves here, .svg or .png.")] = None,
) -> None:
    """Accuracy under attack, with intervals and doubts."""
    from lipbound.files import append, check_file, check_writable

    if not checkpoint.is_dir():  # a run's folder stands for its networks
        check_file(checkpoint)
    import json

    import torch

    from lipbound.report import attack_table, echo
    from lipbound.robust.assess import assess, networks
    from lipbound.robust.plan import Plan
    from lipbound.robust.team import team

    check_numbers(count=count, jacobians=jacobians)
    check_plot(plot)
    check_writable(out, plot)
    paths = networks(checkpoint)
    trained = paths[0].settings
    name = data or trained.data
    plan = Plan(
        tuple(attacks or ["pgd"]), ball or trained.ball,
        trained.radius if radius is None else radius, step, iterations, restarts, loss, decay,
        radii=tuple(l2_radius or (0.6, 0.8)),
        batch=batch, seed=seed, precision=precision, compile=compile_, graphs=graphs,
    )  # fmt: skip
    test = data_set(name, folder).test
    images = test.load(torch.arange(min(count or len(test), len(test))))
    records = []
    with team(device) as who:
        for path in paths:
            other = next((p for p in paths if p is not path), None)
            record = assess(
                path, other, images, plan, who.device, certify=certify, jacobians=jacobians,
                progress=lambda what: typer.echo(f"{what} ...", err=True),
            )  # fmt: skip
            records.append({**record, "data": name})
            if json_:
                echo(json.dumps(records[-1], indent=1))
            else:
                attack_table(records[-1])
            if out is not None:
                append(out, records[-1])
    if plot is not None:
        from lipbound.figures import attack_figure

        attack_figure(records, plot)
        typer.echo(f"wrote {plot}", err=True)


@app.command()
def reproduce(
    name: Annotated[
        str, typer.Argument(help="fig1, fig2, fig3, table1, table2, table3, table4, or all.")
    ],
    weights: Annotated[
        list[Path] | None,
        typer.Option(help="Trained networks' weights; repeat. The embedded network's without."),
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Seconds, to see that it works.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where image data lies, for table2, table3, fig3.")
    ] = None,
    tier: Annotated[
        str,
        typer.Option(help="Of table2: A, O, B, B100, C, or the pilot A0; all but that without."),
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(help="An arm of the tier, 'at+lipreg 0.02' say; repeat.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="After which trainings pause; the same command goes on with them."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, for trainings and times; the GPU if any.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of records and figures.")] = Path("reproduced"),
) -> None:
    """Compute a figure or table of the paper anew: record, figure, report."""
    from lipbound.experiments import reproduce as steps
    from lipbound.experiments.request import Request
    from lipbound.files import check_writable
    from lipbound.report import TrainingView, echo

    check_numbers(minutes=minutes)
    names = list(steps.EXPERIMENTS) if name == "all" else [name]
    for each in names:
        if each not in steps.EXPERIMENTS:
            raise ValueError(f"unknown {each!r}; there are {', '.join(steps.EXPERIMENTS)}, all")
    request = Request(
        tiny, tuple(weights or ()), out, folder, tier, tuple(only or ()), minutes, device,
        lambda text: typer.echo(text, err=True), TrainingView,
    )  # fmt: skip
    for option, value in (
        ("weights", weights), ("folder", folder), ("tier", tier), ("only", only),
        ("minutes", minutes), ("device", device),
    ):  # fmt: skip
        takers = steps.TAKES[option]
        if value and not {*takers} & {*names}:
            raise ValueError(f"{name} takes no --{option}; {', '.join(takers)} do")
    if tiny and folder is not None:
        raise ValueError(f"--tiny trains on scikit-learn's digits; leave out --folder {folder}")
    if name == "all" and folder is None and not tiny:  # before the others are computed
        raise ValueError(f"table2 needs --folder, one with {steps.table2.ON}; --tiny needs none")
    check_report(out)
    check_writable(*(out / f"{each}.json" for each in names))
    for each in names:
        record = steps.run(each, request)
        steps.save(record, out)
        steps.write_figure(record, out)
        echo(steps.report(record))


def _write_page(found: Any, name: str, path: Path) -> None:
    from lipbound.files import write
    from lipbound.page import page

    write(path, page(found, name, bar).encode())
    typer.echo(f"wrote {path}", err=True)
