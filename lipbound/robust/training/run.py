"""The state of a training run. A step is: attack → loss + penalty → optimizer step.

All random numbers (order, crops, starts of attacks) are functions of the seed and the step, and a
checkpoint holds the rest. A resumed run is therefore equal to one that was not interrupted.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lipbound.constraints.orthogonal import orthogonal_layers
from lipbound.network.accuracy import certified_accuracy
from lipbound.network.audits import audit
from lipbound.penalty.penalty import Penalty
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.data.sets import Data
from lipbound.robust.training.batches import START, Feed
from lipbound.robust.training.certified import SETTLED, MarginDescent
from lipbound.robust.training.descent import Descent, Trades
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.margins import certified_radii
from lipbound.robust.training.networks import Networks, Stopped, measure
from lipbound.robust.training.settings import Settings, as_dict

__all__ = ["Run", "Stopped", "Watcher", "penalty_of"]

PARTS = 1_000_000  # into which a schedule divides a training of given minutes
FIRST = 4  # steps in which code is compiled; they do not count in a training of given minutes


class Watcher(Protocol):
    """Receives the progress of a run."""

    def step(self, step: int, steps: int, loss: float) -> None: ...

    def epoch(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


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
        data = data.changed(chosen.size, chosen.workers)
        self.data, self.feed = data, Feed(chosen, data, who)
        torch.manual_seed(chosen.seed)
        self.networks = Networks(chosen, data, who)
        self.model = self.networks.model
        self.penalty = penalty_of(chosen, self.model, data)
        self.descent = self._descent()
        self.ready = self.networks.evaluated
        self.gauge = Penalty(self.ready, 1.0, exclude=orthogonal_layers(self.ready))
        self.steps = self.feed.per_epoch * chosen.epochs
        self.step = 0
        self.best = -1.0
        self.seconds = 0.0
        self.sums = torch.zeros(4, device=who.device)  # loss, penalty, correct, images
        self.record: dict[str, Any] = {}
        self.shown = 0.0

    def _descent(self) -> Descent | MarginDescent:
        if self.chosen.loss in ("cross-entropy", "trades"):
            kind = Trades if self.chosen.loss == "trades" else Descent
            return kind(self.networks, self.penalty)
        some = self.feed.kept[:SETTLED]
        return MarginDescent(self.networks, self.feed.pixels(*self.feed.train.load(some))[0])

    @property
    def progress(self) -> float:
        """Share of the training that is over: of its steps, or of its minutes if it has some."""
        if not self.chosen.minutes:
            return self.step / self.steps
        return min(1.0, self.seconds / (60 * self.chosen.minutes))

    @property
    def over(self) -> bool:
        """Whether the last step is taken."""
        return self.progress >= 1

    @property
    def due(self) -> bool:
        """Whether it is time for a record, which is not yet made."""
        between = self.feed.per_epoch * self.chosen.check_every
        reached = self.step > 0 and (self.step % between == 0 or self.over)
        return reached and self.record.get("step") != self.step

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step; with a time limit, that of now."""
        if self.chosen.minutes:
            return self.chosen.learning_rate(round(self.progress * PARTS), PARTS)
        return self.chosen.learning_rate(step, self.steps)

    def advance(self, watcher: Watcher | None = None) -> None:
        """Take one training step."""
        start = time.perf_counter()
        images, labels = self.feed.batch(self.step)
        size = len(images) // self.chosen.accumulate
        given = list(zip(images.split(size), labels.split(size), strict=True))
        parts = [self._attacked(*part, place * size) for place, part in enumerate(given)]
        self.model.train()
        rate = self._rate(self.step)
        loss, value, logits = self.descent.take(parts, rate, self.progress)
        self.step += 1
        self.networks.follow(parts[-1][0], self.step)
        with torch.no_grad():
            right = (logits.argmax(1) == labels).sum()
            count = torch.full_like(right, len(labels))  # a copy from the host would wait for it
            found = torch.stack([loss * len(labels), value * len(labels), right, count])
            self.sums += found.float()
        now = time.perf_counter()
        if watcher is not None and self.who.first and now - self.shown > 0.5:
            self.shown = now  # reading the loss waits for the device: not at every step
            expected = round(self.step / max(self.progress, 1e-6))
            watcher.step(self.step, expected, float(loss.detach()))
        if self.chosen.minutes and self.who.device.type == "cuda":
            torch.cuda.synchronize(self.who.device)  # else the host would be ahead of the clock
        if not self.chosen.minutes or self.step > FIRST:
            self.seconds += time.perf_counter() - start
        if self.chosen.minutes and self.who.size > 1:  # all processes must agree on the time
            seconds = torch.tensor([self.seconds], dtype=torch.float64, device=self.who.device)
            self.who.share([seconds])
            self.seconds = float(seconds)

    def _attacked(self, images: Tensor, labels: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Return the images of a part to train on, attacked if the settings say so, and labels.

        Args:
            images: Images of the part.
            labels: Their classes.
            place: Place of the first image among those of this process.
        """
        if not self.chosen.attack:
            return images, labels
        trades = self.chosen.loss == "trades"
        first = self.who.mine(self.chosen.batch).start + place
        attacked = self.networks.attacked(
            self.model, images, self.networks.predicted(images) if trades else labels,
            self.feed.start(images, START, self.step, first),
            iterations=self.chosen.attack, training=self.chosen.attack_mode == "train",
        )  # fmt: skip
        return torch.cat([images, attacked]) if trades else attacked, labels

    def check(self) -> tuple[dict[str, Any], bool]:
        """Return the epoch's record, and whether these weights are the best so far.

        Raises:
            FloatingPointError: If the loss is no longer finite.
            Stopped: If the process was asked to stop; the state is then unchanged.
        """
        loss, value, right = self._means()
        held = self.feed.held[: self.chosen.check]
        self.ready = self.descent.settled()
        shares: list[float | None] = [None, None]
        estimated: dict[str, float] = {}
        if len(held):
            images = (self.feed.train, held)
            shares = _shares(measure(self.networks, self.ready, self.feed, images, self.stop))
            estimated = self._estimated(held)
        self.sums.zero_()
        score = next(iter(estimated.values()), shares[1 if self.chosen.attack else 0])
        # Without held-out images the newest weights are the best.
        better = score is None or score > self.best
        self.best = score if better and score is not None else self.best
        self.record = {
            "step": self.step,
            "epoch": self.step // self.feed.per_epoch,
            "loss": loss,
            "penalty": value,
            "train_accuracy": right,
            "held_out_accuracy": shares[0],
            "held_out_pgd_accuracy": shares[1],
            **estimated,
            "log10_product": self.log10_product(),
            "lr": self._rate(self.step - 1),
            "seconds": round(self.seconds, 3),
            "waited": round(self.feed.waited, 3),
        }
        self.feed.waited = 0.0
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

    @torch.no_grad()
    def _estimated(self, indices: Tensor) -> dict[str, float]:
        """Estimate the certified accuracy on some training images, with the tracked constant."""
        if not isinstance(self.descent, MarginDescent):
            return {}
        self.ready.eval()
        constants, count = self.descent.constants(self.ready), 0.0
        for found in self.feed.train.stream(indices.split(self.chosen.batch), None):
            images, labels = self.feed.pixels(*found)
            radii = certified_radii(self.ready(images), labels, constants)
            count += float((radii > self.chosen.certify).sum())
        return {"held_out_certified_estimate": count / len(indices)}

    def test(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Return the accuracies of stored weights on the test set."""
        self.model.load_state_dict(weights)
        self.networks.evaluated.load_state_dict(weights)
        model, images = self.networks.evaluated, (self.data.test, torch.arange(len(self.data.test)))
        if isinstance(self.descent, MarginDescent):
            model = copy.deepcopy(model)  # a copy is not compiled, for other shapes
        right = measure(self.networks, model, self.feed, images, self.stop)
        clean, robust = _shares(right)
        found = {
            "test_accuracy": clean,
            "test_pgd_accuracy": robust,
            "test": dict(zip(("clean", "pgd"), map(accuracy, right), strict=False)),
            "log10_product": self.log10_product(),
        }
        return {**found, **self._certified()} if self.chosen.certify else found

    def _certified(self) -> dict[str, Any]:
        """Return the bound of the network and its certified accuracy on the test set, proved."""
        model = copy.deepcopy(self.networks.evaluated)  # a copy is not compiled
        found = audit(model, self.data.input_shape, search=0)
        split = self.data.test
        parts = torch.arange(len(split)).split(self.chosen.batch)
        batches = (self.feed.pixels(*found) for found in split.stream(parts, None))
        proved = certified_accuracy(model, found, batches, [self.chosen.certify])
        return {
            "lipschitz": found.upper if math.isfinite(found.upper) else None,
            "certified_radius": self.chosen.certify,
            "certified_accuracy": proved.accuracy[0],
        }

    @torch.no_grad()
    def log10_product(self) -> float:
        """Return log10 of the product of LipBounds of convolutions, BatchNorms, hidden Linears.

        Layers that are kept orthogonal count with their norm of 1.
        """
        self.model.eval()
        return float(self.gauge()) / math.log(10)

    def summary(self) -> dict[str, Any]:
        return {
            **self.record,
            "arm": self.chosen.arm,
            "epochs": self.chosen.epochs,
            "steps": self.step if self.chosen.minutes else self.steps,
            "step_ms": round(1000 * self.seconds / self.step, 3) if self.step else None,
            "stopped": "",
        }

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that are evaluated and saved."""
        return self.ready.state_dict()

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
        parts = {
            "model": self.model,
            "average": self.networks.average,
            "momentum": self.descent,
            "penalty": self.penalty,
        }
        return {name: part for name, part in parts.items() if part is not None}


def _shares(right: Tensor) -> list[float | None]:
    """Return the accuracies without attack and under PGD, ``None`` if it was not run."""
    shares: list[float | None] = right.double().mean(1).tolist()
    return [*shares, None][:2]


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
