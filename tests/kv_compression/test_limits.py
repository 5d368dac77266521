"""What a model with `host_bytes_per_sequence` refuses, and how it fails: in time, and whole."""

from __future__ import annotations

import copy
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.bounded_cases import generate, rows_of, step
from cases.inside import compression_of
from cases.slowly import slow_but
from cases.tiny_models import make_tiny_model, random_tokens

import offload.kv_compression.base as base
from offload import OffloadedModel
from offload.kv.page_pool import PagePool
from offload.kv.store import HostBudgetError
from offload.policies.registry import make_policy

Load = Callable[..., Any]
SLOTS, PAGE_TOKENS = 192, 16
WINDOW_BYTES = 3 * 16 * 6 * 32 * 4  # layers, queries, query heads, head_dim, float32


@pytest.mark.parametrize("num_tokens", slow_but([20, 47, 63], 63))
def test_long_drafts(bounded: Load, num_tokens: int) -> None:
    """As long as one can be taken back whole; longer ones are refused before anything."""
    model, text = bounded(SLOTS), random_tokens(1, 30).repeat(1, 5)
    output = generate(model, text, 150, prompt_lookup_num_tokens=num_tokens)
    assert output.shape == (1, 300)
    with pytest.raises(ValueError, match=r"prompt_lookup_num_tokens=64 .* full sequence 64 tokens"):
        generate(model, text, 150, prompt_lookup_num_tokens=64)
    with pytest.raises(ValueError, match="assistant_model with host_bytes_per_sequence"):
        generate(model, text, 150, assistant_model=bounded(None))
    with pytest.raises(ValueError, match="an assistant_model cannot have host_bytes_per_sequence"):
        generate(bounded(None), text, 150, assistant_model=model)


@pytest.mark.parametrize("shared", [False, True])
def test_a_failure_while_writing(
    bounded: Load, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers are condensed, others not: the sequence is refused, and its fork is as it was."""
    model, tokens = bounded(SLOTS), random_tokens(1, SLOTS)
    cache, calls = model.new_cache(), []
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    fork = copy.deepcopy(cache) if shared else None
    before, append = rows_of(cache), type(cache.store).append

    def fails(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no more")
        append(*arguments, **options)

    monkeypatch.setattr(type(cache.store), "append", fails)
    with pytest.raises(MemoryError, match="no more"):
        step(model, cache)
    monkeypatch.undo()
    for broken in (cache, copy.deepcopy(cache)):
        with pytest.raises(RuntimeError, match="start a new cache"):
            step(model, broken)
    if fork is not None:
        for now, then in zip(rows_of(fork), before, strict=True):
            assert torch.equal(now, then)
        step(model, fork)
    cache.reset()
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    step(model, cache)


def test_forks_keep_within_the_budget_that_was_checked(bounded: Load) -> None:
    """Rows of one prompt, each of which comes to its bound: not a page more than they have."""
    model, tokens = bounded(SLOTS), random_tokens(1, 20)
    pool = model.kv_store._pool
    pool.ledger.limit_bytes = 3 * (SLOTS // PAGE_TOKENS * 3 * pool.page_bytes + WINDOW_BYTES)
    options = {"max_new_tokens": 200, "num_return_sequences": 3, "eos_token_id": None}
    torch.manual_seed(0)
    assert model.generate(tokens, do_sample=True, **options).shape == (3, 220)
    pool.ledger.limit_bytes -= 1
    with pytest.raises(HostBudgetError, match="3 sequences of up to 219 tokens"):
        model.generate(tokens, do_sample=True, **options)


def test_windows_are_within_the_budget(bounded: Load) -> None:
    """Refused before anything is computed, where it is the window that does not fit."""
    model, tokens = bounded(SLOTS), random_tokens(1, 16)
    pool = model.kv_store._pool
    cache = model.new_cache()
    pool.ledger.limit_bytes = WINDOW_BYTES - 1
    with (
        pytest.raises(HostBudgetError, match="what is kept to condense sequences"),
        torch.no_grad(),
    ):
        model(tokens, past_key_values=cache)
    pool.ledger.limit_bytes = 3 * pool.page_bytes + WINDOW_BYTES - 1
    with pytest.raises(HostBudgetError, match="the host KV cache needs"), torch.no_grad():
        model(tokens, past_key_values=cache)
    assert cache.seqs == ()
    pool.ledger.limit_bytes += 1
    with torch.no_grad():
        model(tokens, past_key_values=cache)


def test_condensing_is_in_the_times(bounded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bounded(SLOTS)
    compression = compression_of(model)
    condense = compression.condense_heads

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return condense(*arguments)

    monkeypatch.setattr(compression, "condense_heads", slow)
    generate(model, random_tokens(1, SLOTS + 40), 20)
    stats = model.offload_stats()
    assert stats.prefill_seconds > 3 * 0.02
    assert stats.decode_seconds > 3 * 0.02
    assert stats.condense_seconds > 2 * 3 * 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_bytes_per_sequence": "100KiB"}, "too little: 4 sink tokens, 60 recent ones"),
        ({"host_bytes_per_sequence": 0}, "too little"),
        ({"host_bytes_per_sequence": -1}, "host_bytes_per_sequence must not be negative"),
        ({"host_bytes_per_sequence": "1 parsec"}, "host_bytes_per_sequence: cannot read"),
        ({"host_bytes_per_sequence": 2**20, "tensor_parallel_size": 2}, "is for one process"),
        ({"condensed_share": 0.5}, "condensed_share=0.5 needs host_bytes_per_sequence"),
        ({"condensed_share": 1.5}, "condensed_share must be a number from 0 to 1"),
    ],
)
def test_refused_when_loaded(
    long_folder: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.runtime import model_loading

    monkeypatch.setattr(
        model_loading, "load_stock_model", lambda *a: pytest.fail("weights were read")
    )
    with pytest.raises(ValueError, match=message):
        OffloadedModel.from_pretrained(long_folder, page_tokens=16, **options)


@pytest.mark.parametrize("policy", ["full", "lfps", "lychee_cluster", "sketch"])
def test_the_bytes_that_an_error_names_are_enough(long_folder: Path, policy: str) -> None:
    chosen = policy if policy == "full" else make_policy(policy, budget_tokens=90)
    options: dict[str, Any] = {"page_tokens": PAGE_TOKENS, "num_threads": 1, "policy": chosen}
    options |= {"condense_by": "attention"}
    with pytest.raises(ValueError, match="too little") as caught:
        OffloadedModel.from_pretrained(long_folder, host_bytes_per_sequence=1, **options)
    named = re.search(r"need (\d+) bytes", str(caught.value))
    assert named is not None
    least = int(named[1])
    with pytest.raises(ValueError, match=f"need {least} bytes"):
        OffloadedModel.from_pretrained(long_folder, host_bytes_per_sequence=least - 1, **options)
    model = OffloadedModel.from_pretrained(long_folder, host_bytes_per_sequence=least, **options)
    assert model.new_cache().bound.slots >= 96


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_follows_the_longest_position(
    rope_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of a prompt would be rotated otherwise than all of it."""
    from offload.runtime import model_loading

    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 8.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        rope |= {**factors, "original_max_position_embeddings": 128}
    model = make_tiny_model("llama", max_position_embeddings=256, rope_parameters=rope)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(
        model_loading, "load_stock_model", lambda *a: pytest.fail("weights were read")
    )
    with pytest.raises(ValueError, match=rf"host_bytes_per_sequence .* rope_type='{rope_type}'"):
        OffloadedModel.from_pretrained(tmp_path, host_bytes_per_sequence="1GiB")


@pytest.mark.parametrize("is_much", [False, True])
def test_freed_memory_goes_back_once_in_a_pass(
    bounded: Load, is_much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back for all rows, also where one fails, but not for what rows of this model take."""
    calls: list[None] = []
    monkeypatch.setattr(base, "give_back_free_memory", lambda: calls.append(None))
    if is_much:
        monkeypatch.setattr(base, "_MUCH_BYTES", 2**10)
    model = bounded(SLOTS)
    compression, cache = compression_of(model), model.new_cache()
    with torch.no_grad():
        model(random_tokens(3, SLOTS), past_key_values=cache)
    assert not calls
    step(model, cache)
    assert [row.seen for row in cache.tokens] == [SLOTS + 1] * 3
    assert max(cache.kv_lens) < SLOTS
    assert len(calls) == is_much
    monkeypatch.setattr(compression, "condense_heads", lambda *arguments: pytest.fail("no more"))
    with torch.no_grad(), pytest.raises(pytest.fail.Exception, match="no more"):
        model(random_tokens(3, SLOTS), past_key_values=cache)
    assert len(calls) == 2 * is_much
    del cache


@pytest.mark.parametrize("num_new", [800, pytest.param(50_000, marks=pytest.mark.slow)])
def test_memory_of_a_long_generation(
    bounded: Load, num_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more pages than the bound has, in the middle of a pass neither."""
    model, most = bounded(SLOTS), [0]
    allocate = PagePool.allocate

    def watched(self: PagePool, n: int) -> Any:
        taken = allocate(self, n)
        most[0] = max(most[0], self.num_used)
        return taken

    monkeypatch.setattr(PagePool, "allocate", watched)
    output = generate(model, random_tokens(1, 64), num_new)
    assert output.shape == (1, 64 + num_new)
    stats = model.offload_stats()
    assert stats.kv_host_bytes == SLOTS * model.kv_store.page_bytes * 3 // 16
    assert model.kv_store.host_bytes_reserved == stats.kv_host_bytes  # no slab of 64 MiB
    assert most[0] == SLOTS // PAGE_TOKENS * 3
    assert stats.condensed_tokens >= num_new + 63 - SLOTS
    del output
    gc.collect()
