"""Models whose keys and values are int8: what they say, what they take, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens

from offload import OffloadedModel
from offload.loading.planned_model import planned_model
from offload.planning.plan import PlanRequest, make_plan
from offload.planning.profile import typical_profile
from offload.policies.registry import make_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8")
    make_tiny_model("llama", head_dim=64).to(torch.bfloat16).save_pretrained(path)
    return path


def load(folder: Path, policy: Any = "full", **options: Any) -> Any:
    return OffloadedModel.from_pretrained(folder, policy=policy, page_tokens=16, **options)


def log_probabilities(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """[steps, vocabulary] of decode steps that read given tokens, after two turns of a prompt."""
    cache, logits = None, []
    bounds = [0, prompt // 2, *range(prompt, tokens.shape[1] + 1)]
    for first, last in itertools.pairwise(bounds):
        output = model(tokens[:, first:last], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0, -1].float())
    return torch.stack(logits).log_softmax(-1)


@pytest.mark.parametrize("policy", ["full", "exact_topk", "sketch", "lychee_cluster"])
@torch.inference_mode()
def test_answers_are_close_to_those_of_the_models_dtype(folder: Path, policy: str) -> None:
    tokens = random_tokens(1, 320)
    options = {} if policy == "full" else {"budget_tokens": 128}
    exact, int8 = (
        log_probabilities(
            load(folder, make_policy(policy, **options), kv_dtype=kv_dtype), tokens, 300
        )
        for kv_dtype in ("auto", "int8")
    )
    divergence = (exact.exp() * (exact - int8)).sum(-1)
    assert divergence.mean() < 0.02, divergence


def test_a_cache_takes_half(folder: Path) -> None:
    exact, int8 = load(folder), load(folder, kv_dtype="int8")
    tokens = random_tokens(2, 100)
    for model in (exact, int8):
        model.generate(tokens, num_beams=2, max_new_tokens=8, do_sample=False)
    used = [model.offload_stats().kv_host_bytes for model in (exact, int8)]
    assert used[1] / used[0] == 66 / 128
    plans = [
        make_plan(
            PlanRequest(
                planned_model("llama-3.1-8b"),
                make_policy("full"),
                131072,
                1,
                "cpu",
                {},
                on_this_machine=False,
                kv_dtype=kv_dtype,
            ),
            typical_profile(2),
        )
        for kv_dtype in ("auto", "int8")
    ]
    assert plans[1].as_json()["kv_dtype"] == "int8"
    assert plans[1].host_bytes["KV cache"] < 0.53 * plans[0].host_bytes["KV cache"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backend": "inline"}, "backend='inline'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"host_bytes_per_sequence": "1MiB"}, "host_bytes_per_sequence"),
        ({"cache_correction_every": 8, "policy": "sketch"}, "cache_correction_every"),
    ],
)
def test_what_int8_does_not_do_yet_is_refused(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"kv_dtype='int8' is for .*{named}"):
        load(folder, kv_dtype="int8", **options)


def test_other_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown kv_dtype 'q4'; available: auto, bfloat16, int8"):
        load(folder, kv_dtype="q4")
    with pytest.raises(NotImplementedError, match="kv_dtype='bfloat16' needs a model in bfloat16"):
        load(folder, kv_dtype="bfloat16", dtype="float32")
    make_tiny_model("llama").save_pretrained(tmp_path / "small")
    with pytest.raises(NotImplementedError, match="a multiple of 64, got 32"):
        load(tmp_path / "small", kv_dtype="int8")
    model = load(folder, kv_dtype="int8")
    output = model(random_tokens(1, 20), use_cache=True)
    with pytest.raises(NotImplementedError, match="a cache of a model with kv_dtype='int8' cannot"):
        output.past_key_values.save(tmp_path / "saved")
