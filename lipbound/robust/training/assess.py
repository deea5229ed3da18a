"""Evaluate the networks of a training run under attack."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.files import provenance
from lipbound.network.audits import audit
from lipbound.robust.attacks.evaluate import evaluate
from lipbound.robust.attacks.evaluation import Evaluation
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.training.trained import Trained, load_trained
from lipbound.runtime import Progress, silent
from lipbound.weights import check_file


def networks(path: Path) -> list[Trained]:
    """Load the network of a file, or the best and the final network of a run's folder.

    Raises:
        ValueError: If there is no network.
    """
    files = [path]
    if not path.is_dir():
        check_file(path)
    else:
        files = [f for f in (path / "best.safetensors", path / "final.safetensors") if f.is_file()]
        if not files and (path / "settings.json").is_file():
            raise ValueError(
                f"the training run in {str(path)!r} has no best.safetensors yet, because it "
                f"stopped before its first check; repeat its command with --resume"
            )
        if not files:
            raise ValueError(
                f"{str(path)!r} is not the folder of a training run: it has neither "
                f"best.safetensors nor final.safetensors; after training several arms, name the "
                f"subfolder of one arm"
            )
    return [load_trained(file) for file in files]


def assess(
    network: Trained,
    other: Trained | None,
    images: tuple[Tensor, Tensor],
    plan: Plan,
    device: torch.device,
    *,
    certify: bool = False,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
    **options: Any,
) -> Evaluation:
    """Return a network's record from :func:`lipbound.robust.attacks.evaluate.evaluate`.

    Args:
        network: The network to attack; its weights are converted to float32.
        other: Another network. Its adversarial images test whether the attacks are too weak.
        images: uint8 pixels and labels.
        plan: An attack plan: which attacks to run, and with which budget.
        device: Device to compute on.
        certify: Whether to audit the network, for certified accuracies.
        say: Called with the name of each stage when it begins.
        progress: Shows the progress, see :class:`lipbound.runtime.Progress`.
        options: ``jacobians``, ``curves`` and ``doubts``, see ``evaluate``.
    """
    pixels, labels = images
    if tuple(pixels.shape[1:]) != network.input_shape:
        raise ValueError(
            f"the images are {tuple(pixels.shape[1:])}, but the network takes {network.input_shape}"
        )
    for each in (network, other):
        if each is not None:
            each.model.float()
    bounds = None
    if certify:
        say("audit")
        # The audit needs the CPU's float64. Jacobians are measured below, at images.
        # The domain of pixels is used only if there is no bound for every input.
        bounds = audit(
            network.model.cpu(), network.input_shape, search=0, domain=(0.0, 1.0), progress=progress
        )
    model = network.model.to(device)
    if device.type == "cuda" and plan.precision != "float32":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    record = evaluate(
        model,
        pixels.to(device).float() / 255,
        labels.to(device),
        plan,
        audit=bounds,
        surrogate=None if other is None else other.model.to(device),
        say=say,
        progress=progress,
        **options,
    )
    if bounds is not None:
        record["log10_lipschitz"] = {
            name: math.log10(value) if 0 < value < math.inf else None
            for name in ("upper", "product")
            for value in (getattr(bounds, name),)
        }
    whole = {"experiment": "attack", **network.names, **record}
    return Evaluation(whole | provenance(str(device), plan.seed))
