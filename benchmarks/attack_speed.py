"""PGD with restarts beside the libraries' attacks at the same budget, in one run.

    python benchmarks/attack_speed.py --model wrn-28-4 --images 1000 --out FILE

A network with random weights (its accuracy under attack says nothing; its time does): labels are
its own predictions, and the radius is one at which some images stand and some fall. Every contender
has the same number of gradients per image, float32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lipbound.records import append, provenance
from lipbound.robust.attacks import autoattack
from lipbound.robust.models import MODELS
from lipbound.robust.strongest import strongest_pgd


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="wrn-28-4")
    parser.add_argument("--weights", type=Path, help="of `lipbound train`, instead of random ones")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--radius", type=float, default=8 / 255)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append the record to this JSON-lines file")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.weights:
        from lipbound.robust.train import load_model

        model: nn.Module = load_model(chosen.weights)[0]
    else:
        model = MODELS[chosen.model]()
    model = model.to(chosen.device).eval()
    images = torch.rand(chosen.images, 3, 32, 32, device=chosen.device)
    with torch.no_grad():
        labels = torch.cat([model(x).argmax(1) for x in images.split(chosen.batch)])
    step = chosen.radius / 5

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return strongest_pgd(
            model, x, y, radius=chosen.radius, step=step, iterations=chosen.iterations,
            restarts=chosen.restarts,
        ).broken  # fmt: skip

    def foolbox(x: Tensor, y: Tensor) -> Tensor:
        import foolbox as library

        wrapped = library.PyTorchModel(model, bounds=(0, 1))
        attack = library.attacks.LinfPGD(steps=chosen.iterations, rel_stepsize=0.2)
        broken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for _ in range(chosen.restarts):
            broken |= attack(wrapped, x, y, epsilons=chosen.radius)[2]
        return broken

    def apgd(x: Tensor, y: Tensor) -> Tensor:  # 100 gradients a run
        broken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for seed in range(chosen.iterations * chosen.restarts // 100):
            found = autoattack(model, x, y, radius=chosen.radius, attacks=["apgd-ce"], seed=seed)
            broken |= found.broken
        return broken

    contenders: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"lipbound": ours}
    for name, attack in (("foolbox", foolbox), ("pyautoattack", apgd)):
        try:
            __import__(name)
            contenders[name] = attack
        except ImportError:
            print(f"{name} is not installed here")
    wait = torch.cuda.synchronize if chosen.device == "cuda" else lambda: None
    seconds, broken = {}, {}
    for name, attack in contenders.items():
        attack(images[:8], labels[:8])  # libraries warm up
        wait()
        start = time.perf_counter()
        parts = zip(images.split(chosen.batch), labels.split(chosen.batch), strict=True)
        broken[name] = float(torch.cat([attack(x, y) for x, y in parts]).float().mean())
        wait()
        seconds[name] = time.perf_counter() - start
        print(f"{name:14} {seconds[name]:8.2f} s  broken {broken[name]:.3f}", flush=True)
    record = {
        "benchmark": "attack_speed",
        "network": chosen.model,
        "images": chosen.images,
        "iterations": chosen.iterations,
        "restarts": chosen.restarts,
        "radius": chosen.radius,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "images_per_second": round(chosen.images / seconds["lipbound"], 2),
        "broken": broken,
        **provenance(chosen.device),
    }
    print(json.dumps(record, indent=1))
    if chosen.out:
        append(chosen.out, record)


if __name__ == "__main__":
    main()
