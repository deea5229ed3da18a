"""Time LipBound layer by layer, and as a penalty, beside direct evaluation of the polynomials.

    python -m benchmarks.lipbound_layers --network resnet18 --out RECORD.jsonl

All contenders run on the same He-initialised float32 convolutions in one process: calls of
``bound(layer, "lipbound")`` for every layer, the value of ``Penalty``, and the direct evaluation
that the paper's authors published (a 10×10 grid). The record holds medians and their ratios.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lipbound import Penalty, bound
from lipbound.files import append, provenance
from lipbound.paper.networks import NAMES, Layers
from lipbound.paper.speed import Direct, milliseconds


@torch.no_grad()
def measure(name: str) -> dict[str, object]:
    """One network's record, on the CPU."""
    torch.manual_seed(0)
    device, network = torch.device("cpu"), Layers(name)
    layers = list(network.convolutions)
    penalty = Penalty(network, 1.0, include_batchnorm=False)
    times = {
        "bound": milliseconds(lambda: [bound(layer, "lipbound") for layer in layers], device),
        "penalty": milliseconds(penalty, device),
        "direct": milliseconds(Direct([layer.weight for layer in layers]), device),
    }
    return {
        "benchmark": "lipbound layers",
        "network": name,
        "milliseconds": {key: round(value, 3) for key, value in times.items()},
        "direct_over_bound": round(times["direct"] / times["bound"], 1),
        "direct_over_penalty": round(times["direct"] / times["penalty"], 1),
        **provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--network", choices=NAMES, default="resnet18", help="network to time")
    parser.add_argument("--out", type=Path, help="append the record to this file of JSON lines")
    chosen = parser.parse_args()
    record = measure(chosen.network)
    print(record)
    if chosen.out:
        append(chosen.out, record)


if __name__ == "__main__":
    main()
