"""How long work says how far it is, without knowing who looks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
