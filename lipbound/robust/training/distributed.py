"""One process or several that train together, as ``torchrun`` starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch import distributed as dist

from lipbound.runtime import pick_device


@dataclass(frozen=True)
class Team:
    """This process among the others.

    Attributes:
        device: Where it computes.
        rank: Its number; 0 writes files and talks.
        size: How many there are.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, count: int) -> slice:
        """This process's part of ``count`` things."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, numbers: Tensor) -> Tensor:
        """Added over all processes."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Whether it holds in some process; all get the same answer."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def wait(self) -> None:
        """Until all are here."""
        self.any(False)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite with the first process's."""
        self._at_once(tensors, lambda together: dist.broadcast(together, 0))

    def mean(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite with the mean over all processes.

        DistributedDataParallel would hold the process group beyond the team, and join gloo's
        threads with the interpreter's lock in hand, which they may be waiting for. It would also
        hide the exchange behind the backward pass; an adversarial step has many passes to one.
        """
        self._at_once(tensors, lambda together: self.sum(together).div_(self.size))

    @torch.no_grad()
    def _at_once(self, tensors: Iterable[Tensor], exchange: Callable[[Tensor], object]) -> None:
        """Exchange tensors as one, in place."""
        if self.size == 1 or not (tensors := list(tensors)):
            return
        together = torch.cat([tensor.flatten() for tensor in tensors])
        exchange(together)
        parts = together.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@contextmanager
def team(device: str | None = None) -> Iterator[Team]:
    """Join the processes ``torchrun`` started, or be alone.

    Args:
        device: ``cpu`` or ``cuda``; the GPU if there is one.
    """
    place = pick_device(device)
    if "LOCAL_RANK" not in os.environ:
        yield Team(place)
        return
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    # Imported later, it takes the group for a default argument: gloo's threads then outlive the
    # group, and may abort the process when the interpreter ends.
    import_module("torch._dynamo")
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        who = Team(place, dist.get_rank(), dist.get_world_size())
        yield who
        who.wait()  # leave together: gloo may wait for ever for one that has gone
    finally:
        dist.destroy_process_group()
