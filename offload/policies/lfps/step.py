"""What LFPS does in a decode step: predict, answer for heads that attend to the sinks, learn.

`lfps` has the idea, `lfps_layout` says where everything is.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.policies.callback import (
    ANSWERED,
    callback,
    filter_at_least,
    offset_floats,
    prefetch,
    read_context,
    score_tokens,
    view_float32,
    view_float64,
    view_int32,
    view_uint64,
)
from offload.policies.lfps.bypass import answer_from_sinks, log_odds_of_sinks
from offload.policies.lfps.layout import (
    ADDED,
    ATTEMPT,
    CANDIDATES,
    CAPACITY,
    FIRST_COUNT,
    LISTED,
    SCALE,
    STEP,
    VOTES,
    num_words,
    room_of_unit,
    top_bit,
    unit_floats,
)
from offload.policies.lfps.tables import (
    COUNT,
    FULL,
    TABLE_STATE,
    add_scores,
    expand_marks,
    float_above,
    list_tokens,
    lowered_threshold,
    mark_slots,
    mark_tokens,
    mean_of,
    prune,
    rescale,
    threshold_of,
)
from offload.policies.lfps.votes import group_weights

_LOCAL_TOKENS = 5  # of L
# 1 / gamma^steps of a unit, before its tables are rescaled. By a power of two nothing is
# rounded: it does not matter when that is done.
_LARGEST_SCALE = 2.0**50


@numba.njit(inline="always")
def bypass_floats(head_dim: Any, sink_tokens: Any, group_size: Any) -> Any:
    return (2 + sink_tokens) * head_dim + group_size * (1 + sink_tokens + _LOCAL_TOKENS)


@callback
def prepare(pointer: Any) -> None:
    ctx = read_context(pointer)
    sizes = view_int32(ctx.arrays[7], FIRST_COUNT)
    capacity, listed, longest = sizes[CAPACITY], sizes[LISTED], sizes[CANDIDATES]
    words, top = num_words(capacity), top_bit(capacity)
    bitmaps = ctx.arrays[3] + 8 * ctx.unit * 3 * words
    bits_v = view_uint64(bitmaps, words)
    bits_s = view_uint64(bitmaps + 8 * words, words)
    marks = view_uint64(bitmaps + 16 * words, words)
    states = ctx.arrays[4] + 8 * ctx.unit * unit_floats(ctx.group_size)
    state_v = view_float64(states, TABLE_STATE)
    state_s = view_float64(states + 8 * TABLE_STATE, TABLE_STATE)
    unit = view_float64(states, unit_floats(ctx.group_size))
    at = ctx.unit * 2 * capacity
    table_v = view_float32(offset_floats(ctx.arrays[0], at), capacity)
    table_s = view_float32(offset_floats(ctx.arrays[0], at + capacity), capacity)
    at = ctx.unit * 2 * listed
    values_v = view_float32(offset_floats(ctx.arrays[1], at), listed)
    values_s = view_float32(offset_floats(ctx.arrays[1], at + listed), listed)
    indices_v = view_int32(offset_floats(ctx.arrays[2], at), listed)
    indices_s = view_int32(offset_floats(ctx.arrays[2], at + listed), listed)
    at = ctx.unit * room_of_unit(sizes)
    candidates = view_int32(offset_floats(ctx.arrays[6], at), longest)
    hits_at = offset_floats(ctx.arrays[6], at + longest)
    hits = view_int32(hits_at, listed)
    # When the hits are marked, their place takes the expansion.
    num_listing = (ctx.last >> 6) - (ctx.first >> 6) + 2
    chosen_at = hits_at + (hits_at & 4)
    chosen = view_uint64(chosen_at, num_listing)
    places = view_int32(chosen_at + 8 * num_listing, num_listing)

    # Lists are read in order, which the hardware sees; these are not.
    prefetch(bitmaps + 16 * words, ctx.kv_len >> 3)
    newest = ctx.kv_len - 1
    n = newest - ctx.first
    alpha, prune_every = ctx.parameters[0], ctx.parameters[3]
    if unit[SCALE] > _LARGEST_SCALE:
        unit[SCALE] /= _LARGEST_SCALE
        rescale(table_v, values_v, state_v, 1.0 / _LARGEST_SCALE)
        rescale(table_s, values_s, state_s, 1.0 / _LARGEST_SCALE)
    num_states = VOTES + ctx.group_size
    step, attempts = unit[STEP], unit[ATTEMPT]
    due = unit[STEP] >= prune_every
    if due:
        unit[STEP] = 0.0
    if due or state_v[FULL] > 0.0:
        prune(table_v, values_v, indices_v, bits_v, -1, state_v, mean_of(state_v, n))
    if due or state_s[FULL] > 0.0:
        prune(table_s, values_s, indices_s, bits_s, top, state_s, mean_of(state_s, n))
    for i in range(num_states):
        unit[num_states + i] = unit[i]
    unit[num_states + STEP], unit[num_states + ATTEMPT] = step, attempts
    unit[2 * num_states], unit[2 * num_states + 1] = ctx.kv_len, 0.0
    mean_v, mean_s = mean_of(state_v, n), mean_of(state_s, n)
    theta_v = threshold_of(state_v, n, alpha)
    theta_s = threshold_of(state_s, n, alpha)
    wanted = min(np.int64(ctx.parameters[4] * ctx.budget_tokens), ctx.last - ctx.first)
    if ctx.kv_len > ctx.parameters[5] * ctx.budget_tokens:
        wanted = 0
    marked = count = 0
    # Thresholds of the rule, lower ones, all that is listed, recent tokens: what sufficed in the
    # step before is near what suffices now.
    for attempt in range(max(np.int64(unit[ATTEMPT]) - 1, 0), 5):
        unit[ATTEMPT] = attempt
        share = 0.5**attempt if attempt < 3 else 0.0
        lowered = lowered_threshold(theta_v, mean_v, share)
        found = filter_at_least(  # type: ignore[call-arg, var-annotated]
            pointer,
            ctx.filter_at_least,
            values_v.ctypes.data,
            np.int64(state_v[COUNT]),
            float_above(lowered),
            hits_at,
        )
        marked += mark_slots(hits[:found], indices_v, -1, ctx.first, ctx.last, marks)
        lowered = lowered_threshold(theta_s, mean_s, share)
        found = filter_at_least(
            pointer,
            ctx.filter_at_least,
            values_s.ctypes.data,
            np.int64(state_s[COUNT]),
            float_above(lowered),
            hits_at,
        )
        marked += mark_slots(hits[:found], indices_s, newest, ctx.first, ctx.last, marks)
        if attempt == 4:
            mark_tokens(max(ctx.first, ctx.last - (wanted - count)), ctx.last, marks)
        num_chosen = expand_marks(marks, bits_v, bits_s, top - newest, ctx.first, ctx.last, chosen)
        count = list_tokens(chosen, num_chosen, ctx.first >> 6 << 6, places, candidates)
        if count >= wanted:
            break
    unit[STEP] += 1.0
    # What propose reads but for the query: its mean key and variance ratios.
    bypass_at = offset_floats(
        ctx.arrays[5], ctx.unit * bypass_floats(ctx.head_dim, ctx.first, ctx.group_size)
    )
    prefetch(bypass_at, 4 * bypass_floats(ctx.head_dim, ctx.first, ctx.group_size))
    view_int32(ctx.arrays[7], FIRST_COUNT + ctx.unit + 1)[FIRST_COUNT + ctx.unit] = count
    ctx.bytes_touched += np.int64(8 * (state_v[COUNT] + state_s[COUNT])) + 32 * marked + 4 * count


@callback
def propose(pointer: Any) -> int:
    ctx = read_context(pointer)
    sizes = view_int32(ctx.arrays[7], FIRST_COUNT + ctx.unit + 1)
    listed, longest = sizes[LISTED], sizes[CANDIDATES]
    candidates_at = offset_floats(ctx.arrays[6], ctx.unit * room_of_unit(sizes))
    group_size, head_dim, num_sinks = ctx.group_size, ctx.head_dim, ctx.first
    states = ctx.arrays[4] + 8 * ctx.unit * unit_floats(group_size)
    votes = view_float64(states + 8 * VOTES, group_size)
    threshold = ctx.parameters[2]
    attending = group_size
    if threshold < 1.0 and 0 < num_sinks <= listed - _LOCAL_TOKENS:
        attending = 0
        width = bypass_floats(head_dim, num_sinks, group_size)
        bypass_at = offset_floats(ctx.arrays[5], ctx.unit * width)
        bypass = view_float32(bypass_at, width)
        ratios = (2 + num_sinks) * head_dim
        local = min(_LOCAL_TOKENS, ctx.kv_len - num_sinks)
        num = num_sinks + local
        tokens_at = offset_floats(candidates_at, longest)  # the hits' place
        tokens = view_int32(tokens_at, num)
        for i in range(num_sinks):
            tokens[i] = i
        for i in range(local):
            tokens[num_sinks + i] = ctx.kv_len - local + i
        scores_at = ratios + group_size
        score_tokens(  # type: ignore[call-arg]  # mypy sees the intrinsic's typing context
            pointer, ctx.score_tokens, tokens_at, num, offset_floats(bypass_at, scores_at)
        )
        query = view_float32(ctx.query, group_size * head_dim)
        output = view_float32(ctx.output, group_size * head_dim)
        lse = view_float32(ctx.lse, group_size)
        log_odds = np.log(threshold / (1.0 - threshold))
        for g in range(group_size):
            scores = bypass[scores_at + g * num : scores_at + (g + 1) * num]
            odds, log_total = log_odds_of_sinks(
                scores,
                num_sinks,
                query[g * head_dim : (g + 1) * head_dim],
                bypass[:head_dim],
                bypass[ratios + g],
                ctx.sm_scale,
                ctx.kv_len,
            )
            votes[g] = 1.0
            attending += 1
            if odds > log_odds:
                votes[g] = 0.0
                attending -= 1
                answer_from_sinks(
                    scores[:num_sinks],
                    bypass[2 * head_dim : ratios],
                    bypass[head_dim : 2 * head_dim],
                    1.0 / (1.0 + np.exp(-odds)),
                    output[g * head_dim : (g + 1) * head_dim],
                )
                lse[g] = log_total
        ctx.bytes_touched += 4 * width
    if attending == 0:
        return ANSWERED
    ctx.candidates = candidates_at
    count: int = sizes[FIRST_COUNT + ctx.unit]
    return count


@callback
def observe(pointer: Any) -> None:
    ctx = read_context(pointer)
    sizes = view_int32(ctx.arrays[7], FIRST_COUNT)
    capacity, listed, longest = sizes[CAPACITY], sizes[LISTED], sizes[CANDIDATES]
    words = num_words(capacity)
    bitmaps = ctx.arrays[3] + 8 * ctx.unit * 3 * words
    states = ctx.arrays[4] + 8 * ctx.unit * unit_floats(ctx.group_size)
    unit = view_float64(states, unit_floats(ctx.group_size))
    votes = view_float64(states + 8 * VOTES, ctx.group_size)
    first, num = ctx.first, ctx.num_indices
    # Candidates are the runtime's by now: their place takes the weights.
    room_at = offset_floats(ctx.arrays[6], ctx.unit * room_of_unit(sizes))
    combined = view_float32(room_at, num - first)
    weights = view_float32(ctx.weights, ctx.group_size * num)
    if not group_weights(weights, num, first, ctx.group_size, votes, combined):
        return
    tokens = view_int32(offset_floats(ctx.indices, first), num - first)
    unit[SCALE] /= ctx.parameters[1]
    added_at, added = offset_floats(room_at, longest + listed), sizes[ADDED]
    view_int32(added_at, num - first)[:] = tokens
    unit[2 * (VOTES + ctx.group_size) + 1] = num - first
    for k in range(2):
        table = view_float32(offset_floats(ctx.arrays[0], (ctx.unit * 2 + k) * capacity), capacity)
        at = (ctx.unit * 2 + k) * listed
        values = view_float32(offset_floats(ctx.arrays[1], at), listed)
        indices = view_int32(offset_floats(ctx.arrays[2], at), listed)
        bits = view_uint64(bitmaps + 8 * words * k, words)
        state = view_float64(states + 8 * TABLE_STATE * k, TABLE_STATE)
        add_scores(
            table,
            values,
            indices,
            bits,
            -1 if k == 0 else top_bit(capacity),
            state,
            tokens,
            combined,
            ctx.kv_len - 1,
            np.float32(unit[SCALE]),
            view_float32(offset_floats(added_at, (1 + k) * added), num - first),
        )
    ctx.bytes_touched += (num - first) * 36 + 4 * num * ctx.group_size
