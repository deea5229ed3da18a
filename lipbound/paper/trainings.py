"""Train networks for every arm and seed, attack each network, and record the results.

A *tier* is a plan of such trainings: one network on one data set. A *cell* of a tier is one arm
with one seed. Its record is appended when the cell is done. The next call continues with the cells
that are missing, and resumes an interrupted cell from its checkpoint and its finished attacks.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from lipbound.files import append, provenance, read
from lipbound.paper import gaps
from lipbound.paper.request import Request
from lipbound.penalty.penalty import Penalty
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.data import DATA, Data
from lipbound.robust.training.assess import assess, networks
from lipbound.robust.training.loop import train
from lipbound.robust.training.run import Watcher, penalty_of
from lipbound.robust.training.run_folder import lock
from lipbound.robust.training.settings import Settings, as_dict, filled, settings
from lipbound.robust.training.trained import Trained
from lipbound.runtime import OutOfTime, Progress, check_time, pick_device, within

Say = Callable[[str], None]
STOPPED = "stopped (time limit); run the same command again to continue"


@dataclass(frozen=True)
class Tier:
    """A plan of trainings.

    Attributes:
        says: Description of the tier for the report.
        common: Settings that all arms share, as changes to the preset.
        arms: Label → settings of the arm, including its name in ``ARMS``.
        seeds: Label → number of seeds; arms that are not named have one.
        plan: Attack plan for the best and the final network.
        images: Number of test images to attack.
        autoattack: Number of these images that AutoAttack gets.
        autoattack_best: Whether AutoAttack also attacks the best network, not only the final one.
        jacobians: Number of images at which the norm of the Jacobian is measured.
        preset: Name of the preset in ``PRESETS``.
        also: Further radii for PGD.
        pilot: Whether the tier is run only on request.
        doubts: Whether to look for doubts about the first seed's final network.
        tried: Labels of arms that are compared on held-out images only, and not attacked.
        rivals: Labels of arms of which only the one with the highest :func:`gaps.peak` on held-out
            images is attacked, when the first seeds of all are recorded.
        matched: Label → label of an arm with a penalty. The former has the weight decay that
            shrinks the layers as much, see :func:`equal_decays`, from the latter's first seed.
    """

    says: str
    common: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    seeds: dict[str, int] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    images: int = 1000
    autoattack: int = 500
    autoattack_best: bool = False
    jacobians: int = 500
    preset: str = "paper-cifar"
    also: tuple[float, ...] = ()
    doubts: bool = True
    tried: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    matched: dict[str, str] = field(default_factory=dict)
    pilot: bool = False

    def cells(self) -> Iterator[tuple[str, int]]:
        """Yield arms and seeds, with the first seed of every arm before any second one.

        Rivals come again at the end, when one of them is chosen.
        """
        most = max((self.seeds.get(label, 1) for label in self.arms), default=0)
        for seed in range(most):
            for label in self.arms:
                if seed < self.seeds.get(label, 1):
                    yield label, seed
        yield from ((label, 0) for label in self.rivals)

    def attacks(self, label: str, records: dict[str, dict[str, Any]]) -> bool:
        """Whether an arm is attacked, given the records of the first seeds."""
        if label in self.rivals:
            peaks = {
                name: gaps.peak(records[name]) or 0.0 for name in self.rivals if name in records
            }
            return len(peaks) == len(self.rivals) and label == max(peaks, key=lambda n: peaks[n])
        return label not in self.tried

    def settings(self, label: str, seed: int, **more: Any) -> Settings:
        changes = {**self.common, **self.arms[label], **more, "seed": seed}
        return settings(preset=self.preset, **changes)

    def matching(self, label: str, source: dict[str, Any] | None) -> dict[str, float] | None:
        """Return what an arm takes from the record of the arm that it matches.

        It is empty for arms that match no other, and ``None`` if the record is missing.
        """
        if label not in self.matched:
            return {}
        if source is None or "equal_decay" not in source:
            return None
        decay = self.settings(label, 0).weight_decay + source["equal_decay"]["mean"]
        return {"weight_decay": float(f"{decay:.3g}")}


def work(name: str, tier: Tier, request: Request) -> list[dict[str, Any]]:
    """Run the missing cells until the time is up, and return the records of all finished cells.

    Args:
        name: Name of the tier.
        tier: The plan of trainings.
        request: Arms, time and device. In its folder ``out``, ``cells.jsonl`` holds the records.

    Raises:
        ValueError: If the tier has no arm of that name, or a cell needs another cell's record that
            no process is about to write.
    """
    unknown = [label for label in request.only if label not in tier.arms]
    if unknown:
        raise ValueError(
            f"tier {name} has no {unknown[0]!r}; choose one of: {', '.join(tier.arms)}"
        )
    device = str(pick_device(request.device))
    path = request.out / "cells.jsonl"
    end = time.monotonic() + 60 * request.minutes if request.minutes is not None else None
    data: Data | None = None
    for label, seed in request.progress([*tier.cells()], f"trainings of tier {name}"):
        records = latest(read(path))
        before = records.get((name, label, seed))
        attacked = tier.attacks(
            label, {n: r for (t, n, s), r in records.items() if (t, s) == (name, 0)}
        )
        done = before is not None and not (attacked and "pgd" not in before["final"])
        source = tier.matched.get(label, "")
        matching = tier.matching(label, records.get((name, source, 0)))
        chosen = tier.settings(label, seed, **(matching or {}))
        if (
            done
            and before is not None
            and matching is not None
            and filled(before["settings"]) != as_dict(chosen)
        ):
            raise ValueError(
                f"{str(path)!r} has tier {name}, {label}, seed {seed} with other settings; use "
                f"another --out"
            )
        if done or (request.only and label not in request.only):
            continue
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            break
        folder = request.out / name
        if matching is None:
            if claim_of(folder / _name(source, 0)):
                raise ValueError(
                    f"tier {name}, {label!r} takes its weight decay from {source!r}, seed 0, which "
                    f"has no record in {str(path)!r}; run it first, with --only {source!r}"
                )
            request.say(f"tier {name}, {label}, seed {seed} waits for {source}, seed 0")
            continue
        data = data or DATA[chosen.data](request.folder)
        request.say(f"tier {name}, {label}, seed {seed}")
        where = folder / _name(label, seed)
        claim = claim_of(where)
        if claim is None:
            request.say("another process runs this cell")
            continue
        # All cells share the steps, checks and attacks that were compiled for the first one.
        with claim, torch._dynamo.config.patch(recompile_limit=64):
            try:
                with within(None if left is None else left / 60):
                    record = cell(
                        tier, chosen, data, where, device=device, left=left, say=request.say,
                        shown=partial(request.watch, label), progress=request.progress,
                        attacked=attacked,
                    )  # fmt: skip
            except OutOfTime:
                request.say(STOPPED)
                break
            append(path, {"tier": name, "label": label, "seed": seed, **record})
    return [r for r in latest(read(path)).values() if r["tier"] == name]


def _name(label: str, seed: int) -> str:
    """Return the name of a cell's folder."""
    return f"{label.replace(' ', '-')}-{seed}"


def claim_of(where: Path) -> IO[str] | None:
    """Claim a cell while the result is open; return ``None`` if another process runs it."""
    return lock(where.with_name(f"{where.name}.claim"))


@torch.no_grad()
def equal_decays(penalty: Penalty) -> dict[str, float]:
    r"""Return the weight decay that pulls each parameter towards zero as much as a penalty does.

    A decay λ adds :math:`\lambda K` to the gradient of a parameter K, and a penalty adds some G.
    Their parts along K are equal for :math:`\lambda = \langle K, G \rangle / \|K\|^2`. Bounds of
    layers are homogeneous of degree 1, so for a penalty :math:`\lambda_2 \sum \log` this is
    :math:`\lambda_2 / \|K\|^2`. With its mean over the layers, the product of their bounds falls
    as fast as with the penalty.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Linear(1, 1))
        >>> _ = nn.init.constant_(model[0].weight, 2.0)
        >>> round(equal_decays(Penalty(model, 0.008))["0.weight"], 6)
        0.002
    """
    model = penalty.model
    model.zero_grad()
    penalty.add_grad_()
    pulls = {
        name: float((p * p.grad).sum() / p.square().sum().clamp_min(1e-30))
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad()
    return pulls


def equal_decay(chosen: Settings, model: nn.Module, data: Data) -> dict[str, float]:
    """Summarize :func:`equal_decays` over the layers; empty without a penalty."""
    penalty = penalty_of(chosen, model, data)
    if penalty is None:
        return {}
    pulls = [*equal_decays(penalty).values()]
    return {
        "mean": statistics.fmean(pulls),
        "median": statistics.median(pulls),
        "least": min(pulls),
        "largest": max(pulls),
    }


def latest(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the last record of every cell: a cell that was only tried may be attacked later."""
    return {(r["tier"], r["label"], r["seed"]): r for r in records}


class Stages:
    """Forwards the name of each stage, and measures the time until the next stage."""

    def __init__(self, say: Say):
        self.say = say
        self.words: list[tuple[str, float]] = []

    def __call__(self, word: str) -> None:
        self.words.append((word, time.perf_counter()))
        self.say(word)

    def seconds(self) -> dict[str, float]:
        """Return stage → seconds until now."""
        ends = [at for _, at in self.words[1:]] + [time.perf_counter()]
        spent: dict[str, float] = {}
        for (word, at), end in zip(self.words, ends, strict=True):
            spent[word] = round(spent.get(word, 0.0) + end - at, 1)
        return spent


def cell(
    tier: Tier, chosen: Settings, data: Data, where: Path, *, device: str, left: float | None,
    say: Say, shown: Callable[[], AbstractContextManager[Watcher | None]],
    progress: Progress, attacked: bool,
) -> dict[str, Any]:  # fmt: skip
    """Train one network and attack it.

    If ``attacked`` is false, only the audit and the norms of the Jacobians are computed.

    Raises:
        KeyboardInterrupt: If the process was asked to stop, after a checkpoint was written.
        OutOfTime: If the time is up. Finished attacks and a checkpoint of the training are kept.
    """
    say = stages = Stages(say)
    start = time.perf_counter()
    with shown() as watcher:
        summary = train(
            chosen, data, where, resume=True, device=device, time_limit=left, watcher=watcher
        )
    if summary["stopped"]:
        if summary["stopped"] != "time limit":
            raise KeyboardInterrupt
        raise OutOfTime
    images = data.test_images(tier.images)
    few = (images[0][: tier.autoattack], images[1][: tier.autoattack])
    plan = tier.plan if attacked else replace(tier.plan, attacks=())
    found: dict[str, Any] = {}
    best, final = networks(where)
    for network in (final,) if _same(best, final) else (final, best):
        kind = network.path.stem
        say(f"{kind}:")
        look = partial(
            _looked_at, network, where / "assessed.jsonl", torch.device(device), say, progress
        )
        closer = attacked and chosen.seed == 0 and kind == "final"
        found[kind] = look(
            images, plan, jacobians=tier.jacobians, certify=True, curves=closer,
            doubts=closer and tier.doubts,
        )  # fmt: skip
        if not attacked:
            continue
        found[kind]["also"] = {
            f"{radius:g}": look(images, replace(plan, attacks=("pgd",), radius=radius))["pgd"]
            for radius in tier.also
        }
        if tier.autoattack and (kind == "final" or tier.autoattack_best):
            say("autoattack")
            found[kind]["autoattack"] = look(few, replace(plan, attacks=("autoattack",)))[
                "autoattack"
            ]
    pulls = equal_decay(chosen, final.model.cpu(), data)
    found.setdefault("best", {**found["final"], "checkpoint": best.path.name})
    kept = ("epoch", "held_out_accuracy", "held_out_pgd_accuracy", "train_accuracy", "loss")
    steps = read(where / "records.jsonl")
    epochs = [{k: r[k] for k in kept} for r in steps]
    return {
        "settings": as_dict(chosen),
        "training": summary,
        "epochs": epochs,
        **found,
        **({"equal_decay": pulls} if pulls else {}),
        "training_seconds": round(steps[-1]["seconds"], 1),
        "stages": stages.seconds(),
        "seconds": round(time.perf_counter() - start, 1),
        **provenance(device, chosen.seed),
    }


def _same(one: Trained, two: Trained) -> bool:
    """Whether two files hold the same network, because the last epoch was the best."""
    pairs = zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _looked_at(
    network: Trained, path: Path, device: torch.device, say: Say, progress: Progress,
    images: tuple[Tensor, Tensor], plan: Plan, *, curves: bool = False, doubts: bool = False,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the record of :func:`assess`, from ``path`` if the same file was assessed before."""
    file = hashlib.sha256(network.path.read_bytes()).hexdigest()
    pixels = hashlib.sha256(images[0].contiguous().numpy().tobytes()).hexdigest()
    made = provenance(str(device))
    asked = [network.path.name, file, pixels, vars(plan), curves, doubts, options]
    asked += [made[name] for name in ("device", "torch", "lipbound")]
    asked = json.loads(json.dumps(asked))  # as JSON will return it
    for record in read(path):
        if record["asked"] == asked:
            return record["found"]
    found = assess(
        network,
        None,
        images,
        plan,
        device,
        curves=curves,
        doubts=doubts,
        say=say,
        progress=progress,
        **options,
    )
    check_time()  # a record must not hold an audit that the time limit cut short
    append(path, {"asked": asked, "found": found})
    return found
