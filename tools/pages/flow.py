"""Write docs/results/flow.md: an invertible residual network as a density of digits.

The picture of samples is written by ``examples/flow.py --picture docs/results/flow-samples.png``.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from lipbound.report.markdown import table
from tools.pages import DOCS, lines, write

REFERENCES = {
    "Gaussian": "a Gaussian with full covariance on the pixels",
    "histograms, then Gaussian": "histograms of the pixels, joined by a Gaussian",
    "RealNVP": "the same start, then RealNVP",
    "i-ResNet": "the same start, then the invertible residual network",
}


def spread(values: list[float]) -> str:
    """Mean of the seeds, with the smallest and the largest."""
    return f"{statistics.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def verdict(runs: list[dict[str, Any]]) -> str:
    """Compare the flow with each reference, seed by seed."""
    names = {
        "Gaussian": "a Gaussian with full covariance",
        "histograms, then Gaussian": "histograms joined by a Gaussian",
        "RealNVP": "RealNVP",
    }
    parts = []
    for name, words in names.items():
        gaps = [run["bits"][name] - run["bits"]["i-ResNet"] for run in runs]
        size = f"{abs(statistics.mean(gaps)):.2f} bits per pixel"
        if min(gaps) > 0:
            parts.append(f"{size} fewer than {words}")
        elif max(gaps) < 0:
            parts.append(f"{size} more than {words}")
        else:
            parts.append(f"about as many bits as {words}")
    return f"{parts[0]}, {parts[1]}, and {parts[2]}"


def claims() -> list[list[str]]:
    """Lines for the index."""
    runs = lines("flow")
    if not runs:
        return []
    bits = statistics.mean(run["bits"]["i-ResNet"] for run in runs)
    error = max(run["inverse_error"] for run in runs)
    return [[
        "An invertible residual network is a density of digits, with a contraction proved for every block.",
        f"{bits:.2f} bits per pixel; largest error of the inverse {error:.1e} grey levels",
        "[Flow](flow.md)",
    ]]  # fmt: skip


def page(runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    rates = [rate for run in runs for rate in run["rates"]]
    pairs = [pair for run in runs for pair in zip(run["iterations"], run["promised"], strict=True)]
    bits = [
        [words, f"{first['parameters'].get(name, 0):,}" if name in first["parameters"] else "",
         spread([run["bits"][name] for run in runs])]
        for name, words in REFERENCES.items()
    ]  # fmt: skip
    blocks = [
        [
            str(run["seed"]), f"{math.ceil(1e4 * max(run['rates'])) / 1e4:.4f}",
            ", ".join(map(str, run["iterations"])), ", ".join(map(str, run["promised"])),
            f"{run['inverse_error']:.1e}",
        ]
        for run in runs
    ]  # fmt: skip
    header = ["seed", "largest certified constant", "iterations of each block", "promised", "largest error, in levels"]  # fmt: skip
    times = sorted(run["cpu_seconds"] for run in runs)
    return f"""# An invertible residual network

An invertible residual network, trained as a probability density of 8×8 digits, describes held-out digits with {statistics.mean(run["bits"]["i-ResNet"] for run in runs):.2f} bits per pixel (fewer is better): {verdict(runs)}. RealNVP is another invertible network. Every block x + g(x) is invertible, because each of the {len(rates)} maps g is proved to have a Lipschitz constant of at most {math.ceil(1e4 * max(rates)) / 1e4:.4f}. The inverse returns all {first["held"]} held-out digits with an error of at most {max(run["inverse_error"] for run in runs):.1e} grey levels, after {min(p[0] for p in pairs)} to {max(p[0] for p in pairs)} iterations a block.

This is called a *flow*: it maps images to noise, and back. The data are scikit-learn's digits (8×8 pixels, 17 grey levels), with uniform noise of one level. The flow (Behrmann et al. 2019) starts from the histograms of the pixels and their covariance, and has {first["blocks"]} blocks of two Linear layers, whose norms `lipbound.constrain` limits. Training estimates the log-determinants by a power series with random vectors (Hutchinson). All numbers here have exact log-determinants of 64×64 Jacobians, in float64. They are for {first["held"]} digits that were not used for training or for choosing the step to stop at, with 10 draws of noise each. RealNVP (Dinh et al. 2017) has {2 * first["blocks"]} coupling layers of the same width, since each changes one half of the values, and the same optimizer and steps ({first["steps"]:,}).

{table(["density", "trained parameters", f"bits per pixel, mean of {len(runs)} seeds [smallest, largest]"], bits)}

The inverse of a block repeats x ← y − g(x). It stops when Banach's fixed-point theorem, with the certified constant, proves that the distance to the solution is at most 1e-10. *Promised* is the number of iterations that the constant alone guarantees to be enough. The iterations converge faster, because the constant is for the worst input.

{table(header, blocks)}

![Held-out digits, samples of the flow, samples of the Gaussian](flow-samples.png){{ width="720" }}

From left to right: held-out digits, samples of the flow (seed {first["seed"]}), samples of the Gaussian on the pixels.

Training of the flow took {times[0]:.0f} to {times[-1]:.0f} seconds of processor time a seed ({first["device"]}, PyTorch {first["torch"]}). The settings of the flow, and the learning rate and size of RealNVP, were chosen in shorter runs with other seeds. Some of those runs divided the digits differently, so they have seen digits that are held out here.

```sh
for seed in {" ".join(str(run["seed"]) for run in runs)}; do python examples/flow.py --seed $seed --out benchmarks/records/flow.jsonl; done
```

The program is [shown in full](../guides/examples.md#an-invertible-flow). All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them.
"""


def main(folder: Path = DOCS) -> None:
    runs = sorted(lines("flow"), key=lambda run: run["seed"])
    write(folder / "results" / "flow.md", page(runs))


if __name__ == "__main__":
    main()
