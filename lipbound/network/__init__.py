"""Audit and certify whole networks."""

from lipbound.network.accuracy import CertifiedAccuracy, certified_accuracy
from lipbound.network.audits import audit
from lipbound.network.certificates import certify
from lipbound.network.comparison import Comparison
from lipbound.network.findings import Audit
from lipbound.network.kernels import ordinary_kernels
from lipbound.network.rules import register_rule
from lipbound.network.rules.rounding import register_rounding

__all__ = [
    "Audit",
    "CertifiedAccuracy",
    "Comparison",
    "audit",
    "certified_accuracy",
    "certify",
    "ordinary_kernels",
    "register_rounding",
    "register_rule",
]
