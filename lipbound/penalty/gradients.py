"""Add the gradient of a number that depends on a network's weights to their ``.grad``.

Autograd computes it outside the backward pass of the loss, as weight decay does. On CUDA a call
launches the same many small kernels every time, so it is replayed as a graph if no tensor moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lipbound.cuda_graphs import Repeated

Parts = tuple[Tensor, list[Tensor | None]]


class Adder:
    """Add the gradient of a number to the parameters of a model.

    The CUDA graph is cached with ``_places``, which describes every tensor that it reads (object,
    address, type, shape, strides, whether it is trained) and the other values it depends on. Every
    call compares them, and discards the graph if anything differs. New values in the same memory
    keep it. A parametrized weight is a new tensor at every call, so there is no graph then.

    Args:
        model: The network.
        modules: Modules whose ``weight`` and running variance the number depends on.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]):
        self.model, self.modules = model, list(modules)
        self._scale = torch.ones((), dtype=torch.float64)
        self._leaves: list[Tensor] = []
        self._places: list[object] = []
        self._graph: Repeated[Parts] | None = None

    def __call__(
        self,
        number: Callable[[], Tensor],
        scale: float | Tensor,
        repeats: bool = False,
        depends: Sequence[object] = (),
        state: Sequence[Tensor] = (),
    ) -> Tensor:
        """Add ``scale`` times the gradient of the number; return the number, detached.

        Args:
            number: Function that computes the number.
            scale: Factor of the gradient, a number or a tensor with one element.
            repeats: Whether every call runs the same operations on the same tensors.
            depends: Other values that the number depends on.
            state: Tensors that ``number`` reads and writes in place.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._look(repeats, depends, state)
            self._scale.fill_(scale.reshape(()) if isinstance(scale, Tensor) else scale)

            def work() -> Parts:
                return self._differentiated(number)

            value, parts = work() if self._graph is None else self._graph(work)
            _add(self._leaves, parts)
            return value.clone()

    def _look(self, repeats: bool, depends: Sequence[object], state: Sequence[Tensor]) -> None:
        """Discard the graph if a tensor that it reads or writes has changed or moved."""
        slots = [m._parameters.get("weight", ...) for m in self.modules]
        if not repeats or ... in slots:  # a parametrized weight is new at every call
            self._graph, self._places = None, []
            self._leaves = [p for p in self.model.parameters() if p.requires_grad]
            self._scale = self._on(next(self.model.parameters()).device)
            return
        buffers = [getattr(m, "running_var", None) for m in self.modules]
        tensors = [t for t in (*slots, *buffers, *state) if isinstance(t, Tensor)]
        device = tensors[0].device
        places = [device, *depends, *(getattr(m, "eps", None) for m in self.modules)]
        for t in tensors:
            places.append((id(t), t.data_ptr(), t.dtype, t.shape, t.stride(), t.requires_grad))
        if places != self._places:
            self._places, self._graph = places, Repeated(device)
            leaves = [t for t in slots if isinstance(t, Tensor) and t.requires_grad]
            self._leaves = [*{id(t): t for t in leaves}.values()]
            self._scale = self._on(device)

    def _on(self, device: torch.device) -> Tensor:
        same = self._scale.device == device
        return self._scale if same else torch.ones((), dtype=torch.float64, device=device)

    def _differentiated(self, number: Callable[[], Tensor]) -> Parts:
        """Return the number, and the scale times its gradient."""
        with torch.enable_grad(), self._stand_ins() as leaves:
            value = number()
            if not value.requires_grad:
                return value, [None] * len(leaves)
            found = torch.autograd.grad(value, leaves, self._scale.to(value), allow_unused=True)
        return value.detach(), [*found]

    @contextmanager
    def _stand_ins(self) -> Iterator[list[Tensor]]:
        """Yield the leaves to differentiate by; for a graph, new tensors that share their memory.

        Autograd accumulates a parameter's gradient on the stream of the loss's backward pass, and
        waiting for that stream would break a capture.
        """
        if self._graph is None:
            yield self._leaves
            return
        fresh = {id(leaf): leaf.detach().requires_grad_() for leaf in self._leaves}
        own = [(m._parameters, m._parameters["weight"]) for m in self.modules]
        try:
            for slots, weight in own:
                slots["weight"] = fresh.get(id(weight), weight)  # type: ignore[assignment]
            yield [*fresh.values()]
        finally:
            for slots, weight in own:
                slots["weight"] = weight


def add_autograd_(model: nn.Module, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add the gradient of ``outputs`` to the parameters' ``.grad``, without accumulation hooks.

    DistributedDataParallel uses these hooks and would take this for the loss's backward pass.
    """
    leaves = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    _add(leaves, found)


def _add(leaves: Sequence[Tensor], parts: Sequence[Tensor | None]) -> None:
    """Add to the leaves' ``.grad``, which is created if it is missing."""
    grads: list[Tensor] = []
    for leaf, part in zip(leaves, parts, strict=True):
        if part is not None:
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            grads.append(leaf.grad)
    if grads:
        torch._foreach_add_(grads, [part for part in parts if part is not None])
