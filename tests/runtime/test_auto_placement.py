"""Placements as an option of the runtime, and those that it chooses by itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from cases.device_cases import small
from cases.profile_cases import SMALL, device_profile, machine_profile

from offload import OffloadedModel
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.planning.profile import MachineProfile
from offload.policies.registry import make_policy
from offload.runtime.config import RuntimeConfig, runtime_config
from offload.runtime.placing import choose_automatically, placement_for

GIB = 2**30


def test_placement_options(tmp_path: Path) -> None:
    places = HeadPlacement.filled(3, 2, Place.CPU)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"placement": places.as_json()}))
    inline = {"device": "cpu", "backend": "inline"}
    assert runtime_config(placement=path, **inline).placement == places
    assert runtime_config(placement=str(path), **inline).placement == places
    assert runtime_config(placement=places, **inline).placement == places
    assert RuntimeConfig().placement is None
    with pytest.raises(ValueError, match="placement is for a GPU that decodes, but device is 'cpu"):
        runtime_config(placement=places)
    with pytest.raises(ValueError, match=r"must be a HeadPlacement or the path .* got 7"):
        runtime_config(placement=7, **inline)
    with pytest.raises(FileNotFoundError, match="no placement file"):
        runtime_config(placement=tmp_path / "none.json", **inline)


def test_another_models_placement_is_refused_before_weights_are_read(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "offload.runtime.opening.load_stock_model", lambda *_: pytest.fail("weights read")
    )
    with pytest.raises(ValueError, match="made for another model"):
        OffloadedModel.from_pretrained(
            tiny_folders["llama"],
            placement=HeadPlacement.filled(4, 2, Place.CPU),
            backend="inline",
        )


def test_the_decoder_gets_the_placement(tiny_folders: dict[str, Path]) -> None:
    policy = small("exact_topk")  # one dense layer
    places = HeadPlacement.from_text("GG\n..\n..")
    options = {"dtype": "float32", "backend": "inline", "num_threads": 1, "policy": policy}
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], placement=places, **options)
    assert model._offload._decoder.placement == places
    with pytest.raises(ValueError, match="head 0 of layer 1 cannot be placed GPU"):
        OffloadedModel.from_pretrained(
            tiny_folders["llama"], placement=HeadPlacement.from_text("GG\nG.\n.."), **options
        )


def chosen_for(
    config: RuntimeConfig,
    room_bytes: int,
    profile: MachineProfile | None,
    host_kv_bytes: int = 2**33,
) -> HeadPlacement | None:
    return choose_automatically(
        config,
        SMALL,
        dtype=torch.bfloat16,
        host_kv_bytes=host_kv_bytes,
        room_bytes=room_bytes,
        profile=profile,
    )


def test_the_automatic_choice_without_a_profile(caplog: pytest.LogCaptureFixture) -> None:
    config = RuntimeConfig(policy=make_policy("lychee_decode", retrieval_heads=4))
    with caplog.at_level(logging.INFO, logger="offload.runtime.placing"):
        chosen = chosen_for(config, 4 * GIB, None)
    assert chosen is not None
    roles = config.policy.roles(SMALL.num_layers, SMALL.num_kv_heads)
    assert ((chosen.places == Place.GPU) == (roles == 1)).all()
    assert not (chosen.places == Place.GATHER).any()
    assert "`offload plan` measures this machine" in caplog.text
    # Nothing fits, or there is nothing to choose: as it was.
    assert chosen_for(config, 2**20, None) is None
    quest = RuntimeConfig(policy=make_policy("quest"))
    assert chosen_for(quest, 4 * GIB, None) is None


def test_the_automatic_choice_by_a_profile(caplog: pytest.LogCaptureFixture) -> None:
    config = RuntimeConfig(policy=make_policy("lychee_decode", retrieval_heads=4))
    slow_cpu = machine_profile(read_bandwidth=1e9, device=device_profile())
    with caplog.at_level(logging.INFO, logger="offload.runtime.placing"):
        chosen = chosen_for(config, 4 * GIB, slow_cpu)
    assert chosen is not None
    assert (chosen.places == Place.GATHER).any()
    assert "by this machine's profile" in caplog.text
    # As much context as the host's budget holds decides how many heads fit.
    few = chosen_for(config, 2**29, slow_cpu, host_kv_bytes=2**22)
    assert few is not None
    assert few.counts(Place.GPU)[0] == 4


def test_no_choice_without_a_gpu(tiny_folders: dict[str, Path]) -> None:
    model = OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=small("lychee_decode"), backend="inline", num_threads=1
    )
    runtime = model._offload
    found = placement_for(
        runtime.config,
        runtime.lean,
        dtype=torch.float32,
        host_kv_bytes=GIB,
        device_kv_bytes=GIB,
        num_threads=1,
    )
    assert found is None
