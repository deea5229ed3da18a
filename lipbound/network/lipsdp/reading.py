"""Divide a network into runs of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lipbound.network.lipsdp.laurent import Laurent
from lipbound.network.lipsdp.pieces import NotRead, Piece, Reader
from lipbound.network.lipsdp.stages import Node, Stage, compiled
from lipbound.network.rules import Value
from lipbound.runtime import first_line

ROWS = 1400  # size of a stage's matrix at which a new stage begins


def parents(value: Value) -> list[Value]:
    """Return the values from which a value is computed; a convolution is merged with its norm."""
    if value.linear is not None:
        return [value.linear.anchor]
    return [] if value.origin is None else value.origin.inputs()


def ordered(output: Value) -> list[Value]:
    """Return all values on which the output depends, each after its parents."""
    done: dict[int, Value] = {}
    stack: list[tuple[Value, bool]] = [(output, False)]
    while stack:
        value, ready = stack.pop()
        if id(value) in done:
            continue
        if ready:
            done[id(value)] = value
            continue
        stack.append((value, True))
        stack += [(parent, False) for parent in parents(value) if id(parent) not in done]
    return list(done.values())


def bottlenecks(output: Value) -> list[Value]:
    """Return the values through which everything passes, from the input to the output."""
    values = ordered(output)
    place = {id(value): index for index, value in enumerate(values)}
    reach = 0
    last = [0] * len(values)
    for index, value in enumerate(values):
        for parent in parents(value):
            last[place[id(parent)]] = index
    found = []
    for index, value in enumerate(values):
        if reach <= index and (index > 0 or parents(value) == []):
            found.append(value)
        reach = max(reach, last[index])
    return found


def described(value: Value, error: NotRead) -> str:
    """Say which operation of which module broke the chain, and why."""
    step = value.origin
    if step is None:
        return str(error)
    place = step.call.module or step.call.source or "the network"
    return f"{step.call.op} in {place}: {error}"


@dataclass(eq=False)
class Run:
    """Consecutive stages with their first source and last result."""

    source: Value
    result: Value
    stages: list[Stage]


def runs(output: Value, device: torch.device) -> tuple[list[Run], list[str]]:
    """Return the parts of a network that are chains of stages, and what broke the chains."""
    values = bottlenecks(output)
    found: list[Run] = []
    left_out: list[str] = []
    pieces: list[Piece] = []

    def close() -> None:
        nodes = [node for piece in pieces for node in piece.nodes]
        operators = [op for node in nodes for _, op, _ in node.terms]
        mixing = sum(op.multiple is None for op in operators)
        if mixing > 1 or (mixing and any(node.input >= 0 for node in nodes)):  # else no gain
            found.append(Run(pieces[0].source, pieces[-1].result, staged(pieces, device)))
        pieces.clear()

    for source, result in pairwise(values):
        spills = bool(pieces) and pieces[-1].nodes[-1].spills
        try:
            pieces.append(Reader(source, result, spills, device).piece)
        except NotRead as error:
            close()
            left_out.append(described(result, error))
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            close()  # an operation with unusual arguments keeps the bound of its rule
            left_out.append(described(result, NotRead(first_line(error))))
    close()
    return found, left_out


def staged(pieces: Sequence[Piece], device: torch.device) -> list[Stage]:
    """Join pieces to stages.

    A new stage begins where pixels are taken with a stride, where an image is flattened or
    averaged, and where the matrix becomes too large. Linear maps after an average stay in its
    stage: the squared norm of H times a mean is at most the mean of the squared norms.
    """
    stages: list[Stage] = []
    nodes: list[Node] = []
    dims, flat, pooled = pieces[0].dims, 1, False

    def close() -> None:
        nonlocal flat, pooled
        if len(nodes) > 1:
            stages.append(compiled(nodes, dims, flat, device))
            flat = 1
        nodes.clear()
        pooled = False

    for piece in pieces:
        if pooled and (piece.flat == 1 or piece.pointwise):
            piece = _on_lattice(piece, dims)
        elif piece.flat:
            close()
            flat, dims = piece.flat, 0
            continue
        else:
            size = sum(n.channels for i, n in enumerate(nodes) if i == 0 or n.input >= 0)
            more = sum(n.channels for n in piece.nodes if n.input >= 0)
            strided = any(t != 1 for t in piece.nodes[-1].stride)
            if pooled or piece.dims != dims or strided or size + more > ROWS:
                close()
            dims = piece.dims
        nodes.extend([] if nodes else piece.nodes[:1])
        offset, base = len(nodes) - 1, nodes[-1].stride
        for node in piece.nodes[1:]:
            terms = [(j + offset, op, s) for j, op, s in node.terms]
            before = node.input + offset if node.input >= 0 else -1
            stride = tuple(a * b for a, b in zip(base, node.stride, strict=True))
            nodes.append(replace(node, stride=stride, terms=terms, input=before))
        pooled = pooled or piece.pooled
    close()
    return stages


def _on_lattice(piece: Piece, dims: int) -> Piece:
    """Return a pointwise piece with another number of axes."""
    ones = (1,) * dims

    def moved(op: Laurent) -> Laurent:
        taps = op.taps.reshape(*op.taps.shape[:2], *ones)
        return replace(op, taps=taps, first=(0,) * dims)

    nodes = [
        replace(node, stride=ones, terms=[(j, moved(op), ones) for j, op, _ in node.terms])
        for node in piece.nodes
    ]
    return replace(piece, nodes=nodes, dims=dims)
