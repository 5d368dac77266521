"""Steps that follow each other with nothing in between, where the CPU attends to some heads: the
GPU begins with each as soon as the CPU has what the last one leaves."""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import (
    FLAGS,
    GRAPH,
    SLOW_INLINE,
    STREAM,
    check_works,
    each_of,
    greedy,
    load,
    small,
)
from cases.inside import correct_in_background, decoder_of, runtime_of, split_steps
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from cpu_ops.coprocessor import Coprocessor, CoprocessorError
from offload.decode.gpu.captured_steps import CapturedSteps
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.prepared_steps import BurstLength
from offload.decode.gpu.resident_codes import ResidentCodes
from offload.kv.page_pool import PagePool
from offload.policies.registry import make_policy

POLICIES = ["full", "lfps", "lychee_cluster", "lychee_decode", "tidal_decode", "sketch", "quest"]
STATELESS = ["full", "lychee_decode", "tidal_decode"]
HOT = ["lfps", "lychee_cluster"]
backend = each_of(SLOW_INLINE, FLAGS, STREAM, GRAPH)


@pytest.fixture(autouse=True)
def sevens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: 7))


def in_turn(folder: Path, policy: str, backend: Any, *, hot: bool = False, **loading: Any) -> Any:
    model = load(folder, policy if policy == "full" else small(policy), backend, **loading)
    split_steps(model, 1)  # nothing is tried
    if hot:
        decoder = decoder_of(model)
        heads = model.config.num_attention_heads
        placement = decoder.placement.with_hot_rows(decoder.attention.policy, heads)
        places = np.array(placement.places)
        places[0] = Place.GPU  # or nobody could ask for the first rows
        decoder.place(HeadPlacement(places).with_hot_rows(decoder.attention.policy, heads))
    return model


def begun(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many steps in turn were to come, and whether one was launched that does not come, of each
    series that ends."""
    ended: list[tuple[int, int]] = []
    begin, end, counts = DeviceDecoder.begin_steps, DeviceDecoder.end_steps, [0]

    def begins(self: DeviceDecoder, *args: Any) -> int:
        counts[0] = begin(self, *args)
        return counts[0]

    def ends(self: DeviceDecoder) -> None:
        if self.captured.in_turn is not None:
            ended.append((counts[0], int(self.captured.in_turn.is_launched)))
        end(self)

    monkeypatch.setattr(DeviceDecoder, "begin_steps", begins)
    monkeypatch.setattr(DeviceDecoder, "end_steps", ends)
    return ended


def builds_in_a_step(model: Any, policy: str) -> bool:
    """Whether what the policy keeps of a prompt is built in a step, which is by itself."""
    attention = runtime_of(model).attention
    return policy not in STATELESS and not attention.builds_in_prefill(model.device)


def in_single_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only, begin = decoder_of(model), DeviceDecoder.begin_steps

    def begins(self: DeviceDecoder, *args: Any) -> int:
        return 1 if self is only else begin(self, *args)

    monkeypatch.setattr(DeviceDecoder, "begin_steps", begins)


@pytest.mark.parametrize("policy", slow_but(POLICIES, "full", "lychee_cluster", "tidal_decode"))
def test_the_tokens_of_single_steps(
    backend: Any, policy: str, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = in_turn(tiny_folders["llama"], policy, backend), random_tokens(2, 150)
    ended = begun(model, monkeypatch)
    out = greedy(model, tokens, 24)
    # The first token comes from the prompt.
    assert ended == [(7, 0)] * 3 + [(2, 0)] * (not builds_in_a_step(model, policy))
    assert model.offload_stats().decode_tokens == 2 * 23
    monkeypatch.setattr(DeviceDecoder, "begin_steps", lambda *args: 1)
    assert torch.equal(out, greedy(model, tokens, 24))
    check_works(model, load(tiny_folders["llama"], "full", ("cpu", None)))


@pytest.mark.parametrize("in_background", [False, True])
def test_up_to_one_that_corrects(
    backend: Any,
    in_background: bool,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the next ones, or beside some that are by themselves."""
    every = {"cache_correction_every": 10}
    model = in_turn(tiny_folders["llama"], "exact_topk", backend, **every)
    cpu = load(tiny_folders["llama"], small("exact_topk"), ("cpu", None), **every)
    for loaded in (model, cpu):
        correct_in_background(loaded, in_background)
    tokens, ended = random_tokens(1, 150), begun(model, monkeypatch)
    out = greedy(model, tokens, 34)
    assert torch.equal(out, greedy(cpu, tokens, 34))
    if in_background:  # four steps: one for each layer, and before them one for cached tokens
        assert model.offload_stats().corrected_tokens == 20
        assert ended == [(7, 0), (3, 0), (6, 0), (6, 0)]
        return
    assert model.offload_stats().corrected_tokens == 30
    assert ended == [(7, 0), (3, 0)] * 3 + [(3, 0)]


@pytest.mark.parametrize("hot", slow_but([False, True], True))
@pytest.mark.parametrize("policy", HOT)
def test_answers_that_end(
    backend: Any,
    policy: str,
    hot: bool,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that was launched and does not come leaves no trace: the conversation goes on as after
    single steps."""
    folder = tiny_folders["llama"]
    models = [in_turn(folder, policy, backend, hot=hot) for _ in range(2)]
    in_single_steps(models[1], monkeypatch)
    tokens, more = random_tokens(2, 150), random_tokens(2, 9, seed=4)
    free = greedy(models[1], tokens, 20)[:, 150:]
    ended = begun(models[0], monkeypatch)
    for row, place in ((0, 2), (1, 9)):
        options = {"eos_token_id": int(free[row, place]), "pad_token_id": 7}
        caches = [model.new_cache() for model in models]
        outs = [
            greedy(model, tokens, 20, past_key_values=cache, **options)
            for model, cache in zip(models, caches, strict=True)
        ]
        assert torch.equal(*outs)
        assert caches[0].kv_lens == caches[1].kv_lens
        longer = torch.cat([outs[0], more], dim=1)
        again = [
            greedy(model, longer, 12, past_key_values=cache)
            for model, cache in zip(models, caches, strict=True)
        ]
        assert torch.equal(*again)
    assert any(launched for _, launched in ended)


def test_ctrl_c(
    backend: Any, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of seven steps: whoever asked has none of the seven, and neither has the cache."""
    model, tokens = in_turn(tiny_folders["llama"], "lfps", backend), random_tokens(1, 150)
    expected = greedy(model, tokens, 24)
    runtime, cache, calls = runtime_of(model), model.new_cache(), []
    extend = runtime.runner.extend

    def interrupted(*args: Any, prefill: bool, **options: Any) -> torch.Tensor:
        calls.extend([True] * (not prefill))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return extend(*args, prefill=prefill, **options)

    monkeypatch.setattr(runtime.runner, "extend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, tokens, 24, past_key_values=cache)
    assert cache.kv_lens == [150 + builds_in_a_step(model, "lfps")]
    monkeypatch.undo()
    assert torch.equal(greedy(model, tokens, 24), expected)


@pytest.mark.parametrize("first", [1, 12])
def test_numbers_that_are_not_finite_are_told_of_their_layer(
    backend: Any, first: int, tiny_folders: dict[str, Path]
) -> None:
    """In the step in which they come: what was chosen before it stays."""
    model, tokens = in_turn(tiny_folders["qwen2"], "lfps", backend), random_tokens(1, 150)
    chosen: list[int] = []
    expected = greedy(model, tokens, 24)[0, 150:].tolist()

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            chosen.extend(value.flatten().tolist())

        def end(self) -> None:
            raise AssertionError("it has failed")

    seen = tokens[0].tolist()
    place = next(i for i in range(first, 24) if expected[i] not in seen + expected[:i])
    with torch.no_grad():
        model.get_input_embeddings().weight[expected[place]] = torch.nan
    with pytest.raises(RuntimeError, match=r"non-finite"):
        greedy(model, tokens, 24, streamer=Streamer())
    assert chosen[150:] == expected[: place + 1]
    assert model.kv_store.num_sequences == 0


def test_a_fault_that_comes_once(
    backend: Any,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the fifth step: it is said, and tried again."""
    model, tokens = in_turn(tiny_folders["llama"], "lychee_cluster", backend), random_tokens(1, 150)
    expected, begin_step, calls = greedy(model, tokens, 24), Coprocessor.begin_step, []

    def fails(self: Coprocessor, *args: Any) -> None:
        calls.append(True)
        if len(calls) == 5:
            raise CoprocessorError("for a test")
        begin_step(self, *args)

    monkeypatch.setattr(Coprocessor, "begin_step", fails)
    assert torch.equal(greedy(model, tokens, 24), expected)
    assert "a step has failed and is tried again: for a test" in caplog.text


def test_codes_that_are_first_needed_meanwhile(
    backend: Any, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences come past the budget in the middle of seven steps: steps that need codes begin
    when these are there."""
    models = [in_turn(tiny_folders["llama"], "sketch", backend) for _ in range(2)]
    in_single_steps(models[1], monkeypatch)
    load_layer, loaded = ResidentCodes._load_layer, list[tuple[int, int]]()

    def loads(self: ResidentCodes, slot: int, layer_idx: int, state: Any, kv_len: int) -> None:
        loaded.append((layer_idx, kv_len))
        load_layer(self, slot, layer_idx, state, kv_len)

    monkeypatch.setattr(ResidentCodes, "_load_layer", loads)
    for model in models:
        places = np.array(decoder_of(model).placement.places)
        places[1:] = Place.CODES
        decoder_of(model).place(HeadPlacement(places))
    ended = begun(models[0], monkeypatch)
    outs = [greedy(model, random_tokens(1, 60), 40) for model in models]
    assert torch.equal(*outs)
    assert loaded == [(1, 64), (2, 64)] * 2
    assert ended[:2] == [(4, 0), (7, 0)]


def test_no_memory_is_taken_from_the_system_meanwhile(
    backend: Any, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What registers it with the driver may wait for the GPU, which waits for the next step."""
    model = in_turn(tiny_folders["llama"], "lfps", backend)
    decoder, grow, launched = decoder_of(model), PagePool._grow, list[bool]()

    def grows(self: PagePool, missing_pages: int) -> None:
        launched.append(
            decoder.captured.in_turn is not None and decoder.captured.in_turn.is_launched
        )
        grow(self, missing_pages)

    monkeypatch.setattr(PagePool, "_grow", grows)
    monkeypatch.setattr(model.kv_store._pool, "_slab_bytes", 1)
    ended = begun(model, monkeypatch)
    greedy(model, random_tokens(2, 150), 40)
    assert len(launched) > 2
    assert not any(launched)
    assert ended[:5] == [(7, 0)] * 5


@pytest.mark.parametrize("recent_tokens", [1, 2])
def test_a_window_of_the_newest_token_alone(
    backend: Any, recent_tokens: int, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may fetch the row before it at once, from a page that it was not told of yet."""
    options = {"budget_tokens": 64, "dense_layers": 1, "select_layers": (1,)}
    policy = make_policy("tidal_decode", recent_tokens=recent_tokens, **options)
    model = load(tiny_folders["llama"], policy, backend)
    split_steps(model, 1)
    decoder_of(model).place(HeadPlacement.from_text("GG GG gg"))
    ended = begun(model, monkeypatch)
    out = greedy(model, random_tokens(1, 150), 40)
    assert bool(ended) == (recent_tokens > 1)
    monkeypatch.setattr(DeviceDecoder, "begin_steps", lambda *args: 1)
    assert torch.equal(out, greedy(model, random_tokens(1, 150), 40))


def test_draws_of_steps_that_do_not_come(
    backend: Any, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are drawn again: how many steps are begun depends on the time that they take, and what
    follows on the seed alone."""
    models = [in_turn(tiny_folders["llama"], "lfps", backend) for _ in range(2)]
    in_single_steps(models[1], monkeypatch)

    def sampled(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        options |= {"do_sample": True, "top_k": 0, "pad_token_id": 7}
        out = greedy(model, random_tokens(2, 150), 24, **options)
        return out, torch.rand(3, device=model.device)

    free, _ = sampled(models[1])
    ended = begun(models[0], monkeypatch)
    for row, place in ((0, 2), (1, 9)):
        eos = int(free[row, 150 + place])
        for ours, theirs in zip(*(sampled(x, eos_token_id=eos) for x in models), strict=True):
            assert torch.equal(ours, theirs)
    assert any(launched for _, launched in ended)


@pytest.mark.parametrize("line", range(5))
def test_ctrl_c_as_they_end(backend: Any, line: int, tiny_folders: dict[str, Path]) -> None:
    """What was launched does not stay there, for the next step to follow."""
    model, tokens = in_turn(tiny_folders["llama"], "lfps", backend), random_tokens(1, 150)
    expected, lines = greedy(model, tokens, 24), itertools.count()

    def of_line(frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGINT)
        return of_line

    def of_call(frame: Any, event: str, arg: Any) -> Any:
        return of_line if frame.f_code is CapturedSteps.end_steps.__code__ else None

    tracing = sys.gettrace()
    sys.settrace(of_call)
    try:
        with pytest.raises(KeyboardInterrupt):
            greedy(model, tokens, 24, eos_token_id=int(expected[0, 152]))
    finally:
        sys.settrace(tracing)
    assert torch.equal(greedy(model, tokens, 24), expected)
