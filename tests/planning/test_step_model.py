"""Predicted steps: sums that can be done by hand, and how they move with what they depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases.profile_cases import LLAMA, SMALL, device_profile, machine_profile, straight, workload

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.planning.choose import least_placement
from offload.planning.cost_table import CostTable
from offload.planning.placement_bytes import head_state_bytes
from offload.planning.profile import shape_key, typical_profile
from offload.planning.step_time import LayerTime, StepModel
from offload.planning.workload import Workload, policy_key

G, C, F, H = Place.GPU, Place.CPU, Place.GATHER, Place.HOT
ROW = 2 * 128 * 2  # bytes of a key and a value of Llama in bfloat16


def model_of(work: Workload, **changes) -> StepModel:
    return StepModel(machine_profile(**changes), work, on_gpu=True)


def row(*heads: Place) -> np.ndarray:
    return np.array(heads, np.uint8)


def test_a_layer_by_hand() -> None:
    work = workload("lychee_decode", budget_tokens=1024)  # 956 chosen tokens per head
    model = model_of(
        work,
        attend_cold=straight(10.0, 1e-5),
        attend_warm=straight(10.0, 1e-5),
        device=device_profile(
            attention=straight(5.0, 1e-7),
            gather=straight(8.0, 1e-4),
            gather_beside=CostTable(((1e6, 40.0), (4e6, 100.0))),
            round_trip_us=9.0,
        ),
    )
    chosen = 956 * ROW
    on_cpu = model.layer(1, row(*[C] * 8))
    assert on_cpu.linear == 129.0
    assert on_cpu.gpu == 6.6
    assert on_cpu.reply == pytest.approx(9.0 + 10.0 + 8 * chosen * 1e-5)
    assert on_cpu.total == pytest.approx(129.0 + on_cpu.reply + 4.6)

    mixed = model.layer(1, row(*[C] * 2, *[F] * 6))
    fetched = 6 * chosen
    added = 40.0 + (fetched - 1e6) * 60.0 / 3e6  # measured: attention to the rows and their way
    after = 5.0 + fetched * 1e-7
    slowed = 40.0 - 5.1  # 1e6 bytes: what fetching adds however little it is
    assert mixed.gather == pytest.approx(added - after)
    assert mixed.gpu == pytest.approx(6.6 + after)
    assert mixed.reply == pytest.approx(9.0 + 10.0 + 2 * chosen * 1e-5)
    assert 6.6 + added > mixed.reply + slowed  # the link is the slower one here
    assert mixed.total == pytest.approx(129.0 + 6.6 + added + 4.6)
    assert mixed.kind == "gather + CPU"

    # The CPU's heads take longer; fetching slows the linear layers all the same.
    for_cpu = model.layer(1, row(*[C] * 7, F))
    assert for_cpu.gather < slowed
    assert for_cpu.total == pytest.approx(129.0 + for_cpu.reply + for_cpu.gather + 4.6)

    waited = model.layer(1, row(*[F] * 8), top_k_us=20.0)
    assert waited.gather == pytest.approx(20.0 + 8.0 + 8 * chosen * 1e-4 - 129.0)
    assert waited.reply == 0.0


def test_heads_of_two_members_by_hand() -> None:
    """A retrieval head on the CPU looks at what its own policy does, with a GPU or without."""
    work = workload("per_head", rest="exact_topk", retrieval="sketch", budget_tokens=1024)
    work = replace(work, head_state_bytes=(0.0, 131072 * 36.0))
    retrieves = work.policy.unit_members(32, 8)[2:] == 1
    layer_idx = 2 + int(np.flatnonzero(retrieves.sum(1) == 1)[0])
    keys = {"attend_cold": straight(10.0, 1e-5), "attend_warm": straight(10.0, 1e-5)}
    keys["select_scale"] = {
        policy_key(member, work.shape, work.kv_len): scale
        for member, scale in zip(work.policy.members, (2.0, 3.0), strict=True)
    }
    attended, in_window = 956 * ROW, 68 * ROW  # on a GPU, which attends to the window itself

    def by_hand(num_rest: int, num_retrieving: int, window: int) -> float:
        rest = num_rest * (131072 * (256 + 4) + (attended + window) / 2)
        of_head = 131072 * 36 + 3 * 956 * 256 + (attended + window) / 2
        whole = rest + num_retrieving * of_head
        return (10.0 + whole * 1e-5) * (2.0 * rest + 3.0 * num_retrieving * of_head) / whole

    alone = StepModel(machine_profile(**keys), work, on_gpu=False)
    assert alone.layer(layer_idx, row(*[C] * 8)).reply == pytest.approx(by_hand(7, 1, in_window))
    assert alone.layer(0, row(*[C] * 8)).reply == pytest.approx(by_hand(0, 8, in_window))
    beside = model_of(work, **keys)
    round_trip = device_profile().round_trip_us
    on_cpu = beside.layer(layer_idx, row(*[C] * 8))
    assert on_cpu.reply == pytest.approx(round_trip + by_hand(7, 1, 0))
    places = np.where(work.policy.unit_members(32, 8)[layer_idx] == 1, G, C).astype(np.uint8)
    assert beside.layer(layer_idx, places).reply == pytest.approx(round_trip + by_hand(7, 0, 0))
    assert work.kept_bytes == (32 + 16) * 131072 * 36  # an eighth, and two layers


def test_a_layer_with_hot_rows_by_hand() -> None:
    """The CPU has all of a layer's time for its part."""
    work = workload("lychee_cluster", budget_tokens=1024)
    key = policy_key(work.policy, work.shape, work.kv_len)

    def layer_of(factor: float, *heads: Place) -> LayerTime:
        model = model_of(
            work,
            attend_cold=straight(10.0, 1e-5),
            select_ahead={key: factor},
            device=device_profile(
                attention=straight(5.0, 1e-7), gather_beside=CostTable(((1e6, 40.0), (4e6, 100.0)))
            ),
        )
        return model.layer(5, row(*heads))

    window = work.window_tokens
    fetched = 8 * (1024 - window) * ROW / 8  # the rest was chosen before
    added = 40.0 + (fetched - 1e6) * 60.0 / 3e6
    query = 3.0 + 4096 * 4096 * 2 / 3.6e6  # W_q, once more
    attends = 5.0 + 8 * 3 * 1024 * ROW * 1e-7
    quick = layer_of(0.1, *[H] * 8)
    assert quick.kind == "hot rows"
    assert quick.linear == pytest.approx(129.0 + query)
    assert quick.gpu == pytest.approx(attends)  # the window, too
    of_gpu = 129.0 + query + attends + added
    assert quick.total == pytest.approx(of_gpu)
    candidates = max(1.5 * (1024 - window), 1792) + 0.25 * (1024 - window)
    read = 8 * (candidates * 256 + (1024 - window) * 256)  # K of candidates, V of the choice
    slow = layer_of(9.0, *[H] * 8)
    assert slow.reply == pytest.approx(10.0 + 9.0 * (10.0 + read * 1e-5))
    assert slow.total == pytest.approx(slow.reply)
    assert slow.reply > of_gpu > quick.reply
    mixed = layer_of(0.1, G, *[H] * 7)
    assert mixed.kind == "GPU + hot rows"
    reuses = model_of(workload("tidal_decode", budget_tokens=1024)).layer(5, row(*[H] * 8))
    assert reuses.linear == 129.0  # needs no query
    pages = 5.0 + 131072 * ROW * 1e-7
    assert mixed.gpu == pytest.approx(pages + 5.0 + 7 * 3 * 1024 * ROW * 1e-7)


def test_a_share_of_the_weights_is_scored_ahead() -> None:
    """What was measured of a policy that needs no scores is no measure of that."""
    cut = workload("hard_kv", inner="lychee_cluster", max_tokens=1024, top_p=0.9)
    key = policy_key(cut.policy, cut.shape, cut.kv_len)
    factors = {key: 0.1, "*": 8.0}
    plain = workload("lychee_cluster", budget_tokens=1024)
    assert policy_key(plain.policy, plain.shape, plain.kv_len) == key
    scored, unscored = (
        model_of(work, select_ahead=factors).layer(5, row(*[H] * 8)).reply for work in (cut, plain)
    )
    assert scored > 10 * unscored


# On H100s at different times; today's are in perf/results/hot-rows.json.
MEASURED = [
    ("lychee_cluster", 131072, 1, 15, 16, True, 7.36),
    ("lychee_cluster", 131072, 1, 15, 16, False, 13.2),
    ("lychee_cluster", 131072, 1, 15, 16, False, 13.97),
    ("lychee_cluster", 131072, 1, 4, 16, True, 14.94),
    ("lychee_cluster", 131072, 1, 4, 80, False, 19.24),
    ("lychee_cluster", 524288, 1, 15, 16, True, 8.34),
    ("lychee_cluster", 524288, 1, 15, 16, False, 14.77),
    ("lychee_cluster", 32768, 8, 15, 16, True, 36.02),
    ("lfps", 131072, 1, 15, 16, True, 8.37),
    ("lfps", 32768, 8, 15, 16, True, 16.59),
    ("lfps", 131072, 1, 15, 80, False, 11.59),
    ("per_head", 131072, 1, 15, 16, True, 13.23),
    ("sketch", 131072, 1, 15, 16, True, 27.11),
]


@pytest.mark.parametrize(
    ("policy", "kv_len", "batch_size", "threads", "on_gpu", "hot", "milliseconds"), MEASURED
)
def test_what_a_typical_machine_takes_is_about_what_was_measured(
    policy: str,
    kv_len: int,
    batch_size: int,
    threads: int,
    on_gpu: int,
    hot: bool,
    milliseconds: float,
) -> None:
    """Llama-3.1-8B's shapes on an H100, the last layers on the GPU."""
    work = workload(policy, kv_len, batch_size, budget_tokens=1024)
    states = head_state_bytes(work.policy, work.shape, work.dtype, kv_len)
    work = replace(work, head_state_bytes=states)
    placement = least_placement(work)
    places = np.array(placement.places)
    num_whole = (on_gpu - sum(placement.counts(G))) // 8
    places[len(places) - num_whole :] = G
    placement = HeadPlacement(places)
    if hot:
        placement = placement.with_hot_rows(work.policy, work.shape.num_qo_heads)
        assert sum(placement.counts(H)) + sum(placement.counts(Place.FOUND)) == 240
        placement = HeadPlacement(np.where(placement.places == Place.FOUND, H, placement.places))
    assert sum(placement.counts(G)) == on_gpu
    model = StepModel(typical_profile(threads), work, on_gpu=True)
    assert model.step(placement).milliseconds == pytest.approx(milliseconds, rel=0.15)


def test_a_layer_that_is_on_the_gpu_waits_for_nobody() -> None:
    work = workload("lychee_decode")
    layer = model_of(work).layer(0, row(*[G] * 8))
    assert layer.kind == "GPU"
    assert (layer.reply, layer.gather) == (0.0, 0.0)
    assert layer.exposed == pytest.approx(5.0 + 32 * 131072 * 1e-6)  # a top-k beside it
    assert layer.gpu == pytest.approx(8.0 + 8 * 131072 * ROW / 4.0e6)
    assert layer.merge == 0.0
    dense = model_of(workload("quest", dense_layers=2)).layer(0, row(*[G] * 8))
    assert dense.gpu == pytest.approx(6.0 + 8 * 131072 * ROW / 4.2e6)
    assert dense.merge == 0.0


def test_a_step_is_its_layers_and_the_rest() -> None:
    work = workload("tidal_decode", budget_tokens=1024)
    model = model_of(work)
    step = model.step(least_placement(work))
    assert len(step.layers) == 32
    assert step.last == 285.0 + 15.0
    assert step.fixed == 120.0
    rows = step.breakdown()
    assert sum(r["layers"] for r in rows) == 32
    assert sum(r["total"] for r in rows) + 420.0 == pytest.approx(1e3 * step.milliseconds)
    assert step.tokens_per_second == pytest.approx(1e3 / step.milliseconds)
    assert step.assumed == ()
    on_gpu = model.step(HeadPlacement.filled(32, 8, Place.GPU))
    assert on_gpu.fixed == 20.0  # the host does not wait for each


def test_a_step_without_a_gpu() -> None:
    work = workload("full", kv_len=1000, shape=SMALL)
    places = HeadPlacement.filled(SMALL.num_layers, SMALL.num_kv_heads, C)
    scan_us = 10.0 + 1000 * 2 * SMALL.num_kv_heads * 32 * 2 / 1.5e5
    key = shape_key(SMALL, 2)
    measured = machine_profile(
        layer_linear_us={key: {1: 40.0}}, lm_head_us={key: {1: 25.0}}, step_us=90.0, device=None
    )
    step = StepModel(replace(measured, attention_heads=(8, 4, 32)), work, on_gpu=False).step(places)
    assert 1e3 * step.milliseconds == pytest.approx(6 * (40.0 + scan_us) + 25.0 + 90.0)
    assert step.assumed == ()
    # Of a shape that was not measured: as long as reading its weights takes, and that is said.
    other = StepModel(machine_profile(device=None), work, on_gpu=False).step(places)
    read_us = 2 * 128 * (SMALL.qkv_width + 8 * 32 + 3 * 256 + 2) * 1e6 / 190e9
    assert other.layers[0].linear == pytest.approx(read_us)
    assert [what.split(":")[0] for what in other.assumed] == [
        "linear layers on the CPU",
        "CPU attention",
        "the last projection on the CPU",
    ]


def test_retrieving_on_the_gpu_and_gathering_is_faster_here() -> None:
    work = workload("tidal_decode", budget_tokens=1024)
    model = model_of(work)
    roles = work.roles()
    gathered = HeadPlacement(np.where(roles == 3, F, G))
    assert model.step(gathered).milliseconds < model.step(least_placement(work)).milliseconds / 2


@pytest.mark.parametrize("policy", ["lychee_decode", "quest", "lychee_cluster", "lfps", "full"])
def test_longer_contexts_and_larger_batches_take_no_less(policy: str) -> None:
    # Not below 16 budgets, where lfps looks at more candidates.
    times = []
    for kv_len, batch_size in ((20000, 1), (32768, 1), (131072, 1), (131072, 2)):
        work = workload(policy, kv_len, batch_size)
        times.append(model_of(work).step(least_placement(work)).milliseconds)
    assert times == sorted(times)


def test_within_the_budget_nothing_is_selected() -> None:
    work = workload("lychee_decode", kv_len=1024, budget_tokens=1024)
    assert not work.is_sparse
    assert work.chosen_tokens == 1024 - 68
    model = model_of(work)
    assert model.top_k_us(0, row(*[G] * 8)) == 0.0
    longer = workload("lychee_decode", kv_len=1025, budget_tokens=1024)
    assert longer.is_sparse
    assert model_of(longer).top_k_us(0, row(*[G] * 8)) > 0.0


def test_what_is_read_ahead_is_faster() -> None:
    work = workload("lychee_decode", budget_tokens=1024)
    warm = model_of(work).layer(1, row(*[C] * 8)).reply
    profile = machine_profile()
    cold = model_of(work, attend_warm=profile.attend_cold).layer(1, row(*[C] * 8)).reply
    assert warm < cold
    # There is time for as much as memory gives during the linear layers, and caches have room.
    no_time = model_of(
        work,
        device=device_profile(
            layer_linear_us={}, lm_head_us={}, gemv=CostTable(((1, 1e-9), (1e12, 1e-8)))
        ),
    )
    assert no_time.layer(1, row(*[C] * 8)).reply == pytest.approx(cold, rel=0.01)


def test_a_scale_that_was_measured_counts_for_that_policy_only() -> None:
    for policy, grows in (("lychee_cluster", True), ("quest", False), ("lychee_decode", False)):
        work = workload(policy)
        plain = model_of(work).layer(5, row(*[C] * 8)).reply
        scales = {policy_key(workload("lychee_cluster").policy, LLAMA, work.kv_len): 2.0}
        scaled = model_of(work, select_scale=scales).layer(5, row(*[C] * 8)).reply
        assert (scaled > 1.5 * plain) == grows


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_gpu_waits_for_what_comes_after_an_answer_only_where_it_is_quick_itself(
    share: float,
) -> None:
    work = workload("lychee_cluster")
    key = policy_key(work.policy, LLAMA, work.kv_len)
    on_cpu = row(*[C] * 8)
    whole = model_of(work, select_scale={key: 8.0})
    other = model_of(work, select_scale={key: 8.0}, select_hidden={key: share})
    everything = whole.layer(5, on_cpu).reply
    attends = everything - device_profile().round_trip_us
    hidden = min(share * attends, whole.linear_us)
    assert other.layer(5, on_cpu).reply == pytest.approx(everything - hidden)
    assert attends > 0.9 * attends > whole.linear_us  # so that one of the shares is cut


def test_without_a_gpu_it_is_weights_and_attention() -> None:
    work = workload("quest", kv_len=8192, shape=SMALL)
    profile = machine_profile(read_bandwidth=1e9)
    step = StepModel(profile, work, on_gpu=False).step(
        HeadPlacement.filled(SMALL.num_layers, SMALL.num_kv_heads, C)
    )
    of_layer = 2 * 128 * ((8 + 2 * 4) * 32 + 8 * 32 + 3 * 256 + 2)
    assert step.layers[0].linear == pytest.approx(of_layer / 1e3)
    dense = 10.0 + 2 * 4 * 8192 * 32 * 2 / 1.5e5
    assert step.layers[0].total == pytest.approx(of_layer / 1e3 + dense)
    assert step.last == pytest.approx(2 * 512 * 128 / 1e3)
    assert step.fixed == 0.0


def test_what_was_not_measured_is_said() -> None:
    work = workload("quest", shape=SMALL, kv_len=8192)
    model = model_of(work, device=device_profile(gather_measured=False))
    assumed = model.step(least_placement(work)).assumed
    assert len(assumed) == 4
    for text in (
        "fetching rows",
        "selecting on the CPU",
        "linear layers",
        "CPU attention: measured with",
    ):
        assert any(text in line for line in assumed)


def test_a_profile_without_a_gpu_cannot_plan_for_one() -> None:
    with pytest.raises(ValueError, match="the machine profile has no GPU"):
        StepModel(machine_profile(device=None), workload(), on_gpu=True)


@pytest.mark.parametrize("name", ["kv_len", "batch_size", "page_tokens"])
def test_workloads_of_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        replace(workload(), **{name: 0})


def test_the_measured_shape_is_llamas() -> None:
    assert model_of(workload()).linear_us == 129.0
    assert workload().shape == LLAMA


@pytest.mark.parametrize(("batch_size", "wanted"), [(1, 100.0), (2, 110.0), (5, 125.0), (8, 140.0)])
def test_linear_layers_of_a_batch_between_those_that_were_measured(
    batch_size: int, wanted: float
) -> None:
    key = shape_key(LLAMA, 2)
    device = device_profile(layer_linear_us={key: {1: 100.0, 2: 110.0, 8: 140.0}})
    assert model_of(workload(batch_size=batch_size), device=device).linear_us == wanted


def test_linear_layers_of_a_batch_that_was_not_measured() -> None:
    device = device_profile(layer_linear_us={})
    one, more = (
        model_of(workload(batch_size=batch_size), device=device).linear_us for batch_size in (1, 8)
    )
    assert more == pytest.approx(1.19 * one)
