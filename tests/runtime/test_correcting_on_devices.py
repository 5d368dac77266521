"""Cache correction where the KV cache is on the host and a GPU decodes, wherever heads are.

Without a GPU the step runs inline on CPU tensors, or a thread plays the GPU; with one, as graph and
as stream, too. Here a step waits for it; `test_correcting_in_background` is of the other way.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases.correcting import padded
from cases.device_cases import (
    FLAGS,
    GRAPH,
    INLINE,
    SLOW_INLINE,
    STREAM,
    each_of,
    greedy,
    keep_least_on_gpu,
    load,
    small,
)
from cases.inside import (
    correct_in_background,
    decoder_of,
    least_placement_of,
    resident_of,
    runtime_of,
)
from cases.prefill_cases import copy_alongside
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload import OffloadedModel
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.models.shape import MODEL_SHAPES
from offload.prefill import forward as prefill_forward
from offload.prefill.memory import PrefillMemory
from offload.runtime.correcting import corrections_for
from offload.selection.policy import DENSE, RETRIEVE, REUSE
from offload.system.errors import DeviceMemoryError

EVERY, PROMPT = 20, 130
EXACT = 5e-4  # of float32; what sparse steps leave is off by more than twice that
# What is on the GPU beside windows and dense layers: nothing, heads that retrieve and rows that it
# fetches, codes of keys.
PLACED = {"exact_topk": "", "lychee_cluster": "", "lychee_decode": "gathered", "sketch": "codes"}
backend = each_of(SLOW_INLINE, FLAGS, STREAM, GRAPH, scope="function")


def load_placed(folder: Path, name: str, backend: Any, **options: Any) -> Any:
    model = load(folder, small(name), backend, cache_correction_every=EVERY, **options)
    decoder = decoder_of(model)
    places, roles = np.array(least_placement_of(model).places), decoder.attention.roles
    if PLACED[name] == "gathered":
        places[(roles == RETRIEVE) | (roles == DENSE)] = Place.GPU
        places[roles == REUSE] = Place.GATHER
    if PLACED[name] == "codes":
        places[1:] = Place.CODES
    decoder.place(HeadPlacement(places))
    return correct_in_background(model, False)


def kv_error(cache: Any, exact: Any, first: int = 0, last: int | None = None) -> float:
    """The largest of any layer's keys or values of tokens first .. last, relative to their norm."""
    pairs = zip(cache, exact, strict=True)
    rows = [
        (x[:, :, first:last].float(), y[:, :, first:last].float())
        for ours, others in pairs
        for x, y in zip(ours[:2], others[:2], strict=True)
    ]
    return max(float((x - y).norm() / y.norm()) for x, y in rows)


def read(model: Any, tokens: torch.Tensor) -> Any:
    """A cache with `tokens`, read at once."""
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens.to(model.device), past_key_values=cache)
    return cache


def go_on(model: Any, cache: Any, text: torch.Tensor, length: int) -> Any:
    """`text`, of which `cache` may have some, and `length` tokens."""
    mask = torch.ones_like(text)  # the stock loop would hide padding
    return greedy(model, text, length, past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("name", slow_but(PLACED, "lychee_cluster", "lychee_decode"))
def test_tokens_and_keys(folder: Path, backend: Any, name: str) -> None:
    """The tokens are those of the CPU's own decoder. Keys and values are those of one prefill but
    for the newest token's, behind another prompt, too."""
    cpu = load(folder, small(name), ("cpu", None), cache_correction_every=EVERY)
    exact, model = load(folder, "full", ("cpu", None)), load_placed(folder, name, backend)
    text, cache = random_tokens(1, PROMPT), model.new_cache()
    for num_waiting in range(2):
        length = 2 * EVERY + 2  # of which the last is not in the cache
        expected = greedy(cpu, text, length, attention_mask=torch.ones_like(text))
        text = go_on(model, cache, text, length)
        assert torch.equal(text, expected)
        assert model.offload_stats().corrected_tokens == num_waiting + 2 * EVERY
        assert kv_error(cache, read(exact, text[:, :-1]), last=-1) < EXACT
        text = torch.cat([text, random_tokens(1, 9, seed=3)], dim=1)
    assert model.kv_store.num_sequences == 1


def test_a_prompt_corrects_what_waits(folder: Path, backend: Any) -> None:
    """By what a GPU builds during a prefill, with which decoding goes on."""
    name = "lychee_cluster"
    model, exact = load_placed(folder, name, backend), load(folder, "full", ("cpu", None))
    cache = model.new_cache()
    text = go_on(model, cache, random_tokens(1, PROMPT), 9)
    text = torch.cat([text, random_tokens(1, 30, seed=3)], dim=1)
    assert kv_error(cache, read(exact, text[:, : PROMPT + 8])) > 1e-3
    out = go_on(model, cache, text, 1)
    assert kv_error(cache, read(exact, text)) < EXACT
    cpu = load(folder, small(name), ("cpu", None), cache_correction_every=EVERY)
    expected = greedy(cpu, out, 30, attention_mask=torch.ones_like(out))
    assert torch.equal(go_on(model, cache, out, 30), expected)


def test_rows_of_a_batch(folder: Path, backend: Any) -> None:
    """They are due at other steps, and go on in the slots that they had."""
    model = load_placed(folder, "exact_topk", backend)
    prompts = [random_tokens(1, n, seed=n) for n in (PROMPT, 55, PROMPT)]
    tokens, mask = padded(prompts)
    out = greedy(model, tokens, 50, attention_mask=mask)
    assert model.offload_stats().corrected_tokens == 2 * 2 * EVERY + EVERY
    for row, prompt in zip(out, prompts, strict=True):
        assert torch.equal(row[PROMPT:], greedy(model, prompt, 50)[0, prompt.shape[1] :])


@pytest.mark.parametrize("backend", [INLINE, STREAM, GRAPH])
@pytest.mark.parametrize("name", ["exact_topk", "lychee_decode"])
def test_int8_rows(folder: Path, backend: Any, name: str) -> None:
    """They are corrected to those of one prefill, but for a code's rounding."""
    int8, native = {"kv_dtype": "int8"}, ("cpu", None)
    exact, errors = load(folder, "full", native, **int8), []
    cpu = load(folder, small(name), native, cache_correction_every=EVERY, **int8)
    device = load_placed(folder, name, backend, **int8)
    for model, length in ((device, EVERY), (device, EVERY + 2), (cpu, EVERY + 2)):
        cache = model.new_cache()
        text = go_on(model, cache, random_tokens(1, PROMPT), length)
        assert model.offload_stats().corrected_tokens == (length > EVERY) * EVERY
        errors.append(kv_error(cache, read(exact, text[:, :-1]), PROMPT, PROMPT + EVERY - 1))
    drifted, corrected, on_cpu = errors
    assert corrected < min(0.5 * drifted, max(0.01, 1.5 * on_cpu)), errors


@pytest.mark.parametrize("backend", [INLINE, STREAM, GRAPH])
def test_bfloat16(folder: Path, backend: Any) -> None:
    """No farther from exact keys and values than a prefill in this dtype is."""
    device, how = backend
    options = {"dtype": "bfloat16", "device": device, "backend": how, "num_threads": 1}
    options |= {"page_tokens": 16, "policy": small("exact_topk")}
    model = OffloadedModel.from_pretrained(folder, cache_correction_every=EVERY, **options)
    correct_in_background(model, False)
    uncorrected = OffloadedModel.from_pretrained(folder, **options)
    for loaded in (model, uncorrected):
        keep_least_on_gpu(loaded)
    text, cache = random_tokens(1, PROMPT), model.new_cache()
    text = go_on(model, cache, text, EVERY + 2)[:, :-1]
    exact = read(load(folder, "full", ("cpu", None)), text)
    of_prefill = kv_error(read(uncorrected, text), exact, PROMPT)
    assert kv_error(cache, exact, PROMPT, -1) < 1.5 * of_prefill
    drifted = read(uncorrected, text[:, :PROMPT])
    with torch.no_grad():
        for token in text[:, PROMPT:].to(model.device).split(1, dim=1):
            uncorrected(token, past_key_values=drifted)
    assert kv_error(drifted, exact, PROMPT) > 2 * of_prefill


def test_one_that_fails(folder: Path, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU has of the sequence stays, and is true behind it."""
    model = load_placed(folder, "lychee_decode", backend)
    tokens = random_tokens(1, PROMPT + EVERY + 4).to(model.device)
    cache = read(model, tokens[:, :PROMPT])

    def steps(cache: Any, start: int, stop: int) -> torch.Tensor:
        with torch.no_grad():
            columns = tokens[:, start:stop].split(1, dim=1)
            return torch.cat([model(x, past_key_values=cache).logits for x in columns])

    due = PROMPT + EVERY
    steps(cache, PROMPT, due)
    unharmed, resident, before = copy.deepcopy(cache), resident_of(model), set(cache.seqs)
    assert [slot.seq for slot in resident.slots if slot.seq is not None] == list(cache.seqs)

    def failing(*_: Any) -> Any:
        bound = {slot.seq for slot in resident.slots} - {None}
        assert bound == before
        raise ValueError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(prefill_forward, "attend", failing)
        with pytest.raises(ValueError, match="a fault"):
            steps(cache, due, due + 1)
    end = tokens.shape[1]
    logits, expected = steps(cache, due, end), steps(unharmed, due, end)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_copies_beside_the_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's prefill does to bring cached tokens and to write anew, on CPU tensors."""
    model = load_placed(folder, "exact_topk", ("cpu", "inline"))
    exact = read(load(folder, "full", ("cpu", None)), random_tokens(1, PROMPT + EVERY + 1))
    tokens = random_tokens(1, PROMPT + EVERY + 1)
    cache = read(model, tokens[:, :PROMPT])
    copy_alongside(monkeypatch)
    with torch.no_grad():
        for token in tokens[:, PROMPT:].split(1, dim=1):
            model(token, past_key_values=cache)
    assert model.offload_stats().corrected_tokens == EVERY
    assert kv_error(cache, exact, last=-1) < EXACT


@pytest.mark.parametrize("limit", ["free", "max_memory"])
def test_a_gpu_without_room(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a generation begins, if it is so long that something is corrected."""
    shape, rows, every, most = MODEL_SHAPES["tiny"], 3, 100, 2000
    sizes = {"item_bytes": 2, "slice_tokens": 512, "page_tokens": 64, "builds_index": False}
    again = every + 2 * (4 + 1)  # with those that come beside two corrections
    past = rows * (most - again)
    need = PrefillMemory.of(shape, num_tokens=rows * again, past_tokens=past, **sizes)
    resident = 1000  # makes room
    room = {"free": 2**40, "max_memory": 2**40, limit: need.total_bytes - resident}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room["free"], 2**40))
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    store: Any = SimpleNamespace(dtype=torch.bfloat16, page_tokens=64, num_layers=4)
    decoder: Any = SimpleNamespace(device_bytes=resident)
    lean = SimpleNamespace(shape=shape)

    def check(max_tokens: int) -> None:
        config: Any = SimpleNamespace(  # a real one needs a GPU
            policy=small("exact_topk"),
            prefill_slice_tokens=512,
            max_memory={0: room["max_memory"]},
            cache_correction_every=every,
        )
        opened: Any = SimpleNamespace(config=config, device=torch.device("cuda"), lean=lean)
        corrections = corrections_for(opened, store, decoder)
        assert corrections is not None
        corrections.check_device(rows, max_tokens)

    check(most)
    room[limit] -= 1
    with pytest.raises(DeviceMemoryError, match=r"every=100 reads 110 tokens of 3 seq"):
        check(most)
    room[limit] = 0
    check(64 + every)  # 64 of them are decoded exactly
    with pytest.raises(DeviceMemoryError, match="lower max_new_tokens"):
        check(64 + every + 1)


def test_a_generation_asks_for_room(folder: Path) -> None:
    """Before its prompt is read."""
    model = load_placed(folder, "exact_topk", ("cpu", "inline"))

    def full(num_tokens: int, past_tokens: int) -> None:
        assert (num_tokens, past_tokens) == (EVERY, PROMPT + 49 - EVERY)
        raise DeviceMemoryError("none is left")

    runtime_of(model).sequences.corrections._check_room = full
    with pytest.raises(DeviceMemoryError, match="up to 179 again, for which none is left; or"):
        greedy(model, random_tokens(1, PROMPT), 50)
    assert model.offload_stats().prefill_tokens == model.kv_store.host_bytes_used == 0
