"""Training in one process, or in several processes started by ``torchrun``."""

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
    """This process and its place among the processes of a run.

    Attributes:
        device: Device to compute on.
        rank: Number of this process; process 0 writes files and messages.
        size: Number of processes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, count: int) -> slice:
        """Return this process's part of ``count`` items."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, numbers: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all processes get the same answer."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def wait(self) -> None:
        """Wait for all processes."""
        self.any(False)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of the first process."""
        self._at_once(tensors, lambda together: dist.broadcast(together, 0))

    def mean(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with their mean over all processes.

        DistributedDataParallel would keep the process group alive after the run, and may deadlock:
        it joins gloo's threads while it holds the interpreter lock, which they may wait for. Its
        overlap of exchange and backward pass would save little in an adversarial step.
        """
        self._at_once(tensors, lambda together: self.sum(together).div_(self.size))

    @torch.no_grad()
    def _at_once(self, tensors: Iterable[Tensor], exchange: Callable[[Tensor], object]) -> None:
        """Exchange all tensors in place as one concatenated tensor."""
        if self.size == 1 or not (tensors := list(tensors)):
            return
        together = torch.cat([tensor.flatten() for tensor in tensors])
        exchange(together)
        parts = together.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@contextmanager
def team(device: str | None = None) -> Iterator[Team]:
    """Join the processes that ``torchrun`` started, or run as a single process.

    Args:
        device: ``cpu`` or ``cuda``; by default the GPU if there is one.
    """
    place = pick_device(device)
    if "LOCAL_RANK" not in os.environ:
        yield Team(place)
        return
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    # If it is imported later, a default argument holds the group: gloo's threads then outlive the
    # group, and may abort the process when the interpreter exits.
    import_module("torch._dynamo")
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        who = Team(place, dist.get_rank(), dist.get_world_size())
        yield who
        who.wait()  # leave together: gloo may wait forever for a process that has exited
    finally:
        dist.destroy_process_group()
