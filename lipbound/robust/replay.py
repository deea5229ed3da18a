"""Replay work on a GPU as one graph: the processor no longer has to keep up with its kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

WARM = 3  # runs before a capture: libraries choose their algorithms, compilers compile

Captured = tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]


class Replay:
    """Keeps a CUDA graph for every key and every shape of its arguments.

    A function is captured if it reads its tensors where they lay at the capture: weights may
    change in place, not move.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Captured] = {}

    def __call__(
        self,
        key: Hashable,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: list[Tensor],
        keeps: Iterable[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """``function(*inputs)``, from its graph.

        Args:
            key: What the function depends on besides its arguments.
            function: From tensors to tensors, without a look at their values.
            inputs: Its arguments.
            keeps: Tensors it changes, which warming up and capturing must not.
        """
        whole = (key, *((t.shape, t.stride(), t.dtype) for t in inputs))
        if whole not in self._graphs:
            self._graphs[whole] = _captured(function, inputs, list(keeps))
        graph, static, results = self._graphs[whole]
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return tuple(result.clone() for result in results)


def run(
    replay: Replay | None, key: Hashable, function: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """``function(*inputs)``, replayed where that is possible."""
    return function(*inputs) if replay is None else replay(key, function, inputs)


def chunk(count: int) -> int:
    """How many of ``count`` iterations to run at a time: about ten, few to spare at the end.

    Example:
        >>> chunk(201), chunk(21), chunk(3)
        (7, 7, 3)
    """
    return min(range(6, 15), key=lambda n: (-(-count // n) * n, -n)) if count > 14 else count


def _captured(
    function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], keeps: list[Tensor]
) -> Captured:
    static = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
              for t in inputs]  # fmt: skip
    kept = [t.clone() for t in keeps]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            function(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(*static)
    for tensor, before in zip(keeps, kept, strict=True):
        tensor.copy_(before)
    return graph, static, results
