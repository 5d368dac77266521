"""The third kernel of `top_k_tokens`: from a list's candidates to its tokens."""

from __future__ import annotations

from gpu_ops.early_launch import await_inputs
from gpu_ops.launch import jit, jit_for_any, tl
from gpu_ops.top_k_candidates import SIZES, importance_of, num_chosen, segment_length, take


@jit
def segment_gaps(
    j: tl.tensor,  # candidates of a list, counted over its segments
    of_segments: tl.tensor,  # pointer to the candidates of each segment
    length: tl.tensor,
    last: tl.tensor,
    SEGMENTS: tl.constexpr,
) -> tl.tensor:
    """How far beyond j each candidate lies, and how many there are."""
    # Scalars, one by one: the loads are under way together, and sums of them need no other thread.
    gap = tl.zeros_like(j)
    before = tl.load(of_segments)
    for i in tl.static_range(1, SEGMENTS):
        gap = tl.where(j >= before, i * length - before, gap)
        count = tl.load(of_segments + i)
        before += tl.where(i * length < last, count, 0)  # that of others was not written
    return gap, before


@jit
def join_segments(
    of_list: tl.tensor,
    of_segments: tl.tensor,
    length: tl.tensor,
    last: tl.tensor,
    total: tl.tensor,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Close the gaps between the segments' candidates, in place."""
    for start in range(0, total, TILE):
        j = start + tl.arange(0, TILE)
        gap, _ = segment_gaps(j, of_segments, length, last, SEGMENTS)
        x = tl.load(of_list + j + gap, mask=j < total)
        tl.debug_barrier()  # nothing moves up, but within a tile one may take another's place
        tl.store(of_list + j, x, mask=j < total)
    tl.debug_barrier()


@jit
def guess_at(
    low: tl.tensor,
    high: tl.tensor,
    share: tl.tensor,  # of what lies between them, to leave behind on the way from `low` to `high`
    step: tl.tensor,
) -> tl.tensor:
    """A value in (low, high] to look at.

    As far up as the share, as if all lay evenly, which takes half the steps; but each third time
    the middle, so that it cannot take many either.
    """
    span = high - low
    half = (span + 1) // 2
    # Cut off before it is an int again: the float of a large span may exceed it.
    guess = tl.minimum(span.to(tl.float32) * share, 2.0**30).to(tl.int32)
    return low + tl.where(step % 3 == 2, half, tl.minimum(tl.maximum(guess, 1), span))


@jit
def next_guess(
    low: tl.tensor,
    high: tl.tensor,
    missing: tl.tensor,  # candidates to leave behind on the way from `low` to `high`
    between: tl.tensor,  # of so many
    step: tl.tensor,
) -> tl.tensor:
    """`guess_at` of candidates, for the k-th."""
    share = missing.to(tl.float32) / tl.maximum(between, 1).to(tl.float32)
    return guess_at(low, high, share, step)


@jit
def count_at_least(
    value: tl.tensor,
    first_bits: tl.tensor,  # importance of the first TILE candidates
    of_list: tl.tensor,
    total: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Candidates whose importance reaches the value."""
    count = tl.sum((first_bits >= value).to(tl.int32), 0)
    for start in range(TILE, total, TILE):
        j = start + tl.arange(0, TILE)
        bits = (tl.load(of_list + j, mask=j < total, other=-1) >> 32).to(tl.int32)
        count += tl.sum((bits >= value).to(tl.int32), 0)
    return count


@jit
def weight_at_least(
    value: tl.tensor,
    first_bits: tl.tensor,
    of_list: tl.tensor,
    total: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """`count_at_least`, and the importance of these candidates together, a float64."""
    count = tl.sum((first_bits >= value).to(tl.int32), 0)
    heavy = tl.where(first_bits >= value, first_bits, 0).to(tl.float32, bitcast=True)
    weight = tl.sum(heavy.to(tl.float64), 0)
    for start in range(TILE, total, TILE):
        j = start + tl.arange(0, TILE)
        bits = (tl.load(of_list + j, mask=j < total, other=-1) >> 32).to(tl.int32)
        count += tl.sum((bits >= value).to(tl.int32), 0)
        heavy = tl.where(bits >= value, bits, 0).to(tl.float32, bitcast=True)
        weight += tl.sum(heavy.to(tl.float64), 0)
    return count, weight


@jit
def above_bound(
    k: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    first_bits: tl.tensor,
    of_list: tl.tensor,
    total: tl.tensor,
    BOUND: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Finds those of the k above a value, and at what values to look for the last of them.

    Returns:
        low, high, at_low, above and k of `select_tokens_kernel`; low = high if that is known.
    """
    reach = count_at_least(BOUND + 1, first_bits, of_list, total, TILE)
    fewer = reach <= k
    low = tl.where(fewer, BOUND, tl.maximum(low, BOUND + 1))
    return low, tl.where(fewer, BOUND, high), reach, tl.where(fewer, reach, 0), tl.minimum(reach, k)


@jit
def enough_for_share(
    k: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    missing: tl.tensor,  # float64
    first_bits: tl.tensor,
    of_list: tl.tensor,
    total: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Finds the first of the k whose importance reaches `missing`; returns as `above_bound`."""
    top = high
    at_low, held = weight_at_least(low, first_bits, of_list, total, TILE)
    above, held_above = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    found = total
    if missing <= 0.0:
        low = high
        found = above
    elif held >= missing:
        # Invariant: `at_low`, which hold enough, reach `low`; `above` of them, which do not, exceed
        # `high`. Where these are one less, it is known which.
        step = tl.zeros([], tl.int32)
        while (low < high) & (at_low - above > 1):
            share = ((held - missing) / (held - held_above)).to(tl.float32)
            middle = guess_at(low, high, share, step)
            reach, weight = weight_at_least(middle, first_bits, of_list, total, TILE)
            if weight >= missing:
                low = middle
                at_low = reach
                held = weight
            else:
                high = middle - 1
                above = reach
                held_above = weight
            step += 1
        of_tie = tl.maximum(low.to(tl.float32, bitcast=True).to(tl.float64), 1e-300)
        ties = tl.ceil(tl.minimum((missing - held_above) / of_tie, 2.0**30))
        # The quotient is rounded, their sums are not.
        ties += (held_above + ties * of_tie < missing).to(tl.float64)
        ties -= (held_above + (ties - 1.0) * of_tie >= missing).to(tl.float64)
        found = above + tl.minimum(tl.maximum(ties.to(tl.int32), 1), at_low - above)
    fewer = found <= k
    above = tl.where(fewer, tl.minimum(above, found), 0)
    return low, tl.where(fewer, low, top), at_low, above, tl.minimum(found, k)


@jit_for_any(*SIZES)
def select_tokens_kernel(
    scores: tl.tensor,
    lse: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    candidates: tl.tensor,
    lengths: tl.tensor,
    selection: tl.tensor,
    counts: tl.tensor,
    host_selection: tl.tensor,  # both None, or host memory
    host_counts: tl.tensor,
    score_stride: tl.tensor,
    importance_stride: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    RATIO: tl.constexpr,
    SHARE: tl.constexpr,  # None, or what a list holds at least: top_p of all of its query heads
    BOUND: tl.constexpr,  # None, or importance that does not suffice, as the bits of a float
    NUM_HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    OUT_LISTS: tl.constexpr,  # of a row of selection
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # at least the query heads of a list
    SEGMENTS: tl.constexpr,
    SEGMENT_TILE: tl.constexpr,
    TILE: tl.constexpr,
    ENDS: tl.constexpr,  # sinks and recent tokens that it looks at together
    EARLY: tl.constexpr,
) -> None:
    """One program per list and row."""
    await_inputs(EARLY)
    HEADS_OF_LIST: tl.constexpr = NUM_HEADS // LISTS
    list_idx = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kv_len = (tl.load(positions + row) + 1).to(tl.int32)
    last = kv_len - recent_tokens
    k = num_chosen(kv_len, sink_tokens, recent_tokens, budget_tokens, RATIO)
    target = row * OUT_LISTS
    if OUT_LISTS > 1:
        target += tl.load(heads + list_idx)
    tokens = selection + target * budget_tokens

    q = tl.arange(0, BLOCK_Q)
    present = q < HEADS_OF_LIST * GROUP_SIZE
    head = tl.load(heads + list_idx + q // GROUP_SIZE, mask=present, other=0)
    # Also of a row that has none, whose lengths may be anything: so the loads do not wait for the
    # position.
    j = tl.arange(0, TILE)
    length = segment_length(last, SEGMENTS, SEGMENT_TILE)
    of_list = candidates + (row * LISTS + list_idx) * importance_stride
    of_segments = lengths + (row * LISTS + list_idx) * SEGMENTS
    gap, total = segment_gaps(j, of_segments, length, last, SEGMENTS)
    of_head = lse + row * NUM_QO_HEADS + head * GROUP_SIZE + q % GROUP_SIZE
    lse_of_list = tl.abs(tl.load(of_head, mask=present, other=0.0))
    count = kv_len
    is_infinite = tl.zeros([], tl.int32)
    if kv_len > budget_tokens:
        if SHARE is not None:
            held = tl.zeros([], tl.float64)
            first_head = tl.load(heads + list_idx)
            for start in range(0, sink_tokens + recent_tokens, ENDS):
                i = start + tl.arange(0, ENDS)
                weights = importance_of(
                    tl.where(i < sink_tokens, i, last - sink_tokens + i),
                    i < sink_tokens + recent_tokens,
                    scores,
                    lse,
                    heads,
                    row,
                    list_idx,
                    first_head,
                    score_stride,
                    NUM_HEADS,
                    HEADS_OF_LIST,
                    NUM_QO_HEADS,
                    GROUP_SIZE,
                )
                held += tl.sum(weights.to(tl.float64), 0)
        if total > TILE:
            join_segments(of_list, of_segments, length, last, total, SEGMENTS, TILE)
            gap = tl.zeros_like(gap)
        x = tl.load(of_list + j + gap, mask=j < total, other=-1)
        bits, token = (x >> 32).to(tl.int32), x.to(tl.int32)
        high = tl.max(bits, 0)
        low = tl.min(tl.where(j < total, bits, high), 0)
        for start in range(TILE, total, TILE):
            inside = start + j < total
            other = (tl.load(of_list + start + j, mask=inside, other=-1) >> 32).to(tl.int32)
            high = tl.maximum(high, tl.max(other, 0))
            low = tl.minimum(low, tl.min(tl.where(inside, other, high), 0))
        is_infinite = (high == 0x7F800000).to(tl.int32)

        # Invariant: `at_low`, k or more, reach `low`; `above` of them, fewer than k, exceed `high`.
        at_low, above = total, tl.zeros([], tl.int32)
        if BOUND is not None:
            low, high, at_low, above, k = above_bound(
                k, low, high, bits, of_list, total, BOUND, TILE
            )
        if SHARE is not None:
            is_infinite = tl.where(held < float("inf"), is_infinite, 1)
            # Where there will be no list, nothing is looked for.
            missing = tl.where(is_infinite > 0, 0.0, tl.full([], SHARE, tl.float64) - held)
            low, high, at_low, above, k = enough_for_share(
                k, low, high, missing, bits, of_list, total, TILE
            )
        step = tl.zeros([], tl.int32)
        middle = low + 1  # first: are the lowest ones, perhaps many ties, needed at all?
        while low < high:
            reach = count_at_least(middle, bits, of_list, total, TILE)
            if reach > k:
                low = middle
                at_low = reach
            elif reach < k:
                high = middle - 1
                above = reach
            else:  # exactly these
                low = middle - 1
                high = middle - 1
                above = reach
            middle = next_guess(low, high, at_low - k, at_low - above, step)
            step += 1

        ties = k - above  # of those that equal `low`, the first
        written = sink_tokens
        for start in range(0, total, TILE):
            if start > 0:
                x = tl.load(of_list + start + j, mask=start + j < total, other=-1)
                bits, token = (x >> 32).to(tl.int32), x.to(tl.int32)
            taken, place, found, num_ties = take(bits, low, ties)
            tl.store(
                tokens + written + place, token, mask=taken & (written + place < budget_tokens)
            )
            written += found
            ties -= num_ties
        count = sink_tokens + k + recent_tokens
        for start in range(0, sink_tokens, TILE):
            tl.store(tokens + start + j, start + j, mask=start + j < sink_tokens)
        for start in range(0, recent_tokens, TILE):
            recent = start + j
            tl.store(tokens + sink_tokens + k + recent, last + recent, mask=recent < recent_tokens)
    else:
        for start in range(0, kv_len, TILE):
            tl.store(tokens + start + j, start + j, mask=start + j < kv_len)

    is_bad = (tl.sum(tl.where(lse_of_list < float("inf"), 0, 1), 0) > 0) | (is_infinite > 0)
    count = tl.where(is_bad & (kv_len > 0), -1, count)
    tl.store(counts + target, count)
    if host_selection is not None:
        tl.debug_barrier()  # the list is complete; whole vectors of it go to the host
        for start in range(0, count, TILE):
            inside = start + j < count
            token = tl.load(tokens + start + j, mask=inside, other=0)
            tl.store(host_selection + target * budget_tokens + start + j, token, mask=inside)
        tl.store(host_counts + target, count)
