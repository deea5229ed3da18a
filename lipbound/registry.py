"""Look a method up by name and call it, with errors that say what there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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
    """``table[method](layer, **options)``, an unknown method or option refused by name."""
    if method not in table:
        close = get_close_matches(str(method), table, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {kind} method {method!r}; there are {', '.join(table)}{hint}")
    known = _options(table[method])
    for name in options:
        if name not in known:
            raise TypeError(f"{method} has no option {name!r}; it takes {', '.join(known)}")
    return in_pieces(lambda: table[method](layer, **options))


@cache
def _options(method: Callable[..., Tensor]) -> dict[str, None]:
    """What a method takes besides the layer: its own options, then a bare kernel's geometry."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    own = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return dict.fromkeys([*own, *GEOMETRY])
