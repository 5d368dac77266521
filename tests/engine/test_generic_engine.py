"""Engine and server with model types that have no lean layers: windows, recurrent states."""

from __future__ import annotations

import gc
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_model_of
from cases.slowly import slow_but
from cases.tiny_models import VOCAB_SIZE

from offload.engine.engine import Engine
from offload.engine.request import Request
from offload.engine.sampling_params import SamplingParams
from offload.engine.scheduler import Scheduler
from offload.engine.sessions import Sessions
from offload.models.missing_features import READ_AT_ONCE
from offload.runtime import generic_sizes
from offload.runtime.config import runtime_config
from offload.runtime.generic_loading import generic_runtime
from offload.runtime.generic_model import generic_model

TYPES = ["qwen3_5_text", "granitemoe_swa", "lfm2", "bloom", "deepseek_v3"]
INLINE = ["granitemoe_swa inline", "afmoe inline", "qwen3_5_text inline", "glm4_moe_lite inline"]
INLINE += ["mpt inline"]
IDS = torch.randint(3, 250, (8, 200), generator=torch.Generator().manual_seed(1)).tolist()
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=slow_but([*TYPES, *INLINE], *TYPES[:2], *INLINE[1:4]))
def model(request: pytest.FixtureRequest) -> Any:
    """The last one with its modules as on a GPU, apart from the attention of decode steps."""
    model_type, *backend = request.param.split()
    stock = tiny_model_of(model_type, vocab_size=VOCAB_SIZE)
    options = runtime_config(
        policy="full",  # else what was decoded is no prefix
        num_threads=1,
        page_tokens=16,
        max_memory={"cpu": "64MiB"},
        backend=backend[0] if backend else None,
    )
    return generic_model(generic_runtime(stock, options, None))


def solo(model: Any, prompt: list[int], max_tokens: int = 6) -> list[int]:
    """What the stock loop generates."""
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def drain(engine: Engine) -> dict[str, Any]:
    """Steps to the end: of each request its answer, its last output and how many there were."""
    found: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step():
            answer, _, count = found.get(output.request_id, ([], None, 0))
            tokens = [chosen.token for chosen in output.tokens]
            found[output.request_id] = [*answer, *tokens], output, count + 1
    return found


def ask(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """An answer, and the tokens of the prompt that were not read."""
    name = engine.add_request(prompt, GREEDY, **options)
    answer, output, _ = drain(engine)[name]
    assert output.error is None
    return answer, output.num_cached


def test_answers_are_those_alone(model: Any) -> None:
    """Requests of different lengths join and leave; prompts are read in slices."""
    prompts = [IDS[i][: 20 + 35 * i] for i in range(4)]
    expected = [solo(model, prompt, 4 + 3 * i) for i, prompt in enumerate(prompts)]
    engine = Engine(model, slice_seconds=1e-6, prefix_caching=False, max_num_seqs=3)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=4 + 3 * i, temperature=0.0, ignore_eos=True)
        engine.add_request(prompt, params, f"{i}")
    found = drain(engine)
    assert [found[f"{i}"][0] for i in range(4)] == expected
    assert all(count >= 4 + 3 * i for i, (_, _, count) in sorted(found.items()) for i in [int(i)])
    engine.stop()
    assert model.kv_store.num_sequences == 0
    assert model._offload.hosted.others.held_bytes == 0


def test_others_decode_in_the_middle_of_a_prompt(model: Any) -> None:
    """Between layers of the store; a prompt that is cancelled there leaves nothing."""
    if not model._offload.hosted.specs:
        pytest.skip("no layer is in the store")
    expected = solo(model, IDS[0], 20)
    engine = Engine(model, prefix_caching=False)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine.add_request(IDS[0], params, "decodes")
    decoding = engine._requests["decodes"]
    while not decoding.answer:
        engine.step()
    steps, passes = engine._steps, engine._steps._passes
    lengths: list[int] = []
    before = steps._pause

    def pause(own: list[Request]) -> None:
        lengths.append(len(decoding.answer))
        steps._decode()
        if len(lengths) == 2:
            engine.cancel("read")
        before(own)

    steps._pause = pause
    engine.add_request(IDS[1], GREEDY, "read")
    found = drain(engine)
    assert found["decodes"][0] == expected[-len(found["decodes"][0]) :]
    assert len(lengths) >= 2
    assert lengths[0] < lengths[1]
    assert found["read"][1].finish_reason == "cancelled"
    assert passes.runtime.store.num_sequences == 0
    engine.stop()


def test_a_conversation_goes_on(model: Any) -> None:
    """From where it was, from before the introduction of an answer, and from where others left."""
    engine = Engine(model)
    first, second = IDS[0][:120], IDS[1][:30]
    answer, cached = ask(engine, first)
    assert (answer, cached) == (solo(model, first), 0)
    is_cut = model._offload.sequences.is_cut_at_marks
    for prompt, expected in (
        ([*first, *answer[:-1], *second], 125),
        ([*first[:110], *second, *IDS[2][:90]], 104 if is_cut else 110),
        ([*first[:60], *IDS[3]], 0 if is_cut else 60),
        ([*first[:60], *IDS[4]], 60),
        ([*first, *answer[:3], *second], 120 if is_cut else 123),
    ):
        answer_of, cached = ask(engine, prompt)
        assert (answer_of, cached) == (solo(model, prompt), expected)
    engine.stop()
    assert model._offload.hosted.others.held_bytes == 0


def test_sessions_come_back_from_disk(model: Any, tmp_path: Path) -> None:
    first, told = IDS[0][:120], list[int]()
    for turn in range(3):
        engine = Engine(model, sessions=Sessions(tmp_path), prefix_caching=False)
        prompt = [*told, *(first if turn == 0 else IDS[turn][:9])]
        answer, cached = ask(engine, prompt, session_id="s")
        assert (answer, cached) == (solo(model, prompt), max(0, len(told)))
        told = [*prompt, *answer[:-1]]
        engine.stop()
    engine = Engine(model, sessions=Sessions(tmp_path), prefix_caching=False)
    prompt = [*first[:110], *IDS[5][:20]]
    is_cut = model._offload.sequences.is_cut_at_marks
    assert ask(engine, prompt, session_id="s") == (solo(model, prompt), 104 if is_cut else 110)
    engine.stop()
    assert model.kv_store.num_sequences == 0


def test_sessions_with_values_of_latents_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those were that wrote a value beside each key, which begins with it."""
    shape_of, answers = generic_sizes.shape_of, list[tuple[list[int], int]]()
    config = runtime_config(num_threads=1, page_tokens=16)
    others = lambda *of: replace(shape_of(*of), latent_dim=0)  # noqa: E731
    for of_specs in (others, shape_of):
        monkeypatch.setattr(generic_sizes, "shape_of", of_specs)
        stock = tiny_model_of("deepseek_v3", vocab_size=VOCAB_SIZE)
        model = generic_model(generic_runtime(stock, config, None))
        engine = Engine(model, sessions=Sessions(tmp_path), prefix_caching=False)
        answers.append(ask(engine, IDS[0][:50], session_id="s"))
        engine.stop()
        assert engine.sessions is not None
    assert answers == [(answers[0][0], 0)] * 2
    assert "of [K|V, 1, n, 48], not 4 layers of [K, 1, n, 48]" in engine.sessions.stats.last_miss


def test_a_request_makes_room_and_goes_on(model: Any) -> None:
    # Or steps that a slow prompt owes come before the next prompt.
    engine = Engine(
        model, overcommit=4.0, prefix_caching=False, read_share=0.99, slice_seconds=60.0
    )
    prompts = [IDS[i][: 60 + i] for i in range(3)]
    expected = [solo(model, prompt, 18) for prompt in prompts]
    params = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, params, f"{i}")
    asked = [*engine._requests.values()]
    while engine.has_work and not all(request.answer for request in asked):
        engine.step()
    assert engine._steps._make_room()  # as where memory runs out
    drain(engine)
    assert engine.stats.preempted == 1
    assert [request.answer for request in asked] == expected
    engine.stop()


def test_a_failed_step_ends_what_it_lost(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the store go back; states of others cannot, and no prompt goes on from there."""
    head = model.get_output_embeddings()
    engine = Engine(model)
    engine.add_request(IDS[0][:40], GREEDY, "a")
    failing = engine._requests["a"]
    while len(failing.answer) < 3:
        engine.step()
    calls: list[int] = []
    stock = head.forward

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise FloatingPointError("once")
        return stock(*args)

    monkeypatch.setattr(head, "forward", fail)
    found = drain(engine)
    error = found["a"][1].error
    assert isinstance(error, FloatingPointError)
    longer = [*failing.prompt, *failing.answer[:-1], *IDS[1][:9]]
    is_cut = model._offload.sequences.is_cut_at_marks
    for prompt, cached in ((longer, 40 if is_cut else 42), (IDS[0][:40], 0 if is_cut else 39)):
        assert ask(engine, prompt) == (solo(model, prompt), cached)
    engine.stop()
    assert model.kv_store.num_sequences == 0


def test_what_needs_lean_layers_is_refused(model: Any) -> None:
    with (
        Engine(model) as engine,
        pytest.raises(ValueError, match="prompt_logprobs is not for models"),
    ):
        engine.add_request(IDS[0], SamplingParams(prompt_logprobs=1))


def test_room_without_a_number_of_positions(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(vars(model.config), "max_position_embeddings", None)
    with caplog.at_level("INFO"), Engine(model):
        assert re.search(r"MiB of host KV cache have room for [\w ]*[\d,]+ tokens", caplog.text)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("model_type", ["jamba", "zamba2"])
def test_types_that_forget_states_are_refused(model_type: str) -> None:
    options = runtime_config(num_threads=1, page_tokens=16, max_memory={"cpu": "64MiB"})
    stock = tiny_model_of(model_type, vocab_size=VOCAB_SIZE)
    model = generic_model(generic_runtime(stock, options, None))
    forgets = model_type in READ_AT_ONCE
    refused = pytest.raises(NotImplementedError, match="states") if forgets else nullcontext()
    with refused, Engine(model):
        pass
    ids, in_parts = torch.tensor(IDS[:1]), {"max_new_tokens": 1, "prefill_chunk_size": 100}
    with refused:
        model.generate(input_ids=ids, pad_token_id=0, **in_parts)
    assert model.kv_store.num_sequences == 0
    assert len(model.generate(input_ids=ids, pad_token_id=0, max_new_tokens=2)[0]) == 202
    model._offload.close()


def test_memory_runs_out_and_comes_back(model: Any) -> None:
    """Kept prefixes and their states go when requests need the room; nothing is taken beyond."""
    ledger, store = model.kv_store.ledger, model.kv_store
    engine = Engine(model, max_num_seqs=3)
    store.trim()
    of_one = engine._steps.admission.most_bytes(120 + 6)
    limit, ledger.limit_bytes = ledger.limit_bytes, 3 * of_one
    try:
        expected = []
        for prompt in IDS[:5]:
            answer, _ = ask(engine, prompt[:120])
            expected.append(answer)
        for prompt in IDS[:5]:
            engine.add_request(prompt[:120], GREEDY)
        found, most = dict[str, list[int]](), 0
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                tokens = [chosen.token for chosen in output.tokens]
                found.setdefault(output.request_id, []).extend(tokens)
            assert ledger.left_bytes >= 0
            most = max(most, engine.num_running)
        assert sorted(found.values()) == sorted(expected)
        assert most > 1
    finally:
        ledger.limit_bytes = limit
    engine.stop()
    assert store.num_sequences == 0


def test_a_session_counts_all_that_is_kept_of_it(model: Any, tmp_path: Path) -> None:
    """Pages, and each mark beside the state at its end, which is no copy where it is a mark."""
    sessions, states = Sessions(tmp_path), model._offload.states
    engine, others = Engine(model, sessions=sessions), model._offload.hosted.others
    ask(engine, IDS[0][:120], session_id="s")
    (session,) = sessions._in_memory.values()
    store, on_host = model.kv_store, others.modules is None
    lens = [len(session.tokens), *(mark.kv_len for mark in states._marks[session.seq])]
    assert len(lens) >= 3 or not states.is_cut_at_marks
    pages = -(-lens[0] // store.page_tokens) * store.num_page_rows * store.page_bytes
    most = on_host * sum(map(others.at, lens))
    assert 0.9 * most <= session.num_bytes - pages <= most  # a window's mark lacks a column
    engine.stop()


def test_states_on_a_device_bound_what_runs_together(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept prompts give way there, too; what never fits together runs one after the other."""
    others = model._offload.hosted.others
    if others.modules is None or not others.at(126):
        pytest.skip("there are no states on a device")
    gc.collect()  # engines of tests before
    # However long that takes: steps do not come between slices of a prompt.
    monkeypatch.setattr(Scheduler, "decodes_first", False)
    monkeypatch.setattr(Scheduler, "owes", lambda *_: False)
    of_one = others.at(126)
    few = others.modules.bytes.need(1, 256, 256, 0)
    engine = Engine(model)
    expected = [solo(model, prompt[:120]) for prompt in IDS[:3]]
    for limit, together in ((7 * of_one, 2), (6 * of_one, 1)):
        room = few + limit
        left = partialmethod(lambda self, room: room - self.device_bytes, room)
        monkeypatch.setattr(type(others.modules), "left_bytes", left)
        monkeypatch.setattr(type(others.modules), "check", lambda *_: None)
        for i, prompt in enumerate(IDS[:3]):
            engine.add_request(prompt[:120], GREEDY, f"{i}")
        most, found = 0, dict[str, list[int]]()
        while engine.has_work:
            for output in engine.step():
                tokens = [chosen.token for chosen in output.tokens]
                found[output.request_id] = [*found.get(output.request_id, []), *tokens]
            most = max(most, engine.num_running)
        assert (most, [found[f"{i}"] for i in range(3)]) == (together, expected)
    engine.stop()
