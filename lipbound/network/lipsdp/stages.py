"""Stages of a network: linear maps between activations whose slopes are bounded.

A stage has one source and one result. All its values live on the lattice of the result; a value of
a finer lattice is split into phases. On differences, an activation multiplies every entry by a
slope, and zero padding is an activation with slope 0 outside the image. So all linear maps of a
stage are operators on the infinite lattice, with symbols.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipbound.network.lipsdp.laurent import Laurent


@dataclass(eq=False)
class Node:
    """A value of a stage.

    Attributes:
        channels: Number of channels.
        stride: Distance of its pixels on the lattice of the stage's source, for each axis.
        terms: A linear value is the sum of operators applied to earlier nodes, each operator with
            its stride; empty for the source and for activations.
        input: The node to which an activation is applied.
        slopes: Least and greatest slope of an activation, for each channel ``(2, channels)``.
        spills: Whether the operators give the value entries outside the image, where it has none.
    """

    channels: int
    stride: tuple[int, ...]
    terms: list[tuple[int, Laurent, tuple[int, ...]]] = field(default_factory=list)
    input: int = -1
    slopes: Tensor | None = None
    spills: bool = False


@dataclass(eq=False)
class Stage:
    """A stage on its own lattice.

    Attributes:
        dims: Number of spatial axes.
        sizes: Rows of every node: channels times phases.
        ties: For every node, the channel of each row.
        places: The pixel of each row of the source.
        terms: For every node, operators on earlier nodes; empty for source and activations.
        inputs: For every node, the node to which its activation is applied, or −1.
        slopes: For every node, the least and greatest slope of each row, or ``None``.
        device: Device of all tensors.
    """

    dims: int
    sizes: list[int]
    ties: list[Tensor]
    places: Tensor
    terms: list[list[tuple[int, Laurent]]]
    inputs: list[int]
    slopes: list[Tensor | None]
    device: torch.device

    @property
    def activations(self) -> list[int]:
        return [i for i, before in enumerate(self.inputs) if before >= 0]

    def at_every_pixel(self, matrix: Tensor) -> Tensor:
        """Return the matrix on the source that applies one on channels to every pixel."""
        tie = self.ties[0]
        same = self.places[:, None] == self.places[None, :]
        return matrix[tie[:, None], tie[None, :]] * same

    @property
    def rows(self) -> int:
        """Size of the matrix inequality."""
        return self.sizes[0] + sum(self.sizes[i] for i in self.activations)


def compiled(nodes: Sequence[Node], dims: int, flat: int, device: torch.device) -> Stage:
    """Put all nodes on the lattice of the last one, in frames that keep operators near place 0.

    If the source is a flattened image, ``flat`` is the number of its pixels.
    """
    coarse = nodes[-1].stride
    phases = [tuple(t // s for t, s in zip(coarse, n.stride, strict=True)) for n in nodes]
    frames: list[tuple[int, ...]] = []
    terms: list[list[tuple[int, Laurent]]] = []
    for node, split in zip(nodes, phases, strict=True):
        operators = [(j, op.polyphase(stride, split)) for j, op, stride in node.terms]
        if node.input >= 0:
            frame = frames[node.input]
        else:
            frame = _centre([(op, frames[j]) for j, op in operators], dims)
        frames.append(frame)
        terms.append(
            [
                (j, op.moved([a - b for a, b in zip(frames[j], frame, strict=True)]))
                for j, op in operators
            ]
        )
    counts = [math.prod(split) for split in phases]
    ties = [
        torch.arange(n.channels, device=device).repeat(c)
        for n, c in zip(nodes, counts, strict=True)
    ]
    places = torch.arange(counts[0], device=device).repeat_interleave(nodes[0].channels)
    if flat > 1:
        own = torch.arange(nodes[0].channels // flat, device=device)
        ties[0] = own.repeat_interleave(flat)
        places = torch.arange(flat, device=device).repeat(len(own))
    slopes = [
        None if n.slopes is None else n.slopes.to(device).repeat(1, c)
        for n, c in zip(nodes, counts, strict=True)
    ]
    sizes = [n.channels * c for n, c in zip(nodes, counts, strict=True)]
    return Stage(dims, sizes, ties, places, terms, [n.input for n in nodes], slopes, device)


def _centre(operators: list[tuple[Laurent, tuple[int, ...]]], dims: int) -> tuple[int, ...]:
    """Return the frame in which the operators reach equally far to both sides."""
    if not operators:
        return (0,) * dims
    low = [min(op.first[a] + frame[a] for op, frame in operators) for a in range(dims)]
    high = [max(op.last[a] + frame[a] for op, frame in operators) for a in range(dims)]
    return tuple((a + b) // 2 for a, b in zip(low, high, strict=True))
