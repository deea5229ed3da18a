"""Audit whole networks and record the results.

    python -m benchmarks.audits resnet20=WEIGHTS.safetensors --effort high --out FILE
    python -m benchmarks.audits --zoo --device cuda --domain=-2.2,2.7 --out FILE

``MODEL=WEIGHTS`` is a trained network, and ``MODEL`` alone is a network with its initial weights.
The zoo has 30 networks of torchvision and timm. Networks that the file already contains (same name,
same effort) are skipped.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipbound import audit
from lipbound.cli.arguments import domain_of
from lipbound.cli.models import fill, own_model
from lipbound.files import append, provenance, read
from lipbound.network.audits import EFFORTS, Audit
from lipbound.weights import read_weights

TORCHVISION = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
    "inception_v3", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf",
    "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "squeezenet1_1", "swin_t", "vgg11", "vgg16_bn", "vit_b_16", "wide_resnet50_2",
)  # fmt: skip
TIMM = (
    "cspresnet50", "darknet53", "dla34", "dpn68", "ecaresnet26t", "ese_vovnet19b_dw",
    "ghostnet_100", "hardcorenas_a",
)  # fmt: skip
ZOO = (*(f"torchvision:{n}" for n in TORCHVISION), *(f"timm:{n}" for n in TIMM))


def load(source: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Load ``MODEL`` or ``MODEL=WEIGHTS``; return the network and its input shape."""
    name, _, weights = source.partition("=")
    model = own_model(name)
    if model is None:
        raise ValueError(f"unknown model {name!r}")
    if weights:
        fill(model, read_weights(Path(weights)))
    if ":" not in name:
        return model, (3, 32, 32)
    size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return model, (3, 299, 299) if "inception" in name else tuple(size)


def run(
    source: str, effort: str, device: str, domain: tuple[float, float] | None
) -> dict[str, Any]:
    """Audit one network and return its record."""
    torch.manual_seed(0)
    model, shape = load(source)
    model = model.to(device)
    start = time.perf_counter()
    found = audit(model, shape, effort=effort, domain=domain)
    seconds = time.perf_counter() - start
    name, _, weights = source.partition("=")
    return {
        "experiment": "audits",
        "network": name,
        "weights": Path(weights).name if weights else "as initialised, seed 0",
        "effort": effort,
        "input_shape": shape,
        "log10_upper": round(found.log10_upper, 4) if math.isfinite(found.log10_upper) else None,
        "domain": found.domain,
        "log10_lower": _log10(found.lower),
        "log10_floor": _log10(found.floor),
        "log10_product": _log10(found.product),
        "log10_paper": _log10(paper(found)),
        "layers": len(found.layers),
        "steps": len(found.steps),
        "reason": found.reason,
        "note": found.note,
        "bounded_part": found.bounded_part.module if found.reason and found.bounded_part else "",
        "seconds": round(seconds, 1),
        **provenance(device),
    }


def paper(found: Audit) -> float:
    """Return the paper's product: LipBound of every convolution, times the other layers' bounds."""
    return math.prod(row.lipbound or row.bracket.upper for row in found.layers)


def _log10(number: float) -> float | None:
    return round(math.log10(number), 4) if 0 < number < math.inf else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sources", nargs="*", metavar="MODEL[=WEIGHTS]")
    parser.add_argument("--zoo", action="store_true", help="30 networks of torchvision and timm")
    parser.add_argument("--effort", default="normal", choices=EFFORTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--domain", type=domain_of, help="range of the inputs, for example 0,1")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    chosen = parser.parse_args()
    done = {(r["network"], r["effort"]) for r in read(chosen.out)}
    for source in [*chosen.sources, *(ZOO if chosen.zoo else ())]:
        if (source.partition("=")[0], chosen.effort) in done:
            continue
        record = run(source, chosen.effort, chosen.device, chosen.domain)
        append(chosen.out, record)
        said = record["reason"] or f"10^{record['log10_upper']}"
        print(f"{source:45} {record['seconds']:7.1f} s  {said}", flush=True)


if __name__ == "__main__":
    main()
