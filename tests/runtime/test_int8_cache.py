"""Models whose keys and values are int8: what they say, what they take, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens

from offload import Engine, OffloadedCache, OffloadedModel, SamplingParams, SessionMiss
from offload.engine.sessions import Sessions
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


def test_refusals(folder: Path) -> None:
    with pytest.raises(
        ValueError, match="unknown kv_dtype 'q4'; available: auto, bfloat16, float16"
    ):
        load(folder, kv_dtype="q4")
    with pytest.raises(NotImplementedError, match="kv_dtype='bfloat16' needs a model in bfloat16"):
        load(folder, kv_dtype="bfloat16", dtype="float32")


def answer(model: Any, text: torch.Tensor, cache: OffloadedCache) -> list[int]:
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(text)
    return model.generate(text, attention_mask=mask, past_key_values=cache, **options)[0].tolist()


@pytest.mark.parametrize("policy", ["full", "exact_topk", "sketch", "lychee_cluster"])
def test_a_saved_cache_goes_on_with_the_same_rows(
    folder: Path, tmp_path: Path, policy: str
) -> None:
    options = {} if policy == "full" else {"budget_tokens": 128}
    models = [
        load(folder, make_policy(policy, **options), kv_dtype=kv_dtype)
        for kv_dtype in ("int8", "int8", "auto")
    ]
    caches, text = [model.new_cache() for model in models], random_tokens(1, 480)
    for number in (0, 2):
        models[number](text[:, :-1], past_key_values=caches[number])
        caches[number].save(tmp_path / str(number))
    caches[1] = OffloadedCache.load(models[1], tmp_path / "0")
    caches[1].save(tmp_path / "1")
    files = [(tmp_path / str(number)).read_bytes() for number in range(3)]
    assert files[0] == files[1]
    if policy == "full":  # others keep more than keys and values, in their own dtypes
        assert len(files[0]) < 0.53 * len(files[2])
    assert answer(models[0], text, caches[0]) == answer(models[1], text, caches[1])
    for number, message in (
        (0, "another kv_dtype: bfloat16, not int8; load the model with kv_dtype='auto'"),
        (2, "another kv_dtype: int8, not bfloat16; load the model with kv_dtype='int8'"),
    ):
        with pytest.raises(SessionMiss, match=message):
            OffloadedCache.load(models[number], tmp_path / str(2 - number))


def test_damage_and_wrong_rows_of_a_saved_cache(folder: Path, tmp_path: Path) -> None:
    model, path = load(folder, kv_dtype="int8"), tmp_path / "cache"
    store = model.kv_store
    cache = model(random_tokens(1, 40), use_cache=True).past_key_values
    cache.save(path)
    (seq,), row = cache.seqs, store.gather(cache.seqs[0], 0, 7, 8, kept=True)[0].transpose(0, 1)
    store.truncate(seq, 39)
    store.reserve([seq], [1])
    wrong = row.clone(), row.clone(), row.clone()
    wrong[0][0, 0, 64:].view(torch.float16).fill_(float("inf"))
    wrong[1][0, 0, 64:].view(torch.float16).fill_(float("nan"))
    wrong[2][0, 0, 3] = -128
    for rows in wrong:
        with pytest.raises(ValueError, match=r"non-finite values|values .* a code of -128"):
            store.append(seq, 0, row, rows, kept=True)
    store.append(seq, 0, row, row, kept=True)


def test_sessions_on_disk(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = {kv_dtype: load(folder, kv_dtype=kv_dtype) for kv_dtype in ("int8", "auto")}
    prompt, answers = random_tokens(1, 90)[0].tolist(), []
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for kv_dtype, num_cached in (("int8", 0), ("int8", 89), ("auto", 0), ("int8", 0)):
        engine = Engine(models[kv_dtype], sessions=Sessions(tmp_path), prefix_caching=False)
        engine.add_request(prompt, params, session_id="s")
        with caplog.at_level("INFO", logger="offload"):
            outputs = [output for _ in range(200) if engine.has_work for output in engine.step()]
        assert outputs[-1].num_cached == num_cached
        answers.append([chosen.token for output in outputs for chosen in output.tokens])
        engine.stop()
    assert answers[0] == answers[1] == answers[3]
    for dtypes in ("int8, not bfloat16", "bfloat16, not int8"):
        assert f"session s: saved with another kv_dtype: {dtypes}; load" in caplog.text
