"""A call that fails, or is taken back, leaves the policy's state as it was.

What follows is as if it had not been.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import small, steps
from cases.drafts import verifying
from cases.inside import runtime_of, states_of
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from offload import OffloadedModel

STATEFUL = ["lfps", "lychee_cluster", "quest", "sketch", "union"]
QUICK = [("lfps", None), ("lychee_cluster", None), ("lfps", "inline")]
LONG = 220


def _case(name: str, backend: str | None) -> Any:
    marks = [] if (name, backend) in QUICK else [pytest.mark.slow]
    return pytest.param((name, backend), id=f"{name}-{backend}", marks=marks)


@pytest.fixture(scope="module", params=[_case(n, b) for n in STATEFUL for b in (None, "inline")])
def case(request):
    """A policy and a backend."""
    return request.param


@pytest.fixture(scope="module")
def backend(case):
    return case[1]


@pytest.fixture(scope="module")
def model(case, tiny_folders: dict[str, Path]) -> Any:
    name, backend = case
    return OffloadedModel.from_pretrained(
        tiny_folders["llama"],
        policy=small(name),
        dtype="float32",
        num_threads=1,
        backend=backend,
        page_tokens=16,
    )


@contextmanager
def nan_in_layer(model: Any, layer_idx: int) -> Iterator[None]:
    """A norm that makes the queries, keys and values of one layer NaN."""
    weight = model.model.layers[layer_idx].input_layernorm.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        yield
    finally:
        weight.copy_(kept)


def check_same_from_here(model: Any, cache: Any, unharmed: Any, num_tokens: int = 20) -> None:
    tokens = random_tokens(1, num_tokens, seed=9)
    assert cache.kv_lens == unharmed.kv_lens
    assert torch.equal(steps(model, cache, tokens), steps(model, unharmed, tokens))


def conversation(model: Any, prompt_tokens: int = LONG, num_steps: int = 13) -> tuple[Any, Any]:
    """A cache in the middle of decoding, and a copy of it."""
    cache = model.new_cache()
    model(random_tokens(1, prompt_tokens), past_key_values=cache)
    steps(model, cache, random_tokens(1, num_steps, seed=3))
    return cache, copy.deepcopy(cache)


@pytest.mark.parametrize("layer_idx", [0, 2])
def test_a_failed_follow_up_prefill(model, layer_idx):
    cache, unharmed = conversation(model)
    with nan_in_layer(model, layer_idx), pytest.raises((ValueError, RuntimeError), match="finite"):
        model(random_tokens(1, 40, seed=1), past_key_values=cache)
    check_same_from_here(model, cache, unharmed)


@pytest.mark.parametrize(("prompt_tokens", "layer_idx"), combinations([LONG, 40], [0, 1, 2]))
def test_a_failed_decode_step(model, layer_idx, prompt_tokens):
    """Layers above the one that fails have learnt from it."""
    cache, unharmed = conversation(model, prompt_tokens)
    for seed in range(3):
        with nan_in_layer(model, layer_idx), pytest.raises(RuntimeError, match="finite"):
            model(random_tokens(1, 1, seed=seed), past_key_values=cache)
    check_same_from_here(model, cache, unharmed, 70 if prompt_tokens < LONG else 20)


def drafted(model: Any, cache: Any, accepted: torch.Tensor, rejected: int, seed: int) -> None:
    """Verify a draft that begins with `accepted` [1, n] and goes on with tokens to be cropped."""
    wrong = random_tokens(1, rejected, seed=seed)
    with verifying(model, cache):
        model(torch.cat([accepted, wrong], dim=1), past_key_values=cache)
    cache.crop(-rejected)


def plain_and_drafted(model: Any, max_new_tokens: int, **drafts: Any) -> list[torch.Tensor]:
    tokens = random_tokens(1, 60).repeat(1, 4)  # what a lookup finds again
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    return [model.generate(tokens, **options, **d) for d in ({}, drafts)]


def test_prompt_lookup_gives_the_greedy_tokens(model):
    assert torch.equal(*plain_and_drafted(model, 60, prompt_lookup_num_tokens=4))


def test_rows_that_a_device_helped_to_attend_are_learnt_from_again(model, backend):
    """Single steps of one draft: sinks and recent tokens are attended elsewhere."""
    if backend is None:
        pytest.skip("nothing is attended elsewhere")
    cache, plain = conversation(model)
    tokens = random_tokens(1, 3, seed=5)
    drafted(model, cache, tokens, 5, seed=6)
    steps(model, plain, tokens)
    check_same_from_here(model, cache, plain)


def test_marks_stay_in_step_with_tokens(model):
    """… after embeddings, whose text is not known, and crops into either."""
    if not runtime_of(model).attention.policy.state.reads_text:
        pytest.skip("does not read the text")
    marks, states = runtime_of(model).sequences._delimiter_classes, states_of(model)
    tokens = random_tokens(1, 200)
    cache = model.new_cache()
    model(inputs_embeds=model.model.embed_tokens(tokens[:, :90]), past_key_values=cache)
    model(tokens[:, 90:150], past_key_values=cache)
    cache.crop(-20)
    steps(model, cache, tokens[:, 150:160])
    expected = [0] * 90 + marks[tokens[0, 90:130]].tolist() + marks[tokens[0, 150:160]].tolist()
    (seq,) = cache.seqs
    assert states.marks_of(seq)[:140].tolist() == expected
    cache.crop(-70)
    steps(model, cache, tokens[:, 160:170])
    expected = [0] * 70 + marks[tokens[0, 160:170]].tolist()
    assert states.marks_of(seq)[:80].tolist() == expected
    assert states.marks_address(seq, 80)


@pytest.mark.parametrize(("num_steps", "cropped"), combinations([0, 1, 2], [1, 40, 70, 100]))
def test_a_policy_goes_on_after_any_crop(model: Any, num_steps: int, cropped: int) -> None:
    """Also where the tokens whose queries it has seen are gone."""
    cache = model.new_cache()
    model(random_tokens(1, 200), past_key_values=cache)
    if num_steps:
        steps(model, cache, random_tokens(1, num_steps, seed=1))
    cache.crop(-cropped)
    assert bool(steps(model, cache, random_tokens(1, 3, seed=2)).isfinite().all())
    assert cache.kv_lens == [200 + num_steps - cropped + 3]


def test_a_row_without_a_token_keeps_its_state(model: Any) -> None:
    """… in a turn of another row."""
    waits = model.new_cache()
    mask = torch.ones(2, 150, dtype=torch.int64)
    model(random_tokens(2, 150), past_key_values=waits)

    def step(cache: Any, mask: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
        positions = (mask.cumsum(1) - 1)[:, -1:]
        token = random_tokens(2, 1, seed=seed)
        out = model(token, attention_mask=mask, past_key_values=cache, position_ids=positions)
        return out.logits, mask

    for seed in range(5):
        _, mask = step(waits, mask, seed)
    alone = copy.deepcopy(waits)
    turn = torch.cat([mask, torch.tensor([[1] * 10, [0] * 10])], dim=1)
    positions = (turn.cumsum(1) - 1)[:, -10:]
    tokens = random_tokens(2, 10, seed=9)
    model(tokens, attention_mask=turn, past_key_values=waits, position_ids=positions)
    assert torch.equal(step(waits, turn, 8)[0][1], step(alone, mask, 8)[0][1])


@pytest.mark.parametrize("num_failing", [1, 40])
def test_a_failed_pass_leaves_what_a_crop_needs(
    model: Any, backend: str | None, num_failing: int
) -> None:
    if backend is not None:
        pytest.skip("the two may be in slots whose steps have other numbers of rows, and round so")
    cache, unharmed = conversation(model, 150, 9)
    for each in (cache, unharmed):
        with verifying(model, each):
            model(random_tokens(1, 6, seed=6), past_key_values=each)
    with nan_in_layer(model, 1), pytest.raises((RuntimeError, ValueError), match="finite"):
        model(random_tokens(1, num_failing), past_key_values=cache)
    for each in (cache, unharmed):
        each.crop(-3)
    check_same_from_here(model, cache, unharmed)
