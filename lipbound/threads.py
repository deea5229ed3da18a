"""How many threads numpy's and scipy's own BLAS may use, and threads of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

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


def side_by_side(work: Callable[[slice], None], count: int, threads: int | None = None) -> None:
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
