"""Candidates that the GPU lists by codes of keys: the CPU chooses among them as among its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, STREAM, each_of, greedy, load
from cases.inside import (
    allow_device_bytes,
    decoder_of,
    keep_placement,
    least_placement_of,
    split_steps,
)
from cases.tiny_models import make_tiny_model, random_tokens

from cpu_ops.codes import score_codes
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.resident_codes import CodeLists
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.policies.sketch.codes import LEVELS, rotation
from offload.selection.head_roles import HeadRoles
from offload.selection.state import PolicyStates
from offload.system.errors import DeviceMemoryError

WINDOW = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 16}


def sketch(bits: int = 2, candidate_ratio: float = 4.0) -> Policy:
    """The host's scores are coarser than the GPU's: both are to have what exact weights choose."""
    options = {"bits": bits, "candidate_ratio": candidate_ratio, "dense_layers": 1}
    return make_policy("sketch", **options, **WINDOW)


def place_codes(model: Any, heads: Callable[[np.ndarray], None] | None = None) -> None:
    """In all sparse layers, or where `heads` writes; whatever a GPU chose by itself."""
    decoder = decoder_of(model)
    places = np.array(least_placement_of(model).places)
    if heads is None:
        places[1:] = Place.CODES
    else:
        heads(places)
    decoder.place(HeadPlacement(places))


SLOW_FLAGS = pytest.param(*FLAGS.values, id="flags", marks=pytest.mark.slow)
backend = each_of(INLINE, SLOW_FLAGS, STREAM, GRAPH)


@pytest.fixture(scope="module")
def loaded(tiny_folders: dict[str, Path]):
    """Loads the tiny llama once for each number of bits and backend; no codes are on the CPU."""

    @functools.cache
    def model(bits: int, device_and_backend: tuple[str, str | None]) -> Any:
        loaded = load(tiny_folders["llama"], sketch(bits), device_and_backend)
        if device_and_backend != ("cpu", None):
            place_codes(loaded)
        return loaded

    return model


@pytest.fixture(scope="module")
def expected(loaded):
    @functools.cache
    def tokens_of(bits: int, prompt_tokens: int) -> torch.Tensor:
        return greedy(loaded(bits, ("cpu", None)), random_tokens(1, prompt_tokens), 24)

    return tokens_of


@pytest.mark.parametrize("bits", [1, 2])
def test_the_tokens_do_not_depend_on_who_lists(backend, bits, loaded, expected):
    """From prompts beyond the budget, and below it: codes come with the step that exceeds it."""
    model = loaded(bits, backend)
    for prompt_tokens in (140, 40, 48):
        out = greedy(model, random_tokens(1, prompt_tokens), 24)
        assert torch.equal(out, expected(bits, prompt_tokens))
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_rows_of_a_batch(backend, num_micro_batches, loaded, expected):
    """One has codes from the start, one gets them, in slots that others had before."""
    model = loaded(2, backend)
    decoder = decoder_of(model)
    decoder.place(decoder.placement)
    split_steps(model, num_micro_batches)
    tokens = torch.zeros(3, 140, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for order in ((140, 40, 48), (48, 140, 40)):
        for i, n in enumerate(order):
            tokens[i, 140 - n :] = random_tokens(1, n)[0]
            mask[i], mask[i, 140 - n :] = 0, 1
        out = greedy(model, tokens, 24, attention_mask=mask)
        for i, n in enumerate(order):
            assert torch.equal(out[i, 140:], expected(2, n)[0, n:])


def test_forks_and_crops(backend, loaded):
    """Beams copy what is known of a sequence, drafts that are refused are cut off."""
    plain, model = loaded(2, ("cpu", None)), loaded(2, backend)
    tokens = random_tokens(1, 100)
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 4}):
        out = greedy(model, tokens, 12, **options)
        assert torch.equal(out, greedy(plain, tokens, 12, **options))


def test_conversations_take_turns(backend, loaded):
    """In one slot; a prompt that goes on has its tokens coded anew, by another mean."""
    plain, model = loaded(2, ("cpu", None)), loaded(2, backend)
    texts = {}
    for tested in (plain, model):
        caches = [tested.new_cache() for _ in range(2)]
        of_model = [random_tokens(1, n) for n in (90, 40)]
        for _ in range(3):
            for i, cache in enumerate(caches):
                text = torch.cat([of_model[i], random_tokens(1, 7)], dim=1)
                of_model[i] = greedy(tested, text, 10, past_key_values=cache)
        texts[tested is plain] = of_model
    for ours, theirs in zip(texts[False], texts[True], strict=True):
        assert torch.equal(ours, theirs)


def test_some_heads_have_codes(backend, tiny_folders, expected):
    def some(places: np.ndarray) -> None:
        places[1, 1] = places[2, 0] = Place.CODES

    model = load(tiny_folders["llama"], sketch(), backend)
    place_codes(model, some)
    assert torch.equal(greedy(model, random_tokens(1, 140), 24), expected(2, 140))


def test_retrieval_heads_have_codes(backend, tiny_folders):
    """The sketch of `per_head` keeps codes of its own heads only."""
    retrieves = np.array([[1, 1], [0, 1], [1, 0]], bool)
    made: Any = make_policy("per_head", rest="lfps", dense_layers=1, **WINDOW)
    roles = HeadRoles.of(retrieves, head_dim=32)
    wide = replace(made.retrieval, candidate_ratio=4.0)
    policy = replace(made, retrieval=wide, head_roles=roles, is_part=True)

    def retrieving(places: np.ndarray) -> None:
        places[1:][retrieves[1:]] = Place.CODES

    tokens = random_tokens(1, 140)
    model = load(tiny_folders["llama"], policy, backend)
    place_codes(model, lambda places: None)
    expected = greedy(model, tokens, 20)
    place_codes(model, retrieving)
    assert torch.equal(greedy(model, tokens, 20), expected)
    with pytest.raises(ValueError, match=r"head 0 of layer 1 .* keeps no codes of its keys"):
        place_codes(model)


@pytest.mark.parametrize("device_and_backend", [INLINE, STREAM])
@pytest.mark.parametrize(("bits", "head_dim"), [(1, 64), (2, 64), (1, 128), (2, 128)])
def test_lists_are_those_of_the_hosts_codes(
    bits, head_dim, device_and_backend, tmp_path, tokenizer, monkeypatch
):
    """As exactly as the two round scores: nothing is listed that is much worse than the last, and
    nothing left out that is much better."""
    make_tiny_model("llama", head_dim=head_dim).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path, sketch(bits, 2.0), device_and_backend)
    place_codes(model)
    decoder, send = decoder_of(model), CodeLists.find
    num_lists = 0

    def send_and_check(lists: CodeLists, layer_idx: int, rows: slice, b: Any, mailbox: Any) -> None:
        nonlocal num_lists
        send(lists, layer_idx, rows, b, mailbox)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        for row, position in enumerate(b.positions[rows].tolist()):
            if position < 0:
                continue
            seq = decoder.slots.steps.step.resident.slots[row].seq
            state = decoder.attention.states.arrays_of(seq).layers[layer_idx]
            assert (state["encoded"] == position).all()
            query = (
                b.queries[layer_idx, row]
                .float()
                .cpu()
                .view(len(state["mean"]), -1, head_dim)
                .numpy()
            )
            for head, of_head in enumerate(query * np.float32(head_dim**-0.5)):
                scores = score_codes(
                    of_head @ rotation(head_dim),
                    LEVELS[bits],
                    of_head @ state["mean"][head],
                    state["codes"][head],
                    state["scales"][head],
                    n=position + 1 - 16,
                )[4:]
                count = int(mailbox.counts[row, head])
                listed = mailbox.selection[row, head, 4 : count - 16].long() - 4
                assert count == 4 + 56 + 16
                kth, slack = scores.sort().values[-56], 0.1 * scores.std()
                left = torch.ones(len(scores), dtype=torch.bool).index_fill_(0, listed, False)
                assert scores[listed].min() >= kth - slack
                assert scores[left].max() <= kth + slack
                num_lists += 1

    monkeypatch.setattr(CodeLists, "find", send_and_check)
    greedy(model, random_tokens(1, 140), 12)
    assert num_lists == 11 * 2 * 2  # steps, layers, heads


def test_codes_that_do_not_fit(backend, tiny_folders, caplog):
    """A placement that somebody gave is refused beforehand; one that the model chose goes, when
    the last page does not fit."""
    policy = replace(sketch(), dense_layers=0)
    model, tokens = load(tiny_folders["llama"], policy, backend), random_tokens(1, 140)
    place_codes(model, lambda places: None)
    expected = greedy(model, tokens, 24)
    decoder, placement = decoder_of(model), HeadPlacement.filled(3, 2, Place.CODES)
    # 11 pages of 16 tokens, whose codes and scales take 12 bytes a head.
    allow_device_bytes(model, 11 * 3 * 2 * 16 * 12 - 1)
    keep_placement(model, keeps=True)
    decoder.place(placement)
    with pytest.raises(DeviceMemoryError, match=r"the codes of others' keys need 12\.38 KiB for 1"):
        greedy(model, tokens, 24)
    keep_placement(model, keeps=False)
    with caplog.at_level(logging.WARNING, logger="offload.decode.gpu.placed_heads"):
        assert torch.equal(greedy(model, tokens, 24), expected)
    assert not (decoder.placement.places == Place.CODES).any()
    assert "the codes of keys that stay on the GPU need 1 more pages of 384 B" in caplog.text


def test_codes_go_before_heads(tiny_folders, caplog):
    """A GPU whose last page does not fit keeps the KV of its heads, and gives up the codes."""
    retrieves = np.array([[1, 1], [0, 1], [1, 0]], bool)
    made: Any = make_policy("per_head", rest="lfps", dense_layers=1, **WINDOW)
    policy = replace(made, head_roles=HeadRoles.of(retrieves, head_dim=32), is_part=True)
    model = load(tiny_folders["llama"], policy, ("cpu", "inline"))
    decoder = decoder_of(model)
    places = np.array(least_placement_of(model).places)
    places[1, 1], places[2, 0] = Place.GPU, Place.CODES
    allow_device_bytes(model, 10 * (8192 + 4096) + 100)  # for the KV of 10 pages
    decoder.place(HeadPlacement(places))
    with caplog.at_level(logging.WARNING, logger="offload.decode.gpu.placed_heads"):
        greedy(model, random_tokens(1, 140), 20)
    assert decoder.placement.places[1, 1] == Place.GPU
    assert decoder.placement == HeadPlacement(places).without_codes()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.endswith("While sequences need so much, lists are made without codes")
    greedy(model, random_tokens(1, 60), 20)  # which needs less
    assert decoder.placement == HeadPlacement(places)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@torch.no_grad()
def test_a_query_that_is_not_finite_names_the_layer(backend, bad, tiny_folders):
    model = load(tiny_folders["llama"], sketch(), backend)
    place_codes(model)
    decoder, cache = decoder_of(model), model.new_cache()
    model(random_tokens(1, 100), past_key_values=cache)
    token = random_tokens(1, 1)

    def spoil(layer: int, first_row: int, qkv: torch.Tensor, positions: torch.Tensor) -> None:
        if layer == 1:
            qkv[:, 3] = bad

    decoder.after_projection = spoil
    with pytest.raises(RuntimeError, match=r"non-finite attention in layer 1, .* KV head 0"):
        model(token, past_key_values=cache)
    decoder.after_projection = None
    logits = model(token, past_key_values=cache).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("prompt_tokens", [140, 40])
def test_states_are_built_once(prompt_tokens, loaded, monkeypatch):
    """Not by each of the threads that encode: each would have a copy of all layers."""
    model, build, built = loaded(2, INLINE.values[0]), PolicyStates._build, list[int]()

    def counted(states: PolicyStates, seq: int, *lens: int) -> Any:
        built.append(seq)
        return build(states, seq, *lens)

    monkeypatch.setattr(PolicyStates, "_build", counted)
    greedy(model, random_tokens(1, prompt_tokens), 24)
    assert len(built) == 1
