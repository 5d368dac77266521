"""Sequences that are condensed by reconstruction: scores, what stays, and what is refused."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.bounded_cases import generate, rows_of, step
from cases.inside import compression_of, runtime_of
from cases.tiny_models import random_tokens
from torch import Tensor

import offload.kv.rewriting as rewriting
from offload import OffloadedModel
from offload.kv_compression.by_attention import CompressionByAttention
from offload.kv_compression.by_reconstruction import LEAD, PIECE, CompressionByReconstruction
from offload.policies.registry import make_policy

Load = Callable[..., Any]
SLOTS = 192
NUM_LAYERS, NUM_KV_HEADS, NUM_QO_HEADS, GROUP = 3, 2, 6, 3


@pytest.fixture
def reconstruction(bounded: Load) -> Load:
    def load(slots: int | None, policy: Any = "full", **options: Any) -> Any:
        if slots is not None:
            options = {"condense_by": "reconstruction"} | options
        return bounded(slots, policy, **options)

    return load


@pytest.fixture(scope="module")
def stock(long_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(long_folder, **options).eval()


def filled(model: Any, num_tokens: int | None = None) -> tuple[Any, Tensor]:
    """A cache of as many tokens as fit, and these."""
    num_tokens = num_tokens or compression_of(model).bound.slots
    cache, tokens = model.new_cache(), random_tokens(1, num_tokens)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    return cache, tokens


def condense(model: Any, cache: Any) -> list[list[Tensor]]:
    """Have `cache` condensed; the scores that it had then."""
    compression, found = compression_of(model), []
    lens_of = compression._lens

    def watched(scores: Any, lens: Any) -> Any:
        found.append([list(of_layer) for of_layer in scores])
        return lens_of(scores, lens)

    compression._lens = watched
    with torch.no_grad():
        runtime_of(model).sequences.make_room(cache.seqs, [1])
    del compression._lens
    (scores,) = found
    return scores


def kept_positions(cache: Any, before: list[Tensor]) -> list[list[list[int]]]:
    """Positions of each layer and KV head whose keys and values are, bit for bit, in `cache`."""
    starts, now, found = cache.store.starts(cache.seqs[0]), rows_of(cache), []
    for layer in range(NUM_LAYERS):
        found.append([])
        for head in range(NUM_KV_HEADS):
            start, is_same = starts[layer, head], []
            for rows, old in zip(now[2 * layer :][:2], before[2 * layer :][:2], strict=True):
                is_same.append((rows[head, start:, None] == old[head]).all(-1))
            both = is_same[0] & is_same[1]
            assert both.sum(1).eq(1).all()
            kept = both.int().argmax(1).tolist()
            assert kept == sorted(set(kept))
            found[-1].append(kept)
    return found


def reference_scores(stock: Any, tokens: Tensor) -> list[Tensor]:
    """float64 [num_kv_heads, n] of each layer: each piece behind the text, by its definition."""
    seen, of_pieces = tokens.shape[1], []
    for start in range(0, seen, PIECE):
        stop, lead = min(start + PIECE, seen), min(LEAD, start)
        text = torch.cat([tokens, tokens[:, start - lead : stop]], dim=1)
        with torch.no_grad():
            weights = stock(text, output_attentions=True).attentions
        columns = torch.zeros(text.shape[1], dtype=torch.bool)
        columns[:4] = columns[start:stop] = columns[seen:] = True
        of_layers = []
        for of_layer in weights:
            asked = of_layer[0, :, seen + max(0, lead - 1) :].double() * columns
            asked = asked / asked.sum(-1, keepdim=True)
            of_heads = asked[..., start:stop].amax(1)
            of_layers.append(of_heads.view(NUM_KV_HEADS, GROUP, -1).amax(1))
        of_pieces.append(of_layers)
    return [torch.cat(of_layer, dim=1) for of_layer in zip(*of_pieces, strict=True)]


@pytest.mark.parametrize("slots", [SLOTS, 600])
def test_scores_and_what_stays(reconstruction: Load, stock: Any, slots: int) -> None:
    """One piece, and several with the tokens that lead to them."""
    model = reconstruction(slots)
    cache, tokens = filled(model)
    bound, before = compression_of(model).bound, rows_of(cache)
    assert (bound.slots > PIECE) == (slots > PIECE)
    scores = condense(model, cache)
    for found, expected in zip(scores, reference_scores(stock, tokens), strict=True):
        torch.testing.assert_close(torch.stack(found).double(), expected, rtol=2e-3, atol=1e-5)
    page, pages, lens = cache.store.page_tokens, [], []
    always = {*range(bound.sinks), *range(bound.slots - bound.recent, bound.slots)}
    for of_layer, of_scores in zip(kept_positions(cache, before), scores, strict=True):
        for kept, of_head in zip(of_layer, of_scores, strict=True):
            assert always <= set(kept)
            assert len(kept) % page == 0
            lens.append(len(kept))
            gone = sorted({*range(bound.slots)} - set(kept))
            lowest = of_head[sorted(set(kept) - always)].tolist()
            assert min(lowest, default=1.0) >= max(of_head[gone].tolist(), default=0.0)
            ranked = sorted(float(of_head[i]) for i in {*range(bound.slots)} - always)[::-1]
            ranked = [float("inf")] * len(always) + ranked
            middles = ranked[page // 2 :: page]
            fewest = -(-len(always) // page)
            pages += [(len(lens) - 1, i, value) for i, value in enumerate(middles) if i >= fewest]
    assert sum(lens) == bound.low * NUM_LAYERS * NUM_KV_HEADS
    assert slots == SLOTS or len(set(lens)) > 1
    stay = [value for unit, i, value in pages if i < lens[unit] // page]
    assert min(stay, default=1.0) >= max(v for unit, i, v in pages if i >= lens[unit] // page)


@pytest.mark.parametrize("policy", ["full", "exact_topk"])
def test_steps_are_those_of_eager_attention_with_masks(
    reconstruction: Load, stock: Any, policy: str
) -> None:
    """Each head attends to what stayed of it, and to all that came later."""
    model = reconstruction(
        SLOTS, policy if policy == "full" else make_policy(policy, budget_tokens=512)
    )
    cache, tokens = filled(model)
    before, num_old = rows_of(cache), tokens.shape[1]
    condense(model, cache)
    kept, ours = kept_positions(cache, before), []
    text = torch.cat([tokens, random_tokens(1, 12, seed=3)], dim=1)
    with torch.no_grad():
        for i in range(num_old, text.shape[1]):
            ours.append(model(text[:, i : i + 1], past_key_values=cache).logits[0, -1])
    n, hooks = text.shape[1], []
    for layer, of_heads in zip(stock.model.layers, kept, strict=True):
        mask = torch.ones(NUM_QO_HEADS, n, n, dtype=torch.bool).tril()
        for head in range(NUM_QO_HEADS):
            gone = sorted({*range(num_old)} - set(of_heads[head // GROUP]))
            mask[head, num_old:, gone] = False
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)[None]

        def masked(module: Any, args: Any, kwargs: Any, added: Tensor = added) -> Any:
            return args, kwargs | {"attention_mask": added}

        hooks.append(layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True))
    with torch.no_grad():
        expected = stock(text).logits[0, num_old:]
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(torch.stack(ours).double(), expected, rtol=1e-4, atol=1e-4)


def test_beams(reconstruction: Load) -> None:
    output = generate(
        reconstruction(SLOTS), random_tokens(1, 40), 200, num_beams=3, num_return_sequences=2
    )
    assert output.shape == (2, 240)


def test_crop(reconstruction: Load) -> None:
    """As if what is taken back had not come, though scores were of other tokens."""
    model, tokens = reconstruction(SLOTS), random_tokens(1, 420)
    caches = [model.new_cache() for _ in range(2)]
    slots = caches[0].bound.slots
    with torch.no_grad():
        for cache in caches:
            model(tokens[:, :slots], past_key_values=cache)
            runtime_of(model).sequences.make_room(cache.seqs, [1])
    with torch.no_grad():
        model(random_tokens(1, 10, seed=9), past_key_values=caches[1])
    caches[1].crop(-10)
    assert caches[0].tokens == caches[1].tokens
    with torch.no_grad():
        ours, expected = (
            torch.cat(
                [
                    model(tokens[:, i : i + 1], past_key_values=cache).logits
                    for i in range(slots, slots + 90)
                ]
            )
            for cache in caches
        )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="were condensed to stay within host_bytes_per_sequence"):
        caches[1].crop(-140)
    step(model, caches[1])


def test_embeddings_are_refused_when_they_must_be_read_again(reconstruction: Load) -> None:
    model = reconstruction(SLOTS)
    cache, _ = filled(model, 40)
    embeds = torch.zeros(1, 2, 96)
    with torch.no_grad():
        model(inputs_embeds=embeds, past_key_values=cache)
        rest = random_tokens(1, cache.bound.slots - 42, seed=8)
        model(rest, past_key_values=cache)
        fork = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="condense_by='attention'"):
            model(embeds[:, :1, 0].long(), past_key_values=cache)
        assert cache.tokens == fork.tokens
        cache.crop(-2)
        assert torch.equal(step(model, cache), step(model, fork.crop(-2) or fork))


def test_interrupted_while_it_is_read(
    reconstruction: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reconstruction(SLOTS)
    compression, (cache, _) = compression_of(model), filled(model)
    fork, before = copy.deepcopy(cache), rows_of(cache)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compression, "_reconstruct", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache)
    monkeypatch.undo()
    for now, then in zip(rows_of(cache), before, strict=True):
        assert torch.equal(now, then)
    assert torch.equal(step(model, cache), step(model, fork))


@pytest.mark.parametrize("what", ["_replace_layer", "fill_pages"])
def test_a_failure_while_writing(
    reconstruction: Load, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Between two layers, and between two heads of one; all pages are free afterwards."""
    model = reconstruction(SLOTS)
    cache, _ = filled(model)
    other, calls, done = copy.deepcopy(cache), [], getattr(rewriting, what)

    def fails(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no more")
        return done(*arguments)

    monkeypatch.setattr(rewriting, what, fails)
    with pytest.raises(MemoryError, match="no more"):
        step(model, cache)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="start a new cache"):
        step(model, cache)
    step(model, other)


def test_interrupted_anywhere(reconstruction: Load) -> None:
    """ctrl-C at each line of `by_reconstruction` that it can come to: the cache goes on."""
    model = reconstruction(SLOTS)
    (cache, _), line = filled(model), 0
    expected = step(model, copy.deepcopy(cache))
    while True:
        fork, left = copy.deepcopy(cache), line

        def traced(frame: Any, event: str, argument: Any) -> Any:
            nonlocal left
            if event == "line" and frame.f_code.co_name in ("_score", "then", "first", "_lens"):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return traced if frame.f_code.co_filename.endswith("by_reconstruction.py") else None

        sys.settrace(traced)
        try:
            found = step(model, fork)
        except KeyboardInterrupt:
            sys.settrace(None)
            assert torch.equal(step(model, fork), expected), line
            line += 1 + line // 4
        else:
            break
        finally:
            sys.settrace(None)
    assert line > 20
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"condense_by": "x"}, "unknown condense_by 'x'"),
        ({"host_bytes_per_sequence": None}, "condense_by=reconstruction needs host_bytes"),
        ({"policy": "lychee_cluster"}, "'lychee_cluster' keeps .* condense_by='attention'"),
        ({"policy": "tidal_decode"}, "'tidal_decode' hands .* condense_by='attention'"),
        ({"backend": "inline"}, "device=.* condense_by='attention'"),
        ({"condensed_share": 0.1}, "condensed_share=0.1 .* condense_by='attention'"),
    ],
)
def test_refused(long_folder: Path, options: dict[str, Any], message: str) -> None:
    options = {"host_bytes_per_sequence": 2**20, "condense_by": "reconstruction"} | options
    with pytest.raises(ValueError, match=message):
        OffloadedModel.from_pretrained(long_folder, page_tokens=16, **options)


def test_the_bytes_that_an_error_names_are_enough(reconstruction: Load) -> None:
    with pytest.raises(ValueError, match="too little") as caught:
        reconstruction(SLOTS, host_bytes_per_sequence=1)
    named = re.search(r"need (\d+) bytes", str(caught.value))
    assert named is not None
    with pytest.raises(ValueError, match="too little"):
        reconstruction(SLOTS, host_bytes_per_sequence=int(named[1]) - 1)
    model = reconstruction(SLOTS, host_bytes_per_sequence=int(named[1]))
    assert generate(model, random_tokens(1, 150), 20).shape == (1, 170)


def test_auto(bounded: Load) -> None:
    for policy, kind in (
        ("full", CompressionByReconstruction),
        ("lychee_cluster", CompressionByAttention),
    ):
        model = bounded(4 * 10**3, policy, condense_by="auto")
        assert isinstance(compression_of(model), kind)
