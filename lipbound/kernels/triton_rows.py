"""The row energies of :mod:`lipbound.kernels.rows` for many layers in one launch, in Triton.

Layers are told apart by tables of addresses, so one launch serves every layer whose taps meet
alike, whatever its channels; all arithmetic is float32. A tile is ``(BLOCK channels, ROWS rows)``.
The tuples of compile-time indices unroll a kernel's taps completely: each weight is loaded once
and meets its partners in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the integer table, one line per factor.
WEIGHT, GRAD, ROW_STRIDE, CHANNEL_STRIDE, CHANNELS, LIMIT, FIRST, OFFSETS = range(8)
ROWS_, GROUPS, GAMMA, VARIANCE, GAMMA_GRAD = range(8, 13)
FIELDS = 13
# Columns of the float table.
LOG_CONSTANT, COUNT, EPSILON, TINY = range(4)
FLOATS = 4


@triton.jit
def peaks_kernel(
    programs, fields, offsets, table, peaks, points, POINTS,
    TAPS: tl.constexpr, LAGS: tl.constexpr,
    STARTS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Lag sums, cosine transform and maximum of ROWS rows of one layer."""
    program = tl.program_id(0)
    field = fields + tl.load(programs + 2 * program) * 13
    first = tl.load(programs + 2 * program + 1)
    weight = tl.load(field).to(tl.pointer_type(DTYPE))
    row_stride = tl.load(field + 2)
    channel_stride = tl.load(field + 3)
    channels = tl.load(field + 4).to(tl.int32)
    limit = tl.load(field + 5)
    taps = offsets + tl.load(field + 7)
    row = first + tl.arange(0, ROWS)[None, :]
    row_mask = row < tl.load(field + 8)

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

    out = tl.load(field + 6) + first + tl.arange(0, ROWS)
    keep = first + tl.arange(0, ROWS) < tl.load(field + 8)
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
        tl.store(peaks + out, peak, mask=keep)
        tl.store(points + out, tl.min(here, axis=0), mask=keep)


@triton.jit
def gradient_kernel(
    programs, fields, floats, offsets, table, points, coefficients, winners, scale, POINTS,
    TAPS: tl.constexpr, LAGS: tl.constexpr,
    STARTS: tl.constexpr, OTHER: tl.constexpr, LAG: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add each row's share of the gradient, coefficient · K C(ω*), to the layer's ``.grad``."""
    program = tl.program_id(0)
    factor = tl.load(programs + 2 * program)
    first = tl.load(programs + 2 * program + 1)
    field = fields + factor * 13
    address = tl.load(field + 1)
    share = tl.load(coefficients + factor) * tl.load(scale)
    if (address != 0) & (share != 0.0):
        weight = tl.load(field).to(tl.pointer_type(DTYPE))
        grad = address.to(tl.pointer_type(DTYPE))
        row_stride = tl.load(field + 2)
        channel_stride = tl.load(field + 3)
        channels = tl.load(field + 4).to(tl.int32)
        limit = tl.load(field + 5)
        taps = offsets + tl.load(field + 7)
        rows = tl.load(field + 8)
        groups = tl.load(field + 9)
        row = first + tl.arange(0, ROWS)[None, :]
        row_mask = row < rows
        shares = tl.where(row // (rows // groups) == tl.load(winners + factor), share, 0.0)
        if tl.load(field + 10) != 0:
            gamma = tl.load(field + 10).to(tl.pointer_type(tl.float32))
            variance = tl.load(field + 11).to(tl.pointer_type(tl.float32))
            g = tl.load(gamma + row, mask=row_mask, other=0.0)
            v = tl.load(variance + row, mask=row_mask, other=1.0).to(tl.float32)
            shares *= g * g / (v + tl.load(floats + factor * 4 + 2))
        cosines = ()
        if LAGS > 1:
            point = tl.load(points + tl.load(field + 6) + row, mask=row_mask, other=0)
            for lag in tl.static_range(LAGS):
                cosines = cosines + (shares * tl.load(table + lag * POINTS + point),)
        for start in range(0, channels, BLOCK):
            channel = start + tl.arange(0, BLOCK)[:, None]
            mask = (channel < channels) & row_mask & (row.to(tl.int64) * channels + channel < limit)
            shift = row * row_stride + channel * channel_stride
            values = ()
            for tap in tl.static_range(TAPS):
                value = tl.load(weight + shift + tl.load(taps + tap), mask=mask, other=0.0)
                values = values + (value.to(tl.float32),)
            for tap in tl.static_range(TAPS):
                place = grad + shift + tl.load(taps + tap)
                total = tl.load(place, mask=mask, other=0.0).to(tl.float32)
                if LAGS == 1:
                    total += shares * values[tap]
                else:
                    for pair in tl.static_range(
                        tl.constexpr(STARTS[tap]), tl.constexpr(STARTS[tap + 1])
                    ):
                        total += cosines[LAG[pair]] * values[OTHER[pair]]
                tl.store(place, total.to(DTYPE), mask=mask)


@triton.jit
def fours(place, index, mask):
    """Four neighbours of every lane, as four tensors; ``index`` is ``(LANES, 4)``."""
    x = tl.load(place + index, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


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
    field = fields + tl.load(programs + 2 * program) * 13
    row = tl.load(programs + 2 * program + 1)
    place = tl.load(field).to(tl.pointer_type(DTYPE)) + row * tl.load(field + 2)
    place = tl.multiple_of(place, 16)
    length = tl.multiple_of((tl.load(field + 4) * TAPS).to(tl.int32), 4)
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
    out = tl.load(field + 6) + row
    tl.store(peaks + out, peak)
    tl.store(points + out, tl.min(tl.where(best == peak, where, POINTS), axis=0))


@triton.jit
def flat_gradient_kernel(
    programs, fields, floats, table, points, coefficients, winners, scale, POINTS,
    TAPS: tl.constexpr, LAGS: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    DTYPE: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """As ``gradient_kernel`` for one contiguous row: a convolution of it with lane-wise weights."""
    program = tl.program_id(0)
    factor = tl.load(programs + 2 * program)
    row = tl.load(programs + 2 * program + 1)
    field = fields + factor * 13
    address = tl.load(field + 1)
    share = tl.load(coefficients + factor) * tl.load(scale)
    group = row // (tl.load(field + 8) // tl.load(field + 9))
    if (address != 0) & (share != 0.0) & (group == tl.load(winners + factor)):
        if tl.load(field + 10) != 0:
            gamma = tl.load(field + 10).to(tl.pointer_type(tl.float32))
            variance = tl.load(field + 11).to(tl.pointer_type(tl.float32))
            g = tl.load(gamma + row)
            share *= g * g / (tl.load(variance + row) + tl.load(floats + factor * 4 + 2))
        shift_to = row * tl.load(field + 2)
        place = tl.multiple_of(tl.load(field).to(tl.pointer_type(DTYPE)) + shift_to, 16)
        grad = tl.multiple_of(address.to(tl.pointer_type(DTYPE)) + shift_to, 16)
        length = tl.multiple_of((tl.load(field + 4) * TAPS).to(tl.int32), 4)
        lane = tl.arange(0, LANES)
        index = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
        used = (lane * 4 < STEP)[:, None]
        point = tl.load(points + tl.load(field + 6) + row)
        cosines = ()
        for lag in tl.static_range(LAGS):
            cosines = cosines + (share * tl.load(table + lag * POINTS + point),)
        before = ()  # what x[n − shift] and x[n + shift] are multiplied by
        after = ()
        for i in tl.static_range(4):
            tap = (lane * 4 + i) % TAPS
            for shift in tl.static_range(TAPS):
                minus = tl.zeros([LANES], tl.float32)
                plus = tl.zeros([LANES], tl.float32)
                for lag in tl.static_range(LAGS):
                    if SHIFT[lag] == shift:
                        plus = tl.where(((MASK[lag] >> tap) & 1) != 0, cosines[lag], plus)
                        if shift > 0:
                            back = (MASK[lag] << shift) >> tap
                            minus = tl.where((back & 1) != 0, cosines[lag], minus)
                before = before + (minus,)
                after = after + (plus,)
        reach: tl.constexpr = (TAPS + 2) // 4  # vectors needed on either side
        for start in range(0, length, STEP):
            near = ()
            for vector in tl.static_range(2 * reach + 1):
                here = index + (start + 4 * (vector - reach))
                near = near + fours(place, here, used & (here >= 0) & (here < length))
            out = ()
            for i in tl.static_range(4):
                total = after[i * TAPS] * near[4 * reach + i]
                for shift in tl.static_range(1, TAPS):
                    total += after[i * TAPS + shift] * near[4 * reach + i + shift]
                    total += before[i * TAPS + shift] * near[4 * reach + i - shift]
                out = out + (total,)
            step = tl.join(tl.join(out[0], out[2]), tl.join(out[1], out[3]))
            step = tl.reshape(step, (LANES, 4))
            here = index + start
            mask = used & (here < length)
            old = tl.load(grad + here, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad + here, (old + step).to(DTYPE), mask=mask)


@triton.jit
def any_peaks_kernel(
    programs, fields, offsets, table, left, right, peaks, points, POINTS, LAGS,
    DTYPE: tl.constexpr, LAG_PAD: tl.constexpr, PAIR_PAD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """As ``peaks_kernel``, one row a program, the pairs of taps read from tables.

    For kernels too large to unroll; those have few channels, or few rows.
    """
    program = tl.program_id(0)
    field = fields + tl.load(programs + 2 * program) * 13
    row = tl.load(programs + 2 * program + 1)
    channel_stride = tl.load(field + 3)
    place = tl.load(field).to(tl.pointer_type(DTYPE)) + row * tl.load(field + 2)
    channels = tl.load(field + 4).to(tl.int32)
    taps = offsets + tl.load(field + 7)
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
    out = tl.load(field + 6) + row
    tl.store(peaks + out, peak)
    tl.store(points + out, tl.min(tl.where(best == peak, where, POINTS), axis=0))


@triton.jit
def any_gradient_kernel(
    programs, fields, floats, offsets, table, other, lags,
    points, coefficients, winners, scale, POINTS, TAPS,
    DTYPE: tl.constexpr, TAP_PAD: tl.constexpr, MEET_PAD: tl.constexpr,
):  # fmt: skip
    """As ``gradient_kernel``, one row a program, the meeting taps read from tables."""
    program = tl.program_id(0)
    factor = tl.load(programs + 2 * program)
    row = tl.load(programs + 2 * program + 1)
    field = fields + factor * 13
    address = tl.load(field + 1)
    share = tl.load(coefficients + factor) * tl.load(scale)
    if (address != 0) & (share != 0.0):
        group = row // (tl.load(field + 8) // tl.load(field + 9))
        if group == tl.load(winners + factor):
            if tl.load(field + 10) != 0:
                gamma = tl.load(field + 10).to(tl.pointer_type(tl.float32))
                variance = tl.load(field + 11).to(tl.pointer_type(tl.float32))
                g = tl.load(gamma + row).to(tl.float32)
                v = tl.load(variance + row).to(tl.float32)
                share *= g * g / (v + tl.load(floats + factor * 4 + 2))
            channel_stride = tl.load(field + 3)
            shift = row * tl.load(field + 2)
            place = tl.load(field).to(tl.pointer_type(DTYPE)) + shift
            grad = address.to(tl.pointer_type(DTYPE)) + shift
            taps = offsets + tl.load(field + 7)
            tap = tl.arange(0, TAP_PAD)
            inside = tap < TAPS
            meeting = tap[:, None] * MEET_PAD + tl.arange(0, MEET_PAD)[None, :]
            second = tl.load(other + meeting, mask=inside[:, None], other=-1)
            meets = second >= 0
            lag = tl.load(lags + meeting, mask=meets, other=0)
            point = tl.load(points + tl.load(field + 6) + row)
            cosines = share * tl.load(table + lag * POINTS + point, mask=meets, other=0.0)
            source = tl.load(taps + second, mask=meets, other=0)
            target = tl.load(taps + tap, mask=inside, other=0)
            channels = tl.load(field + 4).to(tl.int32)
            for start in range(0, channels, 4):
                for more in tl.static_range(4):
                    mask = inside & (start + more < channels)
                    x = tl.load(place + source, mask=meets & mask[:, None], other=0.0)
                    total = tl.load(grad + target, mask=mask, other=0.0).to(tl.float32)
                    total += tl.sum(cosines * x.to(tl.float32), axis=1)
                    tl.store(grad + target, total.to(DTYPE), mask=mask)
                    place += channel_stride
                    grad += channel_stride


@triton.jit
def totals_kernel(
    fields, floats, peaks, logs, coefficients, winners, tops, log_floor,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One factor's logarithm, and what its gradient is multiplied by.

    Convolutions: ½ log Σ p of the largest group. BatchNorm (no groups): log max|γ|/√(var + ε).
    """
    factor = tl.program_id(0)
    field = fields + factor * 13
    constants = floats + factor * 4
    rows = tl.load(field + 8).to(tl.int32)
    groups = tl.load(field + 9).to(tl.int32)
    first = tl.load(field + 6)
    gamma_at = tl.load(field + 10)
    variance_at = tl.load(field + 11)
    gamma = gamma_at.to(tl.pointer_type(tl.float32))
    variance = variance_at.to(tl.pointer_type(tl.float32))
    epsilon = tl.load(constants + 2)
    count = tl.load(constants + 1)
    tiny = tl.load(constants + 3)
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
                total += p
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
                    total += p
                sums = tl.sum(total, axis=1)
                inside = start + tl.arange(0, TILE) < groups
                sums = tl.where(inside, sums, -1.0)
                top = tl.max(sums, axis=0)
                place = tl.where(sums == top, start + tl.arange(0, TILE), groups)
                if top > largest:
                    largest = top
                    winner = tl.min(place, axis=0)
        largest += tiny
        log = 0.5 * tl.log(largest) + tl.load(constants)
        tl.store(logs + factor, count * tl.maximum(log, floor))
        tl.store(coefficients + factor, tl.where(log > floor, count / largest, 0.0))
        tl.store(winners + factor, winner)


@triton.jit
def sum_kernel(logs, total, COUNT, BLOCK: tl.constexpr):
    """Σ logs, in one program and so in one order."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COUNT, BLOCK):
        sums += tl.load(logs + start + lane, mask=start + lane < COUNT, other=0.0)
    tl.store(total, tl.sum(sums, axis=0))


@triton.jit
def norm_gradient_kernel(
    factors, fields, floats, peaks, coefficients, winners, tops, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of γ: at the maximum of a BatchNorm of its own, in every row of a folded one."""
    factor = tl.load(factors + tl.program_id(0))
    field = fields + factor * 13
    address = tl.load(field + 12)
    share = tl.load(coefficients + factor) * tl.load(scale)
    if (address != 0) & (share != 0.0):
        rows = tl.load(field + 8).to(tl.int32)
        groups = tl.load(field + 9).to(tl.int32)
        gamma = tl.load(field + 10).to(tl.pointer_type(tl.float32))
        variance = tl.load(field + 11).to(tl.pointer_type(tl.float32))
        grad = address.to(tl.pointer_type(tl.float32))
        epsilon = tl.load(floats + factor * 4 + 2)
        for start in range(0, rows, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            mask = lane < rows
            g = tl.load(gamma + lane, mask=mask, other=1.0).to(tl.float32)
            v = tl.load(variance + lane, mask=mask, other=1.0).to(tl.float32)
            if groups == 0:
                gain = tl.div_rn(tl.abs(g), tl.sqrt_rn(v + epsilon))
                step = tl.where(gain == tl.load(tops + factor), share / g, 0.0)
            else:
                p = tl.load(peaks + tl.load(field + 6) + lane, mask=mask, other=0.0)
                won = lane // (rows // groups) == tl.load(winners + factor)
                step = tl.where(won, share * p * g / (v + epsilon), 0.0)
            total = tl.load(grad + lane, mask=mask, other=0.0).to(tl.float32) + step
            tl.store(grad + lane, total, mask=mask)
