"""Write docs/RESULTS.md from the records in benchmarks/records: ``make results``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from lipbound.experiments import fig3, table2, table3, table4
from lipbound.experiments.reproduce import report, write_figure
from lipbound.experiments.trainings import latest
from lipbound.figures import speed_figure
from lipbound.records import digits, read, table

sys.path.insert(0, str(Path(__file__).parent))
from results_robustness import robustness

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"


def cells_of(name: str) -> list[dict]:
    return [*latest(read(RECORDS / f"{name}.jsonl")).values()]


def summary() -> str:
    """The page in a few lines."""
    checked = json.loads((RECORDS / "soundness.json").read_text())
    trained = json.loads((RECORDS / "trained.json").read_text())
    layers = json.loads((RECORDS / "table1.json").read_text())["groups"]["whole layers"]["methods"]
    speed = read(RECORDS / "speed-gpu.jsonl")
    return f"""## In short

- **The proofs stood**: {len(checked["violations"]) + len(trained["violations"])} violations on {checked["count"]:,} random layers and {trained["kernels"]} trained kernels.
- **Tight on whole layers**: upper end over σ1 of trained layers at most {layers["finite"]["most"]:.4f} at the input size and
  {layers["bracket"]["most"]:.4f} over all sizes; LipBound {layers["lipbound"]["ratio"]:.2f} on average (Table 1).
- **Cheap**: on an H200 LipBound's value and gradient take at most one fused SGD step on {within_a_step(speed)} of {len(speed)} networks.
{robustness(table2.by_tier(cells_of("table2")), cells_of("table3"))}
"""


def soundness() -> str:
    record = json.loads((RECORDS / "soundness.json").read_text())
    wide = record["wider_than_rtol"]
    return f"""## Random layers

`python -m lipbound.experiments.soundness --count {record["count"]}`: seeds {record["first_seed"]} to
{record["first_seed"] + record["count"] - 1}, every geometry (1d to 3d, stride, dilation, groups, four padding modes, transposed), eight
kernel families, float64, float32 and bfloat16, scales from 1e-20 to 1e20. Both ends of both
brackets (every size, and one input size) against dense SVDs:
**{len(record["violations"])} violations in {record["count"]:,} layers.** With zero padding {len(wide)} of them were left wider than rtol = {record["rtol"]:g} (seeds {", ".join(map(str, wide))}):
symbols nearly flat on three axes, where the search stops at its limit and says so by its width. Reflect,
replicate and strided or long circular padding widen the first bracket by what is proved of them.
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
                str(r.get("dispatched", "")), f"{r['busy_seconds']:.3f}" if "busy_seconds" in r else "",
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
        "operations",
        "GPU busy, s",
    ]
    return f"""## Speed

`python benchmarks/brackets.py --depth DEPTH [--weights FILE]`, or `--run` with a network of
`lipbound train` (the `fast` preset's here): all convolutions of a ResNet to rtol = 1e-3,
certified, beside Gram iteration (float32, five products, a 10×10 grid, no certificate) on the same
weights in the same run. A ratio above 1 means the certificate is the
quicker of the two. Operations are the tensor operations one call dispatches, about the kernels a
GPU launches. With `--clock process` seconds are CPU seconds, for a machine that others use too.

{table(header, rows)}

On a CPU trained weights are quick: their symbols have peaks, and a few large cells rule out most
of the torus. Freshly initialised wide layers are the hard case: their symbols are flat to a few per
cent, so the proof consists of Cholesky factorizations on a fine cover, and those are slower, operation
for operation, than the matrix products Gram iteration consists of. On the GPU Gram iteration wins: a search is many
small steps that wait for each other, and most of its time goes to launching them (what is left is
in the last column, with nothing else on the GPU).
"""


def within_a_step(records: list[dict]) -> int:
    """Networks whose value and gradient take no longer than a step of SGD."""
    times = [r["milliseconds"] for r in records]
    return sum(t["lipbound_gradient"] <= t["sgd"] for t in times)


def mean(records: list[dict], other: str, ours: str) -> float:
    ratios = [r["milliseconds"][other] / r["milliseconds"][ours] for r in records]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def penalty() -> str:
    records = read(RECORDS / "speed-gpu.jsonl")
    on_cpu = read(RECORDS / "speed-cpu.jsonl")
    columns = [
        "lipbound",
        "direct",
        "power",
        "gram",
        "lipbound_gradient",
        "direct_gradient",
        "sgd",
        "floor",
    ]
    heads = [
        "network",
        "LipBound",
        "direct",
        "power, 10",
        "Gram, 5",
        "value + gradient",
        "direct + gradient",
        "SGD step",
        "floor",
    ]

    def rows(which: list[dict]) -> list[list[str]]:
        return [[r["network"], *(digits(r["milliseconds"][c]) for c in columns)] for r in which]

    worst = {
        key: max(r[key] for r in records)
        for key in ("value_difference", "gradient_difference", "tie_gap")
    }
    ties = sum(r["ties"] for r in records)
    steps = [
        [
            f"{r['network']}, batch {r['batch']}",
            f"{r['milliseconds']['none']:.1f}",
            *(f"{r['overhead_percent'][v]:.2f} %" for v in ("add_grad", "autograd", "direct")),
        ]
        for r in read(RECORDS / "adversarial-step.jsonl")
    ]
    direct = [
        f"{r['milliseconds']['direct'] / r['milliseconds']['lipbound']:.0f} × ({r['network']})"
        for r in on_cpu
    ]
    return f"""## The penalty of whole networks

`lipbound bench`: the 17 networks of the paper's efficiency table, He-initialised, milliseconds
({records[0]["device"]}, torch {records[0]["torch"]}, float32, medians, warmed up, one run).
LipBound: the certified value, 32 grid points per unit of degree, convolutions only. Direct: the
polynomials on a 10×10 grid, as the authors' code does it. Power: ten iterations at the real
strides and input sizes. Value + gradient: of the whole network with BatchNorm and hidden Linear
layers, added to `.grad`. SGD: one fused step with momentum over all parameters. Floor: the
convolutions' bytes over the measured read bandwidth. LipBound on the GPU is our fused kernels; direct,
power and Gram are plain PyTorch operations, layer by layer, as their authors publish them.

![Milliseconds of every contender for the 17 networks](speed.svg)

{table(heads, rows(records))}

Geometric means: direct {mean(records, "direct", "lipbound"):.0f} ×, power iteration {mean(records, "power", "lipbound"):.0f} ×,
Gram iteration {mean(records, "gram", "lipbound"):.0f} × the time of LipBound's value; direct evaluation with gradient
{mean(records, "direct_gradient", "lipbound_gradient"):.0f} × ours. Value and gradient take at most one fused SGD step on {within_a_step(records)} of {len(records)} networks.
Against the plain PyTorch twin: values to {worst["value_difference"]:.1e}, gradients to {worst["gradient_difference"]:.1e}; in {ties} row(s) two grid
points tie (energies apart by {worst["tie_gap"]:.1e}) and either is a maximizer.

The same on {on_cpu[0]["device"]} (torch {on_cpu[0]["torch"]}), where plain PyTorch runs:

{table(heads, rows(on_cpu))}

There the direct evaluation takes {", ".join(direct)} as long as LipBound's value.

### In adversarial training

`python benchmarks/adversarial_step.py`: one step with PGD-10, bfloat16 autocast, channels_last;
what the penalty adds, as the median over rounds in which the variants take turns.

{table(["network", "step without, ms", "add_grad_()", "in the loss", "direct, in the loss"], steps)}
"""


def audits() -> str:
    records = read(RECORDS / "audits-cpu.jsonl")
    by_effort = {
        effort: {r["network"]: r for r in records if r["effort"] == effort}
        for effort in ("normal", "high")
    }
    rows = []
    for name, normal in by_effort["normal"].items():
        high = by_effort["high"][name]
        rows.append([
            name, f"{normal['log10_paper']:.2f}", f"{normal['log10_product']:.2f}",
            f"{normal['log10_upper']:.2f}", f"{high['log10_upper']:.2f}", f"{normal['log10_lower']:.2f}",
            f"{normal['seconds']:.0f} s", f"{high['seconds']:.0f} s",
        ])  # fmt: skip
    header = [
        "network", "LipBound of each layer, multiplied", "brackets, multiplied", "graph",
        "graph, `--effort high`", "largest Jacobian found", "time", "time, high",
    ]  # fmt: skip
    zoo = read(RECORDS / "audits-gpu.jsonl")
    bounded = [r for r in zoo if not r["reason"]]
    refused = [[r["network"], r["reason"]] for r in zoo if r["reason"]]
    return f"""## Whole networks

`python -m lipbound.experiments.audits resnet20=WEIGHTS ... --out FILE [--effort high]`: the trained CIFAR
ResNets, **as powers of ten** ({records[0]["device"]}, {records[0]["threads"]} threads, torch {records[0]["torch"]}). The graph's columns are proved
bounds on the L2 Lipschitz constant; a Jacobian found is a lower one, up to rounding. The products are what the
literature quotes, with BatchNorm apart: they leave the shortcuts out, so they are no bounds here.

{table(header, rows)}

`python -m lipbound.experiments.audits --zoo --device cuda --out FILE`: {len(zoo)} networks of torchvision and timm with the
weights they start with, {min(r["seconds"] for r in zoo):.0f} to {max(r["seconds"] for r in zoo):.0f} s each ({zoo[0]["device"]}): {len(bounded)} bounded, the others refused:

{table(["network", "unbounded, because"], refused)}
"""


def training() -> str:
    steps = read(RECORDS / "training-step.jsonl")
    arms = list(steps[0]["ratio_to_at"])
    rows = [
        [
            f"{r['network']}, batch {r['batch']}",
            f"{r['milliseconds']['at']:.1f} ms",
            f"{r['epoch_seconds']:.1f} s",
            *(f"{r['ratio_to_at'][arm]:.3f}" for arm in arms[1:]),
        ]
        for r in steps
    ]
    kills = json.loads((RECORDS / "kills.json").read_text())
    killed = kills["kinds"]["train"]
    return f"""## Training

`python benchmarks/training_step.py`: one step of the trainer (PGD-{steps[0]["pgd_iterations"]}, bfloat16, `torch.compile`,
{steps[0]["device"]}, torch {steps[0]["torch"]}); an epoch is 50,000 images. The other arms as ratios to plain adversarial
training (`at`), medians over rounds in which the arms take turns.

{table(["network", "step, `at`", "epoch", *(f"`{arm}`" for arm in arms[1:])], rows)}

`at+pm` is the paper's power method with ten iterations; `at+spectral` follows σ1 of every layer. Every
penalty is replayed as a CUDA graph.

`python -m lipbound.experiments.kills`: a run killed (SIGKILL) {killed["kills"]} times at random moments and resumed;
against one left alone {len(killed["wrong"])} tensors of its weights and state differ. ({kills["device"]}, torch {kills["torch"]}.)
"""


def attacks() -> str:
    parts = []
    for r in read(RECORDS / "attack-speed.jsonl"):
        others = [name for name in r["seconds"] if name != "lipbound"]
        rows = [
            [
                name,
                f"{r['seconds'][name]:.1f}",
                f"{r['images_per_second'][name]:.1f}",
                f"{100 * r['accuracy'][name]:.1f} %",
            ]
            for name in r["seconds"]
        ]
        text = (
            f"{r['network']} trained adversarially, {r['images']:,} test images, radius "
            f"{r['radius'] * 255:g}/255, {r['restarts']} restarts of {r['iterations']} gradients "
            f"each, {r['precision']} for all ({r['device']}, torch {r['torch']}):\n\n"
            f"{table(['attack', 'seconds', 'images a second', 'accuracy that is left'], rows)}"
        )
        if others:
            quickest = min(others, key=lambda name: r["seconds"][name])
            ratio = r["seconds"][quickest] / r["seconds"]["lipbound"]
            text += f"\n\n{ratio:.1f} times as fast as {quickest}, the quickest of the others."
        parts.append(text)
    body = "\n\n".join(parts)
    return f"""## Attacks

`python benchmarks/attack_speed.py RUN/final.safetensors --precision PRECISION`: PGD with restarts beside
the libraries' at the same budget, one after the other in one run. foolbox's PGD attacks every image
to the end; pyautoattack's is APGD with 100 gradients a run and goes on only with images that stand; ours
too, and its slots never run empty. Ours compiles the network and replays CUDA graphs; the others run
the network as it is, as they do when they are installed and called. What each found was looked at once more in float32.

{body}
"""


def reproduced(name: str, folder: Path) -> str:
    record = json.loads((RECORDS / f"{name}.json").read_text())
    write_figure(record, folder)
    return report(record)


def trainings(folder: Path) -> list[str]:
    """Tables 2 and 3 and Figure 3, as far as there are records."""
    parts = []
    for name, module in (("table2", table2), ("table3", table3)):
        cells = cells_of(name)
        if cells:
            record = {"experiment": name, "tiny": False, "cells": cells}
            parts.append(module.report(record))
            write_figure(record, folder)
            if name == "table2":
                figure = {"experiment": "fig3", "tiny": False, **fig3.from_cells(cells)}
                write_figure(figure, folder)
                parts.append(fig3.report(figure))
    return parts


def efficiency() -> str:
    return table4.report(table4.from_bench(read(RECORDS / "speed-gpu.jsonl")))


def main(folder: Path = ROOT / "docs") -> None:
    speed_figure(read(RECORDS / "speed-gpu.jsonl"), folder / "speed.svg")
    page = "# Results\n\nMade by `make results` from the records in `benchmarks/records`.\n\n"
    parts = [
        part() for part in (summary, soundness, trained, audits, speed, penalty, training, attacks)
    ]
    parts += [reproduced(name, folder) for name in ("fig1", "fig2", "table1")]
    (folder / "RESULTS.md").write_text(page + "\n".join([*parts, efficiency(), *trainings(folder)]))
    print(f"wrote {folder / 'RESULTS.md'}")


if __name__ == "__main__":
    main()
