"""Compare PGD with restarts with other libraries' attacks at the same budget and precision.

    python -m benchmarks.attack_speed RUN/final.safetensors --folder DATA --out FILE

The attacks run on the network of a training run and the first images of its test set. All have the
same number of gradients per image and the same arithmetic. Every attack gets a row with and without
``torch.compile``, each with and without ``cudnn.benchmark``, so that all compare at their best.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.files import append, provenance
from lipbound.modules import frozen
from lipbound.robust.attacks.autoattack import autoattack
from lipbound.robust.attacks.half_precision import Rough
from lipbound.robust.attacks.plan import HALVES, SLACK, Plan, engine, strongest, tuned
from lipbound.robust.attacks.recheck import tf32, verified
from lipbound.robust.data import DATA
from lipbound.robust.training.trained import load_trained

Run = Callable[[Tensor, Tensor, float], Tensor]  # images, labels, share of the budget → attacked


def in_batches(attack: Run, size: int) -> Run:
    def run(images: Tensor, labels: Tensor, share: float) -> Tensor:
        parts = zip(images.split(size), labels.split(size), strict=True)
        return torch.cat([attack(x, y, share) for x, y in parts])

    return run


def rough(model: nn.Module, plan: Plan) -> nn.Module:
    """Return the network for another library: compiled and in half precision, as the plan says."""
    ready: Any = torch.compile(model) if plan.compile else model
    half = HALVES.get(plan.precision)
    return ready if half is None else Rough(ready, half)


@contextmanager
def lipbound(model: nn.Module, images: Tensor, plan: Plan) -> Iterator[Run]:
    with engine(model, images, plan) as ready:

        def attack(x: Tensor, y: Tensor, share: float) -> Tensor:
            shorter = replace(plan, restarts=max(1, int(share * plan.restarts)))
            return strongest(replace(ready, plan=shorter), x, y, plan.radius).images

        yield attack


@contextmanager
def foolbox(model: nn.Module, images: Tensor, plan: Plan) -> Iterator[Run]:
    import foolbox as library

    wrapped = library.PyTorchModel(rough(model, plan), bounds=(0, 1))

    def attack(x: Tensor, y: Tensor, share: float) -> Tensor:
        steps = max(1, int(share * plan.iterations))
        pgd = library.attacks.LinfPGD(steps=steps, rel_stepsize=plan.step)
        found = x.clone()
        for _ in range(max(1, int(share * plan.restarts))):
            attempt, _, broken = pgd(wrapped, x, y, epsilons=plan.radius)
            found = torch.where(broken.reshape(-1, 1, 1, 1), attempt, found)
        return found

    yield in_batches(attack, plan.batch)


@contextmanager
def pyautoattack(model: nn.Module, images: Tensor, plan: Plan) -> Iterator[Run]:
    """Run APGD with 100 gradients per restart; broken images are not attacked again."""
    ready = rough(model, plan)

    def attack(x: Tensor, y: Tensor, share: float) -> Tensor:
        found, left = x.clone(), torch.arange(len(x), device=x.device)
        for seed in range(max(1, int(share * plan.iterations * plan.restarts / 100))):
            if not len(left):
                break
            new = autoattack(
                ready, x[left], y[left], radius=plan.radius, attacks=["apgd-ce"], seed=seed,
                batch=len(x),
            )  # fmt: skip
            found[left[new.broken]] = new.images[new.broken]
            left = left[~new.broken]
        return found

    yield in_batches(attack, plan.batch)


ATTACKS: dict[str, Callable[[nn.Module, Tensor, Plan], AbstractContextManager[Run]]] = {
    "lipbound": lipbound,
    "foolbox": foolbox,
    "pyautoattack": pyautoattack,
}


def row(
    name: str, model: nn.Module, images: Tensor, labels: Tensor, plan: Plan, benchmark: bool
) -> dict[str, Any]:
    """Time one attack after a warm-up, and return its row of the record."""
    wait = torch.cuda.synchronize if images.is_cuda else lambda: None
    with (
        frozen(model),  # no attack needs gradients of the weights
        tf32(plan.precision == "tf32"),
        ATTACKS[name](model, images, plan) as attack,
        tuned(benchmark),  # after the engine, which chooses for itself
    ):
        for size in (plan.batch, max(1, plan.batch // 2)):  # the other attacks shrink batches
            attack(images[:size], labels[:size], 0.01)
        wait()
        start = time.perf_counter()
        found = attack(images, labels, 1.0)
        wait()
        seconds = time.perf_counter() - start
    wrong = verified(model, found, labels, plan.batch)
    return {
        "attack": name,
        "compiled": plan.compile,
        "cudnn_benchmark": benchmark,
        "seconds": round(seconds, 3),
        "images_per_second": round(len(images) / seconds, 2),
        "accuracy": 1 - float(wrong.double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("--folder", type=Path, help="folder of the image data")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--precision", default="tf32", choices=[*SLACK])
    parser.add_argument("--device", default="cuda")
    for flag, about in (("compile", "torch.compile"), ("benchmark", "cudnn.benchmark")):
        parser.add_argument(f"--{flag}", default="both", choices=["no", "yes", "both"],
                            help=f"rows without {about}, with it, or both (default)")  # fmt: skip
    parser.add_argument("--only", nargs="*", choices=[*ATTACKS], help="some of the attacks")
    parser.add_argument("--out", type=Path, help="append the record to this JSON-lines file")
    chosen = parser.parse_args()
    trained = load_trained(chosen.weights)
    test = DATA[trained.settings.data](chosen.folder).test
    pixels, labels = test.load(torch.arange(chosen.images))
    images, labels = (pixels.float() / 255).to(chosen.device), labels.to(chosen.device)
    model = trained.model.to(chosen.device, memory_format=torch.channels_last)
    plan = Plan(
        radius=trained.settings.radius, iterations=chosen.iterations, restarts=chosen.restarts,
        batch=chosen.batch, loss="cross-entropy", precision=chosen.precision,
    )  # fmt: skip
    some: dict[str, tuple[bool, ...]] = {"no": (False,), "yes": (True,), "both": (False, True)}
    rows = []
    for name in chosen.only or ATTACKS:
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed")
            continue
        for compiled, benchmark in product(some[chosen.compile], some[chosen.benchmark]):
            with torch._dynamo.config.patch(recompile_limit=64):  # else it would stop compiling
                rows.append(
                    row(name, model, images, labels, replace(plan, compile=compiled), benchmark)
                )
            print(rows[-1], flush=True)
    record = {
        "benchmark": "attack_speed",
        "network": trained.settings.model,
        "images": chosen.images,
        "iterations": chosen.iterations,
        "restarts": chosen.restarts,
        "radius": plan.radius,
        "precision": chosen.precision,
        "rows": rows,
        **provenance(chosen.device),
    }
    print(json.dumps(record, indent=1))
    if chosen.out:
        append(chosen.out, record)


if __name__ == "__main__":
    main()
