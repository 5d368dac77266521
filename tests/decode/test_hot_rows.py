"""Heads whose rows stay on the GPU, chosen a layer ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, STREAM, greedy, load, small
from cases.inside import decoder_of
from cases.tiny_models import random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_ops import _native
from offload.decode.gpu.placement import HeadPlacement, Place

BUDGET = 64
POLICIES = ["exact_topk", "lychee_cluster", "lfps", "quest", "sketch"]


@pytest.fixture(scope="module", params=[INLINE, FLAGS, STREAM, GRAPH])
def backend(request):
    return request.param


def hot_model(folder: Path, backend: Any, policy: str = "exact_topk", **options: Any) -> Any:
    """All layers below the first with hot rows."""
    model = load(folder, small(policy, **options), backend)
    decoder = decoder_of(model)
    places = np.array(decoder.placement.places)
    places[1:] = Place.HOT
    decoder._choose = None
    decoder.place(HeadPlacement(places))
    return model


def check_rows(model: Any) -> int:
    """The GPU's hot rows are those of the map; how many there are."""
    steps = decoder_of(model)._steps
    resident, count = steps.step.resident, 0
    for index, slot in enumerate(resident.slots):
        if slot.seq is None:
            continue
        for layer_idx, rows in resident.hot.rows.items():
            keys, values = model.kv_store.gather(slot.seq, layer_idx, 0, slot.kv_len)
            for place_of_head, head in enumerate(steps.step.heads.layers[layer_idx].hot):
                pairs = resident.hot.map.hot(index, layer_idx, head)
                tokens, places = (torch.from_numpy(x.copy()).long() for x in pairs.T)
                assert sorted(places.tolist()) == list(range(len(places)))
                assert tokens.tolist() == sorted(set(tokens.tolist()))
                assert not len(tokens) or 4 <= tokens[0] <= tokens[-1] < slot.kv_len - 16
                for side, truth in enumerate((keys, values)):
                    held = rows[index, side, place_of_head, places].cpu()
                    assert torch.equal(held, truth[head, tokens])
                count += len(tokens)
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_within_the_budget_it_is_full_attention(policy, backend, tiny_folders, stock_models):
    model = hot_model(tiny_folders["llama"], backend, policy, budget_tokens=256)
    tokens = random_tokens(1, 100, seed=3)
    assert torch.equal(greedy(model, tokens, 40), greedy(stock_models["llama"], tokens, 40))


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_the_map(policy, backend, tiny_folders):
    """Beyond the budget, of a batch, from step to step; and they stay near the exact choice."""
    model = hot_model(tiny_folders["llama"], backend, policy)
    tokens = random_tokens(2, 200, seed=4)
    counted = []
    decoder = decoder_of(model)
    step = type(decoder)._run

    def run(*args: Any, **kwargs: Any) -> None:
        step(decoder, *args, **kwargs)
        counted.append(check_rows(model))

    decoder._run = run
    greedy(model, tokens, 30)
    assert min(counted) > 0
    hits, misses = decoder._steps.step.resident.hot.map.take_counts()
    assert hits > misses


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 60), max_size=12), max_size=30), st.integers(12, 20))
def test_the_map_is_a_plain_lru(choices, hot_tokens):
    rows = _native.HotRows(2, 1, 1, hot_tokens)
    places: dict[int, int] = {}
    last: dict[int, int] = {}
    for now, chosen in enumerate(choices):
        tokens = np.array(sorted(chosen), np.int32)
        fetched = dict(rows.choose(1, 0, 0, tokens).tolist())
        assert sorted(fetched) == sorted(chosen - places.keys())
        last |= dict.fromkeys(chosen, now)
        places |= fetched
        held = dict(rows.hot(1, 0, 0).tolist())
        assert len(held) <= hot_tokens
        gone = places.keys() - held.keys()
        if gone:  # nothing that was chosen before them stays instead
            stays = [last[token] for token in held if token not in chosen]
            assert max(last[token] for token in gone) <= min(stays, default=now)
        places = {token: places[token] for token in held}
        assert places == held
        assert sorted(held.values()) == list(range(len(held)))
    assert len(rows.hot(0, 0, 0)) == 0
    rows.forget(1)
    assert len(rows.hot(1, 0, 0)) == 0
