"""The third kernel of `top_k_codes`: from scores and counts of them to a list's tokens.

Several programs per list, each of a segment of its tokens. The counts say which bin the k-th is in.
Tokens above it are chosen; those in it, a few hundred of 128K, each program publishes of its
segment, and waits for the others of its list. Then each knows all of them, finds the k-th, and how
many tokens of the segments before its own are chosen: that is where it writes its own ones.
"""

from __future__ import annotations

from gpu_ops.early_launch import await_inputs
from gpu_ops.launch import jit, jit_for_any, tl
from gpu_ops.score_bins import bin_of_kth, first_key, score_key
from gpu_ops.top_k_candidates import SIZES, num_chosen, take
from gpu_ops.top_k_select import next_guess


@jit
def await_others(arrivals: tl.tensor, NUM_PROGRAMS: tl.constexpr) -> None:
    """Wait until all programs of a list, a power of two, are here, with what they have written.

    They have consecutive indices: so that those before are running, or done, and none after is one
    of whom programs wait that are to make room for it. `arrivals` counts on from call to call.
    """
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred other, missing;
            .reg .b32 thread, last, seen;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            @other bra done;
            atom.release.gpu.global.add.u32 last, [$1], 1;
            or.b32 last, last, $2;
        look:
            ld.acquire.gpu.global.u32 seen, [$1];
            sub.s32 seen, seen, last;
            setp.le.s32 missing, seen, 0;
            @missing bra look;
        done:
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,~{memory}",
        [arrivals, NUM_PROGRAMS - 1],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@jit
def load_scores(of_list: tl.tensor, t: tl.tensor, end: tl.tensor) -> tl.tensor:
    """As bits, of tokens up to a segment's end."""
    # Up to 15 tokens more than there are, so that loads are of whole vectors.
    return tl.load(of_list + t, mask=t < tl.cdiv(end, 16) * 16, other=0)


@jit
def keys_of(bits: tl.tensor, t: tl.tensor, sink_tokens: tl.tensor, end: tl.tensor) -> tl.tensor:
    """-1 of tokens that cannot be chosen or are of another segment."""
    present = (t >= sink_tokens) & (t < end)
    return tl.where(present, score_key(bits.to(tl.float32, bitcast=True)), -1)


@jit
def load_keys(
    of_list: tl.tensor, t: tl.tensor, sink_tokens: tl.tensor, end: tl.tensor
) -> tl.tensor:
    """Both."""
    return keys_of(load_scores(of_list, t, end), t, sink_tokens, end)


@jit
def load_found(
    source: tl.tensor,  # segments
    place: tl.tensor,  # of each
    of_list: tl.tensor,
    of_segments: tl.tensor,
    length: tl.tensor,
    last: tl.tensor,
) -> tl.tensor:
    """What segments have published; -1 beyond the last of one."""
    # Both loads are under way together; the keys' may be of what was never written.
    num_found = tl.load(of_segments + source)
    token = source * length + place
    x = tl.load(of_list + token, mask=(place < length) & (token < last), other=-1)
    return tl.where(place < num_found, x, -1)


@jit
def exceeding(x: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """1 for those that exceed a bound, 2**32 for those that equal it: both are added up at once."""
    return (x > bound).to(tl.int64) | ((x == bound).to(tl.int64) << 32)


@jit
def scattered(base: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Pointers to int32 for a store of few elements, as if they lay side by side.

    Else the compiler would have each thread store single elements from all over the tile, and take
    them there through shared memory, in ten barriers a store. They are not merged, as nothing is
    known of the store's mask.
    """
    return tl.max_contiguous(tl.multiple_of(base + at, 16), 4)


@jit_for_any(*SIZES)
def select_scored_kernel(
    offsets: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    scores: tl.tensor,
    bins: tl.tensor,
    arrivals: tl.tensor,
    found: tl.tensor,
    lengths: tl.tensor,
    certain: tl.tensor,
    selection: tl.tensor,
    counts: tl.tensor,
    host_selection: tl.tensor,  # both None, or host memory
    host_counts: tl.tensor,
    score_stride: tl.tensor,
    found_stride: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    RATIO: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    OUT_LISTS: tl.constexpr,  # of a row of selection
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,  # tokens that a program looks at together
    FOUND: tl.constexpr,  # of the k-th's bin, as many of each segment
    BINS: tl.constexpr,
    RUN: tl.constexpr,  # tokens of the list that are copied together
    PHASE: tl.constexpr,  # None: both; for the interpreter, which cannot wait, 1, then 2
    EARLY: tl.constexpr,
) -> None:
    """One program per segment, list and row."""
    await_inputs(EARLY)
    EACH: tl.constexpr = FOUND // SEGMENTS
    segment, list_idx = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    # What does not depend on each other is loaded together, as by `score_codes_kernel`.
    position = tl.load(positions + row, volatile=True)
    kv_head = tl.load(heads + list_idx, volatile=True)
    source = row * NUM_HEADS + list_idx
    of_bins = tl.load(bins + source * BINS + tl.arange(0, BINS), volatile=True)
    num_infinite = tl.load(bins + source * BINS + BINS - 1, volatile=True)
    kv_len = (position + 1).to(tl.int32)
    if (kv_len <= budget_tokens) & (segment > 0):
        return

    target = row * OUT_LISTS + kv_head
    tokens = selection + target * budget_tokens
    g, i, j = tl.arange(0, BLOCK_G), tl.arange(0, RUN), tl.arange(0, FOUND)
    of_head = offsets + row * NUM_QO_HEADS + kv_head * GROUP_SIZE + g
    offset = tl.abs(tl.load(of_head, mask=g < GROUP_SIZE, other=0.0))
    count = kv_len
    begin = tl.zeros([], tl.int32)
    end = kv_len
    if kv_len > budget_tokens:
        k = num_chosen(kv_len, sink_tokens, recent_tokens, budget_tokens, RATIO)
        last = kv_len - recent_tokens
        length = tl.cdiv(last, SEGMENTS * 16) * 16
        first = segment * length
        behind = tl.minimum(first + length, last)
        of_list = scores + source * score_stride
        of_found = found + source * found_stride
        of_segments = lengths + source * SEGMENTS
        t = first + tl.arange(0, TILE)
        bits = load_scores(of_list, t, behind)  # under way while the bin is found
        place, above = bin_of_kth(of_bins, k, BINS)
        keys = keys_of(bits, t, sink_tokens, behind)
        low, high = first_key(place), first_key(place + 1)
        if PHASE != 2:
            num_certain, num_found = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
            for start in range(first, behind, TILE):
                x = keys
                if start > first:
                    x = load_keys(of_list, start - first + t, sink_tokens, behind)
                is_found = (x >= low) & (x < high)
                # Both in one scan: a tile has fewer than 2**15 tokens.
                up_to = tl.cumsum(is_found.to(tl.int32) | ((x >= high).to(tl.int32) << 16), 0)
                at = first + num_found + (up_to & 0xFFFF) - 1
                tl.store(scattered(of_found, at), x, mask=is_found)
                total = tl.max(up_to, 0)
                num_found += total & 0xFFFF
                num_certain += total >> 16
            tl.store(of_segments + segment, num_found)
            tl.store(certain + source * SEGMENTS + segment, num_certain)
        if PHASE is None:
            await_others(arrivals + source, SEGMENTS)
        if PHASE != 1:
            s = tl.arange(0, SEGMENTS)
            of_segment = tl.load(of_segments + s)
            most, total = tl.max(of_segment, 0), tl.sum(of_segment, 0)
            of_segment = tl.load(certain + source * SEGMENTS + s)
            begin = sink_tokens + tl.sum(tl.where(s < segment, of_segment, 0), 0)
            by, place = j // EACH, j % EACH
            published = load_found(by, place, of_found, of_segments, length, last)

            # Invariant: `at_low`, as many as are missing or more, reach `low`; `reached` of them,
            # fewer, exceed `high`.
            missing = k - above
            at_low, reached = total, tl.zeros([], tl.int32)
            high -= 1
            if most > EACH:  # perhaps all the same
                bottom, top = high, low
                for start in range(0, most, EACH):
                    y = load_found(by, start + place, of_found, of_segments, length, last)
                    top = tl.maximum(top, tl.max(y, 0))
                    bottom = tl.minimum(bottom, tl.min(tl.where(y < 0, top, y), 0))
                low = bottom
                high = top
            step = tl.zeros([], tl.int32)
            middle = next_guess(low, high, at_low - missing, at_low, step)
            while low < high:
                reach = tl.sum((published >= middle).to(tl.int32), 0)
                for start in range(EACH, most, EACH):
                    y = load_found(by, start + place, of_found, of_segments, length, last)
                    reach += tl.sum((y >= middle).to(tl.int32), 0)
                if reach > missing:
                    low = middle
                    at_low = reach
                elif reach < missing:
                    high = middle - 1
                    reached = reach
                else:  # exactly these
                    low = middle - 1
                    high = middle - 1
                    reached = reach
                step += 1
                middle = next_guess(low, high, at_low - missing, at_low - reached, step)

            ties = missing - reached  # of those that equal `low`, the first
            chosen = tl.sum(exceeding(tl.where(by < segment, published, -1), low), 0)
            for start in range(EACH, most, EACH):
                y = load_found(by, start + place, of_found, of_segments, length, last)
                chosen += tl.sum(exceeding(tl.where(by < segment, y, -1), low), 0)
            of_ties = tl.minimum((chosen >> 32).to(tl.int32), ties)
            begin += chosen.to(tl.int32) + of_ties
            ties -= of_ties

            end = begin
            for start in range(first, behind, TILE):
                x = keys
                if start > first:
                    x = load_keys(of_list, start - first + t, sink_tokens, behind)
                taken, at, num_taken, num_ties = take(x, low, ties)
                at += end
                taken &= at < budget_tokens
                tl.store(scattered(tokens, at), start - first + t, mask=taken)
                end += num_taken
                ties -= num_ties
            end = tl.minimum(end, budget_tokens)
            count = sink_tokens + k + recent_tokens
            # Sinks and recent tokens, as if they were the first and the last segment's.
            if segment == 0:
                for start in range(0, sink_tokens, RUN):
                    tl.store(tokens + start + i, start + i, mask=start + i < sink_tokens)
                begin = tl.zeros([], tl.int32)
            if segment == SEGMENTS - 1:
                for start in range(0, recent_tokens, RUN):
                    at = count - recent_tokens + start + i
                    tl.store(tokens + at, last + start + i, mask=at < count)
                end = count
    else:
        for start in range(0, kv_len, RUN):
            tl.store(tokens + start + i, start + i, mask=start + i < kv_len)
    if PHASE != 1:
        num_bad = num_infinite + tl.sum(tl.where(offset < float("inf"), 0, 1), 0)
        count = tl.where((num_bad > 0) & (kv_len > 0), -1, count)
        if segment == 0:
            tl.store(counts + target, count)
        if host_selection is not None:
            tl.debug_barrier()  # the program's part is complete; whole vectors of it go to the host
            for start in range(begin, end, RUN):
                inside = start + i < end
                token = tl.load(tokens + start + i, mask=inside, other=0)
                tl.store(host_selection + target * budget_tokens + start + i, token, mask=inside)
            if segment == 0:
                tl.store(host_counts + target, count)
