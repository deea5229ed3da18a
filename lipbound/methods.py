"""Look a method up by name and call it, with errors that say what there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from torch import Tensor

from lipbound.geometry import Layer, convolution
from lipbound.memory import in_pieces

GEOMETRY = tuple(inspect.signature(convolution).parameters)[1:]


def call(
    table: Mapping[str, Callable[..., Tensor]],
    kind: str,
    method: str,
    layer: Layer,
    options: Mapping[str, object],
) -> Tensor:
    """``table[method](layer, **options)``, an unknown method or option refused by name."""
    if method not in table:
        close = get_close_matches(str(method), table, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {kind} method {method!r}; there are {', '.join(table)}{hint}")
    own = [
        name
        for name, parameter in inspect.signature(table[method]).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ][1:]
    known = dict.fromkeys([*own, *GEOMETRY])
    for name in options:
        if name not in known:
            raise TypeError(f"{method} has no option {name!r}; it takes {', '.join(known)}")
    return in_pieces(lambda: table[method](layer, **options))
