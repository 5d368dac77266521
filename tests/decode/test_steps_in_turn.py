"""Steps that follow each other with nothing in between, where the CPU attends to some heads: the
GPU begins with each as soon as the CPU has what the last one leaves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, STREAM, check_works, greedy, load, small
from cases.inside import decoder_of, runtime_of, split_steps
from cases.tiny_models import random_tokens

from cpu_ops.coprocessor import Coprocessor, CoprocessorError
from offload.decode.gpu.bursts import BurstLength
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.placement import HeadPlacement, Place

POLICIES = ["full", "lfps", "lychee_cluster", "lychee_decode", "tidal_decode", "sketch", "quest"]
HOT = ["lfps", "lychee_cluster"]


@pytest.fixture(scope="module", params=[INLINE, FLAGS, STREAM, GRAPH])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def sevens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: 7))


def in_turn(folder: Path, policy: str, backend: Any, *, hot: bool = False) -> Any:
    model = load(folder, policy if policy == "full" else small(policy), backend)
    split_steps(model, 1)  # nothing is tried
    if hot:
        decoder = decoder_of(model)
        heads = model.config.num_attention_heads
        placement = decoder.placement.with_hot_rows(decoder._policy, heads)
        places = np.array(placement.places)
        places[0] = Place.GPU  # or nobody could ask for the first rows
        decoder.place(HeadPlacement(places).with_hot_rows(decoder._policy, heads))
    return model


def begun(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of steps in turn as they end: how many were to come, and whether one was launched that does
    not."""
    ended: list[tuple[int, int]] = []
    begin, end, counts = DeviceDecoder.begin_steps, DeviceDecoder.end_steps, [0]

    def begins(self: DeviceDecoder, *args: Any) -> int:
        counts[0] = begin(self, *args)
        return counts[0]

    def ends(self: DeviceDecoder) -> None:
        if self._in_turn is not None:
            ended.append((counts[0], int(self._in_turn.is_launched)))
        end(self)

    monkeypatch.setattr(DeviceDecoder, "begin_steps", begins)
    monkeypatch.setattr(DeviceDecoder, "end_steps", ends)
    return ended


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tokens_of_single_steps(
    backend: Any, policy: str, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = in_turn(tiny_folders["llama"], policy, backend), random_tokens(2, 150)
    ended = begun(model, monkeypatch)
    out = greedy(model, tokens, 24)
    assert ended == [(7, 0), (7, 0), (7, 0), (2, 0)]  # the first token comes from the prompt
    assert model.offload_stats().decode_tokens == 2 * 23
    monkeypatch.setattr(DeviceDecoder, "begin_steps", lambda *args: 1)
    assert torch.equal(out, greedy(model, tokens, 24))
    check_works(model, load(tiny_folders["llama"], "full", ("cpu", None)))


@pytest.mark.parametrize("hot", [False, True])
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
    begin = DeviceDecoder.begin_steps
    single = decoder_of(models[1])
    monkeypatch.setattr(
        DeviceDecoder,
        "begin_steps",
        lambda self, *args: 1 if self is single else begin(self, *args),
    )
    tokens, more = random_tokens(2, 150), random_tokens(2, 9, seed=4)
    free = greedy(models[1], tokens, 20)[:, 150:]
    ended = begun(models[0], monkeypatch)
    for row, place in itertools.product(range(2), (2, 9)):
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
    """In the third of seven steps: whoever asked has none of them, and neither has the cache."""
    model, tokens = in_turn(tiny_folders["llama"], "lfps", backend), random_tokens(1, 150)
    expected = greedy(model, tokens, 24)
    runtime, cache, calls = runtime_of(model), model.new_cache(), []
    choose = runtime._choose

    def interrupted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(True)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return choose(*args, **options)

    monkeypatch.setattr(runtime, "_choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, tokens, 24, past_key_values=cache)
    assert cache.kv_lens == [150]
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
