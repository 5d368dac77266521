"""Machine profiles: tables of costs, files, the cache, and a real measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.profile_cases import LLAMA, machine_profile, workload

from offload.decode.gpu.placement import Place
from offload.measuring.machine.device import measure_device
from offload.measuring.machine.measure import measure_profile
from offload.measuring.machine.steps import host_step_us
from offload.models.shape import MODEL_SHAPES
from offload.planning.choose import least_placement
from offload.planning.cost_table import CostTable
from offload.planning.profile import (
    MachineProfile,
    cached_profile,
    machine_key,
    profiles_path,
    shape_key,
    store_profile,
    typical_profile,
)
from offload.planning.step_time import StepModel
from offload.policies.registry import make_policy
from offload.runtime.placing import Chooser

CPU = torch.device("cpu")


def test_costs_between_and_beyond_points() -> None:
    table = CostTable(((100, 10), (200, 20), (400, 25)))
    assert table.us(0) == 0.0
    assert table.us(100) == 10.0
    assert table.us(150) == 15.0
    assert table.us(300) == 22.5
    assert table.us(800) == 35.0
    assert table.us(50) == 5.0
    assert table.fixed_us == 0.0
    assert CostTable(((100, 10), (200, 12))).fixed_us == 8.0
    assert CostTable(((100, 10),)).us(50) == 10.0
    assert CostTable(((100, 10),)).us(300) == 30.0
    assert CostTable(((0, 3), (1e6, 3 + 5e5))).us(10) == pytest.approx(8.0)


def test_noise_does_not_make_more_cost_less() -> None:
    table = CostTable.measured([(300, 7), (100, 10), (200, 8)])
    assert table.points == ((100, 10), (200, 10), (300, 10))


@pytest.mark.parametrize(
    "points", [(), ((1, 2), (1, 3)), ((1, 2), (2, 1)), ((1, float("nan")),), ((-1, 1),)]
)
def test_wrong_tables(points: tuple) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable(points)


def test_a_file_comes_back(tmp_path: Path) -> None:
    for profile in (machine_profile(), machine_profile(device=None)):
        path = tmp_path / "profile.json"
        profile.save(path)
        assert MachineProfile.load(path) == profile
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: "[]", "another format"),
        (lambda text: text.replace("profile-6", "profile-0"), "another format"),
        (lambda text: text.replace('"isa"', '"esa"'), "damaged .*unknown field 'esa'"),
        (lambda text: text.replace('"isa": "avx2",', ""), "damaged .*isa"),
        (lambda text: text.replace("190000000000.0", "-1"), "damaged .*read_bandwidth must be"),
        (lambda text: text.replace("190000000000.0", "NaN"), "damaged .*read_bandwidth must be"),
        (lambda text: text.replace('"window_us": 6.6', '"window_us": "x"'), "damaged .*'x'"),
        (lambda text: text.replace('"points"', '"dots"'), "damaged .*points"),
        (lambda text: text.replace('"device": {', '"device": 7, "was": {'), "damaged"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "profile.json"
    machine_profile().save(path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ValueError, match=message) as error:
        MachineProfile.load(path)
    assert "profile.json" in str(error.value)
    assert "offload plan --remeasure" in str(error.value)


def _profile_of(num_threads: int) -> MachineProfile:
    key = machine_key(CPU)
    of_machine = {name: key[name] for name in ("cpu", "isa", "version")}
    return machine_profile(device=None, num_threads=num_threads, **of_machine)


def test_the_cache_is_keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    assert cached_profile(CPU, 2) is None
    key = machine_key(CPU)
    profile = _profile_of(2)
    path = store_profile(profile)
    assert path == profiles_path(key)
    assert cached_profile(CPU, 2) == profile
    for name, value in (("cpu", "other"), ("isa", "other"), ("version", "0"), ("gpu", "H200")):
        assert profiles_path(key | {name: value}) != path

    # A file that was copied there from another machine.
    kept = path.read_text()
    path.write_text(kept.replace(json.dumps(key["cpu"]), '"made CPU"'))
    with pytest.raises(ValueError, match="is for another machine: cpu 'made CPU' instead of"):
        cached_profile(CPU, 2)
    for damaged in ("{", "[]", '{"profiles": []}', kept.replace('"attend_cold"', '"cold"')):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"damaged.*offload plan --remeasure"):
            cached_profile(CPU, 2)
    assert store_profile(profile) == path
    assert cached_profile(CPU, 2) == profile


def test_a_machine_is_measured_once_for_all_numbers_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest stands for those that were not measured, and never for something faster."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    scales = {"select_scale": {"lfps": 1.5}, "layer_linear_us": {"a": {1: 30.0}}}
    four, sixteen = (replace(_profile_of(n), **scales) for n in (4, 16))
    assert store_profile(sixteen) == store_profile(four) == store_profile(sixteen)
    assert cached_profile(CPU, 4) == four
    assert cached_profile(CPU, 16) == sixteen

    two = cached_profile(CPU, 2)
    assert two is not None
    assert (two.num_threads, two.measured_threads) == (2, 4)
    assert two.read_bandwidth == four.read_bandwidth / 2
    for name in ("attend_cold", "attend_warm", "scan_dense", "scan_retrieve"):
        assert getattr(two, name).us(1e6) == pytest.approx(2 * getattr(four, name).us(1e6))
    assert two.layer_linear_us == {"a": {1: 60.0}}
    assert two.select_scale == four.select_scale
    assert cached_profile(CPU, 6) == replace(four, num_threads=6, measured_threads=4)
    for wanted, nearest in ((1, 4), (7, 4), (9, 16), (64, 16)):
        found = cached_profile(CPU, wanted)
        assert found is not None
        assert found.measured_threads == nearest

    with pytest.raises(ValueError, match="for 2 threads that was measured with 4 is not kept"):
        store_profile(two)
    faster = replace(four, read_bandwidth=2 * four.read_bandwidth)
    store_profile(faster)
    assert cached_profile(CPU, 4) == faster
    assert cached_profile(CPU, 16) == sixteen


def test_a_plan_says_that_other_threads_were_measured() -> None:
    profile, work = machine_profile(num_threads=8), workload()
    assert not StepModel(profile, work, on_gpu=True).step(least_placement(work)).assumed
    step = StepModel(profile.for_threads(2), work, on_gpu=True).step(least_placement(work))
    assert step.assumed == (
        "CPU: measured with num_threads=8, not 2; fewer take longer in proportion, more as long, "
        "and --remeasure measures them",
    )


def test_a_profile_of_an_older_version_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    path = store_profile(_profile_of(2))
    path.write_text(path.read_text().replace("offload-profile-6", "offload-profile-1"))
    assert cached_profile(CPU, 2) is None


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "file"))
    with pytest.raises(PermissionError, match="set OFFLOAD_CACHE to a folder"):
        store_profile(machine_profile())


def test_shapes_with_equal_layers_have_equal_keys() -> None:
    assert shape_key(LLAMA, 2) == "4096x6144x14336x128256x2"
    assert shape_key(LLAMA, 4) != shape_key(LLAMA, 2)


def test_a_real_measurement_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.measuring.machine.host._KV_LEN", 4096)
    monkeypatch.setattr("offload.measuring.machine.host._MAX_CACHE_BYTES", 64 * 2**20)
    monkeypatch.setattr("offload.measuring.machine.steps._WEIGHT_BYTES", 0)  # two layers
    seen = []
    profile = measure_profile(
        CPU,
        1,
        shape=MODEL_SHAPES["smollm2-135m"],
        dtype=torch.float32,
        on_progress=lambda what, done, total: seen.append((done, total)),
    )
    assert profile.device is None
    assert profile.attention_heads == (9, 3, 64)
    assert profile.key == machine_key(CPU)
    assert 1e8 < profile.read_bandwidth < 1e13
    sizes = [size for size, _ in profile.attend_cold.points]
    assert sizes == [2 * 3 * 64 * 4 * tokens for tokens in (32, 256, 1024, 2048, 4096)]
    for table in (profile.scan_dense, profile.scan_retrieve):
        assert [size for size, _ in table.points] == [2 * 3 * 64 * 4 * n for n in (512, 2048, 4096)]
        assert table.points[-1][1] > 2 * table.points[0][1] > 0.0  # 8 times the tokens
    for table in (profile.attend_cold, profile.attend_warm):
        assert table.us(sizes[-1]) > 2 * table.us(sizes[0]) > 0.0  # 128 times the rows
    for size in sizes:
        assert profile.attend_warm.us(size) <= profile.attend_cold.us(size)
    assert seen[-1][0] == seen[-1][1]
    key = shape_key(MODEL_SHAPES["smollm2-135m"], 4)
    layer_us, last_us = profile.layer_linear_us[key][1], profile.lm_head_us[key][1]
    assert last_us > layer_us > 1.0  # 113 MB of weights, and 14
    assert 0.0 <= profile.step_us < 20_000.0  # a difference; 0 if busy
    assert MachineProfile.from_json(json.loads(json.dumps(profile.as_json()))) == profile


def test_layers_that_do_not_fit_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.measuring.machine.steps.host_memory_limit_bytes", lambda: 2**20)
    found = host_step_us(MODEL_SHAPES["smollm2-135m"], torch.bfloat16, 1)
    assert found == ({}, {}, 0.0)


def test_device_parts_run_on_cpu_tensors() -> None:
    """By the reference code: what is measured is the code's, the numbers are of no use."""
    device = measure_device(
        CPU,
        MODEL_SHAPES["tiny"],
        torch.float32,
        rows=[1, 2],
        driver=None,
        num_threads=1,
        scale=0.004,
    )
    key = shape_key(MODEL_SHAPES["tiny"], 4)
    assert set(device.layer_linear_us[key]) == set(device.lm_head_us[key]) == {1, 2}
    for table in (device.gemv, device.attention, device.retrieval, device.top_k, device.gather):
        assert len(table.points) >= 2
        assert table.points[-1][1] > 0.0
    # Differences of graphs: noise may make them 0 here, but there they are.
    assert len(device.gather_beside.points) >= 2
    assert device.gather_beside.points[-1][1] > 0.0  # by the reference, fetching hides nothing
    assert [size for size, _ in device.top_k_beside.points] == [
        size for size, _ in device.top_k.points
    ]
    for name in ("read_bandwidth", "to_host_bandwidth", "from_host_bandwidth", "window_us"):
        assert getattr(device, name) > 0.0
    profile = machine_profile(device=device)
    assert MachineProfile.from_json(json.loads(json.dumps(profile.as_json()))) == profile


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
def test_a_real_measurement_of_a_gpu() -> None:
    profile = measure_profile(torch.device("cuda"), 2, shape=MODEL_SHAPES["llama-3.2-1b"])
    device = profile.device
    assert device is not None
    assert device.read_bandwidth > device.from_host_bandwidth > 1e9
    assert 0.0 < device.round_trip_us < 200.0
    assert 0.0 <= device.step_us < 5000.0  # 0 where other tests use the GPU at the same time
    (linear,) = device.layer_linear_us.values()
    assert 1.0 < linear[1] < 1000.0
    assert profile.key == machine_key(torch.device("cuda"))
    assert MachineProfile.from_json(json.loads(json.dumps(profile.as_json()))) == profile


def test_a_typical_machine_stands_for_one_that_was_never_measured() -> None:
    """Where a GPU has room for some, it gets the heads that wait for their rows, and all if it
    has room for all and the CPU is no faster."""
    profile = typical_profile(4)
    assert profile.num_threads == 4
    assert profile.measured_threads == 15
    shape = MODEL_SHAPES["llama-3.1-8b"]
    for name, room_gib, heads in (("tidal_decode", 9, 32), ("full", 20, 256)):
        policy = make_policy(name)
        choose = Chooser(policy, shape, torch.bfloat16, 64, 8192, typical_profile(15))
        least = least_placement(choose.workload(1, 131072))
        placement = choose(least, 1, 131072, room_gib * 2**30)
        assert sum(placement.counts(Place.GPU)) == heads
