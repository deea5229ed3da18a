"""AutoAttack (Croce & Hein 2020), run by the ``pyautoattack`` package."""

from __future__ import annotations

import torch
from torch import Tensor

from lipbound.robust.attacks.pgd import Found, perturbation_norms
from lipbound.runtime import check_time


class _Contiguous(torch.nn.Module):
    """A network whose gradient at the images is contiguous, as the package's L2 attacks require.

    The gradient of a network in channels_last is in channels_last too. Where it is not a number it
    is set to 0, because an attack could not leave a pixel that is not a number.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        check_time()
        if images.requires_grad:
            images = images.view_as(images)
            images.register_hook(lambda g: g.contiguous().nan_to_num(0.0, 0.0, 0.0))
        return self.model(images)


def autoattack(
    model: torch.nn.Module, images: Tensor, labels: Tensor, *, radius: float, ball: str = "linf",
    seed: int = 0, batch: int = 250, attacks: list[str] | None = None,
) -> Found:  # fmt: skip
    """Run Croce & Hein's standard AutoAttack: APGD-CE, APGD-T, FAB-T and Square.

    With fewer than four classes the targeted attacks are left out, because they need four logits.

    Args:
        model: The network, in eval mode.
        images: Pixels in [0, 1].
        labels: True classes, ``(batch,)``.
        radius: Radius of the ball.
        ball: Norm of the ball, ``'linf'`` or ``'l2'``.
        seed: Seed for the random starts.
        batch: Number of images attacked at a time.
        attacks: Attacks to run instead, such as ``['apgd-ce']``, with one restart each.

    Raises:
        ValueError: If ``pyautoattack`` is not installed.
    """
    try:
        from pyautoattack import AutoAttack
    except ImportError:
        raise ValueError("AutoAttack requires: pip install 'lipbound[attacks]'") from None
    with torch.no_grad():
        classes = model(images[:1]).shape[1]
    if attacks is None and classes < 4:
        attacks = ["apgd-ce", "fab", "square"]
    elif attacks is not None and classes < 4:
        attacks = [name for name in attacks if name != "apgd-t"]
    version = "standard" if attacks is None else "custom"
    norm = {"linf": "Linf", "l2": "L2"}[ball]
    attack = AutoAttack(
        _Contiguous(model), norm=norm, eps=radius, seed=seed, version=version, attacks=attacks,
        device=images.device,
    )  # fmt: skip
    attack.apgd.n_restarts = attack.fab.n_restarts = 1  # its custom version defaults to five
    attack.apgd_targeted.n_target_classes = min(9, classes - 1)
    attack.fab.n_target_classes = min(9, classes - 1)
    found = attack.run_standard_evaluation(images.contiguous(), labels, batch_size=batch)
    found = (found[0] if isinstance(found, tuple) else found).to(images)
    with torch.no_grad():
        broken = torch.cat([model(part).argmax(1) for part in found.split(batch)]) != labels
    first = torch.where(broken, 0, -1)
    return Found(found, broken, perturbation_norms(found, images, ball), first)
