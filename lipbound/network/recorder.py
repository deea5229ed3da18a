"""Record the operations of a run that depend on the input, and attempts to read values."""

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
UNSEEN = {  # arguments that choose a library or a memory, but not the result
    "allow_tf32", "benchmark", "cudnn_enable", "cudnn_enabled", "deterministic", "non_blocking",
    "pin_memory",
}  # fmt: skip

View = tuple[Any, ...]  # (operation, index of its result) that made a tensor, then its layout


@dataclass
class Operation:
    """One operation on tensors that depend on the input.

    Attributes:
        name: Name of its overload.
        numbers: Numbers among its arguments.
        constants: Tensor arguments that do not depend on the input.
        views: Tensor arguments that depend on the input.
        reads: Storages that it reads.
        writes: Storages that it writes.
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
    """Record of a run.

    Attributes:
        operations: Operations on tensors that depend on the input, in order.
        read: Function that read a value that depends on the input; empty if none did.
        outputs: Storages of the results.
        results: Results that depend on the input, as views.
        kept: Tensors kept alive, so that no storage address is used twice.
    """

    operations: list[Operation] = field(default_factory=list)
    read: str = ""
    outputs: set[int] = field(default_factory=set)
    results: list[View] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def live(self) -> list[int]:
        """Return the numbers of the operations that an output depends on; export drops others."""
        wanted, found = set(self.outputs), []
        for place in reversed(range(len(self.operations))):
            if self.operations[place].writes & wanted:
                wanted |= self.operations[place].reads
                found.append(place)
        return found[::-1]


class Reads(TorchFunctionMode):
    """Record which function reads the values of a tensor.

    Args:
        trace: Record to write to.
        failing: Whether to record only attempts that fail. During capture tensors have no values,
            and the result of a successful attempt becomes a part of the graph.
        depends: Tells whether a tensor depends on the input.
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
    """Record operations on all storages that depend on the input."""

    def __init__(self, trace: Trace, inputs: Tensor):
        super().__init__()
        self.trace = trace
        self.makers: dict[int, tuple[int, int]] = {_storage(inputs): (-1, 0)}
        trace.kept.append(inputs)

    def depends(self, argument: Any) -> bool:
        return isinstance(argument, Tensor) and _storage(argument) in self.makers

    def view(self, tensor: Tensor) -> View:
        """Describe a tensor: the operation that made it and its layout, without size-1 axes."""
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
        if _moves(func) and all(_storage(t) in self.makers or not _stored(t) for t in after):
            for tensor in after:  # only a tensor without a storage is new here
                self.makers.setdefault(_storage(tensor), (-2, 0))
            return result  # otherwise it is a copy, as reshape can make under inference mode
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
        """Tell whether the result's shape depends on values, for example on the nonzero entries."""
        if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
            return False
        return not str(func).startswith("aten.index.") or any(
            map(self.depends, tree_leaves(args[1]))
        )


def record(run: Run, inputs: Tensor) -> Trace:
    """Run on a copy of the inputs and record every operation that depends on them."""
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
    """Record attempts to read a value during capture, even if the network catches the error."""
    trace = Trace()
    with Reads(trace, True, lambda argument: isinstance(argument, Tensor)):
        yield trace


def _storage(tensor: Tensor) -> int:
    """Return a number that is equal for two tensors that share their memory."""
    return int(tensor.untyped_storage()._cdata) if _stored(tensor) else id(tensor)


def _stored(tensor: Tensor) -> bool:
    """Tell whether a tensor has a storage; a sparse one, for example, has none."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _moves(func: Any) -> bool:
    """Tell whether an operation returns a view of the same numbers or detaches them."""
    name = str(func).removeprefix("aten.").partition(".")[0]
    if name in ("detach", "detach_", "lift_fresh", "alias"):
        return True
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _numbers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the numbers among the arguments, including defaults of arguments not given."""
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {a.name: a.default_value for a in schema.arguments} if schema is not None else {}
    given |= dict(zip(names, args, strict=False)) | kwargs
    leaves = tree_leaves([value for name, value in given.items() if name not in UNSEEN])
    return tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float))
