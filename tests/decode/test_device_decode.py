"""The GPU's decode step gives the tokens of the stock model, on every backend.

Without a GPU the step runs inline, on CPU tensors; with one, as graph and as stream, too.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cases.correcting import padded
from cases.device_cases import GRAPH, INLINE, STREAM, each_of, greedy, load, small
from cases.slowly import slow_but
from cases.tiny_models import TINY_MODELS, random_tokens

from offload.policies.registry import available_policies

SPARSE = [name for name in available_policies() if name != "full"]
backend = each_of(INLINE, STREAM, GRAPH)


@pytest.fixture(scope="module")
def loaded(tiny_folders):
    """Loads the tiny llama once for each policy and backend."""

    @functools.cache
    def model(policy_name: str, device_and_backend: tuple[str, str | None]) -> Any:
        policy = "full" if policy_name == "full" else small(policy_name)
        return load(tiny_folders["llama"], policy, device_and_backend)

    return model


@pytest.fixture(scope="module")
def full_model(backend, loaded):
    return loaded("full", backend)


def padded_batch() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(tokens, mask, rows): left-padded rows of 200, 9 and 77 tokens."""
    rows = [random_tokens(1, n)[0] for n in (200, 9, 77)]
    return *padded([row[None] for row in rows]), rows


@pytest.mark.parametrize("model_name", slow_but(TINY_MODELS, "llama", "qwen3"))
def test_full_attention_gives_the_stock_tokens(
    backend, model_name, tiny_folders, stock_models, loaded
):
    """Past a page boundary, and from prompts shorter than the GPU's window."""
    if model_name == "llama":
        model = loaded("full", backend)
    else:
        model = load(tiny_folders[model_name], "full", backend)
    for prompt_tokens in (1, 3, 70, 150):
        tokens = random_tokens(1, prompt_tokens)
        expected = greedy(stock_models[model_name], tokens, 20)
        assert torch.equal(greedy(model, tokens, 20), expected)
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize(
    "name", slow_but(SPARSE, "exact_topk", "lychee_cluster", "lfps", "per_head", "tidal_decode")
)
def test_a_policy_gives_the_tokens_of_the_cpu_backend(backend, name, loaded):
    """One prompt is beyond the budget, and one grows beyond it."""
    for prompt_tokens, num_new in ((220, 20), (9, 80)):
        tokens = random_tokens(1, prompt_tokens)
        expected = greedy(loaded(name, ("cpu", None)), tokens, num_new)
        assert torch.equal(greedy(loaded(name, backend), tokens, num_new), expected)


@pytest.mark.parametrize("name", ["full", "exact_topk", "lychee_cluster"])
def test_rows_of_a_batch_do_not_see_each_other(backend, name, loaded):
    model = loaded(name, backend)
    tokens, mask, rows = padded_batch()
    out = greedy(model, tokens, 20, attention_mask=mask)
    for i, row in enumerate(rows):
        assert torch.equal(out[i, 200:], greedy(model, row[None], 20)[0, len(row) :])


def test_sequences_join_and_leave(full_model, stock_models):
    """Caches of several conversations take turns, in smaller and larger batches."""
    stock = stock_models["llama"]
    prompts = [random_tokens(1, n) for n in (33, 5, 120)]
    caches = [full_model.new_cache() for _ in prompts]
    texts = list(prompts)
    for turn in range(3):
        for i, cache in enumerate(caches):
            if turn == 1 and i == 1:
                continue
            texts[i] = greedy(full_model, texts[i], 6, past_key_values=cache)
    tokens, mask, _ = padded_batch()
    greedy(full_model, tokens, 3, attention_mask=mask)  # a larger batch in between
    for i, cache in enumerate(caches):
        texts[i] = greedy(full_model, texts[i], 6, past_key_values=cache)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = greedy(stock, prompt, text.shape[1] - prompt.shape[1])
        assert torch.equal(text, expected)


def test_scores_come_from_the_stock_loop(full_model, stock_models):
    tokens = random_tokens(1, 40)
    options = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    out, expected = (
        model.generate(tokens.to(model.device), max_new_tokens=8, eos_token_id=None, **options)
        for model in (full_model, stock_models["llama"])
    )
    assert torch.equal(out.sequences.cpu(), expected.sequences)
    for scores, stock in zip(out.scores, expected.scores, strict=True):
        torch.testing.assert_close(scores.cpu(), stock, rtol=1e-3, atol=1e-3)
