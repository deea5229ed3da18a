"""Capture a network with ``torch.export`` as a graph of calls.

Everything that does not depend on the input (weights, buffers and values computed from them) is
computed here. The rules bound the other calls.
"""

from __future__ import annotations

import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils._pytree import tree_leaves, tree_map

from lipbound.network.recorder import watched


class NotCaptured(ValueError):
    """The model cannot be captured as a graph."""


@dataclass(frozen=True)
class Reference:
    """An argument that depends on the network's input: the result of an earlier call."""

    name: str


@dataclass(frozen=True)
class Call:
    """One operation on values that depend on the input.

    Attributes:
        name: Name of its result.
        op: Overload packet such as ``'aten.conv2d'``; ``'getitem'`` for one of several results.
        args: Positional arguments. Tensors that depend on the input are :class:`Reference`;
            all others are the tensors themselves.
        kwargs: Keyword arguments in the same form.
        shape: Shape of the result, ``()`` for a number; ``None`` if there are several results.
        module: Path of the module that made the call.
        source: File and line of the call.
        schema: Schema of the operation.
        overload: Name of the overload.
        floating: Whether the result is a floating-point tensor.
        dtype: Type of the result, or of the first of several results.
        integers: Whether the result is a tensor of integers or booleans, which is not bounded.
        results: Number of result tensors.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...] | None
    module: str
    source: str
    schema: Any = None
    overload: str = "default"
    floating: bool = True
    dtype: torch.dtype | None = None
    integers: bool = False
    results: int = 1

    def arguments(self) -> dict[str, Any]:
        """Return all arguments by their names in the operation's schema."""
        if self.schema is None:
            return {str(i): value for i, value in enumerate(self.args)}
        values: dict[str, Any] = {}
        for index, argument in enumerate(self.schema.arguments):
            if index < len(self.args):
                values[argument.name] = self.args[index]
            elif argument.name in self.kwargs:
                values[argument.name] = self.kwargs[argument.name]
            else:
                values[argument.name] = argument.default_value
        return values

    def references(self) -> list[str]:
        """Return the names of the earlier results that the call reads, in order."""
        return [r.name for r in _references((self.args, self.kwargs))]

    def run(self, given: dict[str, Any]) -> Any:
        """Run the operation with arguments by name."""
        if self.schema is None:
            return given["0"][given["1"]]
        operation = getattr(getattr(torch.ops, self.op.split(".")[0]), self.op.split(".")[1])
        overload = getattr(operation, self.overload)
        args = [given[a.name] for a in self.schema.arguments if not a.kwarg_only]
        options = {a.name: given[a.name] for a in self.schema.arguments if a.kwarg_only}
        return overload(*args, **options)

    def given(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, with earlier results in place of the references."""
        return {
            name: tree_map(
                lambda leaf: values[leaf.name] if isinstance(leaf, Reference) else leaf, argument
            )
            for name, argument in self.arguments().items()
        }

    def in_float64(self) -> Call:
        """Return the call for float64 arguments, with the same numbers."""
        return replace(self, args=tree_map(_wide, self.args), kwargs=tree_map(_wide, self.kwargs))


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.double()
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


@dataclass(frozen=True)
class Graph:
    """A captured network.

    Attributes:
        inputs: Name → shape of each input.
        calls: Calls in the order in which they run.
        outputs: Names of the results that are outputs, without constants and integers.
        left_out: Names of the integer outputs.
        captured: Function that runs the program as it was captured.
        analysed: Function that runs the program that consists of ``calls``.
    """

    inputs: dict[str, tuple[int, ...]]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    captured: Callable[..., Any] | None = field(default=None, repr=False)
    analysed: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the network's weights."""
        leaves = (leaf for call in self.calls for leaf in tree_leaves((call.args, call.kwargs)))
        found = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
        return found or torch.device("cpu")


def capture(model: nn.Module, inputs: Sequence[Tensor]) -> Graph:
    """Capture ``model(*inputs)`` in eval mode.

    Raises:
        NotCaptured: If this fails, for example because a branch depends on the input's values.
    """
    label = type(model).__name__
    captured, program = _exported(model, inputs)
    stored = _stored(program)
    known: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    calls: list[Call] = []
    results: list[str] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in stored:
                known[node.name] = stored[node.name].detach()
            elif isinstance(node.meta.get("val"), Tensor):
                shapes[node.name] = tuple(node.meta["val"].shape)
            else:
                known[node.name] = node.meta.get("val")
        elif node.op == "output":
            results = [r.name for r in _references(_resolve(_returned(label, program), known))]
        elif node.op == "get_attr":
            known[node.name] = getattr(program.graph_module, node.target)
        else:
            call = _call(node, known)
            if call.references():
                calls.append(call)
            else:
                known[node.name] = _constant(label, node, call)
    integers = {call.name for call in calls if call.integers}  # such as indices of a maximum
    outputs = tuple(name for name in results if name not in integers)
    if not outputs:
        raise NotCaptured(f"{label} has no output that depends on its input")
    left_out = tuple(name for name in results if name in integers)
    analysed = partial(_analysed, program, stored)
    return Graph(shapes, tuple(calls), outputs, left_out, captured, analysed)


def _exported(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[nn.Module, ExportedProgram]:
    """Return the program as it was captured, and decomposed into the operations of the rules."""
    label = type(model).__name__
    try:
        with warnings.catch_warnings(), _unlogged(), torch.no_grad():
            warnings.simplefilter("ignore")
            with watched() as seen:
                exported = torch.export.export(model, tuple(inputs), strict=False)
            captured = exported.module()
            program = exported.run_decompositions({})
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "data-dependent" in first:
            first = "a branch depends on the values of a tensor"
        raise NotCaptured(f"{label} cannot be captured: {first}") from error
    if seen.read:
        raise NotCaptured(
            f"{label} tries to read a value ({seen.read.strip('_')}) and catches the error: "
            f"a branch may depend on its input's values"
        )
    return captured, program


def _stored(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the weights, buffers and constants by the names of the inputs that they become."""
    signature = program.graph_signature
    tensors: dict[str, Any] = {**program.state_dict, **program.constants}
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return {name: tensors[target] for name, target in targets.items()}


def _analysed(program: ExportedProgram, stored: dict[str, Tensor], given: Tensor) -> list[Any]:
    """Run the program that consists of the graph's calls."""
    signature = program.graph_signature
    own = [stored.get(spec.arg.name, given) for spec in signature.input_specs]
    pairs = zip(signature.output_specs, program.graph_module(*own), strict=True)
    return [value for spec, value in pairs if spec.kind is OutputKind.USER_OUTPUT]


def _returned(label: str, program: ExportedProgram) -> list[Any]:
    """Return the nodes of the outputs. An input that the network writes to is returned too."""
    specs = program.graph_signature.output_specs
    for spec in specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise NotCaptured(
                f"{label} changes its {spec.target!r} when it runs: it is not a fixed function; "
                f"change it in training mode only"
            )
    pairs = zip(specs, program.graph.output_node().args[0], strict=True)
    return [node for spec, node in pairs if spec.kind is OutputKind.USER_OUTPUT]


@torch.no_grad()
def _constant(label: str, node: fx.Node, call: Call) -> Any:
    """Compute a call that does not depend on the network's input."""
    if _random(node.target, call):
        raise NotCaptured(
            f"{label} draws random numbers ({call.op}, {call.source}): it is not a fixed function; "
            f"draw them in training mode only"
        )
    return node.target(*call.args, **call.kwargs)  # type: ignore[operator]


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence what PyTorch logs about a model that it cannot capture; the error repeats it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _call(node: fx.Node, known: dict[str, Any]) -> Call:
    target = node.target
    value = node.meta.get("val")
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in trace if line.startswith("File ") and "/torch/nn/" not in line]
    packet = getattr(target, "overloadpacket", target)
    op = "getitem" if target is operator.getitem else str(packet)
    several = isinstance(value, list | tuple)
    # A number that was read from a tensor is not floating: nothing is known about its slope.
    floating = several or (isinstance(value, Tensor) and value.is_floating_point())
    return Call(
        name=node.name,
        op=op,
        args=_resolve(node.args, known),
        kwargs=_resolve(node.kwargs, known),
        shape=tuple(value.shape) if isinstance(value, Tensor) else None if several else (),
        module=paths[-1].removeprefix("L['self'].") if paths else "",
        source=_short(files[-1]) if files else "",
        schema=getattr(target, "_schema", None),
        floating=floating,
        dtype=next((v.dtype for v in tree_leaves(value) if isinstance(v, Tensor)), None),
        integers=isinstance(value, Tensor) and not (floating or value.is_complex()),
        results=len(value) if isinstance(value, list | tuple) else 1,
        overload=getattr(target, "_overloadname", "default") or "default",
    )


def _random(target: Any, call: Call) -> bool:
    """Tell whether an operation draws random numbers; dropout in eval mode does not."""
    given = call.arguments()
    switch = next((given[name] for name in ("train", "training") if name in given), True)
    drawn = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return drawn and switch is not False


def _resolve(argument: Any, known: dict[str, Any]) -> Any:
    """Replace nodes by their values, or by references if they depend on the input."""
    if isinstance(argument, fx.Node):
        return known[argument.name] if argument.name in known else Reference(argument.name)
    if isinstance(argument, dict):
        return {key: _resolve(value, known) for key, value in argument.items()}
    if isinstance(argument, list | tuple):
        return type(argument)(_resolve(value, known) for value in argument)
    return argument


def _references(arguments: Any) -> list[Reference]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Reference)]


def _short(line: str) -> str:
    """Shorten ``File "/a/b/net.py", line 9, in forward`` to ``net.py:9``."""
    parts = line.split('"')
    number = line.rsplit("line ", 1)[-1].split(",")[0]
    return f"{parts[1].rsplit('/', 1)[-1]}:{number}" if len(parts) > 1 else line
