"""Placements as an option of the runtime, and those that it chooses by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import small
from cases.inside import decoder_of, runtime_of
from cases.profile_cases import SMALL, device_profile, machine_profile
from cases.tiny_models import make_tiny_model

from offload import OffloadedModel
from offload.decode.gpu.placement import HeadPlacement, Place, may_be_gathered, may_stay_on_gpu
from offload.models.shape import MODEL_SHAPES
from offload.planning.choose import DeviceRoom, least_placement
from offload.planning.placement_bytes import prefill_bytes
from offload.planning.profile import MachineProfile, typical_profile
from offload.planning.step_time import StepModel
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.runtime.config import RuntimeConfig, runtime_config
from offload.runtime.placing import Chooser, longest_context, placement_for
from offload.selection.head_roles import HeadRoles
from offload.selection.policy import RETRIEVE


def test_placement_options(tmp_path: Path) -> None:
    places = HeadPlacement.filled(3, 2, Place.CPU)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"placement": places.as_json()}))
    inline: Any = {"device": "cpu", "backend": "inline", "policy": "full"}
    assert runtime_config(placement=path, **inline).placement == places
    assert runtime_config(placement=str(path), **inline).placement == places
    assert runtime_config(placement=places, **inline).placement == places
    assert RuntimeConfig().placement is None
    with pytest.raises(ValueError, match="placement is for a GPU that decodes, but device is 'cpu"):
        runtime_config(placement=places, policy="full")
    with pytest.raises(ValueError, match=r"must be a HeadPlacement or the path .* got 7"):
        runtime_config(placement=7, **inline)
    with pytest.raises(FileNotFoundError, match="no placement file"):
        runtime_config(placement=tmp_path / "none.json", **inline)


def test_another_models_placement_is_refused_before_weights_are_read(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "offload.runtime.model_loading.load_stock_model", lambda *_: pytest.fail("weights read")
    )
    with pytest.raises(ValueError, match="made for another model"):
        OffloadedModel.from_pretrained(
            tiny_folders["llama"],
            policy="full",
            placement=HeadPlacement.filled(4, 2, Place.CPU),
            backend="inline",
        )


def test_the_decoder_gets_the_placement(tiny_folders: dict[str, Path]) -> None:
    policy = small("exact_topk")  # one dense layer
    places = HeadPlacement.from_text("GG\n..\n..")
    options = {"dtype": "float32", "backend": "inline", "num_threads": 1, "policy": policy}
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], placement=places, **options)
    assert decoder_of(model).placement == places
    with pytest.raises(ValueError, match="head 0 of layer 1 cannot be placed GPU"):
        OffloadedModel.from_pretrained(
            tiny_folders["llama"], placement=HeadPlacement.from_text("GG\nG.\n.."), **options
        )


@pytest.mark.parametrize("num_on_gpu", [2, 1, 0])
@pytest.mark.parametrize("name", ["per_head", "lychee_decode"])
def test_a_plan_made_before_a_calibration(name: str, num_on_gpu: int) -> None:
    """Heads move with their roles, and as many stay on the GPU; the layers above all as before."""
    before: Any = make_policy(name, dense_layers=1, retrieval_heads=2)
    roles = np.array([[1] * 4, [0] * 4, [0] * 4, [0, 0, 0, 1], [0, 0, 0, 1], [0] * 4], bool)
    after = replace(before, head_roles=HeadRoles.of(roles, head_dim=64), retrieval_heads=None)
    places = np.full((6, 4), Place.CPU)
    whole = may_stay_on_gpu(before, before.roles(6, 4))
    retrieving = np.argwhere(whole)[4:]
    assert len(retrieving) == 2
    places[0] = Place.GPU
    for layer_idx, head in retrieving[:num_on_gpu]:
        places[layer_idx, head] = Place.GPU
    if name == "lychee_decode":
        places[1, may_be_gathered(before, before.roles(6, 4), places)[1]] = Place.GATHER
    plan = HeadPlacement(places)
    plan.check_policy(before, 8)
    if num_on_gpu:
        with pytest.raises(ValueError, match="cannot be placed GPU"):
            plan.check_policy(after, 8)
    moved = plan.after_calibration(before, after, 8)
    moved.check_policy(after, 8)
    assert moved.counts(Place.GPU) == [4, 0, 0, num_on_gpu > 0, num_on_gpu > 1, 0]
    assert moved.counts(Place.GATHER)[1] == plan.counts(Place.GATHER)[1]
    assert plan.after_calibration(after, after, 8) == plan  # refused as it is, or taken


def test_a_layer_that_only_retrieves_after_a_calibration() -> None:
    """With retrieval=full it is dense: the GPU has it as a whole, whatever the plan knew."""
    before: Any = make_policy("per_head", retrieval="full", dense_layers=1, retrieval_heads=2)
    roles = np.array([[0] * 2, [0] * 2, [1] * 2, *[[0] * 2] * 9], bool)
    after = replace(before, head_roles=HeadRoles.of(roles, head_dim=64), retrieval_heads=None)
    places = np.full((12, 2), Place.CPU)
    places[0] = Place.GPU
    plan = HeadPlacement(places)
    moved = plan.after_calibration(before, after, 4)
    moved.check_policy(after, 4)
    assert moved.counts(Place.GPU) == [2, 0, 2, *[0] * 9]


def test_a_plan_of_a_policy_that_is_calibrated_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "offload.policies.per_head.calibration.mean_lookup_mass",
        lambda *_: np.array([[0.9, 0.8], [0.1, 0.5], [0.4, 0.0]]),
    )
    make_tiny_model("llama", max_position_embeddings=1024).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = make_policy("per_head", dense_layers=1, retrieval_heads=1)
    plan = HeadPlacement.from_text("GG\n..\nG.")
    plan.check_policy(policy, 6)
    options = {"dtype": "float32", "backend": "inline", "num_threads": 1, "policy": policy}
    model = OffloadedModel.from_pretrained(tmp_path, placement=plan, **options)
    assert decoder_of(model).placement == HeadPlacement.from_text("GG\n.G\n..")


def chooser(policy: Policy, profile: MachineProfile | None = None) -> Chooser:
    return Chooser(policy, SMALL, torch.bfloat16, 256, 8192, profile)


def room_for(choose: Chooser, kv_len: int, share: float) -> int:
    """Beside a prefill, for this share of all heads of a sequence."""
    work = choose.workload(1, kv_len)
    shape = choose.shape
    everything = HeadPlacement.filled(shape.num_layers, shape.num_kv_heads, Place.GPU)
    room = DeviceRoom(work, None).num_bytes(everything)
    return int(share * room) + prefill_bytes(work, choose.prefill_slice_tokens)


def nothing_there(choose: Chooser) -> HeadPlacement:
    return least_placement(choose.workload(1, 4096))


def test_the_choice_by_what_fits() -> None:
    policy = make_policy("lychee_decode", retrieval_heads=4)
    choose = chooser(policy)
    least = nothing_there(choose)
    everything = choose(least, 1, 65536, None)
    assert (everything.places == Place.GPU).all()
    # Retrieving heads first, and whole layers with what is left.
    room = room_for(choose, 65536, 0.6)
    half = choose(least, 1, 65536, room)
    roles = policy.roles(SMALL.num_layers, SMALL.num_kv_heads)
    assert (half.places[roles == RETRIEVE] == Place.GPU).all()
    assert 0 < (half.places == Place.GPU).sum() < 24
    assert not (half.places == Place.GATHER).any()
    # Shorter sequences need less, several more.
    assert (choose(half, 1, 8192, room).places == Place.GPU).all()
    assert (choose(half, 16, 8192, room).places == Place.GPU).sum() < 24
    # Nothing fits: as without a choice.
    assert choose(everything, 1, 65536, 2**20) == least


@pytest.mark.parametrize("policy", ["full", "sketch"])
def test_no_more_together_than_is_fast(policy: str) -> None:
    """An 8B shape: as many as the GPU holds well; twice as many would decode fewer tokens/s."""
    shape, profile = MODEL_SHAPES["llama-3.1-8b"], typical_profile(15)
    choose = Chooser(make_policy(policy), shape, torch.bfloat16, 256, 8192, profile)

    def rate(count: int, room_bytes: int) -> float:
        work = choose.workload(count, 36864)
        chosen, _ = choose._choose(work, 8192, room_bytes)
        return count / StepModel(profile, work, on_gpu=True).step(chosen).milliseconds

    assert choose.most_together(32, 36864, None, 8192) == 32
    assert choose.most_together(32, 4096, 60 << 30, 8192) == 32
    few = choose.most_together(32, 36864, 10 << 30, 8192)
    assert few == {"full": 2, "sketch": 8}[policy]
    assert rate(few, 10 << 30) > 1.3 * rate(2 * few, 10 << 30)
    assert choose.most_together(3, 36864, 10 << 30, 8192) == min(3, few)
    assert chooser(make_policy(policy)).most_together(32, 36864, 1 << 30) == 32  # not measured


@pytest.mark.parametrize("policy", ["full", "lychee_cluster"])
def test_more_heads_of_int8_fit_and_more_tokens(policy: str) -> None:
    choose = chooser(make_policy(policy))
    int8, counts = replace(choose, kv_dtype="int8", _known={}), []
    for each in (choose, int8):
        chosen = each(nothing_there(choose), 1, 65536, room_for(choose, 65536, 0.5))
        counts.append(sum(chosen.counts(Place.GPU)))
        assert DeviceRoom(each.workload(1, 65536), room_for(choose, 65536, 0.5)).holds(chosen)
    assert 0 < 1.7 * counts[0] < counts[1]
    shape, config = replace(SMALL, max_context=2**20), runtime_config(device="cpu")
    tokens = [
        longest_context(replace(config, kv_dtype=kv_dtype), shape, torch.bfloat16, 2**30)
        for kv_dtype in ("auto", "int8")
    ]
    assert tokens[1] == pytest.approx(tokens[0] / (34 / 64), abs=2)


@pytest.mark.parametrize("name", ["tidal_decode", "lychee_decode"])
def test_every_choice_is_one_that_the_policy_allows(name: str) -> None:
    """Heads of whole layers on the GPU are not fetched as well."""
    policy, shape = make_policy(name), MODEL_SHAPES["llama-3.1-8b"]
    choose = Chooser(policy, shape, torch.bfloat16, 256, 8192, typical_profile(15))
    least = least_placement(choose.workload(4, 36768))
    for gib in (3.0, 7.5, 12.0):
        chosen = choose(least, 4, 36768, int(gib * 2**30))
        chosen.check_policy(policy, shape.num_qo_heads)
        assert (chosen.places == Place.GATHER).any()


def test_a_room_that_only_the_first_prompt_leaves_is_used() -> None:
    """The dense layers do not fit beside the prefill of a second prompt, but after the first's."""
    choose = chooser(make_policy("lychee_decode", retrieval_heads=4))
    least = nothing_there(choose)
    prefill = prefill_bytes(choose.workload(1, 65536), choose.prefill_slice_tokens)
    room = room_for(choose, 65536, 0.6) - prefill
    dense_layers = DeviceRoom(choose.workload(1, 65536), None).num_bytes(least)
    choose.prefill_slice_tokens *= 1 + room // prefill  # what is left is less than they need
    prefill = prefill_bytes(choose.workload(1, 65536), choose.prefill_slice_tokens)
    assert room - prefill < dense_layers < room
    chosen = choose(least, 1, 65536, room)
    assert (chosen.places == Place.GPU).sum() > (least.places == Place.GPU).sum()
    assert choose(chosen, 1, 65536, room) == chosen


def test_a_placement_about_as_good_stays() -> None:
    """New captures cost more than a layer saves."""
    choose = chooser(make_policy("quest", dense_layers=0))
    choose.shape = replace(SMALL, num_layers=32)
    least = nothing_there(choose)
    room = room_for(choose, 65536, 0.6)
    now = choose(least, 1, 65536, room)
    layers = int((now.places == Place.GPU).all(axis=1).sum())
    assert 10 < layers < 32
    fewer = np.array(now.places)
    fewer[32 - layers] = Place.CPU
    assert choose(HeadPlacement(fewer), 1, 65536, room) == HeadPlacement(fewer)
    more = np.array(now.places)
    more[31 - layers] = Place.GPU
    assert choose(HeadPlacement(more), 1, 65536, room) == now  # there is no room for it
    assert choose(now, 1, 65536, room // 4) != now


def test_hot_rows_come_and_go() -> None:
    """As many heads are on the GPU with them as without, and it is another placement."""
    policy = make_policy("lychee_cluster")
    choose = chooser(policy, typical_profile(15))
    choose.shape = shape = MODEL_SHAPES["llama-3.1-8b"]
    least = least_placement(choose.workload(1, 131072))
    hot = choose(least, 1, 131072, 8 * 2**30)
    assert hot == least.with_hot_rows(policy, shape.num_qo_heads) != least
    assert choose(hot, 1, 131072, 8 * 2**30) == hot
    fewer = np.array(hot.places)
    fewer[-1] = Place.CPU
    assert choose(HeadPlacement(fewer), 1, 131072, 8 * 2**30) == HeadPlacement(fewer)
    assert (choose(hot, 1, 4096, 8 * 2**30).places == Place.GPU).all()
    for name, is_hot in (("lfps", True), ("tidal_decode", False)):
        other = chooser(make_policy(name), typical_profile(15))
        other.shape = shape
        placement = other(least_placement(other.workload(1, 131072)), 1, 131072, 8 * 2**30)
        assert (placement.places == Place.HOT).any() == is_hot


def test_a_placement_that_got_slow_for_a_batch_goes() -> None:
    """As many heads are on the GPU; the rows of the others, fetched for one, are too many for
    eight."""
    policy = make_policy("tidal_decode", budget_tokens=1024)
    shape = MODEL_SHAPES["llama-3.1-8b"]
    choose = Chooser(policy, shape, torch.bfloat16, 64, 8192, typical_profile(15))
    one = choose(least_placement(choose.workload(1, 32768)), 1, 32768, 8 * 2**30)
    assert {*one.places.flat} == {Place.GPU, Place.GATHER}
    eight = choose(one, 8, 32768, 8 * 2**30)
    assert sum(eight.counts(Place.GPU)) == sum(one.counts(Place.GPU))
    assert sum(eight.counts(Place.HOT)) > 200
    assert choose(eight, 8, 32768, 8 * 2**30) == eight


def test_a_little_more_room_is_no_reason_to_choose_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free changes with every allocation of anybody."""
    choose = chooser(make_policy("quest"))
    least, room = nothing_there(choose), room_for(choose, 65536, 0.6)
    chosen = choose(least, 1, 65536, room)
    monkeypatch.setattr(Chooser, "_choose", lambda *_: pytest.fail("chosen again"))
    step = (1 << room.bit_length()) // 1024
    assert choose(least, 1, 65536, room // step * step + step - 1) == chosen
    assert choose(least, 1, 65536 - 100, room) == chosen


def test_the_choice_by_a_profile() -> None:
    policy = make_policy("lychee_decode", retrieval_heads=4)
    slow_cpu = machine_profile(read_bandwidth=1e9, device=device_profile())
    choose = chooser(policy, slow_cpu)
    chosen = choose(nothing_there(choose), 1, 65536, room_for(choose, 65536, 0.6))
    assert (chosen.places == Place.GATHER).any()


def test_the_longest_context() -> None:
    config = RuntimeConfig(policy=make_policy("lychee_decode", retrieval_heads=4))
    args = SMALL, torch.bfloat16
    assert longest_context(config, *args, 2**33) == 65536
    assert longest_context(config, *args, 2**22) == 2**22 // (SMALL.kv_token_bytes)
    bounded = replace(config, host_bytes_per_sequence=2**20)
    assert longest_context(bounded, *args, 2**33) == 2**20 // SMALL.kv_token_bytes


def test_no_choice_without_a_gpu(tiny_folders: dict[str, Path]) -> None:
    model = OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=small("lychee_decode"), backend="inline", num_threads=1
    )
    assert decoder_of(model).placed.choose is None
    runtime, rooms = runtime_of(model), {"host_kv_bytes": 2**30, "device_kv_bytes": 2**30}
    assert placement_for(runtime.config, runtime.lean, None, dtype=torch.float32, **rooms) is None
