"""The penalty as a Lightning callback; it needs ``pip install lipbound[lightning]``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lipbound.penalty import Penalty

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError(f"{error}; pip install 'lipbound[lightning]'") from None

__all__ = ["LipschitzPenalty"]


class LipschitzPenalty(Callback):
    """Adds the gradient of a :class:`lipbound.Penalty` to every training step.

    The module does not change. The gradient is added once for each step of the optimizer, after
    accumulated gradients have been summed, averaged over the devices and unscaled, and before they
    are clipped. A step without any gradient, because ``training_step`` returned ``None``, gets
    none; an optimizer with momentum may still move the weights.

    It logs ``penalty``, the value at every step, and ``log10_product``, the logarithm of the
    product of the layers' constants at the end of every epoch. The names end in ``/network`` if
    ``network`` is given. After the start of a fit the attribute ``penalty`` is the
    :class:`lipbound.Penalty`, with its ``bounds()`` and a ``weight`` that another callback may
    change.

    With several devices it works with ``strategy="ddp"``. The running statistics of the penalized
    BatchNorm layers are those of the first process before the gradient is computed, because every
    process must add the same. Strategies that split the weights are refused, and so are several
    optimizers, because it would not be clear which of them takes the gradient.

    Args:
        weight: λ of the penalty.
        network: Name of the part of the module to penalize, for example ``'network'`` or
            ``'model.backbone'``; the entire module by default. The last Linear layer of this part
            is left out. ``include_batchnorm='folded'`` and ``method='power_iteration'`` need a part
            with an ordinary ``forward``.
        options: Further arguments of :class:`lipbound.Penalty`, such as ``method`` or ``floor``.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(callbacks=[LipschitzPenalty(0.008, floor=1.0)], logger=False)
    """

    def __init__(self, weight: float = 0.008, *, network: str = "", **options: Any):
        self.weight, self.network, self.options = weight, network, options
        self.penalty: Penalty | None = None
        self._restored: dict[str, Any] = {}
        self._backward = False  # has run since the last step of the optimizer

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; callbacks for other parts of a module have others."""
        return self._generate_state_key(network=self.network)

    def state_dict(self) -> dict[str, Any]:
        """Return what the penalty keeps between steps."""
        return {} if self.penalty is None else dict(self.penalty.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from a checkpoint, for the fit that starts next."""
        self._restored = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) > 1:
            raise ValueError(
                f"LipschitzPenalty needs one optimizer, but configure_optimizers returned "
                f"{len(trainer.optimizers)}; call lipbound.Penalty(...).add_grad_() before step()"
            )
        whole = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if not whole or isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"LipschitzPenalty needs all weights on every device, but "
                f"{type(trainer.strategy).__name__} may split them; use strategy='ddp'"
            )
        self.penalty = Penalty(_part(pl_module, self.network), self.weight, **self.options)
        self.penalty.load_state_dict(self._restored)
        self._restored, self._backward = {}, False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._backward = True

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self.penalty is not None
        # A module may set the gradients to zero instead of None. In a manual optimization, a module
        # may call backward() itself, which is not reported.
        missing = pl_module.automatic_optimization and not self._backward
        self._backward = False
        grads = (p.grad for group in optimizer.param_groups for p in group["params"])
        if missing or all(grad is None for grad in grads):
            return
        if trainer.world_size > 1:
            for factor in self.penalty.factors:
                for statistics in _statistics(factor.norm):
                    distributed.broadcast(statistics, 0)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # A fused optimizer divides by the scale itself, so its gradients are still scaled here.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        value = self.penalty.add_grad_(scaler.get_scale() if scaler and fused else 1.0)
        pl_module.log(self._name("penalty"), value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.penalty is not None
        bounds = self.penalty.bounds()
        logs = (f.count * _log10(bounds[f.name]) for f in self.penalty.factors)
        pl_module.log(self._name("log10_product"), math.fsum(logs), sync_dist=True)

    def _name(self, name: str) -> str:
        return f"{name}/{self.network}" if self.network else name


def _part(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        parts = ", ".join(n for n, _ in module.named_children()) or "none"
        raise ValueError(
            f"network={name!r} is no part of {type(module).__name__}; its parts are {parts}"
        ) from None


def _statistics(norm: nn.Module | None) -> list[Tensor]:
    return [] if norm is None else [b for b in norm.buffers() if b.is_floating_point()]


def _log10(bound: float) -> float:
    return math.log10(bound) if bound > 0 else -math.inf
