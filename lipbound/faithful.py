"""Check that a captured program does what the network does when it runs.

``torch.export`` runs the network once, on tensors without values. A forward can notice that, and
do something else: it may ask ``torch.compiler.is_exporting()``, look at the tensor's type or at the
gradient mode, or try to read a value and catch the error. So nothing is believed of a captured
program until it was held against the network itself, in three ways:

* *Operation by operation.* Both run on the same input while every operation that PyTorch's
  dispatcher sees is recorded. Those that the outputs depend on must be the same, in the same
  order, on the same earlier results, with the same numbers and the same constant tensors.
* *By their values*, on several inputs, with and without gradients.
* *By what stays.* The same input gives the same answer again, and leaves parameters, buffers and
  plain attributes of all modules as they were.

A network that reads a value which depends on its input (``bool``, ``item``, ``numpy``) is refused
whatever it does with it: one captured program cannot be all of its branches. So is one that runs an
operation whose result it does not use and that may fail for some inputs: a failure can be caught.

What is not seen: reads that are hidden on purpose (in another thread, through ctypes), and networks
that behave well until later (a counter in a global variable, the clock).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[Tensor], Any]

READERS = {
    "__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__float__",
    "__format__", "__index__", "__int__", "__nonzero__", "__repr__", "apply_", "data_ptr",
    "is_nonzero", "item", "map_", "numpy", "storage", "tolist", "untyped_storage",
}  # fmt: skip
COMPARED = {  # no part of a bound, and no value that they fail for
    f"aten.{name}" for name in (
        "all", "any", "argmax", "argmin", "empty_like", "eq", "exp", "ge", "gt", "isfinite",
        "isinf", "isnan", "le", "log", "logical_not", "lt", "ne", "new_empty", "pow", "sqrt",
    )
}  # fmt: skip
UNSEEN = {  # arguments that choose a library or a place, not a function
    "allow_tf32", "benchmark", "cudnn_enable", "cudnn_enabled", "deterministic", "non_blocking",
    "pin_memory",
}  # fmt: skip
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": torch.no_grad,
    "under torch.enable_grad()": torch.enable_grad,
    "for an input that requires gradients": torch.enable_grad,
    "under torch.inference_mode()": torch.inference_mode,
}
SCALES = (1.0, -1.0, 30.0, 0.01, 0.0)


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


def difference(
    model: nn.Module, captured: Run, analysed: Run, inputs: Tensor, known: Callable[[str], bool]
) -> str:
    """How the network that runs differs from what was captured of it; empty if it does not.

    Args:
        model: The network, in eval mode.
        captured: The program as it was captured, operation by operation.
        analysed: The program that the bound is of: the same with writing in place taken out.
        inputs: A few inputs.
        known: Whether an operation is known, ``'aten.relu'``: then it fails for no value.
    """
    one = inputs[:1]
    with torch.no_grad():
        first = outputs(model, one)  # lazy parts and caches are made here
        state = fingerprint(model)
    for mode, context in MODES.items():
        with _ordinary_attention(), context():
            given = one.detach().requires_grad_("requires" in mode)
            try:
                ran = record(model, given)
            except Exception as error:
                if _fails(model, given):  # it is not run this way
                    continue
                said = f"{mode} it fails while its operations are recorded: {first_line(error)}"
                return said.strip()
            said = _other_operations(ran, record(captured, given))
            if said and not ran.read:  # its forward may switch to inference mode by itself
                with torch.inference_mode():
                    same = not _other_operations(ran, record(captured, one))
                said = "" if same else said
            said = said or _unused(ran, known)
            said = said or _other_values(outputs(model, given), outputs(analysed, one))
            if said:
                return f"{mode} {said}".strip()
    with torch.no_grad():
        for place, scale in enumerate(SCALES):
            x = scale * inputs[place % len(inputs)][None]
            said = _other_values(outputs(model, x), outputs(analysed, x))
            if said:
                return said
    with torch.no_grad():
        again = outputs(model, one)
        if _other_values(first, again):
            return "it answers the same input twice in two ways"
        changed = [name for name, value in fingerprint(model).items() if state.get(name) != value]
    if changed:
        return f"it changes its {changed[0]!r}; let it do that in training mode only"
    return ""


def outputs(model: Run, inputs: Tensor) -> list[Tensor]:
    """What a network says of a batch: its floating-point results."""
    leaves = tree_leaves(model(inputs.clone()))  # the network may write to what it gets
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _fails(model: Run, inputs: Tensor) -> bool:
    """Whether it cannot be run at all: an operation has no derivative, say."""
    try:
        outputs(model, inputs)
    except Exception:
        return True
    return False


def first_line(error: BaseException) -> str:
    """What an error says, or is, in a line that can stand in another sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def _unused(network: Trace, known: Callable[[str], bool]) -> str:
    """An operation without use, that may fail for other inputs; to catch that is to branch."""
    live = set(network.live())
    for place, operation in enumerate(network.operations):
        packet = ".".join(operation.name.split(".")[:2])
        safe = known(packet) or known(packet.rstrip("_")) or packet in COMPARED
        if place not in live and (operation.fails or not safe):
            return f"it runs {operation.name} and does not use the result, which may fail"
    return ""


def _placed(view: View, ranks: dict[int, int]) -> View:
    """With the number of who made it among the operations that count."""
    return (ranks.get(view[0], view[0]), *view[1:])


def _other_operations(network: Trace, captured: Trace) -> str:
    if network.read:
        return f"it reads a value that depends on its input ({network.read.strip('_')})"
    ranks = [{place: rank for rank, place in enumerate(t.live())} for t in (network, captured)]
    theirs, ours = (
        [trace.operations[place] for place in rank]
        for trace, rank in zip((network, captured), ranks, strict=True)
    )

    def same(ones: Sequence[View], others: Sequence[View]) -> bool:
        pairs = zip((ones, others), ranks, strict=True)
        first, second = ([_placed(v, rank) for v in views] for views, rank in pairs)
        return first == second

    for place, (mine, yours) in enumerate(zip(theirs, ours, strict=False)):
        if mine.name != yours.name:
            return f"it runs {mine.name} as operation {place + 1}, where {yours.name} was captured"
        if not _same_numbers(mine.numbers, yours.numbers):
            return (
                f"it runs {mine.name} (operation {place + 1}) with {_shown(mine.numbers)}, where "
                f"{_shown(yours.numbers)} was captured"
            )
        if not _same_tensors(mine.constants, yours.constants):
            return f"it runs {mine.name} (operation {place + 1}) with other constants than captured"
        if not same(mine.views, yours.views):
            return f"it runs {mine.name} (operation {place + 1}) on other results than captured"
    if len(theirs) > len(ours):
        return f"it runs {theirs[len(ours)].name}, which was not captured"
    if len(theirs) < len(ours):
        return f"it does not run {ours[len(theirs)].name}, which was captured"
    return "" if same(network.results, captured.results) else "it returns other results"


def _same_numbers(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(
        one == other or (one != one and other != other)
        for one, other in zip(ones, others, strict=True)
    )


def _same_tensors(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
            continue
        if not torch.equal(one, other) and _bits(one) != _bits(other):  # which knows NaNs too
            return False
    return True


def _other_values(ones: Sequence[Tensor], others: Sequence[Tensor]) -> str:
    if len(ones) != len(others):
        return f"it gives {len(ones)} results, where {len(others)} were captured"
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape:
            return f"its result is {tuple(one.shape)}, where {tuple(other.shape)} was captured"
        if one.numel() and not _close(one, other):
            apart = float((one.double() - other.double()).abs().amax())
            size = float(one.double().abs().amax())
            return f"its answer differs by {apart:.3g} of {size:.3g} from what was captured"
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal, but for the rounding of a network of this precision."""
    one, other = one.detach(), other.detach()
    share = rounding(one.dtype)
    size = one.double().nan_to_num(0.0, 0.0, 0.0).abs().amax()
    return torch.allclose(one.double(), other.double(), 0, share * float(size), equal_nan=True)


def rounding(dtype: torch.dtype) -> float:
    """What rounding may do to a network's answers, about, relative to their size."""
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.1)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All that a module may keep from one run to the next: tensors by their bits, plain values."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        kept = {**vars(module), **module._parameters, **module._buffers}
        for name, value in kept.items():
            if name in ("_parameters", "_buffers", "_modules") or callable(value):
                continue
            for place, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, Tensor):
                    leaf = _bits(leaf)
                elif not isinstance(leaf, bool | int | float | str | bytes | None):
                    continue
                if leaf != leaf:
                    leaf = "nan"
                found[".".join(filter(None, (path, name))) + (f"[{place}]" if place else "")] = leaf
    return found


def _bits(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return b""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data).digest()


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


def _shown(numbers: Sequence[Any]) -> str:
    return ", ".join(f"{n:g}" if isinstance(n, float) else str(n) for n in numbers) or "nothing"


@contextmanager
def _ordinary_attention() -> Iterator[None]:
    """PyTorch's fused attention is taken where nothing records: here it would be a difference."""
    before = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, before)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def exceeds(lower: float, upper: float, dtype: torch.dtype) -> bool:
    """Whether a measured lower end is above a bound by more than rounding."""
    return math.isfinite(lower) and lower > upper * (1 + rounding(dtype))
