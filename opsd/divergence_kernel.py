"""The inner step of the fused loss as a Triton kernel: one program per token turns two rows of logits into a gradient row.

Same closed form as `fused_divergence`, for every clip mode, without top-k, bias or softcap. At beta 0 and 1 everything
that does not depend on a clamp comes out of one sweep over the row: with `a` the distribution that weighs the entries
(teacher at beta 0, student at beta 1) and `b` the other, `sum_v a_v (log a_v - log b_v)` needs only running sums. The
sweep keeps separate sums in each of `LANES` lanes (every LANES-th entry of the row). A lane's largest probability times
its largest log ratio bounds its entries, so a lane that cannot hold a clamped entry is done; the few others are read
again. A last sweep writes the gradient. Between the endpoints the mixture needs a full middle sweep. Logarithms are in
base 2 inside, results are in nats.
"""

import math

import triton
import triton.language as tl

LN2 = tl.constexpr(math.log(2.0))
# Smallest logit: excluded entries (-inf) are raised to it, so that differences stay finite; its probability is 0.
LOWEST = tl.constexpr(-1e30)

CLIP_CODES = {"none": 0, "entry": 1, "token": 2, "direction": 3}
COLUMNS = 6  # token loss, divergence, clamped entries, clipped, student entropy, teacher entropy


@triton.jit
def _load(row_pointer, offsets, mask, scale):
    logits = tl.load(row_pointer + offsets, mask=mask, other=LOWEST).to(tl.float32)
    return tl.maximum(logits * scale, LOWEST)


@triton.jit
def _fold(logits, largest, mass, moment):
    """Add entries `(UNROLL, LANES)` to each lane's maximum, mass and first moment relative to the maximum."""
    top = tl.maximum(largest, tl.max(logits, axis=0))
    below = logits - top[None, :]
    weights = tl.exp2(below)
    decay = tl.exp2(largest - top)
    moment = (moment + mass * (largest - top)) * decay + tl.sum(weights * below, axis=0)
    mass = mass * decay + tl.sum(weights, axis=0)
    return top, mass, moment, weights, decay


@triton.jit
def _finish(largest, mass, moment):
    """The row's maximum, normaliser relative to it, entropy in nats, and each lane's share of the normaliser."""
    top = tl.max(largest, axis=0)
    share = tl.exp2(largest - top)
    total = tl.sum(mass * share, axis=0)
    first = tl.sum((moment + mass * (largest - top)) * share, axis=0)
    return top, total, (tl.log2(total) - first / total) * LN2, share / total


@triton.jit
def _endpoint_terms(s, t, s_log_z, t_log_z, shift, KIND: tl.constexpr):
    """Entry (base 2), its derivative (base e) and the student's probability at beta 0 or 1."""
    p_s = tl.exp2(s - s_log_z)
    p_t = tl.exp2(t - t_log_z)
    ratio = (t - s) - shift  # log2 p_t - log2 p_s
    if KIND == 0:
        entry = p_t * ratio
        slope = -p_t
    else:
        entry = -p_s * ratio
        slope = entry * LN2 + p_s
    return entry, slope, p_s


@triton.jit
def _mixture_terms(s, t, s_log_z, t_log_z, shift, beta):
    """The same for 0 < beta < 1, from log2 of m / p_s and m / p_t."""
    p_s = tl.exp2(s - s_log_z)
    p_t = tl.exp2(t - t_log_z)
    ratio = (t - s) - shift
    huge = ratio > 100.0
    mixed = tl.log2(beta * tl.exp2(tl.minimum(ratio, 100.0)) + (1.0 - beta))
    log_beta = tl.log2(beta)
    student_entry = (beta - 1.0) * p_s * tl.where(huge, ratio + log_beta, mixed)
    entry = student_entry - beta * p_t * tl.where(huge, log_beta, mixed - ratio)
    return entry, student_entry * LN2, p_s


@triton.jit
def _terms(s, t, s_log_z, t_log_z, shift, beta, KIND: tl.constexpr):
    if KIND == 2:
        return _mixture_terms(s, t, s_log_z, t_log_z, shift, beta)
    else:
        return _endpoint_terms(s, t, s_log_z, t_log_z, shift, KIND)


@triton.jit
def divergence_rows(
    student_pointer,
    teacher_pointer,
    gradient_pointer,
    columns_pointer,
    rows,
    vocab_size,
    logits_stride,
    gradient_stride,
    scale,  # model logits to base-2 logits after the temperature
    entry_clip,  # base 2
    beta,
    KIND: tl.constexpr,  # 0: beta 0, 1: beta 1, 2: between
    CLIP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile: tl.constexpr = LANES * UNROLL
    lanes = tl.arange(0, LANES)
    offsets = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        s_row = student_pointer + row * logits_stride.to(tl.int64)
        t_row = teacher_pointer + row * logits_stride.to(tl.int64)

        s_largest = tl.full((LANES,), LOWEST, tl.float32)
        t_largest = tl.full((LANES,), LOWEST, tl.float32)
        s_mass = tl.zeros((LANES,), tl.float32)
        t_mass = tl.zeros((LANES,), tl.float32)
        s_moment = tl.zeros((LANES,), tl.float32)
        t_moment = tl.zeros((LANES,), tl.float32)
        gap = tl.zeros((LANES,), tl.float32)  # sum of a (a's logit - b's logit)
        widest = tl.full((LANES,), LOWEST, tl.float32)  # largest a's logit - b's logit
        for start in range(0, vocab_size, tile):
            mask = start + offsets < vocab_size
            s = _load(s_row, start + offsets, mask, scale)
            t = _load(t_row, start + offsets, mask, scale)
            s_largest, s_mass, s_moment, s_weights, s_decay = _fold(s, s_largest, s_mass, s_moment)
            t_largest, t_mass, t_moment, t_weights, t_decay = _fold(t, t_largest, t_mass, t_moment)
            if KIND == 0:
                gap = gap * t_decay + tl.sum(t_weights * (t - s), axis=0)
                widest = tl.maximum(widest, tl.max(t - s, axis=0))
            if KIND == 1:
                gap = gap * s_decay + tl.sum(s_weights * (s - t), axis=0)
                widest = tl.maximum(widest, tl.max(s - t, axis=0))

        s_top, s_total, s_entropy, s_share = _finish(s_largest, s_mass, s_moment)
        t_top, t_total, t_entropy, t_share = _finish(t_largest, t_mass, t_moment)
        s_log_z = s_top + tl.log2(s_total)
        t_log_z = t_top + tl.log2(t_total)
        # log2 of the normalisers' ratio, exactly 0 for equal rows
        shift = (t_top - s_top) + tl.log2(tl.div_rn(t_total, s_total))

        clamped_lanes = tl.zeros((LANES,), tl.float32)
        if KIND == 2:
            lane_divergence = tl.zeros((LANES,), tl.float32)
            lane_loss = tl.zeros((LANES,), tl.float32)
            lane_slope = tl.zeros((LANES,), tl.float32)
            suspect = tl.full((LANES,), 1, tl.int1)  # every lane needs its entries one by one
        else:
            if KIND == 0:
                lane_mass = t_mass * t_share
                lane_divergence = gap * t_share - lane_mass * shift
                bound = tl.exp2(t_largest - t_log_z) * (widest - shift)
                lane_slope = -lane_mass
            else:
                lane_mass = s_mass * s_share
                lane_divergence = gap * s_share + lane_mass * shift
                bound = tl.exp2(s_largest - s_log_z) * (widest + shift)
                lane_slope = lane_divergence * LN2 + lane_mass
            lane_loss = lane_divergence
            suspect = tl.full((LANES,), 0, tl.int1)
            if CLIP == 1:
                suspect = bound * 1.001 > entry_clip  # the bound is rounded differently from the entries
                lane_loss = tl.where(suspect, 0.0, lane_divergence)
                lane_slope = tl.where(suspect, 0.0, lane_slope)
        suspects = tl.sum(suspect.to(tl.int32), axis=0)
        extra_loss = s_total * 0.0
        extra_slope = s_total * 0.0
        clamped = s_total * 0.0
        if (KIND == 2) | (suspects > FEW):
            for start in range(0, vocab_size, tile):
                mask = (start + offsets < vocab_size) & suspect[None, :]
                s = _load(s_row, start + offsets, mask, scale)
                t = _load(t_row, start + offsets, mask, scale)
                entry, slope, _ = _terms(s, t, s_log_z, t_log_z, shift, beta, KIND)
                if KIND == 2:
                    lane_divergence += tl.sum(entry, axis=0)
                if CLIP == 1:
                    above = entry > entry_clip
                    clamped_lanes += tl.sum(above.to(tl.float32), axis=0)
                    entry = tl.where(above, entry_clip, entry)
                    slope = tl.where(above, 0.0, slope)
                lane_loss += tl.sum(entry, axis=0)
                lane_slope += tl.sum(slope, axis=0)
        elif CLIP == 1:
            for _visit in range(suspects):
                lane = tl.max(tl.where(suspect, lanes, -1), axis=0)
                suspect = suspect & (lanes != lane)
                for start in range(0, vocab_size, LANES * DEPTH):
                    columns = start + lane + tl.arange(0, DEPTH) * LANES
                    mask = columns < vocab_size
                    s = _load(s_row, columns, mask, scale)
                    t = _load(t_row, columns, mask, scale)
                    entry, slope, _ = _terms(s, t, s_log_z, t_log_z, shift, beta, KIND)
                    above = entry > entry_clip
                    clamped += tl.sum(above.to(tl.float32), axis=0)
                    extra_loss += tl.sum(tl.where(above, entry_clip, entry), axis=0)
                    extra_slope += tl.sum(tl.where(above, 0.0, slope), axis=0)

        divergence = tl.sum(lane_divergence, axis=0)
        loss = tl.sum(lane_loss, axis=0) + extra_loss
        slope_sum = tl.sum(lane_slope, axis=0) + extra_slope
        clamped += tl.sum(clamped_lanes, axis=0)
        clipped = clamped > 0
        weight = 1.0
        if CLIP >= 2:
            clipped = divergence > entry_clip
            loss = tl.where(clipped, entry_clip, divergence)
            weight = tl.where(clipped, 0.0 if CLIP == 2 else entry_clip / divergence, 1.0)
        row_columns = columns_pointer + row * 6
        tl.store(row_columns, loss * LN2)
        tl.store(row_columns + 1, divergence * LN2)
        tl.store(row_columns + 2, clamped)
        tl.store(row_columns + 3, clipped.to(tl.float32))
        tl.store(row_columns + 4, s_entropy)
        tl.store(row_columns + 5, t_entropy)

        if WRITE_GRADIENT:
            gradient_row = gradient_pointer + row * gradient_stride.to(tl.int64)
            blocks = tl.cdiv(vocab_size, BLOCK)
            for step in range(0, blocks):
                # From the end of the row, which the sweep before has left in the cache.
                columns = (blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
                mask = columns < vocab_size
                s = _load(s_row, columns, mask, scale)
                t = _load(t_row, columns, mask, scale)
                entry, slope, p_s = _terms(s, t, s_log_z, t_log_z, shift, beta, KIND)
                if CLIP == 1:
                    slope = tl.where(entry > entry_clip, 0.0, slope)
                gradient = slope - p_s * slope_sum
                if CLIP >= 2:
                    gradient = gradient * weight
                tl.store(gradient_row + columns, gradient.to(gradient_pointer.dtype.element_ty), mask=mask)
