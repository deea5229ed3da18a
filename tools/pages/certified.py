"""Write docs/results/certified.md: certified training, and certificates of networks as they run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from lipbound.report.markdown import table
from tools.pages import DOCS, lines, record, write
from verify.campaign import merged

KEPT = "shift-256x8"
MADE = "All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them."


def shares(found: dict[str, Any]) -> list[float]:
    """Clean accuracy and certified accuracies of a record, in percent."""
    return [100 * part["accuracy"] for part in (found["clean"], *found["certified"].values())]


def percents(numbers: list[float]) -> list[str]:
    return [f"{number:.1f}" for number in numbers]


def claims() -> list[list[str]]:
    """Lines for the index."""
    found = lines("certified")
    fast = [shares(run) for run in found if run["name"] == "fast"]
    proved = statistics.mean(run[1] for run in fast)
    broken = sum(run["attacked"]["broken"] for run in found)
    tried = sum(run["attacked"]["images"] for run in found)
    large, long = (
        next(shares(run) for run in found if run["name"] == name) for name in ("large", "cifar")
    )
    kept = {run["kind"]: shares(run) for run in arithmetics(KEPT, "H200")}
    strong = lines("certified-autoattack")[0]["autoattack"].values()
    hundred = lines("certified-cifar100")[-1]
    return [
        ["Networks of known norm get certificates that are not zero (CIFAR-10, L2 radius 36/255, 8.5 minutes of an H200).",
         f"{proved:.1f} % proved, mean of {len(fast)} seeds", "[certified](certified.md)"],
        ["A network of twice the width proves more in 24 minutes.",
         f"{long[1]:.1f} % proved at 36/255", "[certified](certified.md)"],
        ["A run tuned for large radii proves more at 108/255 (8.5 minutes of an H200).",
         f"{large[3]:.1f} % proved, {large[1]:.1f} % at 36/255", "[certified](certified.md)"],
        ["No certified image fell to an attack within its own radius.",
         f"{broken} of {tried:,} images", "[certified](certified.md)"],
        ["No image certified at 36/255 or 72/255 fell to AutoAttack in L2 at that radius.",
         f"{sum(one['broken'] for one in strong)} of {sum(one['images'] for one in strong):,} attacks",
         "[certified](certified.md)"],
        [f"CIFAR-100, L2 radius 36/255, {minutes(hundred):.0f} minutes of an H200.",
         f"{shares(hundred)[1]:.1f} % proved", "[certified](certified.md#cifar-100)"],
        ["Certifying the network as it runs in float64 costs nothing; in float32 it costs a part.",
         f"{kept['float64'][1]:.1f} % and {kept['float32'][1]:.1f} %; real arithmetic {kept['real'][1]:.1f} %",
         "[certified](certified.md#the-network-as-it-runs)"],
    ]  # fmt: skip


def arithmetics(model: str, device: str) -> list[dict[str, Any]]:
    """The certificates of a network on a device, each with the name of its arithmetic."""
    found = [r for r in lines("arithmetic") if r["model"] == model and device in r["device"]]
    for run in found:
        words = run["arithmetic"].split()
        run["kind"] = "real" if words[0] == "real" else words[-1]
    return sorted(found, key=lambda run: ("real", "float64", "float32").index(run["kind"]))


def runs() -> str:
    found = sorted(lines("certified"), key=lambda run: (run["name"] != "fast", run["name"]))
    rows = []
    for run in found:
        taken = f"{minutes(run):.1f}"
        weights = f"{run['weights'] / 1e6:.1f} M"
        name = f"`{run['settings']['model']}`, seed {run['seed']}"
        if run["name"] == "large":
            name = f"`{run['settings']['model']}` for large radii, seed {run['seed']}"
        if run["name"] == "cifar":
            name = f"`{run['settings']['model']}`, preset `cifar`, seed {run['seed']}"
        rows.append([name, weights, taken, *percents(shares(run))])
    fast = [shares(run) for run in found if run["name"] == "fast"]
    means = percents([statistics.mean(column) for column in zip(*fast, strict=True)])
    rows.append([f"mean of the {len(fast)} seeds of preset `fast`", "", "", *means])
    long = next(shares(run) for run in found if run["name"] == "cifar")
    spread = max(abs(run[1] - other[1]) for run in fast for other in fast)
    mirrored = [shares(run["mirrored"])[1] - shares(run)[1] for run in found if "mirrored" in run]
    most = max(map(abs, mirrored))
    tried = sum(run["attacked"]["images"] for run in found)
    broken = sum(run["attacked"]["broken"] for run in found)
    strong = [
        found for one in lines("certified-autoattack") for found in one["autoattack"].values()
    ]
    return f"""## CIFAR-10

Accuracy in percent on all 10,000 test images, without other data. *Clean* is the share of correct images, the other columns are the shares proved to stay correct within that L2 radius, in real arithmetic; for the program in float64 or float32 see [below](#the-network-as-it-runs). The settings were chosen on 5,000 held-out training images, except those of preset `cifar`: its width, learning rate and augmentation were fixed before its only run. Minutes are of training on one H200.

{table(["network", "weights", "minutes", "clean", "36/255", "72/255", "108/255"], rows)}

- **Seeds.** The {len(fast)} seeds differ by at most {spread:.2f} points at 36/255.
- **Attack.** PGD in L2 within each image's own certified radius broke {broken} of {tried:,} certified images. AutoAttack in L2 on the kept network of 6 minutes broke {strong[0]["broken"]} of {strong[0]["images"]:,} images certified at 36/255 at that radius, and {strong[1]["broken"]} of {strong[1]["images"]:,} certified at 72/255 at that one.
- **Mirror images.** The mean of a network over each image and its mirror image has the same Lipschitz bound. It changes the certified accuracy at 36/255 by at most {most:.2f} points: not worth its cost.
- **Width.** Twice the width and three times the time add {long[1] - statistics.mean(run[1] for run in fast):.1f} points at 36/255 to the mean of preset `fast`. An attack on other images shared the GPU during the first three minutes of this run.
- **Speed.** The seeds of preset `fast` trained at {min(r["images_per_second"] for r in found if r["name"] == "fast"):,} images a second or more.

```sh
python -m benchmarks.certified --preset fast --seed 0 --data cifar10 --folder DATA --out FILE
python -m benchmarks.certified --preset large --seed 0 --data cifar10 --folder DATA --out FILE
python -m benchmarks.certified --preset cifar --set minutes=24 --attacked 250 --data cifar10 --folder DATA --out FILE
python -m benchmarks.certified --trained benchmarks/weights/shift-256x8.safetensors --attacked 0 --autoattack 1000 --data cifar10 --folder DATA
```
"""


def others(name: str) -> list[list[str]]:
    """Rows of what others published."""
    return [
        [one["method"], one["weights"], "yes" if one["other_data"] else "no",
         *percents(one["accuracies"]), one["source"]]
        for one in record("published-certified")[name]
    ]  # fmt: skip


def hundred() -> str:
    short, long = lines("certified-cifar100")
    own = [
        [f"`{r['settings']['model']}`, preset `{preset}`, {minutes(r):.1f} minutes",
         f"{r['weights'] / 1e6:.1f} M", "no", *percents(shares(r)), "this repository"]
        for preset, r in (("fast", short), ("cifar", long))
    ]  # fmt: skip
    broken, tried = (sum(r["attacked"][key] for r in (short, long)) for key in ("broken", "images"))
    bronet = record("published-certified")["cifar100"][1]["accuracies"][1]
    return f"""## CIFAR-100

One run of {minutes(long):.0f} minutes proves {shares(long)[1]:.1f} % at 36/255 on all 10,000 test images, and one of {minutes(short):.1f} minutes {shares(short)[1]:.1f} %. BRONet-L, which was trained much longer, proves {bronet:.1f} %. The settings are those of CIFAR-10, unchanged. PGD within each image's own radius broke {broken} of {tried} certified images.

{table(["method", "weights", "other data", "clean", "36/255", "72/255", "108/255", "source"], [*own, *others("cifar100")])}

Here the larger network gains little: it has {long["weights"] / short["weights"]:.1f} times as many weights and was trained {minutes(long) / minutes(short):.1f} times as long for {shares(long)[1] - shares(short)[1]:.1f} points more. No setting was tuned for 100 classes.

```sh
python -m benchmarks.certified --preset fast --attacked 250 --data cifar100 --folder DATA --out FILE
python -m benchmarks.certified --preset cifar --set minutes={minutes(long):.2f} --attacked 250 --data cifar100 --folder DATA --out FILE
```
"""


def minutes(run: dict) -> float:
    """Return the minutes of training."""
    return run["training_seconds"] / 60


def side_by_side() -> str:
    found = lines("side-by-side")
    names = {"at+lipreg": "adversarial training with a Lipschitz penalty (`at+lipreg`)",
             "certified": "certified training"}  # fmt: skip
    kinds = {"clean": "clean", "linf 2/255": "L∞ 2/255", "linf 8/255": "L∞ 8/255",
             "l2 36/255": "L2 36/255", "l2 128/255": "L2 128/255",
             "proved 36/255": "proved, L2 36/255", "proved 72/255": "proved, L2 72/255"}  # fmt: skip
    rows = [
        [f"{names[run['settings']['arm']]}: `{run['settings']['model']}`",
         f"{run['weights'] / 1e6:.1f} M",
         *percents([100 * run["accuracies"][kind]["accuracy"] for kind in kinds])]
        for run in found
    ]  # fmt: skip
    images = found[0]["accuracies"]["clean"]["images"]
    return f"""## Attacked or proved

If you need a guarantee, train certified. If an accuracy measured under attack is enough, train adversarially, above all against changes of every pixel (L∞). Both networks have the same clean accuracy here. The adversarially trained one, with four times the weights, keeps more images under every attack we ran: two to four points more in L2, and twice as many at L∞ 8/255. But a stronger attack may break more of them, and nothing can be proved, because its bound is 10^{found[0]["log10_lipschitz"]:.0f}.

Accuracy in percent on the first {images:,} test images of CIFAR-10, under PGD with 50 steps and {found[0]["restarts"]} restarts, and proved in real arithmetic. The first network was trained for {found[0]["settings"]["epochs"]} epochs with PGD in L∞ at 8/255, the second is the kept network of {found[1]["training_seconds"] / 60:.0f} minutes.

{table(["training", "weights", *kinds.values()], rows)}

```sh
lipbound train --arm at+lipreg --preset fast --data cifar10 --folder DATA --out runs/robust
python -m benchmarks.side_by_side runs/robust/final.safetensors benchmarks/weights/shift-256x8.safetensors --data cifar10 --folder DATA --out FILE
```
"""


def published() -> str:
    return f"""### Published results

For comparison, what others published for CIFAR-10. *Authors*: read in the authors' own repository. *Quoted*: taken from a second source, and not checked against the authors' own. None of these proofs counts rounding.

{table(["method", "weights", "other data", "clean", "36/255", "72/255", "108/255", "source"], others("rows"))}

Without other data, the best published network below 100 M weights (64 M) has 71.2 % at 36/255: 2.6 points more than our 20 M weights in 8.5 minutes, and 1.7 more than our 51 M weights in 24 minutes. At 108/255 the run for large radii is level with AOL-Large, with a seventh of its weights. Generated images add much more than either difference.
"""


CHANGES = {
    "base": "none", "no-randaugment": "no RandAugment", "batch-256": "batch of 256, not 512",
    "deeper": "twice as deep (`shift-256x16`)",
    "wider": "twice as wide, half as deep (`shift-512x4`)",
    "momentum": "Adam's momentum 0.95, not 0.9", "averaging": "weights averaged, decay 0.999",
    "batch-1024": "batch of 1024", "ramp": "radius grows over a tenth of the run, not half",
    "liresnet": "another architecture (`liresnet-128x4`)",
}  # fmt: skip


def changes() -> str:
    found = [run for run in lines("certified-cells") if not run["settings"]["minutes"]]
    found.sort(key=lambda run: -shares(run)[1])
    rows = [[CHANGES[run["name"]], f"{run['weights'] / 1e6:.1f} M", *percents(shares(run))]
            for run in found]  # fmt: skip
    base = found[[run["name"] for run in found].index("base")]
    low, high = base["certified"]["0.141176"]["interval"]
    return f"""### What each choice buys

One change at a time to `shift-256x8` with the loss `emma`, {base["settings"]["epochs"]} epochs each, which took 2.5 minutes while five trainings shared an H200. Accuracy on the same 5,000 held-out training images; the 95 % interval of one number is ±{50 * (high - low):.1f} points, so the rows from 59.4 on are level. A fast ramp, a large batch and averaging cost most. RandAugment may cost a point in such a short run, where nothing is overfitted yet. The shift network is far ahead of the LiResNet of the same size.

{table(["change", "weights", "clean", "36/255", "72/255", "108/255"], rows)}

```sh
python -m benchmarks.certified --preset fast --held-out 0.1 --name cell --set model=shift-256x8 --set minutes=0 --set epochs=53 --set ramp=0.1 --attacked 0 --data cifar10 --folder DATA --out FILE
```
"""


def cells() -> str:
    found = [run for run in lines("certified-cells") if run["settings"]["minutes"]]
    rows = [
        [f"`{run['settings']['loss']}`", f"{run['settings']['margin'] * 255 / 36:.0f} × 36/255",
         *percents(shares(run))]
        for run in sorted(found, key=lambda run: run["settings"]["margin"])
    ]  # fmt: skip
    return f"""### What the loss buys

Accuracy on 5,000 held-out training images after 2.5 minutes of `shift-256x8`. The five runs shared one H200, so each saw about 48 epochs. A larger margin gives up small radii for large ones, and logit annealing adds to it. The loss of the run for large radii was chosen here, by the last column.

{table(["loss", "margin", "clean", "36/255", "72/255", "108/255"], rows)}

```sh
python -m benchmarks.certified --preset fast --held-out 0.1 --name cell --set model=shift-256x8 --set minutes=2.5 --set loss=emma+annealing --data cifar10 --folder DATA --out FILE
```
"""


def running() -> str:
    rows = [
        [f"`{model}`", f"`{run['kind']}`", *percents(shares(run)), f"{run['rounding']:.1e}",
         f"{run['lost_to_rounding']:,}", f"{run['seconds']:.0f} s"]
        for model in (KEPT, "shift-512x12")
        for run in arithmetics(model, "H200")
    ]  # fmt: skip
    return f"""## The network as it runs

The network `benchmarks/weights/shift-256x8.safetensors` is kept in the repository, in float16. It is the one of 6 minutes above, after rounding its weights, which costs a few tenths of a point. `shift-512x12` is the one of seed 2. Their certified accuracies in percent on all 10,000 test images of CIFAR-10, by [arithmetic](../arithmetic.md), with the time for audit and certificates on an H200 that also did other work:

{table(["network", "arithmetic", "clean", "36/255", "72/255", "108/255", "rounding of the logits, median bound", "certificates lost", "time"], rows)}

{on_the_cpu()}
**In float64 almost nothing is lost. In float32 the proof is much weaker**, because the proved bound on rounding is larger than many margins. If you need a proof for the program as it runs, run it in float64.

In the rows `real`, the bound is on the rounding of the float64 logits from which the radii are computed. *Lost* counts correct images whose radius is 0 only because of rounding. Other radii shrink.

```sh
lipbound certify benchmarks/weights/shift-256x8.safetensors --data cifar10 --folder DATA --attacked 0 --arithmetic float64
```
"""


def on_the_cpu() -> str:
    found = [run for run in arithmetics(KEPT, "CPU") if "seconds" in run]
    return "".join(
        f"On {run['threads']} CPU cores, {run['images']:,} images of `{run['model']}` took {run['seconds']:.0f} s in `{run['kind']}`.\n"
        for run in found
    )


def efforts() -> str:
    found = lines("certificates-by-effort")
    pairs = zip(found[::2], found[1::2], strict=True)
    rows, gains = [], []
    for normal, high in pairs:
        gain = high["median_radius"] / normal["median_radius"] if normal["median_radius"] else 0.0
        gains.append(gain)
        rows.append([
            high["network"], *percents([100 * high["clean"]["accuracy"]]),
            *(f"{one['upper']:.4g}" for one in (normal, high)), f"{high['floor']:.4g}" if high["floor"] else "–",
            *percents([100 * one["certified"]["accuracy"] for one in (normal, high)]),
            *(f"{one['median_radius']:.3f}" for one in (normal, high)), f"{high['seconds']:.0f} s",
        ])  # fmt: skip
    return f"""## What LipSDP buys

`effort="high"` makes the radii of ordinary networks up to {max(gains):.1f} times as large, and does nothing for a network of orthogonal matrices, whose bound is tight already. The networks are trained on the 8×8 digits without attacks (seed {found[0]["seed"]}, {found[0]["device"]}); *L* is the proved bound of the network's Lipschitz constant, and *certified* is the accuracy proved at 36/255, in percent. The times were measured while the machine did other work.

{table(["network", "clean", "L, normal", "L, high", "floor", "certified, normal", "certified, high", "median radius, normal", "median radius, high", "time, high"], rows)}

```sh
python -m benchmarks.certificates_by_effort --out FILE
```
"""


def flips() -> str:
    found = record("flips")
    rows = [
        [f"{one['radius_of_logits']:.3e}", f"{one['distance_of_flip']:.3e}",
         *(f"{one['radii'][kind]:.1e}" for kind in ("real", "float64")), f"{one['radii']['float32']:g}"]
        for one in found["flips"]
    ]  # fmt: skip
    return f"""## Flips inside a radius

Float32 logits alone can certify too much. Between {found["lines"]} pairs of synthetic images, the search found {len(rows)} points at which the float32 prediction of the kept network changes *inside* the radius that its logits give. The certificates that know rounding are smaller than the distance of the flip, and the one for float32 is 0. All these images are within 1e-6 of a decision boundary: the table shows that float32 logits are no proof, not that their radii are far off.

{table(["radius from float32 logits", "distance of the flip", "certified, real", "certified, float64", "certified, float32"], rows)}

```sh
python -m verify flips benchmarks/weights/shift-256x8.safetensors --count {found["lines"]}
```
"""


def rounding() -> str:
    found = [one for one in merged(lines("campaign")) if one["part"] == "rounding"]
    rows = [
        [one["device"], one["torch"], kind, f"{networks(one, kind):,}", f"{claim['count']:,}",
         str(sum(v["claim"] == f"rounding, {kind}" for v in one["violations"])),
         f"{1 - claim['margin']:.2f}"]
        for one in found
        for kind in ("float32", "float64", "large")
        if (claim := one["claims"].get(f"rounding, {kind}"))
    ]  # fmt: skip
    return f"""## The bound on rounding

Every value of random networks was compared with arithmetic of 256 bits, at an input and at points of the ball around it. *Large* networks of the size for CIFAR-10 run in float32 and float64, and both runs are compared with each other. The last column is the largest quotient of rounding and bound. 1.00 means that the bound is attained, which happens for constants such as 0.3, whose rounding is known exactly.

{table(["device", "torch", "precision", "networks", "values", "violations", "closest"], rows)}

```sh
python -m verify campaign --parts rounding --seed 40000000 --minutes 60 --out FILE
```
"""


def networks(one: dict[str, Any], kind: str) -> int:
    """Number of networks of this kind that were compared."""
    outcomes = one["counts"]["outcomes"]
    names = [name for name in outcomes if name.startswith(f"{kind}: ")]
    if kind != "large":
        names = [name for name in names if name.endswith(": compared")]
    return sum(outcomes[name] for name in names)


def page() -> str:
    return f"""# Certified training

Networks of orthogonal matrices, trained with a loss on margins, have certificates that are not zero. The guide is [Train for certificates](../guides/certified.md). {MADE}

{runs()}
{published()}
{cells()}
{changes()}
{hundred()}
{side_by_side()}
{running()}
{efforts()}
{flips()}
{rounding()}"""


def main(docs: Path = DOCS) -> None:
    write(docs / "results" / "certified.md", page())
