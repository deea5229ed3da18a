"""Read an ONNX program as a network, by onnx2torch, without executing anything from the file."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from lipbound.runtime import first_line
from lipbound.weights import check_file

EXTRA = "reading {!r} needs an extra ({}): pip install 'lipbound[onnx]'"
OLDER = (17, 18)  # versions of ONNX, the one to prefer first
OWN = ("", "ai.onnx")  # domains whose operations are ONNX's own


def onnx_network(path: Path) -> tuple[nn.Module, tuple[int, ...] | None]:
    """Return the network of an ONNX file, and the shape of one input if the file gives it.

    Args:
        path: The file. Weights that it keeps in other files must be beside it.

    Raises:
        ValueError: If it cannot be read or converted; the message gives the reason.
    """
    check_file(path)
    try:
        import onnx

        with _torchvision():
            from onnx2torch import convert
    except ImportError as error:
        raise ValueError(EXTRA.format(str(path), error)) from None
    try:
        program = onnx.load(path, load_external_data=False)
    except Exception as error:  # of protobuf, whose kind depends on its version
        raise ValueError(
            f"{str(path)!r} is not a complete ONNX program ({first_line(error)}); download or copy "
            f"it again"
        ) from None
    _load_other_files(program, path)
    given = {tensor.name for tensor in program.graph.initializer}
    inputs = [value for value in program.graph.input if value.name not in given]
    if len(inputs) != 1:
        raise ValueError(
            f"{str(path)!r} has {len(inputs)} inputs ({', '.join(v.name for v in inputs[:4])}), "
            f"and a Lipschitz constant is that of a network with one; write a function that "
            f"returns the part to audit, and name it: lipbound audit FILE.py:FUNCTION"
        )
    program = _older(program)
    _constants_to_weights(program.graph)
    _plain_names(program.graph)
    try:
        network = convert(program)
    except Exception as error:
        raise ValueError(
            f"{str(path)!r} cannot be converted by onnx2torch: {first_line(error)}. Export the "
            f"network without this, or audit it in PyTorch with --model"
        ) from None
    sizes = [axis.dim_value for axis in inputs[0].type.tensor_type.shape.dim[1:]]
    return network.eval(), tuple(sizes) if sizes and min(sizes) > 0 else None


def _load_other_files(program: Any, path: Path) -> None:
    """Load the weights that are in other files.

    Raises:
        ValueError: If they are not beside the program.
    """
    from onnx import TensorProto
    from onnx.external_data_helper import load_external_data_for_model

    for tensor in program.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        place = next((e.value for e in tensor.external_data if e.key == "location"), "")
        if Path(place).name != place or path.with_name(place).is_symlink():
            raise ValueError(f"{str(path)!r} names the file {place!r}, which is not beside it")
        check_file(path.with_name(place))
    try:
        load_external_data_for_model(program, str(path.parent))
    except Exception as error:
        raise ValueError(f"{str(path)!r}: {first_line(error)}; copy its files again") from None


def _older(program: Any) -> Any:
    """Write a program of a newer version of ONNX in one whose operations onnx2torch knows."""
    from onnx import version_converter

    if all(used.version <= OLDER[0] for used in program.opset_import if used.domain in OWN):
        return program
    for version in OLDER:
        with contextlib.suppress(Exception):  # then onnx2torch says what it does not know
            return version_converter.convert_version(program, version)
    return program


def _constants_to_weights(graph: Any) -> None:
    """Write constant tensors, and copies of weights, where onnx2torch looks for those of layers."""
    for node in list(graph.node):
        if node.op_type == "Constant" and [a.name for a in node.attribute] == ["value"]:
            graph.initializer.add().CopyFrom(node.attribute[0].t)
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)
    weights = {tensor.name for tensor in graph.initializer}
    kept = {value.name for value in graph.output}
    copies: dict[str, str] = {}
    for node in list(graph.node):
        node.input[:] = [copies.get(name, name) for name in node.input]
        if node.op_type == "Identity" and node.input[0] in weights and node.output[0] not in kept:
            copies[node.output[0]] = node.input[0]
            graph.node.remove(node)


def _plain_names(graph: Any) -> None:
    """Name the operations by identifiers, because they become names in code that torch.fx makes."""
    taken = {"initializers"}  # which onnx2torch adds
    for node in graph.node:
        if node.domain not in OWN:
            continue  # not converted, and named in the error
        start = re.sub(r"\W+", "_", node.name or node.op_type, flags=re.ASCII).strip("_")
        start = start if start.isidentifier() else f"op_{start}"
        name, number = start, 0
        while name in taken or hasattr(nn.Module, name):
            number += 1
            name = f"{start}_{number}"
        taken.add(name)
        node.name = name


@contextlib.contextmanager
def _torchvision() -> Iterator[None]:
    """Let onnx2torch be imported beside a torchvision that was built for another PyTorch.

    It needs torchvision for two operations on boxes only, which then fail when they run.
    """
    try:
        import torchvision.ops  # noqa: F401
    except Exception:
        broken = [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
        kept = {name: sys.modules.pop(name) for name in broken}
        standing, ops = ModuleType("torchvision"), ModuleType("torchvision.ops")
        standing.ops, ops.roi_align = ops, None  # type: ignore[attr-defined]
        sys.modules |= {"torchvision": standing, "torchvision.ops": ops}
        try:
            yield
        finally:
            del sys.modules["torchvision"], sys.modules["torchvision.ops"]
            sys.modules |= kept
    else:
        yield
