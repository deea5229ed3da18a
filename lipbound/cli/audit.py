"""``lipbound audit``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipbound import __version__
from lipbound.cli.arguments import (
    EFFORT,
    check_effort,
    check_numbers,
    check_outputs,
    check_report,
    check_source,
    domain_of,
    input_shape_of,
    say,
)
from lipbound.cli.many import audit_many, bounded
from lipbound.files import write
from lipbound.report.progress import bar
from lipbound.results import digits

if TYPE_CHECKING:
    from lipbound import Audit


def audit(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="What to audit: 'demo', a weights file (.safetensors, .pt, ...), an .onnx file, "
            "or a model: resnet20, torchvision:NAME, timm:NAME, package.module:FACTORY, "
            "file.py:FACTORY. Several get one row each; torchrun shares them among its processes.",
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="Another checkpoint or model, to be audited too and shown side by side. The "
            "other options count for both."
        ),
    ] = None,
    against_model: Annotated[
        str | None,
        typer.Option(
            help="Architecture of the weights file that --against names. Default: that of --model."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Architecture of the weights file: a model's name, package.module:FACTORY or "
            "path/to/file.py:FACTORY."
        ),
    ] = None,
    input_shape: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="Shape of one input, for example 3,32,32. Default: a usual shape that the "
            "network takes.",
        ),
    ] = None,
    rtol: Annotated[
        float, typer.Option(help="Relative width of each layer's certified interval.")
    ] = 1e-3,
    effort: EFFORT = "normal",
    method: Annotated[
        str,
        typer.Option(
            help="Bound to use for each convolution: spectral, lipbound, gram, "
            "frobenius or fantastic_four."
        ),
    ] = "spectral",
    device: Annotated[
        str | None, typer.Option(help="Device to compute on, for example cuda.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write the audit of one SOURCE with pictures to this self-contained HTML file."
        ),
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit with code 1 if the network's bound is above this number or infinite. For a "
            "weights file without --model, the largest bound of a kernel is compared."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time limit. What is not finished by then gets a looser bound, which is "
            "certified too, and no picture. Reading the network and one more step come on top: "
            "seconds, for large networks up to a minute."
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            help="Smallest and largest number of an input, for example 0,1. A network that "
            "multiplies activations is then bounded for such inputs."
        ),
    ] = None,
    stride: Annotated[
        int, typer.Option(help="Stride to assume for a weights file without --model.")
    ] = 1,
    dilation: Annotated[
        int, typer.Option(help="Dilation to assume for a weights file without --model.")
    ] = 1,
    groups: Annotated[
        int, typer.Option(help="Groups to assume for a weights file without --model.")
    ] = 1,
) -> None:
    """Certify the Lipschitz constant of every layer and of the whole network."""
    if against is None and against_model is not None:
        raise ValueError(f"--against-model {against_model} needs --against CHECKPOINT")
    if len(sources) > 1 and (against is not None or html is not None):
        option = "--against" if against is not None else "--html"
        raise ValueError(f"{option} works with one SOURCE, not with {len(sources)}")
    for named in filter(None, (*sources, against)):
        if len(sources) == 1:  # of several, those that are there are audited
            check_source(named)
        if html is not None and html.exists() and os.path.exists(named) and html.samefile(named):
            raise ValueError(
                f"--html {str(html)!r} would overwrite the weights; choose another file"
            )
    check_outputs(html)
    check_report(html)
    check_effort(effort)
    check_numbers(fail_above=fail_above, minutes=minutes)
    limits = None if domain is None else domain_of(domain)
    geometry = {"stride": stride, "dilation": dilation, "groups": groups}
    given = {
        "input": input_shape,
        "domain": domain,
        "effort": None if effort == "normal" else effort,
    }
    count = len(sources) + (against is not None)
    each = None if minutes is None else minutes / count
    how: dict[str, Any] = {"rtol": rtol, "method": method, "minutes": each, "progress": bar}

    def audited(source: str, model: str | None) -> tuple[str, Audit, float]:
        return _audited(source, model, device, geometry, given, how, effort, limits)

    if len(sources) > 1:
        audit_many(sources, lambda source: audited(source, model), device, json_, fail_above)
        return

    from lipbound.runtime import within

    source = sources[0]
    if against is None:
        with within(minutes):
            name, found, worst = audited(source, model)
            _show(found, name, json_, html)
        _judge(worst, fail_above, found)
        return
    name, found, worst = audited(source, model)
    if against_model is None and Path(against).is_file():
        against_model = model
    other_name, other, other_worst = audited(against, against_model)
    _show_both(found, name, other, other_name, json_, html)
    _judge(worst, fail_above, found, f" A, {name}")
    _judge(other_worst, None, other, f" B, {other_name}")


def _show(found: Audit, name: str, json_: bool, html: Path | None) -> None:
    from lipbound.network.findings import audit_json
    from lipbound.report.terminal import audit_table, echo

    if json_:
        echo(audit_json(found, name))
    else:
        audit_table(found, name)
    if html is not None:
        from lipbound.report.page import page

        write(html, page(found, name, bar).encode())
        typer.echo(f"wrote {html}", err=True)


def _show_both(a: Audit, name: str, b: Audit, other: str, json_: bool, html: Path | None) -> None:
    from lipbound import Comparison
    from lipbound.report.terminal import echo, result_table

    found = Comparison(a, b, (name, other))
    if json_:
        echo(json.dumps({"lipbound": __version__, **found.to_dict()}, indent=1))
    else:
        result_table(found)
    if html is not None:
        found.save_html(html)
        typer.echo(f"wrote {html}", err=True)


def _audited(
    source: str,
    model: str | None,
    device: str | None,
    geometry: dict[str, int],
    given: dict[str, str | None],
    how: dict[str, Any],
    effort: str,
    limits: tuple[float, float] | None,
) -> tuple[str, Audit, float]:
    """Audit one checkpoint or model. Return its name, the audit, and the bound to judge."""
    from lipbound.cli.models import network_or_weights
    from lipbound.network.audits import audit_weights
    from lipbound.runtime import pick_device

    network, shape, name = network_or_weights(source, model, say)
    if isinstance(network, dict):  # kernels without an architecture
        for option, value in given.items():
            if value is not None:
                raise ValueError(
                    f"--{option} {value} needs the network's architecture; give it with --model"
                )
        if device is not None:
            place = pick_device(device)
            network = {key: tensor.to(place) for key, tensor in network.items()}
        found = audit_weights(network, **(how | geometry))
        return name, found, max(row.bracket.upper for row in found.layers)
    if set(geometry.values()) != {1}:
        raise ValueError(
            f"--stride, --dilation and --groups are for a weights file without --model; "
            f"leave them out, because the layers of {source} define their own"
        )
    shape = shape if given["input"] is None else input_shape_of(given["input"])
    found = _audit_network(network, shape, device, how | {"effort": effort, "domain": limits})
    return name, found, found.upper


def _audit_network(
    network: Any, shape: tuple[int, ...] | None, device: str | None, how: dict[str, Any]
) -> Audit:
    import torch

    from lipbound import audit
    from lipbound.cli.models import guessed_shape
    from lipbound.modules import check_takes
    from lipbound.runtime import pick_device

    if device is not None:
        network = network.to(pick_device(device))
    if shape is None:
        shape = guessed_shape(network)
        say(f"assumed --input {','.join(map(str, shape))}, which the network takes")
    else:  # checked first, because the layers can take minutes
        like = next(network.parameters(), torch.zeros(()))
        check_takes(network, like.new_zeros((1, *shape)))
    return audit(network, shape, **how)


def _judge(worst: float, limit: float | None, found: Audit, which: str = "") -> None:
    """Exit with code 1 if the bound is above the limit, or if there is none."""
    if not bounded(worst, found):
        also = "" if limit is None else f", so --fail-above {limit:g} fails"
        say(f"there is no bound of the whole network{which}{also}")
    elif limit is not None and worst > limit:
        say(f"the bound {digits(worst, 6, 'up')} is above {limit:g}")
    else:
        return
    raise typer.Exit(1)
