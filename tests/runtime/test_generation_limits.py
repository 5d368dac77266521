"""What a generation comes to is counted from its whole prompt, in every form it may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.inside import runtime_of
from cases.tiny_models import make_tiny_model, random_tokens

from offload import HostBudgetError, OffloadedModel

CACHED, NEW = 40, 9
LIMIT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("windowed")
    make_tiny_model("mistral", sliding_window=LIMIT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[None, "inline"])
def model(request: pytest.FixtureRequest, folder: Path) -> Any:
    return OffloadedModel.from_pretrained(
        folder, num_threads=1, page_tokens=16, backend=request.param
    )


def given(model: Any, form: str, copies: int = 1) -> tuple[dict[str, Any], Any]:
    """Inputs of a turn of NEW tokens after CACHED cached ones, and their cache."""
    cache, tokens = model.new_cache(), random_tokens(1, CACHED + NEW)
    model(tokens[:, :CACHED], past_key_values=cache)
    cache.batch_repeat_interleave(copies)
    inputs: dict[str, Any] = {"past_key_values": cache}
    if form == "all ids":
        inputs["input_ids"] = tokens
    elif form == "new ids":
        inputs["input_ids"] = tokens[:, CACHED:]
        inputs["attention_mask"] = torch.ones_like(tokens)
    else:
        inputs["inputs_embeds"] = model.get_input_embeddings()(tokens).detach()
    return inputs, cache


@pytest.mark.parametrize("form", ["all ids", "new ids", "embeddings"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"suppress_tokens": [3]},  # the stock loop
    ],
    ids=lambda options: "-".join(options),
)
def test_the_context_limit(model: Any, form: str, options: dict[str, Any]) -> None:
    """The last token that fits is generated; one more is refused before anything is computed."""
    if form == "embeddings" and "prefill_chunk_size" in options:
        pytest.skip("transformers does not cut embeddings into chunks")
    copies = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    room = LIMIT - CACHED - NEW + 1  # the last one is chosen and not cached
    inputs, cache = given(model, form, copies)
    wanted = {"do_sample": False, "eos_token_id": None, **options}
    with pytest.raises(ValueError, match=f"of {LIMIT + 1} tokens exceeds the {LIMIT}.*sliding"):
        model.generate(**inputs, **wanted, max_new_tokens=room + 1)
    assert cache.kv_lens == [CACHED] * copies
    model.generate(**inputs, **wanted, max_new_tokens=room)
    assert cache.get_seq_length() == LIMIT


def test_max_length_counts_the_given_ids(model: Any) -> None:
    """As in transformers: with new ids, the cached ones are not in it."""
    inputs, cache = given(model, "new ids")
    with pytest.raises(ValueError, match="of 65 tokens exceeds"):
        model.generate(**inputs, max_length=26, do_sample=False)
    model.generate(**inputs, max_length=25, do_sample=False, eos_token_id=None)
    assert cache.kv_lens == [LIMIT]


@pytest.mark.parametrize("form", ["all ids", "new ids"])
def test_drafts_near_the_limit(model: Any, form: str) -> None:
    """They may be longer than what is left to generate."""
    inputs, cache = given(model, form)
    wanted = {"do_sample": False, "eos_token_id": None, "prompt_lookup_num_tokens": 4}
    with pytest.raises(ValueError, match="of 65 tokens exceeds"):
        model.generate(**inputs, **wanted, max_new_tokens=LIMIT - CACHED - NEW - 1)
    assert cache.kv_lens == [CACHED]
    model.generate(**inputs, **wanted, max_new_tokens=LIMIT - CACHED - NEW - 2)


def test_an_assistant_near_the_limit(model: Any) -> None:
    inputs, cache = given(model, "all ids")
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": LIMIT - CACHED - NEW + 1}
    model.generate(**inputs, **options, assistant_model=model)
    assert max(cache.kv_lens) <= LIMIT


def test_padding_is_no_context(model: Any) -> None:
    """Columns beyond the limit, of rows within it."""
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :20], mask[1, :30] = 0, 0
    out = model.generate(
        random_tokens(2, 70), attention_mask=mask, max_new_tokens=15, do_sample=False
    )
    assert out.shape[1] <= 85
    with pytest.raises(ValueError, match="of 65 tokens exceeds"):
        model.generate(random_tokens(2, 70), attention_mask=mask, max_new_tokens=16)


@pytest.mark.parametrize("new_tokens", [NEW, CACHED])
def test_new_ids_without_the_mask(model: Any, new_tokens: int) -> None:
    """transformers would take them for the whole text."""
    _, cache = given(model, "all ids")
    with pytest.raises(ValueError, match=f"has {new_tokens} columns, but .* holds {CACHED}"):
        model.generate(random_tokens(1, new_tokens), past_key_values=cache, max_new_tokens=3)
    assert cache.kv_lens == [CACHED]


def test_steps_beyond_the_limit(model: Any) -> None:
    cache = model.new_cache()
    model(random_tokens(1, LIMIT), past_key_values=cache)
    step = torch.tensor([5]), torch.tensor([LIMIT])
    with pytest.raises(ValueError, match="of 65 tokens exceeds"):
        runtime_of(model).choose_tokens(cache, *step)
    with pytest.raises(ValueError, match="of 65 tokens exceeds"):
        model(random_tokens(1, 1), past_key_values=cache)
    assert cache.kv_lens == [LIMIT]


@pytest.mark.parametrize("form", ["all ids", "new ids", "embeddings"])
@pytest.mark.parametrize("copies", [1, 2])
def test_the_budget_of_a_turn(folder: Path, form: str, copies: int) -> None:
    """What is checked at the start is what the generation needs at its end."""
    probe = OffloadedModel.from_pretrained(folder, num_threads=1, page_tokens=4)
    weights = sum(weight.nbytes for weight in probe.parameters())
    # 40 cached tokens take 10 pages, and two rows of 56 share them.
    pages = 14 if copies == 1 else 18
    budget = weights + pages * 3 * probe.kv_store.page_bytes
    model = OffloadedModel.from_pretrained(
        folder, num_threads=1, page_tokens=4, max_memory={"cpu": budget}
    )
    inputs, cache = given(model, form, copies)
    wanted = {"eos_token_id": None, "do_sample": copies > 1, "num_return_sequences": copies}
    room = 56 - CACHED - NEW + 1
    with pytest.raises(HostBudgetError, match=f"{copies} sequences of up to 57 tokens"):
        model.generate(**inputs, **wanted, max_new_tokens=room + 1)
    assert cache.kv_lens == [CACHED] * copies
    model.generate(**inputs, **wanted, max_new_tokens=room)
    assert cache.kv_lens == [56] * copies
