"""Training for certificates: margins against a tracked Lipschitz constant, orthogonal layers kept.

The constant is estimated while the network trains, by one warm step per layer whose norm is not
known. It is proved once, at the end, by an audit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from lipbound.constraints.layers import settle
from lipbound.constraints.orthogonal import Retraction, orthogonal_layers
from lipbound.cuda_graphs import Repeated
from lipbound.network.audits import audit
from lipbound.penalty.penalty import Penalty
from lipbound.robust.attacks.recheck import tf32
from lipbound.robust.training.descent import Parts
from lipbound.robust.training.margins import LOSSES, pair_constants
from lipbound.robust.training.networks import Networks
from lipbound.robust.training.settings import Settings

DECAY = 0.99  # of Adam's squares
CLIP = 3.0  # largest norm of the gradient
FIRST = 1 / 30  # share of the margin's radius with which training begins
SETTLED = 4096  # images from which the stored means are computed


class MarginDescent:
    """Adam on a margin loss, with the orthogonal layers kept orthogonal.

    The head has rows of equal norm: a direction for each class and one scale for all are trained
    instead of its weight. On a GPU the whole step is one CUDA graph.

    Args:
        networks: The network in training. It has ``features`` and a Linear layer ``head``.
        images: Training images, from which :meth:`settled` computes the stored means.

    Raises:
        ValueError: If the network has no such head, or a part without a Lipschitz constant.
    """

    def __init__(self, networks: Networks, images: Tensor):
        self.networks, self.who, self.chosen = networks, networks.who, networks.chosen
        self.model, self.images = networks.model, images[:SETTLED]
        self.features, self.head = certifiable(self.model, self.chosen, tuple(images.shape[1:]))
        self.rows = nn.Parameter(torch.randn_like(self.head.weight))
        self.log_scale = nn.Parameter(self.rows.new_tensor(math.log(4.0)))
        self.who.share([self.rows])
        self._write_head()
        self.retraction = Retraction(self.model)
        self.constant = _constant(self.model, tuple(images.shape[1:]))
        with torch.no_grad():
            for _ in range(30):  # until the estimate has settled
                self.constant()
        kept = {id(weight) for weight in self.retraction.weights}
        own = [p for p in self.model.parameters() if p is not self.head.weight]
        free = [p for p in own if id(p) not in kept] + [self.rows, self.log_scale]
        self.parameters: list[Tensor] = [*free, *self.retraction.weights]
        cuda = self.who.device.type == "cuda"
        groups = [(free, self.chosen.lr), (self.retraction.weights, self.chosen.orthogonal_lr)]
        place = self.who.device
        self.optimizer = torch.optim.Adam(
            [{"params": group, "lr": torch.tensor(rate, device=place) if cuda else rate}
             for group, rate in groups],
            betas=(self.chosen.momentum, DECAY), fused=cuda, capturable=cuda,
        )  # fmt: skip
        self.rates = [rate / self.chosen.lr for _, rate in groups]
        self.radius = torch.zeros((), device=self.who.device)
        self.parts: list[tuple[Tensor, Tensor]] = []  # where a captured step reads
        captures = cuda and self.chosen.cuda_graphs and self.who.size == 1
        self.repeated: Repeated[tuple[Tensor, Tensor, Tensor]] = Repeated(
            self.who.device if captures else torch.device("cpu")
        )

    def take(self, parts: Parts, rate: float, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step; return loss, logarithm of the tracked constant, and logits.

        Args:
            parts: Pixels in [0, 1] and labels of each part of this process's images.
            rate: Learning rate.
            progress: Share of the training that is over.
        """
        for group, factor in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor
        reached = FIRST + (1 - FIRST) * min(1.0, progress / self.chosen.ramp)
        self.radius.fill_(self.chosen.margin * reached)
        if not self.parts:
            self.parts = [(torch.empty_like(x), torch.empty_like(y)) for x, y in parts]
        for mine, given in zip(self.parts, parts, strict=True):
            mine[0].copy_(given[0])
            mine[1].copy_(given[1])
        with tf32(True):  # the products of the retraction would take a third of the time
            return self.repeated(self._step)

    def _step(self) -> tuple[Tensor, Tensor, Tensor]:
        self.optimizer.zero_grad()
        logarithm, weight = self.constant(), self._weight()
        constants = pair_constants(logarithm.exp(), weight)
        # Both are shared by all parts, whose gradients meet here before they go on.
        shared = [tensor.detach().requires_grad_() for tensor in (constants, weight)]
        losses, scores = [], []
        for images, labels in self.parts:
            with self.networks.autocast():
                features = self.features(images)
            logits = functional.linear(features.to(weight), shared[1], self.head.bias)
            loss = LOSSES[self.chosen.loss](logits, labels, shared[0], self.radius)
            (loss / len(self.parts)).backward()
            losses.append(loss.detach())
            scores.append(logits.detach())
        met = zip((constants, weight), shared, strict=True)
        used = [(tensor, leaf.grad) for tensor, leaf in met if leaf.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in used], [slope for _, slope in used])
        self.who.mean(p.grad for p in self.parameters if p.grad is not None)
        self.who.share(b for b in self.model.buffers() if b.is_floating_point())
        self.retraction.project_()
        nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()
        self.retraction.retract_()
        self._write_head()
        return torch.stack(losses).mean(), logarithm.detach(), torch.cat(scores)

    def _weight(self) -> Tensor:
        return functional.normalize(self.rows, dim=1) * self.log_scale.exp()

    @torch.no_grad()
    def _write_head(self) -> None:
        self.head.weight.copy_(self._weight())

    def settled(self) -> nn.Module:
        """Return a copy of the network to evaluate and save: orthogonal, with stored means."""
        model = copy.deepcopy(self.networks.evaluated)  # a copy is not compiled, for other shapes
        Retraction(model).polish_()
        settle(model, self.images)
        return model.eval()

    @torch.no_grad()
    def constants(self, model: nn.Module) -> Tensor:
        """Estimate the Lipschitz constants of all differences of two logits of a settled copy."""
        constant = _constant(model, tuple(self.images.shape[1:]), 50)
        return pair_constants(constant().exp(), head_of(model).weight)

    def state_dict(self) -> dict[str, Tensor]:
        """Return Adam's moments by the parameter's index, the head's rows and the estimate."""
        state = {"rows": self.rows.detach(), "log_scale": self.log_scale.detach()}
        for index, parameter in enumerate(self.parameters):
            own = self.optimizer.state[parameter]
            state |= {f"{name}.{index}": tensor for name, tensor in own.items()}
        return state | {f"constant.{k}": v for k, v in self.constant.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.rows.copy_(state["rows"])
        self.log_scale.copy_(state["log_scale"])
        for name, tensor in state.items():
            kind, _, index = name.partition(".")
            if kind in ("exp_avg", "exp_avg_sq"):
                like = self.parameters[int(index)]
                own = torch.empty_like(like).copy_(tensor)
                self.optimizer.state[like][kind] = own
            elif kind == "step":
                counted = tensor.to(self.who.device) if self.who.device.type == "cuda" else tensor
                self.optimizer.state[self.parameters[int(index)]][kind] = counted.clone()
        start = "constant."
        self.constant.load_state_dict(
            {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        )


def _constant(model: nn.Module, shape: tuple[int, ...], iterations: int = 1) -> Penalty:
    """Return what tracks the logarithm of the product of all norms that are not known to be 1.

    Power iteration at the input size, because it finds the largest of several peaks of the symbol:
    a network that is trained against one peak raises the others.
    """
    known = orthogonal_layers(model)
    with torch.compiler.set_stance("force_eager"):  # it runs the network once, at another shape
        return Penalty(
            model, 1.0, "power_iteration", exclude=known, iterations=iterations, input_shape=shape
        )


def head_of(model: nn.Module) -> nn.Linear:
    """Return the Linear layer ``head`` of a network.

    Raises:
        ValueError: If there is none.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no Linear layer called head")
    return head


def certifiable(
    model: nn.Module, chosen: Settings, shape: tuple[int, ...]
) -> tuple[Callable[[Tensor], Tensor], nn.Linear]:
    """Return the features and the head of a network that can be trained with margins.

    Raises:
        ValueError: If it has no head with a margin, or no finite Lipschitz bound.
    """
    if chosen.normalize:
        raise ValueError(f"normalize=yes does not work with loss={chosen.loss!r}; leave it out")
    head, features = getattr(model, "head", None), getattr(model, "features", None)
    if not isinstance(head, nn.Linear) or not callable(features):
        raise ValueError(
            f"model {chosen.model!r} cannot be trained with loss={chosen.loss!r}: a margin needs a "
            f"method features(x) and a Linear layer called head; use a shift or liresnet model"
        )
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if linear[-1] is not head:
        raise ValueError(
            f"model {chosen.model!r}: the head must be the last Linear layer of the network; make "
            f"self.head at the end of __init__"
        )
    found = audit(copy.deepcopy(model), shape, search=0)  # a copy is not compiled
    if found.reason:
        raise ValueError(
            f"model {chosen.model!r} cannot be trained with loss={chosen.loss!r}, because it has "
            f"no finite Lipschitz bound: {found.reason}"
        )
    return features, head
