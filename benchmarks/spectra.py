"""Hold the asymptotic distribution of a layer's singular values against SVDs at input sizes.

    python -m benchmarks.spectra WEIGHTS.safetensors --sizes 16,32,64 --most 8192 --out FILE

Every convolution of the file is compared at every input size at which the smaller side of its
matrix has at most ``--most`` rows. Convolutions have stride 1 and padding for the same size here.
A deviation is the distance of a quantile of ``spectrum`` from the same quantile of the SVD, divided
by the largest singular value. Layers and sizes that the file already contains are skipped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigvalsh
from torch import Tensor

from lipbound import spectrum
from lipbound.files import append, provenance, read
from lipbound.toeplitz import operator_matrix
from lipbound.weights import read_weights


def compared(kernel: Tensor, size: int) -> dict[str, Any]:
    """Return the deviations of the quantiles of one convolution at an input size."""
    padding = tuple(m // 2 for m in kernel.shape[2:])
    dims = kernel.ndim - 2
    start = time.perf_counter()
    found = spectrum(kernel, padding=padding)
    seconds = time.perf_counter() - start
    matrix = operator_matrix(kernel, (size,) * dims, padding=padding)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    squares = eigvalsh(gram.toarray(), overwrite_a=True, check_finite=False)
    values = np.sqrt(np.maximum(squares, 0.0))
    levels = (np.arange(len(values)) + 0.5) / len(values)
    away = np.abs(found.quantile(levels) - values) / values[-1]
    return {
        "count": len(values),
        "largest": float(away.max()),
        "mean": float(away.mean()),
        "condition": float(min(found.condition, 1e300)),
        "effective_rank": found.effective_rank,
        "samples": found.samples,
        "spectrum_seconds": round(seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("weights", type=Path, metavar="WEIGHTS")
    parser.add_argument("--sizes", default="16,32,64", help="input sizes, with commas")
    parser.add_argument("--most", type=int, default=8192, help="largest matrix to decompose")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    chosen = parser.parse_args()
    done = {(r["weights"], r["layer"], r["size"]) for r in read(chosen.out)}
    for name, kernel in read_weights(chosen.weights).items():
        if not name.endswith("weight") or kernel.ndim < 3:
            continue
        for size in map(int, chosen.sizes.split(",")):
            smaller = min(kernel.shape[:2]) * size ** (kernel.ndim - 2)
            if smaller > chosen.most or (chosen.weights.name, name, size) in done:
                continue
            about = {"weights": chosen.weights.name, "layer": name, "shape": list(kernel.shape)}
            record = {
                "experiment": "spectra",
                **about,
                "size": size,
                **compared(kernel.double(), size),
                **provenance("cpu"),
            }
            append(chosen.out, record)
            print(f"{name:30} {size:4} {record['mean']:.4f} {record['largest']:.4f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
