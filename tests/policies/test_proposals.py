"""Policies that name candidates, that answer themselves, and that reuse across layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import (
    GROUP_SIZE,
    TOLERANCE,
    Cache,
    attend,
    make_case,
    random_queries,
    relative_error,
)
from cases.pools import pools
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops.worker_pool import WorkerPool
from offload.policies import ExactTopK
from offload.policies.base import SparsePolicy
from offload.selection.callback import (
    ANSWERED,
    Callback,
    callback,
    load_keys,
    offset_floats,
    rank_rows,
    read_context,
    score_rows,
    store_rows,
    view_float32,
    view_int32,
)
from offload.selection.layer_state import LayerState
from offload.selection.layouts import NumberLayout, StateLayout
from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT

HEAD_DIM = 64
OPTIONS = {"budget_tokens": 40, "sink_tokens": 3, "recent_tokens": 7, "dense_layers": 0}
THIRDS, NUMBERS = StateLayout(tokens=np.int32, appended=np.int32), NumberLayout("answers")
read_thirds, read_numbers = THIRDS.read, NUMBERS.read


@callback
def propose(pointer: Any) -> int:
    """Every third token; unit 1 answers ones instead when `answers` asks for it."""
    ctx = read_context(pointer)
    if read_numbers(ctx.parameters).answers > 0 and ctx.unit == 1:
        output = view_float32(ctx.output, ctx.group_size * ctx.head_dim)
        lse = view_float32(ctx.lse, ctx.group_size)
        for i in range(len(output)):
            output[i] = 1.0
        for g in range(ctx.group_size):
            lse[g] = ctx.kv_len
        return ANSWERED
    tokens = view_int32(read_thirds(ctx.arrays).tokens, 4096, ctx.unit)
    count = 0
    for t in range(ctx.first, ctx.last):
        if t % 3 == 0:
            tokens[count] = t
            count += 1
    ctx.candidates = offset_floats(read_thirds(ctx.arrays).tokens, ctx.unit * 4096)
    ctx.bytes_touched += 4 * count
    return count


@callback
def select(pointer: Any) -> int:
    """The first candidates, by position, whatever their weight."""
    ctx = read_context(pointer)
    count = min(ctx.num_candidates, ctx.budget_tokens)
    positions = view_int32(ctx.indices, count)
    for i in range(count):
        positions[i] = i
    return count


@callback
def append(pointer: Any) -> None:
    ctx = read_context(pointer)
    view_int32(read_thirds(ctx.arrays).appended, 64)[ctx.unit] += 1


class ThirdsState(LayerState):
    layout = THIRDS

    def build(self, context):
        return {"tokens": np.zeros((32, 4096), np.int32), "appended": np.zeros(64, np.int32)}


@dataclass(frozen=True)
class EveryThird(SparsePolicy):
    name: ClassVar[str] = "every_third"
    propose: ClassVar[Callback | None] = propose
    append: ClassVar[Callback | None] = append
    state = cached_property(ThirdsState)
    number_layout: ClassVar[NumberLayout | None] = NUMBERS
    answers: bool = False


@dataclass(frozen=True)
class FirstThirds(EveryThird):
    select: ClassVar[Callback | None] = select


pool = pools(1, 3)


def thirds(kv_len: int) -> np.ndarray:
    return np.array([t for t in range(3, kv_len - 7) if t % 3 == 0])


@pytest.mark.parametrize(
    ("dtype", "kv_len"),
    combinations([torch.float32, torch.float16, torch.bfloat16], [41, 300, 3001]),
)
def test_the_heaviest_candidates_are_attended(kv_len, dtype, pool):
    cache, queries = make_case(dtype, kv_len, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, EveryThird(**OPTIONS))
    out, lse = attend(attention, [cache.seq], [kv_len], queries)
    selection = [np.array(tokens) for tokens in attention.last_selection()]
    considered = np.concatenate([np.arange(3), thirds(kv_len), np.arange(kv_len - 7, kv_len)])
    _, _, weights = cache.expected(queries, kv_len, [considered] * 2)
    for head, tokens in enumerate(selection):
        importance = sum(weights[head * GROUP_SIZE : (head + 1) * GROUP_SIZE])[3:-7]
        best = thirds(kv_len)[reference.top_k(importance, 30)]
        assert list(tokens[:3]) == [0, 1, 2]
        assert list(tokens[-7:]) == list(range(kv_len - 7, kv_len))
        of_token = dict(zip(thirds(kv_len).tolist(), importance.tolist(), strict=True))
        missed = sorted(of_token[t] for t in set(best.tolist()) - set(tokens[3:-7].tolist()))
        instead = sorted(of_token[t] for t in set(tokens[3:-7].tolist()) - set(best.tolist()))
        np.testing.assert_allclose(instead, missed, rtol=1e-4)
    expected, expected_lse, _ = cache.expected(queries, kv_len, selection)
    assert relative_error(out[0], expected) < TOLERANCE[dtype]
    np.testing.assert_allclose(lse[0], expected_lse, atol=2e-3)


def test_select_chooses_positions_among_the_candidates(pool):
    cache, queries = make_case(kv_len=500, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, FirstThirds(**OPTIONS))
    out, _ = attend(attention, [cache.seq], [500], queries)
    wanted = [0, 1, 2, *thirds(500)[:30].tolist(), *range(493, 500)]
    assert attention.last_selection() == [wanted, wanted]
    expected, _, _ = cache.expected(queries, 500, [np.array(wanted)] * 2)
    assert relative_error(out[0], expected) < TOLERANCE[torch.float32]


def test_a_policy_may_answer_for_a_unit(pool):
    cache, queries = make_case(kv_len=500, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, EveryThird(**OPTIONS, answers=True))
    out, lse = attend(attention, [cache.seq], [500], queries)
    selection = attention.last_selection()
    assert len(selection[0]) == 40
    assert selection[1] == []
    rows = out[0].reshape(-1, HEAD_DIM)
    assert (rows[GROUP_SIZE:] == 1).all()
    assert (lse[0][GROUP_SIZE:] == 500).all()
    expected, _, _ = cache.expected(queries, 500, [np.array(selection[0]), np.arange(9)])
    assert relative_error(rows[:GROUP_SIZE], expected[:GROUP_SIZE]) < TOLERANCE[torch.float32]
    appended = attention.states.arrays_of(cache.seq).layers[1]["appended"]
    assert appended[:3].tolist() == [1, 1, 0]  # answered units are told of new tokens too


def test_profile_counts_bytes_and_tokens(pool):
    cache, queries = make_case(kv_len=500, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, EveryThird(**OPTIONS))
    attention.start_profile()
    attend(attention, [cache.seq], [500], queries)
    profile = attention.profile()
    candidates = len(thirds(500))
    row_bytes = HEAD_DIM * 4
    assert profile["scored_tokens"] == 2 * (candidates + 10)
    assert profile["attended_tokens"] == 2 * 40
    assert profile["bytes"] == 2 * ((candidates + 10 + 40) * row_bytes + 4 * candidates)
    assert set(profile["seconds"]) == {"predict", "score", "select", "attend", "update"}
    assert all(seconds > 0 for seconds in profile["seconds"].values())
    attention.start_profile()
    assert attention.profile()["bytes"] == 0


@dataclass(frozen=True)
class Reusing(ExactTopK):
    """Layer 0 dense, 1 retrieves or selects, 2 and 3 reuse, but unit 0 of 3 has a say again."""

    name: ClassVar[str] = "reusing"
    first_role: int = RETRIEVE

    def roles(self, num_layers: int, num_units: int):
        table = [[DENSE] * 2, [self.first_role] * 2, [REUSE] * 2, [self.first_role, REUSE]]
        return np.array(table, np.uint8)


@pytest.mark.parametrize(
    ("first_role", "kv_len"), combinations([RETRIEVE, SELECT], [41, 700, 1500])
)
def test_roles(first_role, kv_len, pool):
    rng = new_rng()
    cache = Cache.random(rng, kv_len=kv_len, dtype=torch.float32, page_tokens=16, num_layers=4)
    queries = random_queries(rng, 1, 2 * GROUP_SIZE, HEAD_DIM, torch.float32)
    attention = cache.attention(pool, GROUP_SIZE, Reusing(**OPTIONS, first_role=first_role))
    plain = cache.attention(pool, GROUP_SIZE, ExactTopK(**OPTIONS))
    seen = []
    for layer_idx in range(4):
        out, lse = attend(attention, [cache.seq], [kv_len], queries, layer_idx=layer_idx)
        seen.append(attention.last_selection())
        expected, expected_lse, _ = cache.reference(
            queries, layer_idx, [np.array(s) if s else np.arange(kv_len) for s in seen[-1]]
        )
        assert relative_error(out[0], expected) < TOLERANCE[torch.float32]
        np.testing.assert_allclose(lse[0], expected_lse, atol=2e-3)
    published = []
    for layer_idx in (1, 3):
        attend(plain, [cache.seq], [kv_len], queries, layer_idx=layer_idx)
        published.append(plain.last_selection())
    retrieves = first_role == RETRIEVE
    assert seen[0] == [[], []]
    assert seen[1] == ([[], []] if retrieves else published[0])
    assert seen[2] == published[0]
    assert seen[3] == [[] if retrieves else published[1][0], published[0][1]]


def test_rows_of_a_step_reuse_their_own(pool):
    rng = new_rng()
    cache = Cache.random(rng, kv_len=400, dtype=torch.float32, page_tokens=16, num_layers=4)
    queries = random_queries(rng, 3, 2 * GROUP_SIZE, HEAD_DIM, torch.float32)
    kv_lens = [400, 39, 380]
    attention = cache.attention(pool, GROUP_SIZE, Reusing(**OPTIONS))
    for layer_idx in range(3):
        attend(attention, [cache.seq] * 3, kv_lens, queries, layer_idx=layer_idx)
    together = attention.last_selection()
    for row in (0, 2):
        for layer_idx in range(3):
            one = queries[row : row + 1]
            attend(attention, [cache.seq], kv_lens[row : row + 1], one, layer_idx=layer_idx)
        assert together[2 * row : 2 * row + 2] == attention.last_selection()
    assert together[2:4] == [[], []]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[DENSE, SELECT]], None),
        ([[SELECT, SELECT], [DENSE, DENSE], [REUSE, REUSE]], None),
        ([[SELECT, REUSE]], "unit 1 of layer 0 reuses a selection"),
    ],
)
def test_roles_that_cannot_be_followed_are_refused(table, message, pool):
    class Strange(ExactTopK):
        def roles(self, num_layers, num_units):
            return np.array(table, np.uint8)

    cache, _ = make_case(kv_len=50, rows=1)
    if message is None:
        cache.attention(pool, GROUP_SIZE, Strange(**OPTIONS))
        return
    with pytest.raises(ValueError, match=message):
        cache.attention(pool, GROUP_SIZE, Strange(**OPTIONS))


def test_retrieving_needs_a_scan(pool):
    class Strange(EveryThird):
        def roles(self, num_layers, num_units):
            return np.full((num_layers, num_units), RETRIEVE, np.uint8)

    cache, _ = make_case(kv_len=50, rows=1)
    with pytest.raises(ValueError, match="does not scan keys"):
        cache.attention(pool, GROUP_SIZE, Strange(**OPTIONS))


ROWS = StateLayout(loaded=np.float32, stored=np.int16, scores=np.float32)
read_rows = ROWS.read


def probe_rows(pointer: Any) -> int:
    ctx = read_context(pointer)
    if ctx.unit == 0:
        state = read_rows(ctx.arrays)
        load_keys(pointer, ctx.load_keys, 20, 20, state.loaded)
        store_rows(pointer, ctx.store_rows, state.loaded, 20 * ctx.head_dim, state.stored)
        score_rows(pointer, ctx.score_rows, ctx.query, state.stored, 20, ctx.head_dim, state.scores)
    return 0


probe_rows.__name__ = "select"


class RowsState(LayerState):
    layout = ROWS

    def build(self, context):
        return {
            "loaded": np.zeros((20, HEAD_DIM), np.float32),
            "stored": np.zeros((20, HEAD_DIM), np.int16),
            "scores": np.zeros((GROUP_SIZE, 20), np.float32),
        }


@dataclass(frozen=True)
class Rows(SparsePolicy):
    name: ClassVar[str] = "rows"
    select: ClassVar[Callback | None] = callback(probe_rows)
    state = cached_property(RowsState)


def test_row_primitives(pool):
    """load_keys, store_rows and score_rows against NumPy, through a policy's select."""
    cache, queries = make_case(torch.bfloat16, 200, rows=1)
    probe = Rows(**OPTIONS)
    attention = cache.attention(pool, GROUP_SIZE, probe)
    attend(attention, [cache.seq], [200], queries)
    arrays = attention.states.arrays_of(cache.seq).layers[1]
    loaded, stored, scores = (arrays[name] for name in ("loaded", "stored", "scores"))
    keys = cache.keys[0, 20:40].astype(np.float32)
    np.testing.assert_array_equal(loaded, keys)
    np.testing.assert_array_equal(stored, torch.tensor(keys).bfloat16().view(torch.int16).numpy())
    heads = queries.double().numpy().reshape(-1, HEAD_DIM)[:GROUP_SIZE]
    wide = heads @ cache.keys[0, 20:40].T * HEAD_DIM**-0.5
    np.testing.assert_allclose(scores, wide, rtol=1e-2, atol=1e-2)


RANKED = StateLayout(
    tokens=np.int32,
    appended=np.int32,
    rows=np.int8,
    scales=np.uint16,
    ranges=np.int32,
    query=np.float32,
    ranks=np.float32,
)
read_ranked, NUM_RANKED = RANKED.read, 1024


@callback
def prepare(pointer: Any) -> None:
    """Ranks rows by a query of its own: as many as workers would rank together in `propose`."""
    ctx = read_context(pointer)
    state = read_ranked(ctx.arrays)
    ranks = state.ranks + 4 * NUM_RANKED * ctx.unit
    of_rows = (state.query, 1, state.rows, state.scales, state.scales, np.float32(0))
    rank_rows(pointer, ctx.rank_rows, (*of_rows, state.ranges, 1, ranks))


class RankedState(LayerState):
    layout = RANKED

    def build(self, context):
        return {
            "tokens": np.zeros((32, 4096), np.int32),
            "appended": np.zeros(64, np.int32),
            "rows": np.ones((NUM_RANKED, HEAD_DIM), np.int8),
            "scales": np.full(NUM_RANKED, 0x3F80, np.uint16),  # 1 in bfloat16
            "ranges": np.array([0, NUM_RANKED], np.int32),
            "query": np.ones(HEAD_DIM, np.float32),
            "ranks": np.zeros((32, NUM_RANKED), np.float32),
        }


@dataclass(frozen=True)
class RanksBefore(EveryThird):
    prepare: ClassVar[Callback | None] = prepare
    state = cached_property(RankedState)


def test_rows_are_ranked_before_the_query_is_known():
    """Nobody ranks them later: there is nothing to defer to."""
    pool = WorkerPool(5)  # more than units
    cache = Cache.random(new_rng(), kv_len=300, dtype=torch.float32, page_tokens=16)
    attention = cache.attention(pool, GROUP_SIZE, RanksBefore(**OPTIONS))
    attention.native.prepare(0, attention.begin_step([cache.seq], [300]).native)
    arrays = attention.states.arrays_of(cache.seq)
    np.testing.assert_allclose(arrays.layers[0]["ranks"][:2], HEAD_DIM, rtol=1e-3)
    pool.close()


@callback
def note_together(pointer: Any) -> None:
    ctx = read_context(pointer)
    view_float32(read_ranked(ctx.arrays).ranks, NUM_RANKED, ctx.unit)[0] = ctx.prepared_together


@dataclass(frozen=True)
class NotesTogether(EveryThird):
    prepare: ClassVar[Callback | None] = note_together
    state = cached_property(RankedState)


@pytest.mark.parametrize(("threads", "expected"), [(1, 2), (2, 1), (5, 1)])
def test_how_many_units_a_worker_prepares(threads, expected):
    """There are two KV heads; one, where a unit is asked about as soon as it is prepared."""
    pool = WorkerPool(threads)
    cache = Cache.random(new_rng(), kv_len=300, dtype=torch.float32, page_tokens=16)
    attention = cache.attention(pool, GROUP_SIZE, NotesTogether(**OPTIONS))
    step = attention.begin_step([cache.seq], [300])
    noted = attention.states.arrays_of(cache.seq).layers[0]["ranks"]
    attention.native.prepare(0, step.native)
    assert (noted[:2, 0] == expected).all()
    query = torch.ones(1, 2 * GROUP_SIZE * HEAD_DIM)
    attention.attend(0, step, query, torch.empty_like(query))
    assert (noted[:2, 0] == 1).all()
    pool.close()
