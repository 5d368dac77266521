"""LFPS through DecodeAttention, against its simulation in float64; its bitmaps against sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import relative_error
from cases.coprocessor_cases import Shape, World, normal
from cases.device_cases import small
from cases.lfps_reference import Unit
from cases.pools import pools
from cases.seeded import new_rng
from cases.slowly import combinations

from offload import OffloadedModel
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.policies.lfps import policy as lfps_policy
from offload.policies.lfps import tables as tables
from offload.policies.lfps.layout import SCALE, num_words, top_bit
from offload.policies.lfps.policy import LFPS
from offload.policies.lfps.tables import TABLE_STATE
from offload.policies.registry import make_policy
from offload.selection import sequence_state
from offload.selection.layer_state import State

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 32
HEADS = KV_HEADS * GROUP
OPTIONS = {"budget_tokens": 60, "sink_tokens": 4, "recent_tokens": 16, "dense_layers": 0}


@dataclass(frozen=True)
class Exact(LFPS):
    """As in the simulation: lists hold what is above the mean, and thresholds rise at once."""

    prune_every: ClassVar[int] = 1
    raise_every: ClassVar[int] = 1


pool = pools(1, 3)


class Text:
    """Keys and queries whose attention has vertical and slash patterns, and sinks.

    Some keys are near a direction that queries drift around; keys repeat with a period, and
    queries ask for their own phase; sinks are near a direction of every query.
    """

    def __init__(self, n: int, sink_strength: float = 2.0) -> None:
        rng = new_rng()
        keys = rng.standard_normal((n, KV_HEADS, HEAD_DIM))
        queries = 0.7 * rng.standard_normal((n, HEADS, HEAD_DIM))
        topic = rng.standard_normal((KV_HEADS, HEAD_DIM))
        phase = 2 * np.pi * np.arange(n) / 37.0
        wave = 2.5 * np.stack([np.cos(phase), np.sin(phase)], -1)
        keys[rng.random(n) < 0.05] += topic
        queries += np.repeat(topic, GROUP, 0)
        keys[:, :, :2] += wave[:, None]
        queries[:, :, :2] += wave[:, None]
        keys[:4, :, 2] += 6.0
        queries[:, :, 2] += sink_strength
        values = rng.standard_normal((n, KV_HEADS, HEAD_DIM))
        self.keys, self.queries, self.values = (
            torch.from_numpy(x.astype(np.float32)) for x in (keys, queries, values)
        )


class Run:
    """One layer of one sequence, decoded step by step beside the simulation."""

    def __init__(self, policy: LFPS, pool, text: Text, prompt: int, observed: int = 32) -> None:
        self.policy, self.text, self.kv_len = policy, text, prompt
        self.store = KVStore(
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            page_tokens=16,
        )
        self.attention = DecodeAttention(policy, self.store, num_qo_heads=HEADS, pool=pool)
        self.seq = self.store.new_sequence()
        self._append(0, prompt)
        first = max(0, prompt - observed)
        observed_queries = text.queries[first:prompt].transpose(0, 1).contiguous()
        self.attention.record_queries(self.seq, 0, observed_queries, prompt)
        self.group = 1 if policy.per_query_head else GROUP
        self.units = [
            Unit(
                policy,
                observed_queries[heads].double().numpy()[:, -policy.state.observed_queries :],
                self.keys_of(unit),
                self.values_of(unit),
            )
            for unit, heads in enumerate(self.heads_of_units())
        ]
        self.differing = self.proposed = self.answered = 0

    def heads_of_units(self) -> list[slice]:
        return [slice(i, i + self.group) for i in range(0, HEADS, self.group)]

    def keys_of(self, unit: int) -> np.ndarray:
        return self.text.keys[: self.kv_len, unit * self.group // GROUP].double().numpy()

    def values_of(self, unit: int) -> np.ndarray:
        return self.text.values[: self.kv_len, unit * self.group // GROUP].double().numpy()

    def _append(self, begin: int, end: int) -> None:
        self.store.reserve([self.seq], [end - begin])
        self.store.append(self.seq, 0, self.text.keys[begin:end], self.text.values[begin:end])
        self.store.commit([self.seq], [end - begin])

    def arrays(self, seq: int | None = None) -> State:
        built = self.attention.states.arrays_of(self.seq if seq is None else seq)
        assert built is not None
        return built.layers[0]

    def candidates(self, unit: int) -> np.ndarray:
        arrays = self.arrays()
        count = arrays["num_candidates"][unit]
        return arrays["candidates"][unit, :count].astype(np.int64)

    def tables(self, unit: int) -> np.ndarray:
        """float64 [2, capacity] scores."""
        table, values, indices, state = (
            self.arrays()[name][unit].astype(np.float64)
            for name in ("tables", "values", "indices", "units")
        )
        for k in range(2):
            count = int(state[k * TABLE_STATE + 6])
            table[k, indices[k, :count].astype(np.int64)] = values[k, :count]
        return table / state[SCALE]

    def step(self) -> None:
        """Decode one token; the simulation observes what was really attended."""
        t = self.kv_len
        self.store.reserve([self.seq], [1])
        step = self.attention.begin_step([self.seq], [t + 1])
        self.attention.prepare(0, step)
        candidates = [self.candidates(unit) for unit in range(len(self.units))]
        self._append(t, t + 1)
        self.kv_len = t + 1
        queries = self.text.queries[t : t + 1].reshape(1, -1)
        out, lse = torch.full_like(queries, float("nan")), torch.full((1, HEADS), float("nan"))
        self.attention.attend(0, step, queries, out, lse)
        out = out.double().numpy().reshape(HEADS, HEAD_DIM)
        selection = self.attention.last_selection()
        for unit, (model, heads) in enumerate(zip(self.units, self.heads_of_units(), strict=True)):
            query = self.text.queries[t, heads].double().numpy()
            keys, values = self.keys_of(unit), self.values_of(unit)
            expected = model.candidates(t + 1)
            found = candidates[unit]
            self.differing += len(np.setxor1d(found, expected))
            self.proposed += len(expected)
            bypassed, answer, answer_lse = model.bypassed(query, keys, values)
            if self.policy.bypass_threshold == 1.0:
                bypassed[:] = False
            attended = np.array(selection[unit], np.int64)
            if bypassed.all():
                self.answered += 1
                assert attended.size == 0
                assert relative_error(out[heads], answer) < 1e-5
                np.testing.assert_allclose(lse[0, heads], answer_lse, atol=1e-4)
            else:
                self.check_selection(found, attended, query, keys)
                exact, exact_lse, _ = reference.attention(
                    query, keys[None], values[None], sm_scale=HEAD_DIM**-0.5, selection=[attended]
                )
                assert relative_error(out[heads], exact) < 1e-5
                np.testing.assert_allclose(lse[0, heads], exact_lse, atol=1e-4)
            model.observe(query, keys, attended, ~bypassed)

    def check_selection(self, candidates, attended, query, keys) -> None:
        """Sinks, recent tokens, and the best of the candidates."""
        policy = self.policy
        recent = np.arange(self.kv_len - policy.recent_tokens, self.kv_len)
        sinks = np.arange(policy.sink_tokens)
        considered = np.concatenate([sinks, candidates, recent])
        _, _, weights = reference.attention(
            query,
            keys[None],
            np.zeros((1, *keys.shape)),
            sm_scale=HEAD_DIM**-0.5,
            selection=[considered],
        )
        importance = sum(weights)[len(sinks) : len(considered) - len(recent)]
        budget = policy.budget_tokens - len(sinks) - len(recent)
        best = reference.top_k(importance, min(budget, len(candidates)))
        own = attended[len(sinks) : len(attended) - len(recent)]
        np.testing.assert_array_equal(attended[: len(sinks)], sinks)
        np.testing.assert_array_equal(attended[len(attended) - len(recent) :], recent)
        kept = np.searchsorted(candidates, own)
        np.testing.assert_array_equal(candidates[kept], own)
        np.testing.assert_allclose(np.sort(importance[kept]), np.sort(importance[best]), rtol=1e-3)

    def check_tables(self) -> None:
        for unit, model in enumerate(self.units):
            tables = self.tables(unit)
            for ours, exact in ((tables[0], model.vertical), (tables[1], model.slash)):
                np.testing.assert_allclose(
                    ours[: len(exact)], exact, rtol=1e-4, atol=1e-6 * exact.max()
                )
                assert not ours[len(exact) :].any()

    def check_candidates(self) -> None:
        """Float rounding may move what is at a threshold, nothing else.

        A lowered threshold goes down in steps, from where the last token's sufficed: a rounding at
        one admits all scores up to the next, and for some tokens to come.
        """
        assert self.proposed > 5 * len(self.units)
        assert self.differing <= max(2, 0.1 * self.proposed)


def policy_of(cls: type[LFPS] = Exact, **options) -> LFPS:
    return cls(**{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("granularity", "bypass_threshold", "alpha", "spread"),
    combinations(["kv_head", "query_head"], [1.0, 0.85], [(0.1, 0), (0.4, 8)]),
)
def test_against_the_simulation(granularity, bypass_threshold, alpha, spread, pool):
    options = {"granularity": granularity, "bypass_threshold": bypass_threshold}
    policy = policy_of(**options, alpha=alpha, spread=spread)
    run = Run(policy, pool, Text(600), 400)
    for _ in range(70):
        run.step()
    run.check_candidates()
    run.check_tables()


@pytest.mark.parametrize("observed", [1, 5, 32, 50])
def test_few_queries(observed, pool):
    """What was observed is used; never more than 32."""
    run = Run(policy_of(), pool, Text(400), 300, observed)
    for _ in range(20):
        run.step()
    run.check_candidates()
    run.check_tables()


def test_a_prompt_as_short_as_the_budget(pool):
    """The budget's last token, then the first step that selects; sinks are among the queries."""
    run = Run(policy_of(budget_tokens=24, recent_tokens=4), pool, Text(120), 24)
    for _ in range(60):
        run.step()
    assert run.differing <= 0.4 * run.proposed  # see check_candidates; most steps lower here
    run.check_tables()


def test_bypassed_units_answer_and_leave_their_tables_alone(pool):
    policy = policy_of(bypass_threshold=0.85)
    run = Run(policy, pool, Text(500, sink_strength=9.0), 400)
    for _ in range(40):
        run.step()
    assert run.answered > 10
    run.check_tables()
    off = Run(policy_of(), pool, Text(500, sink_strength=9.0), 400)
    for _ in range(10):
        off.step()
    assert off.answered == 0


def test_the_budget_is_full_at_any_length(pool):
    """Where the thresholds of the rule name next to nothing, in 67 budgets of context."""
    run = Run(policy_of(LFPS, budget_tokens=36, alpha=20.0), pool, Text(1110), 1090)
    for _ in range(20):
        run.step()
        assert [len(attended) for attended in run.attention.last_selection()] == [36, 36]


def test_what_is_copied_is_found_although_nobody_looked_at_it(pool):
    """The question looked at a number's first token; each other token of it is asked for later."""
    begin, asked = 100, {1402: 101, 1406: 102, 1407: 103, 1411: 105}

    def found(spread: int) -> list[bool]:
        text = Text(1420)
        text.keys[:, :, 8:16], text.queries[:, :, 8:16] = 0.0, 0.0
        for query, token in {1390: begin, **asked}.items():
            text.keys[token, :, 8 + token - begin] = 10.0
            text.queries[query, :, 8 + token - begin] = 10.0
        run = Run(policy_of(LFPS, spread=spread, budget_tokens=36), pool, text, 1400)
        attended = []
        while run.kv_len <= max(asked):
            run.step()
            if run.kv_len - 1 in asked:
                selection = run.attention.last_selection()
                attended += [asked[run.kv_len - 1] in of_unit for of_unit in selection]
        return attended

    assert all(found(LFPS().spread))
    assert not all(found(0)[:KV_HEADS])


def test_lazy_decay_rescales(pool):
    """gamma 0.5 passes the largest scale every 50 steps; candidates are the rule's alone."""
    run = Run(policy_of(gamma=0.5, bypass_threshold=1.0, budget_tokens=36), pool, Text(600), 300)
    for _ in range(170):
        run.step()
    assert run.arrays()["units"][:, SCALE].max() < 1e16
    run.check_candidates()
    run.check_tables()


def test_growth_over_the_capacity(pool, monkeypatch):
    monkeypatch.setattr(sequence_state, "_CAPACITY_STEP", 16)
    run = Run(policy_of(), pool, Text(500), 300)
    capacities = set()
    for _ in range(120):
        run.step()
        capacities.add(run.arrays()["tables"].shape[2])
    assert len(capacities) > 2
    run.check_candidates()
    run.check_tables()


@pytest.mark.parametrize("kv_len", [330, 401, 439])
def test_truncation(kv_len, pool):
    run = Run(policy_of(), pool, Text(500), 400)
    for _ in range(40):
        run.step()
    assert run.policy.state.truncate(0, run.arrays(), kv_len)
    run.store.truncate(run.seq, kv_len)
    run.kv_len = kv_len
    for unit in run.units:
        unit.truncate(kv_len)
    run.check_tables()
    for _ in range(30):
        run.step()
    run.check_candidates()
    run.check_tables()


def test_pruning_rarely_moves_little(pool):
    """Lists pruned every 8 steps name every candidate of the rule, and few neighbours besides."""
    run = Run(policy_of(LFPS, bypass_threshold=1.0), pool, Text(600), 400)
    assert run.policy.prune_every == 8
    for _ in range(100):
        run.step()
    assert run.differing <= 0.15 * run.proposed
    run.check_tables()


def test_no_recorded_queries_is_an_error(pool):
    run = Run(policy_of(), pool, Text(300), 200)
    run.attention.states.forget(run.seq)
    with pytest.raises(ValueError, match="0 of 32 were recorded for layer 0"):
        run.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0}, "alpha must be above 0 and finite, got 0"),
        ({"alpha": -0.2}, "alpha must be above 0 and finite, got -0.2"),
        ({"alpha": float("nan")}, "alpha must be above 0 and finite, got nan"),
        ({"alpha": "big"}, "alpha must be a number, got 'big'"),
        ({"gamma": 1.0}, "gamma must be between 0 and 1, both excluded, got 1.0"),
        ({"gamma": 0.0}, "gamma must be between 0 and 1, both excluded, got 0.0"),
        ({"bypass_threshold": 0.0}, "bypass_threshold must be above 0 and at most 1"),
        ({"bypass_threshold": 1.1}, "bypass_threshold must be above 0 and at most 1"),
        ({"spread": -1}, "spread must be between 0 and 62 tokens, got -1"),
        ({"spread": 63}, "spread must be between 0 and 62 tokens, got 63"),
        ({"spread": 2.0}, "spread must be an integer, got 2.0"),
        ({"granularity": "head"}, "granularity must be one of kv_head, query_head, got 'head'"),
        ({"budget_tokens": 60}, "budget_tokens=60 cannot hold sink_tokens=4"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy("lfps", **options)


def test_a_step_that_needed_recent_tokens_does_not_begin_with_them(pool):
    """Where little was looked at, thresholds do not rise in each step; what is listed stays so."""
    kv_len, shape = 20_000, Shape(group_size=1, num_layers=2, num_kv_heads=1)
    kept = {}
    for policy_type in (LFPS, Exact):
        policy = policy_type(budget_tokens=4096, sink_tokens=4, recent_tokens=64, dense_layers=1)
        world = World.random(new_rng(), shape, policy, pool, [kv_len])
        rng = new_rng()
        for layer_idx in range(2):
            keys = 0.1 * normal(rng, kv_len, 1, 32)
            keys[..., 0], keys[:5600, 0, 0], keys[4:1500, 0, 0] = -2.0, 2.0, 2.6
            values = world.values[0][layer_idx]
            world.store.append(world.seqs[0], layer_idx, keys, values, start=0)
        query = torch.zeros(1, 32, 32)
        query[..., 0] = 6.0
        for layer_idx in range(2):
            world.attention.record_queries(world.seqs[0], layer_idx, query, kv_len)
        chosen = []
        for _ in range(5):
            _, new_keys, new_values = world.random_step(rng)
            new_keys[..., 0] = -2.0
            step = query[:, -1].reshape(1, 1, -1).repeat(2, 1, 1), new_keys, new_values
            _, selections = world.decode(step)
            chosen.append(int((np.array(selections[1][0]) < 1500).sum()))
        kept[policy_type] = chosen
    assert min(kept[LFPS]) == min(kept[Exact]) == 1500


def test_a_model_says_once_what_it_misses(tiny_folders, caplog):
    lfps_policy._say_what_it_misses.cache_clear()
    for policy in (small("lfps"), small("hard_kv"), small("quest")):
        OffloadedModel.from_pretrained(tiny_folders["llama"], policy=policy, num_threads=1)
    said = [record.message for record in caplog.records if "decoded question" in record.message]
    assert len(said) == 1
    assert "'union' and 'per_head'" in said[0]


def bitmap(words: int, positions: np.ndarray) -> np.ndarray:
    bits = np.zeros(words, np.uint64)
    for position in positions.tolist():
        bits[position >> 6] |= np.uint64(1) << np.uint64(position & 63)
    return bits


@pytest.mark.parametrize(
    ("capacity", "share"), combinations([70, 128, 1000, 5000], [0.0, 0.01, 0.2, 1.0])
)
def test_expansion_and_listing(capacity, share):
    rng = new_rng()
    words, top = int(num_words(capacity)), int(top_bit(capacity))
    for _ in range(12):
        newest = int(rng.integers(capacity // 2, capacity))
        first = int(rng.integers(0, newest // 2))
        last = int(rng.integers(first, newest + 1))
        above_v = np.flatnonzero(rng.random(newest) < 0.3)
        above_s = np.flatnonzero(rng.random(newest) < 0.3)  # distances
        known_v, known_s = set(above_v.tolist()), set(above_s.tolist())
        indices = rng.permutation(newest).astype(np.int32)
        slots = np.flatnonzero(rng.random(newest) < share).astype(np.int32)
        spread = int(rng.choice([0, 1, 8, 62]))
        by_position = {int(indices[s]) for s in slots[::2]}
        marked = {newest - int(indices[s]) for s in slots[1::2]}
        marked = {token for token in marked if first <= token <= last} | {
            token + d for token in by_position if first <= token <= last for d in range(spread + 1)
        }
        expected = {
            token
            for i in marked
            for token in (i - 1, i, i + 1, i + 2)
            if first <= token < last
            and (token == i or token in known_v or newest - token in known_s)
        }
        marks = np.zeros(words, np.uint64)
        tables.mark_slots(slots[::2], indices, -1, spread, first, last, marks)
        tables.mark_slots(slots[1::2], indices, newest, 0, first, last, marks)
        chosen = rng.integers(0, 1 << 63, words).astype(np.uint64)
        n = tables.expand_marks(
            marks,
            bitmap(words, above_v),
            bitmap(words, top - above_s),
            top - newest,
            first,
            last,
            chosen,
        )
        assert not marks.any()
        room = np.full(len(expected) + 64, -1, np.int32)
        places = np.empty(words, np.int32)
        count = tables.list_tokens(chosen, n, first >> 6 << 6, places, room)
        assert room[:count].tolist() == sorted(expected)
        short = np.full(max(len(expected) // 2, 1), -1, np.int32)  # drops the first words
        count = tables.list_tokens(chosen, n, first >> 6 << 6, places, short)
        assert len(short) - 64 < count <= len(short) or count == len(expected)
        assert short[:count].tolist() == sorted(expected)[len(expected) - count :]


@pytest.mark.parametrize("by_distance", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_pruning(by_distance, share):
    """Scores at the mean or below it go back into the table, and no list, bit or place is left."""
    rng, capacity = new_rng(), 3000
    scores = rng.random(capacity).astype(np.float32)
    listed = [np.zeros(capacity, dtype) for dtype in (np.float32, np.int32)]
    top = int(top_bit(capacity)) if by_distance else -1
    bits, state = np.zeros(int(num_words(capacity)), np.uint64), np.zeros(tables.TABLE_STATE)
    table = tables.Table(scores.copy(), *listed, bits, top, state)
    tables.list_scores(table, 0.2)
    mean = 0.2 + 0.8 * share
    tables.prune(table, mean, np.zeros(capacity, np.int32))
    kept = np.flatnonzero(scores > mean)
    count = int(state[tables.COUNT])
    assert np.sort(table.indices[:count]).tolist() == kept.tolist()
    assert (table.values[:count] == scores[table.indices[:count]]).all()
    assert (table.scores[table.indices[:count]] == -np.arange(1, count + 1)).all()
    assert (bits == bitmap(len(bits), top - kept if by_distance else kept)).all()
    tables.unlist_scores(table)
    assert (table.scores == scores).all()


def test_the_smallest_float_above():
    """x > theta in float64 just where x >= it in float32."""
    for theta in (-1.0, 0.0, 1.0, 0.1, 1e-40, 3.0000001, np.float64(np.float32(0.1))):
        bound = np.float32(tables.float_above(theta))
        assert np.float64(bound) > theta
        assert np.float64(np.nextafter(bound, np.float32(-np.inf))) <= theta
    assert tables.float_above(np.inf) == np.inf
