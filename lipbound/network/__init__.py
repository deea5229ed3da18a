"""Audit and certify whole networks."""

from lipbound.network.audits import audit
from lipbound.network.certificates import certify
from lipbound.network.findings import Audit
from lipbound.network.rules import register_rule

__all__ = ["Audit", "audit", "certify", "register_rule"]
