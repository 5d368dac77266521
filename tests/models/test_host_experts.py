"""Experts that a GPU leaves to the CPU: the tokens are the CPU's."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, STREAM, greedy, load
from cases.inside import split_steps
from cases.slowly import slow_but
from cases.tiny_models import random_tokens
from cases.top_k_reference import TOP_K

from gpu_ops.routed_linear import GpuExperts
from offload import OffloadedModel
from offload.decode.gpu import hot_experts
from offload.decode.gpu.hot_experts import HotExperts
from offload.loading.checkpoint import check_checkpoint
from offload.loading.generic_packing import experts_beyond, hot_experts_beside
from offload.loading.planned_model import planned_model
from offload.models.routed_mlp import RoutedMlp
from offload.policies import Policy
from offload.policies.full import Full
from offload.runtime.config import runtime_config
from offload.runtime.host_experts import left_out_bytes, with_host_experts

NUM_NEW, STEPS = 16, hot_experts._STEPS


@pytest.mark.parametrize("backend", [INLINE, FLAGS, STREAM, GRAPH])
@pytest.mark.parametrize("policy", [Full(), TOP_K], ids=["full", "exact_topk"])
@pytest.mark.parametrize("count", slow_but(["1", "all"], "all"))
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@torch.inference_mode()
def test_tokens_are_the_cpus(
    name: str,
    count: str,
    policy: Policy,
    backend: tuple[str, str | None],
    tiny_folders: dict[str, Path],
) -> None:
    """Alone and in a batch, behind prompts of several slices."""
    prompts, reference = (
        random_tokens(3, 61, seed=4),
        load(tiny_folders[name], policy, ("cpu", None)),
    )
    layers = reference._offload.lean.layers
    with_experts = [i for i, layer in enumerate(layers) if layer.routed is not None]
    kept = with_experts[:1] if count == "1" else with_experts
    model = load(tiny_folders[name], policy, backend, host_experts=len(kept))
    assert model._offload.lean.host_experts == set(kept)
    assert all(
        parameter.is_cpu == (i in kept or backend[0] == "cpu")
        for i in with_experts
        for parameter in model.model.layers[i].mlp.experts.parameters()
    )
    expected = greedy(reference, prompts, NUM_NEW)
    assert torch.equal(greedy(model, prompts, NUM_NEW), expected)
    for i in range(2):
        assert torch.equal(greedy(model, prompts[i : i + 1], NUM_NEW), expected[i : i + 1])
    split_steps(model, 2)  # the experts of some rows are asked for before attention of others
    assert torch.equal(greedy(model, prompts, 4), expected[:, : -NUM_NEW + 4])


@pytest.mark.parametrize("backend", [INLINE, FLAGS, STREAM, GRAPH])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@torch.inference_mode()
def test_hot_experts(
    name: str,
    backend: tuple[str, str | None],
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever experts are run, and while they change places, the tokens are the CPU's."""
    prompts = random_tokens(3, 61, seed=4)
    expected = greedy(load(tiny_folders[name], TOP_K, ("cpu", None)), prompts, NUM_NEW)
    num_experts = check_checkpoint(tiny_folders[name]).shape.num_experts
    for count in (1, num_experts // 2, num_experts):
        options = {"host_experts": 2, "hot_experts": count}
        model = load(tiny_folders[name], TOP_K, backend, **options)
        hot = hot_experts_of(model)
        assert hot.use.shape == (2, num_experts)
        assert torch.equal(greedy(model, prompts, NUM_NEW), expected)
        chosen = 2 * len(prompts) * hot.per_token * (NUM_NEW - 1)
        assert 0.8 * chosen <= float(hot.use.sum()) <= chosen  # at a look some are forgotten
        monkeypatch.setattr(hot_experts, "_STEPS", 1)
        places = follow_turning_use(hot, monkeypatch)
        for _ in range(4 if backend in (GRAPH, STREAM) else 1):  # a look at each begin
            assert torch.equal(greedy(model, prompts, NUM_NEW), expected)
        monkeypatch.undo()
        for of in (of for now in places for of in now):
            assert sorted(of)[num_experts - count :] == [*range(count)]
        assert (len({str(now) for now in places}) > 1) == (count < num_experts)


def follow_turning_use(hot: HotExperts, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Before each look other experts are used most; the slots behind each go into the list."""
    places, follow_use = list[list[list[int]]](), hot.follow_use

    def turn_and_follow() -> None:
        if hot.num_steps < hot_experts._STEPS:
            return
        use = 100.0 * torch.arange(hot.use.shape[1]).expand_as(hot.use)
        hot.use.copy_(use.roll(2 * len(places), 1))  # the next one is used clearly more
        follow_use()
        places.append(hot._slots.tolist())

    monkeypatch.setattr(hot, "follow_use", turn_and_follow)
    return places


def check_copies(hot: HotExperts) -> None:
    """Each slot has the expert that a step looks for there."""
    for mlp, routed, of in zip(hot._mlps, hot._routed, hot._slot_of.tolist(), strict=True):
        for copies, matrices in zip((mlp.up, mlp.down), routed.matrices(), strict=True):
            for expert, slot in enumerate(of):
                if slot >= 0:
                    assert torch.equal(copies._dense[slot], matrices._dense[expert])


def hot_experts_of(model: Any) -> HotExperts:
    hot = model._offload.decoder.captured.weights.hot_experts
    assert isinstance(hot, HotExperts)
    return hot


@torch.inference_mode()
def test_those_used_most_get_slots(tiny_folders: dict[str, Path]) -> None:
    """Of each layer by itself; nothing is swapped for a small gain."""
    where, options = ("cpu", "inline"), {"host_experts": 2, "hot_experts": 2}
    model = load(tiny_folders["qwen3_moe"], Full(), where, **options)
    hot = hot_experts_of(model)
    num_experts = hot.num_experts
    hot.use.copy_(torch.arange(2 * num_experts).view(2, -1) * 10.0)
    hot.use[1] = hot.use[1].flip(0)
    hot.num_steps = STEPS
    hot.follow_use()
    slots = [{e for e, slot in enumerate(of) if slot >= 0} for of in hot._slots.tolist()]
    assert slots == [{num_experts - 2, num_experts - 1}, {0, 1}]
    assert hot._slot_of.tolist() == hot._slots.tolist()
    check_copies(hot)
    before = hot._slots.copy()
    hot.use.fill_(100.0)
    hot.use[:, 2:-2] = 120.0
    hot.num_steps = STEPS
    hot.follow_use()
    assert (hot._slots == before).all()


@torch.inference_mode()
def test_an_interrupt_leaves_each_expert_in_its_slot(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, options = ("cpu", "inline"), {"host_experts": 2, "hot_experts": 2}
    hot = hot_experts_of(load(tiny_folders["qwen3_moe"], Full(), where, **options))
    hot.use.copy_(torch.arange(2 * hot.num_experts).view(2, -1) * 10.0)
    hot.num_steps, put = STEPS, GpuExperts.put

    def interrupted(*args: Any) -> None:
        put(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(GpuExperts, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hot.follow_use()
    check_copies(hot)


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("backend", [INLINE, FLAGS, STREAM, GRAPH])
@pytest.mark.parametrize("count", [0, 2])
@torch.inference_mode()
def test_packed_experts(
    weights: str, backend: tuple[str, str | None], count: int, tiny_folders: dict[str, Path]
) -> None:
    """Prompts meet the same numbers; a step rounds what it multiplies on both sides."""
    folder, tokens = tiny_folders["qwen3_moe"], random_tokens(1, 40)
    logits, on_host = [], {"host_experts": 1, "hot_experts": count}
    for where, options in ((("cpu", None), {}), (backend, on_host)):
        model = load(folder, Full(), where, weights=weights, **options)
        if options and count:
            hot = hot_experts_of(model)
            hot.use[0] = torch.arange(hot.num_experts)
            hot.num_steps = STEPS
        cache = model.new_cache()
        parts = [model(x, past_key_values=cache).logits.cpu() for x in tokens.split([37, 1, 2], 1)]
        logits.append(torch.cat(parts, 1).float())
    assert torch.dist(*logits) < 0.05 * logits[0].norm()


@pytest.mark.parametrize(
    ("name", "weights"),
    [("qwen3_moe", "auto"), ("qwen3_moe", "q8"), ("qwen3_moe", "q4"), ("gpt_oss", "auto")],
)
@torch.inference_mode()
def test_a_prompt_reads_experts_one_after_the_other(
    name: str, weights: str, tiny_folders: dict[str, Path]
) -> None:
    model = OffloadedModel.from_pretrained(
        tiny_folders[name], policy="full", weights=weights, num_threads=1
    )
    routed = model._offload.lean.layers[0].routed
    assert isinstance(routed, RoutedMlp)
    x = torch.randn(40, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    expected = routed(x.to(model.dtype))
    found = routed._run_from_host(x.to(model.dtype))
    assert torch.dist(found, expected) < 1e-3 * expected.norm()


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("qwen3_moe", {"host_experts": -1}, "must be 'auto' or a number of layers, got -1"),
        ("qwen3_moe", {"host_experts": 1, "backend": None}, "the model runs on device='cpu'"),
        ("qwen3_moe", {"host_experts": 99}, r"host_experts=99, but only \d layers have experts"),
        ("llama", {"host_experts": 1}, "type 'llama', of which no layer has experts"),
        ("qwen3_moe", {"hot_experts": 1}, "hot_experts=1 needs host_experts"),
        ("qwen3_moe", {"host_experts": 1, "hot_experts": -1}, "integer of at least 0, got -1"),
        ("qwen3_moe", {"host_experts": 1, "hot_experts": 99}, r"a layer has \d experts"),
    ],
)
def test_what_cannot_be_is_refused(
    name: str, options: dict[str, Any], error: str, tiny_folders: dict[str, Path]
) -> None:
    with pytest.raises(ValueError, match=error):
        OffloadedModel.from_pretrained(tiny_folders[name], **{"backend": "inline", **options})


def test_auto_is_as_many_as_have_to_go(tiny_folders: dict[str, Path]) -> None:
    assert [experts_beyond([5, 5, 5], 20, limit) for limit in (20, 19, 12, 5, 1)] == [0, 1, 2, 3, 3]
    config = runtime_config(host_experts="auto", hot_experts=2)
    for name in ("qwen3_moe", "llama"):  # everything is on the CPU
        assert with_host_experts(check_checkpoint(tiny_folders[name]), config).host_experts == 0
    config = runtime_config()  # what it becomes for a hybrid without experts, as of a GPU
    object.__setattr__(config, "device", "cuda")
    assert left_out_bytes([], config, 0) == (0, 0)


@pytest.mark.parametrize(
    ("needed", "limit", "asked", "expected"),
    [
        (100, 100, None, (0, 0)),
        (100, 99, None, (1, 4)),  # half of 8 experts of 16 bytes
        (100, 91, None, (2, 4)),
        (100, 68, None, (4, 4)),
        (100, 52, None, (4, 2)),  # 36 bytes of other weights: 16 are left for copies
        (100, 30, None, (4, 0)),
        (100, 91, 0, (1, 0)),
        (100, 91, 6, (3, 6)),
    ],
)
def test_auto_leaves_half_of_them_there(
    needed: int, limit: int, asked: int | None, expected: tuple[int, int]
) -> None:
    assert hot_experts_beside([16] * 4, 8, needed, limit, asked) == expected


def test_a_plan_counts_copies(tiny_folders: dict[str, Path]) -> None:
    planned = planned_model(str(tiny_folders["qwen3_moe"]))
    size, num_experts = planned.expert_bytes[0], planned.shape.num_experts
    found = planned.with_host_experts(1, 2, None, lambda: 0)
    assert found.host_bytes == planned.weight_bytes - found.weight_bytes == size
    assert found.copied_bytes == size * 2 // num_experts
    auto = planned.with_host_experts("auto", None, planned.weight_bytes - 1, lambda: 0)
    assert auto.host_bytes == size
    assert auto.copied_bytes == size // 2
    with pytest.raises(ValueError, match="hot_experts=99, but a layer has"):
        planned.with_host_experts(1, 99, None, lambda: 0)
