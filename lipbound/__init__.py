"""Measure, certify and control the Lipschitz constant of convolutional networks.

Bounds are proved to be at least σ1, in floating point too; a bracket is proved on both sides;
estimates promise nothing; exact is an SVD at one input size.
"""

__version__ = "0.1.0"

from lipbound.bounds import BOUNDS, Bracket, bound, bracket, brackets
from lipbound.certificates import certify
from lipbound.constrain import constrain, unconstrain
from lipbound.estimates import ESTIMATES, PowerIteration, estimate
from lipbound.geometry import Convolution, convolution
from lipbound.layers import lipschitz
from lipbound.network import Audit, audit
from lipbound.penalty import Penalty
from lipbound.rules import register_rule
from lipbound.symbol import symbol
from lipbound.toeplitz import exact

__all__ = [
    "BOUNDS",
    "ESTIMATES",
    "Audit",
    "Bracket",
    "Convolution",
    "Penalty",
    "PowerIteration",
    "audit",
    "bound",
    "bracket",
    "brackets",
    "certify",
    "constrain",
    "convolution",
    "estimate",
    "exact",
    "lipschitz",
    "register_rule",
    "symbol",
    "unconstrain",
]
