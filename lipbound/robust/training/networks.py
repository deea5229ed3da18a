"""The network of a training run and its average over the steps: precision, attack, accuracy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lipbound.cuda_graphs import Replay
from lipbound.modules import frozen
from lipbound.robust.attacks.pgd import pgd
from lipbound.robust.data.sets import Data, Split
from lipbound.robust.training.batches import CHECK, Feed
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.settings import Settings
from lipbound.robust.training.trained import build

FRESH = 4  # steps between updates of the averaged network's BatchNorm statistics


class Stopped(Exception):
    """The process was asked to stop during an evaluation, which can be repeated."""


class Networks:
    """The network in training, and the average of its weights if the settings ask for one.

    Args:
        chosen: Settings of the run.
        data: The data set.
        who: The processes of the run; all get the weights of the first.
    """

    def __init__(self, chosen: Settings, data: Data, who: Team):
        self.chosen, self.who = chosen, who
        cuda = who.device.type == "cuda"
        self.model = build(chosen, data).to(who.device, chosen.dtype)
        if cuda:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if chosen.sync_batchnorm:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.average = copy.deepcopy(self.model) if chosen.ema else None
        for model in (self.model, self.average) if chosen.compile else ():
            if model is not None:
                model.compile(dynamic=False)
        self.replay = Replay() if chosen.cuda_graphs and cuda else None
        who.share(self.model.parameters())
        self.trained = self._parallel() if who.overlaps else self.model

    def _parallel(self) -> nn.Module:
        """Return the network in training, whose backward pass exchanges gradients as they come.

        What it computes is defined by the plain way: a backward pass, then :meth:`mean_`.
        """
        own = "broadcast_buffers"  # its name before PyTorch 2.13
        if "forward_sync_buffers" in signature(DistributedDataParallel).parameters:
            own = "forward_sync_buffers"
        options: dict[str, Any] = {own: False, "gradient_as_bucket_view": True}
        parallel = DistributedDataParallel(self.model, **options)
        if self.chosen.compile:  # the wrapper too: dynamo then splits the graph at the buckets
            parallel.compile(dynamic=False)
        return parallel

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: the averaged one if there is one."""
        return self.model if self.average is None else self.average

    @property
    def overlaps(self) -> bool:
        """Whether backward passes exchange the gradients."""
        return isinstance(self.trained, DistributedDataParallel)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Do not exchange the gradients of backward passes in this context."""
        if isinstance(self.trained, DistributedDataParallel):
            return self.trained.no_sync()
        return contextlib.nullcontext()

    def mean_(self, parameters: Iterable[Tensor]) -> None:
        """Overwrite the gradients with their mean over all processes, where this is still to do."""
        if not self.overlaps:
            self.who.mean(p.grad for p in parameters if p.grad is not None)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        half = self.chosen.precision == "bfloat16"
        return torch.autocast(self.who.device.type, torch.bfloat16, enabled=half)

    def attacked(
        self, model: nn.Module, images: Tensor, labels: Tensor, start: Tensor | None,
        *, iterations: int, training: bool,
    ) -> Tensor:  # fmt: skip
        """Return the images after PGD on a network, in training or in eval mode.

        PGD maximizes the cross-entropy with ``labels``, which are classes, ``(batch,)``, or
        probabilities, ``(batch, classes)``. With probabilities of the images themselves this is
        the attack of TRADES, whose divergence differs from it by a constant.
        """
        chosen, before = self.chosen, model.training

        def attack(images: Tensor, labels: Tensor, *start: Tensor) -> tuple[Tensor]:
            with frozen(model), self.autocast():
                found = pgd(
                    model, images, labels,
                    radius=chosen.radius, step=chosen.step * chosen.radius, iterations=iterations,
                    ball=chosen.ball, start=start[0] if start else None,
                )  # fmt: skip
            return (found,)

        model.train(training)
        inputs = [images, labels] if start is None else [images, labels, start]
        own = model is self.model or model is self.average
        if self.replay is not None and own:  # a graph holds the memory of one network
            key = (model is self.average, training, iterations)
            (attacked,) = self.replay(key, attack, inputs, model.buffers() if training else ())
        else:
            (attacked,) = attack(*inputs)
        model.train(before)
        return attacked

    @torch.no_grad()
    def predicted(self, images: Tensor) -> Tensor:
        """Return the probabilities of the classes, in eval mode."""
        before = self.model.training
        self.model.eval()
        with self.autocast():
            logits: Tensor = self.model(images)
        self.model.train(before)
        return logits.to(self.chosen.dtype).softmax(1)

    @torch.no_grad()
    def follow(self, images: Tensor, step: int) -> None:
        """Update the averaged weights, with their own BatchNorm statistics from the same images.

        The average of weights that change direction quickly is shorter than the weights, so the
        statistics of the trained network, or their average, would not fit it.
        """
        if self.average is None:
            return
        mine: list[Tensor] = list(self.average.parameters())
        torch._foreach_lerp_(mine, list(self.model.parameters()), 1 - self.chosen.ema)
        if step % FRESH == 0 and any(isinstance(m, _BatchNorm) for m in self.model.modules()):
            self.average.train()
            with self.autocast():
                self.average.forward(images)  # not compiled, as it is rare and without gradients
            self.who.share(b for b in self.average.buffers() if b.is_floating_point())


def measure(
    networks: Networks,
    model: nn.Module,
    feed: Feed,
    images: tuple[Split, Tensor],
    stop: Sequence[str] = (),
) -> Tensor:
    """Return whether each image is classified correctly without attack and under PGD.

    The result has shape ``(2, images)``, or ``(1, images)`` if the settings ask for no attack.

    Raises:
        Stopped: If the process was asked to stop.
    """
    (split, indices), chosen, who = images, networks.chosen, networks.who
    mine = who.mine(len(indices))
    own, size = indices[mine], chosen.batch // who.size
    right = torch.zeros(2 if chosen.check_attack else 1, len(indices), device=who.device)
    model.eval()
    # Padded, as one shape needs one compiled graph.
    padded = torch.cat([own, own[-1:].repeat(-len(own) % size)])
    coming = split.stream(padded.split(size), None)
    for place in range(0, len(own), size):
        if stop and who.size == 1:  # several processes could not agree on a place
            raise Stopped
        pixels, labels = feed.pixels(*next(coming))
        batches = [pixels]
        if chosen.check_attack:
            start = feed.start(pixels, CHECK, 1 + place)
            batches.append(networks.attacked(
                model, pixels, labels, start, iterations=chosen.check_attack, training=False
            ))  # fmt: skip
        with torch.no_grad(), networks.autocast():
            for row, batch in enumerate(batches):
                found = (model(batch).argmax(1) == labels)[: len(own) - place]
                right[row, mine][place : place + size] = found.float()
    return who.sum(right) > 0
