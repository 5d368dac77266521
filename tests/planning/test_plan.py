"""Plans: bytes against what is allocated, refusals, and the options of the runtime."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import greedy, small
from cases.inside import decoder_of, runtime_of
from cases.profile_cases import SMALL, device_profile, machine_profile
from cases.tiny_models import make_tiny_model, random_tokens, write_gguf

from offload import HostBudgetError, OffloadedModel
from offload.decode.gpu.buffers import num_slots
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.kv.page_pool import DEFAULT_SLAB_BYTES
from offload.kv.store import KVStore
from offload.loading.planned_model import PlannedModel, planned_model
from offload.measuring.synthetic.random_model import random_model
from offload.models.shape import MODEL_SHAPES, layer_elements, weight_elements
from offload.planning.choose import DeviceRoom, choose_placement, least_placement
from offload.planning.placement_bytes import policy_state_bytes, step_device_bytes, store_bytes
from offload.planning.plan import PlanRequest, make_plan
from offload.planning.profile import typical_profile
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload
from offload.policies.registry import make_policy
from offload.runtime.budgets import weight_bytes_of
from offload.system.errors import DeviceMemoryError
from offload.system.memory import HostMemory

CPU = torch.device("cpu")
GIB = 2**30
LLAMA = "llama-3.1-8b"


def request(policy: str = "lychee_decode", **changes: Any) -> PlanRequest:
    options = {"context": 131072, "batch_size": 1, "device": "cuda", "max_memory": {}}
    model = changes.pop("model", LLAMA)
    made = make_policy(policy, **changes.pop("policy_options", {}))
    options |= {"on_this_machine": False} | changes
    return PlanRequest(planned_model(model), made, **options)


# Bytes, against what allocates them


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("tokens", [40, 150])
def test_the_decoder_takes_what_was_planned(
    tiny_folders: dict[str, Path], batch_size: int, tokens: int
) -> None:
    policy, new = small("exact_topk", budget_tokens=64), 6
    model = OffloadedModel.from_pretrained(
        tiny_folders["llama"],
        policy=policy,
        dtype="float32",
        backend="inline",
        num_threads=1,
        page_tokens=16,
    )
    greedy(model, random_tokens(batch_size, tokens, seed=1), new)
    runtime = runtime_of(model)
    planned = planned_model(str(tiny_folders["llama"]), "float32")
    last = tokens + new - 1  # the last token has no KV
    work = Workload(planned.shape, policy, last, batch_size, torch.float32, page_tokens=16)
    counted = step_device_bytes(least_placement(work), work, device=None)
    names = ("KV of resident heads", "windows", "page tables")
    assert sum(counted[name] for name in names) == decoder_of(model).device_bytes
    assert runtime.store.host_bytes_reserved == store_bytes(work)
    assert planned.weight_bytes == weight_bytes_of(model)


@pytest.mark.parametrize(("kv_len", "batch_size"), [(1, 1), (16, 1), (17, 2), (1000, 3)])
@pytest.mark.parametrize("slab_bytes", [1, 100_000, DEFAULT_SLAB_BYTES])
def test_the_store_reserves_what_was_planned(kv_len: int, batch_size: int, slab_bytes: int) -> None:
    store = KVStore(
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        page_tokens=16,
        slab_bytes=slab_bytes,
    )
    seqs = [store.new_sequence() for _ in range(batch_size)]
    store.reserve(seqs, [kv_len] * batch_size)
    shape = replace(SMALL, num_layers=3, num_kv_heads=2, head_dim=8)
    work = Workload(shape, make_policy("full"), kv_len, batch_size, torch.float32, page_tokens=16)
    assert store_bytes(work, slab_bytes) == store.host_bytes_reserved
    store.close()


def test_slots_are_powers_of_two() -> None:
    assert [num_slots(n) for n in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]


@pytest.mark.parametrize("ties_embeddings", [False, True])
def test_weights_of_named_shapes(ties_embeddings: bool) -> None:
    shape = replace(MODEL_SHAPES["tiny"], ties_embeddings=ties_embeddings)
    stock = random_model(shape, device=CPU, dtype=torch.float32)
    assert 4 * weight_elements(shape) == weight_bytes_of(stock)
    assert planned_model(LLAMA).weight_bytes == 16_060_522_496  # perf/results/gpu-decode.json


def test_a_tied_projection_of_a_named_shape_counts_once() -> None:
    assert planned_model("llama-3.2-1b").weight_bytes == 2 * 1_235_814_400  # of its checkpoint
    assert planned_model("smollm2-135m").weight_bytes == 2 * 134_515_008


@pytest.mark.parametrize("policy", ["quest", "lychee_cluster", "lfps", "union"])
def test_what_policies_keep(policy: str) -> None:
    shape = replace(SMALL, num_kv_heads=2)
    made = make_policy(policy, dense_layers=0)
    few, many = (policy_state_bytes(made, shape, torch.bfloat16, n) for n in (8192, 65536))
    assert 0 < few < many < 12 * few
    assert policy_state_bytes(made, shape, torch.bfloat16, made.budget_tokens) == 0.0
    assert policy_state_bytes(make_policy("exact_topk"), shape, torch.bfloat16, 65536) == 0.0


# Models that are not loaded


@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts(tiny_folders: dict[str, Path], weights: str, device: str) -> None:
    """All of them are in memory; a token's time is that of those it meets."""
    folder = tiny_folders["qwen3_moe"]
    model = OffloadedModel.from_pretrained(folder, num_threads=1, weights=weights)
    planned = planned_model(str(folder), weights=weights, device=device)
    assert planned.weight_bytes == weight_bytes_of(model)
    shape, like = planned.shape, planned.shape.of_a_token
    assert (shape.num_experts, like.num_experts) == (model.config.num_experts, 0)
    assert layer_elements(like) < layer_elements(shape) < layer_elements(like) * 1.2  # a router
    profile = machine_profile(device=device_profile() if device == "cuda" else None)
    found = make_plan(PlanRequest(planned, make_policy("full"), 300, 1, device, {}), profile)
    counted = found.device_bytes if device == "cuda" else found.host_bytes
    assert counted["weights"] == planned.weight_bytes


def test_only_the_config_is_read(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    for name, folder in tiny_folders.items():
        if not (folder / "config.json").is_file():
            continue
        alone = tmp_path / name
        alone.mkdir()
        (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
        planned = planned_model(str(alone))
        assert planned.shape.num_layers == 3
        whole = planned_model(str(folder))
        assert planned.shape == whole.shape
        assert planned.weight_bytes == whole.weight_bytes > 0


def test_a_gguf_file(tmp_path: Path) -> None:
    from cases.tiny_models import byte_tokenizer

    stock = make_tiny_model("llama", tie_word_embeddings=False)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, stock, byte_tokenizer())
    planned = planned_model(str(path))
    assert planned.dtype == torch.bfloat16
    assert planned.shape.num_kv_heads == 2
    assert planned.weight_bytes == 2 * sum(w.numel() for w in stock.parameters())


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("./nowhere", FileNotFoundError, "no such model folder, GGUF file or shape"),
        ("nowhere.gguf", FileNotFoundError, "nowhere.gguf"),
        ("llama-3-8b", FileNotFoundError, "no model 'llama-3-8b'; known names: llama-3.1-8b, "),
    ],
)
def test_models_that_are_not_there(
    name: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(error, match=message):
        planned_model(name)


def test_a_model_type_that_does_not_run_cannot_be_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises((ValueError, NotImplementedError), match="gpt2"):
        planned_model(str(tmp_path))
    with pytest.raises(ValueError, match="unknown dtype 'int8'; available: auto, bfloat16"):
        planned_model(LLAMA, "int8")


# Plans


def test_a_plan_beyond_this_machine_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what fits: 16 GiB of KV cache at 131,072 tokens are 128 KiB for each."""
    memory = HostMemory(32 * GIB, in_cgroup=False, left_bytes=23 * GIB, own_bytes=0)  # 1 program's
    monkeypatch.setattr("offload.planning.plan.host_memory", lambda: memory)
    monkeypatch.setattr("offload.planning.plan.slow_here", lambda *_, **__: [])
    here = request(device="cpu", on_this_machine=True)
    plan = make_plan(here, machine_profile())
    (note,) = plan.notes
    assert note.startswith(
        "weights and KV cache, and the program itself, of 1 x 131,072 tokens need 31.96 GiB of host"
    )
    assert plan.host_limit_bytes == memory.usable_bytes == 21 * GIB
    assert plan.as_json()["host_memory"] == memory.explained()
    assert sum(plan.host_bytes.values()) == plan.as_json()["host_total_bytes"]
    (longest,) = map(int, re.findall(r"at most (\d+) tokens fit", note.replace(",", "")))
    pages = (20 * GIB - here.model.weight_bytes) // (256 * 128 * 1024)
    assert longest == pages * 256
    assert make_plan(replace(here, context=longest), machine_profile()).notes == ()
    assert len(make_plan(replace(here, context=longest + 1), machine_profile()).notes) == 1
    monkeypatch.setattr(
        "offload.planning.plan.host_memory", lambda: replace(memory, left_bytes=3 * GIB)
    )
    assert make_plan(here, machine_profile()).notes[0].endswith("no context fits")


def test_a_plan_adds_up() -> None:
    plan = make_plan(request(max_memory={0: 24 * GIB}), machine_profile())
    document = json.loads(json.dumps(plan.as_json()))
    assert document["device_total_bytes"] == sum(document["device_bytes"].values()) <= 24 * GIB
    assert document["host_total_bytes"] == sum(document["host_bytes"].values())
    assert HeadPlacement.from_json(document) == plan.placement
    assert document["host_bytes"]["KV cache"] == 16 * GIB
    assert document["milliseconds_per_step"] == pytest.approx(
        sum(row["total"] for row in document["microseconds"]["layers"]) / 1e3
        + (document["microseconds"]["last"] + document["microseconds"]["fixed"]) / 1e3
    )
    assert plan.notes == ()


def test_a_smaller_budget_moves_heads_to_the_host() -> None:
    plans = [make_plan(request(max_memory={0: size * GIB}), machine_profile()) for size in (20, 24)]
    on_gpu = [sum(plan.placement.counts(Place.GPU)) for plan in plans]
    assert on_gpu[0] < on_gpu[1]
    assert plans[0].step.milliseconds > plans[1].step.milliseconds
    for plan, size in zip(plans, (20, 24), strict=True):
        assert sum(plan.device_bytes.values()) <= size * GIB


def places_of(policy: str, max_memory_gib: int, **changes: Any) -> dict[str, int]:
    """How many heads are where, by the profile of a typical machine."""
    asked = request(policy, max_memory={0: max_memory_gib * GIB}, **changes)
    plan = make_plan(asked, typical_profile(15))
    assert make_plan(asked, typical_profile(15)).placement == plan.placement
    assert sum(plan.device_bytes.values()) <= max_memory_gib * GIB
    plan.placement.check_policy(asked.policy, asked.model.shape.num_qo_heads)
    counts = {place.name: sum(plan.placement.counts(place)) for place in Place}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("policy", "max_memory_gib"),
    [("lychee_cluster", 20), ("lychee_cluster", 24), ("lychee_cluster", 80), ("lfps", 24)],
)
def test_a_plan_has_hot_rows_where_they_are_faster(policy: str, max_memory_gib: int) -> None:
    """Also where there is room for all heads: attending to everything takes longer."""
    assert places_of(policy, max_memory_gib) == {"GPU": 16, "HOT": 240}


@pytest.mark.parametrize("policy", ["lychee_cluster", "lychee_decode", "tidal_decode"])
def test_hot_rows_are_in_the_layers_that_they_make_faster_as_far_as_these_fit(policy: str) -> None:
    """There is less and less room for eight sequences."""
    shape = MODEL_SHAPES[LLAMA]
    work = Workload(shape, make_policy(policy, budget_tokens=1024), 32768, 8)
    profile = typical_profile(15)
    model, counts = StepModel(profile, work, on_gpu=True), set()
    for gib in (16, 8, 7, 6, 5):
        room = DeviceRoom(work, gib * GIB, profile.device)
        placement = choose_placement(model, room)
        placement.check_policy(work.policy, shape.num_qo_heads)
        assert room.holds(placement)
        hot = placement.places == Place.HOT
        for layer_idx in np.flatnonzero(hot.any(axis=1)).tolist():
            places = placement.places[layer_idx]
            without = np.where(hot[layer_idx], Place.CPU, places).astype(np.uint8)
            times = [model.layer(layer_idx, x).total for x in (places, without)]
            assert times[0] < times[1]
        counts.add(int(hot.sum()))
    assert len(counts) > 2, counts  # neither all that there may be nor none


def test_hot_rows_are_beside_heads_that_retrieve() -> None:
    counts = places_of("per_head", 24)
    assert counts["GPU"] > 16
    assert counts.keys() == {"GPU", "HOT"}


@pytest.mark.parametrize(
    ("policy", "context"),
    [
        ("lychee_cluster", 4096),
        ("lychee_cluster", 32768),
        ("full", 4096),
        ("full", 131072),
        ("tidal_decode", 131072),
        ("lychee_decode", 131072),
    ],
)
def test_a_plan_has_no_hot_rows_where_they_are_slower(policy: str, context: int) -> None:
    """Where the GPU has room for all, where rows are fetched."""
    counts = places_of(policy, 24, context=context)
    assert "HOT" not in counts
    if context <= 32768:
        assert counts == {"GPU": 256}


def test_hot_rows_are_counted() -> None:
    plan = make_plan(request("lychee_cluster", max_memory={0: 20 * GIB}), typical_profile(15))
    kept = sum(plan.placement.counts(Place.HOT))
    rows = kept * 3 * 1024 * 2 * 128 * 2  # three times the budget, K and V of 128 bfloat16
    assert plan.device_bytes["hot rows"] == pytest.approx(rows, rel=0.1)
    scarce = request("lychee_cluster", policy_options={"budget_tokens": 16384}, context=65536)
    limit = sum(make_plan(scarce, typical_profile(15)).device_bytes.values())
    for lacks in (2**28, 2**30, 2**31):
        tight = replace(scarce, max_memory={0: limit - lacks})
        assert sum(make_plan(tight, typical_profile(15)).device_bytes.values()) <= limit - lacks


def test_a_second_prompt_that_does_not_fit_is_noted() -> None:
    options = {"policy": "quest", "policy_options": {"dense_layers": 8}}
    plan = make_plan(request(**options, max_memory={0: 20 * GIB}), machine_profile())
    assert "a second prompt of this length does not fit" in plan.notes[0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_memory": {0: 14 * GIB}}, DeviceMemoryError, r"weights need 14\.96 GiB, but max_mem"),
        (
            {"max_memory": {0: 16 * GIB}},
            DeviceMemoryError,
            r"prefill of 1 x 131,072 tokens needs .* max_memory\[0\] is 16.00 GiB; raise it, lower",
        ),
        (
            {
                "policy": "quest",
                "max_memory": {0: 37 * GIB // 2},
                "policy_options": {"dense_layers": 8},
            },
            DeviceMemoryError,
            "lower the policy's dense_layers, the context or the batch size",
        ),
        (
            {"policy": "exact_topk", "policy_options": {"dense_until": 2048}},
            ValueError,
            "dense_until=2048 must be its budget_tokens=1024 where a GPU decodes; leave",
        ),
        (
            {"max_memory": {"cpu": 8 * GIB}},
            HostBudgetError,
            r"the KV cache of 1 x 131,072 tokens need 16.00 GiB .* is 8.00 GiB; raise max_memory",
        ),
        (
            {"device": "cpu", "max_memory": {"cpu": 20 * GIB}},
            HostBudgetError,
            "weights and KV cache of 1 x 131,072 tokens need 30.96 GiB",
        ),
        (
            {"max_memory": {1: GIB}},
            ValueError,
            "names 1, but device is 'cuda'; it may name 'cpu', 0",
        ),
        ({"max_memory": {"gpu": GIB}}, ValueError, "max_memory names 'gpu'"),
        ({"device": "cpu", "max_memory": {0: GIB}}, ValueError, "it may name 'cpu'$"),
        ({"context": 131073}, ValueError, "exceeds the 131072 tokens of llama-3.1-8b"),
        (
            {"policy": "tidal_decode", "policy_options": {"select_layers": (40,)}},
            ValueError,
            "names layer 40",
        ),
        (
            {"placement": HeadPlacement.filled(30, 3, Place.GPU)},
            ValueError,
            "made for another model",
        ),
        (
            {"placement": HeadPlacement(np.eye(32, 8, dtype=np.uint8))},
            ValueError,
            "only heads that attend to everything",
        ),
        (
            {"device": "cpu", "placement": HeadPlacement.filled(32, 8, Place.GPU)},
            ValueError,
            "needs a GPU, but the device is 'cpu'",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_plan(request(**changes), machine_profile())


def test_a_placement_that_does_not_fit() -> None:
    places = HeadPlacement.filled(32, 8, Place.GPU)
    given = {"policy": "full", "placement": places, "context": 32768}
    with pytest.raises(DeviceMemoryError, match=r"256 KV heads on the GPU needs 4\.\d+ GiB"):
        make_plan(request(**given, max_memory={0: 17 * GIB}), machine_profile())
    weights = planned_model(LLAMA).weight_bytes
    small_prefill = {"context": 256, "policy": "full", "placement": places}
    limit = weights + 400 * 2**20
    with pytest.raises(DeviceMemoryError, match="256 KV heads"):
        make_plan(
            request(**(small_prefill | {"page_tokens": 4096}), max_memory={0: limit}),
            machine_profile(),
        )


def test_a_budget_below_one_page_of_each_given_head_is_named() -> None:
    places = HeadPlacement.filled(32, 8, Place.GPU)
    limit = planned_model(LLAMA).weight_bytes + 400 * 2**20
    with pytest.raises(
        DeviceMemoryError,
        match=r"not even one page of 4096 tokens of each of its 256 heads, 512\.00 MiB, fits",
    ):
        make_plan(
            request("full", placement=places, context=256, page_tokens=4096, max_memory={0: limit}),
            machine_profile(),
        )


def test_without_a_gpu() -> None:
    profile = machine_profile(device=None)
    plan = make_plan(request("quest", device="cpu", context=8192), profile)
    assert plan.device_bytes == {}
    assert plan.host_bytes["weights"] == planned_model(LLAMA).weight_bytes
    assert plan.step.milliseconds > 1e3 * plan.host_bytes["weights"] / 190e9 * 0.9
    with pytest.raises(ValueError, match="the machine profile has no GPU"):
        make_plan(request(), profile)


def test_planned_models_say_their_dtype() -> None:
    model = PlannedModel("x", "llama", SMALL, torch.float16, 1)
    assert model.dtype_name == "float16"
