"""Several steps at once, where all KV heads are on the GPU: what single steps give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, SLOW_INLINE, STREAM, greedy, load
from cases.inside import decoder_of, resident_of
from cases.tiny_models import random_tokens
from transformers.generation.streamers import BaseStreamer

from offload.decode.gpu.bursts import MOST_STEPS, Bursts
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.prepared_steps import BurstLength


@pytest.fixture(params=[SLOW_INLINE, FLAGS, STREAM, GRAPH])
def model(request: pytest.FixtureRequest, tiny_folders: dict[str, Path]) -> Any:
    """All on the GPU, in bursts of seven."""
    model = load(tiny_folders["llama"], "full", request.param)
    decoder_of(model).place(HeadPlacement.filled(3, 2, Place.GPU))
    return model


@pytest.fixture(autouse=True)
def sevens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: 7))


@pytest.fixture(scope="module")
def cpu(tiny_folders: dict[str, Path]) -> Any:
    return load(tiny_folders["llama"], "full", ("cpu", None))


def bursts_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each burst has, as they come."""
    counts: list[int] = []
    run = Bursts.run

    def counted(self: Bursts, link: Any, slots: Any, num_steps: int, **options: Any) -> Any:
        counts.append(num_steps)
        return run(self, link, slots, num_steps, **options)

    monkeypatch.setattr(Bursts, "run", counted)
    return counts


def test_an_answer_in_bursts(model: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = bursts_of(model, monkeypatch)
    tokens = random_tokens(2, 50)
    assert torch.equal(greedy(model, tokens, 24), greedy(cpu, tokens, 24))
    assert counts == [7, 7, 7, 2]  # the first comes from the prompt
    assert model.offload_stats().decode_tokens == 2 * 23


def test_the_host_has_all_of_it(model: Any, cpu: Any) -> None:
    """Keys and values of every layer, as from single steps on the CPU."""
    tokens, caches = random_tokens(2, 50), (model.new_cache(), cpu.new_cache())
    for of, cache in zip((model, cpu), caches, strict=True):
        greedy(of, tokens, 40, past_key_values=cache)
    for ours, theirs in zip(*(cache.seqs for cache in caches), strict=True):
        for layer_idx in range(3):
            for x, y in zip(
                model.kv_store.gather(ours, layer_idx), cpu.kv_store.gather(theirs, layer_idx),
                strict=True,
            ):  # fmt: skip
                assert x.shape == y.shape
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_rows_that_end_in_the_middle_of_a_burst(model: Any, cpu: Any) -> None:
    """The stock result: padding from there on, and no tokens beyond the end in the cache."""
    tokens = random_tokens(3, 40)
    free = greedy(cpu, tokens, 30)[:, 40:]
    for row, place in enumerate((2, 9, 12)):
        options = {"eos_token_id": int(free[row, place]), "pad_token_id": 7}
        caches = model.new_cache(), cpu.new_cache()
        out, expected = (
            greedy(of, tokens, 30, past_key_values=cache, **options)
            for of, cache in zip((model, cpu), caches, strict=True)
        )
        assert torch.equal(out, expected)
        assert caches[0].kv_lens == caches[1].kv_lens
        assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_a_conversation_goes_on_without_loading_again(
    model: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cropped tokens cost nothing: what stays is on the GPU as it was."""
    tokens = random_tokens(1, 40)
    free = greedy(cpu, tokens, 20)[0, 40:]
    caches, outs = (model.new_cache(), cpu.new_cache()), []
    for of, cache in zip((model, cpu), caches, strict=True):
        outs.append(greedy(of, tokens, 20, past_key_values=cache, eos_token_id=int(free[9])))
    assert torch.equal(*outs)
    resident = resident_of(model)
    loads: list[int] = []
    load_pages = resident._load
    monkeypatch.setattr(
        resident,
        "_load",
        lambda index, seq, kv_len: loads.append(seq) or load_pages(index, seq, kv_len),
    )
    token, step_outs = torch.tensor([[5]]), []
    for of, cache in zip((model, cpu), caches, strict=True):
        with torch.no_grad():
            logits = of(token.to(of.device), past_key_values=cache).logits
        step_outs.append(logits.cpu())
    torch.testing.assert_close(*step_outs, rtol=1e-4, atol=1e-4)
    assert not loads
    # Pages of cropped tokens went back; the next burst finds those that came in their place.
    longer = [
        greedy(of, torch.cat([outs[0], token], dim=1), 40, past_key_values=cache)
        for of, cache in zip((model, cpu), caches, strict=True)
    ]
    assert torch.equal(*longer)


class Counter(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_sampled_tokens_repeat_with_their_seed(model: Any) -> None:
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(greedy(model, random_tokens(1, 40), 25, do_sample=True, temperature=0.9))
    assert torch.equal(*outs)
    torch.manual_seed(4)
    other = greedy(model, random_tokens(1, 40), 25, do_sample=True, temperature=0.9)
    assert not torch.equal(outs[0], other)


def test_a_burst_that_fails_leaves_what_was_there(
    model: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens, run = model.new_cache(), random_tokens(1, 40), Bursts.run
    expected = greedy(cpu, tokens, 24)

    def fails(self: Bursts, *args: Any, **options: Any) -> Any:
        run(self, *args, **options)
        raise KeyboardInterrupt

    model(tokens[:, :30].to(model.device), past_key_values=cache)
    monkeypatch.setattr(Bursts, "run", fails)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, tokens, 24, past_key_values=cache)
    assert cache.kv_lens == [40]
    monkeypatch.setattr(Bursts, "run", run)
    cache.crop(-1)
    assert torch.equal(greedy(model, tokens, 24, past_key_values=cache), expected)


@pytest.mark.parametrize("token", [1, 12])
def test_numbers_that_are_not_finite_are_told_of_their_layer(
    model: Any, cpu: Any, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step in which they come: what was chosen before it stays."""
    decoder, tokens, streamer = decoder_of(model), random_tokens(1, 40), Counter()
    expected = greedy(cpu, tokens, 24)

    def spoil(layer: int, first: int, qkv: torch.Tensor, positions: torch.Tensor) -> None:
        if layer == 1:
            qkv[:, 0] += torch.where(positions == 40 + token, torch.inf, 0.0).to(qkv.dtype)

    monkeypatch.setattr(decoder, "after_projection", spoil)
    with pytest.raises(RuntimeError, match=r"layer [12]"):
        greedy(model, tokens, 24, streamer=streamer)
    assert streamer.tokens == expected[0, : 41 + token].tolist()
    assert model.kv_store.num_sequences == 0


def test_bursts_are_as_long_as_a_reader_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    bursts = BurstLength()
    for seconds, wanted in ((0.001, MOST_STEPS), (0.008, 8), (0.1, 1)):
        bursts.timed(2, 2 * seconds)
        assert bursts.num_steps == wanted


def test_a_burst_takes_pages_for_itself_alone(model: Any) -> None:
    """However many tokens are to come: 41 and at most 32 more."""
    cache = model.new_cache()
    model(random_tokens(1, 40).to(model.device), past_key_values=cache)
    decoder = decoder_of(model)
    assert decoder.tokens_at_once(cache.seqs, 400) == 7
    resident = resident_of(model)
    assert {len(pages) for pages in resident._addresses[0].values()} == {
        -(-(40 + MOST_STEPS) // 16)
    }
