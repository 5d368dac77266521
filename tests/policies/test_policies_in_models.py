"""Every policy inside a model: full budgets, batches, cropped caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.correcting import padded
from cases.device_cases import each_of, small
from cases.inside import runtime_of
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload import OffloadedModel
from offload.policies import Policy
from offload.policies.registry import available_policies

SPARSE = [name for name in available_policies() if name != "full"]
LONG = 220  # tokens of a prompt that is far over the small budget


def load(folder: Path, policy: Policy | str) -> Any:
    return OffloadedModel.from_pretrained(folder, policy=policy, dtype="float32", num_threads=2)


def greedy(model: Any, tokens: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
    return model.generate(
        tokens, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=None, **options
    )


name = each_of(*SPARSE)


@pytest.fixture(scope="module")
def model(name, folder):
    return load(folder, small(name))


@pytest.mark.parametrize("prompt_tokens", slow_but([1, 7, 31, 200], 31))
def test_a_budget_that_holds_everything_is_full_attention(name, folder, prompt_tokens):
    """Prompts shorter than a chunk, than LFPS's window, than the recent window too."""
    tokens = random_tokens(1, prompt_tokens)
    expected = greedy(load(folder, "full"), tokens, 40)
    assert torch.equal(greedy(load(folder, small(name, 256)), tokens, 40), expected)


def test_queries_are_kept_in_native_steps(folder):
    """LFPS builds its tables from them: the same as of layers that attend one by one."""
    kept, texts = [], []
    for one_by_one in (False, True):
        model = load(folder, small("lfps", 96))
        attention = runtime_of(model).attention
        if one_by_one:
            attention.on_attended = lambda *_: None
        cache = model.new_cache()
        text = greedy(model, random_tokens(2, 9), 40, past_key_values=cache)
        queries = [known.queries or {} for known in attention.states._known.values()]
        kept.append([of_seq[i].in_order(48) for of_seq in queries for i in of_seq])
        texts.append(greedy(model, text, 80, past_key_values=cache))
    native, expected = kept
    assert len(native) == len(expected) == 2 * int(attention.sparse_layers.sum())
    for a, b in zip(native, expected, strict=True):
        assert a.shape[1] == 32
        assert torch.equal(a, b)
    assert torch.equal(*texts)


def test_rows_of_a_batch_do_not_see_each_other(model):
    """Left-padded rows, one of them below the budget, as each alone."""
    rows = [random_tokens(1, LONG), random_tokens(1, 30), random_tokens(1, 150)]
    batch, mask = padded(rows)
    together = greedy(model, batch, 24, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = greedy(model, row, 24)
        assert torch.equal(together[i, LONG:], alone[0, row.shape[1] :])


def test_a_cut_cache_goes_on(model):
    tokens = random_tokens(1, LONG)
    cache = model.new_cache()
    model(tokens, past_key_values=cache)
    fed = random_tokens(1, 30)
    for i in range(30):
        model(fed[:, i : i + 1], past_key_values=cache)
    cache.crop(-3)
    short = model(fed[:, 27:28], past_key_values=cache).logits
    cache.crop(-(cache.get_seq_length() - 40))  # below the budget: full attention
    full = model(fed[:, :1], past_key_values=cache).logits
    assert torch.isfinite(short).all()
    exact = model(torch.cat([tokens[:, :40], fed[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(full, exact, rtol=1e-4, atol=1e-4)
