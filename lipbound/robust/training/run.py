"""The state of a training run. A step is: attack → loss + penalty → optimizer step.

All random numbers (order, crops, starts of attacks) are functions of the seed and the step, and a
checkpoint holds the rest. A resumed run is therefore equal to one that was not interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from lipbound.penalty.penalty import Penalty
from lipbound.robust.data.sets import Data
from lipbound.robust.training.batches import START, Feed
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.networks import Networks, Stopped, measure
from lipbound.robust.training.settings import Settings, as_dict
from lipbound.robust.training.weight_perturbation import perturbed

__all__ = ["Run", "Stopped", "Watcher", "penalty_of"]


class Watcher(Protocol):
    """Receives the progress of a run."""

    def step(self, step: int, steps: int, loss: float) -> None: ...

    def epoch(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


class Descent:
    """Stochastic gradient descent on the cross-entropy, at perturbed weights (AWP) if asked.

    Args:
        networks: The network in training.
    """

    def __init__(self, networks: Networks):
        self.networks, self.who, self.chosen = networks, networks.who, networks.chosen
        self.parameters: list[Tensor] = list(networks.model.parameters())
        chosen = self.chosen
        self.optimizer = torch.optim.SGD(
            self.parameters, chosen.lr, chosen.momentum, nesterov=chosen.nesterov,
            weight_decay=chosen.weight_decay, fused=self.who.device.type == "cuda",
        )  # fmt: skip

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and logits, and store the mean gradients over all processes in ``.grad``."""
        loss, logits = self._backward(images, labels)
        buffers = list(self.networks.model.buffers())
        if self.chosen.awp:  # without new BatchNorm statistics
            before = [buffer.clone() for buffer in buffers]
            with perturbed(self.parameters, self.chosen.awp):
                self._backward(images, labels)
            if buffers:
                torch._foreach_copy_(buffers, before)
        # Every process saw other images, but penalty and attack must use the same statistics.
        self.who.share(b for b in buffers if b.is_floating_point())
        return loss, logits

    def _backward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with self.networks.autocast():
            logits = self.networks.model(images).float()
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.chosen.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        self.who.mean(p.grad for p in self.parameters if p.grad is not None)
        return loss, logits

    def step(self, rate: float) -> None:
        """Move the weights along the gradients, at a learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the momentum by the parameter's index."""
        found = [self.optimizer.state[p].get("momentum_buffer") for p in self.parameters]
        return {str(index): m for index, m in enumerate(found) if m is not None}

    def load_state_dict(self, momenta: dict[str, Tensor]) -> None:
        for index, momentum in momenta.items():
            parameter = self.parameters[int(index)]
            mine = torch.empty_like(parameter).copy_(momentum)  # in the parameter's memory layout
            self.optimizer.state[parameter]["momentum_buffer"] = mine


class Run:
    """A network in training with its data, penalty, counters and records.

    Args:
        chosen: Settings of the run.
        data: The data set.
        who: The processes of the run.
        stop: List that gets a reason when the process is asked to stop.
    """

    def __init__(self, chosen: Settings, data: Data, who: Team, stop: Sequence[str] = ()):
        if chosen.sync_batchnorm and who.device.type != "cuda":
            raise ValueError("sync_batchnorm needs GPUs; use a model without BatchNorm on a CPU")
        if who.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        self.chosen, self.who, self.stop = chosen, who, stop
        self.data, self.feed = data, Feed(chosen, data, who)
        torch.manual_seed(chosen.seed)
        self.networks = Networks(chosen, data, who)
        self.model = self.networks.model
        self.descent = Descent(self.networks)
        self.penalty = penalty_of(chosen, self.model, data)
        self.gauge = Penalty(self.networks.evaluated, 1.0)
        self.steps = self.feed.per_epoch * chosen.epochs
        self.step = 0
        self.best = -1.0
        self.seconds = 0.0
        self.sums = torch.zeros(4, device=who.device)  # loss, penalty, correct, images
        self.record: dict[str, Any] = {}
        self.shown = 0.0

    @property
    def due(self) -> bool:
        """Whether an epoch is over and its record is not yet made."""
        over = self.step > 0 and self.step % self.feed.per_epoch == 0
        return over and self.record.get("step") != self.step

    def advance(self, watcher: Watcher | None = None) -> None:
        """Take one training step."""
        start = time.perf_counter()
        images, labels = self.feed.batch(self.step)
        if self.chosen.attack:
            images = self.networks.attacked(
                self.model, images, labels, self.feed.start(images, START, self.step),
                iterations=self.chosen.attack, training=self.chosen.attack_mode == "train",
            )  # fmt: skip
        self.model.train()
        loss, logits = self.descent.gradients(images, labels)
        value = self.penalty.add_grad_() if self.penalty else torch.zeros((), device=loss.device)
        self.descent.step(self.chosen.learning_rate(self.step, self.steps))
        self.step += 1
        self.networks.follow(images, self.step)
        with torch.no_grad():
            right = (logits.argmax(1) == labels).sum()
            self.sums += torch.stack([loss * len(labels), value * len(labels), right,
                                      right.new_tensor(len(labels))]).float()  # fmt: skip
        now = time.perf_counter()
        if watcher is not None and self.who.first and now - self.shown > 0.5:
            self.shown = now  # reading the loss waits for the device: not at every step
            watcher.step(self.step, self.steps, float(loss.detach()))
        self.seconds += time.perf_counter() - start

    def check(self) -> tuple[dict[str, Any], bool]:
        """Return the epoch's record, and whether these weights are the best so far.

        Raises:
            FloatingPointError: If the loss is no longer finite.
            Stopped: If the process was asked to stop; the state is then unchanged.
        """
        loss, value, right = self._means()
        held = self.feed.held[: self.chosen.check]
        clean = robust = math.nan
        if len(held):
            clean, robust = measure(self.networks, self.feed, self.feed.train, held, self.stop)
        self.sums.zero_()
        score = robust if self.chosen.attack else clean
        better = not score <= self.best  # without held-out images the newest weights are the best
        self.best = score if better else self.best
        self.record = {
            "step": self.step,
            "epoch": self.step // self.feed.per_epoch,
            "loss": loss,
            "penalty": value,
            "train_accuracy": right,
            "held_out_accuracy": None if math.isnan(clean) else clean,
            "held_out_pgd_accuracy": None if math.isnan(robust) else robust,
            "log10_product": self.log10_product(),
            "lr": self.chosen.learning_rate(self.step - 1, self.steps),
            "seconds": round(self.seconds, 3),
        }
        return self.record, better

    def _means(self) -> tuple[float, float, float]:
        """Return the mean loss, penalty and accuracy since the last epoch.

        Raises:
            FloatingPointError: If the loss is no longer finite.
        """
        start = time.perf_counter()
        sums = self.who.sum(self.sums.clone()).tolist()
        self.seconds += time.perf_counter() - start  # includes the wait for the device
        loss, value, right = (s / max(1.0, sums[3]) for s in sums[:3])
        if not math.isfinite(loss + value):
            raise FloatingPointError(
                f"the loss is {loss} after step {self.step}; start again in another folder with "
                f"less than lr={self.chosen.lr:g}"
            )
        return loss, value, right

    def test(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Return the accuracies of stored weights on the test set."""
        self.model.load_state_dict(weights)
        self.networks.evaluated.load_state_dict(weights)
        split, every = self.data.test, torch.arange(len(self.data.test))
        clean, robust = measure(self.networks, self.feed, split, every, self.stop)
        product = self.log10_product()
        return {"test_accuracy": clean, "test_pgd_accuracy": robust, "log10_product": product}

    @torch.no_grad()
    def log10_product(self) -> float:
        """Return log10 of the product of LipBounds of convolutions, BatchNorms, hidden Linears."""
        self.model.eval()
        return float(self.gauge()) / math.log(10)

    def summary(self) -> dict[str, Any]:
        return {
            **self.record,
            "arm": self.chosen.arm,
            "epochs": self.chosen.epochs,
            "steps": self.steps,
            "step_ms": round(1000 * self.seconds / self.step, 3) if self.step else None,
            "stopped": "",
        }

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that are evaluated and saved."""
        return self.networks.evaluated.state_dict()

    def about(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a weights file, which suffices to rebuild the network."""
        names = ("input_shape", "classes", "mean", "std")
        rebuilt = {name: getattr(self.data, name) for name in names}
        return {"settings": as_dict(self.chosen), **rebuilt, "record": record}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that the next step depends on, as tensors and as JSON.

        Raises:
            FloatingPointError: If the loss is no longer finite.
        """
        self._means()
        tensors = {
            f"{part}.{name}": tensor
            for part, owner in self._parts().items()
            for name, tensor in owner.state_dict().items()
        }
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.who.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        tensors["sums"] = self.who.sum(self.sums.clone())
        about = {"best": self.best, "seconds": self.seconds, "record": self.record}
        return tensors, {**about, "settings": as_dict(self.chosen)}

    def load(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Restore a state, to continue from it."""
        for part, owner in self._parts().items():
            names = {name.removeprefix(f"{part}."): name for name in tensors}
            owner.load_state_dict({k: tensors[name] for k, name in names.items() if k != name})
        torch.set_rng_state(tensors["rng.cpu"])
        if self.who.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
        self.sums.copy_(tensors["sums"] if self.who.first else torch.zeros_like(tensors["sums"]))
        self.step, self.best = about["step"], about["best"]
        self.seconds, self.record = about["seconds"], about["record"]

    def _parts(self) -> dict[str, Any]:
        """Return what has a state of its own, by the name in a checkpoint."""
        parts = {"model": self.model, "average": self.networks.average,
                 "momentum": self.descent, "penalty": self.penalty}  # fmt: skip
        return {name: part for name, part in parts.items() if part is not None}


def penalty_of(chosen: Settings, model: nn.Module, data: Data) -> Penalty | None:
    """Return the penalty of the settings, or ``None``."""
    if not chosen.penalty:
        return None
    batchnorm: dict[str, bool | str] = {"apart": True, "folded": "folded", "left out": False}
    return Penalty(
        model, chosen.penalty_weight, chosen.penalty,
        include_batchnorm=batchnorm[chosen.batchnorm],
        floor=chosen.floor or None, samples=chosen.samples or None,
        iterations=chosen.iterations, input_shape=data.input_shape,
    )  # fmt: skip
