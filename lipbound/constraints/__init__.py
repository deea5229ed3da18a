"""Keep the norm of a layer below a number while it trains."""

from lipbound.constraints.norm_limit import constrain, unconstrain

__all__ = ["constrain", "unconstrain"]
