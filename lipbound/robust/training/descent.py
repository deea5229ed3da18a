"""Steps of gradient descent on the loss of attacked images, with a penalty or at moved weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lipbound.penalty.penalty import Penalty
from lipbound.robust.training.networks import Networks
from lipbound.robust.training.weight_perturbation import moved, uphill

Parts = Sequence[tuple[Tensor, Tensor]]  # images and labels of each part of a step


class Descent:
    """Stochastic gradient descent on the cross-entropy, at perturbed weights (AWP) if asked.

    Args:
        networks: The network in training.
        penalty: Penalty to add to the loss.
    """

    def __init__(self, networks: Networks, penalty: Penalty | None = None):
        self.networks, self.who, self.chosen = networks, networks.who, networks.chosen
        self.penalty, self.none = penalty, torch.zeros((), device=self.who.device)
        self.parameters: list[Tensor] = list(networks.model.parameters())
        self.optimizer = torch.optim.SGD(
            self.parameters,
            self.chosen.lr,
            self.chosen.momentum,
            nesterov=self.chosen.nesterov,
            weight_decay=self.chosen.weight_decay,
            fused=self.who.device.type == "cuda",
        )

    def take(self, parts: Parts, rate: float, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step at a learning rate; return loss, penalty and logits.

        Args:
            parts: Images and labels of each part of this process's images.
            rate: Learning rate.
            progress: Share of the training that is over.
        """
        loss, value, logits = self._gradients(parts)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return loss, value, logits

    def settled(self) -> nn.Module:
        """Return the network to evaluate and save."""
        return self.networks.evaluated

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits."""
        logits = self._logits(images)
        smoothing = self.chosen.label_smoothing
        return functional.cross_entropy(logits, labels, label_smoothing=smoothing), logits

    def _logits(self, images: Tensor) -> Tensor:
        with self.networks.autocast():
            logits: Tensor = self.networks.trained(images)
        return logits.to(self.chosen.dtype)

    def _gradients(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Store the mean gradients of all processes; return loss, penalty and logits.

        The mean includes the penalty's gradient, which could differ in the last digits: all
        processes must take the same step. If gradients are exchanged during the backward pass, the
        penalty comes before it, with the BatchNorm statistics of the step before.
        """
        if self.chosen.awp:
            return self._gradients_at_moved_weights(parts)
        early = self.networks.overlaps
        self.optimizer.zero_grad()
        value = self._penalty() if early else None
        loss, logits = self._backward(parts)
        self._share()
        value = self._penalty() if value is None else value
        self.networks.mean_(self.parameters)
        return loss, value, logits

    def _gradients_at_moved_weights(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
        self.optimizer.zero_grad()
        loss, logits = self._backward(parts)
        self.networks.mean_(self.parameters)
        self._share()
        buffers = list(self.networks.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        moves = uphill(self.parameters, self.chosen.awp)
        self.optimizer.zero_grad()
        value = self._penalty()  # at the weights that are not moved
        with moved(moves):
            self._backward(parts)
        self.networks.mean_(self.parameters)
        if buffers:
            torch._foreach_copy_(buffers, before)  # without new BatchNorm statistics
        return loss, value, logits

    def _backward(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Add the gradients of all parts to ``.grad``; return loss and logits."""
        losses, scores = [], []
        for place, (images, labels) in enumerate(parts):
            last = place == len(parts) - 1
            with contextlib.nullcontext() if last else self.networks.alone():
                loss, logits = self.loss(images, labels)
                (loss / len(parts)).backward()
            losses.append(loss.detach())
            scores.append(logits.detach())
        return torch.stack(losses).mean(), torch.cat(scores)

    def _share(self) -> None:
        """Give all processes the same BatchNorm statistics; each saw other images."""
        self.who.share(b for b in self.networks.model.buffers() if b.is_floating_point())

    def _penalty(self) -> Tensor:
        """Add the gradient of the penalty, and return its value."""
        return self.penalty.add_grad_() if self.penalty else self.none

    def state_dict(self) -> dict[str, Tensor]:
        """Return the momentum by the parameter's index."""
        found = [self.optimizer.state[p].get("momentum_buffer") for p in self.parameters]
        return {str(index): m for index, m in enumerate(found) if m is not None}

    def load_state_dict(self, momenta: dict[str, Tensor]) -> None:
        for index, momentum in momenta.items():
            parameter = self.parameters[int(index)]
            mine = torch.empty_like(parameter).copy_(momentum)  # in the parameter's memory layout
            self.optimizer.state[parameter]["momentum_buffer"] = mine


class Trades(Descent):
    """TRADES (Zhang et al. 2019): accuracy without attack, and the same prediction under attack."""

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return :math:`CE(f(x), y) + \beta\,KL(f(x) \,\|\, f(x'))` and the logits under attack.

        Args:
            images: The images x, followed by the attacked images x' in the same order.
            labels: True classes of the images.
        """
        clean, attacked = images.chunk(2)
        loss, logits = super().loss(clean, labels)
        meant, scores = logits.log_softmax(1), self._logits(attacked)
        divergence = functional.kl_div(
            scores.log_softmax(1), meant, reduction="batchmean", log_target=True
        )
        return loss + self.chosen.trades_weight * divergence, scores
