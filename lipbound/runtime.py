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
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

SMALLER, LEAST = 8, 1 << 24
_divisor = 1  # what pieces are divided by; a global, as a compiled graph may read it


def piece(size: int) -> int:
    """How much of a temporary to hold at once: ``size``, or less after memory ran out."""
    return max(1, size // _divisor)


def ran_out(error: BaseException) -> bool:
    """Whether it says that there is no memory left, on a GPU or not."""
    said = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in said)
    )


def in_pieces(run: Callable[[], T]) -> T:
    """The result of ``run``, tried again with smaller pieces each time memory runs out.

    Raises:
        MemoryError: If the smallest do not fit either, saying what to do.
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
                    f"out of memory, in the smallest pieces too ({first}); free some, compute on "
                    f"the CPU (device='cpu', or layer.cpu()), or ask for method='lipbound'"
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
    """For many small factorizations: OpenBLAS's threads wait for each other longer than they work.

    PyTorch keeps its own. The limit is the process's: the first who asks sets it, and the last who
    leaves, in whatever thread, takes it away.
    """
    global _holders
    controller = _controller()
    if controller is None:
        yield
        return
    with _lock:
        if _holders == 0:
            _limits.enter_context(controller.limit(limits=1))
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
    try:
        import scipy.linalg.cython_lapack  # noqa: F401  its library must be there to be found
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    found, torchs = ThreadpoolController(), Path(torch.__file__).parent
    paths = [library["filepath"] for library in found.select(user_api="blas").info()]
    return found.select(filepath=[path for path in paths if torchs not in Path(path).parents])


def in_threads(work: Callable[[slice], None], count: int, threads: int | None = None) -> None:
    """``work`` on slices that make up ``count`` things, each in a thread; as many as torch's.

    It pays where ``work`` leaves Python's lock alone, as numpy's and LAPACK's inner loops do.
    """
    threads = min(threads or torch.get_num_threads(), count)
    if threads <= 1:
        work(slice(0, count))
        return
    ends = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, map(slice, ends[:-1], ends[1:])))


class Progress(Protocol):
    """Wraps what is worked through; a bar on a terminal, nothing elsewhere."""

    def __call__(self, items: Sequence[T], what: str) -> Iterable[T]:
        """The same items, one by one.

        Args:
            items: To be worked through.
            what: What is being done, for a person.
        """


def silent(items: Sequence[T], what: str) -> Iterable[T]:
    """Show nothing."""
    return items


class OutOfTime(Exception):
    """The time that was given is used up; what is known by then is still true."""


_end: ContextVar[float] = ContextVar("end", default=math.inf)


@contextmanager
def within(minutes: float | None) -> Iterator[None]:
    """Let searches inside stop after so many minutes, with wider intervals; ``None`` for never."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    token = _end.set(min(end, _end.get()))
    try:
        yield
    finally:
        _end.reset(token)


def time_is_up() -> bool:
    """Whether the time of the innermost :func:`within` has passed."""
    return time.monotonic() > _end.get()


def check_time() -> None:
    """Stop what is searched for where the time has passed.

    Raises:
        OutOfTime: Then.
    """
    if time_is_up():
        raise OutOfTime


def wide(dtype: torch.dtype, least: torch.dtype = torch.float32) -> torch.dtype:
    """The precision to compute in: ``dtype``, or ``least`` where that has more digits."""
    return torch.promote_types(dtype, least)


def widened(tensor: Tensor, least: torch.dtype = torch.float32) -> Tensor:
    """The tensor in float32 at least, or in ``least``."""
    return tensor.to(wide(tensor.dtype, least))


def pick_device(name: str | None = None) -> torch.device:
    """The device called ``name``; without a name a GPU if there is one, else the CPU.

    Raises:
        ValueError: If there is no such device here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except Exception as error:
        here = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"device {name!r} is not here ({first_line(error)}); use {here}") from None
    return device


def first_line(error: BaseException) -> str:
    """What an error says, or is, in a line that can stand in another sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
