"""What LFPS does in a decode step: predict, answer for heads that attend to the sinks, learn.

`policy` has the idea, `layout` says what everything is.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.policies.lfps.bypass import answer_from_sinks, log_odds_of_sinks
from offload.policies.lfps.layout import (
    ATTEMPT,
    LAST_ADDED,
    LAST_KV_LEN,
    LOCAL_TOKENS,
    SCALE,
    STEP,
    VOTES,
    num_words,
    read_numbers,
    read_sizes,
    read_state,
    table_of,
)
from offload.policies.lfps.tables import (
    COUNT,
    FULL,
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
from offload.selection.callback import (
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

# 1 / gamma^steps of a unit, before its tables are rescaled. By a power of two nothing is
# rounded: it does not matter when that is done.
_LARGEST_SCALE = 2.0**50
# Thresholds that are tried, each at 0.7 of the last one's height above the mean, before all that is
# listed, which at 128K tokens is many times what is wanted. Halving names a sixth more candidates.
_HEIGHTS, _LOWER = 12, 0.7


@numba.njit(inline="always")
def _slots_above(pointer: Any, ctx: Any, table: Any, threshold: Any, hits_at: Any) -> Any:
    """Write the slots of a table's list whose values are above `threshold`; how many."""
    return filter_at_least(
        pointer,
        ctx.filter_at_least,
        table.values.ctypes.data,
        np.int64(table.state[COUNT]),
        float_above(threshold),
        hits_at,
    )


@callback
def prepare(pointer: Any) -> None:
    ctx = read_context(pointer)
    state, numbers = read_state(ctx.arrays), read_numbers(ctx.parameters)
    sizes = read_sizes(state.sizes)
    listed, words = sizes.listed, num_words(sizes.capacity)
    num_states = VOTES + ctx.group_size
    unit = view_float64(state.units, num_states, ctx.unit)
    before = view_float64(state.units_before, num_states + 2, ctx.unit)
    by_position = table_of(state, sizes, ctx.unit, unit, 0)
    by_distance = table_of(state, sizes, ctx.unit, unit, 1)
    state_v, state_s = by_position.state, by_distance.state
    marks = view_uint64(state.marks, words, ctx.unit)
    candidates = view_int32(state.candidates, sizes.longest, ctx.unit)
    hits_at = offset_floats(state.hits, ctx.unit * listed)
    hits = view_int32(hits_at, listed)
    # When the hits are marked, their place takes the expansion.
    num_listing = (ctx.last >> 6) - (ctx.first >> 6) + 2
    chosen_at = hits_at + (hits_at & 4)
    chosen = view_uint64(chosen_at, num_listing)
    places = view_int32(chosen_at + 8 * num_listing, num_listing)

    # Lists are read in order, which the hardware sees; these are not.
    prefetch(state.marks + 8 * words * ctx.unit, ctx.kv_len >> 3)
    newest = ctx.kv_len - 1
    n = newest - ctx.first
    if unit[SCALE] > _LARGEST_SCALE:
        unit[SCALE] /= _LARGEST_SCALE
        rescale(by_position, 1.0 / _LARGEST_SCALE)
        rescale(by_distance, 1.0 / _LARGEST_SCALE)
    step, attempts = unit[STEP], unit[ATTEMPT]
    due = unit[STEP] >= numbers.prune_every
    if due:
        unit[STEP] = 0.0
    if due or state_v[FULL] > 0.0:
        prune(by_position, mean_of(state_v, n), hits)
    if due or state_s[FULL] > 0.0:
        prune(by_distance, mean_of(state_s, n), hits)
    for i in range(num_states):
        before[i] = unit[i]
    before[STEP], before[ATTEMPT] = step, attempts
    before[LAST_KV_LEN], before[LAST_ADDED] = ctx.kv_len, 0.0
    mean_v, mean_s = mean_of(state_v, n), mean_of(state_s, n)
    theta_v = threshold_of(state_v, n, numbers.alpha)
    theta_s = threshold_of(state_s, n, numbers.alpha)
    wanted = min(np.int64(numbers.candidates_per_budget * ctx.budget_tokens), ctx.last - ctx.first)
    wanted = min(wanted, len(candidates) - 64)  # of a list that is full, words are left out
    marked, count, spread = 0, 0, np.int64(numbers.spread)
    # Thresholds of the rule, lower ones, all that is listed, recent tokens: what sufficed in the
    # step before is near what suffices now.
    rises = ctx.kv_len % np.int64(numbers.raise_every) == 0
    first = min(max(np.int64(unit[ATTEMPT]) - rises, 0), _HEIGHTS)  # recent tokens are no start
    for attempt in range(first, _HEIGHTS + 2):
        unit[ATTEMPT] = attempt
        share = _LOWER**attempt if attempt < _HEIGHTS else 0.0
        lowered = lowered_threshold(theta_v, mean_v, share)
        found = _slots_above(pointer, ctx, by_position, lowered, hits_at)
        marked += mark_slots(
            hits[:found], by_position.indices, -1, spread, ctx.first, ctx.last, marks
        )
        lowered = lowered_threshold(theta_s, mean_s, share)
        found = _slots_above(pointer, ctx, by_distance, lowered, hits_at)
        marked += mark_slots(
            hits[:found], by_distance.indices, newest, 0, ctx.first, ctx.last, marks
        )
        if attempt == _HEIGHTS + 1:
            mark_tokens(max(ctx.first, ctx.last - (wanted - count)), ctx.last, marks)
        shift = by_distance.top - newest
        bits_v, bits_s = by_position.bits, by_distance.bits
        num_chosen = expand_marks(marks, bits_v, bits_s, shift, ctx.first, ctx.last, chosen)
        count = list_tokens(chosen, num_chosen, ctx.first >> 6 << 6, places, candidates)
        if count >= wanted:
            break
    unit[STEP] += 1.0
    # What propose reads but for the query: mean keys and values, sinks' values, variance ratios.
    num_floats = (2 + ctx.first) * ctx.head_dim
    prefetch(state.answers + 4 * num_floats * ctx.unit, 4 * num_floats)
    prefetch(state.variance_ratios + 4 * ctx.group_size * ctx.unit, 4 * ctx.group_size)
    num_scores = ctx.group_size * (ctx.first + LOCAL_TOKENS)
    prefetch(state.bypass_scores + 4 * num_scores * ctx.unit, 4 * num_scores)
    view_int32(state.num_candidates, ctx.unit + 1)[ctx.unit] = count
    ctx.bytes_touched += np.int64(8 * (state_v[COUNT] + state_s[COUNT])) + 32 * marked + 4 * count


@callback
def propose(pointer: Any) -> int:
    ctx = read_context(pointer)
    state, numbers = read_state(ctx.arrays), read_numbers(ctx.parameters)
    sizes = read_sizes(state.sizes)
    group_size, head_dim, num_sinks = ctx.group_size, ctx.head_dim, ctx.first
    votes = view_float64(state.units, VOTES + group_size, ctx.unit)[VOTES:]
    threshold = numbers.bypass_threshold
    attending = group_size
    if threshold < 1.0 and 0 < num_sinks <= sizes.listed - LOCAL_TOKENS:
        attending = 0
        answers = view_float32(state.answers, (2 + num_sinks) * head_dim, ctx.unit)
        ratios = view_float32(state.variance_ratios, group_size, ctx.unit)
        all_scores = view_float32(
            state.bypass_scores, group_size * (num_sinks + LOCAL_TOKENS), ctx.unit
        )
        local = min(LOCAL_TOKENS, ctx.kv_len - num_sinks)
        num = num_sinks + local
        tokens = view_int32(state.hits, sizes.listed, ctx.unit)  # what it had is marked
        for i in range(num_sinks):
            tokens[i] = i
        for i in range(local):
            tokens[num_sinks + i] = ctx.kv_len - local + i
        score_tokens(pointer, ctx.score_tokens, tokens.ctypes.data, num, all_scores.ctypes.data)
        query = view_float32(ctx.query, group_size * head_dim)
        output = view_float32(ctx.output, group_size * head_dim)
        lse = view_float32(ctx.lse, group_size)
        log_odds = np.log(threshold / (1.0 - threshold))
        for g in range(group_size):
            scores = all_scores[g * num : (g + 1) * num]
            odds, log_total = log_odds_of_sinks(
                scores,
                num_sinks,
                query[g * head_dim : (g + 1) * head_dim],
                answers[:head_dim],
                ratios[g],
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
                    answers[2 * head_dim :],
                    answers[head_dim : 2 * head_dim],
                    1.0 / (1.0 + np.exp(-odds)),
                    output[g * head_dim : (g + 1) * head_dim],
                )
                lse[g] = log_total
        ctx.bytes_touched += 4 * (len(answers) + len(ratios) + len(all_scores))
    if attending == 0:
        return ANSWERED
    ctx.candidates = offset_floats(state.candidates, ctx.unit * sizes.longest)
    count: int = view_int32(state.num_candidates, ctx.unit + 1)[ctx.unit]
    return count


@callback
def observe(pointer: Any) -> None:
    ctx = read_context(pointer)
    state, numbers = read_state(ctx.arrays), read_numbers(ctx.parameters)
    sizes = read_sizes(state.sizes)
    num_states = VOTES + ctx.group_size
    unit = view_float64(state.units, num_states, ctx.unit)
    first, num = ctx.first, ctx.num_indices
    added = num - first
    # Candidates are the runtime's by now: their place takes the weights.
    combined = view_float32(offset_floats(state.candidates, ctx.unit * sizes.longest), added)
    weights = view_float32(ctx.weights, ctx.group_size * num)
    if not group_weights(weights, num, first, ctx.group_size, unit[VOTES:], combined):
        return
    tokens = view_int32(offset_floats(ctx.indices, first), added)
    unit[SCALE] /= numbers.gamma
    copy = view_int32(state.added_tokens, sizes.added, ctx.unit)
    for i in range(added):  # as a slice it took Numba seconds: the error of another shape
        copy[i] = tokens[i]
    view_float64(state.units_before, num_states + 2, ctx.unit)[LAST_ADDED] = added
    for k in range(2):
        table, scale = table_of(state, sizes, ctx.unit, unit, k), np.float32(unit[SCALE])
        old = view_float32(state.added_to, sizes.added, 2 * ctx.unit + k)
        add_scores(table, tokens, combined, ctx.kv_len - 1, scale, old)
    ctx.bytes_touched += added * 36 + 4 * num * ctx.group_size
