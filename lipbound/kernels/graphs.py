"""Work that a GPU does again and again, replayed as a graph: no launch by launch from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
WARM = 2  # calls before a capture: libraries choose their algorithms, caches fill


class Repeated(Generic[Result]):
    """One piece of work, the same at every call: on CUDA it is captured, then replayed.

    It must read and write its tensors where they lay at the capture, and never look at values.

    Args:
        device: Where it runs; elsewhere than on CUDA it is simply called.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: list[Result] = []

    def __call__(self, work: Callable[[], Result]) -> Result:
        """What the work returns; tensors in it are overwritten by the next call."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return work()
        with torch.cuda.device(self.device):
            if self._graph is None:
                self._calls += 1
                if self._calls <= WARM:
                    return work()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._result = [work()]
                self._graph = graph
            self._graph.replay()
        return self._result[0]
