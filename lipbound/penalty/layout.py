"""Columns of the tables that describe the layers to the fused kernels, one line per factor."""

from __future__ import annotations

import triton.language as tl

# Integers: addresses, strides and counts, in elements.
WEIGHT = tl.constexpr(0)
GRAD = tl.constexpr(1)
ROW_STRIDE = tl.constexpr(2)
CHANNEL_STRIDE = tl.constexpr(3)
CHANNELS = tl.constexpr(4)
LIMIT = tl.constexpr(5)  # rows × channels, or fewer where rows are split anywhere
FIRST = tl.constexpr(6)  # index of its first row in the results
OFFSETS = tl.constexpr(7)  # index of its first tap's offset in their table
ROW_COUNT = tl.constexpr(8)
GROUPS = tl.constexpr(9)  # 0 for a BatchNorm
GAMMA = tl.constexpr(10)
VARIANCE = tl.constexpr(11)
GAMMA_GRAD = tl.constexpr(12)
FIELDS = tl.constexpr(13)

# Floats.
LOG_CONSTANT = tl.constexpr(0)
COUNT = tl.constexpr(1)
EPSILON = tl.constexpr(2)
TINY = tl.constexpr(3)
FLOATS = tl.constexpr(4)
