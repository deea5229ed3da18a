"""Measure, certify and control the Lipschitz constant of convolutional networks.

A bound is proved to be at least σ1; rounding errors are included in the proof. A bracket is proved
on both sides. An estimate carries no guarantee. ``exact`` computes an SVD at one input size.
"""

__version__ = "0.2.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipbound.bounds import (
        BOUNDS,
        Bracket,
        bound,
        bracket,
        brackets,
        lipschitz,
        release_memory,
    )
    from lipbound.constraints import constrain, unconstrain
    from lipbound.estimates import ESTIMATES, PowerIteration, estimate
    from lipbound.geometry import Convolution, convolution
    from lipbound.network import (
        Audit,
        CertifiedAccuracy,
        Comparison,
        audit,
        certified_accuracy,
        certify,
        ordinary_kernels,
        register_rounding,
        register_rule,
    )
    from lipbound.penalty import Penalty
    from lipbound.spectra import Spectrum, spectrum
    from lipbound.symbols import symbol
    from lipbound.toeplitz import exact

__all__ = [
    "BOUNDS",
    "ESTIMATES",
    "Audit",
    "Bracket",
    "CertifiedAccuracy",
    "Comparison",
    "Convolution",
    "Penalty",
    "PowerIteration",
    "Spectrum",
    "audit",
    "bound",
    "bracket",
    "brackets",
    "certified_accuracy",
    "certify",
    "constrain",
    "convolution",
    "estimate",
    "exact",
    "lipschitz",
    "ordinary_kernels",
    "register_rounding",
    "register_rule",
    "release_memory",
    "spectrum",
    "symbol",
    "unconstrain",
]

_HOMES = {
    "bounds": (
        "BOUNDS",
        "Bracket",
        "bound",
        "bracket",
        "brackets",
        "lipschitz",
        "release_memory",
    ),
    "constraints": ("constrain", "unconstrain"),
    "estimates": ("ESTIMATES", "PowerIteration", "estimate"),
    "geometry": ("Convolution", "convolution"),
    "network": (
        "Audit",
        "CertifiedAccuracy",
        "Comparison",
        "audit",
        "certified_accuracy",
        "certify",
        "ordinary_kernels",
        "register_rounding",
        "register_rule",
    ),
    "penalty": ("Penalty",),
    "spectra": ("Spectrum", "spectrum"),
    "symbols": ("symbol",),
    "toeplitz": ("exact",),
}


if not TYPE_CHECKING:  # type checkers should still report unknown names

    def __getattr__(name: str) -> Any:
        """Import a name on first use, so that ``lipbound --help`` need not load PyTorch."""
        if name in _HOMES:
            return import_module(f"lipbound.{name}")
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = found = getattr(import_module(f"lipbound.{home}"), name)
                return found
        raise AttributeError(f"module 'lipbound' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", *_HOMES, *__all__})
