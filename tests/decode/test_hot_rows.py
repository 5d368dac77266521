"""Heads whose rows stay on the GPU, chosen a layer ahead."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import (
    FLAGS,
    GRAPH,
    INLINE,
    SLOW_INLINE,
    STREAM,
    each_of,
    greedy,
    load,
    small,
)
from cases.drafts import verifying
from cases.inside import decoder_of, resident_of, split_steps, states_of, steps_of
from cases.slowly import slow_but
from cases.tiny_models import make_tiny_model, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.recfunctions import structured_to_unstructured

from cpu_ops import _native
from cpu_ops.coprocessor import CoprocessorError
from offload.decode.gpu.layer_heads import requests_of
from offload.decode.gpu.linear import OneRow
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.engine.engine import Engine
from offload.engine.sampling_params import SamplingParams
from offload.policies import Policy
from offload.policies.lfps.layout import SCALE
from offload.policies.lfps.policy import LFPS

BUDGET = 64
POLICIES = ["exact_topk", "lychee_cluster", "lfps", "quest", "sketch"]
backend = each_of(SLOW_INLINE, FLAGS, STREAM, GRAPH)


def hot_model(
    folder: Path,
    backend: Any,
    policy: Policy | str = "exact_topk",
    *,
    first_layer: int = 1,
    place: Place = Place.HOT,
    loading: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """All layers from `first_layer` on with hot rows at `place`, those above on the GPU."""
    named = small(policy, **options) if isinstance(policy, str) else policy
    model = load(folder, named, backend, **loading)
    decoder = decoder_of(model)
    places = np.array(decoder.placement.places)
    places[:first_layer] = Place.GPU
    places[first_layer:] = place
    decoder.placed.choose = None
    decoder.place(HeadPlacement(places))
    return model


def pairs_of(hot: Any, index: int, layer_idx: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, ascending, and places of what is hot of a head."""
    if hot.found is None:
        pairs = hot.map.hot(index, layer_idx, head)
        return tuple(torch.from_numpy(x.copy()).long() for x in pairs.T)
    at = (index, hot._first_found[layer_idx] + hot._heads[layer_idx].tolist().index(head))
    tokens = (hot.found.place_of[at] >= 0).nonzero()[:, 0].cpu()
    places = hot.found.place_of[at].cpu()[tokens].long()
    assert torch.equal(hot.found.token_of[at].cpu()[places].long(), tokens)
    return tokens, places


def check_rows(model: Any) -> int:
    """The GPU's hot rows are those of the map; how many there are."""
    steps = steps_of(model)
    resident, count = steps.step.resident, 0
    for index, slot in enumerate(resident.slots):
        if slot.seq is None:
            continue
        if resident.hot.map.estimates(index):
            check_clusters(model, index, slot)
        for layer_idx, rows in resident.hot.rows.items():
            keys, values = model.kv_store.gather(slot.seq, layer_idx, 0, slot.kv_len, kept=True)
            for place_of_head, head in enumerate(steps.step.heads.layers[layer_idx].hot):
                tokens, places = pairs_of(resident.hot, index, layer_idx, head)
                assert sorted(places.tolist()) == list(range(len(places)))
                assert tokens.tolist() == sorted(set(tokens.tolist()))
                assert not len(tokens) or 4 <= tokens[0] <= tokens[-1] < slot.kv_len - 16
                for side, truth in enumerate((keys, values)):
                    held = rows[index, side, place_of_head, places].cpu()
                    assert torch.equal(held, truth[head, tokens])
                count += len(tokens)
    return count


def check_clusters(model: Any, index: int, slot: Any) -> None:
    """The GPU's means are the host's; of the last layer its counts are those of what is left."""
    hot, layers = resident_of(model).hot, steps_of(model).step.heads.layers
    if hot._loaded.get(index) is None or slot.last_used < resident_of(model)._clock:
        return  # short, or not in this step
    arrays = states_of(model).arrays_of(slot.seq)
    for layer_idx, means in hot._means.items():
        of_layer, heads = arrays.layers[layer_idx], layers[layer_idx].hot
        if hot.found is not None:
            check_found_clusters(hot, index, layer_idx, slot.kv_len)
            continue
        for side, name in enumerate(("estimate_keys", "estimate_values")):
            held = torch.from_numpy(of_layer[name])[list(heads)]
            assert torch.equal(means[index, side].cpu(), held.to(means.dtype))
    for head in heads if hot.found is None else ():
        left = of_layer["estimate_cluster_of"][head].copy()
        left[pairs_of(hot, index, layer_idx, head)[0]] = 255
        counts = np.bincount(left, minlength=256)[: means.shape[3]]
        counts[of_layer["estimate_counts"][head] == 0] = 0
        logs = torch.from_numpy(counts).float().log2()
        assert torch.allclose(hot._log_counts[index, head].cpu(), logs)


def check_found_clusters(hot: Any, index: int, layer_idx: int, kv_len: int) -> None:
    """Every token before the window is in a cluster but for that of the first step, which left it
    while the prompt was read; counts are those of what is left."""
    for i, head in enumerate(hot._heads[layer_idx].tolist()):
        at = (index, hot._first_found[layer_idx] + i)
        cluster_of, counts = hot.found.cluster_of[at].cpu(), hot.found.cluster_counts[at].cpu()
        assert torch.equal(torch.bincount(cluster_of, minlength=256)[: len(counts)].int(), counts)
        assert int((cluster_of[4 : kv_len - 15] == 255).sum()) <= 1
        in_window = int(cluster_of[kv_len - 16]) if kv_len > 20 else 255
        hot_tokens = pairs_of(hot, index, layer_idx, head)[0]
        left = counts - torch.bincount(cluster_of[hot_tokens], minlength=256)[: len(counts)]
        if in_window < len(counts):  # it has joined since the counts were told
            left[in_window] -= 1
        assert layer_idx != max(hot._means) or torch.allclose(
            hot._log_counts[index, head].cpu(), left.float().log2()
        )


def check_each_step(model: Any) -> list[int]:
    """`check_rows` after every step from now on; the list grows by what it returns."""
    counted: list[int] = []
    decoder = decoder_of(model)
    if (decoder.placement.places == Place.FOUND).any():  # a step launched ahead would have begun
        decoder.begin_steps = lambda seqs, most: 1
    captured, run = decoder.captured, decoder.captured._run

    def run_and_check(*args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)
        counted.append(check_rows(model))

    captured._run = run_and_check
    return counted


@pytest.mark.parametrize("policy", slow_but(POLICIES, "exact_topk", "lfps"))
def test_within_the_budget_it_is_full_attention(policy, backend, tiny_folders, stock_models):
    model = hot_model(tiny_folders["llama"], backend, policy, budget_tokens=256)
    tokens = random_tokens(1, 100, seed=3)
    assert torch.equal(greedy(model, tokens, 20), greedy(stock_models["llama"], tokens, 20))


@pytest.mark.parametrize("policy", slow_but(POLICIES, "lychee_cluster", "sketch"))
def test_rows_are_those_of_the_map(policy, backend, tiny_folders):
    """Beyond the budget, of a batch, from step to step; and they stay near the exact choice."""
    model = hot_model(tiny_folders["llama"], backend, policy)
    tokens = random_tokens(2, 200, seed=4)
    counted = check_each_step(model)
    greedy(model, tokens, 15)
    assert min(counted) > 0
    hits, misses = resident_of(model).hot.map.take_counts()
    assert hits > misses


@pytest.mark.parametrize("clusters", [0, 16])
@pytest.mark.parametrize("place", [Place.HOT, Place.FOUND])
def test_int8_rows(place, clusters, backend, tiny_folders):
    """Within the budget the tokens are those of the CPU; beyond it the rows are the host's."""
    large, little = (
        replace(small("sketch", budget), estimate_clusters=clusters) for budget in (256, BUDGET)
    )
    int8 = {"loading": {"kv_dtype": "int8"}, "place": place}
    model = hot_model(tiny_folders["llama"], backend, large, **int8)
    tokens = random_tokens(1, 100, seed=3)
    cpu = load(tiny_folders["llama"], large, ("cpu", None), kv_dtype="int8")
    assert torch.equal(greedy(model, tokens, 20), greedy(cpu, tokens, 20))
    model = hot_model(tiny_folders["llama"], backend, little, **int8)
    counted = check_each_step(model)
    greedy(model, random_tokens(2, 200, seed=4), 15)
    assert min(counted) > 0


@pytest.mark.parametrize("policy", [*slow_but(POLICIES, "lychee_cluster", "lfps"), "found"])
def test_what_is_not_hot_is_estimated(policy, backend, tiny_folders, stock_models):
    """Nearer to full attention than where it is dropped, and as exact within the budget."""
    place = Place.FOUND if policy == "found" else Place.HOT
    policy = "sketch" if policy == "found" else policy
    small_budget = replace(small(policy, 24), estimate_clusters=16)
    tokens, errors = random_tokens(2, 200, seed=4), []
    full = stock_models["llama"](tokens).logits[:, 190:]
    for chosen in (small_budget, replace(small_budget, estimate_clusters=0)):
        model = hot_model(tiny_folders["llama"], backend, chosen, place=place)
        cache, counted = model.new_cache(), check_each_step(model)
        model(tokens[:, :190], past_key_values=cache)
        steps = [model(x, past_key_values=cache).logits for x in tokens[:, 190:].split(1, dim=1)]
        errors.append((torch.cat(steps, dim=1).cpu() - full).abs().mean())
        assert min(counted) > 0
    assert errors[0] < 0.8 * errors[1]
    large = replace(small(policy, 256), estimate_clusters=16)
    exact = hot_model(tiny_folders["llama"], backend, large, place=place)
    tokens = random_tokens(1, 100, seed=3)
    assert torch.equal(greedy(exact, tokens, 20), greedy(stock_models["llama"], tokens, 20))


@pytest.mark.parametrize("clusters", slow_but([0, 16], 16))
def test_the_gpu_finds_rows_by_itself(clusters, backend, tiny_folders, stock_models):
    """By codes and the true query: nobody asks the host. Around the budget, of a batch with
    padding, in forks, after a crop, and when slots have other sequences."""
    policy = replace(small("sketch"), estimate_clusters=clusters)
    model = hot_model(tiny_folders["llama"], backend, policy, place=Place.FOUND)
    assert steps_of_no_requests(model)
    tokens = random_tokens(1, 60, seed=7)
    out = greedy(model, tokens, 30)
    exact = BUDGET + 1 - 60
    assert torch.equal(out[:, : 60 + exact], greedy(stock_models["llama"], tokens, exact))
    counted = check_each_step(model)  # one by one: what they come to is the same
    assert torch.equal(greedy(model, tokens, 30), out)
    batch, mask = random_tokens(2, 200, seed=4), torch.ones(2, 200, dtype=torch.long)
    mask[0, :90] = 0
    greedy(model, batch, 20, attention_mask=mask)
    assert min(counted[20:]) > 0
    cache = model.new_cache()
    text = greedy(model, random_tokens(1, 150), 10, past_key_values=cache)
    branch = copy.deepcopy(cache)
    cache.crop(100 - cache.get_seq_length())
    for each, kept in ((branch, 159), (cache, 100), (branch, 160)):
        if each is branch and kept > 159:
            branch.crop(kept - branch.get_seq_length())
        other = torch.cat([text[:, :kept], random_tokens(1, 1, seed=kept)], dim=1)
        greedy(model, other, 8, past_key_values=each)
    assert min(counted[-20:]) > 0


@pytest.mark.parametrize("place", [Place.GPU, Place.HOT, Place.FOUND])
def test_steps_that_are_dropped_are_gone(place, backend, tiny_folders):
    """And with them what they had of the GPU: nothing waits for Python to collect it."""
    policy = replace(small("sketch"), estimate_clusters=16)
    model = hot_model(tiny_folders["llama"], backend, policy, place=place)
    greedy(model, random_tokens(1, 200, seed=4), 8)
    slots = decoder_of(model).slots
    gone = weakref.ref(slots.steps), weakref.ref(slots.steps.step.resident)
    gc.collect()
    gc.disable()
    try:
        slots.drop()
        assert [x() for x in gone] == [None, None]
    finally:
        gc.enable()


def steps_of_no_requests(model: Any) -> bool:
    return not requests_of(decoder_of(model).placed.layers, [slice(0, 1)])


# What happens to sequences between steps.


def test_rows_join_and_leave(backend, tiny_folders):
    """Some within the budget, some beyond it, one that comes to it; slots are used again."""
    model = hot_model(tiny_folders["llama"], backend, "lychee_cluster")
    counted, chance = check_each_step(model), random.Random(2)
    engine = Engine(model, max_num_seqs=4, slice_seconds=1e-3)
    waiting = [5, 100, 62, 230, 70, 150]
    while waiting or engine.has_work:
        if waiting:
            prompt = random_tokens(1, waiting.pop(), seed=len(waiting))[0].tolist()
            options = {"temperature": 0.0, "max_tokens": chance.randrange(3, 12)}
            engine.add_request(prompt, SamplingParams(**options, ignore_eos=True), str(len(prompt)))
        for _ in range(chance.randrange(5)):
            assert all(output.error is None for output in engine.step())
    engine.stop()
    assert max(counted) > 0
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("kv_len", [*range(61, 69), 129])
def test_around_the_budget(kv_len, backend, tiny_folders, stock_models):
    """The steps that come to it: exact up to one token beyond, for the choice is a token behind."""
    model = hot_model(tiny_folders["llama"], backend, "quest")
    counted, tokens = check_each_step(model), random_tokens(1, kv_len, seed=kv_len)
    new = max(4, BUDGET + 1 - kv_len)
    out = greedy(model, tokens, new + 1)
    assert len(counted) == new
    assert min(counted[1:]) > 0
    exact = max(1, BUDGET + 2 - kv_len)  # tokens; the prompt's own is
    expected = greedy(stock_models["llama"], tokens, exact)
    assert torch.equal(out[:, : kv_len + exact], expected)


def test_a_cropped_cache_goes_on(backend, tiny_folders):
    """Its slot holds nothing at first; the next tokens are others."""
    model = hot_model(tiny_folders["llama"], backend, "quest")
    counted, cache = check_each_step(model), model.new_cache()
    text = greedy(model, random_tokens(1, 150), 10, past_key_values=cache)
    for kept, seed in ((140, 1), (100, 2), (66, 3), (40, 4)):
        cache.crop(kept - cache.get_seq_length())
        assert len(resident_of(model).hot.map.hot(0, 1, 0)) == 0
        text = torch.cat([text[:, :kept], random_tokens(1, 1, seed=seed)], dim=1)
        text = greedy(model, text, 12, past_key_values=cache)
    assert min(counted[:-12]) > 0


@pytest.mark.parametrize(
    "options",
    slow_but([{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"cache": "copied"}]),
    ids=str,
)
def test_sequences_that_fork(options, backend, tiny_folders):
    """Beams share pages of which each gets its own last one; drafts are taken back."""
    model = hot_model(tiny_folders["llama"], backend, "lychee_cluster")
    counted, tokens = check_each_step(model), random_tokens(1, 30).repeat(1, 4)
    if "cache" not in options:
        greedy(model, tokens, 24, **options)
    else:
        cache = model.new_cache()
        text = greedy(model, tokens, 8, past_key_values=cache)
        branch = copy.deepcopy(cache)
        for each in (branch, cache):  # each in a slot that was the other's, or nobody's
            other = torch.cat([text, random_tokens(1, 1, seed=len(counted))], dim=1)
            greedy(model, other, 8, past_key_values=each)
    assert min(counted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("bypass_threshold", [0.02, 0.1])
def test_heads_that_the_policy_answers(bypass_threshold, backend, tiny_folders):
    """Nothing is chosen for them then: they attend to what is hot."""
    policy = replace(small("lfps"), bypass_threshold=bypass_threshold)
    model = hot_model(tiny_folders["llama"], backend, policy)
    counted = check_each_step(model)
    greedy(model, random_tokens(1, 50), 40)
    assert len(counted) == 39
    assert min(counted[-10:]) > 0  # at least what was there within the budget
    hits, misses = resident_of(model).hot.map.take_counts()
    assert hits + misses > 0


@pytest.mark.slow
def test_micro_batches_take_turns(backend, tiny_folders):
    """The two parts of a batch share nothing but the map, and choose as one part does."""
    model = hot_model(tiny_folders["llama"], backend, "exact_topk")
    tokens = random_tokens(4, 150, seed=9)
    mask = torch.ones_like(tokens)
    for row, padding in enumerate((0, 120, 87, 20)):
        mask[row, :padding] = 0
    expected = greedy(model, tokens, 24, attention_mask=mask)
    split_steps(model, 2)
    counted = check_each_step(model)
    assert torch.equal(greedy(model, tokens, 24, attention_mask=mask), expected)
    assert min(counted) > 0
    assert {link.num_micro_batches for link in steps_of(model).links.values()} == {1, 2}


@pytest.mark.slow
def test_tokens_that_are_read_again(backend, tiny_folders):
    """Keys and values that change in the host's pages are fetched anew."""
    options = {"cache_correction_every": 8}
    model = hot_model(tiny_folders["llama"], backend, "quest", loading=options)
    counted = check_each_step(model)
    greedy(model, random_tokens(1, 150), 40)
    assert min(counted) > 0


def test_a_gpu_without_room_for_hot_rows_goes_on(tiny_folders, monkeypatch, caplog):
    """The CPU attends, as it would have without them."""

    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    tokens = random_tokens(1, 150)
    inline = ("cpu", "inline")
    expected = greedy(load(tiny_folders["llama"], small("quest"), inline), tokens, 10)
    model = hot_model(tiny_folders["llama"], inline, "quest")
    monkeypatch.setattr("offload.decode.gpu.prepared_steps.HotRows", no_room)
    assert torch.equal(greedy(model, tokens, 10), expected)
    assert not (decoder_of(model).placement.places == Place.HOT).any()
    assert caplog.text.count("only dense layers stay there") == 1


@torch.no_grad()
@pytest.mark.parametrize("policy", slow_but(POLICIES[1:], "lfps"))
def test_rejected_rows_of_a_draft_leave_no_trace(policy, backend, tiny_folders):
    """What the policy keeps is what decoding one by one leaves, where queries are the same but for
    their last bits: only the last layer has hot rows."""
    model = hot_model(tiny_folders["llama"], backend, policy, first_layer=2)
    prompt = 60  # dense at first
    text, states = random_tokens(1, prompt + 60, seed=3), []
    for drafts in ([(4, 2), (1, 3), (2, 0), (5, 4), (3, 1)] * 3, [(1, 0)] * 45):
        cache, at = model.new_cache(), prompt
        model(text[:, :prompt], past_key_values=cache)
        with verifying(model, cache):
            for accepted, rejected in drafts:
                draft = [text[:, at : at + accepted], random_tokens(1, 8, seed=at)[:, :rejected]]
                model(torch.cat(draft, dim=1), past_key_values=cache)
                at += accepted
                if rejected:
                    cache.crop(-rejected)
        (seq,) = cache._seqs
        states.append(states_of(model).arrays_of(seq).layers[2])
        states[-1] = {name: np.array(array) for name, array in states[-1].items()}
    drafted, plain = states
    assert at == prompt + 45
    assert drafted.keys() == plain.keys()
    for name, array in plain.items():
        # MKL may sum a product of one row in another order than one of several, as with AVX2 alone:
        # a query of 32 numbers is then off by some 2**-24 of itself, and so is a weight, which is
        # exp of their product. A row that was rejected would change weights by percents.
        ours, theirs = plain_numbers(drafted[name]), plain_numbers(array)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7, err_msg=name)


def plain_numbers(array: np.ndarray) -> np.ndarray:
    return structured_to_unstructured(array) if array.dtype.names else array


@torch.no_grad()
def observed_steps(folder: Path, policy: str) -> np.ndarray:
    """[20 steps, 2 layers]: whether LFPS's tables saw the weights; they decay then."""
    model = hot_model(folder, INLINE.values[0], policy)
    text, cache, scales = random_tokens(1, 171, seed=3), model.new_cache(), []
    model(text[:, :150], past_key_values=cache)
    for token in text[:, 150:].split(1, dim=1):
        model(token, past_key_values=cache)
        (seq,) = cache._seqs
        layers = states_of(model).arrays_of(seq).layers
        scales.append([float(layers[i]["units"][0, SCALE]) for i in (1, 2)])
    return (np.diff(np.log(scales), axis=0) / -np.log(LFPS.gamma)).round(9)


def test_lfps_sees_weights_in_its_turns(tiny_folders: dict[str, Path]) -> None:
    """Ahead it chooses all that it names but in one step of so many."""
    turns = observed_steps(tiny_folders["llama"], "lfps")[-4 * LFPS.observes_every :]
    assert {*turns.flatten().tolist()} == {0.0, 1.0}
    np.testing.assert_array_equal(turns.sum(axis=0), 4)
    assert turns.sum(axis=1).max() == 1  # not both layers in one step


def test_lfps_sees_all_weights_that_a_cut_asks_for(tiny_folders: dict[str, Path]) -> None:
    """Top-p over it scores every step."""
    assert (observed_steps(tiny_folders["llama"], "hard_kv")[4:] == 1.0).all()


# What fails in the middle of a step.


@pytest.mark.parametrize("fault", slow_but(["stall", "die"], "die"))
def test_a_worker_that_does_not_come_back(fault, tiny_folders):
    """Between a request that comes ahead and its reply."""
    model = hot_model(
        tiny_folders["llama"], FLAGS.values[0], "quest", loading={"deadline_seconds": 0.4}
    )
    tokens = random_tokens(2, 150)
    expected = greedy(model, tokens, 12)
    counted = check_each_step(model)
    for layer_idx in (1, 2):
        greedy(model, tokens.flip(0)[:, :90], 2)  # the slots tell of other sequences
        coprocessor = decoder_of(model).coprocessors[0]
        if fault == "stall":
            coprocessor.stall(layer_idx, seconds=0.8)
        else:
            coprocessor.die(layer_idx)
        with pytest.raises(
            CoprocessorError, match=rf"layer {layer_idx} \(request {layer_idx} of 2"
        ):
            greedy(model, tokens[:, :80], 12)
        assert torch.equal(greedy(model, tokens, 12), expected)
    assert min(counted) > 0


@pytest.mark.parametrize(("policy", "predicts"), [("exact_topk", True), ("tidal_decode", False)])
def test_only_those_that_choose_need_a_query(
    policy: str, predicts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that reuse a choice from above wait for no projection; rows are those of the map."""
    make_tiny_model("llama", num_hidden_layers=5).save_pretrained(tmp_path)
    model, calls = load(tmp_path, small(policy), INLINE.values[0]), list[bool]()
    decoder_of(model).place(HeadPlacement.from_text("GG GG .. hh hh"))
    query = OneRow.query

    def counted(self: OneRow, *args: Any) -> torch.Tensor:
        calls.append(True)
        return query(self, *args)

    monkeypatch.setattr(OneRow, "query", counted)
    cache = model.new_cache()
    greedy(model, random_tokens(1, 200), 12, past_key_values=cache)
    assert bool(calls) == predicts
    assert check_rows(model) > 0


@pytest.mark.parametrize("kv_len", [100, slow_but([60])[0]])
@pytest.mark.parametrize("policy", slow_but(POLICIES, "exact_topk", "lfps"))
def test_a_predicted_query_that_is_not_finite(policy, kv_len, backend, tiny_folders, monkeypatch):
    """An error that names the layer; within the budget nobody looks at it."""
    model = hot_model(tiny_folders["llama"], backend, policy)
    tokens = random_tokens(1, kv_len)
    expected = greedy(model, tokens, 4)

    def spoilt(self: OneRow, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(self._query, float("nan"))

    with monkeypatch.context() as patched:
        patched.setattr(OneRow, "query", spoilt)
        decoder_of(model).slots.drop()  # what was captured has the query
        if kv_len + 4 <= BUDGET:
            assert torch.equal(greedy(model, tokens, 4), expected)
        else:
            with pytest.raises(RuntimeError, match="non-finite attention in layer 1"):
                greedy(model, tokens, 4)
    decoder_of(model).slots.drop()
    counted = check_each_step(model)
    assert torch.equal(greedy(model, tokens, 4), expected)
    assert min(counted) > 0
    assert model.kv_store.num_sequences == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 60), max_size=12), max_size=30), st.integers(12, 20))
def test_the_map_is_a_plain_lru(choices, hot_tokens):
    rows = _native.HotRows(2, 1, 1, hot_tokens)
    places: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, chosen in enumerate(choices):
        tokens = np.array(sorted(chosen), np.int32)
        fetched = dict(rows.choose(1, 0, 0, tokens).tolist())
        assert sorted(fetched) == sorted(chosen - places.keys())
        last |= dict.fromkeys(chosen, step)
        places |= fetched
        held = dict(rows.hot(1, 0, 0).tolist())
        assert len(held) <= hot_tokens
        gone = places.keys() - held.keys()
        if gone:  # nothing that was chosen before them stays instead
            stays = [last[token] for token in held if token not in chosen]
            assert max(last[token] for token in gone) <= min(stays, default=step)
        places = {token: places[token] for token in held}
        assert places == held
        assert sorted(held.values()) == list(range(len(held)))
    assert len(rows.hot(0, 0, 0)) == 0
    rows.forget(1)
    assert len(rows.hot(1, 0, 0)) == 0


def test_predicted_queries_may_be_overwritten_as_others(backend, tiny_folders):
    """A benchmark chooses both: layers 1 and 2 have hot rows, and no layer above layer 0."""
    model, widths = hot_model(tiny_folders["llama"], backend, "exact_topk"), set()
    shape, cache = decoder_of(model).model.shape, model.new_cache()
    model(random_tokens(1, 100), past_key_values=cache)

    def note(layer_idx: int, first_row: int, qkv: torch.Tensor, positions: torch.Tensor) -> None:
        widths.add((layer_idx, qkv.shape[1]))

    decoder_of(model).after_projection = note
    model(random_tokens(1, 1), past_key_values=cache)
    whole = {(layer_idx, shape.qkv_width) for layer_idx in range(3)}
    assert widths == whole | {(1, shape.query_width), (2, shape.query_width)}
