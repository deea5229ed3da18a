"""The rules of CUDA graphs and streams, enforced on a processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

READ_BY_HOST = ("_local_scalar_dense", "nonzero", "equal.default")
WITHOUT_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def address(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, which views share."""
    return tensor.untyped_storage()._cdata


class Place:
    """The address of a tensor, which does not keep its memory alive."""

    def __init__(self, tensor: Tensor):
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.dtype, self.conjugate, self.negative = tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def tensor(self) -> Tensor:
        """What lies there now."""
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        assert memory is not None, "a graph reads memory that was freed after its capture"
        with _disable_current_modes():
            found = torch.empty(0, dtype=self.dtype).set_(memory, *self.form)
            found = torch._conj(found) if self.conjugate else found
            return torch._neg_view(found) if self.negative else found


class Recording(TorchDispatchMode):
    """A list of operations and of the addresses that they read and write, as a graph has it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.own: dict[int, Tensor] = {}  # one tensor for each memory allocated here

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = str(function), kwargs or {}
        assert not any(word in name for word in READ_BY_HOST), f"{name} reads a value on the host"
        result = function(*args, **kwargs)
        given = {address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result)
                if isinstance(t, Tensor) and address(t) not in given]  # fmt: skip
        self.own |= {address(t): t for t in made}
        works = function.overloadpacket.__name__ not in WITHOUT_WORK
        if works and (made or function._schema.is_mutable):  # otherwise a view
            self.calls.append((function, *tree_map_only(Tensor, self._kept, (args, kwargs)), made))
        return result

    def _kept(self, tensor: Tensor) -> Tensor | Place:
        return tensor if address(tensor) in self.own else Place(tensor)


class Pool:
    """Stands for a memory pool of graphs, which ends with the last of its graphs."""

    def __init__(self, device: torch.device | None = None):
        self.graphs: WeakSet[Graph] = WeakSet()
        self.used = False

    def take(self, graph: Graph) -> None:
        assert self.graphs or not self.used, "all graphs of the pool are gone, so it takes no other"
        self.graphs.add(graph)
        self.used = True


class Graph:
    """Stands for a captured graph: replays run no Python of the work and know only addresses.

    Its temporary memory belongs to other graphs of the same pool in between, so it is filled with
    nonsense. Theirs may hold the results of this one if it was captured after them, so a replay
    fills the results of all others with nonsense.
    """

    replays = 0

    def __init__(self, recording: Recording, results: Iterable[Tensor], pool: Pool):
        self.calls, self.results, self.pool = recording.calls, [*results], pool
        kept = {address(t) for t in self.results}
        self.temporary = [t for key, t in recording.own.items() if key not in kept]
        _spoil(self.temporary)
        pool.take(self)

    def replay(self) -> None:
        Graph.replays += 1
        for function, args, kwargs, made in self.calls:
            args, kwargs = tree_map_only(Place, Place.tensor, (args, kwargs))
            again = [t for t in tree_leaves(function(*args, **kwargs)) if isinstance(t, Tensor)]
            if made:
                for old, new in zip(made, again, strict=True):
                    old.copy_(new)
        _spoil(self.temporary)
        for other in self.pool.graphs:
            if other is not self:
                _spoil(other.results)


def _spoil(tensors: Iterable[Tensor]) -> None:
    with _disable_current_modes():
        for tensor in tensors:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            whole.fill_(0xFF)  # NaN, or −1


def captured(work: Callable[[], tuple[Tensor, ...]], pool: Pool) -> tuple[Graph, Any]:
    """Capture a work as :func:`lipbound.cuda_graphs.captured` does."""
    with Recording() as recording:
        results = work()
    return Graph(recording, results, pool), results


class Touched(TorchDispatchMode):
    """Notes which memory is read and which is written."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.kept: list[Any] = []  # so that no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        schema = function._schema.arguments
        given = {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs
        changed = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        for name, value in given.items():
            found = {address(t) for t in tree_leaves(value) if isinstance(t, Tensor)}
            (self.written if name in changed else self.read).update(found)
        self.kept.append((args, kwargs, result))
        return result


def on_streams(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run works that must be able to run at the same time, and check that none disturbs another."""
    notes, results = [Touched() for _ in works], []
    for note, work in zip(notes, works, strict=True):
        with note:
            results.append(work())
    for i, one in enumerate(notes):
        for other in notes[:i] + notes[i + 1 :]:
            assert not one.written & (other.read | other.written), "two streams share memory"
    return results
