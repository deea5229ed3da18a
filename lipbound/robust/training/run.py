"""The state of a training run. A step is: attack → loss + penalty → optimizer step.

All random numbers (order, crops, starts of attacks) are functions of the seed and the step, and a
checkpoint holds the rest. A resumed run is therefore equal to one that was not interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from lipbound.cuda_graphs import Replay
from lipbound.modules import frozen
from lipbound.penalty.penalty import Penalty
from lipbound.robust.attacks.pgd import pgd
from lipbound.robust.data.sets import Data, Split
from lipbound.robust.training.batches import Feed
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.settings import Settings, as_dict
from lipbound.robust.training.trained import build
from lipbound.robust.training.weight_perturbation import perturbed

FRESH = 4  # steps between updates of the averaged network's BatchNorm statistics


class Watcher(Protocol):
    """Receives the progress of a run."""

    def step(self, step: int, steps: int, loss: float) -> None: ...

    def epoch(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


class Stopped(Exception):
    """The process was asked to stop during an evaluation, which can be repeated."""


class Run:
    """A network in training with its optimizer, penalty, averages and counters.

    Args:
        chosen: Settings of the run.
        data: The data set.
        who: The processes of the run.
        stop: List that gets a reason when the process is asked to stop.
    """

    def __init__(self, chosen: Settings, data: Data, who: Team, stop: Sequence[str] = ()):
        if chosen.sync_batchnorm and who.device.type != "cuda":
            raise ValueError("sync_batchnorm needs GPUs; use a model without BatchNorm on a CPU")
        self.chosen, self.who, self.stop = chosen, who, stop
        self.data, self.feed = data, Feed(chosen, data, who)
        torch.manual_seed(chosen.seed)
        self.model = self._placed(build(chosen, data))
        if chosen.sync_batchnorm:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.average = copy.deepcopy(self.model) if chosen.ema else None
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(
            self.parameters,
            chosen.lr,
            chosen.momentum,
            nesterov=chosen.nesterov,
            weight_decay=chosen.weight_decay,
            fused=who.device.type == "cuda",
        )
        self.penalty = penalty_of(chosen, self.model, data)
        self.gauge = Penalty(self.evaluated, 1.0)
        self.steps = self.feed.per_epoch * chosen.epochs
        self.step = 0
        self.best = -1.0
        self.seconds = 0.0
        self.sums = torch.zeros(4, device=who.device)  # loss, penalty, correct, images
        self.record: dict[str, Any] = {}
        if who.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        if chosen.compile:
            for model in (self.model, self.average):
                if model is not None:
                    model.compile(dynamic=False)
        self.replay = Replay() if chosen.cuda_graphs and who.device.type == "cuda" else None
        who.share(self.model.parameters())
        self.shown = 0.0

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: the averaged one if there is one."""
        return self.model if self.average is None else self.average

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
            images = self._attacked(self.model, images, labels, self.chosen.attack)
        self.model.train()
        loss, logits = self._gradients(images, labels)
        if self.chosen.awp:
            self._uphill(images, labels)
        # Every process saw other images, but penalty and attack must use the same statistics.
        self.who.share(b for b in self.model.buffers() if b.is_floating_point())
        value = self.penalty.add_grad_() if self.penalty else torch.zeros((), device=loss.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.chosen.learning_rate(self.step, self.steps)
        self.optimizer.step()
        self.step += 1
        with torch.no_grad():
            self._follow(images)
            right = (logits.argmax(1) == labels).sum()
            self.sums += torch.stack([loss * len(labels), value * len(labels), right,
                                      right.new_tensor(len(labels))]).float()  # fmt: skip
        now = time.perf_counter()
        if watcher is not None and self.who.first and now - self.shown > 0.5:
            self.shown = now  # reading the loss waits for the device: not at every step
            watcher.step(self.step, self.steps, float(loss.detach()))
        self.seconds += time.perf_counter() - start

    def _gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and logits, and store the mean gradients over all processes in ``.grad``."""
        with self._autocast():
            logits = self.model(images).float()
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.chosen.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        self.who.mean(p.grad for p in self.parameters if p.grad is not None)
        return loss, logits

    def _uphill(self, images: Tensor, labels: Tensor) -> None:
        """Recompute gradients at weights moved uphill (AWP), without new BatchNorm statistics."""
        buffers = list(self.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        with perturbed(self.parameters, self.chosen.awp):
            self._gradients(images, labels)
        if buffers:
            torch._foreach_copy_(buffers, before)

    def check(self) -> tuple[dict[str, Any], bool]:
        """Return the epoch's record, and whether these weights are the best so far.

        Raises:
            FloatingPointError: If the loss is no longer finite.
            Stopped: If the process was asked to stop; the state is then unchanged.
        """
        loss, value, right = self._means()
        held = self.feed.held[: self.chosen.check]
        clean, robust = self.measure(self.feed.train, held) if len(held) else (math.nan, math.nan)
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

    def measure(self, split: Split, indices: Tensor | None = None) -> tuple[float, float]:
        """Return the accuracies of the evaluated weights without attack and under PGD.

        Raises:
            Stopped: If the process was asked to stop.
        """
        model, chosen, who = self.evaluated, self.chosen, self.who
        indices = torch.arange(len(split)) if indices is None else indices
        own = indices[who.mine(len(indices))]
        size = chosen.batch // who.size
        counts = torch.zeros(2, device=who.device)
        model.eval()
        for place in range(0, len(own), size):
            if self.stop and who.size == 1:  # several processes could not agree on a place
                raise Stopped
            which = own[place : place + size]
            rest = own[-1:].repeat(size - len(which))
            padded = torch.cat([which, rest])  # one shape needs one compiled graph
            images, labels = self.feed.pixels(*split.load(padded))
            attacked = self._attacked(model, images, labels, chosen.check_attack, place)
            with torch.no_grad(), self._autocast():
                for row, batch in enumerate((images, attacked)):
                    right = model(batch).argmax(1) == labels
                    counts[row] += right[: len(which)].sum()
        clean, robust = (who.sum(counts) / len(indices)).tolist()
        return clean, robust

    def test(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Return the accuracies of stored weights on the test set."""
        self.model.load_state_dict(weights)
        self.evaluated.load_state_dict(weights)
        clean, robust = self.measure(self.data.test)
        return {
            "test_accuracy": clean,
            "test_pgd_accuracy": robust,
            "log10_product": self.log10_product(),
        }

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
        return self.evaluated.state_dict()

    def about(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a weights file, which suffices to rebuild the network."""
        return {
            "settings": as_dict(self.chosen),
            "input_shape": self.data.input_shape,
            "classes": self.data.classes,
            "mean": self.data.mean,
            "std": self.data.std,
            "record": record,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that the next step depends on, as tensors and as JSON.

        Raises:
            FloatingPointError: If the loss is no longer finite.
        """
        self._means()
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": t for name, t in self.average.state_dict().items()}
        for index, parameter in enumerate(self.parameters):
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{index}"] = momentum
        if self.penalty:
            tensors |= {f"penalty.{name}": t for name, t in self.penalty.state_dict().items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.who.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        tensors["sums"] = self.who.sum(self.sums.clone())
        about = {"best": self.best, "seconds": self.seconds, "record": self.record}
        return tensors, {**about, "settings": as_dict(self.chosen)}

    def load(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Restore a state, to continue from it."""

        def part(name: str) -> dict[str, Tensor]:
            start = f"{name}."
            return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}

        self.model.load_state_dict(part("model"))
        if self.average is not None:
            self.average.load_state_dict(part("average"))
        for index, momentum in part("momentum").items():
            parameter = self.parameters[int(index)]
            mine = torch.empty_like(parameter).copy_(momentum)  # in the parameter's memory layout
            self.optimizer.state[parameter]["momentum_buffer"] = mine
        if self.penalty:
            self.penalty.load_state_dict(part("penalty"))
        torch.set_rng_state(tensors["rng.cpu"])
        if self.who.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
        self.sums.copy_(tensors["sums"] if self.who.first else torch.zeros_like(tensors["sums"]))
        self.step, self.best = about["step"], about["best"]
        self.seconds, self.record = about["seconds"], about["record"]

    def _attacked(
        self, model: nn.Module, images: Tensor, labels: Tensor, steps: int, place: int | None = None
    ) -> Tensor:
        """Attack images: in the mode of the settings for training, in eval mode at a ``place``."""
        chosen = self.chosen
        start = self.feed.start(images, self.step, place) if chosen.random_start else None
        training = model.training
        mode = place is None and chosen.attack_mode == "train"

        def attack(images: Tensor, labels: Tensor, *start: Tensor) -> tuple[Tensor]:
            with frozen(model), self._autocast():
                found = pgd(
                    model, images, labels,
                    radius=chosen.radius, step=chosen.step * chosen.radius, iterations=steps,
                    ball=chosen.ball, start=start[0] if start else None,
                )  # fmt: skip
            return (found,)

        model.train(mode)
        inputs = [images, labels] if start is None else [images, labels, start]
        if self.replay is not None:
            key = (model is self.average, mode, steps)
            (attacked,) = self.replay(key, attack, inputs, model.buffers() if mode else ())
        else:
            (attacked,) = attack(*inputs)
        model.train(training)
        return attacked

    def _follow(self, images: Tensor) -> None:
        """Update the averaged weights, with their own BatchNorm statistics from the same images.

        The average of weights that change direction quickly is shorter than the weights, so the
        statistics of the trained network, or their average, would not fit it.
        """
        if self.average is None:
            return
        mine: list[Tensor] = list(self.average.parameters())
        torch._foreach_lerp_(mine, self.parameters, 1 - self.chosen.ema)
        if self.step % FRESH == 0 and any(isinstance(m, _BatchNorm) for m in self.model.modules()):
            self.average.train()
            with self._autocast():
                self.average.forward(images)  # not compiled, as it is rare and without gradients
            self.who.share(b for b in self.average.buffers() if b.is_floating_point())

    def _placed(self, model: nn.Module) -> nn.Module:
        model = model.to(self.who.device)
        if self.who.device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        half = self.chosen.precision == "bfloat16"
        return torch.autocast(self.who.device.type, torch.bfloat16, enabled=half)


def penalty_of(chosen: Settings, model: nn.Module, data: Data) -> Penalty | None:
    """Return the penalty of the settings, or ``None``."""
    if not chosen.penalty:
        return None
    batchnorm: dict[str, bool | str] = {"apart": True, "folded": "folded", "left out": False}
    return Penalty(
        model,
        chosen.penalty_weight,
        chosen.penalty,
        include_batchnorm=batchnorm[chosen.batchnorm],
        floor=chosen.floor or None,
        samples=chosen.samples or None,
        iterations=chosen.iterations,
        input_shape=data.input_shape,
    )
