"""Replay work on a GPU as one graph: the processor no longer has to keep up with its kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

WARM = 3  # runs before a capture: libraries choose their algorithms, compilers compile


class Replay:
    """Keeps a CUDA graph for every key and every shape of its arguments.

    A function is captured if it reads its tensors where they lay at the capture: weights may
    change in place, not move.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def __call__(
        self,
        key: Hashable,
        function: Callable[..., Tensor],
        inputs: list[Tensor],
        keeps: Iterable[Tensor] = (),
    ) -> Tensor:
        """``function(*inputs)``, from its graph.

        Args:
            key: What the function depends on besides its arguments.
            function: From tensors to a tensor, without a look at their values.
            inputs: Its arguments.
            keeps: Tensors it changes, which warming up and capturing must not.
        """
        whole = (key, *((t.shape, t.stride(), t.dtype) for t in inputs))
        if whole not in self._graphs:
            self._graphs[whole] = _captured(function, inputs, list(keeps))
        graph, static, result = self._graphs[whole]
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return result.clone()


def _captured(
    function: Callable[..., Tensor], inputs: list[Tensor], keeps: list[Tensor]
) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
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
        result = function(*static)
    for tensor, before in zip(keeps, kept, strict=True):
        tensor.copy_(before)
    return graph, static, result
