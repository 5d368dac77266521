"""Edges of the loop that chooses tokens in the step: the same tokens as the stock loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.correcting import padded as padded_rows
from cases.device_cases import GRAPH, INLINE, NATIVE, STREAM, each_of, greedy, load, small
from cases.tiny_models import random_tokens

backend = each_of(NATIVE, INLINE, STREAM, GRAPH)


@pytest.fixture(scope="module")
def model(backend, tiny_folders):
    return load(tiny_folders["llama"], "full", backend)


@pytest.fixture
def our_loops(monkeypatch):
    """Counts the generations that ran on our loop."""
    import offload.runtime.model

    calls: list[int] = []
    run = offload.runtime.model.generate_tokens

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(args))
        return run(*args)

    monkeypatch.setattr(offload.runtime.model, "generate_tokens", counted)
    return calls


def padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, mask), padding on the left."""
    return padded_rows([random_tokens(1, n, seed=row) for row, n in enumerate(lengths)])


def test_one_new_token(model, stock, our_loops):
    tokens, mask = padded(30, 7)
    for options in ({"attention_mask": mask}, {}):
        out = greedy(model, tokens, 1, **options)
        assert torch.equal(out, greedy(stock, tokens, 1, **options))
        assert out.shape == (2, 31)
    assert model.offload_stats().decode_tokens == 0  # the prompt's logits are enough
    assert len(our_loops) == 2


def test_eos_at_the_first_token(model, stock, our_loops):
    """The only row has it, or one row, or a prompt ends with it."""
    tokens, mask = padded(30, 30, 12)
    first = greedy(stock, tokens, 1, attention_mask=mask)[:, -1]
    for eos in (int(first[0]), [int(first[0]), int(first[2])]):
        options = {"attention_mask": mask, "eos_token_id": eos, "pad_token_id": 258}
        out = greedy(model, tokens, 15, **options)
        assert torch.equal(out, greedy(stock, tokens, 15, **options))
        assert out[0, 30:].tolist()[1:] == [258] * (out.shape[1] - 31)
    alone = greedy(model, tokens[:1], 15, eos_token_id=int(first[0]))
    assert alone.shape == (1, 31)
    ended = torch.cat([tokens[:1], first[:1, None]], dim=1)
    options = {"eos_token_id": int(first[0]), "pad_token_id": 258}
    assert torch.equal(greedy(model, ended, 9, **options), greedy(stock, ended, 9, **options))
    assert len(our_loops) == 4


def test_a_cache_continued_across_calls(model, stock, our_loops):
    """With new text in between, of one token and of many, and with left padding."""
    cache, prompt = model.new_cache(), random_tokens(1, 21)
    text = greedy(model, prompt, 5, past_key_values=cache)
    for n in (0, 1, 40):
        text = torch.cat([text, random_tokens(1, n, seed=n)], dim=1)
        assert cache.kv_lens[0] < text.shape[1]
        out = greedy(model, text, 6, past_key_values=cache)
        assert torch.equal(out, greedy(stock, text, 6))
        text = out

    tokens, mask = padded(40, 11, 25)
    cache = model.new_cache()
    text = greedy(model, tokens, 5, attention_mask=mask, past_key_values=cache)
    assert cache.kv_lens == [44, 15, 29]
    mask = torch.cat([mask, torch.ones(3, 5, dtype=mask.dtype)], dim=1)
    out = greedy(model, text, 7, attention_mask=mask, past_key_values=cache)
    assert torch.equal(out, greedy(stock, tokens, 12, attention_mask=mask[:, :40]))
    assert len(our_loops) == 6


def test_a_row_that_has_ended_goes_on_in_the_next_call(model, stock):
    """What it was padded with is text then, where the mask says so."""
    tokens = random_tokens(2, 30)
    free = greedy(stock, tokens, 12)
    options = {"eos_token_id": int(free[0, 32]), "pad_token_id": 258}
    cache = model.new_cache()
    text = greedy(model, tokens, 8, past_key_values=cache, **options)
    assert torch.equal(text, greedy(stock, tokens, 8, **options))
    mask = torch.ones_like(text)
    out = greedy(model, text, 4, past_key_values=cache, attention_mask=mask)
    assert torch.equal(out, greedy(stock, text, 4, attention_mask=mask))


def test_embeddings_in_the_place_of_tokens(model, stock, our_loops):
    """The stock loop returns new tokens alone then; so does ours."""
    tokens, mask = padded(30, 18)
    embeddings = stock.get_input_embeddings()(tokens).detach()
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": mask,
    }
    expected = stock.generate(inputs_embeds=embeddings, **options)
    assert torch.equal(expected, greedy(stock, tokens, 9, attention_mask=mask)[:, 30:])
    options["attention_mask"] = mask.to(model.device)
    out = model.generate(inputs_embeds=embeddings.to(model.device), **options)
    assert torch.equal(out.cpu(), expected)
    assert len(our_loops) == 1


def test_position_ids_with_left_padding(model, stock, our_loops):
    """Given ones are those that generate() would make, or start elsewhere."""
    tokens, mask = padded(26, 9)
    made = (mask.cumsum(dim=1) - 1).clamp(min=0)
    for shift in (0, 5):
        options = {"attention_mask": mask, "position_ids": made + shift}
        out = greedy(model, tokens, 10, **options)
        assert torch.equal(out, greedy(stock, tokens, 10, **options))
    assert torch.equal(
        greedy(model, tokens, 10, attention_mask=mask, position_ids=made),
        greedy(model, tokens, 10, attention_mask=mask),
    )
    assert len(our_loops) == 4


def test_position_ids_for_all_rows(model, stock, our_loops):
    tokens = random_tokens(2, 26)
    options = {"position_ids": torch.arange(26)[None]}
    assert torch.equal(greedy(model, tokens, 10, **options), greedy(stock, tokens, 10, **options))
    assert len(our_loops) == 1


def test_an_assistant_drafts_for_the_stock_loop(model, backend, stock, tiny_folders):
    """With its own cache under its own policy; a conversation with the cache goes on."""
    assistant = load(tiny_folders["llama"], small("streaming_llm"), backend)
    tokens = random_tokens(1, 90)
    expected = greedy(stock, tokens, 24)
    assert torch.equal(greedy(model, tokens, 24, assistant_model=assistant), expected)
    for each in (model, assistant):
        assert each.kv_store.num_sequences == 0
