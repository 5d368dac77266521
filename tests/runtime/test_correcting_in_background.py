"""Corrections beside the steps that come next, as with a GPU: on a CPU, where a thread plays the
GPU, and with one as graph and as stream."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.correcting import largest_difference, padded, read, rows_of
from cases.device_cases import FLAGS, GRAPH, INLINE, STREAM, greedy, load, small
from cases.inside import (
    background_of,
    correct_in_background,
    corrections_of,
    decoder_of,
    runtime_of,
    states_of,
)
from cases.prefill_cases import copy_alongside
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload.kv.page_pool import PagePool
from offload.policies.quest.policy import BoundsState
from offload.prefill import forward as prefill_forward
from offload.runtime.correcting import Corrections
from offload.system.errors import DeviceMemoryError

EVERY, PROMPT, BESIDE = 20, 130, 4  # steps beside which it goes: of three layers
POLICIES = ["exact_topk", "lychee_cluster", "lychee_decode", "lfps", "quest", "sketch"]


@pytest.fixture(scope="module")
def folder(tiny_folders: dict[str, Path]) -> Path:
    return tiny_folders["llama"]


@pytest.fixture(scope="module")
def exact(folder: Path) -> Any:
    return load(folder, "full", ("cpu", None))


@pytest.fixture(params=[INLINE, FLAGS, STREAM, GRAPH])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def corrected(folder: Path, name: str, backend: Any = ("cpu", None), **options: Any) -> Any:
    options = {"cache_correction_every": EVERY, "num_threads": 1} | options
    return correct_in_background(load(folder, small(name), backend, **options))


def decode(model: Any, cache: Any, num_steps: int, token: int = 1) -> list[int]:
    """So many greedy steps of one sequence from `token`, and none in turn."""
    chosen = []
    for _ in range(num_steps):
        position = torch.tensor([cache.get_seq_length()])
        out = runtime_of(model).choose_tokens(cache, torch.tensor([token]), position)
        chosen.append(token := int(out[0, 0]))
    return chosen


def text_of(prompt: torch.Tensor, chosen: list[int], token: int = 1) -> torch.Tensor:
    """What a cache has after `decode`."""
    return torch.cat([prompt, torch.tensor([[token, *chosen[:-1]]])], dim=1)


def difference(cache: Any, other: Any, first: int, last: int) -> float:
    """The largest of keys or values of these tokens, which both have."""
    part = (slice(None), slice(None), slice(first, last))
    pairs = zip(rows_of(cache), rows_of(other), strict=True)
    return max(float((x[part] - y[part]).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("name", slow_but(POLICIES, "lychee_cluster", "lychee_decode"))
def test_tokens_and_keys(folder: Path, exact: Any, backend: Any, name: str) -> None:
    """What waited is exact behind it, what came meanwhile is not yet; tokens are the CPU's."""
    model, cpu = corrected(folder, name, backend), corrected(folder, name)
    never = load(folder, small(name), ("cpu", None), num_threads=1)
    text, cache = random_tokens(1, PROMPT), model.new_cache()
    mask = {"attention_mask": torch.ones_like(text)}
    out = greedy(model, text, EVERY + BESIDE + 1, past_key_values=cache, **mask)
    assert torch.equal(out, greedy(never, text, EVERY + BESIDE + 1, **mask))
    assert model.offload_stats().corrected_tokens == 0
    assert background_of(model) is None  # the generation is over
    assert model.kv_store.num_sequences == 1
    more = 2 * EVERY + 2
    out = greedy(model, text, more, **mask)
    assert torch.equal(out, greedy(cpu, text, more, **mask))
    assert model.offload_stats().corrected_tokens == EVERY
    assert 0 < model.offload_stats().correction_seconds < model.offload_stats().decode_seconds
    cache.reset()
    cache = read(model, text.to(model.device))[0]
    chosen = decode(model, cache, EVERY + BESIDE)
    whole = text_of(text, chosen)
    expected = read(exact, whole)[0]
    end = PROMPT + EVERY
    assert difference(cache, expected, PROMPT, end) > 1e-3
    behind = [x[:, :, end:].clone() for x in rows_of(cache)]
    later = decode(model, cache, 1, chosen[-1])
    assert difference(cache, expected, 0, end) < 5e-4
    for now, then in zip(rows_of(cache), behind, strict=True):
        assert torch.equal(now[:, :, end : end + BESIDE], then)
    assert later == decode(cpu, decoded(cpu, text, EVERY + BESIDE), 1, chosen[-1])


def decoded(model: Any, text: torch.Tensor, num_steps: int) -> Any:
    """A cache of `text` and so many tokens behind it."""
    cache = read(model, text.to(model.device))[0]
    decode(model, cache, num_steps)
    return cache


def test_layers_come_alongside(folder: Path, exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on CPU tensors."""
    model, text = corrected(folder, "exact_topk"), random_tokens(1, PROMPT)
    cache = read(model, text)[0]
    copy_alongside(monkeypatch)
    chosen = decode(model, cache, EVERY + BESIDE + 1)
    expected = read(exact, text_of(text, chosen))[0]
    assert difference(cache, expected, 0, PROMPT + EVERY) < 5e-4


@pytest.mark.parametrize("page_tokens", [16, 256])
def test_forks_keep_what_they_have(folder: Path, exact: Any, page_tokens: int) -> None:
    """Where tokens before and behind what is corrected are on the same page, too. A fork is
    corrected by itself."""
    model = corrected(folder, "lychee_cluster", page_tokens=page_tokens)
    text = random_tokens(1, PROMPT)
    cache = read(model, text)[0]
    chosen = decode(model, cache, EVERY + 1)
    fork = copy.deepcopy(cache)
    chosen += decode(model, cache, BESIDE - 1, chosen[-1])
    kept = copy.deepcopy(cache)
    before = [rows_of(fork), rows_of(kept)]
    assert background_of(model) is not None
    chosen += decode(model, cache, 1, chosen[-1])
    assert background_of(model) is None
    for now, then in zip([rows_of(fork), rows_of(kept)], before, strict=True):
        assert all(map(torch.equal, now, then))
    end = PROMPT + EVERY
    expected = read(exact, text_of(text, chosen))[0]
    assert difference(cache, expected, 0, end) < 5e-4 < 1e-3 < difference(kept, expected, 0, end)
    of_fork = decode(model, fork, BESIDE + 1, 7)
    tokens = text_of(text, [*chosen[:EVERY], 7, *of_fork])
    assert difference(fork, read(exact, tokens)[0], 0, end + 1) < 5e-4
    assert model.kv_store.num_sequences == 3


def test_what_ends_it(folder: Path, exact: Any) -> None:
    """Tokens that go, a prompt that follows, a cache that goes; what waited waits on."""
    model, text = corrected(folder, "exact_topk"), random_tokens(1, PROMPT)
    cache = read(model, text)[0]
    chosen = decode(model, cache, EVERY + 2)
    cache.crop(-2)  # which are behind it
    assert background_of(model) is not None
    cache.crop(-1)
    assert background_of(model) is None
    assert model.kv_store.num_sequences == 1
    chosen = chosen[: EVERY - 1] + decode(model, cache, 2, chosen[EVERY - 2])
    assert background_of(model) is not None
    prompt = random_tokens(1, 9, seed=3)
    model(prompt, past_key_values=cache)
    assert background_of(model) is None
    whole = torch.cat([text_of(text, chosen), prompt], dim=1)
    assert largest_difference(cache, read(exact, whole)[0]) < 5e-4
    decode(model, cache, EVERY + 2)
    assert background_of(model) is not None
    cache.reset()
    assert background_of(model) is None
    assert model.kv_store.num_sequences == model.kv_store.host_bytes_used == 0


@pytest.mark.parametrize("name", ["lychee_cluster", "exact_topk"])
@pytest.mark.parametrize("error", [ValueError("a fault"), KeyboardInterrupt()])
def test_one_that_fails(
    folder: Path, backend: Any, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its second layer: all is as before, and it begins again."""
    model, text = corrected(folder, name, backend), random_tokens(1, PROMPT)
    cache = decoded(model, text, EVERY)
    unharmed, before = copy.deepcopy(cache), rows_of(cache)
    attend, calls = prefill_forward.attend, []

    def failing(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return attend(*given)

    with monkeypatch.context() as patched:
        patched.setattr(prefill_forward, "attend", failing)
        with pytest.raises(type(error)):
            decode(model, cache, 9)
    assert len(calls) == 2
    assert background_of(model) is None
    assert model.kv_store.num_sequences == 2
    assert model.offload_stats().corrected_tokens == 0
    cache.crop(PROMPT + EVERY - cache.get_seq_length())
    assert all(map(torch.equal, rows_of(cache), before))
    assert decode(model, cache, EVERY) == decode(model, unharmed, EVERY)
    assert model.offload_stats().corrected_tokens == 2 * EVERY


def test_without_room_a_step_waits(
    folder: Path, exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does without a GPU."""
    model, text = corrected(folder, "exact_topk"), random_tokens(1, PROMPT)
    cache = read(model, text)[0]
    chosen = decode(model, cache, EVERY)

    def full(*given: Any, give_back: Any, **options: Any) -> Any:
        if give_back is None:
            raise DeviceMemoryError("none is left")
        return (yield from prefill_forward.prefill_by_layer(*given, **options))

    monkeypatch.setattr("offload.runtime.corrector.prefill_by_layer", full)
    chosen += decode(model, cache, 2, chosen[-1])
    assert model.offload_stats().corrected_tokens == EVERY + 1
    assert background_of(model) is None
    expected = read(exact, text_of(text, chosen))[0]
    assert difference(cache, expected, 0, PROMPT + EVERY + 1) < 5e-4


def test_it_makes_room_for_steps(
    folder: Path, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before heads have to leave the GPU."""
    model, text = corrected(folder, "exact_topk", backend), random_tokens(1, PROMPT)
    cache, decoder = decoded(model, text, EVERY + 2), decoder_of(model)
    placement, bind, refused = decoder.placement, decoder.slots._bind_in_room, []

    def refusing(*given: Any) -> Any:
        if background_of(model) is not None:
            refused.append(1)
            raise DeviceMemoryError("none is left")
        return bind(*given)

    with monkeypatch.context() as patched:
        patched.setattr(decoder.slots, "_bind_in_room", refusing)
        decode(model, cache, 1)
        decode(model, cache, 1)
    assert len(refused) == 2
    assert background_of(model) is None
    assert decoder.placement == placement
    decode(model, cache, BESIDE + 1)
    assert model.offload_stats().corrected_tokens == EVERY + 4


def test_what_is_kept_of_new_keys(folder: Path) -> None:
    """Bounds are those of the keys that there are now."""
    model, text = corrected(folder, "quest"), random_tokens(1, PROMPT)
    cache = decoded(model, text, EVERY + BESIDE)
    (seq,), states = cache.seqs, states_of(model)
    then = copy.deepcopy(states.arrays_of(seq).layers)
    runtime_of(model)._correct(cache)
    assert background_of(model) is None
    revised = copy.deepcopy(states.arrays_of(seq).layers)
    states.rebuild(seq)
    built = states.ensure(seq, PROMPT + EVERY + BESIDE + 1).layers
    changed = 0
    for ours, before, of_layer in zip(revised, then, built, strict=True):
        if ours:
            pages = int(of_layer["runs"][0])
            assert (ours["bounds"][:, :, :pages] == of_layer["bounds"][:, :, :pages]).all()
            changed += int((ours["bounds"] != before["bounds"]).any())
    assert changed


def test_rows_of_a_batch(folder: Path, backend: Any) -> None:
    """They are due at other steps, and are as they are alone."""
    model, cpu = corrected(folder, "exact_topk", backend), corrected(folder, "exact_topk")
    prompts = [random_tokens(1, n, seed=n) for n in (PROMPT, 55, PROMPT)]
    tokens, mask = padded(prompts)
    out = greedy(model, tokens, 60, attention_mask=mask)
    assert torch.equal(out, greedy(cpu, tokens, 60, attention_mask=mask))
    assert model.offload_stats().corrected_tokens == 3 * 2 * EVERY
    for row, prompt in zip(out, prompts, strict=True):
        assert torch.equal(row[PROMPT:], greedy(cpu, prompt, 60)[0, prompt.shape[1] :])


@pytest.mark.parametrize("every", [1, 3])  # fewer than steps that it goes on beside
def test_more_often_than_it_takes(folder: Path, every: int) -> None:
    """One follows the other: what came beside the last is read by the next."""
    model = corrected(folder, "exact_topk", cache_correction_every=every)
    text = random_tokens(1, PROMPT)
    greedy(model, text, 1 + every + 3 * BESIDE, attention_mask=torch.ones_like(text))
    assert model.offload_stats().corrected_tokens == every + BESIDE


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most tokens that wait in a step, its own included, of all sequences."""
    most, note = [0], Corrections.note

    def count(this: Any, batch: Any, seqs: Any, *given: Any) -> None:
        note(this, batch, seqs, *given)
        most.append(max(len(tokens.ids) for tokens in this._waiting.values()))

    monkeypatch.setattr(Corrections, "note", count)
    return most


@pytest.mark.parametrize("every", [1, 3, EVERY])
def test_no_more_wait_than_is_told(folder: Path, waiting: list[int], every: int) -> None:
    """Where a row is due when another's correction has just begun, too: there is room for them."""
    model = corrected(folder, "exact_topk", cache_correction_every=every)
    tokens, mask = random_tokens(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, : PROMPT - 63] = 0  # decoded exactly at first
    greedy(model, tokens, 60, attention_mask=mask)
    assert every + BESIDE < max(waiting) <= corrections_of(model)._most_waiting


@pytest.mark.parametrize("every", [1, 3, 6])
def test_caches_take_turns(folder: Path, waiting: list[int], every: int) -> None:
    """What the one gives up of the other is not begun again for ever."""
    model = corrected(folder, "exact_topk", cache_correction_every=every)
    caches = [read(model, random_tokens(1, PROMPT, seed=n))[0] for n in range(2)]
    for _ in range(40):
        for cache in caches:
            decode(model, cache, 1)
    assert max(waiting) <= corrections_of(model)._most_waiting


@pytest.mark.parametrize("max_tokens", [75, 80, 200])
def test_room_is_asked_for(folder: Path, max_tokens: int) -> None:
    """Where a generation ends before as many wait as may, too."""
    asked: list[tuple[int, int]] = []
    store, every, dense = load(folder, "full", ("cpu", None)).kv_store, 10, 64
    corrections = Corrections(every, store, dense, lambda *sizes: asked.append(sizes))
    corrections.check_device(1, dense + every)
    assert not asked  # nothing is due before the last token
    corrections.check_device(2, max_tokens)
    again = min(max_tokens - dense, corrections._most_waiting)
    assert asked == [(2 * again, 2 * (max_tokens - again))]


def test_end_that_fails(folder: Path, exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has come to its end all the same: the old pages do not come back."""
    model, text = corrected(folder, "quest"), random_tokens(1, PROMPT)
    cache = read(model, text)[0]
    chosen = decode(model, cache, EVERY + BESIDE)

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory, on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(BoundsState, "revise", fail)
        with pytest.raises(MemoryError):
            decode(model, cache, 1, chosen[-1])
    assert background_of(model) is None
    assert model.kv_store.num_sequences == 1
    assert states_of(model).arrays_of(cache.seqs[0]) is None  # built again, from the new keys
    chosen += decode(model, cache, 1, chosen[-1])
    expected = read(exact, text_of(text, chosen))[0]
    assert difference(cache, expected, 0, PROMPT + EVERY) < 5e-4
    assert corrections_of(model).waiting(cache.seqs[0]).first == PROMPT + EVERY


def test_ctrl_c_while_pages_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page is some sequence's, and the copies are known."""
    model, text = corrected(folder, "exact_topk"), random_tokens(1, PROMPT)
    cache = decoded(model, text, EVERY)
    used, allocate = model.kv_store.host_bytes_used, PagePool.allocate

    def interrupted(this: PagePool, num_pages: int) -> Any:
        page_ids = allocate(this, num_pages)
        signal.raise_signal(signal.SIGINT)
        return page_ids

    with monkeypatch.context() as patched:
        patched.setattr(PagePool, "allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decode(model, cache, 1)
    assert background_of(model) is not None
    cache.crop(-1)
    assert background_of(model) is None
    assert model.kv_store.num_sequences == 1
    assert model.kv_store.host_bytes_used == used
