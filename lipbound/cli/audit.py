"""``lipbound audit``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipbound.cli.arguments import (
    EFFORT,
    bar,
    check_effort,
    check_numbers,
    check_outputs,
    check_report,
    check_source,
    domain_of,
    input_shape_of,
    say,
)
from lipbound.files import write

if TYPE_CHECKING:
    from lipbound import Audit


def audit(
    source: Annotated[
        str,
        typer.Argument(
            help="What to audit: 'demo', a weights file (.safetensors, .pt, ...), or a model: "
            "resnet20, torchvision:NAME, timm:NAME, package.module:FACTORY, file.py:FACTORY."
        ),
    ],
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
        str, typer.Option(help="Bound to use for each convolution: spectral, lipbound, gram, ...")
    ] = "spectral",
    device: Annotated[
        str | None, typer.Option(help="Device to compute on, for example cuda.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the audit with pictures to this self-contained HTML file."),
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
            help="Time limit. Layers that are not finished by then get a looser upper bound, "
            "which is certified too."
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
    check_source(source)
    if html is not None and html.exists() and os.path.exists(source) and html.samefile(source):
        raise ValueError(f"--html {str(html)!r} would overwrite the weights; choose another file")
    check_outputs(html)
    check_report(html)
    check_effort(effort)
    check_numbers(fail_above=fail_above, minutes=minutes)
    limits = None if domain is None else domain_of(domain)
    from lipbound.cli.models import network_or_weights
    from lipbound.network.audits import audit_weights
    from lipbound.network.findings import audit_json
    from lipbound.report.terminal import audit_table, echo
    from lipbound.runtime import pick_device

    network, shape, name = network_or_weights(source, model, say)
    alone = isinstance(network, dict)  # kernels without an architecture
    geometry = {"stride": stride, "dilation": dilation, "groups": groups}
    how: dict[str, Any] = {"rtol": rtol, "method": method, "minutes": minutes, "progress": bar}
    if alone:
        high = None if effort == "normal" else effort
        for option, value in (("effort", high), ("input", input_shape), ("domain", domain)):
            if value is not None:
                raise ValueError(
                    f"--{option} {value} needs the network's architecture; give it with --model"
                )
        if device is not None:
            place = pick_device(device)
            network = {key: tensor.to(place) for key, tensor in network.items()}
        found = audit_weights(network, **(how | geometry))
    else:
        if set(geometry.values()) != {1}:
            raise ValueError(
                f"--stride, --dilation and --groups are for a weights file without --model; "
                f"leave them out, because the layers of {source} define their own"
            )
        shape = shape if input_shape is None else input_shape_of(input_shape)
        found = _audit_network(network, shape, device, how | {"effort": effort, "domain": limits})
    if json_:
        echo(audit_json(found, name))
    else:
        audit_table(found, name)
    if html is not None:
        from lipbound.report.page import page

        write(html, page(found, name, bar).encode())
        typer.echo(f"wrote {html}", err=True)
    _judge(max(r.bracket.upper for r in found.layers) if alone else found.upper, fail_above, found)


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


def _judge(worst: float, limit: float | None, found: Audit) -> None:
    """Exit with code 1 if the bound is above the limit, or if there is none."""
    if worst == float("inf") and found.log10_upper == worst:
        also = "" if limit is None else f", so --fail-above {limit:g} fails"
        say(f"there is no bound of the whole network{also}")
    elif limit is not None and worst > limit:
        say(f"the bound {worst:.6g} is above {limit:g}")
    else:
        return
    raise typer.Exit(1)
