"""What `auto` comes to, by what a machine has room for and what was measured of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.profile_cases import LLAMA, SMALL, device_profile, machine_profile, straight
from cases.tiny_models import make_tiny_model

from offload import OffloadedModel
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.loading.checkpoint import check_checkpoint
from offload.models.shape import ModelShape
from offload.planning.measured_loss import LossTable, measured_losses
from offload.planning.profile import MachineProfile, typical_profile
from offload.planning.workload import Workload, policy_key
from offload.policies import Policy
from offload.policies.auto import Auto
from offload.policies.full import Full
from offload.policies.registry import make_policy
from offload.runtime.auto_policy import (
    Room,
    crossover,
    resolve_auto,
    resolved_config,
    told_loss,
    with_resolved_policy,
)
from offload.runtime.config import RuntimeConfig, runtime_config
from offload.runtime.shared_model import SharedModel

GIB = 2**30
CONTEXT = 131072
WIDE = "too wide to show that nothing is lost"
ESTIMATED = (
    "the rest estimated by 128 clusters a head; hard look-ups at 24K: -0.7 ± 1.4 points of full "
    "attention (measured on SmolLM2-135M)"
)
KEEPS_MOST = (
    "budget 1,024; hard look-ups at 24K: -0.7 ± 1.5 points of full attention (measured on "
    "SmolLM2-135M)"
)


def resolved(
    room: Room, *, tokens: int = CONTEXT, budget: int = 1024, shape: ModelShape = LLAMA
) -> tuple[Policy, str]:
    auto = Auto(budget)
    return resolve_auto(auto, Workload(shape, auto, tokens), room)


@pytest.fixture
def llama_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 32,768 positions, and a cache folder of its own."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    make_tiny_model("llama", max_position_embeddings=32768).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("room_bytes", [20 * GIB, None])
def test_room_for_all_of_it_is_exact(room_bytes: int | None) -> None:
    policy, reason = resolved(Room(on_gpu=True, room_bytes=room_bytes))
    assert policy == Full()
    assert reason == "all of 16.00 GiB of KV on the GPU, exact"


def test_a_short_context_fits_where_a_long_one_does_not() -> None:
    assert resolved(Room(on_gpu=True, room_bytes=4 * GIB))[0].name == "sketch"
    policy, reason = resolved(Room(on_gpu=True, room_bytes=4 * GIB), tokens=8192)
    assert policy == Full()
    assert reason == "all of 1.00 GiB of KV on the GPU, exact"


@pytest.mark.parametrize("profile", [None, machine_profile(device=device_profile())])
@pytest.mark.parametrize("room_gib", [9, 0.25])
def test_less_room_is_the_policy_that_keeps_most(
    room_gib: float, profile: MachineProfile | None
) -> None:
    """Dense layers that do not fit are told when a sequence grows, not when a model is loaded."""
    room = Room(on_gpu=True, room_bytes=int(room_gib * GIB), profile=profile)
    policy, reason = resolved(room, budget=2048)
    assert policy == make_policy("sketch", budget_tokens=2048, estimate_clusters=128)
    count, _, rest = reason.partition(" of ")
    assert 16 <= int(count) <= 120
    assert rest.startswith("256 KV heads on the GPU, ")
    assert rest.endswith(
        "sketch, budget 2,048; hard look-ups at 24K: -0.7 ± 1.5 points of full attention "
        "(measured on SmolLM2-135M with budget 1,024)"
    )


def measured_table(monkeypatch: pytest.MonkeyPatch, points: dict[str, tuple[float, float]]) -> None:
    """Has `auto` choose by losses of hot rows and the halves of their intervals."""
    row = next(loss for loss in measured_losses().losses if loss.options["budget_tokens"] == 1024)
    losses = [
        replace(row, policy=name, points=at, interval=(at - half, at + half))
        for name, (at, half) in points.items()
    ]
    table = LossTable(measured_losses().model, tuple(losses))
    monkeypatch.setattr("offload.runtime.auto_policy.measured_losses", lambda: table)


@pytest.mark.parametrize(
    ("points", "name", "told"),
    [
        # The fastest that is shown to lose at most a point, though another one keeps more.
        (
            {"per_head": (0.3, 1.0), "tidal_decode": (-0.4, 1.1)},
            "tidal_decode",
            "-0.4 ± 1.1 points of full attention (measured on SmolLM2-135M)",
        ),
        ({"per_head": (-1.0, 1.5), "tidal_decode": (-1.1, 1.1)}, "per_head", "-1.0 ± 1.5 points"),
        # None is shown to: the one that keeps most.
        ({"per_head": (-0.5, 1.6), "tidal_decode": (-0.4, 1.6)}, "tidal_decode", WIDE),
        ({"per_head": (-3.0, 1.0), "tidal_decode": (-9.0, 2.0)}, "per_head", "shows a loss"),
        ({"exact_topk": (0.0, 0.1), "lfps": (0.0, 0.1), "per_head": (-5.0, 1.0)}, "per_head", "-5"),
        ({}, "sketch", "budget 1,024; loss of hard look-ups not measured"),
    ],
)
def test_the_table_decides(
    monkeypatch: pytest.MonkeyPatch, points: dict[str, tuple[float, float]], name: str, told: str
) -> None:
    measured_table(monkeypatch, points)
    policy, reason = resolved(Room(on_gpu=True, room_bytes=9 * GIB))
    assert policy.name == name
    assert told in reason


def test_a_table_without_the_policy_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_table(monkeypatch, {})
    policy, reason = resolved(Room(on_gpu=False))
    assert policy.name == "sketch"
    assert reason.endswith("by 128 clusters a head; loss of hard look-ups not measured")


def test_the_measured_model_is_not_named() -> None:
    reason = resolved(Room(on_gpu=False, model="smollm2-135m-instruct-32k"))[1]
    assert reason.endswith("-0.7 ± 1.4 points of full attention")


def test_ranks() -> None:
    policy, reason = resolved(Room(on_gpu=True, room_bytes=5 * GIB, num_ranks=2))
    assert policy == make_policy("sketch", estimate_clusters=128)
    assert reason.endswith(f"sketch, {KEEPS_MOST}")
    policy, reason = resolved(Room(on_gpu=True, room_bytes=14 * GIB, num_ranks=2))
    assert policy == Full()
    assert reason == "all of 16.00 GiB of KV on 2 GPUs, exact"


def refuses(*names: str) -> Callable[..., None]:
    """In the place of a policy's `check_model`."""

    def check_model(self: Policy, **_: int) -> None:
        if self.name in names:
            raise ValueError(f"{self.name} is not for this model")

    return check_model


def test_policies_that_refuse_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(on_gpu=True, room_bytes=6 * GIB)
    sketch, per_head, tidal, lychee = (
        type(make_policy(name)) for name in ("sketch", "per_head", "tidal_decode", "lychee_cluster")
    )
    monkeypatch.setattr(sketch, "check_model", refuses("sketch"))
    monkeypatch.setattr(per_head, "check_model", refuses("per_head"))
    policy, reason = resolved(replace(room, profile=typical_profile(15)))
    assert policy == make_policy("lychee_cluster", estimate_clusters=128)
    assert reason.startswith("16 of 256 KV heads on the GPU, hot rows of 240, lychee_cluster, ")
    assert "24K: -20.6 ± 4.1 points" in reason
    monkeypatch.setattr(lychee, "check_model", refuses("lychee_cluster"))
    policy, reason = resolved(room)
    assert policy.name == "tidal_decode"
    monkeypatch.setattr(tidal, "check_model", refuses("tidal_decode"))
    policy, reason = resolved(room)
    assert policy == Full()
    assert reason.endswith(" of 256 KV heads on the GPU, exact")
    assert int(reason.split()[0]) > 16
    policy, reason = resolved(Room(on_gpu=False))
    assert policy == Full()
    assert reason == "exact: no other policy takes this model"


def test_a_cpu_that_nobody_measured() -> None:
    policy, reason = resolved(Room(on_gpu=False))
    assert policy == make_policy("sketch", dense_until=8192, estimate_clusters=128)
    assert reason == f"exact up to 8,192 tokens, then sketch, budget 1,024, {ESTIMATED}"
    policy, reason = resolved(Room(on_gpu=False), tokens=8192)
    assert policy == Full()
    assert reason == "exact: contexts up to 8,192 tokens are faster so"


@pytest.mark.parametrize("profile", [None, machine_profile(device=None)])
def test_a_budget_beyond_the_crossover(profile: MachineProfile | None) -> None:
    policy, reason = resolved(Room(on_gpu=False, profile=profile), budget=16384)
    assert policy == make_policy("sketch", budget_tokens=16384, estimate_clusters=128)
    told = ESTIMATED.replace("SmolLM2-135M", "SmolLM2-135M with budget 1,024")
    assert reason == f"exact up to 16,384 tokens, then sketch, budget 16,384, {told}"


def measured(scales: dict[int, float]) -> MachineProfile:
    """A CPU on which what sketch reads takes so many times as long as its bytes, by
    context; exact attention takes as long as its bytes."""
    policy = make_policy("sketch", estimate_clusters=128)
    keys = {policy_key(policy, LLAMA, kv_len): scale for kv_len, scale in scales.items()}
    speed = straight(10.0, 1 / 1e5)
    return machine_profile(
        device=None, select_scale=keys, attend_cold=speed, attend_warm=speed, scan_dense=speed
    )


@pytest.mark.parametrize(
    ("scales", "tokens"),
    [
        pytest.param({}, 8192, marks=pytest.mark.slow),  # sketch was not measured
        pytest.param({2048: 0.01, 4096: 100.0}, 8192, marks=pytest.mark.slow),
        ({2048: 100.0, 4096: 0.01}, 3072),  # a length is measured up to the next power of two
        pytest.param({16384: 100.0}, 24576, marks=pytest.mark.slow),
        # Never faster: 65,536 stands for all that is longer.
        pytest.param({65536: 100.0}, CONTEXT, marks=pytest.mark.slow),
    ],
)
def test_the_crossover(scales: dict[int, float], tokens: int) -> None:
    auto, profile = Auto(), measured(scales)
    policy = make_policy("sketch", estimate_clusters=128)
    found = crossover(policy, Workload(LLAMA, auto, CONTEXT), profile)
    assert found == (tokens, scales != {})
    policy, reason = resolved(Room(on_gpu=False, profile=profile))
    if tokens == CONTEXT:
        assert policy == Full()
        assert reason == f"exact: contexts up to {CONTEXT:,} tokens are faster so on this machine"
    else:
        assert policy == make_policy("sketch", dense_until=tokens, estimate_clusters=128)
        assert reason == f"exact up to {tokens:,} tokens, then sketch, budget 1,024, {ESTIMATED}"


def test_a_checkpoint_that_names_no_positions() -> None:
    """Then the host's memory says how long a context may be."""
    shape, host = replace(SMALL, max_context=0), 5000 * SMALL.kv_token_bytes
    for num_bytes, name in ((host, "full"), (2 * host, "sketch")):
        config = RuntimeConfig(max_memory={"cpu": num_bytes})
        found, _ = resolved_config(config, shape, torch.bfloat16, 0)
        assert found.policy.name == name


def of_config(folder: Path, **options: Any) -> tuple[RuntimeConfig, str]:
    return with_resolved_policy(check_checkpoint(folder), runtime_config(**options), None)


def test_a_config_is_resolved_once(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="offload.runtime.auto_policy"):
        config, reason = of_config(llama_folder, policy="auto", cache_correction_every=32)
    assert config.policy == make_policy("sketch", dense_until=8192, estimate_clusters=128)
    assert config.cache_correction_every == 32
    assert caplog.messages == [f"auto: {reason}"]
    assert with_resolved_policy(check_checkpoint(llama_folder), config, None) == (config, "")
    named, reason = of_config(llama_folder, policy="full")
    assert (named.policy, reason) == (Full(), "")


def test_exact_attention_has_nothing_to_correct(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = {"cpu": 8 * 2**20}  # 4,000 tokens or so
    with caplog.at_level(logging.INFO, logger="offload.runtime.auto_policy"):
        config, reason = of_config(llama_folder, max_memory=host, cache_correction_every=32)
    assert config.policy == Full()
    assert config.cache_correction_every is None
    said = "cache_correction_every=32: exact attention has nothing to correct"
    assert caplog.messages == [f"auto: {reason}", said]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"host_bytes_per_sequence": "64MiB"}, "host_bytes_per_sequence keeps most"),
        ({"backend": "inline"}, "layers that run one by one on a CPU select from the budget on"),
    ],
)
def test_a_cpu_where_nothing_may_be_left_out(
    llama_folder: Path, options: dict[str, Any], because: str
) -> None:
    config, reason = of_config(llama_folder, **options)
    assert config.policy == Full()
    assert reason.startswith(f"exact: {because}")


@pytest.mark.parametrize(
    ("free_bytes", "limits", "name"),
    [(GIB, {}, "full"), (2**25, {}, "sketch"), (GIB, {0: 2**25}, "sketch")],
)
def test_the_room_of_a_gpu(
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    limits: dict[int | str, int],
    name: str,
) -> None:
    """What is free, or within max_memory, beside the weights; 32,768 tokens take 48 MiB."""
    monkeypatch.setattr("offload.runtime.config.checked_device", torch.device)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free_bytes, 2 * GIB))
    monkeypatch.setattr("offload.runtime.placing.cached_profile", lambda *_: None)
    config, reason = of_config(llama_folder, device="cuda", max_memory=limits, num_threads=1)
    assert config.policy.name == name
    assert ("all of" in reason) == (name == "full")


def test_a_damaged_profile_is_no_reason_not_to_load(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(*_: Any) -> None:
        raise ValueError("machine profile x.json is damaged")

    monkeypatch.setattr("offload.runtime.placing.cached_profile", damaged)
    assert of_config(llama_folder)[0].policy.name == "sketch"
    assert "machine profile x.json is damaged" in caplog.messages


def test_rank_0_decides_by_the_least_room(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs have half of the KV heads each."""
    monkeypatch.setattr("offload.runtime.config.checked_device", torch.device)
    monkeypatch.setattr("offload.runtime.placing.cached_profile", lambda *_: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (GIB, 2 * GIB))

    def resolve(least: int) -> str:
        ranks: Any = SimpleNamespace(
            rank=1,
            world_size=2,
            num_cpus=1,
            least=lambda value: min(value, least),
            once=lambda make: make(),
        )
        config = runtime_config(device="cuda", tensor_parallel_size=2, num_threads=1)
        found, _ = with_resolved_policy(check_checkpoint(llama_folder), config, ranks)
        return found.policy.name

    assert resolve(least=GIB) == "full"
    assert resolve(least=2**24) == "sketch"


def test_a_loaded_model_says_what_it_came_to(tiny_folders: dict[str, Path]) -> None:
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], num_threads=1)
    assert model.policy == Full()
    assert model.policy_reason == "exact: contexts up to 8,192 tokens are faster so"
    with pytest.raises(NotImplementedError, match="policy of a loaded model stays as it is"):
        model.policy = "quest"
    named = OffloadedModel.from_pretrained(tiny_folders["llama"], policy="full", num_threads=1)
    assert named.policy == Full()
    assert named.policy_reason == ""


def test_a_named_policy_says_what_it_loses(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 32,768 positions, the table 24,576; nothing is known of tiny models."""
    checkpoint = check_checkpoint(llama_folder)

    def told(policy: str, **options: Any) -> str:
        config = RuntimeConfig(policy=make_policy(policy, **options))
        return told_loss(checkpoint, config)

    assert told("lychee_cluster", dense_until=8192) == (
        "hard look-ups at 24K: -3.1 ± 2.3 points of full attention (measured on SmolLM2-135M), "
        "which shows a loss"
    )
    assert "-3.1 ± 2.3" in told("lychee_cluster", estimate_clusters=128)
    assert "with budget 1,024" in told("lychee_cluster", budget_tokens=512)
    for policy, options in (
        ("full", {}),
        ("quest", {}),
        ("sketch", {"estimate_clusters": 128}),
        ("lychee_cluster", {"dense_until": 32768}),
        ("lychee_cluster", {"ranked_chunks": 2048}),  # not measured
        ("lychee_cluster", {"budget_tokens": 80, "recent_tokens": 32}),
    ):
        assert told(policy, **options) == ""
    monkeypatch.setattr("offload.runtime.config.checked_device", torch.device)
    on_gpu = replace(RuntimeConfig(), device="cuda")
    for policy, points in (("lychee_cluster", "-20.6 ± 4.1"), ("tidal_decode", "")):
        said = told_loss(checkpoint, replace(on_gpu, policy=make_policy(policy)))
        assert points in said
        assert bool(said) == bool(points)


def test_loading_says_what_a_named_policy_loses(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="offload.runtime.model_loading"):
        OffloadedModel.from_pretrained(llama_folder, policy="lychee_cluster", num_threads=1)
    said = "policy lychee_cluster: hard look-ups at 24K: -3.1 ± 2.3 points"
    assert caplog.messages[0].startswith(said)


def test_a_policy_of_a_shared_model(tiny_folders: dict[str, Path]) -> None:
    policies = [Auto(), make_policy("exact_topk")]
    model = SharedModel(tiny_folders["llama"], policies, RuntimeConfig(num_threads=1))
    assert [runtime.config.policy for runtime in model.runtimes] == [Full(), policies[1]]


def test_a_placement_names_its_policy(tmp_path: Path) -> None:
    """One that was read from a plan; of another one nobody knows whose heads it is for."""
    places = HeadPlacement.filled(3, 2, Place.CPU)
    path, inline = tmp_path / "plan.json", {"device": "cpu", "backend": "inline"}

    def configured(**document: Any) -> RuntimeConfig:
        path.write_text(json.dumps({"placement": places.as_json(), **document}))
        return runtime_config(placement=path, **inline)

    planned = configured(policy="tidal_decode", max_tokens=512)
    assert planned.policy == make_policy("tidal_decode", budget_tokens=512)
    assert planned.placement == places
    assert configured(policy="full", max_tokens=None).policy == Full()
    assert runtime_config(placement=path, policy="quest", **inline).policy.name == "quest"
    with pytest.raises(ValueError, match=r"plan\.json names no policy, and policy is 'auto'; give"):
        configured()
    with pytest.raises(ValueError, match="placement is of the heads of one policy"):
        runtime_config(placement=places, **inline)
