"""Triton kernels for the peaks of row energies of many layers in one launch, in float32.

Tables (:mod:`lipbound.penalty.layout`) describe the layers, so one launch handles all layers with
the same pairs of meeting taps and any number of channels. Tuples of compile-time indices unroll a
kernel's taps completely: each weight is loaded once, and its products are formed in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lipbound.penalty.layout import (
    CHANNEL_STRIDE,
    CHANNELS,
    COUNT,
    EPSILON,
    FIELDS,
    FIRST,
    FLOATS,
    GAMMA,
    GROUPS,
    LIMIT,
    LOG_CONSTANT,
    OFFSETS,
    ROW_COUNT,
    ROW_STRIDE,
    TINY,
    VARIANCE,
    WEIGHT,
)


@triton.jit
def overflowed(peak):
    """A row whose squares overflow has ∞ − ∞, no number, at every point, and none is a maximum."""
    return tl.where(peak == float("-inf"), float("inf"), peak)


@triton.jit
def fours(place, index, mask):
    """Four neighbours of every lane, as four tensors; ``index`` is ``(LANES, 4)``."""
    x = tl.load(place + index, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def peaks_kernel(
    programs, fields, offsets, table, peaks, points, POINTS,
    TAPS: tl.constexpr, LAGS: tl.constexpr,
    STARTS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Lag sums, cosine transform and maximum of ROWS rows of one layer."""
    program = tl.program_id(0)
    field = fields + tl.load(programs + 2 * program) * FIELDS
    first = tl.load(programs + 2 * program + 1)
    weight = tl.load(field + WEIGHT).to(tl.pointer_type(DTYPE))
    row_stride = tl.load(field + ROW_STRIDE)
    channel_stride = tl.load(field + CHANNEL_STRIDE)
    channels = tl.load(field + CHANNELS).to(tl.int32)
    limit = tl.load(field + LIMIT)
    taps = offsets + tl.load(field + OFFSETS)
    row = first + tl.arange(0, ROWS)[None, :]
    row_mask = row < tl.load(field + ROW_COUNT)

    sums = ()
    for _ in tl.static_range(LAGS):
        sums = sums + (tl.zeros([BLOCK, ROWS], tl.float32),)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)[:, None]
        mask = (channel < channels) & row_mask & (row.to(tl.int64) * channels + channel < limit)
        place = weight + (row * row_stride + channel * channel_stride)
        values = ()
        for tap in tl.static_range(TAPS):
            value = tl.load(place + tl.load(taps + tap), mask=mask, other=0.0)
            values = values + (value.to(tl.float32),)
        added = ()
        for lag in tl.static_range(LAGS):
            total = sums[lag]
            for pair in tl.static_range(tl.constexpr(STARTS[lag]), tl.constexpr(STARTS[lag + 1])):
                total += values[LEFT[pair]] * values[RIGHT[pair]]
            added = added + (total,)
        sums = added

    out = tl.load(field + FIRST) + first + tl.arange(0, ROWS)
    keep = first + tl.arange(0, ROWS) < tl.load(field + ROW_COUNT)
    if LAGS == 1:
        tl.store(peaks + out, tl.sum(sums[0], axis=0), mask=keep)
    else:
        lag_sums = ()
        for lag in tl.static_range(LAGS):
            total = tl.sum(sums[lag], axis=0)[None, :]
            lag_sums = lag_sums + (total if lag == 0 else 2 * total,)  # the lags l and −l
        best = tl.full([SPAN, ROWS], float("-inf"), tl.float32)
        where = tl.zeros([SPAN, ROWS], tl.int32)
        for start in range(0, POINTS, SPAN):
            point = start + tl.arange(0, SPAN)[:, None]
            energy = tl.zeros([SPAN, ROWS], tl.float32)
            for lag in tl.static_range(LAGS):
                cosine = tl.load(table + lag * POINTS + point, mask=point < POINTS, other=0.0)
                energy += cosine * lag_sums[lag]
            better = (energy > best) & (point < POINTS)
            best = tl.where(better, energy, best)
            where = tl.where(better, point, where)
        peak = tl.max(best, axis=0)
        here = tl.where(best == peak[None, :], where, POINTS)  # the first of equals
        tl.store(peaks + out, overflowed(peak), mask=keep)
        tl.store(points + out, tl.min(here, axis=0), mask=keep)


@triton.jit
def flat_peaks_kernel(
    programs, fields, table, peaks, points, POINTS,
    TAPS: tl.constexpr, LAGS: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    DTYPE: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """As ``peaks_kernel`` for one contiguous row, read four neighbours at a time.

    A pair of taps at one lag is a fixed shift in memory, SHIFT[lag], from those taps a that the
    bits of MASK[lag] name. So products x[n] x[n + shift] are summed lane by lane, and since STEP
    is a multiple of TAPS a lane always sees the same taps: which lag its sums belong to, and
    which of them straddle two channels and count for nothing, is decided once, at the end.
    """
    program = tl.program_id(0)
    field = fields + tl.load(programs + 2 * program) * FIELDS
    row = tl.load(programs + 2 * program + 1)
    place = tl.load(field + WEIGHT).to(tl.pointer_type(DTYPE)) + row * tl.load(field + ROW_STRIDE)
    place = tl.multiple_of(place, 16)
    length = tl.multiple_of((tl.load(field + CHANNELS) * TAPS).to(tl.int32), 4)
    lane = tl.arange(0, LANES)
    index = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    used = (lane * 4 < STEP)[:, None]
    sums = ()
    for _ in tl.static_range(4 * TAPS):
        sums = sums + (tl.zeros([LANES], tl.float32),)
    for start in range(0, length, STEP):
        near = ()
        for vector in tl.static_range((TAPS + 6) // 4):
            here = index + (start + 4 * vector)
            near = near + fours(place, here, used & (here < length))
        added = ()
        for i in tl.static_range(4):
            for shift in tl.static_range(TAPS):
                added = added + (sums[i * TAPS + shift] + near[i] * near[i + shift],)
        sums = added
    lag_sums = ()
    for lag in tl.static_range(LAGS):
        total = tl.zeros([LANES], tl.float32)
        for i in tl.static_range(4):
            counts = (MASK[lag] >> ((lane * 4 + i) % TAPS)) & 1
            total += tl.where(counts != 0, sums[i * TAPS + SHIFT[lag]], 0.0)
        whole = tl.sum(total, axis=0)
        lag_sums = lag_sums + (whole if lag == 0 else 2 * whole,)

    best = tl.full([SPAN], float("-inf"), tl.float32)
    where = tl.zeros([SPAN], tl.int32)
    for start in range(0, POINTS, SPAN):
        point = start + tl.arange(0, SPAN)
        energy = tl.zeros([SPAN], tl.float32)
        for lag in tl.static_range(LAGS):
            cosine = tl.load(table + lag * POINTS + point, mask=point < POINTS, other=0.0)
            energy += cosine * lag_sums[lag]
        better = (energy > best) & (point < POINTS)
        best = tl.where(better, energy, best)
        where = tl.where(better, point, where)
    peak = tl.max(best, axis=0)
    out = tl.load(field + FIRST) + row
    tl.store(peaks + out, overflowed(peak))
    tl.store(points + out, tl.min(tl.where(best == peak, where, POINTS), axis=0))


@triton.jit
def any_peaks_kernel(
    programs, fields, offsets, table, left, right, peaks, points, POINTS, LAGS,
    DTYPE: tl.constexpr, LAG_PAD: tl.constexpr, PAIR_PAD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """As ``peaks_kernel``, one row a program, the pairs of taps read from tables.

    For kernels too large to unroll; those have few channels, or few rows.
    """
    program = tl.program_id(0)
    field = fields + tl.load(programs + 2 * program) * FIELDS
    row = tl.load(programs + 2 * program + 1)
    channel_stride = tl.load(field + CHANNEL_STRIDE)
    place = tl.load(field + WEIGHT).to(tl.pointer_type(DTYPE)) + row * tl.load(field + ROW_STRIDE)
    channels = tl.load(field + CHANNELS).to(tl.int32)
    taps = offsets + tl.load(field + OFFSETS)
    lag = tl.arange(0, LAG_PAD)
    pair = lag[:, None] * PAIR_PAD + tl.arange(0, PAIR_PAD)[None, :]
    inside = (lag < LAGS)[:, None]
    one = tl.load(left + pair, mask=inside, other=-1)
    meets = one >= 0
    first = tl.load(taps + one, mask=meets, other=0)
    second = tl.load(taps + tl.load(right + pair, mask=meets, other=0), mask=meets, other=0)
    sums = tl.zeros([LAG_PAD, PAIR_PAD], tl.float32)
    for start in range(0, channels, 4):
        for more in tl.static_range(4):  # their loads overlap
            mask = meets & (start + more < channels)
            x = tl.load(place + first, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(place + second, mask=mask, other=0.0).to(tl.float32)
            sums += x * y
            place += channel_stride
    lag_sums = tl.sum(sums, axis=1) * tl.where(lag == 0, 1.0, 2.0)

    best = tl.full([SPAN], float("-inf"), tl.float32)
    where = tl.zeros([SPAN], tl.int32)
    for start in range(0, POINTS, SPAN):
        point = start + tl.arange(0, SPAN)
        within = point < POINTS
        cosines = tl.load(
            table + lag[:, None] * POINTS + point[None, :], mask=inside & within[None, :], other=0.0
        )
        energy = tl.sum(cosines * lag_sums[:, None], axis=0)
        better = (energy > best) & within
        best = tl.where(better, energy, best)
        where = tl.where(better, point, where)
    peak = tl.max(best, axis=0)
    out = tl.load(field + FIRST) + row
    tl.store(peaks + out, overflowed(peak))
    tl.store(points + out, tl.min(tl.where(best == peak, where, POINTS), axis=0))


@triton.jit
def totals_kernel(
    fields, floats, peaks, logs, coefficients, winners, tops, log_floor,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One factor's logarithm, and what its gradient is multiplied by.

    Convolutions: ½ log Σ p of the largest group. BatchNorm (no groups): log max|γ|/√(var + ε).
    """
    factor = tl.program_id(0)
    field = fields + factor * FIELDS
    constants = floats + factor * FLOATS
    rows = tl.load(field + ROW_COUNT).to(tl.int32)
    groups = tl.load(field + GROUPS).to(tl.int32)
    first = tl.load(field + FIRST)
    gamma_at = tl.load(field + GAMMA)
    variance_at = tl.load(field + VARIANCE)
    gamma = gamma_at.to(tl.pointer_type(tl.float32))
    variance = variance_at.to(tl.pointer_type(tl.float32))
    epsilon = tl.load(constants + EPSILON)
    count = tl.load(constants + COUNT)
    tiny = tl.load(constants + TINY)
    floor = tl.load(log_floor)
    lane = tl.arange(0, BLOCK)
    if groups == 0:
        top = 0.0
        for start in range(0, rows, BLOCK):
            mask = start + lane < rows
            v = tl.load(variance + start + lane, mask=mask, other=1.0).to(tl.float32)
            g = tl.full([BLOCK], 1.0, tl.float32)
            if gamma_at != 0:
                g = tl.load(gamma + start + lane, mask=mask, other=0.0).to(tl.float32)
            gain = tl.where(mask, tl.div_rn(tl.abs(g), tl.sqrt_rn(v + epsilon)), 0.0)
            top = tl.maximum(top, tl.max(gain, axis=0))
        ties = 0.0
        for start in range(0, rows, BLOCK):
            mask = start + lane < rows
            v = tl.load(variance + start + lane, mask=mask, other=1.0).to(tl.float32)
            g = tl.full([BLOCK], 1.0, tl.float32)
            if gamma_at != 0:
                g = tl.load(gamma + start + lane, mask=mask, other=0.0).to(tl.float32)
            gain = tl.where(mask, tl.div_rn(tl.abs(g), tl.sqrt_rn(v + epsilon)), 0.0)
            ties += tl.sum(tl.where(mask & (gain == top), 1.0, 0.0), axis=0)
        log = tl.log(tl.maximum(top, tiny))
        active = (log > floor) & (top > tiny)
        tl.store(logs + factor, count * tl.maximum(log, floor))
        tl.store(coefficients + factor, tl.where(active, count / ties, 0.0))
        tl.store(tops + factor, top)
    else:
        largest = -1.0
        winner = 0
        if groups == 1:
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, rows, BLOCK):
                mask = start + lane < rows
                p = tl.load(peaks + first + start + lane, mask=mask, other=0.0)
                if gamma_at != 0:
                    g = tl.load(gamma + start + lane, mask=mask, other=0.0).to(tl.float32)
                    v = tl.load(variance + start + lane, mask=mask, other=1.0).to(tl.float32)
                    p *= g * g / (v + epsilon)
                total += tl.where(p == p, p, float("inf"))  # 0 · ∞ is not for tl.max to skip
            largest = tl.sum(total, axis=0)
        else:
            each = rows // groups
            for start in range(0, groups, TILE):
                group = start + tl.arange(0, TILE)[:, None]
                total = tl.zeros([TILE, TILE], tl.float32)
                for inner in range(0, each, TILE):
                    column = inner + tl.arange(0, TILE)[None, :]
                    mask = (group < groups) & (column < each)
                    row = group * each + column
                    p = tl.load(peaks + first + row, mask=mask, other=0.0)
                    if gamma_at != 0:
                        g = tl.load(gamma + row, mask=mask, other=0.0).to(tl.float32)
                        v = tl.load(variance + row, mask=mask, other=1.0).to(tl.float32)
                        p *= g * g / (v + epsilon)
                    total += tl.where(p == p, p, float("inf"))
                sums = tl.sum(total, axis=1)
                inside = start + tl.arange(0, TILE) < groups
                sums = tl.where(inside, sums, -1.0)
                top = tl.max(sums, axis=0)
                place = tl.where(sums == top, start + tl.arange(0, TILE), groups)
                if top > largest:
                    largest = top
                    winner = tl.min(place, axis=0)
        largest += tiny
        log = 0.5 * tl.log(largest) + tl.load(constants + LOG_CONSTANT)
        tl.store(logs + factor, count * tl.maximum(log, floor))
        tl.store(coefficients + factor, tl.where(log > floor, count / largest, 0.0))
        tl.store(winners + factor, winner)


@triton.jit
def sum_kernel(logs, total, SIZE, BLOCK: tl.constexpr):
    """Σ logs, in one program and so in one order."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        sums += tl.load(logs + start + lane, mask=start + lane < SIZE, other=0.0)
    tl.store(total, tl.sum(sums, axis=0))
