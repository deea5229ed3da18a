"""How many threads numpy's and scipy's own BLAS may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """For many small factorizations: OpenBLAS's threads wait for each other longer than they work.

    PyTorch keeps its own.
    """
    controller = _controller()
    with nullcontext() if controller is None else controller.limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> Any:
    try:
        import scipy.linalg.cython_lapack  # noqa: F401  its library must be there to be found
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()
