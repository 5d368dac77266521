"""Steps of another placement, or of more rows, are made beside those that run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, SLOW_INLINE, each_of, greedy, load, small, steps
from cases.inside import decoder_of, split_steps, states_of, steps_of
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from cpu_ops.coprocessor import Coprocessor
from offload.decode.gpu import aside as steps_aside
from offload.decode.gpu import decoder as device_decoder
from offload.decode.gpu import placed_heads, resident_kv
from offload.decode.gpu import slots as device_slots
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.prepared_steps import PreparedSteps
from offload.engine.engine import Engine
from offload.engine.sampling_params import SamplingParams
from offload.selection.policy import DENSE, RETRIEVE
from offload.system.captures import CAPTURING
from offload.system.errors import DeviceMemoryError

_TRACED = {
    module.__file__
    for module in (steps_aside, device_decoder, device_slots, placed_heads, resident_kv)
}
backend = each_of(SLOW_INLINE, FLAGS, GRAPH, scope="function")


def aside_of(model: Any) -> Any:
    """Steps that are being made beside others; None: none, as without a GPU."""
    slots = getattr(decoder_of(model), "slots", None)
    return None if slots is None else slots.aside


class Gate:
    """Steps that a thread makes beside others wait here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached, self.made = threading.Event(), threading.Event(), 0
        self.fails = False
        make = PreparedSteps.make_link

        def make_link(steps: PreparedSteps, *args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.made += 1
                self.reached.set()
                assert self.opened.wait(30)
                if self.fails:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return make(steps, *args)

        monkeypatch.setattr(PreparedSteps, "make_link", make_link)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


class Decoding:
    """Two sequences of a model with a GPU, beside the same on the CPU."""

    def __init__(self, folder: Path, backend: tuple[str, str], policy: Any = "full") -> None:
        self.model = load(folder, policy, backend)
        self._plain = load(folder, policy, ("cpu", None))
        self.decoder = decoder_of(self.model)
        self.decoder.slots.captures_aside = True
        split_steps(self.model, 1)  # nothing is tried
        self.decoder.placed.choose = lambda now, *of_sequences: self.wanted
        self.wanted = HeadPlacement.from_text("GG .. ..")
        self.decoder.place(self.wanted)
        self._caches: list[tuple[Any, Any, torch.Tensor]] = []
        self.begin(1)

    @torch.no_grad()
    def begin(self, num_sequences: int, prompt_tokens: int = 40) -> None:
        tokens = random_tokens(num_sequences, prompt_tokens)
        caches = self.model.new_cache(), self._plain.new_cache()
        for model, cache in zip((self.model, self._plain), caches, strict=True):
            model(tokens.to(model.device), past_key_values=cache)
        self._caches.append((*caches, tokens[:, -1:]))

    @torch.no_grad()
    def step(self, which: int = 0, act: Callable[[Callable[[], None]], None] | None = None) -> None:
        """The same token on both.

        Args:
            act: calls the step of the model with a GPU.
        """
        cache, plain, token = self._caches[which]
        wanted = self._plain(token, past_key_values=plain).logits[:, -1:].argmax(-1)
        said: list[torch.Tensor] = []

        def step() -> None:
            logits = self.model(token.to(self.model.device), past_key_values=cache).logits
            said.append(logits[:, -1:].argmax(-1).cpu())

        (act or (lambda step: step()))(step)
        assert torch.equal(said[-1], wanted)
        self._caches[which] = (cache, plain, wanted)

    def place_aside(self, text: str, num_sequences: int = 1) -> None:
        self.wanted = HeadPlacement.from_text(text)
        self.decoder.begin_generation(num_sequences, 100, 64)

    def settle(self) -> None:
        self.decoder.slots.aside._thread.join(30)
        assert self.decoder.slots.aside.is_done


@pytest.fixture
def decoding(backend: tuple[str, str], tiny_folders: dict[str, Path]) -> Decoding:
    decoding = Decoding(tiny_folders["llama"], backend)
    decoding.step()
    return decoding


def test_the_old_steps_go_on_until_the_new_ones_are_there(
    decoding: Decoding, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, before = steps_of(decoding.model), decoding.decoder.placement
    interval = sys.getswitchinterval()
    decoding.place_aside("GG GG ..", 4)
    assert gate.reached.wait(30)
    assert sys.getswitchinterval() < interval
    for _ in range(3):
        decoding.step()
        assert steps_of(decoding.model) is old
        assert decoding.decoder.placement == before
    gate.opened.set()
    decoding.settle()
    assert sys.getswitchinterval() == interval
    new = decoding.decoder.slots.aside.wait()
    assert len(new.links) == 1
    decoding.step()
    assert steps_of(decoding.model) is new
    assert decoding.decoder.placement == decoding.wanted
    assert not old.links
    assert list(new.links) == [(4, 1)]  # made for four rows; one is in use
    decoding.begin(3)
    decoding.step(1)
    decoding.step(0)
    assert steps_of(decoding.model) is new
    monkeypatch.setattr("offload.decode.gpu.prepared_steps._STEPS_WITH_LARGER", 3)
    decoding.step(0)
    assert list(new.links) == [(4, 1)]
    decoding.step(0)
    assert list(new.links) == [(4, 1), (1, 1)]
    assert gate.made == 1


def test_a_step_that_needs_more_rows_waits(decoding: Decoding, gate: Gate) -> None:
    decoding.place_aside("GG .. GG", 2)
    assert gate.reached.wait(30)
    threading.Timer(0.3, gate.opened.set).start()
    start = time.perf_counter()
    decoding.begin(2)
    decoding.step(1)
    assert time.perf_counter() - start > 0.2
    assert decoding.decoder.placement == decoding.wanted
    decoding.step(0)
    assert gate.made == 1


def test_what_is_wanted_changes_meanwhile(decoding: Decoding, gate: Gate) -> None:
    decoding.place_aside("GG GG ..")
    assert gate.reached.wait(30)
    decoding.place_aside("GG GG GG", 4)
    gate.opened.set()
    decoding.settle()
    decoding.step()  # those are not wanted any more: others are begun
    decoding.settle()
    decoding.step()
    assert decoding.decoder.placement == decoding.wanted
    assert steps_of(decoding.model).num_slots == 4
    assert gate.made == 2
    decoding.place_aside("GG GG ..")
    decoding.place_aside("GG GG GG", 4)  # as it is
    decoding.settle()
    old = steps_of(decoding.model)
    decoding.step()
    assert steps_of(decoding.model) is old
    assert decoding.decoder.slots.aside is None


def test_steps_that_cannot_be_made_beside_others(decoding: Decoding, gate: Gate) -> None:
    gate.fails = True
    gate.opened.set()
    decoding.place_aside("GG GG ..", 2)
    decoding.settle()
    decoding.step()
    assert decoding.decoder.placement == decoding.wanted
    assert steps_of(decoding.model).num_slots == 2


@pytest.mark.parametrize("what", ["place", "give back", "forget", "no room", "fork", "close"])
def test_what_may_happen_meanwhile(
    decoding: Decoding, gate: Gate, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoding.decoder
    decoding.place_aside("GG GG ..", 2)
    assert gate.reached.wait(30)
    threading.Timer(0.2, gate.opened.set).start()
    if what == "place":
        decoding.wanted = HeadPlacement.from_text("GG G. G.")
        decoder.place(decoding.wanted)
    elif what == "give back":
        assert decoder.give_heads_back(DeviceMemoryError("a prefill"))
    elif what == "forget":
        for seq in decoding._caches[0][0].seqs:
            decoder.forget(seq)
        decoding.place_aside("GG .. G.")
    elif what == "no room":
        bind, failed = decoder.slots._bind_to, []

        def fail_once(*args: Any) -> Any:
            if not failed:
                failed.append(args)
                raise DeviceMemoryError("of pages")
            return bind(*args)

        monkeypatch.setattr(decoder.slots, "_bind_to", fail_once)
    elif what == "fork":
        pid = os.fork()
        if pid == 0:
            os._exit(0 if decoder.slots.aside.is_done else 1)
        assert os.waitpid(pid, 0)[1] == 0
    elif what == "close":
        decoder.close()
        assert decoder.slots.aside is None
        return
    decoding.step()
    if what == "fork":
        assert decoder.slots.aside is None
    assert decoder.placement == decoding.wanted
    assert decoder.slots.aside is None
    decoding.step()


def test_steps_that_failed_are_not_closed_beside_others(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coprocessor that is closed has the attention forget what a step that runs may need."""
    closed, failed = [], []
    close, sync = (
        Coprocessor.close,
        type(next(iter(steps_of(decoding.model).links.values())).gpu_sync),
    )

    def watched(coprocessor: Coprocessor) -> None:
        closed.append(threading.current_thread())
        close(coprocessor)

    def capture(*args: Any, **kwargs: Any) -> bool:
        failed.append(threading.current_thread())
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(Coprocessor, "close", watched)
        patch.setattr(sync, "capture", capture)
        decoding.place_aside("GG GG ..", 2)
        decoding.settle()
    assert failed
    assert threading.main_thread() not in failed
    assert not closed
    decoding.step()
    assert decoding.decoder.placement == decoding.wanted


def test_steps_that_failed_are_not_wanted_any_more(decoding: Decoding, gate: Gate) -> None:
    decoding.begin(1)
    decoding.step(1)
    old, before = steps_of(decoding.model), decoding.wanted
    gate.fails = True
    decoding.place_aside("GG GG ..")
    decoding.wanted = before
    decoding.decoder.begin_generation(1, 100, 64)
    gate.opened.set()
    decoding.settle()
    decoding.step()
    assert decoding.decoder.slots.aside is None
    assert steps_of(decoding.model) is old


def test_a_burst_ends_with_the_steps_it_began_with(
    decoding: Decoding, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, tokens, counts = decoding.decoder, random_tokens(1, 40, seed=3), []
    decoding.wanted = HeadPlacement.from_text("GG GG GG")
    decoder.place(decoding.wanted)
    decoding.step()
    decoding.wanted = HeadPlacement.from_text("GG GG ..")
    at_once = decoder.tokens_at_once

    def then_they_are_made(*args: Any) -> int:
        counts.append(at_once(*args))
        if decoder.slots.aside is not None:
            gate.opened.set()
            decoding.settle()
        return counts[-1]

    monkeypatch.setattr(decoder, "tokens_at_once", then_they_are_made)
    assert torch.equal(greedy(decoding.model, tokens, 80), greedy(decoding._plain, tokens, 80))
    assert counts[0] > 1
    assert decoder.placement == decoding.wanted
    assert gate.made == 1


def test_others_draw_while_a_model_captures(
    backend: tuple[str, str], tiny_folders: dict[str, Path]
) -> None:
    model, tokens = load(tiny_folders["llama"], "full", backend), random_tokens(1, 20)

    def sampled() -> torch.Tensor:
        torch.manual_seed(5)
        return greedy(model, tokens, 4, do_sample=True)

    expected, captured, ended = sampled(), threading.Event(), threading.Event()

    def capture() -> None:
        with CAPTURING:
            captured.set()
            assert ended.wait(30)

    other = threading.Thread(target=capture)
    other.start()
    assert captured.wait(30)
    try:
        assert torch.equal(sampled(), expected)
    finally:
        ended.set()
        other.join()


@pytest.mark.parametrize(
    ("options", "changes"),
    combinations(
        [
            pytest.param({"repetition_penalty": 1.1}, id="stock loop"),
            pytest.param({"do_sample": False}, id="no draws"),
            pytest.param({"num_beams": 2}, id="beams"),
            pytest.param({"prompt_lookup_num_tokens": 2}, id="drafts"),
        ],
        [False, True],
    ),
)
def test_nothing_is_captured_in_loops_of_transformers(
    decoding: Decoding, gate: Gate, options: dict[str, Any], changes: bool
) -> None:
    decoder, is_running = decoding.decoder, []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_running.append(decoder.slots.aside is not None and not decoder.slots.aside.is_done)
        return scores

    if changes:
        decoding.place_aside("GG .. GG")
    decoding.wanted = HeadPlacement.from_text("GG GG ..")
    threading.Timer(0.3, gate.opened.set).start()
    options = {"do_sample": True, **options, "logits_processor": [watch]}
    greedy(decoding.model, random_tokens(1, 40, seed=3), 4, **options)
    assert is_running
    assert not any(is_running)
    assert gate.made == 1
    assert decoder.placement == decoding.wanted


def test_nothing_is_captured_after_a_generation(decoding: Decoding, gate: Gate) -> None:
    """The caller may wait for the GPU, or draw there."""
    decoding.wanted = HeadPlacement.from_text("GG GG ..")
    threading.Timer(0.5, gate.opened.set).start()
    greedy(decoding.model, random_tokens(1, 40, seed=3), 2)
    assert gate.made == 1
    assert decoding.decoder.slots.aside.is_done
    decoding.step()
    assert decoding.decoder.placement == decoding.wanted


@torch.no_grad()
def test_what_was_built_for_others_does_not_stay_behind(
    backend: tuple[str, str],
    gate: Gate,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt is built for steps to come, and the old ones decode more of it meanwhile."""
    policy = small("lychee_cluster")
    model = load(tiny_folders["llama"], policy, backend)
    decoder, states = decoder_of(model), states_of(model)
    decoder.slots.captures_aside = True
    split_steps(model, 1)  # nothing is tried
    wanted = HeadPlacement.from_text("GG GG GG")
    decoder.placed.choose = lambda now, *of_sequences: wanted
    decoder.place(wanted)
    before = model.new_cache()
    model(random_tokens(1, 40), past_key_values=before)
    steps(model, before, random_tokens(1, 1))
    wanted = HeadPlacement.from_text("GG .. ..")
    decoder.begin_generation(1, 400, 64)
    assert gate.reached.wait(30)
    monkeypatch.setattr(decoder.attention, "builds_in_prefill", lambda device: True)
    cache = model.new_cache()
    model(random_tokens(1, 220), past_key_values=cache)
    (seq,) = cache.seqs
    assert states.arrays_of(seq).built == {1, 2}
    steps(model, cache, random_tokens(1, 70, seed=3))
    assert decoder.placement != wanted
    gate.opened.set()
    decoder.slots.aside._thread.join(30)
    steps(model, cache, random_tokens(1, 1))
    assert decoder.placement == wanted
    arrays = states.arrays_of(seq)
    assert arrays.built == {1, 2}
    for layer_idx in (1, 2):
        ends = arrays.layers[layer_idx]["header"]["indexed_end"]
        assert cache.kv_lens[0] - ends.min() <= policy.unindexed_limit + policy.max_chunk_tokens


def test_prompts_are_not_built_for_what_was_wanted_before(
    backend: tuple[str, str], gate: Gate, tiny_folders: dict[str, Path]
) -> None:
    decoding = Decoding(tiny_folders["llama"], backend, small("lychee_cluster"))
    states = states_of(decoding.model)
    decoding.wanted = HeadPlacement.from_text("GG GG GG")
    decoding.decoder.place(decoding.wanted)
    decoding.step()
    assert states.built_layers == states.layers == frozenset()
    decoding.place_aside("GG .. ..")
    assert states.built_layers == {1, 2}
    decoding.place_aside("GG GG GG")
    gate.opened.set()
    decoding.settle()
    decoding.step()
    assert decoding.decoder.slots.aside is None
    assert states.built_layers == states.layers == frozenset()


def test_all_ways_are_captured_before_they_are_tried(decoding: Decoding) -> None:
    """And what was found out goes on in steps of the same placement that have them."""
    decoding.decoder.captured.num_micro_batches = None  # as with a GPU
    decoding.place_aside("GG .. ..", 4)
    decoding.settle()
    decoding.step()
    old = steps_of(decoding.model)
    assert {*old.links} == {(4, 1), (4, 2)}
    choice = old._choice(4)
    decoding.place_aside("GG GG ..", 4)
    decoding.settle()
    decoding.step()
    new = steps_of(decoding.model)
    assert new._choice(4) is not choice
    new.learn_from(old)
    assert new._choice(4) is choice
    decoding.place_aside("GG GG GG", 4)
    decoding.settle()
    decoding.step()
    new = steps_of(decoding.model)
    new.learn_from(old)
    assert {*new.links} == {(4, 1)}  # nobody waits for the host
    assert new.settled_steps(new.links[4, 1]) is None


def test_ctrl_c_at_any_line(decoding: Decoding) -> None:
    """… of a generation that begins, and of the step that goes on with others: no step runs as
    another placement says, and what is wanted comes."""
    decoder = decoding.decoder
    texts = ("GG .. ..", "GG GG ..", "GG G. GG", ".G GG ..")
    lines, stop_at = 0, 1

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in _TRACED:
            return None
        if event == "line":
            lines += 1
            if lines == stop_at:
                signal.raise_signal(signal.SIGINT)
        return trace

    def interrupted(act: Callable[[], None]) -> None:
        sys.settrace(trace)
        try:
            act()
        except KeyboardInterrupt:
            sys.settrace(None)
            act()
        finally:
            sys.settrace(None)

    def settle() -> None:
        if decoder.slots.aside is not None:
            decoding.settle()

    for is_aside in (True, False):
        decoder.slots.captures_aside, stop_at, lines = is_aside, 1, 2
        while lines > stop_at:
            lines, stop_at = 0, stop_at + 2
            decoding.wanted = HeadPlacement.from_text(texts[stop_at // 2 % 4])
            interrupted(partial(decoder.begin_generation, 1 + stop_at // 2 % 2, 100, 64))
            settle()
            decoding.step(act=interrupted)
            settle()
            decoding.step()
            assert decoder.placement == decoding.wanted, stop_at
            assert decoder.slots.aside is None
        assert stop_at > 60


@pytest.mark.parametrize("policy", ["full", "lychee_decode", "tidal_decode"])
def test_requests_join_while_others_decode(
    backend: tuple[str, str], policy: str, tiny_folders: dict[str, Path]
) -> None:
    """Tokens are those of each request by itself, and nothing is left behind."""
    prompts = [random_tokens(1, 20 + 7 * i, seed=i)[0].tolist() for i in range(8)]

    def answers(folder: Path, where: tuple[str, Any], change: Callable[[Any], None]) -> Any:
        model = load(folder, policy, where)
        change(model)
        engine = Engine(model, max_num_seqs=8, slice_seconds=1e-3)
        said: dict[str, list[Any]] = {}
        waiting = [*enumerate(prompts)]
        while waiting or engine.has_work:
            if waiting:
                name, prompt = waiting.pop(0)
                params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
                engine.add_request(prompt, params, str(name))
            if (aside := aside_of(model)) is not None:
                aside._thread.join(1.0)  # answers are short
            for output in [*engine.step(), *engine.step()]:
                assert output.error is None
                said.setdefault(output.request_id, []).extend(output.tokens)
        return {name: [chosen.token for chosen in of] for name, of in said.items()}

    made: list[bool] = []

    def goes_aside(model: Any) -> None:
        decoder = decoder_of(model)
        least, roles = decoder.placed.least, decoder.attention.roles
        places = np.array(least.places)
        places[np.isin(roles, (DENSE, RETRIEVE)) if roles is not None else 1] = Place.GPU
        more, replace_steps = HeadPlacement(places), decoder.slots._replace_steps
        assert more != least

        def replaced(*args: Any) -> None:
            made.append(True)
            replace_steps(*args)

        split_steps(model, 1)
        decoder.slots.captures_aside, decoder.slots._replace_steps = True, replaced
        decoder.placed.choose = lambda now, num_sequences, *_: least if num_sequences == 4 else more

    wanted = answers(tiny_folders["llama"], ("cpu", None), lambda model: None)
    assert len(wanted) == 8
    assert answers(tiny_folders["llama"], backend, goes_aside) == wanted
    assert made
