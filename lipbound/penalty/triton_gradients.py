"""Triton kernels that add gradients of row energies to ``.grad`` for many layers in one launch,
in a second pass over the weights. Each belongs to a kernel in ``triton_values``."""

from __future__ import annotations

import triton
import triton.language as tl

from lipbound.penalty.layout import (
    CHANNEL_STRIDE,
    CHANNELS,
    EPSILON,
    FIELDS,
    FIRST,
    FLOATS,
    GAMMA,
    GAMMA_GRAD,
    GRAD,
    GROUPS,
    LIMIT,
    OFFSETS,
    ROW_COUNT,
    ROW_STRIDE,
    VARIANCE,
    WEIGHT,
)
from lipbound.penalty.triton_values import fours


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
    field = fields + factor * FIELDS
    address = tl.load(field + GRAD)
    share = tl.load(coefficients + factor) * tl.load(scale)
    if (address != 0) & (share != 0.0):
        weight = tl.load(field + WEIGHT).to(tl.pointer_type(DTYPE))
        grad = address.to(tl.pointer_type(DTYPE))
        row_stride = tl.load(field + ROW_STRIDE)
        channel_stride = tl.load(field + CHANNEL_STRIDE)
        channels = tl.load(field + CHANNELS).to(tl.int32)
        limit = tl.load(field + LIMIT)
        taps = offsets + tl.load(field + OFFSETS)
        rows = tl.load(field + ROW_COUNT)
        groups = tl.load(field + GROUPS)
        row = first + tl.arange(0, ROWS)[None, :]
        row_mask = row < rows
        shares = tl.where(row // (rows // groups) == tl.load(winners + factor), share, 0.0)
        if tl.load(field + GAMMA) != 0:
            gamma = tl.load(field + GAMMA).to(tl.pointer_type(tl.float32))
            variance = tl.load(field + VARIANCE).to(tl.pointer_type(tl.float32))
            g = tl.load(gamma + row, mask=row_mask, other=0.0)
            v = tl.load(variance + row, mask=row_mask, other=1.0).to(tl.float32)
            shares *= g * g / (v + tl.load(floats + factor * FLOATS + EPSILON))
        cosines = ()
        if LAGS > 1:
            point = tl.load(points + tl.load(field + FIRST) + row, mask=row_mask, other=0)
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
def flat_gradient_kernel(
    programs, fields, floats, table, points, coefficients, winners, scale, POINTS,
    TAPS: tl.constexpr, LAGS: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    DTYPE: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """As ``gradient_kernel`` for one contiguous row: a convolution of it with lane-wise weights."""
    program = tl.program_id(0)
    factor = tl.load(programs + 2 * program)
    row = tl.load(programs + 2 * program + 1)
    field = fields + factor * FIELDS
    address = tl.load(field + GRAD)
    share = tl.load(coefficients + factor) * tl.load(scale)
    group = row // (tl.load(field + ROW_COUNT) // tl.load(field + GROUPS))
    if (address != 0) & (share != 0.0) & (group == tl.load(winners + factor)):
        if tl.load(field + GAMMA) != 0:
            gamma = tl.load(field + GAMMA).to(tl.pointer_type(tl.float32))
            variance = tl.load(field + VARIANCE).to(tl.pointer_type(tl.float32))
            g = tl.load(gamma + row)
            share *= g * g / (tl.load(variance + row) + tl.load(floats + factor * FLOATS + EPSILON))
        shift_to = row * tl.load(field + ROW_STRIDE)
        place = tl.multiple_of(tl.load(field + WEIGHT).to(tl.pointer_type(DTYPE)) + shift_to, 16)
        grad = tl.multiple_of(address.to(tl.pointer_type(DTYPE)) + shift_to, 16)
        length = tl.multiple_of((tl.load(field + CHANNELS) * TAPS).to(tl.int32), 4)
        lane = tl.arange(0, LANES)
        index = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
        used = (lane * 4 < STEP)[:, None]
        point = tl.load(points + tl.load(field + FIRST) + row)
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
def any_gradient_kernel(
    programs, fields, floats, offsets, table, other, lags,
    points, coefficients, winners, scale, POINTS, TAPS,
    DTYPE: tl.constexpr, TAP_PAD: tl.constexpr, MEET_PAD: tl.constexpr,
):  # fmt: skip
    """As ``gradient_kernel``, one row a program, the meeting taps read from tables."""
    program = tl.program_id(0)
    factor = tl.load(programs + 2 * program)
    row = tl.load(programs + 2 * program + 1)
    field = fields + factor * FIELDS
    address = tl.load(field + GRAD)
    share = tl.load(coefficients + factor) * tl.load(scale)
    if (address != 0) & (share != 0.0):
        group = row // (tl.load(field + ROW_COUNT) // tl.load(field + GROUPS))
        if group == tl.load(winners + factor):
            if tl.load(field + GAMMA) != 0:
                gamma = tl.load(field + GAMMA).to(tl.pointer_type(tl.float32))
                variance = tl.load(field + VARIANCE).to(tl.pointer_type(tl.float32))
                g = tl.load(gamma + row).to(tl.float32)
                v = tl.load(variance + row).to(tl.float32)
                share *= g * g / (v + tl.load(floats + factor * FLOATS + EPSILON))
            channel_stride = tl.load(field + CHANNEL_STRIDE)
            shift = row * tl.load(field + ROW_STRIDE)
            place = tl.load(field + WEIGHT).to(tl.pointer_type(DTYPE)) + shift
            grad = address.to(tl.pointer_type(DTYPE)) + shift
            taps = offsets + tl.load(field + OFFSETS)
            tap = tl.arange(0, TAP_PAD)
            inside = tap < TAPS
            meeting = tap[:, None] * MEET_PAD + tl.arange(0, MEET_PAD)[None, :]
            second = tl.load(other + meeting, mask=inside[:, None], other=-1)
            meets = second >= 0
            lag = tl.load(lags + meeting, mask=meets, other=0)
            point = tl.load(points + tl.load(field + FIRST) + row)
            cosines = share * tl.load(table + lag * POINTS + point, mask=meets, other=0.0)
            source = tl.load(taps + second, mask=meets, other=0)
            target = tl.load(taps + tap, mask=inside, other=0)
            channels = tl.load(field + CHANNELS).to(tl.int32)
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
def norm_gradient_kernel(
    factors, fields, floats, peaks, coefficients, winners, tops, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of γ: at the maximum of a BatchNorm of its own, in every row of a folded one."""
    factor = tl.load(factors + tl.program_id(0))
    field = fields + factor * FIELDS
    address = tl.load(field + GAMMA_GRAD)
    share = tl.load(coefficients + factor) * tl.load(scale)
    if (address != 0) & (share != 0.0):
        rows = tl.load(field + ROW_COUNT).to(tl.int32)
        groups = tl.load(field + GROUPS).to(tl.int32)
        gamma = tl.load(field + GAMMA).to(tl.pointer_type(tl.float32))
        variance = tl.load(field + VARIANCE).to(tl.pointer_type(tl.float32))
        grad = address.to(tl.pointer_type(tl.float32))
        epsilon = tl.load(floats + factor * FLOATS + EPSILON)
        for start in range(0, rows, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            mask = lane < rows
            g = tl.load(gamma + lane, mask=mask, other=1.0).to(tl.float32)
            v = tl.load(variance + lane, mask=mask, other=1.0).to(tl.float32)
            if groups == 0:
                gain = tl.div_rn(tl.abs(g), tl.sqrt_rn(v + epsilon))
                step = tl.where(gain == tl.load(tops + factor), share / g, 0.0)
            else:
                p = tl.load(peaks + tl.load(field + FIRST) + lane, mask=mask, other=0.0)
                won = lane // (rows // groups) == tl.load(winners + factor)
                step = tl.where(won, share * p * g / (v + epsilon), 0.0)
            total = tl.load(grad + lane, mask=mask, other=0.0).to(tl.float32) + step
            tl.store(grad + lane, total, mask=mask)
