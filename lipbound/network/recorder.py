"""Record every operation of a run that depends on the input, and who reads values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[Tensor], Any]

READERS = {
    "__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__float__",
    "__format__", "__index__", "__int__", "__nonzero__", "__repr__", "apply_", "data_ptr",
    "is_nonzero", "item", "map_", "numpy", "storage", "tolist", "untyped_storage",
}  # fmt: skip
UNSEEN = {  # arguments that choose a library or a place, not a function
    "allow_tf32", "benchmark", "cudnn_enable", "cudnn_enabled", "deterministic", "non_blocking",
    "pin_memory",
}  # fmt: skip

View = tuple[Any, ...]  # who made a tensor's numbers (operation, which result), and how it is laid


@dataclass
class Operation:
    """One operation on something that depends on the input.

    Attributes:
        name: Its overload.
        numbers: Those among its arguments.
        constants: Tensors that do not depend on the input.
        views: Tensors that do.
        reads: Storages it reads,
        writes: and writes.
        fails: Whether it may fail for some values.
    """

    name: str
    numbers: tuple[Any, ...]
    constants: list[Tensor]
    views: list[View]
    reads: set[int]
    writes: set[int]
    fails: bool = False


@dataclass
class Trace:
    """What a run did.

    Attributes:
        operations: Those on something that depends on the input, in order.
        read: How a value that depends on the input was read, if one was.
        outputs: Storages of the results.
        results: What they are.
        kept: Keeps every storage alive, so that its address stays its own.
    """

    operations: list[Operation] = field(default_factory=list)
    read: str = ""
    outputs: set[int] = field(default_factory=set)
    results: list[View] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def live(self) -> list[int]:
        """Operations that an output depends on, by number; export leaves out the others."""
        wanted, found = set(self.outputs), []
        for place in reversed(range(len(self.operations))):
            if self.operations[place].writes & wanted:
                wanted |= self.operations[place].reads
                found.append(place)
        return found[::-1]


class Reads(TorchFunctionMode):
    """Notes who asks a tensor for its values.

    Args:
        trace: Takes the note.
        failing: Whether only attempts that fail count: while a network is captured nothing has
            values, and what an attempt returns is followed as a part of the graph.
        depends: Whether a tensor depends on the input.
    """

    def __init__(self, trace: Trace, failing: bool, depends: Callable[[Any], bool]):
        super().__init__()
        self.trace, self.failing, self.depends = trace, failing, depends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in READERS and any(map(self.depends, args))
        if reads and not self.failing:
            self.trace.read = self.trace.read or name
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if reads:
                self.trace.read = self.trace.read or name
            raise


class Recorder(TorchDispatchMode):
    """Follows what depends on the input, storage by storage."""

    def __init__(self, trace: Trace, inputs: Tensor):
        super().__init__()
        self.trace = trace
        self.makers: dict[int, tuple[int, int]] = {_storage(inputs): (-1, 0)}
        trace.kept.append(inputs)

    def depends(self, argument: Any) -> bool:
        return isinstance(argument, Tensor) and _storage(argument) in self.makers

    def view(self, tensor: Tensor) -> View:
        """Whose numbers these are, and which of them; of an axis of size 1 the stride is none."""
        laid: tuple[Any, ...] = ()
        if tensor.layout is torch.strided:
            strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]
            laid = (tuple(strides), tensor.storage_offset())
        maker = self.makers.get(_storage(tensor), (-2, 0))
        return (*maker, tensor.dtype, tuple(tensor.shape), *laid)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not any(map(self.depends, given)):
            return result
        results = tree_leaves(result)
        numbers = any(isinstance(leaf, bool | int | float | complex) for leaf in results)
        if numbers or self._shapes(func, args):
            self.trace.read = self.trace.read or str(func)
        before = [leaf for leaf in given if isinstance(leaf, Tensor)]
        after = [leaf for leaf in results if isinstance(leaf, Tensor)]
        self.trace.kept += before + after
        if _moves(func):
            for tensor in after:  # without a storage of its own, or it would be in there already
                self.makers.setdefault(_storage(tensor), (-2, 0))
            return result
        mine = [t for t in before if self.depends(t)]
        place = len(self.trace.operations)
        self.trace.operations.append(
            Operation(
                str(func), _numbers(func, args, kwargs or {}),
                [t for t in before if not self.depends(t)], [self.view(t) for t in mine],
                {_storage(t) for t in before}, {_storage(t) for t in after},
                fails=not all(t.is_floating_point() for t in mine),
            )
        )  # fmt: skip
        for number, tensor in enumerate(after):
            self.makers[_storage(tensor)] = (place, number)
        return result

    def _shapes(self, func: Any, args: Any) -> bool:
        """Whether the result's shape tells of values: of how many entries are not zero, say."""
        if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
            return False
        return not str(func).startswith("aten.index.") or any(
            map(self.depends, tree_leaves(args[1]))
        )


def record(run: Run, inputs: Tensor) -> Trace:
    """Run on a copy of the inputs, and note every operation that depends on them."""
    trace, own = Trace(), inputs.clone()
    with Recorder(trace, own) as recorder, Reads(trace, False, recorder.depends):
        results = run(own)
    found = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
    trace.outputs = {_storage(t) for t in found}
    trace.results = [recorder.view(t) for t in found if recorder.depends(t)]
    trace.kept += found
    return trace


@contextmanager
def watched() -> Iterator[Trace]:
    """Note attempts to read a value while a network is captured, though the error be caught."""
    trace = Trace()
    with Reads(trace, True, lambda argument: isinstance(argument, Tensor)):
        yield trace


def _storage(tensor: Tensor) -> int:
    """What tells whether two tensors are views of the same numbers."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, say: it has none
        return id(tensor)


def _moves(func: Any) -> bool:
    """Whether an operation only looks at the same numbers otherwise: a view, a detached copy."""
    name = str(func).removeprefix("aten.").partition(".")[0]
    if name in ("detach", "detach_", "lift_fresh", "alias"):
        return True
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _numbers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers among the arguments, the defaults of those that were left out included."""
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {a.name: a.default_value for a in schema.arguments} if schema is not None else {}
    given |= dict(zip(names, args, strict=False)) | kwargs
    leaves = tree_leaves([value for name, value in given.items() if name not in UNSEEN])
    return tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float))
