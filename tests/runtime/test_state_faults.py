"""A call that fails, or is taken back, leaves the policy's state as it was: what follows is as if
it had not been. And what a policy keeps of sequences is within max_memory."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import built
from cases.device_cases import load_in_room, small, steps
from cases.drafts import verifying
from cases.inside import runtime_of, states_of
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from offload import OffloadedModel
from offload.kv.store import HostBudgetError
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles
from offload.selection.layer_state import StateShape
from offload.selection.state import capacity_for

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


def load(folder: Any, name: str, room: int | None = None) -> Any:
    return load_in_room(folder, small(name), room)


def state_of(model: Any) -> int:
    return states_of(model).bytes.at(LONG + 1)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    combinations(["lfps", "quest", "lychee_cluster", "sketch", "union"], [100, 9000]),
)
def test_the_bytes_counted_beforehand_are_the_most_there_are(name, num_tokens, pool):
    policy, generator = small(name), torch.Generator().manual_seed(0)
    keys = torch.randn(2, num_tokens, 32, generator=generator)
    queries = torch.randn(6, 32, 32, generator=generator)
    capacity = capacity_for(num_tokens)
    arrays = built(policy, keys, queries=queries, capacity_tokens=capacity, pool=pool)
    made = sum(array.nbytes for array in arrays.values())
    counted = policy.state.num_bytes(StateShape(6, 2, 32, 4, capacity))
    assert 0.3 * counted < made <= counted
    if name not in ("lychee_cluster", "union"):  # whose chunks may be twice as long as the shortest
        assert made == counted


def test_the_bytes_of_per_head_are_those_of_each_members_own_heads():
    """Layer by layer: of retrieval heads only, of others only, and of both."""
    policy = make_policy("per_head", rest="lfps", dense_layers=1, budget_tokens=64, recent_tokens=8)
    roles = np.array([[0, 0], [0, 1], [0, 0]], bool)
    policy = replace(policy, head_roles=HeadRoles.of(roles, head_dim=32), is_part=True)
    keys = torch.randn(2, 9000, 32, generator=torch.Generator().manual_seed(0))
    shape = StateShape(6, 2, 32, 4, capacity_for(9000), num_layers=3)
    for layer_idx in range(3):
        given = {"layer_idx": layer_idx, "num_layers": 3, "queries": torch.randn(6, 32, 32)}
        arrays = built(policy, keys, capacity_tokens=shape.capacity_tokens, **given)
        made = sum(array.nbytes for array in arrays.values())
        assert policy.state.num_bytes(replace(shape, layer_idx=layer_idx)) == made > 0


@pytest.mark.parametrize("name", ["lfps", "lychee_cluster"])
def test_a_state_that_does_not_fit_is_refused_beforehand(name, tiny_folders):
    folder = tiny_folders["llama"]
    pages = load(folder, name).kv_store.page_bytes * 3 * -(-LONG // 16)
    state = state_of(load(folder, name))
    model = load(folder, name, pages + state // 2)
    cache = model.new_cache()
    with pytest.raises(HostBudgetError, match=rf"{name}.*max_memory"):
        model(random_tokens(1, LONG), past_key_values=cache)
    assert cache.kv_lens == []
    assert model.kv_store.host_bytes_used == 0
    with pytest.raises(HostBudgetError, match=r"for what the policy keeps.*max_memory"):
        model.generate(random_tokens(1, LONG), max_new_tokens=20, do_sample=False)
    assert model.kv_store.host_bytes_used == 0


@pytest.mark.parametrize("name", ["lfps", "lychee_cluster"])
def test_all_there_is_stays_within_the_budget(name, tiny_folders):
    """Pages leave room for the state of what they hold, and copies stop where there is none."""
    folder = tiny_folders["llama"]
    pages = load(folder, name).kv_store.page_bytes * 3 * -(-(LONG + 30) // 16)
    room = pages + 2 * state_of(load(folder, name)) + (1 << 18)
    model = load(folder, name, room)
    store, states = model.kv_store, states_of(model)
    cache = model.new_cache()
    model(random_tokens(1, LONG), past_key_values=cache)
    model(random_tokens(1, 1), past_key_values=cache)
    assert 0 < states.num_bytes <= states.held_bytes
    copies = [cache]
    refused = None
    while refused is None and len(copies) < 1000:
        try:
            copies.append(copy.deepcopy(cache))
        except HostBudgetError as error:
            refused = str(error)
        assert store.host_bytes_reserved + states.held_bytes <= room
    assert re.search(rf"{name}.*max_memory", refused)
    assert len(copies) > 1
    gc.collect()
    assert model.kv_store.num_sequences == len(copies)
    del copies[2:]
    gc.collect()
    assert model.kv_store.num_sequences == 2
    logits = [model(random_tokens(1, 1), past_key_values=c).logits for c in copies]
    assert torch.equal(*logits)
    del cache, copies
    gc.collect()
    assert model.kv_store.num_sequences == 0
    assert states.held_bytes == 0


def test_beams_count_their_copies(tiny_folders):
    folder = tiny_folders["llama"]
    state = state_of(load(folder, "lfps"))
    model = load(folder, "lfps", 3 * state + (1 << 20))
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    model.generate(random_tokens(1, LONG), **options)
    with pytest.raises(HostBudgetError, match="4 sequences of up to 231 tokens"):
        model.generate(random_tokens(1, LONG), num_beams=4, **options)
    assert model.kv_store.num_sequences == 0


def test_a_prefill_that_builds_has_two_states_at_once(tiny_folders):
    """What was there is kept until the pass is done, and counts beside what it builds."""
    folder = tiny_folders["llama"]
    pages = load(folder, "quest").kv_store.page_bytes * 3 * -(-(LONG + 30) // 16)
    state = state_of(load(folder, "quest"))
    model = load(folder, "quest", pages + state + state // 2)
    store, states = model.kv_store, states_of(model)
    cache = model.new_cache()
    model(random_tokens(1, LONG), past_key_values=cache)
    model(random_tokens(1, 1), past_key_values=cache)
    room = states.held_bytes + store.left_bytes()
    [seq] = cache.seqs
    states.begin([seq], [5], prefill=True)  # built afterwards, in the place of what was there
    states.roll_back(seq)
    with pytest.raises(HostBudgetError, match=r"quest.*max_memory"):
        states.begin([seq], [5], prefill=True, builds=True)
    states.begin([seq], [5], prefill=True)
    runtime_of(model).attention.build_states([seq], [store.kv_len(seq) + 1])
    assert states.held_bytes > room  # what was refused
    states.roll_back(seq)
    assert states.held_bytes <= room


def test_queries_that_are_kept_are_asked_for_first(tiny_folders):
    """Not after half of the tokens."""
    folder, policy = tiny_folders["llama"], small("lfps", 256)
    page_bytes = 3 * load(folder, "lfps").kv_store.page_bytes
    model = load_in_room(folder, policy, (16 * 9 + 4) * page_bytes)
    options = {"max_new_tokens": 100, "do_sample": False, "eos_token_id": None}
    with pytest.raises(HostBudgetError, match="of it for what the policy keeps"):
        model.generate(random_tokens(16, 40), **options)
    assert model.offload_stats().prefill_tokens == 0
    assert states_of(model).held_bytes == 0


def test_pages_that_are_free_make_room_for_what_a_policy_keeps(tiny_folders):
    first = load(tiny_folders["llama"], "quest")
    room = 2 * states_of(first).bytes.at(201) + 180 * first.kv_store.page_bytes
    model = load(tiny_folders["llama"], "quest", room)
    caches: list[Any] = []

    def fill() -> None:
        for seed in range(1000):
            caches.append(model.new_cache())
            model(random_tokens(1, 40, seed=seed), past_key_values=caches[-1])

    with pytest.raises(HostBudgetError):
        fill()
    caches.clear()
    gc.collect()
    assert model.kv_store.host_bytes_used == 0
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    out, expected = (m.generate(random_tokens(1, 180), **options) for m in (model, first))
    assert torch.equal(out, expected)
