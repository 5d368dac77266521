"""The measurement behind `offload bench latency`, on small caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
import torch
from cases.slowly import slow_but

from offload.bench.latency.measure import PHASES, Row, measure_latency, steps_needed
from offload.bench.latency.plan import plan_layers
from offload.bench.latency.report import compared
from offload.bench.latency.workload import LatencyWorkload, structured_workload
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.models import ModelShape
from offload.policies import TidalDecode
from offload.policies.registry import available_policies, make_policy
from offload.selection.policy import DENSE, NO_MEMBER, RETRIEVE, REUSE, Policy

SHAPE = ModelShape(8, 128, 8, 2, 64, 256, 512, 8192)
KV_LEN = 1200
BUDGET = 256


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick outgrows the CPU's caches; a test need not."""
    monkeypatch.setattr("offload.bench.latency.yardstick.last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr("offload.bench.latency.yardstick._MIN_BYTES", 2**21)


def make_workload(names: Sequence[str]) -> LatencyWorkload:
    return structured_workload(
        SHAPE,
        {name: policy_of(name) for name in names},
        kv_len=KV_LEN,
        num_steps=steps_needed(3),
        num_layers=3,
        batch_size=2,
        dtype=torch.float32,
        seed=0,
    )


@pytest.fixture(scope="module")
def workload() -> Iterator[LatencyWorkload]:
    with closing(make_workload(["full"])) as made:
        yield made


FEW = ("full", "exact_topk", "streaming_llm", "quest")


def policy_of(name: str) -> Policy:
    budget = {} if name == "full" else {"budget_tokens": BUDGET}
    return make_policy(name, **budget)


@pytest.mark.parametrize("names", slow_but([FEW, available_policies()], FEW))
def test_policies_end_to_end(names: Sequence[str]) -> None:
    steps = []
    with closing(make_workload(names)) as workload:
        measured = measure_latency(
            workload, threads=[1, 2], repeats=3, on_step=lambda: steps.append(1)
        )
    assert len(steps) == 2 * steps_needed(3)
    assert [(m["policy"], m["num_threads"]) for m in measured] == [
        (n, t) for t in (1, 2) for n in names
    ]
    by_name = {m["policy"]: m for m in measured if m["num_threads"] == 1}
    row_bytes = 64 * 4
    # 2 warm-up steps, 3 timed ones: the median is the second of those.
    assert by_name["full"]["bytes_touched"] == 2 * 2 * (KV_LEN + 4) * row_bytes
    assert by_name["full"]["attended_tokens"] == KV_LEN + 4
    assert by_name["exact_topk"]["attended_tokens"] == BUDGET
    for m in measured:
        assert m["batch_size"] == 2
        assert 0 < m["microseconds_p10"] <= m["microseconds"] <= m["microseconds_p90"]
        assert set(m["phases"]) == {*PHASES, "other"}
        assert sum(m["phases"].values()) >= 0.99 * m["microseconds"]
        assert m["bandwidth"] == pytest.approx(m["bytes_touched"] / m["microseconds"] * 1e6)
        memory = "sequential" if m["yardstick"] == "sequential read" else "gather"
        share = m["bandwidth"] / m[f"{memory}_bandwidth"]
        assert m["yardstick_share"] == pytest.approx(share)
        assert m["relative_error"] < 1e-4
        assert 0 <= m["candidate_share"] <= 1
        # What a policy answers or reuses may be less; nothing attends to more than it may.
        if m["policy"] not in ("full", "tidal_decode", "lychee_decode", "per_head"):
            assert m["attended_tokens"] <= BUDGET + 128
    assert by_name["exact_topk"]["dense_share"] == 2 / 8
    assert by_name["quest"]["state_share"] > 0.05
    assert by_name["full"]["yardstick"] == "sequential read"
    assert by_name["quest"]["yardstick"] == "row gather"
    # The selections of a step do not depend on the number of threads.
    for name in names:
        one, two = (m for m in measured if m["policy"] == name)
        assert one["attended_tokens"] == pytest.approx(two["attended_tokens"])


def test_the_workload_is_rewound_and_steps_differ(workload: LatencyWorkload) -> None:
    assert [workload.store.kv_len(seq) for seq in workload.seqs] == [KV_LEN, KV_LEN]
    assert workload.queries(1, 0).shape == (2, 8 * 64)
    assert not torch.equal(workload.queries(1, 0), workload.queries(1, 1))
    assert workload.advance(0) == [KV_LEN + 1] * 2
    first = workload.store.gather(workload.seqs[0], 1, KV_LEN, KV_LEN + 1)[0]
    workload.rewind()
    workload.advance(1)
    second = workload.store.gather(workload.seqs[0], 1, KV_LEN, KV_LEN + 1)[0]
    assert not torch.equal(first, second)
    workload.rewind()


def test_too_many_repeats(workload: LatencyWorkload) -> None:
    with pytest.raises(ValueError, match=r"repeats must be in \[1, 3\] for this workload, got 4"):
        measure_latency(workload, threads=[1], repeats=4)


def test_plan_of_layers_that_reuse() -> None:
    policy = TidalDecode(select_layers=(2, 13))
    plan = plan_layers(policy, num_model_layers=32, num_layers=4, num_units=8)
    roles = plan.policy.roles(4, 8)
    assert roles is not None
    assert (roles[0] == RETRIEVE).all()
    assert (roles[1:] == REUSE).all()
    assert plan.weights == pytest.approx([2 / 30, *[28 / 90] * 3])
    assert plan.dense_share == 2 / 32
    assert plan.policy.budget_tokens == policy.budget_tokens
    assert policy.roles(32, 8)[2, 0] == RETRIEVE  # the policy itself is as it was


@pytest.mark.parametrize("num_layers", [2, 3, 4, 7])
def test_plan_of_heads_that_reuse(num_layers: int) -> None:
    """As many units retrieve, on the average, as in the model: that is what the time follows."""
    policy = make_policy("lychee_decode")
    roles = policy.roles(32, 8)
    assert roles is not None
    plan = plan_layers(policy, num_model_layers=32, num_layers=num_layers, num_units=8)
    scanning = float((roles != REUSE).sum()) / 32
    chosen = plan.policy.roles(num_layers, 8)
    assert chosen is not None
    asking = (chosen != REUSE).sum(1)
    assert float(plan.weights @ asking) == pytest.approx(scanning)
    assert plan.weights.sum() == pytest.approx(1)
    assert asking[0] == 8
    with pytest.raises(ValueError, match="needs at least 2 physical layers"):
        plan_layers(policy, num_model_layers=32, num_layers=1, num_units=8)


@pytest.mark.parametrize("retrieval", ["full", "exact_topk"])
def test_plan_of_heads_of_their_own(retrieval: str) -> None:
    """As many heads retrieve, on the average, as in the model: all of its first two layers, which
    are dense where that is how they retrieve."""
    policy = make_policy("per_head", rest="lfps", retrieval=retrieval, retrieval_heads=20)
    num_dense = 2 if retrieval == "full" else 0
    others = policy.unit_members(32, 8)[num_dense:] != 0
    assert len({*others.sum(1).tolist()}) > 1
    plan = plan_layers(policy, num_model_layers=32, num_layers=4, num_units=8)
    chosen = plan.policy.unit_members(4, 8)
    assert chosen is not None
    assert float(plan.weights @ (chosen != 0).sum(1)) == pytest.approx(others.sum(1).mean())
    assert plan.dense_share == num_dense / 32
    roles = plan.policy.roles(4, 8)
    assert roles is not None
    assert ((roles == DENSE) == (chosen == NO_MEMBER)).all()


def test_plan_of_policies_that_select_everywhere() -> None:
    topk = plan_layers(make_policy("exact_topk"), num_model_layers=8, num_layers=3, num_units=2)
    assert topk.policy.dense_layers == 0
    assert topk.weights == pytest.approx([1 / 3] * 3)
    whole = plan_layers(make_policy("exact_topk"), num_model_layers=8, num_layers=8, num_units=2)
    assert whole.policy.dense_layers == 2
    assert whole.weights == pytest.approx([0, 0, *[1 / 6] * 6])
    full = plan_layers(make_policy("full"), num_model_layers=8, num_layers=3, num_units=2)
    assert full.dense_share == 0
    shallow = make_policy("exact_topk", dense_layers=8)
    with pytest.raises(ValueError, match="'exact_topk' leaves all 8 layers dense"):
        plan_layers(shallow, num_model_layers=8, num_layers=3, num_units=2)


@pytest.fixture
def exact(workload: LatencyWorkload) -> ExactAttention:
    return ExactAttention(
        workload.store,
        workload.seqs[0],
        1,
        workload.queries(1, 0)[0],
        kv_len=KV_LEN,
        sm_scale=workload.sm_scale,
    )


def attend(workload: LatencyWorkload, tokens: list[np.ndarray]) -> torch.Tensor:
    """float64, independent of `ExactAttention`."""
    keys, values = (x.double().numpy() for x in workload.store.gather(workload.seqs[0], 1))
    queries = workload.queries(1, 0)[0].double().numpy().reshape(2, 4, 64)
    out = []
    for kv_head in range(2):
        for query in queries[kv_head]:
            scores = keys[kv_head, tokens[kv_head]] @ query / 8
            weights = np.exp(scores - scores.max())
            out.append(weights @ values[kv_head, tokens[kv_head]] / weights.sum())
    return torch.from_numpy(np.concatenate(out)).float()


def test_reference_outputs(workload: LatencyWorkload, exact: ExactAttention) -> None:
    everything = [np.arange(KV_LEN)] * 2
    out = attend(workload, everything)
    assert exact.check_output(out, [[], []]) < 1e-5
    some = [np.arange(3, KV_LEN, 7), np.arange(0, KV_LEN, 5)]
    assert exact.check_output(attend(workload, some), [x.tolist() for x in some]) < 1e-5
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        exact.check_output(out, [x.tolist() for x in some])
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        exact.check_output(out * 1.001, [[], []])
    mixed = torch.cat([out[:256], torch.full((256,), torch.nan)])
    assert exact.check_output(mixed, [[], None]) < 1e-5


def measurement(policy: str, kv_len: int, threads: int, time: float) -> Row:
    return {
        "policy": policy,
        "options": {},
        "kv_len": kv_len,
        "num_threads": threads,
        "batch_size": 1,
        "microseconds": time,
        "microseconds_p10": 0.9 * time,
        "microseconds_p90": 1.1 * time,
        "microseconds_mean": 1.01 * time,
        "phases": dict.fromkeys(PHASES, time / 10) | {"other": time / 2},
        "bytes_touched": 1e6,
        "bandwidth": 1e12 / time,
        "sequential_bandwidth": 20e9 * threads,
        "gather_bandwidth": 10e9 * threads**0.5,
        "yardstick": "sequential read" if policy == "full" else "row gather",
        "candidate_share": 1.0 if policy == "full" else 0.05,
        "attended_tokens": 1024.0,
        "dense_share": 0.0 if policy == "full" else 0.25,
        "state_share": 0.01,
        "relative_error": 1e-3,
        "yardstick_share": 0.5,
    }


MEASURED = [
    measurement("full", 4096, 1, 400.0),
    measurement("full", 8192, 1, 800.0),
    measurement("lfps", 4096, 1, 100.0),
    measurement("lfps", 8192, 1, 160.0),
    measurement("full", 8192, 4, 400.0),
    measurement("lfps", 8192, 4, 40.0),
]


def test_what_follows_from_measurements() -> None:
    rows = {(r["policy"], r["kv_len"], r["num_threads"]): r for r in compared(MEASURED)}
    lfps = rows["lfps", 8192, 1]
    assert lfps["speedup_over_full"] == 5
    assert lfps["speedup_over_exact_topk"] is None
    assert lfps["growth"] == 1.6
    assert lfps["thread_speedup"] == lfps["thread_efficiency"] == 1
    assert lfps["all_layers_microseconds"] == 0.25 * 800 + 0.75 * 160
    many = rows["lfps", 8192, 4]
    assert many["thread_speedup"] == 4
    assert many["thread_efficiency"] == pytest.approx(4 / 2)
    assert many["growth"] is None
