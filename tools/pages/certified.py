"""Write docs/results/certified.md: certified training, and certificates of networks as they run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from lipbound.report.markdown import table
from tools.pages import DOCS, lines, record, write
from verify.campaign import merged

MADE = "All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them."


def shares(found: dict[str, Any]) -> list[float]:
    """Clean accuracy and certified accuracies of a record, in percent."""
    return [100 * part["accuracy"] for part in (found["clean"], *found["certified"].values())]


def percents(numbers: list[float]) -> list[str]:
    return [f"{number:.1f}" for number in numbers]


def claims() -> list[list[str]]:
    """Lines for the index."""
    fast = [shares(run) for run in lines("certified") if run["name"] == "fast"]
    proved = statistics.mean(run[1] for run in fast)
    broken = sum(run["attacked"]["broken"] for run in lines("certified"))
    tried = sum(run["attacked"]["images"] for run in lines("certified"))
    kept = {run["kind"]: shares(run) for run in arithmetics()}
    return [
        ["Networks of known norm get certificates that are not zero (CIFAR-10, L2 radius 36/255, 8.5 minutes of an H200).",
         f"{proved:.1f} % proved, mean of {len(fast)} seeds", "[certified](certified.md)"],
        ["No certified image fell to an attack within its own radius.",
         f"{broken} of {tried:,} images", "[certified](certified.md)"],
        ["Certifying the network as it runs in float64 costs nothing; in float32 it costs a part.",
         f"{kept['float64'][1]:.1f} % and {kept['float32'][1]:.1f} %; real arithmetic {kept['real'][1]:.1f} %",
         "[certified](certified.md#the-network-as-it-runs)"],
    ]  # fmt: skip


def arithmetics() -> list[dict[str, Any]]:
    """The certificates of the kept network, each with the name of its arithmetic."""
    found = lines("arithmetic")
    for run in found:
        words = run["arithmetic"].split()
        run["kind"] = "real" if words[0] == "real" else words[-1]
    return sorted(found, key=lambda run: ("real", "float64", "float32").index(run["kind"]))


def runs() -> str:
    found = lines("certified")
    rows = []
    for run in found:
        minutes = f"{run['training_seconds'] / 60:.1f}"
        weights = f"{run['weights'] / 1e6:.1f} M"
        name = f"`{run['settings']['model']}`, seed {run['seed']}"
        rows.append([name, weights, minutes, *percents(shares(run))])
    fast = [shares(run) for run in found if run["name"] == "fast"]
    means = percents([statistics.mean(column) for column in zip(*fast, strict=True)])
    rows.append([f"mean of the {len(fast)} runs of 8.5 minutes", "", "", *means])
    mirrored = [shares(run["mirrored"])[1] - shares(run)[1] for run in found]
    most = max(map(abs, mirrored))
    tried = sum(run["attacked"]["images"] for run in found)
    broken = sum(run["attacked"]["broken"] for run in found)
    return f"""## CIFAR-10

Accuracy in percent on all 10,000 test images, without other data. *Clean* is the share of correct images, the other columns are the shares proved to stay correct within that L2 radius. The settings were chosen on 5,000 held-out training images. Minutes are of training on one H200.

{table(["network", "weights", "minutes", "clean", "36/255", "72/255", "108/255"], rows)}

- **Attack.** PGD in L2 within each image's own certified radius broke {broken} of {tried:,} certified images.
- **Mirror images.** The mean of a network over each image and its mirror image has the same Lipschitz bound. It changes the certified accuracy at 36/255 by at most {most:.2f} points: not worth its cost.
- **Speed.** Training ran at {min(r["images_per_second"] for r in found if r["name"] == "fast"):,} images a second or more for `shift-512x12`.

```sh
python -m benchmarks.certified --preset fast --seed 0 --data cifar10 --folder DATA --out FILE
```
"""


def running() -> str:
    rows = []
    for run in arithmetics():
        error = "" if run["rounding"] is None else f"{run['rounding']:.1e}"
        lost = f"{run['lost_to_rounding']:,}"
        rows.append([f"`{run['kind']}`", *percents(shares(run)), error, lost])
    count = f"{arithmetics()[0]['images']:,}"
    return f"""## The network as it runs

The network `benchmarks/weights/shift-256x8.safetensors` is kept in the repository, in float16. It is the one of 6 minutes above, after rounding its weights, which costs a few tenths of a point. Its certified accuracy in percent on {count} test images of CIFAR-10, by [arithmetic](../arithmetic.md):

{table(["arithmetic", "clean", "36/255", "72/255", "108/255", "rounding of the logits, median bound", "certificates lost"], rows)}

*Lost* counts correct images whose radius is 0 only because of rounding. Other radii shrink.

```sh
lipbound certify benchmarks/weights/shift-256x8.safetensors --data cifar10 --folder DATA --attacked 0 --arithmetic float64
```
"""


def flips() -> str:
    found = record("flips")
    rows = [
        [f"{one['radius_of_logits']:.1e}", f"{one['distance_of_flip']:.1e}",
         *(f"{one['radii'][kind]:.1e}" for kind in ("real", "float64")), f"{one['radii']['float32']:g}"]
        for one in found["flips"]
    ]  # fmt: skip
    return f"""## Flips inside a radius

Float32 logits alone can certify too much. Between {found["lines"]} pairs of synthetic images, the search found {len(rows)} points at which the float32 prediction of the kept network changes *inside* the radius that its logits give. The certificates that know rounding are smaller than the distance of the flip, and the one for float32 is 0.

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

Every value of random networks was compared with arithmetic of 256 bits, at an input and at points of the ball around it. *Large* networks of the size for CIFAR-10 run in float32 and float64, and both runs are compared with each other. The last column is the largest quotient of rounding and bound: at 1 the bound would be attained.

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
{running()}
{flips()}
{rounding()}"""


def main(docs: Path = DOCS) -> None:
    write(docs / "results" / "certified.md", page())
