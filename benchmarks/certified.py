"""Train for certificates, prove the result on the test set, and attack what was proved.

    python -m benchmarks.certified --preset fast --seed 0 --data cifar10 --folder DATA --out FILE
    python -m benchmarks.certified --preset fast --held-out 0.1 --set randaugment=1 --name cell
    python -m benchmarks.certified --trained RUN RUN RUN --data cifar10 --folder DATA --out FILE
    python -m benchmarks.certified --trained FILE --autoattack 1000 --data cifar10 --folder DATA

The record holds the certified accuracies at 36, 72 and 108 over 255, the radius of every test
image, and how many of the certified images an attack breaks within their own radius (none, if the
proof is right). With ``--held-out`` the network is trained without a part of the training set and
certified on that part, to choose settings; the test set is not looked at. A run that was stopped is
continued. With ``--keep`` the weights are rounded to float16 and written to a file, and the rounded
network is the one that is certified. With ``--trained`` nothing is trained: a network trained
before is certified, or the mean of several. With ``--mirrored`` the mean over each image and its
mirror image is certified as well. With ``--autoattack`` AutoAttack in L2 attacks images that are
certified at 36/255, and then images that are certified at 72/255.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.files import append, provenance
from lipbound.modules import in_float64
from lipbound.network.accuracy import CertifiedAccuracy, certified_accuracy
from lipbound.network.audits import audit
from lipbound.robust.attacks.autoattack import autoattack
from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.attacks.pgd import margin
from lipbound.robust.data import data_set
from lipbound.robust.data.sets import Data
from lipbound.robust.models import Averaged
from lipbound.robust.training import checkpoints
from lipbound.robust.training.batches import Feed
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.loop import train
from lipbound.robust.training.settings import Settings, as_dict, parse, settings
from lipbound.robust.training.trained import load_trained
from lipbound.runtime import pick_device

RADII = (36 / 255, 72 / 255, 108 / 255)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--held-out", type=float, default=0.0, help="share to choose settings on")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--name", default="")
    parser.add_argument("--runs", type=Path, default=Path("runs/certified"))
    parser.add_argument("--time-limit", type=float, help="seconds until a checkpoint is written")
    parser.add_argument("--attacked", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="file for the network, in float16")
    parser.add_argument("--trained", type=Path, nargs="+", metavar="RUN", help="or .safetensors")
    parser.add_argument("--mirrored", action="store_true")
    parser.add_argument("--autoattack", type=int, default=0, metavar="IMAGES")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="append the record to this JSON-lines file")
    given = parser.parse_args()
    changes: dict[str, Any] = dict(parse(text) for text in given.set)
    changes |= {"data": given.data, "seed": given.seed, "held_out": given.held_out}
    chosen = settings("certified", given.preset, **changes)
    data, device = data_set(given.data, given.folder), pick_device(given.device)
    name = given.name or given.preset
    began = time.perf_counter()
    if given.trained:
        networks = [load_trained(place) for place in given.trained]
        members = [network.model.to(device) for network in networks]
        made: dict[str, Any] = {"runs": [place.name for place in given.trained]}
        chosen = networks[0].settings
    else:
        place = given.runs / f"{name}-{given.seed}"
        summary = train(
            chosen, data, place, resume=True, device=given.device, time_limit=given.time_limit
        )
        if summary["stopped"]:
            print(f"stopped ({summary['stopped']}) at step {summary.get('step')}; run it again")
            return
        final = place / "final.safetensors"
        if given.keep is not None:
            keep(final, given.keep)
            final = given.keep
        members = [load_trained(final).model.to(device)]
        made = {
            "training_seconds": summary["seconds"],
            "steps": summary["steps"],
            "images_per_second": round(chosen.batch * summary["steps"] / summary["seconds"]),
        }
    images = certified_images(chosen, data, given.held_out)
    alone = members[0] if len(members) == 1 else Averaged(members, mirror=False)
    result = proved(alone, images, given.attacked, given.autoattack)
    if given.held_out:
        del result["radii"]
    record = {
        "experiment": "certified",
        "name": name,
        "images_of": "held-out" if given.held_out else "test",
        "settings": as_dict(chosen),
        **made,
        "weights": sum(p.numel() for member in members for p in member.parameters()),
        **result,
        "wall_seconds": round(time.perf_counter() - began, 1),
        **provenance(str(device), given.seed),
    }
    results = {"alone": record}
    if given.mirrored:
        results["mirrored"] = proved(Averaged(members), images, given.attacked // 4)
        record["mirrored"] = {k: v for k, v in results["mirrored"].items() if k != "radii"}
    for kind, found in results.items():
        shown = [found["clean"], *found["certified"].values()]
        print(name, given.seed, record["images_of"], kind, [part["accuracy"] for part in shown])
        print("broken within their own radius:", found["attacked"])
    if given.autoattack:
        print("broken by AutoAttack:", record["autoattack"])
    if given.out is not None:
        append(given.out, record)


def keep(path: Path, kept: Path) -> None:
    """Round the weights of a network to float16 and write them to another file."""
    weights, about = checkpoints.load(path)
    rounded = {k: w.half() if w.is_floating_point() else w for k, w in weights.items()}
    checkpoints.save(kept, rounded, about)


def certified_images(chosen: Settings, data: Data, held_out: float) -> tuple[Tensor, Tensor]:
    """Return pixels and labels of the test set, or of the part of the training set held out."""
    if not held_out:
        return data.test.load(torch.arange(len(data.test)))
    return data.train.load(Feed(chosen, data, Team(torch.device("cpu"))).held)


def proved(
    model: nn.Module, images: tuple[Tensor, Tensor], attacked: int, stronger: int = 0
) -> dict[str, Any]:
    """Return the certified accuracies, and the results of attacks on certified images.

    Args:
        model: The network.
        images: Pixels and labels.
        attacked: Number of images that PGD attacks.
        stronger: Number of images that AutoAttack attacks at each of two radii.
    """
    pixels, labels = images
    device = next(model.parameters()).device
    found = audit(model, tuple(pixels.shape[1:]), search=0)

    def batch(start: int) -> tuple[Tensor, Tensor]:
        part = slice(start, start + 500)
        return pixels[part].to(device).float() / 255, labels[part].to(device)

    batches = (batch(start) for start in range(0, len(labels), 500))
    result = certified_accuracy(model, found, batches, RADII)
    right = result.predictions == result.labels
    chosen = (result.certified > 0).nonzero()[:attacked, 0]
    exact = in_float64(model)
    broken = 0
    for part in chosen.split(250):
        clean = pixels[part].to(device).double() / 255
        broken += int(fallen(exact, clean, labels[part].to(device), result.certified[part]).sum())
    return {
        "lipschitz": found.upper if math.isfinite(found.upper) else None,
        "features": found.features,
        "clean": accuracy(right),
        "certified": {
            f"{radius:.6f}": accuracy(right & (result.certified > radius)) for radius in RADII
        },
        "radii": [round(r, 5) for r in result.certified.tolist()],
        "attacked": {"images": len(chosen), "broken": broken},
        **({"autoattack": by_autoattack(model, images, result, stronger)} if stronger else {}),
    }


def by_autoattack(
    model: nn.Module, images: tuple[Tensor, Tensor], result: CertifiedAccuracy, count: int
) -> dict[str, dict[str, int]]:
    """Attack images that are certified at 36/255 and at 72/255; return how many are broken.

    AutoAttack searches in float32. What it finds is classified again in float64.
    """
    device, exact = next(model.parameters()).device, in_float64(model)
    found = {}
    for radius in RADII[:2]:
        chosen = (result.certified > radius).nonzero()[:count, 0]
        clean, labels = images[0][chosen].to(device).float() / 255, images[1][chosen].to(device)
        attack = autoattack(model, clean, labels, radius=radius, ball="l2", batch=1000)
        with torch.no_grad():
            fell = exact(attack.images.double()).argmax(1) != labels
        moved = (attack.images.double() - clean.double()).flatten(1).norm(dim=1)
        broken = int((fell & (moved <= result.certified[chosen].to(moved))).sum())
        found[f"{radius:.6f}"] = {"images": len(chosen), "broken": broken}
    return found


def fallen(
    model: nn.Module, images: Tensor, labels: Tensor, radii: Tensor, iterations: int = 100
) -> Tensor:
    """Attack every image within its own radius by PGD in L2; return which are misclassified.

    The attack may leave the range of pixels, as the proof allows.
    """
    ball = BALLS["l2"]
    reach = radii.to(images).reshape(-1, *[1] * (images.ndim - 1))
    broken = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    for restart in range(2 if len(images) else 0):
        draw = torch.Generator(images.device).manual_seed(restart)
        moved = reach * ball.sample(images, 1.0, draw)
        for step in range(iterations):
            moved.requires_grad_()
            logits = model(images + moved)
            broken |= logits.argmax(1) != labels
            (slope,) = torch.autograd.grad(margin(logits, labels).sum(), moved)
            length = reach * 0.3 * (1 - step / iterations)
            moved = ball.project(moved.detach() + length * ball.ascend(slope), reach)
    return broken.cpu()


if __name__ == "__main__":
    main()
