"""Compare PGD with restarts with other libraries' attacks at the same budget and precision.

    python benchmarks/attack_speed.py RUN/final.safetensors --folder DATA --out FILE

The attacks run on the network of a training run and the first images of its test set. All have the
same number of gradients per image and the same arithmetic.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lipbound.files import append, provenance
from lipbound.robust.attacks.autoattack import autoattack
from lipbound.robust.attacks.half_precision import Rough
from lipbound.robust.attacks.plan import HALVES, SLACK, Plan, engine, strongest
from lipbound.robust.attacks.recheck import tf32, verified
from lipbound.robust.data import DATA
from lipbound.robust.training.trained import load_trained


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
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", nargs="*", help="some of lipbound, foolbox, pyautoattack")
    parser.add_argument("--out", type=Path, help="append the record to this JSON-lines file")
    chosen = parser.parse_args()
    trained = load_trained(chosen.weights)
    radius = trained.settings.radius
    test = DATA[trained.settings.data](chosen.folder).test
    pixels, labels = test.load(torch.arange(chosen.images))
    images = (pixels.float() / 255).to(chosen.device)
    labels = labels.to(chosen.device)
    model = trained.model.to(chosen.device, memory_format=torch.channels_last)
    half = HALVES.get(chosen.precision)
    theirs = model if half is None else Rough(model, half)
    plan = Plan(
        radius=radius, iterations=chosen.iterations, restarts=chosen.restarts, batch=chosen.batch,
        loss="cross-entropy", precision=chosen.precision, compile=not chosen.no_compile,
    )  # fmt: skip

    with engine(model, images, plan) as ready:

        def ours(x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
            on = replace(ready, plan=replace(plan, restarts=max(1, int(share * plan.restarts))))
            return strongest(on, x, y, radius).images

        def foolbox(x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
            import foolbox as library

            wrapped = library.PyTorchModel(theirs, bounds=(0, 1))
            attack = library.attacks.LinfPGD(
                steps=max(1, int(share * chosen.iterations)), rel_stepsize=0.2
            )
            found = x.clone()
            for _ in range(max(1, int(share * chosen.restarts))):
                attempt, _, broken = attack(wrapped, x, y, epsilons=radius)
                found = torch.where(broken.reshape(-1, 1, 1, 1), attempt, found)
            return found

        def apgd(x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
            """Run APGD with 100 gradients per restart; broken images are not attacked again."""
            found, left = x.clone(), torch.arange(len(x), device=x.device)
            for seed in range(max(1, int(share * chosen.iterations * chosen.restarts / 100))):
                new = autoattack(
                    theirs, x[left], y[left], radius=radius, attacks=["apgd-ce"], seed=seed,
                    batch=len(x),
                )  # fmt: skip
                found[left[new.broken]] = new.images[new.broken]
                left = left[~new.broken]
            return found

        contenders: dict[str, Callable[..., Tensor]] = {}
        for name, attack in (("lipbound", ours), ("foolbox", foolbox), ("pyautoattack", apgd)):
            try:
                __import__(name)
            except ImportError:
                print(f"{name} is not installed")
                continue
            if not chosen.only or name in chosen.only:
                contenders[name] = attack
        wait = torch.cuda.synchronize if chosen.device == "cuda" else lambda: None
        seconds, standing = {}, {}
        for name, attack in contenders.items():
            with tf32(chosen.precision == "tf32"):
                torch.backends.cudnn.benchmark = name == "lipbound"
                attack(images[: chosen.batch], labels[: chosen.batch], 0.01)  # all warm up
                wait()
                start = time.perf_counter()
                if name == "lipbound":
                    found = attack(images, labels)
                else:
                    parts = zip(images.split(chosen.batch), labels.split(chosen.batch), strict=True)
                    found = torch.cat([attack(x, y) for x, y in parts])
                wait()
            seconds[name] = time.perf_counter() - start
            wrong = verified(model, found, labels, chosen.batch)
            standing[name] = 1 - float(wrong.float().mean())
            print(f"{name:14} {seconds[name]:8.2f} s  accuracy {standing[name]:.3f}", flush=True)
    record = {
        "benchmark": "attack_speed",
        "network": trained.settings.model,
        "images": chosen.images,
        "iterations": chosen.iterations,
        "restarts": chosen.restarts,
        "radius": radius,
        "precision": chosen.precision,
        "compiled": not chosen.no_compile,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "images_per_second": {
            name: round(chosen.images / value, 2) for name, value in seconds.items()
        },
        "accuracy": standing,
        **provenance(chosen.device),
    }
    print(json.dumps(record, indent=1))
    if chosen.out:
        append(chosen.out, record)


if __name__ == "__main__":
    main()
