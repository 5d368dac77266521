"""Requests that join and leave get the tokens that they would get alone."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.answers import alone as answer_alone
from cases.answers import answers, answers_of_step, outputs_of, tokens_of
from cases.inside import allow_host_bytes, runtime_of, states_of
from cases.slowly import slow_but
from cases.tiny_models import byte_tokenizer, random_tokens

from offload import HostBudgetError, OffloadedModel, SessionMiss
from offload.engine.engine import Engine, QueueFullError
from offload.engine.preemption import Preempted
from offload.engine.request import Request, RequestOutput
from offload.engine.runner import Passes
from offload.engine.sampling_params import SamplingParams
from offload.engine.scheduler import Scheduler
from offload.engine.steps import Steps
from offload.policies.registry import available_policies, make_policy
from offload.runtime.runner import Runner
from offload.system.errors import DeviceMemoryError

FEW = {"budget_tokens": 32, "sink_tokens": 4, "recent_tokens": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def alone(model: Any, prompt: list[int], num_tokens: int = 10) -> list[int]:
    return answer_alone(model, prompt, num_tokens)


def prompts_of(*lens: int) -> list[list[int]]:
    return [random_tokens(1, n)[0].tolist() for n in lens]


def load(
    folder: Path, name: str = "full", few: dict[str, int] | None = None, **options: Any
) -> Any:
    policy = make_policy(name)
    names = policy.option_names()
    few = {"budget_tokens": 12} if name == "streaming_llm" else few or FEW
    policy = make_policy(name, **{key: few for key, few in few.items() if key in names})
    return OffloadedModel.from_pretrained(folder, policy=policy, dtype="float32", **options)


def some_prompts() -> list[list[int]]:
    prompts = prompts_of(1, 70, 41, 9, 150, 33, 200)
    return [*prompts, prompts[4][:120] + prompts[0], prompts[4]]  # some share a beginning


def many_prompts() -> list[list[int]]:
    chance = random.Random(0)
    prompts = prompts_of(1, 4000, *(chance.randint(1, 4000) for _ in range(46)))
    shared = [prompts[chance.randrange(48)] for _ in range(16)]
    return prompts + [
        prompt[: chance.randint(1, len(prompt))] + prompts[0] * 9 for prompt in shared
    ]


@pytest.mark.parametrize(
    "make_prompts", [some_prompts, pytest.param(many_prompts, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", slow_but(available_policies(), "full", "lychee_cluster", "lfps", "tidal_decode")
)
def test_a_mix_gets_the_tokens_of_each_alone(
    long_folder: Path, name: str, make_prompts: Callable[[], list[list[int]]]
) -> None:
    model, prompts = load(long_folder, name), make_prompts()
    wanted = {str(i): alone(model, prompt) for i, prompt in enumerate(prompts)}
    engine = Engine(model, max_num_seqs=4, slice_seconds=1e-4)
    order, chance, found = list(wanted), random.Random(0), dict[str, list[int]]()
    chance.shuffle(order)
    for request_id in order:
        engine.add_request(prompts[int(request_id)], GREEDY, request_id)
        for _ in range(chance.randrange(4)):
            answers_of_step(engine, found)
    assert answers(engine, found) == wanted
    assert engine.stats.cached_tokens > 0
    engine.stop()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0


@pytest.mark.parametrize(
    "name", slow_but(available_policies(), "full", "lychee_cluster", "lfps", "tidal_decode")
)
def test_requests_attend_to_what_each_wants(long_folder: Path, name: str) -> None:
    model, prompts = load(long_folder, name), prompts_of(70, 41, 200)
    exact = fewer = load(long_folder)
    wanted = dict[str, list[int]]()
    options: dict[str, dict[str, Any]] = {"": {}, "exact": {"exact": True}}
    if model.policy.selects and name != "streaming_llm":
        options["fewer"] = {"budget_tokens": 20}
        fewer = load(long_folder, name, FEW | {"budget_tokens": 20, "dense_until": 32})
    engine = Engine(model)
    for i, prompt in enumerate(prompts):
        for kind in options:
            of_kind = {"": model, "exact": exact, "fewer": fewer}[kind]
            wanted[f"{i} {kind}"] = alone(of_kind, prompt)
            params = replace(GREEDY, **options[kind])
            engine.add_request(prompt, params, f"{i} {kind}")
    assert answers(engine) == wanted


def test_the_policy_keeps_nothing_of_exact_requests(long_folder: Path) -> None:
    model = load(long_folder, "lychee_cluster", quality_probe=1.0)
    engine, of_steps = Engine(model), runtime_of(model).attention
    engine.add_request(prompts_of(150)[0], replace(GREEDY, exact=True))
    while engine.has_work:
        engine.step()
        assert states_of(model).num_bytes == 0
    assert of_steps.decoded.exact > of_steps.decoded.selecting == 0
    engine.stop()


@pytest.mark.parametrize("name", ["full", "lychee_cluster"])
def test_others_decode_between_the_layers_of_a_slice(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, (short, long) = load(long_folder, name), prompts_of(70, 200)
    wanted = {"decodes": alone(model, short, 30), "is read": alone(model, long)}
    engine, found, during = Engine(model), dict[str, list[int]](), list[int]()
    read = Passes.read

    def counting(self: Passes, *arguments: Any, **options: Any) -> Any:
        before = engine.stats.decode_steps
        hidden = read(self, *arguments, **options)
        during.append(engine.stats.decode_steps - before)
        return hidden

    monkeypatch.setattr(Scheduler, "owes", lambda self, seconds: True)
    engine.add_request(short, replace(GREEDY, max_tokens=30), "decodes")
    while not engine.stats.decode_steps:
        answers_of_step(engine, found)
    monkeypatch.setattr(Passes, "read", counting)
    engine.add_request(long, GREEDY, "is read")
    assert answers(engine, found) == wanted
    assert during[0] == 1 + model.config.num_hidden_layers
    engine.stop()
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("name", ["full", "lychee_cluster"])
def test_short_prompts_are_read_between_the_layers_of_a_slice(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that comes then is answered first, also where it is cancelled or does not fit a part."""
    model, lens = load(long_folder, name), (40, 200, 25, 30)
    short, long, other, leaves = (random_tokens(1, n, seed=n)[0].tolist() for n in lens)
    wanted = {
        "short": alone(model, short),
        "long": alone(model, long),
        "other": alone(model, other),
    }
    engine, found, layers = Engine(model, prefix_caching=False), dict[str, list[int]](), [0]
    monkeypatch.setitem(engine._steps.scheduler._least, "alone", 32)
    engine._steps.scheduler._sizes["alone"] = 200
    pause, order = Steps._pause, list[str]()
    coming = {2: ("short", short), 3: ("leaves", leaves), 5: ("other", other)}

    def arriving(self: Steps, own: list[Request]) -> None:
        layers[0] += 1
        if layers[0] in coming:
            engine.add_request(coming[layers[0]][1], GREEDY, coming[layers[0]][0], note)
        if layers[0] == 4:
            engine.cancel("leaves")
        pause(self, own)

    def note(output: RequestOutput) -> None:
        if output.tokens and output.request_id not in order:
            order.append(output.request_id)

    monkeypatch.setattr(Steps, "_pause", arriving)
    monkeypatch.setattr(Steps, "_slice_seconds", lambda self: 1.0)  # however busy the machine is
    engine.add_request(long, GREEDY, "long", note)
    assert answers(engine, found) == wanted | {"leaves": found["leaves"]}
    assert order.index("short") < order.index("long")
    engine.stop()
    assert model.kv_store.num_sequences == 0 == model.kv_store.host_bytes_used


@pytest.mark.parametrize("callback", ["is_ready", "on_output"])
def test_a_callback_fails_between_the_layers_of_a_slice(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, callback: str
) -> None:
    """Its request ends, and not the one that is read."""
    model, (short, long) = load(long_folder), prompts_of(70, 200)
    wanted, is_reading, reads = alone(model, long), False, list[bool]()
    read = Passes.read

    def noting(self: Passes, *arguments: Any, **options: Any) -> Any:
        nonlocal is_reading
        is_reading = bool(reads)  # not of the first prompt
        try:
            return read(self, *arguments, **options)
        finally:
            is_reading = False
            reads.append(True)

    def fails(*output: RequestOutput) -> bool:
        if is_reading:
            raise ArithmeticError("in a slice")
        return True

    engine, options = Engine(model), {callback: fails}
    monkeypatch.setattr(Passes, "read", noting)
    monkeypatch.setattr(Scheduler, "owes", lambda self, seconds: True)
    engine.add_request(short, replace(GREEDY, max_tokens=60), "decodes", **options)
    while not engine.stats.decode_steps:
        engine.step()
    reads[:] = [True]
    engine.add_request(long, GREEDY, "is read")
    outputs = outputs_of(engine)
    of_short = [output for output in outputs if output.request_id == "decodes"]
    assert isinstance(of_short[-1].error, ArithmeticError)
    of_long = [output for output in outputs if output.request_id == "is read"]
    assert tokens_of(of_long) == wanted
    assert of_long[-1].error is None
    engine.stop()
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("name", ["full", "lychee_cluster"])
def test_who_is_cancelled_leaves_between_the_layers_of_a_slice(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its pages are free at once, and the others' answers are what they were alone."""
    model, (short, long, other) = load(long_folder, name), prompts_of(70, 200, 90)
    wanted = {"decodes": alone(model, short, 30), "comes then": alone(model, other)}
    engine, found, layers = Engine(model, prefix_caching=False), dict[str, list[int]](), [0]
    pause = Steps._pause

    def cancelling(self: Steps, own: list[Request]) -> None:
        layers[0] += 1
        if layers[0] == 1:
            engine.cancel("is read")
        pause(self, own)

    engine.add_request(short, replace(GREEDY, max_tokens=30), "decodes")
    while not engine.stats.decode_steps:
        answers_of_step(engine, found)
    bytes_before = model.kv_store.host_bytes_used
    engine.add_request(long, GREEDY, "is read")
    monkeypatch.setattr(Steps, "_pause", cancelling)
    while not layers[0]:
        answers_of_step(engine, found)
    assert layers[0] == 1 < model.config.num_hidden_layers
    assert found.pop("is read") == []
    assert engine.stats.cancelled == 1
    assert engine.stats.prompt_tokens == len(short)
    assert model.kv_store.num_sequences == 1
    assert model.kv_store.host_bytes_used == bytes_before
    engine.add_request(other, GREEDY, "comes then")
    assert answers(engine, found) == wanted
    engine.stop()
    assert model.kv_store.num_sequences == 0 == model.kv_store.host_bytes_used


def test_who_is_read_beside_others_is_cancelled_behind_the_slice(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that decodes, or waits, is so at once; nothing of the others is read twice."""
    model, lens = load(long_folder), (70, 9, 7, 50)
    short, one, two, three = (random_tokens(1, n, seed=n)[0].tolist() for n in lens)
    wanted, pause, layers = {"stays": alone(model, two)}, Steps._pause, [0]
    engine, found = Engine(model, max_num_seqs=3), dict[str, list[int]]()
    cancelled = dict[str, int]()

    def cancelling(self: Steps, own: list[Request]) -> None:
        layers[0] += 1
        if layers[0] == 1:
            for name in ("decodes", "leaves", "waits"):
                engine.cancel(name)
        pause(self, own)

    def note(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            cancelled[output.request_id] = layers[0]

    engine.add_request(short, replace(GREEDY, max_tokens=60), "decodes", note)
    while not engine.stats.decode_steps:
        engine.step()
    num_read = engine.stats.prompt_tokens
    monkeypatch.setattr(Steps, "_pause", cancelling)
    engine.add_request(one, GREEDY, "leaves", note)
    engine.add_request(two, GREEDY, "stays")
    engine.add_request(three, GREEDY, "waits", note)
    answers(engine, found)
    assert found["stays"] == wanted["stays"]
    assert cancelled == {"decodes": 1, "waits": 1, "leaves": 1 + model.config.num_hidden_layers}
    assert engine.stats.prompt_tokens == num_read + len(one) + len(two)
    engine.stop()
    assert model.kv_store.num_sequences == 0


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path]) -> Any:
    return load(tiny_folders["llama"])


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    made = Engine(model, slice_seconds=1e-4)
    yield made
    made.stop()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0


def results(engine: Engine) -> dict[str, RequestOutput]:
    """The last output of each request."""
    return {output.request_id: output for output in outputs_of(engine)}


def test_a_request_that_fails_ends_alone(model: Any, engine: Engine) -> None:
    prompt, other = prompts_of(60, 40)
    wanted = alone(model, other)

    def nan(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.fill_(torch.nan)

    def wrong_shape(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[1:]

    def fails(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("in a processor") if len(ids) > 62 else None
        return logits

    def callback(output: RequestOutput) -> None:
        if output.tokens:
            raise OSError("nobody listens")

    for name, processor in (("nan", nan), ("shape", wrong_shape), ("key", fails)):
        options = {"logits_processors": (processor,), "temperature": 0.0, "max_tokens": 10}
        engine.add_request(prompt, SamplingParams(**options), name)
    engine.add_request(prompt, GREEDY, "callback", callback)
    engine.add_request(other, GREEDY, "good")
    outputs = outputs_of(engine)
    errors = {output.request_id: output.error for output in outputs if output.error}
    assert tokens_of(outputs, "good") == wanted
    assert "NaN" in str(errors["nan"])
    assert "shape" in str(errors["shape"])
    assert isinstance(errors["callback"], OSError)
    assert engine.stats.failed == 4


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_slice_that_finds_no_room_on_a_gpu_is_read_once_more(
    num_failures: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that decode in its middle may have taken the room."""
    read, failures = Passes.read, [0]

    def failing(self: Passes, parts: Any, **options: Any) -> Any:
        if any(self.runtime.store.kv_len(seq) >= 32 for seq, _ in parts):
            failures[0] += 1
            if failures[0] <= num_failures:
                raise DeviceMemoryError("for a test")
        return read(self, parts, **options)

    engine = Engine(model, slice_seconds=1e-4, prefix_caching=False)
    prompts = prompts_of(20, 90)
    wanted = [alone(model, prompt) for prompt in prompts]
    engine.add_request(prompts[0], replace(GREEDY, max_tokens=200), "0")
    engine.step()
    monkeypatch.setattr(Passes, "read", failing)
    engine.add_request(prompts[1], GREEDY, "1")
    outputs = outputs_of(engine)
    engine.stop()
    assert tokens_of(outputs, "0")[: len(wanted[0])] == wanted[0]
    assert tokens_of(outputs, "1") == (wanted[1] if num_failures == 1 else [])
    assert [x.request_id for x in outputs if x.error] == ["1"] * (num_failures - 1)


def test_what_a_decoder_is_told_to_expect(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that came at once; behind them as many again, unless they are much longer, or one comes
    alone for the second time. Where that has no room, those alone that are there."""
    told, most = list[int](), 8

    def begin(count: int, kv_len: int, read_tokens: int) -> None:
        told.append(count)
        if count > most:
            raise DeviceMemoryError("for a test")

    monkeypatch.setattr(runtime_of(model).decoder, "begin_generation", begin)
    engine = Engine(model, prefix_caching=False)

    def expected(*lens: int) -> list[int]:
        told.clear()
        for i, prompt in enumerate(prompts_of(*lens)):
            engine.add_request(prompt, GREEDY, f"{i}")
        assert not any(output.error for output in outputs_of(engine))
        return [*told]

    assert expected(50, 55, 60, 40, 50) == [8]
    assert expected(62, 10) == [8]
    assert expected(100) == [1]  # much longer
    assert expected(30) == [1]
    assert expected(35, 40, 45) == [4]
    assert expected(40) == []
    most = 2
    assert expected(30, 90, 90)[:4] == [1, 4, 2, 4]
    engine.stop()


def test_no_more_together_than_the_decoder_says(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait; short ones do not count."""
    decoder, running = runtime_of(model).decoder, list[list[int]]()
    monkeypatch.setattr(decoder, "most_together", lambda most, kv_len, reads: min(most, 2))
    engine, prompts = Engine(model, prefix_caching=False), prompts_of(90, 100, 95, 91, 20, 21)
    wanted = [alone(model, prompt) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, GREEDY, f"{i}")
    found: dict[str, list[int]] = {}
    while engine.has_work:
        answers_of_step(engine, found)
        running.append([len(request.prompt) for request in engine._steps.scheduler._admitted])
    engine.stop()
    assert [found[f"{i}"] for i in range(len(prompts))] == wanted
    assert max(sum(n > 50 for n in lens) for lens in running) == 2
    assert max(map(len, running)) == 4


def test_a_longer_one_behind_many_that_has_room_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none for as many as before of its length: that is no error of its."""

    def begin(count: int, kv_len: int, read_tokens: int) -> None:
        if count * kv_len > 4 * 62:
            raise DeviceMemoryError("for a test")

    monkeypatch.setattr(runtime_of(model).decoder, "begin_generation", begin)
    engine = Engine(model, prefix_caching=False)
    for lens in ([50, 50, 50, 50], [60]):
        for i, prompt in enumerate(prompts_of(*lens)):
            engine.add_request(prompt, GREEDY, f"{i}")
        assert not any(output.error for output in outputs_of(engine))
    engine.stop()


def test_a_short_one_does_not_wait_for_too_many_long_ones(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not too many when they came."""
    most = 3
    monkeypatch.setattr(runtime_of(model).decoder, "most_together", lambda *sizes: most)
    engine, ended = Engine(model, prefix_caching=False, read_share=0.99), list[str]()
    for i, prompt in enumerate(prompts_of(90, 91, 92)):
        engine.add_request(prompt, replace(GREEDY, max_tokens=60), f"{i}")
    engine.step()
    assert engine._steps.scheduler.num_running == most
    most = 2
    engine.add_request(prompts_of(9)[0], replace(GREEDY, max_tokens=1), "short")
    while engine.has_work:
        ended += [x.request_id for x in engine.step() if x.finish_reason]
    assert ended[0] == "short"
    engine.stop()


def test_a_step_that_fails_is_done_request_by_request(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(30, 50)
    wanted = alone(model, prompts[0])
    extend = Runner.extend

    def failing(self: Runner, this: Any, *args: Any, prefill: bool, **options: Any) -> Any:
        if not prefill and any(self.sequences.store.kv_len(seq) > 52 for seq in this.seqs):
            raise RuntimeError("not finite")
        return extend(self, this, *args, prefill=prefill, **options)

    monkeypatch.setattr(Runner, "extend", failing)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, GREEDY, str(number))
    outputs = outputs_of(engine)
    failed = [output.request_id for output in outputs if output.error]
    assert (tokens_of(outputs, "0"), failed) == (wanted, ["1"])


def test_slices_are_as_short_as_those_of_a_prefill(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one, too: a decoder leaves room for no more."""
    model, read = load(tiny_folders["llama"], prefill_slice_tokens=8), []
    was_read = Scheduler.was_read

    def note(self: Scheduler, num_tokens: int, *seconds: float) -> None:
        read.append(num_tokens)
        was_read(self, num_tokens, *seconds)

    monkeypatch.setattr(Scheduler, "was_read", note)
    engine = Engine(model)
    engine.add_request(prompts_of(41)[0], GREEDY, "one")
    answers(engine)
    assert read == [8] * 5 + [1]


def test_bad_requests(engine: Engine, tiny_folders: dict[str, Path]) -> None:
    cases: tuple[tuple[Any, Any, str], ...] = (
        ([], GREEDY, "empty"),
        ("12", GREEDY, "token ids of one sequence, .*, got str"),
        ([1.7], GREEDY, "token ids of one sequence, .*, got list"),
        (torch.ones(1, 2, dtype=torch.int64), GREEDY, "one sequence, .*, got Tensor"),
        ({"input_ids": [1]}, GREEDY, "token ids of one sequence, .*, got dict"),
        ([1], {"max_tokens": 3}, "must be SamplingParams, got dict"),
        ([1, 10**6], GREEDY, "token id 1000000 is outside"),
        ([1], SamplingParams(stop=("x",)), "need a tokenizer"),
        ([1] * 9000, GREEDY, "exceeds"),
        ([1], SamplingParams(budget_tokens=64), "policy 'full' attends to all"),
    )
    for prompt, params, words in cases:
        with pytest.raises(ValueError, match=words):
            engine.add_request(prompt, params)
    for options, words in (
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": ("",)}, "stop"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens=3 exceeds"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"exact": True, "budget_tokens": 64}, "exclude each other"),
        ({"exact": "no"}, "exact must be True or False, got 'no'"),
        ({"budget_tokens": 20.5}, "budget_tokens must be an integer, got 20.5"),
        ({"max_tokens": 10.5}, "max_tokens must be an integer, got 10.5"),
        ({"max_tokens": "5"}, "max_tokens must be an integer, got '5'"),
        ({"top_k": None}, "top_k must be an integer, got None"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop": [5]}, r"stop must be strings, got \(5,\)"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be an integer, got 'a'"),
        ({"logit_bias": [1]}, r"logit_bias must be a dict .*, got \[1\]"),
        ({"logit_bias": {"5": 1}}, "logit_bias must be an integer, got '5'"),
        ({"logit_bias": {5: "1"}}, "logit_bias of token 5 .*, got '1'"),
        ({"logits_processors": len}, "logits_processors must be a list"),
        ({"logits_processors": [5]}, "logits_processors must be callable"),
        ({"budget_tokens": 0}, "budget_tokens must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            SamplingParams(**options)
    engine.add_request([1, 2], GREEDY, "twice")
    with pytest.raises(ValueError, match="'twice' is in use"):
        engine.add_request([1, 2], GREEDY, "twice")
    with pytest.raises(ValueError, match="max_num_seqs"):
        Engine(engine.model, max_num_seqs=0)
    sparse = Engine(load(tiny_folders["llama"], "quest"))
    for wrong in (1, 11, 33):
        with pytest.raises(ValueError, match=rf"in \[12, 32\] .*, got {wrong}; exact=True"):
            sparse.add_request([1], SamplingParams(budget_tokens=wrong))
    bounded = load(tiny_folders["llama"], "streaming_llm", host_bytes_per_sequence="1MiB")
    with pytest.raises(NotImplementedError, match="host_bytes_per_sequence"):
        Engine(bounded)


def test_requests_wait_for_a_place_and_then_for_nothing(model: Any) -> None:
    engine = Engine(model, max_num_seqs=2, max_queued=1)
    for number in range(3):
        engine.add_request([1, 2, 3], GREEDY, str(number))
    with pytest.raises(QueueFullError, match="1 requests wait already, and max_queued is 1"):
        engine.add_request([1, 2, 3], GREEDY)
    assert {r.finish_reason for r in results(engine).values()} == {"length"}
    engine.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        engine.add_request([1], GREEDY)


def test_requests_wait_for_memory(tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders["llama"], page_tokens=16)
    store, prompts = model.kv_store, [random_tokens(1, 100, seed=n)[0].tolist() for n in range(6)]
    wanted = {str(n): alone(model, prompt, 20) for n, prompt in enumerate(prompts)}
    allow_host_bytes(model, int(2.5 * 128 * store.token_bytes))
    engine, most = Engine(model), 0
    params = replace(GREEDY, max_tokens=20)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, params, str(number))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        answers_of_step(engine, found)
        most = max(most, engine.num_running)
        assert store.host_bytes_used <= store.host_budget_bytes
    assert (found, most) == (wanted, 2)
    with pytest.raises(HostBudgetError, match="of answer need"):
        engine.add_request([1] * 400, params)
    engine.stop()


def test_it_says_what_it_has_room_for(
    tiny_folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tiny_folders["llama"])
    with caplog.at_level("INFO", "offload.engine"):
        Engine(model)
        allow_host_bytes(model, model.kv_store.page_bytes * model.kv_store.num_page_rows)
        few = Engine(model)
        allow_host_bytes(model, model.kv_store.page_bytes * model.kv_store.num_page_rows - 1)
        Engine(model)
        allow_host_bytes(model, 2 * 2 * model.kv_store.page_bytes * model.kv_store.num_page_rows)
        two = Engine(model)
        allow_host_bytes(model, model.kv_store.page_bytes * model.kv_store.num_page_rows)
    says, warns, nothing, of_two = (record.getMessage() for record in caplog.records)
    assert "have room for 32 requests of all 512 tokens at a time" in says  # max_num_seqs
    assert "have room for 0 of the context's 512 tokens" in nothing
    assert "have room for 2 requests of all 512 tokens at a time" in of_two
    two.stop()
    assert f"have room for {model.kv_store.page_tokens:,} of the context's 512 tokens" in warns
    few.add_request([1], GREEDY)
    with pytest.raises(HostBudgetError):
        few.add_request([1] * model.kv_store.page_tokens, GREEDY)
    few.stop()


@pytest.mark.parametrize("num_rounds", [20, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["full", "lychee_cluster"])
def test_cancelling_gives_every_byte_back(
    tiny_folders: dict[str, Path], name: str, num_rounds: int
) -> None:
    model, chance = load(tiny_folders["llama"], name), random.Random(1)
    engine = Engine(model, max_num_seqs=3, slice_seconds=1e-4, prefix_caching=False)
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (20, 90, 160)]
    wanted = [alone(model, prompt) for prompt in prompts]
    for _ in range(num_rounds):
        ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        for _ in range(chance.randrange(12)):
            engine.step()
        kept = chance.randrange(3)
        for i in (i for i in range(3) if i != kept):
            engine.cancel(ids[i])
        results(engine)
        assert model.kv_store.num_sequences == 0 == model.kv_store.host_bytes_used
        assert states_of(model).held_bytes == 0
    assert engine.stats.cancelled > num_rounds
    engine.add_request(prompts[1], GREEDY, "last")
    assert answers(engine)["last"] == wanted[1]


def test_a_thread_answers_and_stops(model: Any) -> None:
    prompts = prompts_of(20, 90, 33)
    wanted = [alone(model, prompt) for prompt in prompts]
    found: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    ended: list[str | None] = []

    def note(output: RequestOutput) -> None:
        found[output.request_id] += [chosen.token for chosen in output.tokens]
        ended.extend([output.finish_reason] if output.finish_reason else [])

    with Engine(model) as engine:
        for number, prompt in enumerate(prompts):
            engine.add_request(prompt, GREEDY, str(number), note)
    assert [*found.values()] == wanted
    engine = Engine(model).start()
    engine.add_request(prompts[1], replace(GREEDY, max_tokens=400), "0", note)
    engine.stop()
    assert ended == ["length"] * 3 + ["cancelled"]
    assert model.kv_store.num_sequences == 0


def test_a_shared_beginning_is_read_once(model: Any) -> None:
    engine, shared = Engine(model), prompts_of(200)[0]
    prompts = [shared + random_tokens(1, 5 + n, seed=n + 1)[0].tolist() for n in range(6)]
    wanted = {str(n): alone(model, prompt) for n, prompt in enumerate(prompts)}
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, GREEDY, str(number))
    assert answers(engine) == wanted
    assert engine.stats.prompt_tokens <= 200 + sum(5 + n for n in range(6))
    assert engine.stats.cached_tokens >= 5 * 200
    engine.stop()


@pytest.mark.parametrize(("dense_until", "cached"), [(512, 150 + 9), (80, 150)])
def test_what_was_decoded_exactly_is_shared(
    dense_until: int, cached: int, tiny_folders: dict[str, Path]
) -> None:
    """A policy that selects attends to all of a sequence up to `dense_until`."""
    few = FEW | {"dense_until": dense_until}
    engine = Engine(load(tiny_folders["llama"], "exact_topk", few))
    prompt = prompts_of(150)[0]
    engine.add_request(prompt, GREEDY, "first")
    answer = answers(engine)["first"]
    engine.add_request([*prompt, *answer, 7], GREEDY, "second")
    answers(engine)
    assert engine.stats.cached_tokens == cached
    engine.stop()


def test_the_same_seed_gives_the_same_answer_whatever_runs_beside(model: Any) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=7, max_tokens=12)
    (prompt,) = prompts_of(40)
    engine = Engine(model)
    engine.add_request(prompt, params, "alone")
    first = answers(engine)["alone"]
    for number, other in enumerate(prompts_of(70, 9)):
        engine.add_request(other, replace(params, seed=None), str(number))
    engine.add_request(prompt, params, "beside")
    assert answers(engine)["beside"] == first
    engine.stop()


def test_a_fault_of_the_engine_itself_ends_all_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, fits: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("offload.engine.scheduler.Scheduler.admit", fails)
    errors: list[BaseException | None] = []
    engine = Engine(model)
    for _ in range(3):
        engine.add_request([1, 2, 3], GREEDY, None, lambda output: errors.append(output.error))
    engine.start().stop(finish=True, timeout=20)
    assert [type(error) for error in errors] == [ZeroDivisionError] * 3
    with pytest.raises(RuntimeError, match="the engine failed: a bug"):
        engine.add_request([1], GREEDY)


def test_ctrl_c_comes_behind_a_step(model: Any, engine: Engine) -> None:
    prompts, interrupts = prompts_of(60, 40), 0
    wanted = {str(n): alone(model, prompt) for n, prompt in enumerate(prompts)}
    found: dict[str, list[int]] = {}

    def note(output: RequestOutput) -> None:
        found.setdefault(output.request_id, []).extend(c.token for c in output.tokens)
        signal.raise_signal(signal.SIGINT)

    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, GREEDY, str(number), note)
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert found == wanted
    assert interrupts > 10


@pytest.mark.parametrize("name", slow_but(["full", "lychee_cluster", "quest"], "lychee_cluster"))
def test_requests_that_make_room_go_on_with_the_same_tokens(
    tiny_folders: dict[str, Path], name: str
) -> None:
    model = load(tiny_folders["llama"], name, page_tokens=16)
    store, prompts = model.kv_store, [random_tokens(1, 60, seed=n)[0].tolist() for n in range(6)]
    params = [replace(GREEDY, max_tokens=200, exact=n == 1) for n in range(6)]
    if name != "full":
        params[2].budget_tokens = 20
    wanted = {str(n): alone(model, prompt, 200) for n, prompt in enumerate(prompts)}
    for number in (1, 2):  # which attend to something else than the model does
        engine = Engine(model, prefix_caching=False)
        engine.add_request(prompts[number], params[number], str(number))
        found = answers(engine)
        assert name == "full" or found[str(number)] != wanted[str(number)]
        wanted |= found
    room = 3 * 272 * store.token_bytes + 3 * states_of(model).bytes.most_at(260)
    allow_host_bytes(model, room)
    engine = Engine(model, overcommit=8.0)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, params[number], str(number))
    assert answers(engine) == wanted
    assert engine.stats.preempted > 0
    engine.stop()
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("full", 1.15),  # decoding comes to need more
        ("full", 1.3),  # reading does
        ("lychee_cluster", 1.3),
        pytest.param("lfps", 1.3, marks=pytest.mark.slow),
    ],
)
def test_what_is_read_makes_room_for_one_that_runs(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, factor: float
) -> None:
    model = load(long_folder, name, page_tokens=16)
    decoded, read = prompts_of(20, 700)
    wanted = {"decodes": alone(model, decoded, 500), "is read": alone(model, read)}
    turns = itertools.cycle([True] * 8 + [False])  # so many steps, then a slice
    monkeypatch.setattr("offload.engine.scheduler._SHARE", 0.0)
    monkeypatch.setattr(Scheduler, "decodes_first", property(lambda self: next(turns)))
    monkeypatch.setattr(Scheduler, "owes", lambda self, seconds: False)
    engine = Engine(model, slice_seconds=1e-4, overcommit=16.0, prefix_caching=False)
    most = Engine(model)._steps.admission.most_bytes(709)
    allow_host_bytes(model, int(factor * most))
    engine.add_request(decoded, replace(GREEDY, max_tokens=500), "decodes")
    found = dict[str, list[int]]()
    while not found:
        answers_of_step(engine, found)
    engine.add_request(read, GREEDY, "is read")
    assert answers(engine, found) == wanted
    assert engine.stats.preempted > 0
    engine.stop()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0


def test_the_youngest_makes_room_behind_its_slice(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the layers of a slice the older one, which decodes, waits, and not on disk."""
    decoded, read = prompts_of(20, 100)
    wanted = {"decodes": alone(model, decoded, 100), "is read": alone(model, read)}
    engine = Engine(model, prefix_caching=False)
    moved, failed_in_slice = list[str | None](), list[bool]()
    preempt, choose = Scheduler.preempt, Passes.choose

    def preempts(self: Scheduler, kept: Sequence[Request] = ()) -> Request | None:
        request = preempt(self, kept)
        moved.append(request and request.request_id)
        return request

    def chooses(self: Passes, *arguments: Any) -> None:
        in_slice = bool(engine._steps._in_slice)
        if (in_slice or failed_in_slice) and not any(moved):
            failed_in_slice.append(in_slice)
            raise HostBudgetError("for a test")
        choose(self, *arguments)

    monkeypatch.setattr(Scheduler, "owes", lambda self, seconds: bool(self.running))
    monkeypatch.setattr(Scheduler, "preempt", preempts)
    monkeypatch.setattr(Passes, "choose", chooses)
    engine.add_request(decoded, replace(GREEDY, max_tokens=100), "decodes")
    found = dict[str, list[int]]()
    while not found:
        answers_of_step(engine, found)
    engine.add_request(read, GREEDY, "is read")
    assert answers(engine, found) == wanted
    num_waits = len(moved) - 1
    assert num_waits > 0
    assert failed_in_slice == [True] * num_waits + [False]
    assert moved == [None] * num_waits + ["is read"]
    engine.stop()


def test_what_could_not_be_saved_is_not_read_on(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of a slice, which was to make room for the first."""
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    wanted, read, failures = alone(model, prompts[0]), Passes.read, [RuntimeError, HostBudgetError]

    def reads(self: Passes, *arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop(0)("for a test")
        return read(self, *arguments, **options)

    def fails(self: Preempted, request: Request) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Passes, "read", reads)
    monkeypatch.setattr(Preempted, "save", fails)
    engine = Engine(model, prefix_caching=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, GREEDY, str(i))
    outputs = outputs_of(engine)
    assert tokens_of(outputs) == wanted
    (error,) = (output.error for output in outputs if output.error is not None)
    assert str(error) == "disk full"
    assert model.kv_store.num_sequences == 0


def test_what_comes_back_makes_room_for_those_that_run(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.system.checked_file._PIECE_BYTES", 256)
    monkeypatch.setattr("offload.engine.steps._RESTORING_SECONDS", 0.0)
    model = load(tiny_folders["llama"], page_tokens=16)
    prompts = [random_tokens(1, 60, seed=n)[0].tolist() for n in range(3)]
    lens = (100, 200, 200)  # when the first has ended, the last comes back
    wanted = {str(n): alone(model, prompts[n], lens[n]) for n in range(3)}
    allow_host_bytes(model, 320 * model.kv_store.token_bytes)
    engine = Engine(model, overcommit=8.0, prefix_caching=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, replace(GREEDY, max_tokens=lens[number]), str(number))
    assert answers(engine) == wanted
    assert engine.stats.preempted > 0
    engine.stop()
    assert model.kv_store.num_sequences == 0


def test_what_was_preempted_and_is_damaged_fails_at_once(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Preempted.save

    def damaged(self: Preempted, request: Request) -> None:
        save(self, request)
        os.truncate(self._path(request), 5000)

    monkeypatch.setattr(Preempted, "save", damaged)
    monkeypatch.setattr("offload.engine.preemption._ON_DISK", "/proc")  # in which nobody writes
    monkeypatch.delenv("TMPDIR", raising=False)
    model = load(tiny_folders["llama"], page_tokens=16)
    allow_host_bytes(model, 272 * model.kv_store.token_bytes)
    engine = Engine(model, overcommit=8.0, prefix_caching=False)
    engine.add_request([1, 2, 3], replace(GREEDY, max_tokens=250), "first")
    engine.add_request([1, 2, 3], replace(GREEDY, max_tokens=200), "second")
    ends = list[RequestOutput]()
    while engine.has_work:
        ends += [output for output in engine.step() if output.finish_reason]
        if engine.stats.preempted and engine.has_work and len(ends) == 0:
            allow_host_bytes(model, 1000 * model.kv_store.token_bytes)  # it would fit
    assert [(end.request_id, end.finish_reason) for end in ends] == [
        ("second", "error"),
        ("first", "length"),
    ]
    assert isinstance(ends[0].error, SessionMiss)
    engine.stop()


def test_a_request_without_a_maximum_takes_what_there_is(tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders["llama"], page_tokens=16)
    allow_host_bytes(model, 6 * 16 * model.kv_store.token_bytes)
    engine = Engine(model)
    for number in range(2):
        engine.add_request([1, 2, 3 + number], replace(GREEDY, max_tokens=None), str(number))
    tokens = answers(engine)
    assert [len(of_request) for of_request in tokens.values()] == [94, 94]
    engine.stop()


def test_stop_in_a_callback_ends_the_thread(model: Any) -> None:
    engine = Engine(model)
    reasons = []

    def note(output: RequestOutput) -> None:
        if output.tokens and not reasons:
            engine.stop()
        reasons.extend([output.finish_reason] if output.finish_reason else [])

    engine.add_request([1, 2, 3], replace(GREEDY, max_tokens=300), None, note)
    engine.start()
    engine._thread.join(20)
    assert not engine._thread.is_alive()
    assert reasons == ["cancelled"]
    assert model.kv_store.num_sequences == 0


def test_an_error_in_the_text_ends_one_request(tiny_folders: dict[str, Path]) -> None:
    engine = Engine(load(tiny_folders["llama"]), byte_tokenizer())

    def fails(token: int, **options: Any) -> str:
        raise ValueError("no text")

    engine.add_request([1, 2, 3], GREEDY, "good")
    bad = engine.add_request([1, 2, 4], GREEDY, "bad")
    engine._requests[bad].text.add = fails
    last = results(engine)
    assert last["good"].finish_reason == "length"
    assert str(last["bad"].error) == "no text"
    engine.stop()


def test_params_are_taken_as_others_write_them() -> None:
    params = SamplingParams(stop="ab", top_k=-1, temperature=1e-40)
    assert (params.stop, params.top_k, params.temperature) == (("ab",), 0, 0.0)
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(max_tokens=np.int64(5), stop_token_ids=torch.tensor([3])) == (
        SamplingParams(max_tokens=5, stop_token_ids=(3,))
    )
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={1: 1e300})


def test_a_callback_that_exits_leaves_nobody_waiting(model: Any) -> None:
    """It ends the engine's thread, as it would any other."""
    ended, told = list[RequestOutput](), threading.Event()

    def exits(output: RequestOutput) -> None:
        raise SystemExit("for a test")

    def notes(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            ended.append(output)
            told.set()

    engine = Engine(model)
    engine.add_request([1, 2, 3], GREEDY, "exits", exits)
    engine.add_request([1, 2, 3], replace(GREEDY, max_tokens=400), "waits", notes)
    engine.start()
    assert told.wait(20)
    assert isinstance(ended[0].error, SystemExit)
    engine.stop()
    assert isinstance(engine.failure, SystemExit)
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0


def test_the_last_callback_fails_before_a_step_that_failed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token came before the failure, and is told behind it: nobody is left to try again."""
    engine, choose = Engine(model, prefix_caching=False), Passes.choose

    def two_steps(self: Passes, *rows: Any) -> None:
        *of_rows, _, take = rows
        choose(self, *of_rows, 1, take)
        raise HostBudgetError("for a test")

    def fails(output: RequestOutput) -> None:
        if output.tokens and engine.stats.answer_tokens == 2:
            raise ValueError("for a test")

    monkeypatch.setattr(Passes, "choose", two_steps)
    engine.add_request(prompts_of(30)[0], GREEDY, "0", on_output=fails)
    assert isinstance(outputs_of(engine)[-1].error, ValueError)
    assert engine.stats.failed == 1
    engine.stop()


def test_a_fault_at_the_end_of_a_request_ends_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told = Engine(model, prefix_caching=False), list[RequestOutput]()
    end, faults = engine._steps.prefixes.end, [RuntimeError("for a test")]

    def failing(request: Any) -> None:
        if faults:
            raise faults.pop()
        end(request)

    monkeypatch.setattr(engine._steps.prefixes, "end", failing)
    engine.add_request(prompts_of(30)[0], GREEDY, "0", on_output=told.append)
    engine.start()
    engine.stop(finish=True, timeout=60.0)
    assert str(told[-1].error) == str(engine.failure) == "for a test"
    assert not engine.has_work


@pytest.mark.parametrize("what", ["a gpu", "no room"])
def test_a_prompt_waits_for_the_slice_that_is_read(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """On a GPU, whose placements requests change as they are admitted, and where the youngest, whom
    the slice reads, would have to make room."""
    model, (long,) = load(long_folder), prompts_of(200)
    short = random_tokens(1, 20, seed=1)[0].tolist()
    wanted = {"short": alone(model, short), "long": alone(model, long)}
    engine, found, order = Engine(model, prefix_caching=False), dict[str, list[int]](), list[str]()
    scheduler, pause, fits, read = engine._steps.scheduler, Steps._pause, Steps._fits, Passes.read
    scheduler._sizes["alone"], scheduler._reads_on_gpu = 200, what == "a gpu"

    def arriving(self: Steps, own: list[Request]) -> None:
        if not order:
            order.append("short")
            engine.add_request(short, GREEDY, "short")
            engine._requests["short"].arrived = 0.0  # as one that made room for others before
        pause(self, own)

    def noting(self: Steps, requests: list[Request]) -> bool:
        assert what == "no room" or not self._in_slice
        return fits(self, requests)

    def reading(self: Passes, parts: Any, **options: Any) -> Any:
        if what == "no room" and engine._steps._in_slice[:-1]:
            order.append("refused")
            raise HostBudgetError("no room")
        return read(self, parts, **options)

    monkeypatch.setattr(Steps, "_pause", arriving)
    monkeypatch.setattr(Steps, "_fits", noting)
    monkeypatch.setattr(Passes, "read", reading)
    engine.add_request(long, GREEDY, "long")
    assert answers(engine, found) == wanted
    assert order == (["short", "refused"] if what == "no room" else ["short"])
    engine.stop()
    assert model.kv_store.num_sequences == 0 == model.kv_store.host_bytes_used


def test_what_is_shared_counts_among_what_slices_attend_to(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin as different kept ones, which have no sequence before they begin."""
    model, read = load(long_folder), Passes.read
    prompts = [random_tokens(1, 100, seed=seed)[0].tolist() for seed in range(4)]
    wanted = {str(i): alone(model, [*prompt, 7, 8]) for i, prompt in enumerate(prompts)}
    engine, pasts = Engine(model), list[int]()
    scheduler = engine._steps.scheduler
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    outputs_of(engine)

    def noting(self: Passes, parts: Any, **options: Any) -> Any:
        pasts.append(sum(model.kv_store.kv_len(seq) for seq, _ in parts))
        return read(self, parts, **options)

    monkeypatch.setattr(Passes, "read", noting)
    scheduler._most_past_tokens = 220 + scheduler._sizes["alone"]
    for i, prompt in enumerate(prompts):
        engine.add_request([*prompt, 7, 8], GREEDY, str(i))
    assert answers(engine) == wanted
    assert sum(pasts) == 400
    assert max(pasts) == 200
    engine.stop()
