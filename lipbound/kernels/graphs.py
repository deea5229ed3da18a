"""Work that a GPU does again and again, replayed as a graph: no launch by launch from the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
WARM = 2  # calls before a capture: libraries choose their algorithms, caches fill


class Repeated(Generic[Result]):
    """One piece of work, the same at every call: on CUDA it is captured, then replayed.

    It must read and write its tensors where they lay at the capture, and never look at values.
    What cannot be captured is launched one by one as before, with a warning.

    Args:
        device: Where it runs; elsewhere than on CUDA it is simply called.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: list[Result] = []
        self._captures = device.type == "cuda"

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeated, (self.device,)  # a graph cannot be copied

    def __call__(self, work: Callable[[], Result]) -> Result:
        """What the work returns; tensors in it are overwritten by the next call."""
        # Looking for anomalies reads values.
        if (
            not self._captures
            or torch.cuda.is_current_stream_capturing()
            or torch.is_anomaly_enabled()
        ):
            return work()
        with torch.cuda.device(self.device):
            if self._graph is None:
                self._calls += 1
                if self._calls <= WARM or not self._capture(work):
                    return work()
            assert self._graph is not None
            self._graph.replay()
        return self._result[0]

    def _capture(self, work: Callable[[], Result]) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = [work()]
        except RuntimeError as error:
            self._captures, self._result = False, []
            warnings.warn(f"no CUDA graph ({str(error).splitlines()[0]})", stacklevel=2)
            return False
        self._graph = graph
        return True
