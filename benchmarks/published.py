"""Bound the random networks of the ECLipsE paper, beside its authors' tool and LipSDP.

    pip install eclipse-nn
    python -m benchmarks.published 5x20 10x20 5x100 --out FILE

``LxW`` is the network with L layers of width W. The paper (Xu and Sivaranjani 2024) draws its
weights with numpy from a seed that it gives, so these are its networks. Each record has the product
of the layers' norms, both estimates of ``eclipse_nn`` if it is installed, LipSDP by an
interior-point solver up to some number of neurons, and the bound of ``audit(effort="high")``.
Only the last one is proved in floating-point arithmetic. Networks that the file already contains
are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lipbound import audit
from lipbound.files import append, provenance, read
from verify.interior_point import lipsdp

INPUTS, NORMS = 4, (0.4, 1.8)  # of the paper's networks, which have one output
NEURONS = 200  # up to here the interior-point solver takes seconds


def network(layers: int, width: int) -> nn.Sequential:
    """Return the paper's network: Gaussian weights, scaled to norms that are drawn too."""
    draw = np.random.RandomState(7 * width + 13 * layers)
    parts: list[nn.Module] = []
    for place in range(layers):
        columns = width if place else INPUTS
        rows = width if place < layers - 1 else 1
        norm = draw.uniform(*NORMS)
        weight = draw.randn(rows, columns)
        layer = nn.Linear(columns, rows, bias=False, dtype=torch.float64)
        layer.weight.data = torch.from_numpy(norm * weight / np.linalg.norm(weight, 2))
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def timed(run: Callable[[], float]) -> dict[str, float]:
    start = time.perf_counter()
    bound = run()
    return {"bound": bound, "seconds": round(time.perf_counter() - start, 3)}


def eclipse(weights: list[torch.Tensor], method: str) -> dict[str, float] | None:
    """Return the estimate of the authors' package; None if it is not installed."""
    try:
        from eclipse_nn import LipConstEstimator
    except ImportError:
        return None
    with contextlib.redirect_stdout(io.StringIO()):
        return timed(lambda: float(LipConstEstimator(weights=weights).estimate(method)))


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run(layers: int, width: int) -> dict[str, Any]:
    model = network(layers, width)
    weights = [part.weight.detach() for part in model if isinstance(part, nn.Linear)]
    neurons = (layers - 1) * width
    found = None

    def ours() -> float:
        nonlocal found
        found = audit(model, (INPUTS,), effort="high", search=16)
        return found.upper

    bound = timed(ours)
    assert found is not None
    solved = timed(lambda: lipsdp([w.numpy() for w in weights])) if neurons <= NEURONS else None
    return {
        "experiment": "published",
        "layers": layers,
        "width": width,
        "product": math.prod(float(torch.linalg.matrix_norm(w, 2)) for w in weights),
        "ECLipsE-Fast": eclipse(weights, "ECLipsE_Fast"),
        "ECLipsE": eclipse(weights, "ECLipsE"),
        "LipSDP": solved,
        "audit": bound,
        "floor": found.floor,
        "lower": found.lower,
        "eclipse_nn": version("eclipse_nn"),
        **provenance("cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sizes", nargs="+", metavar="LxW", help="layers and width: 5x20")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    chosen = parser.parse_args()
    done = {(r["layers"], r["width"]) for r in read(chosen.out)}
    for size in chosen.sizes:
        try:
            layers, width = map(int, size.split("x"))
        except ValueError:
            parser.error(f"{size!r} is not a size; give layers and width: 5x20")
        if (layers, width) in done:
            continue
        record = run(layers, width)
        append(chosen.out, record)
        bound = record["audit"]
        print(f"{size:8} {bound['bound'] / record['product']:.3g} × product", flush=True)


if __name__ == "__main__":
    main()
