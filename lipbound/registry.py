"""Look up a method by name and call it; errors list the valid names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import cache

from torch import Tensor

from lipbound.geometry import Layer, convolution
from lipbound.runtime import in_pieces

GEOMETRY = tuple(inspect.signature(convolution).parameters)[1:]


def call(
    table: Mapping[str, Callable[..., Tensor]],
    kind: str,
    method: str,
    layer: Layer,
    options: Mapping[str, object],
) -> Tensor:
    """Call ``table[method](layer, **options)`` after checking the method and the options."""
    if method not in table:
        raise unknown(f"{kind} method", method, table)
    known = _options(table[method])
    for name in options:
        if name not in known:
            raise TypeError(f"{method} has no option {name!r}; it takes {', '.join(known)}")
    return in_pieces(lambda: table[method](layer, **options))


def unknown(kind: str, name: object, table: Collection[str]) -> ValueError:
    """Return the error for a name that is not in the table, with a close name or all names.

    Example:
        >>> unknown("ball", "cube", ("linf", "l2"))
        ValueError("unknown ball 'cube'; choose one of: linf, l2")
    """
    close = get_close_matches(str(name), table, n=1)
    fix = f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(table)}"
    return ValueError(f"unknown {kind} {name!r}; {fix}")


@cache
def _options(method: Callable[..., Tensor]) -> dict[str, None]:
    """List the options of a method: its own, then the geometry of a bare kernel."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    own = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return dict.fromkeys([*own, *GEOMETRY])
