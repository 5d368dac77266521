"""What a policy's own selection is measured to cost, on a real worker pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.profile_cases import machine_profile
from cases.slowly import slow_but

from offload.measuring.machine.policy import measure_policy_us, selects_on_host, with_policy
from offload.models.shape import MODEL_SHAPES, layer_elements
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload, policy_key
from offload.policies import PerHead, Policy
from offload.policies.registry import make_policy

SHAPE = MODEL_SHAPES["smollm2-135m"]
KV_LEN = 3072


@pytest.mark.parametrize(
    "name",
    slow_but(["quest", "lychee_cluster", "lfps", "exact_topk"], "lychee_cluster", "exact_topk"),
)
def test_a_policy_is_measured_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(name, budget_tokens=256)
    profile = machine_profile(num_threads=1)
    found = with_policy(profile, policy, SHAPE, torch.float32, KV_LEN)
    key = policy_key(policy, SHAPE, KV_LEN)
    scale = found.select_scale[key]
    assert 1e-3 < scale < 1e4
    assert 0.0 <= found.select_hidden[key] < 1.0
    assert found.select_hidden[key] == 0.0 or name != "exact_topk"  # which does nothing else
    assert 1e-3 < found.select_ahead[key] < 1e4
    monkeypatch.setattr(
        "offload.measuring.machine.policy.measure_policy_us", None
    )  # not called again
    assert with_policy(found, policy, SHAPE, torch.float32, KV_LEN) is found

    # The model says of that layer what was measured, and no longer that it assumes something.
    work = Workload(SHAPE, policy, KV_LEN, dtype=torch.float32)
    layer = work.roles()[-1], work.unit_members[-1]
    plain = StepModel(replace(found, select_scale={key: 1.0}), work, on_gpu=False)
    scaled = StepModel(found, work, on_gpu=False)
    assert scaled.attend_us(*layer) == pytest.approx(scale * plain.attend_us(*layer))
    other = StepModel(profile, work, on_gpu=False)
    other.attend_us(*layer)
    assert any("selecting on the CPU" in line for line in other._assumed)
    assert not any("selecting on the CPU" in line for line in scaled._assumed)
    ahead = StepModel(found, work, on_gpu=True)
    measured = found.select_ahead[key] * ahead.choose_cold_us(*layer)
    assert ahead._choose_us(*layer) == pytest.approx(measured)


def test_a_policy_that_chooses_nothing_is_measured() -> None:
    """There is no such time ahead."""
    before, policy = machine_profile(num_threads=1), make_policy("streaming_llm", budget_tokens=256)
    found = with_policy(before, policy, SHAPE, torch.float32, KV_LEN)
    assert found.select_scale.keys() == {policy_key(policy, SHAPE, KV_LEN)}
    assert found.select_ahead == before.select_ahead


def test_each_member_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("per_head", rest="quest", budget_tokens=256, dense_layers=1)
    assert isinstance(policy, PerHead)
    measured = []

    def measure(member: Policy, *_: Any) -> tuple[float, float, float]:
        measured.append(member)
        return 100.0, 0.0, 50.0

    monkeypatch.setattr("offload.measuring.machine.policy.measure_policy_us", measure)
    found = with_policy(machine_profile(), policy, SHAPE, torch.float32, KV_LEN)
    assert measured == [policy.rest, policy.retrieval]
    assert found.select_scale.keys() == {policy_key(m, SHAPE, KV_LEN) for m in policy.members}


def test_what_a_step_reads_between_two_visits_of_a_layer_leaves_the_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All its other layers; without a GPU their weights, too."""
    between = []

    def measure(*arguments: Any) -> tuple[float, float, float]:
        between.append(arguments[-1])
        return 100.0, 0.0, 50.0

    monkeypatch.setattr("offload.measuring.machine.policy.measure_policy_us", measure)
    policy = make_policy("exact_topk", budget_tokens=256)
    profile = machine_profile()
    assert profile.device is not None
    for machine in (profile, replace(profile, device=None)):
        with_policy(machine, policy, SHAPE, torch.float32, KV_LEN)
    # Keys and importance, then values of what was chosen, of 3 heads in 29 layers.
    touched = 29 * 3 * (KV_LEN * (256 + 4) + 256 * 256)
    weights = 29 * 4 * layer_elements(SHAPE)
    assert between == [touched, touched + weights]


def test_options_are_measured_by_themselves() -> None:
    small, large = (make_policy("quest", budget_tokens=n) for n in (256, 512))
    assert policy_key(small, SHAPE, KV_LEN) != policy_key(large, SHAPE, KV_LEN)


def test_other_heads_and_lengths_are_measured_by_themselves() -> None:
    policy = make_policy("lychee_cluster", budget_tokens=1024)
    llama = MODEL_SHAPES["llama-3.1-8b"]
    key = policy_key(policy, SHAPE, 6144)
    assert policy_key(policy, SHAPE, 8192) == key
    assert policy_key(policy, SHAPE, 8193) != key
    assert policy_key(policy, llama, 6144) != key
    # Longer ones are not timed as a whole, so they are one.
    assert policy_key(policy, llama, 40_000) == policy_key(policy, llama, 131_072)


def test_more_attended_tokens_take_longer() -> None:
    times = [
        measure_policy_us(
            make_policy("exact_topk", budget_tokens=256), SHAPE, torch.float32, kv_len, 1, 2**28
        )[0]
        for kv_len in (1024, 16384)
    ]
    assert times[1] > 2 * times[0] > 0.0


@pytest.mark.parametrize("kv_len", [257, 259])
def test_barely_more_tokens_than_the_budget(kv_len: int) -> None:
    """The policy's layers observe in turns."""
    policy = make_policy("lfps", budget_tokens=256)
    assert selects_on_host(policy, SHAPE, kv_len)
    assert min(measure_policy_us(policy, SHAPE, torch.float32, kv_len, 1, 2**20)) > 0.0


@pytest.mark.parametrize(
    ("name", "kv_len"), [("full", 8192), ("lychee_decode", 8192), ("quest", 512)]
)
def test_what_selects_nothing_on_the_cpu_is_not_measured(name: str, kv_len: int) -> None:
    options = {} if name == "full" else {"budget_tokens": 1024}
    policy = make_policy(name, **options)
    assert not selects_on_host(policy, MODEL_SHAPES["llama-3.1-8b"], kv_len)
    profile = machine_profile()
    shape = MODEL_SHAPES["llama-3.1-8b"]
    assert with_policy(profile, policy, shape, torch.bfloat16, kv_len) is profile
