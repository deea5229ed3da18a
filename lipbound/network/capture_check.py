"""Check that a captured program does what the network does when it runs.

``torch.export`` runs the network once, on tensors without values. A forward can notice this and
behave differently: it can call ``torch.compiler.is_exporting()``, look at the tensor's type or at
the gradient mode, or try to read a value and catch the error. Therefore a captured program is
compared with the network itself, in three ways:

* *Operations.* Both run on the same input while every operation that PyTorch's dispatcher sees is
  recorded. The operations that the outputs depend on must be the same, in the same order, on the
  same earlier results, with the same numbers and the same constant tensors.
* *Values.* Both must give the same results on several inputs, with and without gradients.
* *State.* The same input must give the same answer again, and must leave parameters, buffers and
  plain attributes of all modules unchanged.

A network that reads a value which depends on its input (``bool``, ``item``, ``numpy``) is always
refused, because one captured program cannot contain all of its branches. A network is also refused
if it runs an operation that may fail for some inputs and ignores the result: it could catch the
failure and branch.

The check cannot see reads that are hidden on purpose (in another thread, through ctypes), or
networks that change later (by a counter in a global variable, or by the clock).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lipbound.network.recorder import Run, Trace, View, record
from lipbound.runtime import first_line

COMPARED = {  # operations without a rule that do not fail for any value
    f"aten.{name}" for name in (
        "all", "any", "argmax", "argmin", "empty_like", "eq", "exp", "ge", "gt", "isfinite",
        "isinf", "isnan", "le", "log", "logical_not", "lt", "ne", "new_empty", "pow", "sqrt",
    )
}  # fmt: skip
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": torch.no_grad,
    "under torch.enable_grad()": torch.enable_grad,
    "for an input that requires gradients": torch.enable_grad,
    "under torch.inference_mode()": torch.inference_mode,
}
SCALES = (1.0, -1.0, 30.0, 0.01, 0.0)


def difference(
    model: nn.Module, captured: Run, analysed: Run, inputs: Tensor, known: Callable[[str], bool]
) -> str:
    """Describe how the network differs from the captured program; empty if it does not.

    Args:
        model: The network, in eval mode.
        captured: The program as it was captured, operation by operation.
        analysed: The program that is bounded: the captured one without in-place operations.
        inputs: A batch of a few inputs.
        known: Tells whether an operation such as ``'aten.relu'`` has a rule and so never fails.
    """
    one = inputs[:1]
    with torch.no_grad():
        first = outputs(model, one)  # creates lazy parts and caches
        state = fingerprint(model)
    for mode, context in MODES.items():
        with _ordinary_attention(), context():
            given = one.detach().requires_grad_("requires" in mode)
            try:
                ran = record(model, given)
            except Exception as error:
                if _fails(model, given):  # the network does not support this mode
                    continue
                said = f"{mode} it fails while its operations are recorded: {first_line(error)}"
                return said.strip()
            said = _other_operations(ran, record(captured, given))
            if said and not ran.read:  # the forward may switch to inference mode itself
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
            return "it gives different answers to the same input"
        changed = [name for name, value in fingerprint(model).items() if state.get(name) != value]
    if changed:
        return f"it changes its {changed[0]!r}; change it in training mode only"
    return ""


def outputs(model: Run, inputs: Tensor) -> list[Tensor]:
    """Return the floating-point results of a network for a batch."""
    leaves = tree_leaves(model(inputs.clone()))  # the network may write to its input
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _fails(model: Run, inputs: Tensor) -> bool:
    """Tell whether the network fails, for example because an operation has no derivative."""
    try:
        outputs(model, inputs)
    except Exception:
        return True
    return False


def _unused(network: Trace, known: Callable[[str], bool]) -> str:
    """Name an unused operation that may fail for other inputs: the network could catch that."""
    live = set(network.live())
    for place, operation in enumerate(network.operations):
        packet = ".".join(operation.name.split(".")[:2])
        safe = known(packet) or known(packet.rstrip("_")) or packet in COMPARED
        if place not in live and (operation.fails or not safe):
            return f"it runs {operation.name}, which may fail, and does not use the result"
    return ""


def _placed(view: View, ranks: dict[int, int]) -> View:
    """Number the operation that made the tensor among those that an output depends on."""
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
            return f"operation {place + 1} is {mine.name}, but {yours.name} was captured"
        if not _same_numbers(mine.numbers, yours.numbers):
            return (
                f"it runs {mine.name} (operation {place + 1}) with {_shown(mine.numbers)}, but "
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
        if not torch.equal(one, other) and _bits(one) != _bits(other):  # equal bits: NaN too
            return False
    return True


def _other_values(ones: Sequence[Tensor], others: Sequence[Tensor]) -> str:
    if len(ones) != len(others):
        return f"it gives {len(ones)} results, but {len(others)} were captured"
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape:
            return f"its result has shape {tuple(one.shape)}, but the captured {tuple(other.shape)}"
        if one.numel() and not _close(one, other):
            apart = float((one.double() - other.double()).abs().amax())
            size = float(one.double().abs().amax())
            return f"its results, up to {size:.3g}, differ by {apart:.3g} from the captured ones"
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    """Tell whether two results are equal up to the rounding errors of their precision."""
    one, other = one.detach(), other.detach()
    share = rounding(one.dtype)
    size = one.double().nan_to_num(0.0, 0.0, 0.0).abs().amax()
    return torch.allclose(one.double(), other.double(), 0, share * float(size), equal_nan=True)


def rounding(dtype: torch.dtype) -> float:
    """Return a rough size of rounding errors in a network's results, relative to the results."""
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.1)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Collect the state that a module may keep between runs: hashes of tensors, plain values."""
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


def _shown(numbers: Sequence[Any]) -> str:
    return ", ".join(f"{n:g}" if isinstance(n, float) else str(n) for n in numbers) or "nothing"


@contextmanager
def _ordinary_attention() -> Iterator[None]:
    """Disable fused attention: PyTorch avoids it during recording, so the runs would differ."""
    before = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, before)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def exceeds(lower: float, upper: float, dtype: torch.dtype) -> bool:
    """Tell whether a measured lower bound exceeds an upper bound by more than rounding."""
    return math.isfinite(lower) and lower > upper * (1 + rounding(dtype))
