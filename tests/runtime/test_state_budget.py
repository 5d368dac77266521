"""What a policy keeps of sequences is within max_memory."""

from __future__ import annotations

import copy
import gc
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import built
from cases.device_cases import load_in_room, small
from cases.inside import runtime_of, states_of
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from offload.kv.store import HostBudgetError
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles
from offload.selection.layer_state import StateShape
from offload.selection.state import capacity_for

LONG = 220


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
