"""Predicted times to the first token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases.profile_cases import LLAMA, machine_profile, workload

from offload.measuring.machine.prefill import with_prefill
from offload.measuring.machine.spread import Spread
from offload.models.shape import MODEL_SHAPES
from offload.planning.prefill_time import prefill_key, prefill_time
from offload.planning.profile import MachineProfile

CPU = torch.device("cpu")


def measured(device: str = "cpu", **changes: float) -> MachineProfile:
    key = prefill_key(torch.device(device), LLAMA, torch.bfloat16)
    costs = {"token": 2.0, "pair": 0.001, "least": 100.0} | changes
    return machine_profile(**{f"prefill_{name}_us": {key: us} for name, us in costs.items()})


def test_products_go_by_tokens_and_attention_by_pairs() -> None:
    work = replace(workload(), kv_len=1000, batch_size=2, shape=LLAMA)
    found = prefill_time(measured(), work, 500.0, on_gpu=False)
    assert found is not None
    assert found.products == pytest.approx(32 * 2000 * 2e-6)
    assert found.attention == pytest.approx(32 * 2 * 1000**2 / 2 * 1e-9)
    assert found.total == pytest.approx(found.products + found.attention + 5e-4)
    twice = prefill_time(measured(), replace(work, kv_len=2000), 500.0, on_gpu=False)
    assert twice is not None
    assert twice.products == pytest.approx(2 * found.products)
    assert twice.attention == pytest.approx(4 * found.attention)
    few = prefill_time(measured(), replace(work, kv_len=1), 0.0, on_gpu=False)
    assert few is not None
    assert few.total == pytest.approx(32 * 100e-6)


def test_a_gpu_waits_for_keys_and_values_on_their_way() -> None:
    work = replace(workload(), kv_len=100_000, shape=LLAMA)
    found = prefill_time(measured("cuda", token=1e-3, pair=0.0), work, 0.0, on_gpu=True)
    assert found is not None
    assert found.leaving > 0.0
    assert prefill_time(measured("cuda"), work, 0.0, on_gpu=False) is None


def test_a_profile_from_before_is_read_without() -> None:
    document = measured().as_json()
    for name in ("prefill_token_us", "prefill_pair_us", "prefill_least_us", "spread"):
        del document[name]
    old = MachineProfile.from_json(document)
    assert old.is_steady
    assert prefill_time(old, workload(), 0.0, on_gpu=False) is None


def test_fewer_threads_read_slower() -> None:
    profile = replace(measured(), num_threads=8)
    slower = profile.for_threads(2)
    assert list(slower.prefill_token_us.values()) == [8.0]
    with_gpu = replace(measured("cuda"), num_threads=8).for_threads(2)
    assert list(with_gpu.prefill_token_us.values()) == [2.0]


def test_a_spread_is_of_the_middle_half() -> None:
    spread = Spread()
    assert spread.median([1.0, 1.0, 1.0, 1.0, 9.0]) == 1.0
    assert spread.most == 0.0
    assert spread.median([8.0, 10.0, 10.0, 12.0, 13.0]) == 10.0
    assert spread.most == pytest.approx(0.2)
    assert not replace(machine_profile(), spread=spread.most).is_steady


def test_a_real_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(with_prefill.__globals__["_ROWS"], "cpu", 128)
    monkeypatch.setitem(with_prefill.__globals__["_LENGTHS"], "cpu", (128, 256))
    shape, base = MODEL_SHAPES["tiny"], machine_profile(device=None, num_threads=1)
    whole, spread = with_prefill(base, CPU, shape, torch.float32)
    key = prefill_key(CPU, shape, torch.float32)
    assert whole.prefill_token_us[key] >= 0.0
    assert whole.prefill_least_us[key] > 0.0
    assert spread >= 0.0
    assert with_prefill(whole, CPU, shape, torch.float32) == (whole, 0.0)
