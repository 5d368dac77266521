"""LFPS: candidates from where attention went before, by position and by distance.

Source: Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding. Per unit, a
vertical table A_v[i] scores token i and a slash table A_s[j] the distance j = t - i; sink tokens
are in neither. Before the query of step t is known,

    candidates = {i: A_v[i] > theta_v} U {t - j: A_s[j] > theta_s},
    theta = mean + alpha * max / sqrt(kurtosis) of each table,

and of a candidate's neighbours {-1, 1, 2} those that are above the mean of a table (equations 7 to
9). The runtime scores the candidates exactly and attends to the best of them; what is attended
enters both tables, A <- gamma A + weight / 2 (equation 10), with weights that leave the sinks out.
The tables begin as those of the last 32 queries of the prompt (equation 4).

A highly sparse head (equations 5 and 6, appendix B.1) has s = S / (S + max(G, L)) above
`bypass_threshold`, where S is the sinks' sum of exp(q.k), L that of the last five tokens, and G a
log-normal estimate of everything but the sinks. It does not vote in the tables; a unit all of whose
heads are such is not attended: it answers s * (sinks' values) + (1 - s) * (mean value).

Where that names fewer candidates than twice the budget in a context of at most 16 budgets,
thresholds are lowered towards the means. With 1,024 of 6K tokens of prose, SmolLM2's perplexity
rises by 16 % without this and by 2 % with it: what a head looks up anew is not where it looked
before.

A unit is a KV head with its group (`granularity="kv_head"`) or one query head. With SmolLM2 at 6.5K
tokens and alpha 0.2 both keep 0.955 of the attention mass that exact top-k keeps in 2 % of the
tokens, from 4.2 % of candidates, while single query heads read the keys and values of each head of
a group again: the group is the default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt

from offload.policies.base import BuildContext, DeviceBuild, SparsePolicy
from offload.policies.callback import (
    ANSWERED,
    Callback,
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
from offload.policies.device_build import to_host
from offload.policies.lfps_bypass import answer_from_sinks, log_odds_of_sinks
from offload.policies.lfps_layout import (
    ATTEMPT,
    CANDIDATES,
    CAPACITY,
    LISTED,
    SCALE,
    STEP,
    VOTES,
    list_all,
    make_arrays,
    num_words,
    top_bit,
    unlist_all,
)
from offload.policies.lfps_prompt import (
    check_queries,
    fill_tables,
    prompt_weights,
    tables_on_device,
)
from offload.policies.lfps_tables import (
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
from offload.policies.lfps_votes import group_weights

GRANULARITIES = ("kv_head", "query_head")
_LOCAL_TOKENS = 5  # of L
_LARGEST_SCALE = 1e15  # 1 / gamma^steps of a unit, before its tables are rescaled


@numba.njit(inline="always")
def _bypass_floats(head_dim: Any, sink_tokens: Any, group_size: Any) -> Any:
    return (2 + sink_tokens) * head_dim + group_size * (1 + sink_tokens + _LOCAL_TOKENS)


@callback
def prepare(pointer: Any) -> None:
    ctx = read_context(pointer)
    sizes = view_int32(ctx.arrays[7], 3)
    capacity, listed, longest = sizes[CAPACITY], sizes[LISTED], sizes[CANDIDATES]
    words, top = num_words(capacity), top_bit(capacity)
    bitmaps = ctx.arrays[3] + 8 * ctx.unit * 3 * words
    bits_v = view_uint64(bitmaps, words)
    bits_s = view_uint64(bitmaps + 8 * words, words)
    marks = view_uint64(bitmaps + 16 * words, words)
    states = ctx.arrays[4] + 8 * ctx.unit * (VOTES + ctx.group_size)
    state_v = view_float64(states, TABLE_STATE)
    state_s = view_float64(states + 8 * TABLE_STATE, TABLE_STATE)
    unit = view_float64(states, VOTES)
    at = ctx.unit * 2 * capacity
    table_v = view_float32(offset_floats(ctx.arrays[0], at), capacity)
    table_s = view_float32(offset_floats(ctx.arrays[0], at + capacity), capacity)
    at = ctx.unit * 2 * listed
    values_v = view_float32(offset_floats(ctx.arrays[1], at), listed)
    values_s = view_float32(offset_floats(ctx.arrays[1], at + listed), listed)
    indices_v = view_int32(offset_floats(ctx.arrays[2], at), listed)
    indices_s = view_int32(offset_floats(ctx.arrays[2], at + listed), listed)
    at = ctx.unit * (longest + listed)
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
    due = unit[STEP] >= prune_every
    if due:
        unit[STEP] = 0.0
    if due or state_v[FULL] > 0.0:
        prune(table_v, values_v, indices_v, bits_v, -1, state_v, mean_of(state_v, n))
    if due or state_s[FULL] > 0.0:
        prune(table_s, values_s, indices_s, bits_s, top, state_s, mean_of(state_s, n))
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
        ctx.arrays[5], ctx.unit * _bypass_floats(ctx.head_dim, ctx.first, ctx.group_size)
    )
    prefetch(bypass_at, 4 * _bypass_floats(ctx.head_dim, ctx.first, ctx.group_size))
    view_int32(ctx.arrays[7], 3 + ctx.unit + 1)[3 + ctx.unit] = count
    ctx.bytes_touched += np.int64(8 * (state_v[COUNT] + state_s[COUNT])) + 32 * marked + 4 * count


@callback
def propose(pointer: Any) -> int:
    ctx = read_context(pointer)
    sizes = view_int32(ctx.arrays[7], 3 + ctx.unit + 1)
    listed, longest = sizes[LISTED], sizes[CANDIDATES]
    candidates_at = offset_floats(ctx.arrays[6], ctx.unit * (longest + listed))
    group_size, head_dim, num_sinks = ctx.group_size, ctx.head_dim, ctx.first
    states = ctx.arrays[4] + 8 * ctx.unit * (VOTES + group_size)
    votes = view_float64(states + 8 * VOTES, group_size)
    threshold = ctx.parameters[2]
    attending = group_size
    if threshold < 1.0 and 0 < num_sinks <= listed - _LOCAL_TOKENS:
        attending = 0
        width = _bypass_floats(head_dim, num_sinks, group_size)
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
    count: int = sizes[3 + ctx.unit]
    return count


@callback
def observe(pointer: Any) -> None:
    ctx = read_context(pointer)
    sizes = view_int32(ctx.arrays[7], 3)
    capacity, listed, longest = sizes[CAPACITY], sizes[LISTED], sizes[CANDIDATES]
    words = num_words(capacity)
    bitmaps = ctx.arrays[3] + 8 * ctx.unit * 3 * words
    states = ctx.arrays[4] + 8 * ctx.unit * (VOTES + ctx.group_size)
    unit = view_float64(states, VOTES)
    votes = view_float64(states + 8 * VOTES, ctx.group_size)
    first, num = ctx.first, ctx.num_indices
    # Candidates are the runtime's by now: their place takes the weights.
    combined = view_float32(
        offset_floats(ctx.arrays[6], ctx.unit * (longest + listed)), num - first
    )
    weights = view_float32(ctx.weights, ctx.group_size * num)
    if not group_weights(weights, num, first, ctx.group_size, votes, combined):
        return
    tokens = view_int32(offset_floats(ctx.indices, first), num - first)
    unit[SCALE] /= ctx.parameters[1]
    overflows = unit[SCALE] > _LARGEST_SCALE
    factor = 1.0 / unit[SCALE]
    if overflows:
        unit[SCALE] = 1.0
    for k in range(2):
        table = view_float32(offset_floats(ctx.arrays[0], (ctx.unit * 2 + k) * capacity), capacity)
        at = (ctx.unit * 2 + k) * listed
        values = view_float32(offset_floats(ctx.arrays[1], at), listed)
        indices = view_int32(offset_floats(ctx.arrays[2], at), listed)
        bits = view_uint64(bitmaps + 8 * words * k, words)
        state = view_float64(states + 8 * TABLE_STATE * k, TABLE_STATE)
        if overflows:
            rescale(table, values, state, factor)
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
        )
    ctx.bytes_touched += (num - first) * 24 + 4 * num * ctx.group_size


@dataclass(frozen=True)
class LFPS(SparsePolicy):
    """Exact top-k among candidates that earlier steps point to.

    Args:
        alpha: how far above the mean a score must be, in units of maximum / sqrt(kurtosis); larger
            means fewer candidates.
        gamma: decay of the scores per step.
        bypass_threshold: heads that attend to the sinks this much are answered from them; 1.0:
            none.
        granularity: "kv_head": a KV head's group shares tables and selection; "query_head".
    """

    name: ClassVar[str] = "lfps"
    observed_queries: ClassVar[int] = 32
    prepare: ClassVar[Callback | None] = prepare
    propose: ClassVar[Callback | None] = propose
    observe: ClassVar[Callback | None] = observe
    # Steps between prunings of the lists. In between, neighbours that fell below the mean since
    # the last one are still added to candidates; 1 is the paper's rule to the letter.
    prune_every: ClassVar[int] = 8
    # Where the rule names fewer candidates than this times the budget, thresholds are lowered
    # towards the means, and recent tokens fill up what is then still missing.
    candidates_per_budget: ClassVar[float] = 2.0
    # This is done while the context is at most so many budgets long. Beyond, candidates are the
    # rule's: at 128K tokens more of them would cost a third of the speed.
    short_context_budgets: ClassVar[float] = 16.0

    alpha: float = 0.2
    gamma: float = 0.95
    bypass_threshold: float = 0.85
    granularity: str = "kv_head"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "gamma", "bypass_threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be above 0 and finite, got {self.alpha}")
        if not 0.0 < self.gamma < 1.0:
            raise ValueError(f"gamma must be between 0 and 1, both excluded, got {self.gamma}")
        if not 0.0 < self.bypass_threshold <= 1.0:
            raise ValueError(
                "bypass_threshold must be above 0 and at most 1 (1: no head is bypassed),"
                f" got {self.bypass_threshold}"
            )
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"granularity must be one of {', '.join(GRANULARITIES)}, got {self.granularity!r}"
            )

    @property
    def per_query_head(self) -> bool:  # type: ignore[override]
        return self.granularity == "query_head"

    def parameters(self) -> tuple[float, ...]:
        return (
            self.alpha,
            self.gamma,
            self.bypass_threshold,
            float(self.prune_every),
            self.candidates_per_budget,
            self.short_context_budgets,
        )

    def build(self, context: BuildContext) -> Sequence[npt.NDArray[Any]]:
        """Tables of the last queries, and the means and sink values that bypasses answer with.

        Raises:
            ValueError: no queries were kept (`DecodeAttention.record_queries` takes them).
        """
        check_queries(context, self.observed_queries)
        num_kv_heads, kv_len, head_dim = context.keys.shape
        num_qo_heads = len(context.queries)
        sinks = self.sink_tokens
        group_size = 1 if self.per_query_head else num_qo_heads // num_kv_heads
        num_units = num_qo_heads // group_size
        tables = np.zeros((num_units, 2, context.capacity_tokens), np.float32)
        bypass = np.zeros((num_units, _bypass_floats(head_dim, sinks, group_size)), np.float32)
        for kv_head, (weights, shared, ratios) in enumerate(prompt_weights(context, sinks)):
            of_head = range(
                kv_head * num_units // num_kv_heads, (kv_head + 1) * num_units // num_kv_heads
            )
            for k, unit in enumerate(of_head):
                mine = slice(k * group_size, (k + 1) * group_size)
                bypass[unit, : len(shared)] = shared.numpy()
                bypass[unit, len(shared) : len(shared) + group_size] = ratios[mine].numpy()
                fill_tables(tables[unit], weights[mine].mean(0).numpy(), sinks, self.gamma)
        return make_arrays(tables, bypass, group_size, max(kv_len - sinks, 1), self.budget_tokens)

    def build_on_device(self, context: BuildContext) -> DeviceBuild | None:
        """The same; sums of float32 in another order."""
        check_queries(context, self.observed_queries)
        num_kv_heads, kv_len, head_dim = context.keys.shape
        sinks, capacity_tokens = self.sink_tokens, context.capacity_tokens
        group_size = 1 if self.per_query_head else context.queries.shape[0] // num_kv_heads
        width = _bypass_floats(head_dim, sinks, group_size)
        sums, rows = tables_on_device(context, sinks, self.gamma, group_size, width)
        scores, bypass = to_host(sums), to_host(rows)

        def finish() -> Sequence[npt.NDArray[Any]]:
            tables = np.zeros((len(scores), 2, capacity_tokens), np.float32)
            tables[:, 0, sinks:kv_len] = scores[:, 0].numpy()
            tables[:, 1, : kv_len - sinks] = scores[:, 1].numpy()
            num_tokens = max(kv_len - sinks, 1)
            return make_arrays(
                tables, bypass.numpy().copy(), group_size, num_tokens, self.budget_tokens
            )

        return finish

    def grow(
        self, layer_idx: int, arrays: Sequence[npt.NDArray[Any]], capacity_tokens: int
    ) -> Sequence[npt.NDArray[Any]]:
        tables, states = arrays[0], arrays[4]
        group_size = states.shape[1] - VOTES
        unlist_all(arrays)
        grown = np.zeros((len(tables), 2, capacity_tokens), np.float32)
        grown[:, :, : tables.shape[2]] = tables
        return make_arrays(
            grown,
            arrays[5],
            group_size,
            tables.shape[2] - self.sink_tokens,
            self.budget_tokens,
            unit_states=states,
        )

    def truncate(self, layer_idx: int, arrays: Sequence[npt.NDArray[Any]], kv_len: int) -> bool:
        unlist_all(arrays)
        arrays[0][:, 0, kv_len:] = 0.0
        arrays[0][:, 1, max(kv_len - self.sink_tokens, 0) :] = 0.0
        list_all(arrays, max(kv_len - self.sink_tokens, 1))
        return True
