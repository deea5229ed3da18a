"""From the files of a training run to records of how they stand attacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.files import check_file, provenance
from lipbound.network.audits import audit
from lipbound.robust.attacks.evaluate import evaluate
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.training.trained import Trained, load_trained


def networks(path: Path) -> list[Trained]:
    """The network of a file, or the best and the final one of a run's folder.

    Raises:
        ValueError: If there is none.
    """
    files = [path]
    if not path.is_dir():
        check_file(path)
    else:
        files = [f for f in (path / "best.safetensors", path / "final.safetensors") if f.is_file()]
        if not files:
            raise ValueError(f"{str(path)!r} holds no best.safetensors and no final.safetensors")
    return [load_trained(file) for file in files]


def assess(
    network: Trained,
    other: Trained | None,
    images: tuple[Tensor, Tensor],
    plan: Plan,
    device: torch.device,
    *,
    certify: bool = False,
    jacobians: int = 0,
    curves: bool = True,
    doubts: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """One network's record, see :func:`lipbound.robust.attacks.evaluate.evaluate`.

    Args:
        network: To be attacked.
        other: From which adversarial images are carried over, to see whether they do better.
        images: uint8 pixels and labels.
        plan: What to try.
        device: Where.
        certify: Whether to audit the network, for certified accuracies.
        jacobians: At how many images to measure the Jacobian's norm.
        curves: Whether to attack at other radii and with fewer steps too.
        doubts: Whether to look for signs of a weak attack.
        progress: Is told what is being done.
    """
    pixels, labels = images
    if tuple(pixels.shape[1:]) != network.input_shape:
        raise ValueError(
            f"the images are {tuple(pixels.shape[1:])}, the network takes {network.input_shape}"
        )
    bounds = None
    if certify:
        progress("audit")
        # Wants a processor's float64; Jacobians are measured below, at images and not at noise.
        bounds = audit(network.model.cpu(), network.input_shape, search=0)
    model = network.model.to(device)
    if device.type == "cuda" and plan.precision != "float32":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    record = evaluate(
        model,
        pixels.to(device).float() / 255,
        labels.to(device),
        plan,
        audit=bounds,
        jacobians=min(jacobians, len(labels)),
        curves=curves,
        doubts=doubts,
        surrogate=None if other is None else other.model.to(device),
        progress=progress,
    )
    if bounds is not None:
        record["log10_lipschitz"] = {
            name: math.log10(value) if 0 < value < math.inf else None
            for name in ("upper", "product")
            for value in (getattr(bounds, name),)
        }
    return {
        "experiment": "attack",
        "checkpoint": network.path.name,
        "arm": network.settings.arm,
        "model": network.settings.model,
        "plan": vars(plan),
        **record,
        **provenance(str(device), plan.seed),
    }
