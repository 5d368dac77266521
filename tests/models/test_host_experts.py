"""Experts that a GPU leaves to the CPU: the tokens are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, STREAM, greedy, load
from cases.inside import split_steps
from cases.slowly import slow_but
from cases.tiny_models import random_tokens
from cases.top_k_reference import TOP_K

from offload import OffloadedModel
from offload.loading.checkpoint import check_checkpoint
from offload.loading.generic_packing import experts_beyond
from offload.models.routed_mlp import RoutedMlp
from offload.policies import Policy
from offload.policies.full import Full
from offload.runtime.config import runtime_config
from offload.runtime.host_experts import with_host_experts

NUM_NEW = 32


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


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("backend", [INLINE, FLAGS, STREAM, GRAPH])
@torch.inference_mode()
def test_packed_experts(
    weights: str, backend: tuple[str, str | None], tiny_folders: dict[str, Path]
) -> None:
    """Prompts meet the same numbers; a step rounds what it multiplies on both sides."""
    folder, tokens = tiny_folders["qwen3_moe"], random_tokens(1, 40)
    logits = []
    for where, options in ((("cpu", None), {}), (backend, {"host_experts": 1})):
        model = load(folder, Full(), where, weights=weights, **options)
        cache = model.new_cache()
        parts = [model(x, past_key_values=cache).logits.cpu() for x in tokens.split([37, 1, 2], 1)]
        logits.append(torch.cat(parts, 1).float())
    assert torch.dist(*logits) < 0.05 * logits[0].norm()


@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
@torch.inference_mode()
def test_a_prompt_reads_experts_one_after_the_other(
    weights: str, tiny_folders: dict[str, Path]
) -> None:
    model = OffloadedModel.from_pretrained(
        tiny_folders["qwen3_moe"], policy="full", weights=weights, num_threads=1
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
    ],
)
def test_what_cannot_be_is_refused(
    name: str, options: dict[str, Any], error: str, tiny_folders: dict[str, Path]
) -> None:
    with pytest.raises(ValueError, match=error):
        OffloadedModel.from_pretrained(tiny_folders[name], **{"backend": "inline", **options})


def test_auto_is_as_many_as_have_to_go(tiny_folders: dict[str, Path]) -> None:
    assert [experts_beyond([5, 5, 5], 20, limit) for limit in (20, 19, 12, 5, 1)] == [0, 1, 2, 3, 3]
    config = runtime_config(host_experts="auto")
    for name in ("qwen3_moe", "llama"):  # everything is on the CPU
        assert with_host_experts(check_checkpoint(tiny_folders[name]), config).host_experts == 0
