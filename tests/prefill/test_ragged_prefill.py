"""Prefill where KV heads have other numbers of cached tokens, and prefill that keeps nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.prefill_cases import cached, copy_alongside, run_prefill, store_for, tiny_lean_model
from cases.tiny_models import random_tokens

from cpu_ops.worker_pool import WorkerPool
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.batch import pack
from offload.prefill import forward
from offload.prefill.attention import NATIVE, attention_kernel
from offload.prefill.forward import prefill

PAGE_TOKENS = 16


def ragged_store(lean: LeanModel, dtype: torch.dtype = torch.float32) -> tuple[KVStore, list[int]]:
    """A store of three sequences: heads of the first have other tokens, the third has none."""
    store = store_for(lean, dtype, per_head_pages=True)
    seqs = [store.new_sequence() for _ in range(3)]
    run_prefill(lean, store, seqs[:2], [90, 37])
    rng = np.random.default_rng(3)
    lens = rng.integers(1, 5, (store.num_layers, store.num_kv_heads)) * PAGE_TOKENS
    lens[0, 0], lens[1] = 80, 80  # all heads of a layer may be alike

    def rows(layer_idx: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = store.gather(seqs[0], layer_idx)
        return [
            (k[:n].clone(), v[:n].clone())
            for k, v, n in zip(keys, values, lens[layer_idx].tolist(), strict=True)
        ]

    store.rewrite(seqs[0], lens, rows)
    run_prefill(lean, store, seqs[:1], [5], seed=5)
    return store, seqs


def masked_attention(store: KVStore, seqs: list[int]) -> Any:
    """`_attend` in float64, where a head does not see what it lacks."""

    def attend(q, layer_idx, stream, layer, start, stop, pool):
        parts = []
        for sequence, of_slice, kv_len in stream.spans(start, stop):
            n = of_slice.stop - of_slice.start
            keys, values = (x.double() for x in stream.rows(sequence, 0, kv_len))
            group_size = len(q) // len(keys)
            keys, values = (x.repeat_interleave(group_size, 0) for x in (keys, values))
            position, query = torch.arange(kv_len), torch.arange(kv_len - n, kv_len)
            starts = torch.from_numpy(store.starts(seqs[sequence])[layer_idx].copy())
            starts = starts.repeat_interleave(group_size)
            hidden = (position > query[:, None]) | (position < starts[:, None, None])
            scores = q[:, of_slice].double() @ keys.mT * layer.spec.sm_scale
            o = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
            parts.append(o.transpose(0, 1).to(q.dtype))
        return torch.cat(parts).flatten(1)

    return attend


def run(lean: LeanModel, store: KVStore, seqs: list[int], **options: Any) -> torch.Tensor:
    """New tokens of all three sequences, in slices that do not end with them."""
    return run_prefill(lean, store, seqs, [50, 9, 31], seed=1, **options)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("alongside", [False, True])
def test_heads_attend_to_what_they_have(monkeypatch, name: str, alongside: bool) -> None:
    _, lean = tiny_lean_model(name)
    if alongside:
        copy_alongside(monkeypatch)
    store, seqs = ragged_store(lean)
    starts = store.starts(seqs[0]).copy()
    assert starts.any()
    before = cached(store, seqs[0])
    hidden = run(lean, store, seqs)
    assert [store.kv_len(seq) for seq in seqs] == [80 + 5 + 50, 37 + 9, 31]
    assert (store.starts(seqs[0]) == starts).all()
    after = [cached(store, seq) for seq in seqs]
    for old, new in zip(before, after[0], strict=True):
        assert torch.equal(new[:, :, :85], old)

    store, seqs = ragged_store(lean)
    monkeypatch.setattr(forward, "_attend", masked_attention(store, seqs))
    expected = run(lean, store, seqs)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    for seq, layers in zip(seqs, after, strict=True):
        for x, y in zip(layers, cached(store, seq), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("as_one", [False, True])
def test_a_head_without_a_cached_token(monkeypatch, as_one: bool) -> None:
    """It attends to new ones only; with `as_one` by a kernel that takes all keys in one array."""
    _, lean = tiny_lean_model()
    found = []
    for is_reference in (False, True):
        store, seqs = ragged_store(lean)
        store.truncate(seqs[0], int(store.starts(seqs[0]).max()))
        with monkeypatch.context() as patched:
            if is_reference:
                patched.setattr(forward, "_attend", masked_attention(store, seqs))
            elif as_one:
                patched.setattr(forward, "takes_all_keys", lambda q, pool: True)
            found.append(run(lean, store, seqs))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_heads_attend_with_the_pool(monkeypatch) -> None:
    """The native kernel, up to the rounding of bfloat16."""
    _, lean = tiny_lean_model("llama", torch.bfloat16)
    pool = WorkerPool(2)
    q = torch.zeros(lean.shape.num_qo_heads, 8, lean.shape.head_dim, dtype=torch.bfloat16)
    if attention_kernel(q, lean.shape.num_kv_heads, pool) != NATIVE:
        pool.close()
        pytest.skip("no causal attention in bfloat16 on this CPU")
    store, seqs = ragged_store(lean, torch.bfloat16)
    hidden = run(lean, store, seqs, pool=pool).double()
    pool.close()
    store, seqs = ragged_store(lean, torch.bfloat16)
    monkeypatch.setattr(forward, "_attend", masked_attention(store, seqs))
    expected = run(lean, store, seqs).double()
    assert (hidden - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("alongside", [False, True])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_prefill_that_keeps_nothing(monkeypatch, alongside: bool, is_ragged: bool) -> None:
    """It attends as one that keeps its tokens, and the store is as it was."""
    _, lean = tiny_lean_model()
    if alongside:
        copy_alongside(monkeypatch)
    if is_ragged:
        store, seqs = ragged_store(lean)
    else:
        store = store_for(lean)
        seqs = [store.new_sequence() for _ in range(3)]
        run_prefill(lean, store, seqs[:2], [85, 37])
    before = [cached(store, seq) for seq in seqs]
    used, past = store.host_bytes_used, [store.kv_len(seq) for seq in seqs]
    lengths, longest = torch.tensor([50, 9, 31]), 50
    attended = torch.arange(longest) < lengths[:, None]
    positions = torch.arange(longest) + torch.tensor(past)[:, None]
    batch = pack((3, longest), attended, positions)
    tokens = random_tokens(3, longest, seed=1).flatten()[batch.columns]
    seen: list[tuple[int, int, int, int]] = []
    attended_to: dict[tuple[int, int], torch.Tensor] = {}
    queries_of: dict[tuple[int, int], list[torch.Tensor]] = {}

    def on_attended(layer_idx: int, seq: int, queries: torch.Tensor, kv: Any) -> None:
        seen.append((layer_idx, seq, queries.shape[1], kv[0].shape[1]))
        attended_to[layer_idx, seq] = torch.stack(kv)  # of the last slice: all
        queries_of.setdefault((layer_idx, seq), []).append(queries.clone())

    with torch.no_grad():
        hidden = prefill(
            lean,
            lean.embed_tokens(tokens).detach(),
            batch,
            store=store,
            seqs=seqs,
            slice_tokens=24,
            keeps=False,
            on_attended=on_attended,
        )
    assert [store.kv_len(seq) for seq in seqs] == past
    assert store.host_bytes_used == used
    for seq, layers in zip(seqs, before, strict=True):
        assert all(map(torch.equal, cached(store, seq), layers))
    of_layer = [(seq, n, end) for layer_idx, seq, n, end in seen if layer_idx == 1]
    assert of_layer == [
        (seqs[0], 24, past[0] + 24),
        (seqs[0], 24, past[0] + 48),
        (seqs[0], 2, past[0] + 50),
        (seqs[1], 9, past[1] + 9),
        (seqs[2], 13, 13),
        (seqs[2], 18, 31),
    ]

    recorded: dict[tuple[int, int], list[torch.Tensor]] = {}
    expected = run(
        lean,
        store,
        seqs,
        on_queries=lambda seq, layer_idx, q, _: recorded.setdefault((layer_idx, seq), []).append(
            q.clone()
        ),
    )
    assert torch.equal(hidden, expected)
    for seq in seqs:
        for layer_idx, layer in enumerate(cached(store, seq)):
            assert torch.equal(attended_to[layer_idx, seq], layer)
            pairs = zip(queries_of[layer_idx, seq], recorded[layer_idx, seq], strict=True)
            assert all(torch.equal(x, y) for x, y in pairs)
