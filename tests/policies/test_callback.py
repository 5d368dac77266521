"""Policies as native callbacks: the context they get, their arrays, and the order they run in."""

from __future__ import annotations

import copy
import ctypes
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import TOLERANCE, Cache, attend, random_queries, relative_error
from cases.heavy_hitter import (
    LOG_ENTRIES,
    HeavyHitter,
    HeavyHitterPerQueryHead,
    HeavyHitterState,
    Simulation,
)
from cases.pools import pools

from cpu_ops import _native
from offload.decode.attention import DecodeAttention
from offload.policies import ExactTopK
from offload.policies import exact_topk as exact_topk_module
from offload.policies.base import SparsePolicy
from offload.selection import callback as callback_module
from offload.selection.callback import (
    CONTEXT_DTYPE,
    Callback,
    callback,
    filter_at_least,
    offset_floats,
    read_context,
    view_int32,
)
from offload.selection.layer_state import LayerState, State
from offload.selection.layouts import NumberLayout, StateLayout

OPTIONS = {"budget_tokens": 32, "sink_tokens": 2, "recent_tokens": 4, "dense_layers": 1}
GROUP_SIZE = 3


pool = pools(3)


def make_case(kv_len: int = 400, dtype: torch.dtype = torch.float32):
    """A cache and 16 query rows. Seeded: a near-tie in a selection changes all that follows."""
    rng = np.random.default_rng(7)
    cache = Cache.random(rng, kv_len=kv_len, dtype=dtype, page_tokens=16)
    return cache, random_queries(rng, 16, 2 * GROUP_SIZE, 64, dtype)


def check_row(cache: Cache, simulation: Simulation, query, kv_len, out, lse, selection) -> None:
    """The simulation's next step gives this row's results."""
    heads = query.double().numpy().reshape(-1, cache.store.head_dim)
    expected, expected_lse, chosen = simulation.step(
        heads, cache.keys[:, :kv_len], cache.values[:, :kv_len]
    )
    assert [list(tokens) for tokens in selection] == [list(tokens) for tokens in chosen]
    assert relative_error(out, expected) < TOLERANCE[cache.store.dtype]
    np.testing.assert_allclose(lse, expected_lse, atol=2e-4)


def arrays_of(attention: DecodeAttention, seq: int, layer_idx: int = 1) -> State:
    arrays = attention.states.arrays_of(seq)
    assert arrays is not None
    return arrays.layers[layer_idx]


def test_the_context_has_no_gaps():
    fields = CONTEXT_DTYPE.fields
    assert fields is not None
    offsets = {name: entry[1] for name, entry in fields.items()}
    assert offsets == _native.policy_context_offsets()


def test_a_callback_runs_from_python_on_a_context_made_by_hand():
    """exact_topk's select on importance [10], of which it may choose 3 in [2, 8)."""
    importance = np.array([9, 9, 1, 5, 0, 7, 6, 2, 9, 9], np.float32)
    chosen = np.full(3, -1, np.int32)

    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    )

    def top_k(_: int, x: int, n: int, k: int, positions: int) -> int:
        values = np.ctypeslib.as_array((ctypes.c_float * n).from_address(x))
        out = np.ctypeslib.as_array((ctypes.c_int32 * k).from_address(positions))
        out[:] = reference.top_k(values.astype(np.float64), k)
        return k

    primitive = prototype(top_k)
    context = np.zeros(1, CONTEXT_DTYPE)
    context["first"], context["last"], context["budget_tokens"], context["kv_len"] = 2, 8, 3, 10
    context["importance"], context["indices"] = importance.ctypes.data, chosen.ctypes.data
    context["top_k"] = ctypes.cast(primitive, ctypes.c_void_p).value
    assert exact_topk_module.select(context) == 3
    assert list(chosen) == [3, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_lives_from_step_to_step(dtype, pool):
    """observe's weights decide the next selection; every callback ran once per step and unit."""
    cache, queries = make_case(dtype=dtype)
    policy = HeavyHitter(**OPTIONS)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    simulation = Simulation(policy)
    kv_lens = list(range(300, 310))
    for i, kv_len in enumerate(kv_lens):
        query = queries[i : i + 1]
        out, lse = attend(attention, [cache.seq], [kv_len], query)
        check_row(cache, simulation, query, kv_len, out[0], lse[0], attention.last_selection())
    arrays = arrays_of(attention, cache.seq)
    log = arrays["log"]
    np.testing.assert_allclose(arrays["attended"], simulation.attended, atol=1e-2)
    assert log[:, :4].tolist() == [[10, 10, 10, 10]] * 2
    assert log[:, 4:14].tolist() == [kv_lens] * 2
    assert policy.built == [(1, (2, 400, 64))]  # layer 0 is dense and has no state


def test_rows_of_one_sequence_run_in_order(pool):
    """Verified draft tokens: row i selects by what rows before it have observed."""
    cache, queries = make_case()
    policy = HeavyHitter(**OPTIONS)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    simulation = Simulation(policy)
    kv_lens = [200, 201, 202, 203]
    out, lse = attend(attention, [cache.seq] * 4, kv_lens, queries[:4])
    for i, kv_len in enumerate(kv_lens[:-1]):
        heads = queries[i].double().numpy().reshape(-1, 64)
        expected, _, _ = simulation.step(heads, cache.keys[:, :kv_len], cache.values[:, :kv_len])
        assert relative_error(out[i], expected) < TOLERANCE[torch.float32]
    last = attention.last_selection()
    check_row(cache, simulation, queries[3], 203, out[3], lse[3], last)
    assert arrays_of(attention, cache.seq)["log"][:, 4:8].tolist() == [kv_lens] * 2


def test_sequences_of_a_batch_have_states_of_their_own(pool):
    """Also beside a row that is still short enough to be dense, which gets no state."""
    cache, queries = make_case()
    other, short = (cache.store.fork(cache.seq) for _ in range(2))
    policy = HeavyHitter(**OPTIONS)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    simulations = [Simulation(policy), Simulation(policy)]
    for step in range(3):
        kv_lens = [300 + step, 250 + step, 30 + step]
        rows = queries[3 * step : 3 * step + 3]
        out, lse = attend(attention, [cache.seq, other, short], kv_lens, rows)
        selection = attention.last_selection()
        for i, simulation in enumerate(simulations):
            check_row(
                cache, simulation, rows[i], kv_lens[i], out[i], lse[i], selection[2 * i : 2 * i + 2]
            )
        assert selection[4:] == [[], []]
    built = [attention.states.arrays_of(seq) is not None for seq in (cache.seq, other, short)]
    assert built == [True, True, False]


def test_fork_copies_and_forget_drops(pool):
    cache, queries = make_case()
    policy = HeavyHitter(**OPTIONS)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    simulation = Simulation(policy)
    out, lse = attend(attention, [cache.seq], [300], queries[:1])
    check_row(cache, simulation, queries[0], 300, out[0], lse[0], attention.last_selection())

    child = cache.store.fork(cache.seq)
    attention.states.fork(cache.seq, child)
    of_child = copy.deepcopy(simulation)
    for seq, ours, row in ((child, of_child, 1), (child, of_child, 2), (cache.seq, simulation, 3)):
        out, lse = attend(attention, [seq], [301], queries[row : row + 1])
        check_row(cache, ours, queries[row], 301, out[0], lse[0], attention.last_selection())
    assert arrays_of(attention, child)["log"][0, 3] == 3
    assert arrays_of(attention, cache.seq)["log"][0, 3] == 2

    attention.states.forget(child)
    attention.states.forget(child)
    out, lse = attend(attention, [child], [301], queries[4:5])
    check_row(
        cache, Simulation(policy), queries[4], 301, out[0], lse[0], attention.last_selection()
    )
    assert len(policy.built) == 2

    stateless = cache.store.fork(cache.seq)
    attention.states.fork(stateless, child)  # a parent without state has nothing to copy
    assert attention.states.arrays_of(stateless) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_units_may_be_query_heads(dtype, pool):
    cache, queries = make_case(dtype=dtype)
    policy = HeavyHitterPerQueryHead(**OPTIONS, num_units=2 * GROUP_SIZE)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    simulation = Simulation(policy)
    for step in range(4):
        query = queries[step : step + 1]
        out, lse = attend(attention, [cache.seq], [300 + step], query)
        check_row(cache, simulation, query, 300 + step, out[0], lse[0], attention.last_selection())
    assert arrays_of(attention, cache.seq)["log"][:, :4].tolist() == [[4] * 4] * (2 * GROUP_SIZE)


@pytest.mark.parametrize(
    "change",
    [
        {"more": np.zeros(1, np.float32)},
        {"log": np.zeros((2, LOG_ENTRIES), np.int64)},
        {"log": None},
    ],
)
def test_other_arrays_than_declared_are_refused(change, pool):
    class OtherState(HeavyHitterState):
        def build(self, context):
            arrays = {**super().build(context), **change}
            return {name: array for name, array in arrays.items() if array is not None}

    class Other(HeavyHitter):
        state = cached_property(OtherState)

    cache, _ = make_case()
    attention = cache.attention(pool, GROUP_SIZE, Other(**OPTIONS))
    with pytest.raises(ValueError, match=r"a policy declares the arrays .*, but has built"):
        attention.begin_step([cache.seq], [400])


NUM_MANY = 40
MANY = StateLayout(**{f"x{i}": np.int32 for i in range(NUM_MANY)})
NAMES = NumberLayout(*(f"y{i}" for i in range(NUM_MANY)))
read_many, read_names = MANY.read, NAMES.read


@callback
def append(pointer: Any) -> None:
    ctx = read_context(pointer)
    state, numbers = read_many(ctx.arrays), read_names(ctx.parameters)
    if ctx.unit == 0:
        view_int32(state.x0, 1)[0] += 1
        view_int32(state.x39, 1)[0] += int(numbers.y39) + ctx.layer_idx


class ManyState(LayerState):
    layout = MANY

    def build(self, context):
        return {f"x{i}": np.full(1, i, np.int32) for i in reversed(range(NUM_MANY))}


@dataclass(frozen=True)
class Many(ExactTopK):
    name: ClassVar[str] = "many"
    append: ClassVar[Callback | None] = append
    state = cached_property(ManyState)
    number_layout: ClassVar[NumberLayout | None] = NAMES

    def __getattr__(self, name: str) -> int:
        if not re.fullmatch(r"y\d+", name):
            raise AttributeError(name)
        return int(name[1:])


def test_a_policy_may_have_many_arrays_and_numbers(pool):
    """Each layer has its own; they are found by their names, in whatever order they are built."""
    cache, queries = make_case()
    attention = cache.attention(pool, GROUP_SIZE, Many(**{**OPTIONS, "dense_layers": 0}))
    step = attention.begin_step([cache.seq], [400])
    for layer_idx in range(cache.store.num_layers):
        attention.attend(layer_idx, step, queries[:1], torch.empty_like(queries[:1]))
    for layer_idx in range(cache.store.num_layers):
        arrays = arrays_of(attention, cache.seq, layer_idx)
        values = [int(arrays[f"x{i}"][0]) for i in range(NUM_MANY)]
        assert values == [1, *range(1, 39), 39 + 39 + layer_idx]


FOUND, THRESHOLD = StateLayout(found=np.int32), NumberLayout("threshold")
read_found, read_threshold = FOUND.read, THRESHOLD.read


@callback
def select(pointer: Any) -> int:
    """The first tokens that reach a threshold."""
    ctx = read_context(pointer)
    scratch = read_found(ctx.arrays).found + 4 * ctx.unit * 512
    count = filter_at_least(
        pointer,
        ctx.filter_at_least,
        offset_floats(ctx.importance, ctx.first),
        ctx.last - ctx.first,
        np.float32(read_threshold(ctx.parameters).threshold),
        scratch,
    )
    found, chosen = view_int32(scratch, count), view_int32(ctx.indices, ctx.budget_tokens)
    count = min(count, ctx.budget_tokens)
    for i in range(count):
        chosen[i] = ctx.first + found[i]
    return count


class FoundState(LayerState):
    layout = FOUND

    def build(self, context):
        return {"found": np.zeros((2, 512), np.int32)}


@dataclass(frozen=True)
class AboveThreshold(SparsePolicy):
    name: ClassVar[str] = "above_threshold"
    state = cached_property(FoundState)
    number_layout: ClassVar[NumberLayout | None] = THRESHOLD
    threshold: ClassVar[float] = 0.01
    scans_keys: ClassVar[bool] = True
    select: ClassVar[Callback | None] = select


def test_filter_at_least(pool):
    cache, queries = make_case()
    attention = cache.attention(pool, GROUP_SIZE, AboveThreshold(**OPTIONS))
    attend(attention, [cache.seq], [400], queries[:1])
    heads = queries[0].double().numpy().reshape(-1, 64)
    _, _, weights = reference.attention(heads, cache.keys, cache.values, sm_scale=0.125)
    for unit, tokens in enumerate(attention.last_selection()):
        importance = sum(weights[unit * GROUP_SIZE + g][2:396] for g in range(GROUP_SIZE))
        expected = 2 + np.flatnonzero(importance >= 0.01)[:26]
        assert len(expected) > 0
        assert tokens[2:-4] == expected.tolist()


def test_one_compilation_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code goes with its object: a second one would take the first one's place, and its code."""
    made: list[object] = []
    compile_slowly = callback_module.compile_callback

    def compile_callback(*args: Any) -> Any:
        made.append(args)
        time.sleep(0.1)
        return compile_slowly(*args)

    def observe(pointer: Any) -> None:
        pass

    monkeypatch.setattr(callback_module, "compile_callback", compile_callback)
    observed = callback(observe)
    with ThreadPoolExecutor(4) as threads:
        addresses = set(threads.map(lambda _: observed.address, range(4)))
    assert (len(made), len(addresses)) == (1, 1)
