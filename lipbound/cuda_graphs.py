"""CUDA graphs and streams, which repeat GPU work without waiting for the host.

A captured function must keep its tensors at the addresses of the capture, and must not read their
values on the host. Weights may change in place. If they move, their owner must capture a new graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock, local
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
WARM = 3  # calls before a capture, in which libraries choose algorithms and code is compiled


class _Streams(local):
    """Streams of a thread, per device, so that no thread works on those of another."""

    def __init__(self) -> None:
        self.work: dict[int, list[torch.cuda.Stream]] = {}  # streams stay valid
        self.captures: dict[int, torch.cuda.Stream] = {}


_streams = _Streams()
_capturing = RLock()  # a capture waits for the device, which another capture forbids


def captured(work: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture ``work``; return its graph and its result, whose tensors every replay overwrites.

    The work must run on the current device. Graphs of one memory ``pool`` must not run at the same
    time. A graph that was captured earlier may use the memory of the results of a later one, so
    results last until another graph of the pool is replayed. A pool whose graphs are all gone takes
    no others. Graphs of different pools may run at the same time.
    """
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    side = _streams.captures.setdefault(here.device_index, torch.cuda.Stream())
    pool = pool or torch.cuda.graph_pool_handle()
    with _capturing:
        try:
            with _own_workspaces(), _capture(graph, pool, side):
                result = work()
        except BaseException:
            _end_capture(pool, side)
            torch.cuda.set_stream(here)  # a capture that fails at its end leaves the other current
            raise
    return graph, result


def _capture(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.graph:
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


def _end_capture(pool: Any, stream: torch.cuda.Stream) -> None:
    """Let PyTorch forget a capture that failed, as far as it has not done so itself.

    Otherwise memory stays reserved for the pool, and random numbers cannot be drawn until a later
    capture ends, so that there is one here.
    """
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    with (
        suppress(RuntimeError),
        _capture(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), stream),
    ):
        torch.zeros(1, device=stream.device)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let a graph have cuBLAS workspaces in its own memory pool.

    PyTorch keeps a workspace for every stream. Graphs captured on one stream would share it, and
    overwrite each other's numbers when they run at the same time (pytorch/pytorch#193402).
    """
    clear = torch._C._cuda_clearCublasWorkspaces
    clear()
    try:
        yield
    finally:
        clear()


def graph_pool(device: torch.device) -> Any:
    """A memory pool for :func:`captured`; ``None`` on devices without graphs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def device_memory(device: torch.device) -> int:
    """Bytes of memory of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def warn_uncaptured(error: RuntimeError) -> None:
    """Say that work is launched kernel by kernel, and why."""
    reason = str(error).splitlines()[0]
    warnings.warn(
        f"cannot capture a CUDA graph ({reason}); the work is launched kernel by kernel, which is "
        f"slower",
        stacklevel=3,
    )


class Repeated(Generic[Result]):
    """Run the same work at every call: on CUDA it is captured once and then replayed.

    Work that cannot be captured is launched kernel by kernel, with a warning.

    Args:
        device: Device the work runs on. Without CUDA the work is simply called.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._calls = 0
        self._captured: tuple[torch.cuda.CUDAGraph, Result] | None = None
        self._captures = device.type == "cuda"

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeated, (self.device,)  # a graph cannot be copied

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``. The next call overwrites its tensors."""
        # Anomaly detection reads values, which a capture forbids.
        if (
            not self._captures
            or torch.cuda.is_current_stream_capturing()
            or torch.is_anomaly_enabled()
        ):
            return work()
        with torch.cuda.device(self.device):
            if self._captured is None:
                self._calls += 1
                if self._calls < WARM:
                    return work()
                try:
                    self._captured = captured(work)
                except RuntimeError as error:
                    self._captures = False
                    warn_uncaptured(error)
                    return work()
            graph, result = self._captured
            graph.replay()
        return result


class Replay:
    """Keep one CUDA graph for every key and every shape of the arguments."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Any] = {}  # valid while the captured tensors do not move

    def __call__(
        self,
        key: Hashable,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: list[Tensor],
        keeps: Iterable[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Return ``function(*inputs)``, computed by replaying its graph.

        Args:
            key: Values that the function depends on besides its arguments.
            function: Function from tensors to tensors.
            inputs: Arguments of the function.
            keeps: Tensors that the function changes; they are restored after the capture.
        """
        whole = (key, *((t.shape, t.stride(), t.dtype) for t in inputs))
        with torch.cuda.device(inputs[0].device):
            if whole not in self._graphs:
                self._graphs[whole] = _warmed(function, inputs, list(keeps))
            static, (graph, results) = self._graphs[whole]
            for mine, given in zip(static, inputs, strict=True):
                mine.copy_(given)
            graph.replay()
            return tuple(result.clone() for result in results)


def _warmed(
    function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], keeps: list[Tensor]
) -> Any:
    """Warm up and capture; return copies of the inputs and the graph that reads them."""
    static = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
              for t in inputs]  # fmt: skip
    kept = [t.clone() for t in keeps]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            function(*static)
    torch.cuda.current_stream().wait_stream(side)
    found = captured(lambda: function(*static))
    for tensor, before in zip(keeps, kept, strict=True):
        tensor.copy_(before)
    return static, found


def run(
    replay: Replay | None, key: Hashable, function: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return ``function(*inputs)``, replayed from a graph if ``replay`` is given."""
    return function(*inputs) if replay is None else replay(key, function, inputs)


def chunk(count: int) -> int:
    """Choose how many of ``count`` iterations to run at once: about ten, with little excess.

    Example:
        >>> chunk(201), chunk(21), chunk(3)
        (7, 7, 3)
    """
    return min(range(6, 15), key=lambda n: (-(-count // n) * n, -n)) if count > 14 else count


def on_streams(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run all functions and return their results; on CUDA each runs on its own stream."""
    if len(works) < 2 or not torch.cuda.is_initialized() or torch.compiler.is_compiling():
        return [work() for work in works]
    here = torch.cuda.current_stream()
    own = _streams.work.setdefault(here.device_index, [])
    own += [torch.cuda.Stream() for _ in works[len(own) + 1 :]]
    results, started = [], []
    try:
        for stream, work in zip(own, works[1:], strict=False):
            stream.wait_stream(here)
            started.append(stream)
            with torch.cuda.stream(stream):
                results.append(work())
        first = works[0]()  # on the current stream, to wait for one stream less
    finally:  # after a failure too: what is freed then may still be in use
        for stream in started:
            here.wait_stream(stream)
    return [first, *results]
