"""How long work says how far it is, without knowing who looks, and when it has to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


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
