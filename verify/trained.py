"""Check certified brackets of trained kernels, with and without folded BatchNorm.

    python -m verify trained WEIGHTS.safetensors ... --out record.json

The truth lies between the largest σ1(F) of a 48×48 grid (dense eigenvalues, float64) and that
times the grid's widening, 1.0043 for 3×3 kernels; a bracket that misses this interval, in float32
or float64, is a violation.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lipbound import bound, brackets
from lipbound.bounds.rounding import shorter_side_first
from lipbound.symbols import widening
from lipbound.weights import read_weights

SAMPLES = 48


def kernels(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield every 4d weight, and its product with the BatchNorm that follows it by name."""
    for name, weight in state.items():
        if weight.ndim != 4:
            continue
        yield name, weight
        norm = re.sub(r"conv(\d+)\.weight$", r"bn\1", name)
        if f"{norm}.running_var" in state:
            deviation = (state[f"{norm}.running_var"] + 1e-5).sqrt()
            yield (
                f"{name} folded",
                weight * (state[f"{norm}.weight"] / deviation)[:, None, None, None],
            )


def grid_peak(kernel: Tensor, samples: int = SAMPLES) -> float:
    """Return the largest σ1(F) on a grid, of which conjugate symmetry needs only half."""
    symbols = torch.fft.rfft2(kernel.double(), s=(samples, samples)).permute(2, 3, 0, 1)
    wide = shorter_side_first(symbols)
    return float(torch.linalg.eigvalsh(wide @ wide.mH)[..., -1].max().sqrt())


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", nargs="+", type=Path, help="safetensors files of kernels")


def check_options(chosen: argparse.Namespace) -> None:
    for path in chosen.weights:
        read_weights(path)


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    layers = {
        f"{path.stem}: {name}": kernel
        for path in chosen.weights
        for name, kernel in kernels(read_weights(path))
    }
    violations, runs = [], {}
    truth = {name: grid_peak(kernel) for name, kernel in layers.items()}
    for rtol, dtype in itertools.product((1e-3, 1e-6), (torch.float32, torch.float64)):
        found = brackets({name: kernel.to(dtype) for name, kernel in layers.items()}, rtol)
        for name, interval in found.items():
            most = truth[name] * widening((SAMPLES,) * 2, layers[name].shape[2:])
            if interval.upper < truth[name] * (1 - 1e-12) or interval.lower > most:
                violations.append({"layer": name, "rtol": rtol, "dtype": str(dtype)})
        spent = [interval.evaluations for interval in found.values()]
        runs[f"rtol {rtol:g}, {str(dtype).removeprefix('torch.')}"] = {
            "worst_width": max(interval.width for interval in found.values()),
            "median_evaluations": median(spent),
            "most_evaluations": max(spent),
        }
        print(f"rtol {rtol:g}, {dtype} done", flush=True)
    excess = [
        float(bound(kernel, "lipbound", sides="both")) / truth[name]
        for name, kernel in layers.items()
    ]
    record = {
        "weights": [path.name for path in chosen.weights],
        "kernels": len(layers),
        "violations": violations,
        "runs": runs,
        "lipbound_over_truth": {
            "least": min(excess),
            "median": median(excess),
            "most": max(excess),
        },
    }
    return record, list(map(str, violations))
