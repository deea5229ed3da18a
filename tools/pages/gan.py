"""Write docs/results/gan.md: a GAN whose critic is limited in three ways, with its figure.

The picture of samples is written by ``benchmarks.gan --picture docs/results/gan.png``.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from lipbound.report.figures import canvas, save, tidy
from lipbound.report.markdown import digits, table
from tools.pages import DOCS, lines, write

ARMS = {
    "lipbound": ("`lipbound.constrain`", "#1b7f79", "o"),
    "spectral_norm": ("`spectral_norm`", "#d1495b", "s"),
    "wgan-gp": ("WGAN-GP", "#6f6f6f", "^"),
}
"""Arm → its name, colour and marker."""
Run = dict[str, Any]


def runs() -> dict[str, list[Run]]:
    """The runs of every arm, by seed."""
    found = [r for r in lines("gan") if r["kind"] == "run"]
    by_seed = sorted(found, key=lambda run: run["seed"])
    return {arm: [run for run in by_seed if run["arm"] == arm] for arm in ARMS}


def at(run: Run, step: int) -> dict[str, Any]:
    """The line of a run at a step."""
    found: dict[str, Any] = next(one for one in run["steps"] if one["step"] == step)
    return found


def common(found: dict[str, list[Run]]) -> list[int]:
    """Steps that every run has reached."""
    reached = [{one["step"] for one in run["steps"]} for arm in found.values() for run in arm]
    return sorted(set.intersection(*reached))


def mean_and_range(values: list[float], form: str = ".2f") -> str:
    """Mean of the seeds, with the smallest and the largest."""
    return f"{statistics.mean(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def distances(runs_of_arm: list[Run], step: int) -> list[float]:
    return [at(run, step)["distance"] for run in runs_of_arm]


def last_distances(runs_of_arm: list[Run]) -> list[float]:
    return [run["steps"][-1]["distance"] for run in runs_of_arm]


def verdict(found: dict[str, list[Run]], step: int) -> str:
    """Whether the limit of lipbound gives better samples than the others, after equal steps."""
    ours, said = distances(found["lipbound"], step), []
    for arm in ("spectral_norm", "wgan-gp"):
        other, name = distances(found[arm], step), ARMS[arm][0]
        gap = statistics.mean(ours) - statistics.mean(other)
        if max(ours) < min(other):
            said.append(f"better than with {name} (distance lower by {-gap:.2f}, in every seed)")
        elif min(ours) > max(other):
            said.append(f"worse than with {name} (distance higher by {gap:.2f}, in every seed)")
        else:
            way = "lower" if gap < 0 else "higher"
            said.append(
                f"not clearly different from those with {name} (the ranges over seeds overlap; "
                f"the mean distance is {way} by {abs(gap):.2f})"
            )
    return f"After {step:,} steps of the generator, the samples with `constrain` are {said[0]}, and {said[1]}."


def verdict_in_time(found: dict[str, list[Run]]) -> str:
    """The same after equal time, with what a step costs."""
    ends = {arm: statistics.mean(last_distances(of_arm)) for arm, of_arm in found.items()}
    pace = {
        arm: statistics.mean(run["steps"][-1]["seconds"] / run["steps"][-1]["step"] for run in own)
        for arm, own in found.items()
    }
    ours = ends.pop("lipbound")
    others = ", ".join(f"{value:.2f} with {ARMS[arm][0]}" for arm, value in ends.items())
    place = "ahead" if ours < min(ends.values()) else "behind"
    slower = pace["lipbound"] / pace["spectral_norm"]
    return (
        f"After equal time it is {place}: distance {ours:.2f}, against {others}. A step with "
        f"`constrain` takes {slower:.1f} times as long as with `spectral_norm` (all runs on one GPU)."
    )


def trials(reference: Run) -> str:
    """How many steps the trials took."""
    counts = {
        arm: sorted(one["step"] for one in chosen["tried"])
        for arm, chosen in reference["tuning"].items()
    }
    said = [f"{c[0]:,} to {c[-1]:,} steps with {ARMS[arm][0]}" for arm, c in counts.items()]
    return (
        f"These trials took {', '.join(said)}, so a slower arm was chosen earlier in its training."
    )


def edges(reference: Run) -> str:
    """Name the arms whose chosen factor or weight is at the border of what was tried."""
    found = []
    for arm, chosen in reference["tuning"].items():
        tried = [one["scale"] for one in chosen["tried"]]
        if chosen["scale"] in (min(tried), max(tried)):
            found.append(ARMS[arm][0])
    if not found:
        return ""
    names = " and ".join(found)
    return f" The factor or weight of {names} is at the border of what was tried, so another could be better."


def claims() -> list[list[str]]:
    """Lines for the index."""
    found = runs()
    if not all(found.values()):
        return []
    step = common(found)[-1]
    means = [statistics.mean(distances(of_arm, step)) for of_arm in found.values()]
    ends = [statistics.mean(last_distances(of_arm)) for of_arm in found.values()]
    best = [own[0] < min(own[1:]) for own in (means, ends)]
    words = "gives the best samples" if all(best) else "does not give better samples"
    shown = [" / ".join(f"{value:.2f}" for value in own) for own in (means, ends)]
    return [[
        f"Limiting the true norms of a GAN's critic {words} (CIFAR-10, 3 seeds).",
        f"Fréchet distance {shown[0]} after {step:,} steps, {shown[1]} after equal time "
        f"({' / '.join(name for name, *_ in ARMS.values())})",
        "[GAN](gan.md)",
    ]]  # fmt: skip


def quality(found: dict[str, list[Run]], step: int) -> str:
    rows = []
    for arm, of_arm in found.items():
        ends = [run["steps"][-1] for run in of_arm]
        rows.append([
            ARMS[arm][0], mean_and_range(distances(of_arm, step)),
            mean_and_range(last_distances(of_arm)),
            f"{min(e['step'] for e in ends):,} to {max(e['step'] for e in ends):,}",
        ])  # fmt: skip
    header = ["critic", f"after {step:,} steps", "after equal time", "steps in that time"]
    return table(header, rows)


def constants(found: dict[str, list[Run]], step: int) -> str:
    rows = []
    for arm, of_arm in found.items():
        ends = [at(run, step) for run in of_arm]
        norms = [norm for end in ends for norm in end["layers"]]
        rows.append([
            ARMS[arm][0], f"{min(norms):.2f} to {max(norms):.2f}",
            *(mean_and_range([end[key] for end in ends], ".3g") for key in
              ("product", "constant", "gradient")),
            mean_and_range([100 * end["gradient"] / end["constant"] for end in ends], ".2g") + " %",
        ])  # fmt: skip
    header = ["critic", "norms of layers", "product", "whole critic", "gradient", "share used"]
    return table(header, rows)


def over_time(found: dict[str, list[Run]]) -> str:
    steps = common(found)
    shown = steps[:: max(1, len(steps) // 6)]
    shown += [steps[-1]] if shown[-1] != steps[-1] else []
    rows = [
        [f"{step:,}", *(
            digits(statistics.mean(at(run, step)["constant"] for run in of_arm))
            for of_arm in found.values()
        )]
        for step in shown
    ]  # fmt: skip
    return table(["step", *(ARMS[arm][0] for arm in found)], rows)


def tuning(reference: Run) -> str:
    rows = []
    for arm, chosen in reference["tuning"].items():
        tried = ", ".join(
            f"{one['lr']:g} / {one['scale']:g}: {one['distance']:.1f}" for one in chosen["tried"]
        )
        rows.append([ARMS[arm][0], f"{chosen['lr']:g}", f"{chosen['scale']:g}", tried])
    header = ["critic", "learning rate", "factor, or weight of the penalty",
              "tried (rate / factor or weight: distance)"]  # fmt: skip
    return table(header, rows)


def figure(found: dict[str, list[Run]], path: Path) -> None:
    """Draw the distance and the certified constant of every run over the steps."""
    plt = canvas()
    drawn, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6))
    for arm, of_arm in found.items():
        name, colour, marker = ARMS[arm]
        for index, run in enumerate(of_arm):
            steps = [one["step"] / 1000 for one in run["steps"]]
            label = name.strip("`") if index == 0 else None
            style = {"color": colour, "marker": marker, "ms": 3.5, "lw": 1.2, "label": label}
            left.plot(steps, [one["distance"] for one in run["steps"]], **style)
            right.plot(steps, [one["constant"] for one in run["steps"]], **style)
    left.set_ylabel("Fréchet distance to test images")
    right.set_ylabel("certified constant of the critic")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xlabel("thousand steps of the generator")
        axes.set_ylim(top=axes.get_ylim()[1] * 1.2)
        tidy(axes)
    left.legend(frameon=False, fontsize=9)
    drawn.tight_layout()
    save(drawn, path)


def page(found: dict[str, list[Run]]) -> str:
    reference = [r for r in lines("gan") if r["kind"] == "reference"][-1]
    step, first = common(found)[-1], found["lipbound"][0]
    norms = [norm for run in found["spectral_norm"] for norm in at(run, step)["layers"][:-1]]
    accuracy = reference["accuracy"]
    used = statistics.mean(
        at(run, step)["gradient"] / at(run, step)["constant"] for run in found["lipbound"]
    )
    return f"""# A GAN with a limited critic

{verdict(found, step)} {verdict_in_time(found)}

The critic of a GAN tells generated images from real ones, and should be Lipschitz. An *arm* is a way to limit the critic; all share the networks, the data and the number of critic steps. `spectral_norm` promises norms of 1, but the true norms of its convolutions are {min(norms):.2f} to {max(norms):.2f}, because it measures the reshaped kernel. `constrain` keeps every layer at 1 or less, proved. The proved constant is far from what the critic does: its gradients at images have {100 * used:.2g} % of that norm.

Each run is on CIFAR-10, with {len(found["lipbound"])} seeds an arm. The two limited arms have the hinge loss (Miyato et al. 2018), and WGAN-GP its own loss (Gulrajani et al. 2017). The critic takes {first["critic_steps"]} steps for each step of the generator, and the batch is {first["batch"]}. A critic whose layers have norm 1 has small outputs, so the outputs of the two limited critics are multiplied by a factor. With `constrain`, this factor is the critic's Lipschitz limit.

## Quality of the samples

The numbers are Fréchet distances to the {reference["images"]:,} test images, means over seeds with the smallest and the largest. Less is better. {reference["images"]:,} training images have distance {reference["train_to_test"]:.2f}, which no generator can be expected to beat. The features are the {reference["features"]} before the last layer of our own classifier (test accuracy {100 * accuracy:.1f} %), so the numbers cannot be compared with those in papers, which use another network.

{quality(found, step)}

*After equal time* is after {reference["minutes"]:g} minutes, in which all runs shared one GPU and also bounded their critics.

![Fréchet distances and certified constants of all runs over the steps](gan.svg)

![Test images and samples of the three arms, for the same latent vectors](gan.png){{ width="640" }}

From top to bottom, two rows each: test images, then samples of seed {first["seed"]} with `constrain`, `spectral_norm` and WGAN-GP at the end. The latent vectors are the same.

## The critic's constant

The norms of layers are upper ends of certified brackets. *Product* is their product times the factor of the output, *whole critic* is the bound of the audit. *Gradient* is the mean norm of the gradient at real and generated images, and *share used* compares it with the bound of the audit. All are after {step:,} steps.

{constants(found, step)}

The bound of the whole critic over time, mean over seeds:

{over_time(found)}

## How the settings were chosen

Each arm was trained for {reference["tuning_minutes"]:g} minutes with each of {len(reference["tuning"]["lipbound"]["tried"])} settings and a seed that is not reported. The setting with the smallest distance to *training* images was taken. Nothing was chosen on the reported seeds or on test images.{edges(reference)} {trials(reference)}

{tuning(reference)}

All of it took {reference["wall_seconds"] / 60:.1f} minutes on one {reference["device"]}, with PyTorch {reference["torch"]}.

```sh
python -m benchmarks.gan --folder DATA --out RUNS --record benchmarks/records/gan.jsonl --picture docs/results/gan.png
```

`examples/gan.py` trains one arm; it is [shown in full](../guides/examples.md#a-gan). All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them.
"""


def main(folder: Path = DOCS) -> None:
    found = runs()
    if not all(found.values()):
        return
    figure(found, folder / "results" / "gan.svg")
    write(folder / "results" / "gan.md", page(found))


if __name__ == "__main__":
    main()
