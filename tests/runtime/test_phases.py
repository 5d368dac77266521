"""A prompt is attended to in full and what follows is decoded, however the tokens come."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import INLINE, NATIVE, each_of, greedy, load, small
from cases.inside import decoder_of
from cases.slowly import slow_but
from cases.tiny_models import make_tiny_model, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.models.batch import pack
from offload.policies import Policy
from offload.policies.registry import available_policies
from offload.runtime.phases import parts_of

PROMPT, NEW = 150, 12
STATELESS = ["exact_topk", "streaming_llm", "quest", "tidal_decode", "lychee_decode"]


def sparse(name: str) -> Policy | str:
    """A policy that leaves out much of the prompt; or "full"."""
    return name if name == "full" else small(name, budget_tokens=48)


backend = each_of(NATIVE, INLINE)


@pytest.fixture(
    scope="module",
    params=slow_but(available_policies(), "full", "lychee_cluster", "lfps", "per_head"),
)
def model(request: pytest.FixtureRequest, folder: Path, backend: Any) -> Any:
    return load(folder, sparse(request.param), backend, num_threads=1)


@pytest.fixture(scope="module", params=slow_but(STATELESS, "quest", "tidal_decode"))
def stateless(request: pytest.FixtureRequest, folder: Path, backend: Any) -> Any:
    return load(folder, sparse(request.param), backend, num_threads=1)


@pytest.fixture(scope="module")
def quest(folder: Path, backend: Any) -> Any:
    return load(folder, sparse("quest"), backend, num_threads=1)


def test_a_turn_is_a_prompt_however_short(model: Any) -> None:
    """As ids of everything, and as new ids with the mask of everything."""
    cache = model.new_cache()
    model(random_tokens(1, PROMPT), past_key_values=cache)
    for turn in (1, 9, 17):
        new = random_tokens(1, turn, seed=turn)
        whole = torch.cat([random_tokens(1, PROMPT), new], dim=1)
        expected = greedy(model, whole, NEW)
        assert model.offload_stats().prefill_tokens == PROMPT + turn
        got = greedy(model, whole, NEW, past_key_values=copy.deepcopy(cache))
        assert torch.equal(got, expected)
        stats = model.offload_stats()
        assert (stats.prefill_tokens, stats.decode_tokens) == (turn, NEW - 1)
        mask = torch.ones_like(whole)
        got = greedy(model, new, NEW, attention_mask=mask, past_key_values=copy.deepcopy(cache))
        assert torch.equal(got[:, turn:], expected[:, PROMPT + turn :])


@pytest.mark.parametrize("chunk", [7, 16])
def test_a_prompt_in_chunks(model: Any, chunk: int) -> None:
    tokens = random_tokens(1, PROMPT)
    expected = greedy(model, tokens, NEW)
    assert torch.equal(greedy(model, tokens, NEW, prefill_chunk_size=chunk), expected)
    assert model.offload_stats().prefill_tokens == PROMPT


def test_embeddings_after_a_cache(quest: Any) -> None:
    """Embeddings of everything, of which the cached ones are left out."""
    tokens, cache = random_tokens(1, PROMPT + 3), quest.new_cache()
    quest(tokens[:, :PROMPT], past_key_values=cache)
    embeds = quest.get_input_embeddings()(tokens).detach()
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
    expected = quest.generate(inputs_embeds=embeds, **options)
    got = quest.generate(inputs_embeds=embeds, past_key_values=cache, **options)
    assert torch.equal(got, expected)
    assert quest.offload_stats().prefill_tokens == 3


@pytest.mark.parametrize("prompt_tokens", [40, 200])
def test_drafts_are_decoded(stateless: Any, prompt_tokens: int) -> None:
    """Prompt lookup: also a first call with prompt and draft, and a draft across the budget."""
    tokens = random_tokens(1, 10).repeat(1, prompt_tokens // 10)
    expected = greedy(stateless, tokens, 30)
    assert torch.equal(greedy(stateless, tokens, 30, prompt_lookup_num_tokens=5), expected)
    assert stateless.offload_stats().prefill_tokens == prompt_tokens
    assert stateless.kv_store.num_sequences == 0


@pytest.mark.parametrize("itself", [True, False])
def test_an_assistant_drafts(quest: Any, itself: bool) -> None:
    """A model that is its own assistant keeps where its own prompt ends, and its statistics."""
    assistant = quest if itself else make_tiny_model("llama")
    tokens = random_tokens(1, PROMPT)
    expected = greedy(quest, tokens, 20)
    assert torch.equal(greedy(quest, tokens, 20, assistant_model=assistant), expected)
    assert quest.offload_stats().prefill_tokens == PROMPT


def test_a_turn_with_drafts(stateless: Any) -> None:
    cache, tokens = stateless.new_cache(), random_tokens(1, 10).repeat(1, 16)
    stateless(tokens[:, :-4], past_key_values=cache)
    expected = greedy(stateless, tokens, 20)
    options = {"prompt_lookup_num_tokens": 4, "past_key_values": cache}
    assert torch.equal(greedy(stateless, tokens, 20, **options), expected)


def test_beams_of_a_turn(model: Any) -> None:
    tokens, cache = random_tokens(1, PROMPT + 2), model.new_cache()
    model(tokens[:, :PROMPT], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    expected = greedy(model, tokens, NEW, num_beams=3)
    assert torch.equal(greedy(model, tokens, NEW, num_beams=3, past_key_values=cache), expected)


def test_forward_alone(quest: Any) -> None:
    """One token after a cache is decoded, several are a prompt; also after a generation."""
    tokens, cache = random_tokens(1, PROMPT), quest.new_cache()
    out = greedy(quest, tokens, 4, past_key_values=cache)
    before = quest.offload_stats()
    prefilled, decoded = before.prefill_tokens, before.decode_tokens
    branch = copy.deepcopy(cache)
    quest(out[:, -1:], past_key_values=branch)
    assert (before.prefill_tokens, before.decode_tokens) == (prefilled, decoded + 1)
    quest(random_tokens(1, 2), past_key_values=branch)
    assert (before.prefill_tokens, before.decode_tokens) == (prefilled + 2, decoded + 1)


def test_a_draft_that_fails_leaves_the_cache(quest: Any, monkeypatch: Any) -> None:
    """The prompt of the same call is dropped with it."""
    cache, tokens = quest.new_cache(), random_tokens(1, 10).repeat(1, 16)
    quest(tokens[:, :60], past_key_values=cache)
    decoder = decoder_of(quest)

    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(decoder, "decode", fail)
        with pytest.raises(RuntimeError, match="no"):
            greedy(quest, tokens, 20, prompt_lookup_num_tokens=4, past_key_values=cache)
    assert cache.kv_lens == [60]
    assert torch.equal(greedy(quest, tokens, 20, past_key_values=cache), greedy(quest, tokens, 20))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_parts(data: st.DataObject) -> None:
    """Each token once, prompt before decoding, a sequence's own in order and in each step once."""
    batch_size, seq_len = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    prompt = data.draw(st.integers(0, seq_len))
    max_step_tokens = data.draw(st.sampled_from([None, 1, 2]))
    flags = st.lists(st.booleans(), min_size=batch_size * seq_len, max_size=batch_size * seq_len)
    attended = torch.tensor(data.draw(flags.filter(any))).view(batch_size, seq_len)
    batch = pack((batch_size, seq_len), attended, torch.arange(seq_len)[None])
    seen = []
    for part in parts_of(batch, prompt, max_step_tokens):
        packed = torch.arange(batch.num_tokens)[part.tokens]
        assert torch.equal(batch.columns[packed], part.batch.columns)
        assert torch.equal(batch.position_ids[packed], part.batch.position_ids)
        assert part.batch.indptr[-1] == len(packed)
        assert min(part.batch.num_new_tokens) > 0
        if part.phase == "decode" and max_step_tokens is not None:
            assert max(part.batch.num_new_tokens) <= max_step_tokens
        is_prompt = part.batch.columns % seq_len < prompt
        assert bool((is_prompt == (part.phase == "prefill")).all())
        for sequence, (_, first, last) in zip(part.sequences, part.batch.spans(), strict=True):
            rows = packed[first:last]
            assert bool((rows >= batch.indptr[sequence]).all())
            assert bool((rows < batch.indptr[sequence + 1]).all())
        seen.append((part.phase, packed))
    together = torch.cat([packed for _, packed in seen])
    assert sorted(together.tolist()) == list(range(batch.num_tokens))
    for _, first, last in batch.spans():
        own = together[(together >= first) & (together < last)]
        assert own.tolist() == list(range(first, last))
    assert [phase for phase, _ in seen] == sorted((phase for phase, _ in seen), reverse=True)
