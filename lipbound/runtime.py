"""Memory, threads, devices, progress and time limits of long computations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from textwrap import shorten
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

SMALLER, LEAST = 8, 1 << 24
_divisor = 1  # divisor of piece sizes; a global, because a compiled graph may read it


def piece(size: int) -> int:
    """Size of a temporary tensor to hold at once: ``size``, or less after memory ran out."""
    return max(1, size // _divisor)


def ran_out(error: BaseException) -> bool:
    """Whether the error reports that memory ran out, on a GPU or on the CPU."""
    said = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in said)
    )


def in_pieces(run: Callable[[], T]) -> T:
    """Return ``run()``; each time memory runs out, try again with smaller pieces.

    Raises:
        MemoryError: If even the smallest pieces do not fit.
    """
    global _divisor
    if torch.compiler.is_compiling():
        return run()
    before = _divisor
    try:
        while True:
            try:
                return run()
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                first = str(error).strip().splitlines()[0][:160]
            if _divisor >= LEAST:
                raise MemoryError(
                    f"out of memory even with the smallest pieces ({first}); free memory, compute "
                    f"on the CPU (device='cpu', or layer.cpu()), or use method='lipbound'"
                )
            _divisor *= SMALLER
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        _divisor = before


_lock, _limits = Lock(), ExitStack()
_holders = 0


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit OpenBLAS to one thread, which is faster for many small factorizations.

    PyTorch keeps its own threads. The limit applies to the whole process: the first caller sets it,
    and the last caller to leave, in any thread, removes it.
    """
    global _holders
    with _lock:
        if _holders == 0:
            _limits.enter_context(_controller().limit(limits=1))
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                _limits.close()


@cache
def _controller() -> Any:
    import scipy.linalg.cython_lapack  # noqa: F401  loads the library
    from threadpoolctl import ThreadpoolController

    found, torchs = ThreadpoolController(), Path(torch.__file__).parent
    paths = [library["filepath"] for library in found.select(user_api="blas").info()]
    return found.select(filepath=[path for path in paths if torchs not in Path(path).parents])


def in_threads(work: Callable[[slice], None], count: int, threads: int | None = None) -> None:
    """Split ``count`` items into one slice per thread, and call ``work`` on each slice.

    The default is torch's number of threads. It is faster only where ``work`` releases Python's
    global lock, as the inner loops of NumPy and LAPACK do.
    """
    threads = min(threads or torch.get_num_threads(), count)
    if threads <= 1:
        work(slice(0, count))
        return
    ends = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, map(slice, ends[:-1], ends[1:])))


class Progress(Protocol):
    """Wrap a sequence to show progress: a bar on a terminal, nothing elsewhere."""

    def __call__(self, items: Sequence[T], what: str) -> Iterable[T]:
        """Return the same items, one by one.

        Args:
            items: Items to process.
            what: Description of the work, shown to the user.
        """


def silent(items: Sequence[T], what: str) -> Iterable[T]:
    """Show no progress."""
    return items


class OutOfTime(Exception):
    """Raised when the time limit has passed; results found before remain valid."""


_end: ContextVar[float] = ContextVar("end", default=math.inf)


@contextmanager
def within(minutes: float | None) -> Iterator[None]:
    """Stop searches inside after ``minutes``, with wider intervals; ``None`` sets no limit."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    token = _end.set(min(end, _end.get()))
    try:
        yield
    finally:
        _end.reset(token)


def time_is_up() -> bool:
    """Whether the time limit of :func:`within` has passed."""
    return time.monotonic() > _end.get()


def check_time() -> None:
    """Raise :class:`OutOfTime` if the time limit has passed."""
    if time_is_up():
        raise OutOfTime


def wide(dtype: torch.dtype, least: torch.dtype = torch.float32) -> torch.dtype:
    """The precision to compute in: ``dtype``, or ``least`` where that has more digits."""
    return torch.promote_types(dtype, least)


def widened(tensor: Tensor, least: torch.dtype = torch.float32) -> Tensor:
    """Convert the tensor to ``least``, unless its precision is higher."""
    return tensor.to(wide(tensor.dtype, least))


def pick_device(name: str | None = None) -> torch.device:
    """Return the device ``name``; by default a GPU if there is one, otherwise the CPU.

    Raises:
        ValueError: If the device is not available.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except Exception as error:
        here = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(
            f"device {name!r} is not available ({first_line(error)}); use {here}"
        ) from None
    return device


def read_together(tensors: Sequence[Tensor]) -> list[NDArray[np.float64]]:
    """The values of float64 tensors, which are copied from a device in one go."""
    if not tensors:
        return []
    first = tensors[0].device
    whole = torch.cat([tensor.to(first).flatten() for tensor in tensors]).cpu().numpy()
    cuts = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    parts = zip(np.split(whole, cuts), tensors, strict=True)
    return [values.reshape(tensor.shape) for values, tensor in parts]


def first_line(error: BaseException) -> str:
    """First line of an error message, or the error's type if the message is empty."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return shorten(line, 120, placeholder=" ...")
