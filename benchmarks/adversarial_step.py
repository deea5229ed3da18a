"""Measure the time that the penalty adds to a step of adversarial training on a GPU.

    python benchmarks/adversarial_step.py --depth 28 --widen 10 --batch 200
    python benchmarks/adversarial_step.py --depth 16 --widen 4 --batch 512

A step is PGD with ten iterations on images of CIFAR-10's size, forward, backward and fused SGD, in
bfloat16 autocast and channels_last. The variants alternate, so a clock drift affects all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import lipbound
from lipbound.files import append, provenance
from lipbound.paper.speed import Direct
from lipbound.robust.models import WideResNet

RADIUS, PGD = 8 / 255, 10
WEIGHT = 0.008


def step(
    model: WideResNet,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    loss_term: Callable[[], Tensor] | None,
    after: Callable[[], object] | None,
) -> None:
    delta = torch.empty_like(images).uniform_(-RADIUS, RADIUS)
    for _ in range(PGD):
        delta.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(images + delta), labels)
        (gradient,) = torch.autograd.grad(loss, delta)
        with torch.no_grad():
            delta = (delta + RADIUS / 5 * gradient.sign()).clamp_(-RADIUS, RADIUS)
            delta = (images + delta).clamp_(0, 1) - images
    with torch.autocast("cuda", torch.bfloat16):
        loss = functional.cross_entropy(model(images + delta), labels)
    if loss_term is not None:
        loss = loss + loss_term()
    optimizer.zero_grad()
    loss.backward()
    if after is not None:
        after()
    optimizer.step()


def overhead(times: list[float], plain: list[float]) -> float:
    """Return the median overhead, in per cent, relative to the plain step of the same round."""
    ratios = [mine / theirs for mine, theirs in zip(times, plain, strict=True)]
    return round(100 * (statistics.median(ratios) - 1), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=28)
    parser.add_argument("--widen", type=int, default=10)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="append the record to this JSON-lines file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = WideResNet(chosen.depth, chosen.widen).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)
    images = torch.rand(chosen.batch, 3, 32, 32, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(10, (chosen.batch,), device="cuda")
    penalty = lipbound.Penalty(model, WEIGHT)
    kernels = [m.weight for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    direct = Direct(kernels)

    def published() -> Tensor:
        """Evaluate the paper's penalty directly: the convolutions, and BatchNorm one by one."""
        norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        gains = [(n.weight / (n.running_var + n.eps).sqrt()).abs().max().log() for n in norms]
        return WEIGHT * (direct() + torch.stack(gains).sum())

    variants: dict[str, tuple[Callable[[], Tensor] | None, Callable[[], object] | None]] = {
        "none": (None, None),
        "add_grad": (None, penalty.add_grad_),
        "autograd": (penalty, None),
        "direct": (published, None),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(chosen.rounds + 3):
        for name, (term, after) in variants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(model, optimizer, images, labels, term, after)
            torch.cuda.synchronize()
            if round_ >= 3:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    record = {
        "benchmark": "adversarial_step",
        "network": f"wrn-{chosen.depth}-{chosen.widen}",
        "batch": chosen.batch,
        "pgd_iterations": PGD,
        "rounds": chosen.rounds,
        "milliseconds": {name: round(1e3 * value, 3) for name, value in medians.items()},
        "overhead_percent": {
            name: overhead(times[name], times["none"]) for name in variants if name != "none"
        },
        **provenance("cuda"),
    }
    print(json.dumps(record, indent=1))
    if chosen.out:
        append(chosen.out, record)


if __name__ == "__main__":
    main()
