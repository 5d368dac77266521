"""Prefill with copies alongside, what it does when memory runs out, and what it needs."""

from __future__ import annotations

import gc

import pytest
import torch
from cases.kv_store_cases import make_store
from cases.prefill_cases import cached, copy_alongside, run_prefill, store_for, tiny_lean_model
from cases.tiny_models import random_tokens

from offload.kv import transfer as device_copy
from offload.kv.store import HostBudgetError
from offload.kv.transfer import copy_from_pages, copy_to_pages
from offload.models.shape import MODEL_SHAPES
from offload.prefill import layer as prefill_layer
from offload.prefill.attention import attend
from offload.prefill.memory import PrefillMemory, check_fits
from offload.system.errors import DeviceMemoryError

GIB = 2**30


class Registration:
    """Remembers what is registered; refuses beyond `limit` calls."""

    def __init__(self, limit: int = 100) -> None:
        self.registered: dict[int, int] = {}
        self.limit = limit

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.registered) == self.limit:
            raise OSError("cudaHostRegister failed")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]


def prefilled(past, monkeypatch=None):
    """Hidden states, what is stored, and what the callbacks saw; alongside with a monkeypatch."""
    _, lean = tiny_lean_model()
    store = store_for(lean)
    seqs = [store.new_sequence() for _ in past]
    for seq, n in zip(seqs, past, strict=True):
        if n:
            run_prefill(lean, store, [seq], [n], seed=n)
    if monkeypatch is not None:
        copy_alongside(monkeypatch)
        monkeypatch.setattr(device_copy, "STAGING_BYTES", 1)
    seen = []
    hidden = run_prefill(
        lean,
        store,
        seqs,
        [70, 33],
        on_queries=lambda seq, layer_idx, q, kv_len: seen.append((seq, layer_idx, q, kv_len)),
        on_layer=lambda layer_idx, seq, k, v: seen.append((seq, layer_idx, k.clone(), len(v))),
    )
    return hidden, [cached(store, seq) for seq in seqs], seen


@pytest.mark.parametrize("past", [[0, 0], [5, 40], [16, 0]])
def test_copies_alongside_change_nothing(monkeypatch, past):
    """Two buffers, cached tokens brought in ahead, pages packed: the same store, bit by bit."""
    hidden, stored, seen = prefilled(past)
    other_hidden, other_stored, other_seen = prefilled(past, monkeypatch)
    assert torch.equal(hidden, other_hidden)
    for layers, other_layers in zip(stored, other_stored, strict=True):
        for layer, other in zip(layers, other_layers, strict=True):
            assert torch.equal(layer, other)
    assert len(seen) == len(other_seen)
    for record, other in zip(seen, other_seen, strict=True):
        assert torch.equal(record[2], other[2])
        assert (*record[:2], record[3]) == (*other[:2], other[3])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_steps_of_a_device_are_those_of_the_cpu(monkeypatch, name):
    """Norms, rotation and activation by the operators of `gpu_ops`: their references here."""
    _, lean = tiny_lean_model(name)
    results = []
    for on_device in (False, True):
        if on_device:
            copy_alongside(monkeypatch)
            monkeypatch.setattr(prefill_layer, "has_kernels", lambda x: True)
        store = store_for(lean)
        seqs = [store.new_sequence() for _ in range(2)]
        run_prefill(lean, store, seqs, [20, 31])
        hidden = run_prefill(lean, store, seqs, [30, 7], seed=1)
        results.append([hidden, *(torch.cat(cached(store, seq)) for seq in seqs)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_on_layer_sees_all_tokens():
    _, lean = tiny_lean_model()
    store = store_for(lean)
    seqs = [store.new_sequence() for _ in range(2)]
    seen = {}

    def on_layer(layer_idx, seq, keys, values):
        seen[seq, layer_idx] = torch.stack([keys, values])

    run_prefill(lean, store, seqs, [20, 50])
    run_prefill(lean, store, seqs, [30, 7], seed=1, on_layer=on_layer)
    assert len(seen) == 2 * store.num_layers
    for seq in seqs:
        for layer_idx, layer in enumerate(cached(store, seq)):
            assert torch.equal(seen[seq, layer_idx], layer)


@pytest.mark.parametrize("alongside", [False, True])
def test_non_finite_keys_name_the_layer(monkeypatch, alongside):
    stock, lean = tiny_lean_model()
    stock.model.layers[1].self_attn.v_proj.weight.data[3, 4] = torch.nan
    if alongside:
        copy_alongside(monkeypatch)
    store = store_for(lean)
    seqs = [store.new_sequence() for _ in range(2)]
    with pytest.raises(ValueError, match=r"non-finite values in layer 1 of sequence 0"):
        run_prefill(lean, store, seqs, [40, 8])


@pytest.mark.parametrize("alongside", [False, True])
def test_out_of_device_memory_frees_what_it_took(monkeypatch, alongside):
    _, lean = tiny_lean_model()
    if alongside:
        copy_alongside(monkeypatch)
    store = store_for(lean)
    seq = store.new_sequence()

    def on_layer(layer_idx, seq, keys, values):
        if layer_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    with pytest.raises(DeviceMemoryError, match="lower prefill_slice_tokens") as error:
        run_prefill(lean, store, [seq], [40], on_layer=on_layer)
    assert "slices of 24" in str(error.value)
    assert "Tried to allocate 2.00 GiB" in str(error.value)
    # Somebody who looks at the error must not keep the tensors alive.
    assert error.value.__context__ is None
    frame = error.value.__traceback__
    while frame is not None:
        assert frame.tb_frame.f_code.co_name != "run_layers"
        frame = frame.tb_next


def test_memory_of_128k_tokens_of_llama_8b():
    """Llama-3.1-8B in bfloat16 prefills 128K tokens inside 24 GiB, weights and context included."""
    shape, sizes = MODEL_SHAPES["llama-3.1-8b"], {"item_bytes": 2, "slice_tokens": 8192}
    q, kv, m, h, layers, vocabulary = 4096, 1024, 14336, 4096, 32, 128256
    weights = layers * (2 * h * q + 2 * h * kv + 3 * h * m + 2 * h) + 2 * vocabulary * h + h
    assert round(2 * weights / 1e9, 2) == 16.06
    memory = PrefillMemory.of(shape, num_tokens=128 * 1024, **sizes)
    print(f"\nweights {2 * weights / GIB:.2f} GiB; prefill {memory}")
    assert memory.kv_bytes == GIB
    assert memory.hidden_bytes == GIB + 128 * 1024 * 2 * 2 * 128
    context_bytes = GIB // 2
    assert 2 * weights + memory.total_bytes + context_bytes < 21 * GIB
    # With two dense layers resident, and behind as many cached tokens, it still fits.
    longer = PrefillMemory.of(shape, num_tokens=64 * 1024, past_tokens=64 * 1024, **sizes)
    assert longer.total_bytes < memory.total_bytes
    # An index counts where one is built.
    small = PrefillMemory.of(shape, num_tokens=100, **sizes)
    without = PrefillMemory.of(shape, num_tokens=100, builds_index=False, **sizes)
    assert small.total_bytes - without.total_bytes > 128 << 20
    assert "to build an index" in str(small)
    assert "index" not in str(without)
    assert 2 * weights + memory.total_bytes + context_bytes + GIB < 24 * GIB


def test_a_prefill_that_cannot_fit_is_refused_before():
    memory = PrefillMemory.of(
        MODEL_SHAPES["tiny"], item_bytes=2, num_tokens=1 << 20, slice_tokens=1 << 20
    )
    check_fits(memory, memory.total_bytes)
    check_fits(memory, memory.total_bytes - 100, already_there=100)
    with pytest.raises(DeviceMemoryError, match=r"lower prefill_slice_tokens.*max_memory"):
        check_fits(memory, memory.total_bytes - 1)


@pytest.mark.parametrize(("start", "n"), [(0, 8), (0, 7), (3, 2), (3, 30), (8, 16), (5, 11)])
def test_rows_to_pages_and_back(monkeypatch, start, n):
    """Whole pages in runs, the head and the tail of the rest by strips; nothing beside them."""
    monkeypatch.setattr(device_copy, "STAGING_BYTES", 3000)
    store = make_store()
    seq = store.new_sequence()
    store.reserve([seq], [40])
    zeros = torch.zeros(40, store.num_kv_heads, store.head_dim)
    store.append(seq, 1, zeros, zeros)
    rows = torch.randn(2, store.num_kv_heads, n, store.head_dim).transpose(1, 2)
    store.append_async(seq, 1, rows[0], rows[1], start)
    written = torch.stack(store.gather(seq, 1, 0, 40))
    assert torch.equal(written[:, :, start : start + n], rows.transpose(1, 2))
    assert (written[:, :, :start] == 0).all()
    assert (written[:, :, start + n :] == 0).all()

    read = torch.full_like(rows, torch.nan)
    sequence = store._sequence(seq)
    pieces = list(sequence.pieces(1, start, start + n))
    copy_from_pages((read[0], read[1]), pieces, store.format)
    assert torch.equal(read, rows)
    copy_to_pages((rows[0] + 1, rows[1]), pieces, store.format)
    assert torch.equal(store.gather(seq, 1, start, start + n)[0], (rows[0] + 1).transpose(0, 1))


def test_append_async_checks_like_append():
    store = make_store()
    seq = store.new_sequence()
    rows = torch.zeros(4, store.num_kv_heads, store.head_dim)
    with pytest.raises(ValueError, match="are not reserved"):
        store.append_async(seq, 0, rows, rows)
    store.reserve([seq], [4])
    with pytest.raises(ValueError, match="keys must be"):
        store.append_async(seq, 0, rows[:, 1:], rows[:, 1:])


def test_slabs_are_registered_and_unregistered():
    registration = Registration()
    store = make_store(pinned=registration)
    seq = store.new_sequence()
    store.reserve([seq], [10])
    assert sum(registration.registered.values()) == store.host_bytes_reserved
    assert int(store.page_table(seq)[0, 0]) >= min(registration.registered)
    store.close()
    assert not registration.registered
    store.close()


def test_a_dropped_store_unregisters():
    registration = Registration()
    store = make_store(pinned=registration)
    store.reserve([store.new_sequence()], [10])
    assert registration.registered
    del store
    gc.collect()
    assert not registration.registered


def test_a_refused_registration_changes_nothing():
    registration = Registration(limit=0)
    store = make_store(pinned=registration)
    seq = store.new_sequence()
    with pytest.raises(HostBudgetError, match="cudaHostRegister failed"):
        store.reserve([seq], [10])
    assert store.host_bytes_reserved == 0
    registration.limit = 1
    store.reserve([seq], [10])
    assert store.host_bytes_reserved > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_pinned_without_a_gpu():
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        make_store(pinned=True)


def test_a_generation_goes_on_after_one_that_ran_out_of_memory(monkeypatch, llama_pair):
    stock, model = llama_pair
    tokens = random_tokens(1, 50)
    calls = []

    def out_of_memory(*args):
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return attend(*args)

    with monkeypatch.context() as patch:
        patch.setattr("offload.prefill.forward.attend", out_of_memory)
        with pytest.raises(DeviceMemoryError, match="prefilling 50 tokens"):
            model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert model.kv_store.host_bytes_used == 0
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), stock.generate(tokens, **options))
