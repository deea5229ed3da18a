"""When a device runs out of memory: smaller pieces, then one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

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
