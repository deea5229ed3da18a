"""Measure, certify and control the Lipschitz constant of convolutional networks.

Bounds are proved to be at least σ1, in floating point too; estimates promise nothing; exact is
an SVD at one input size. See ``bound``, ``estimate``, ``exact`` and ``lipschitz``.
"""

from lipbound.bounds import BOUNDS, bound
from lipbound.estimates import ESTIMATES, PowerIteration, estimate
from lipbound.geometry import Convolution, convolution
from lipbound.layers import lipschitz
from lipbound.symbol import symbol
from lipbound.toeplitz import exact

__version__ = "0.1.0"

__all__ = [
    "BOUNDS",
    "ESTIMATES",
    "Convolution",
    "PowerIteration",
    "bound",
    "convolution",
    "estimate",
    "exact",
    "lipschitz",
    "symbol",
]
