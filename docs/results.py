"""Write docs/results.md from the records in benchmarks/records: ``make results``."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def soundness() -> str:
    record = json.loads((RECORDS / "soundness.json").read_text())
    wide = record["wider_than_rtol"]
    return f"""## Random layers

`python -m lipbound.experiments.soundness --count {record["count"]}`: seeds {record["first_seed"]} to
{record["first_seed"] + record["count"] - 1}, every geometry (1d to 3d, stride, dilation, groups, four padding modes, transposed), eight
kernel families, float64, float32 and bfloat16, scales from 1e-20 to 1e20. Both ends of both
brackets (every size, and one input size) against dense SVDs:
**{len(record["violations"])} violations in {record["count"]:,} layers.** {len(wide)} of them were left wider than rtol = {record["rtol"]:g} (seeds {", ".join(map(str, wide))}): symbols nearly flat on
three axes, where the search stops at its limit and says so by its width.
({record["device"]}, torch {record["torch"]}, {record["seconds"]:.0f} s.)
"""


def trained() -> str:
    record = json.loads((RECORDS / "trained.json").read_text())
    rows = [
        [
            name,
            f"{run['worst_width']:.2e}",
            f"{run['median_evaluations']:g}",
            str(run["most_evaluations"]),
        ]
        for name, run in record["runs"].items()
    ]
    excess = record["lipbound_over_truth"]
    return f"""## Trained kernels

`python -m lipbound.experiments.trained WEIGHTS...` on {", ".join(f"`{name}`" for name in record["weights"])}:
{record["kernels"]} kernels, as stored and with BatchNorm folded in. **{len(record["violations"])} violations.**

{table(["run", "widest upper/lower − 1", "median evaluations", "most"], rows)}

LipBound on the same kernels is {excess["least"]:.2f} to {excess["most"]:.2f} times the truth, median {excess["median"]:.2f}.
({record["device"]}, torch {record["torch"]}.)
"""


def speed() -> str:
    rows = []
    for path in sorted(RECORDS.glob("brackets-*.jsonl")):
        for line in path.read_text().splitlines():
            r = json.loads(line)
            rows.append([
                r["network"], r["weights"], str(r["layers"]), r["device"], f"{r['bracket_seconds']:.3f}",
                f"{r['gram_seconds']:.3f}", f"{r['gram_over_bracket']:.2f}", str(r["median_evaluations"]),
            ])  # fmt: skip
    header = [
        "network",
        "weights",
        "layers",
        "device",
        "brackets, s",
        "Gram iteration, s",
        "ratio",
        "median evaluations",
    ]
    return f"""## Speed

`python benchmarks/brackets.py --depth DEPTH [--weights FILE]`: all convolutions of a ResNet to
rtol = 1e-3, certified, beside Gram iteration (float32, five products, a 10×10 grid, no
certificate) on the same weights in the same run. A ratio above 1 means the certificate is the
quicker of the two.

{table(header, rows)}

On a CPU trained weights are quick: their symbols have peaks, and a few large cells rule out most
of the torus. Freshly initialised wide layers are slow: their symbols are flat to a few per cent,
so the proof consists of Cholesky factorizations on a fine cover. On the GPU the search is bound
by kernel launches, not by arithmetic, and Gram iteration wins for now.
"""


def main() -> None:
    page = "# Results\n\nMade by `make results` from the records in `benchmarks/records`.\n\n"
    page += "\n".join(part() for part in (soundness, trained, speed))
    (ROOT / "docs" / "results.md").write_text(page)
    print("wrote docs/results.md")


if __name__ == "__main__":
    main()
