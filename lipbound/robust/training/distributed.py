"""Training in one process, or in several processes started by ``torchrun``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from lipbound.runtime import pick_device

Value = TypeVar("Value")


@dataclass(frozen=True)
class Team:
    """This process and its place among the processes of a run.

    Attributes:
        device: Device to compute on.
        rank: Number of this process; process 0 writes files and messages.
        size: Number of processes.
        overlaps: Whether gradients are exchanged during the backward pass, which needs NCCL.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    overlaps: bool = False

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

    def told(self, value: Value, by: int = 0) -> Value:
        """Return one process's value, which JSON must be able to hold, in all processes."""
        if self.size == 1:
            return value
        coded = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
        length = self._from(torch.tensor([len(coded)]), by)
        if self.rank != by:
            coded = torch.empty(int(length), dtype=torch.uint8)
        told: Value = json.loads(self._from(coded, by).numpy().tobytes())
        return told

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes, which JSON must be able to hold, in all of them."""
        return [self.told(value, rank) for rank in range(self.size)]

    def received(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the first process's tensors on the CPU, in all processes."""
        if self.size == 1:
            return dict(tensors)
        shapes = {name: (list(t.shape), str(t.dtype)) for name, t in tensors.items()}
        found = {}
        for name, (shape, kind) in self.told(shapes).items():
            dtype = getattr(torch, kind.removeprefix("torch."))
            mine = tensors[name].cpu() if self.first else torch.empty(shape, dtype=dtype)
            raw = self._from(mine.contiguous().reshape(-1).view(torch.uint8))
            found[name] = raw.view(dtype).reshape(shape)
        return found

    def at_first(self, function: Callable[[], Value]) -> Value | None:
        """Call a function in the first process alone, and return ``None`` in the others.

        Raises:
            ValueError: If the function raised a ``ValueError`` or an ``OSError``; the first process
                raises its own error.
        """
        value: Value | None = None
        error: ValueError | OSError | None = None
        if self.first:
            try:
                value = function()
            except (ValueError, OSError) as raised:
                error = raised
        said = self.told(None if error is None else str(error))
        if said is not None:
            raise error or ValueError(said)
        return value

    def agree(self, about: Mapping[str, Any]) -> None:
        """Check that all processes have the same values, which JSON must be able to hold.

        Raises:
            ValueError: In all processes, if one of them has other values than the first.
        """
        mine: dict[str, Any] = json.loads(json.dumps(about))
        theirs = self.told(mine)
        wrong = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
        if self.any(bool(wrong)):
            if not wrong:
                raise ValueError("another process has other settings or data than process 0")
            said = "; ".join(
                f"its {name} is {mine.get(name)!r}, not {theirs.get(name)!r}" for name in wrong
            )
            raise ValueError(
                f"process {self.rank} does not fit process 0: {said}; "
                f"give all processes the same command and data"
            )

    def _from(self, tensor: Tensor, rank: int = 0) -> Tensor:
        """Return one process's tensor; the others give one of the same shape."""
        there = tensor.to(self.device)
        dist.broadcast(there, rank)
        return there.cpu()

    def wait(self) -> None:
        """Wait for all processes."""
        self.any(False)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of the first process."""
        self._at_once(tensors, lambda together: dist.broadcast(together, 0))

    def mean(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with their mean over all processes.

        This is the way with gloo, where DistributedDataParallel may deadlock: it joins gloo's
        threads while it holds the interpreter lock, which they may wait for.
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
    store, rank, size = next(rendezvous("env://"))
    # After a restart torchrun's store still has the addresses of the processes that ended.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        who = Team(place, dist.get_rank(), dist.get_world_size(), backend == "nccl")
        yield who
        who.wait()  # leave together: gloo may wait forever for a process that has exited
    finally:
        dist.destroy_process_group()
