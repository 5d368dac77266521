"""Requests whose decoded tokens are read again get the tokens of their own `generate()`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.answers import alone as answer_alone
from cases.answers import answers, outputs_of, tokens_of
from cases.answers import answers_of_step as step
from cases.correcting import read, rows_of
from cases.inside import allow_host_bytes, runtime_of, states_of
from cases.slowly import combinations, slow_but
from cases.tiny_models import random_tokens

from offload import Engine, OffloadedModel, SamplingParams
from offload.engine.runner import Passes
from offload.engine.scheduler import _ALONE, _LEAST, Scheduler
from offload.engine.sessions import Sessions
from offload.policies.registry import available_policies, make_policy
from offload.prefill import forward as prefill_forward
from offload.system.errors import DeviceMemoryError, HostBudgetError

FEW = {"budget_tokens": 32, "sink_tokens": 4, "recent_tokens": 8, "dense_layers": 1}
EVERY, LONG = 32, 110
GREEDY = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
SELECTING = [name for name in available_policies() if make_policy(name).selects]
NAMED = ("lychee_cluster", "quest", "tidal_decode")
Found = dict[str, list[int]]


def load(folder: Path, name: str = "quest", every: int | None = EVERY, **options: Any) -> Any:
    few = FEW if name != "streaming_llm" else {"budget_tokens": 12}
    names = make_policy(name).option_names()
    policy = make_policy(name, **{key: value for key, value in few.items() if key in names})
    options = {"dtype": "float32", "page_tokens": 16, "cache_correction_every": every} | options
    return OffloadedModel.from_pretrained(folder, policy=policy, **options)


@pytest.fixture(scope="module")
def folder(long_folder: Path) -> Path:
    return long_folder


@pytest.fixture(scope="module")
def quest(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices and steps take equally long, whatever else the machine does: two steps to a slice."""
    read, decoded = Scheduler.was_read, Scheduler.was_decoded
    monkeypatch.setattr(
        Scheduler, "was_read", lambda self, num_tokens, *_: read(self, num_tokens, 1.0)
    )
    monkeypatch.setattr(
        Scheduler,
        "was_decoded",
        lambda self, seconds: decoded(self, 1.0 if math.isfinite(seconds) else seconds),
    )


@pytest.fixture
def model(quest: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One for all tests, empty after each, also after one that fails."""
    engines, make = list[Engine](), Engine.__init__

    def make_noted(self: Engine, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        engines.append(self)

    monkeypatch.setattr(Engine, "__init__", make_noted)
    yield quest
    for engine in engines:
        engine.stop()
    check_empty(quest)


def check_empty(model: Any) -> None:
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0
    assert runtime_of(model).attention.states.held_bytes == 0


def prompts_of(*lens: int) -> list[list[int]]:
    return [random_tokens(1, n, seed=n)[0].tolist() for n in lens]


def alone(model: Any, prompt: list[int], num_tokens: int = LONG, **options: Any) -> list[int]:
    return answer_alone(model, prompt, num_tokens, **options)


def correcting(engine: Engine) -> list[Any]:
    return engine._steps.scheduler.correcting


def step_into_correction(engine: Engine, found: Found) -> Any:
    """The request that is in the middle of one."""
    while not any(request.correction.num_read for request in correcting(engine)):
        assert engine.has_work
        step(engine, found)
    return next(request for request in correcting(engine) if request.correction.num_read)


@pytest.mark.parametrize("name", slow_but(SELECTING, *NAMED))
def test_tokens_are_those_of_each_alone(folder: Path, name: str) -> None:
    """Requests join at different times, and some begin as others do."""
    model = load(folder, name)
    prompts = prompts_of(41, 300, 150)
    prompts.append(prompts[1][:250] + prompts[0])
    wanted = {str(i): alone(model, prompt) for i, prompt in enumerate(prompts)}
    num_corrected = model.offload_stats().corrected_tokens
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, GREEDY, str(i))
        for _ in range(17):
            step(engine, found)
    most_at_once = 0
    while engine.has_work:
        step(engine, found)
        most_at_once = max(most_at_once, len(correcting(engine)))
    assert found == wanted
    assert num_corrected >= 2 * EVERY
    assert engine.stats.corrected_tokens >= 2 * EVERY * len(prompts)
    assert most_at_once > 0  # in several slices
    if name in ("quest", "lychee_cluster"):  # else little is sparse before the last layer
        uncorrected = load(folder, name, None)
        assert wanted != {str(i): alone(uncorrected, prompt) for i, prompt in enumerate(prompts)}
    engine.stop()
    check_empty(model)


def test_keys_are_exact_behind_it(model: Any, folder: Path) -> None:
    (prompt,) = prompts_of(150)
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    engine.add_request(prompt, GREEDY, "0")
    request, drifts = step_into_correction(engine, found), []
    num_exact = request.correction.tokens[request.seq].first + EVERY
    text = torch.tensor([(prompt + found["0"])[:num_exact]])
    expected = rows_of(read(load(folder, "full", None), text)[0])
    for _ in range(2):
        layers = [model.kv_store.gather(request.seq, i, 0, num_exact) for i in range(3)]
        rows = [x for of_layer in layers for x in of_layer]
        drifts.append(
            max(float((x - y[0]).abs().max()) for x, y in zip(rows, expected, strict=True))
        )
        while request.correction is not None:
            step(engine, found)
    assert drifts[1] < 0.1 * drifts[0], drifts


def test_exact_requests_need_no_correction(model: Any, folder: Path) -> None:
    prompts = prompts_of(150, 80)
    exact = load(folder, "full", None)
    wanted = {"exact": alone(exact, prompts[0]), "sparse": alone(model, prompts[1])}
    engine, found = Engine(model), Found()
    engine.add_request(prompts[0], replace(GREEDY, exact=True), "exact")
    engine.add_request(prompts[1], GREEDY, "sparse")
    while engine.has_work:
        assert "exact" not in [request.request_id for request in correcting(engine)]
        step(engine, found)
    assert found == wanted
    assert engine.stats.corrected_tokens > 0


def test_others_decode_while_one_is_corrected(model: Any) -> None:
    """A slice is short, and between two of them others get tokens."""
    first, second = prompts_of(200, 90)
    wanted = {"first": alone(model, first), "second": alone(model, second)}
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    engine.add_request(first, GREEDY, "first")
    while len(found.get("first", [])) < 10:
        step(engine, found)
    engine.add_request(second, GREEDY, "second")
    request = step_into_correction(engine, found)
    num_meanwhile, most_read = 0, 0
    while request.correction is not None:
        before = request.correction.num_read
        news = step(engine, found)
        num_meanwhile += len(news.get("second", []))
        if request.correction is not None:
            most_read = max(most_read, request.correction.num_read - before)
            assert "first" not in news
    assert num_meanwhile > 0
    assert most_read <= 16  # `short_slices`
    answers(engine, found)
    assert found == wanted


def test_corrections_and_prompts_share_slices(model: Any) -> None:
    """A long prompt and a correction both advance."""
    first, long = prompts_of(200, 2000)
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    engine.add_request(first, GREEDY, "first")
    while len(found.get("first", [])) < EVERY:
        step(engine, found)
    engine.add_request(long, GREEDY, "long")
    request = step_into_correction(engine, found)
    (reading,) = engine._steps.scheduler.reading
    read = reading.num_read
    while request.correction is not None:
        step(engine, found)
    assert read < reading.num_read < len(long)


def test_short_corrections_make_no_long_slice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a pass, which takes as long as the fewest tokens of a slice do."""
    model, passes, correct = load(folder, every=3), list[int](), Passes.correct

    def correct_noted(self: Passes, seq: int, *rest: Any) -> Any:
        passes.append(seq)
        return correct(self, seq, *rest)

    monkeypatch.setattr(Passes, "correct", correct_noted)
    prompts, params = prompts_of(*range(60, 68)), replace(GREEDY, max_tokens=40)
    wanted = {str(i): alone(model, prompt, 40) for i, prompt in enumerate(prompts)}
    engine, found, num_seen = Engine(model, slice_seconds=1e-4), Found(), 0
    for request_id, prompt in zip(wanted, prompts, strict=True):
        engine.add_request(prompt, params, request_id)
    while engine.has_work:
        passes.clear()
        step(engine, found)
        if engine._steps.scheduler._kind != _ALONE:
            assert len(passes) <= 1
            num_seen += len(passes)
    assert num_seen > 20
    assert found == wanted
    engine.stop()
    check_empty(model)


@pytest.mark.parametrize("name", slow_but(["quest", "lychee_cluster"], "quest"))
def test_cancelling_in_the_middle_gives_every_byte_back(folder: Path, name: str) -> None:
    model = load(folder, name)
    prompt, other = prompts_of(120, 70)
    wanted = alone(model, other)
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    engine.add_request(prompt, GREEDY, "prompt")
    request = step_into_correction(engine, found)
    assert model.kv_store.num_sequences == 3  # one is kept as a prefix
    engine.add_request(other, GREEDY, "other")
    engine.cancel("prompt")
    step(engine, found)
    assert request.finish_reason == "cancelled"
    answers(engine, found)
    assert found["other"] == wanted
    engine.add_request(prompt, GREEDY, "again")
    step_into_correction(engine, found)
    engine.stop()
    check_empty(model)


def test_a_slice_that_fails_ends_its_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, other = prompts_of(120, 70)
    wanted = alone(model, other)
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    engine.add_request(prompt, GREEDY, "prompt")
    request = step_into_correction(engine, found)
    attend = prefill_forward.attend

    def failing(*given: Any) -> Any:
        raise ValueError("a fault")

    monkeypatch.setattr(prefill_forward, "attend", failing)
    outputs = []
    while request.finish_reason is None:
        outputs += engine.step()
    assert [str(output.error) for output in outputs] == ["a fault"]
    assert model.kv_store.num_sequences == 1
    monkeypatch.setattr(prefill_forward, "attend", attend)
    engine.add_request(other, GREEDY, "other")
    answers(engine, found)
    assert found["other"] == wanted


def test_a_policy_that_fails_ends_its_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all is read: with its own error, and without a page left behind."""
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    engine.add_request(prompts_of(120)[0], GREEDY, "prompt")
    request = step_into_correction(engine, found)

    def failing(*_: Any) -> Any:
        raise MemoryError("a fault")

    monkeypatch.setattr(type(runtime_of(model).attention.policy.state), "revise", failing)
    outputs = []
    while request.finish_reason is None:
        outputs += engine.step()
    assert [str(output.error) for output in outputs] == ["a fault"]
    assert model.kv_store.num_sequences == 1  # kept as a prefix


def test_what_was_read_stays_for_others(model: Any) -> None:
    """A prompt's pages are not those that a correction replaces."""
    (prompt,) = prompts_of(150)
    wanted, engine, found = alone(model, prompt), Engine(model, slice_seconds=1e-4), Found()
    engine.add_request(prompt, GREEDY, "first")
    step_into_correction(engine, found)
    engine.add_request(prompt, GREEDY, "second")  # while it is corrected, and afterwards
    answers(engine, found)
    engine.add_request(prompt, GREEDY, "third")
    answers(engine, found)
    assert found == {"first": wanted, "second": wanted, "third": wanted}
    assert engine.stats.cached_tokens > len(prompt)


def test_memory_of_a_correction_is_counted(folder: Path) -> None:
    """A request that is admitted can be corrected to its end, and a byte less is refused."""
    model = load(folder)
    (prompt,) = prompts_of(150)
    wanted = alone(model, prompt)
    engine, found = Engine(model, slice_seconds=1e-4), Found()
    most = engine._steps.admission.most_bytes(len(prompt) + LONG - 1)
    uncorrected = Engine(load(folder, every=None))
    assert most > uncorrected._steps.admission.most_bytes(len(prompt) + LONG - 1)
    allow_host_bytes(model, most - 1)
    with pytest.raises(HostBudgetError, match="max_tokens"):
        engine.add_request(prompt, GREEDY)
    allow_host_bytes(model, most)
    for request_id in ("first", "second"):  # which waits
        engine.add_request(prompt, GREEDY, request_id)
    while engine.has_work:
        step(engine, found)
        assert engine.num_running <= 1
        assert model.kv_store.host_bytes_used <= most
    assert found == {"first": wanted, "second": wanted}
    engine.stop()
    check_empty(model)


def test_what_a_device_has_no_room_for_is_refused_before(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its prompt is read."""

    def check_room(num_tokens: int, past_tokens: int) -> None:
        if past_tokens > 150:
            raise DeviceMemoryError(f"no room for {num_tokens} behind {past_tokens}")

    monkeypatch.setattr(runtime_of(model).sequences.corrections, "_check_room", check_room)
    engine = Engine(model)
    for num_tokens, error in ((150, "cache_correction_every=32"), (50, None)):
        engine.add_request(prompts_of(num_tokens)[0], GREEDY)
        assert (error or "None") in str(outputs_of(engine)[-1].error)
    assert engine.stats.prompt_tokens == 50


@pytest.mark.parametrize("name", slow_but(["quest", "lychee_cluster"], "quest"))
def test_requests_that_make_room_are_corrected_later(folder: Path, name: str) -> None:
    """Overcommitted: sequences go to disk with the tokens that wait."""
    model = load(folder, name)
    prompts, params = prompts_of(60, 61, 62, 63), replace(GREEDY, max_tokens=176)
    wanted = {str(i): alone(model, prompt, 176) for i, prompt in enumerate(prompts)}
    store, most_states = model.kv_store, states_of(model).bytes.most_at(240)
    allow_host_bytes(model, 2 * 240 * store.token_bytes + 5 * most_states)
    engine, found = Engine(model, slice_seconds=1e-4, overcommit=8.0), Found()
    for request_id, prompt in zip(wanted, prompts, strict=True):
        engine.add_request(prompt, params, request_id)
    answers(engine, found)
    assert found == wanted
    assert engine.stats.preempted > 0
    engine.stop()
    check_empty(model)


def test_a_correction_that_makes_room_begins_again(model: Any) -> None:
    prompts = prompts_of(100, 110)
    wanted = {str(i): alone(model, prompt) for i, prompt in enumerate(prompts)}
    engine, found = Engine(model, slice_seconds=1e-4, prefix_caching=False), Found()
    engine.add_request(prompts[0], GREEDY, "0")
    step(engine, found)
    engine.add_request(prompts[1], GREEDY, "1")
    while not (found and (request := step_into_correction(engine, found)).request_id == "1"):
        step(engine, found)
    assert engine._steps._make_room()
    assert request.is_preempted
    assert request.correction is None
    assert model.kv_store.num_sequences <= 2
    answers(engine, found)
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "where"), combinations(NAMED, ["memory", "disk", "another process"])
)
def test_sessions_go_on_as_one_cache_does(
    folder: Path, tmp_path: Path, name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt reads again what waits."""
    monkeypatch.setattr("offload.engine.scheduler._LEAST", dict.fromkeys(_LEAST, 4096))
    model = load(folder, name)
    more = [[], *prompts_of(25, 33, 28)]
    cache, text, wanted = model.new_cache(), prompts_of(90)[0], []
    for new in more:
        text = text + new
        wanted.append(alone(model, text, 45, past_key_values=cache))
        text += wanted[-1]
    cache.reset()
    limit, params = None if where == "memory" else 0, replace(GREEDY, max_tokens=45)
    engine = Engine(model, sessions=Sessions(tmp_path, host_limit_bytes=limit))
    text = prompts_of(90)[0]
    for new, answer in zip(more, wanted, strict=True):
        if where == "another process" and new:
            engine.stop()
            model = load(folder, name)
            engine = Engine(model, sessions=Sessions(tmp_path))
        text, found = text + new, Found()
        engine.add_request(text, params, "turn", session_id="s")
        while engine.has_work or engine._saves:
            step(engine, found)
        assert found["turn"] == answer
        text += answer
    engine.stop()
    check_empty(model)
    assert os.listdir(tmp_path) == ["s.safetensors"]


def test_a_cancelled_session_keeps_what_waits(model: Any, tmp_path: Path) -> None:
    """In the middle of a correction: the session is as it was before, and goes on from there."""
    (prompt,) = prompts_of(120)
    engine, found = Engine(model, slice_seconds=1e-4, sessions=Sessions(tmp_path)), Found()
    engine.add_request(prompt, GREEDY, "first", session_id="s")
    request = step_into_correction(engine, found)
    first = request.correction.tokens[request.seq].first
    engine.cancel("first")
    while engine.has_work or engine._saves:
        step(engine, found)
    text = prompt + found["first"] + prompts_of(30)[0]
    wanted = alone(model, text)
    engine.add_request(text, GREEDY, "second", session_id="s")
    outputs = outputs_of(engine)
    assert tokens_of(outputs) == wanted
    assert outputs[-1].num_cached == first
