"""Parts of prefill: attention over past and new tokens, merging, the rotary embedding, packing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from cases.prefill_cases import reference_attention, run_prefill, store_for, tiny_lean_model
from cases.slowly import combinations
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cpu_ops.causal_attention import has_causal_attention
from cpu_ops.worker_pool import WorkerPool
from offload.models.batch import pack
from offload.prefill import attention as prefill_attention
from offload.prefill import forward
from offload.prefill.attention import (
    CPU,
    CUDNN,
    FLASH,
    NATIVE,
    PIECES,
    attend,
    attention_kernel,
    key_pieces,
    merge_softmax,
    suits_cudnn,
    takes_all_keys,
)
from offload.prefill.layer import rotate


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_past", "num_before", "num_queries", "group_size"),
    combinations([0, 1, 33], [(0, 1), (0, 40), (7, 1), (50, 30)], [1, 3]),
)
def test_attend(num_past: int, num_before: int, num_queries: int, group_size: int) -> None:
    """Against one softmax in float64 over all the keys a query may see."""
    num_kv_heads, head_dim, kv_len = 2, 16, num_past + num_before + num_queries
    q = normal(num_kv_heads * group_size, num_queries, head_dim, seed=1) * 3
    keys, values = normal(2, num_kv_heads, kv_len, head_dim, seed=2)
    past = (keys[:, :num_past], values[:, :num_past]) if num_past else None
    o = attend(q, past, (keys[:, num_past:], values[:, num_past:]), 0.25)

    scores = q.double() @ keys.double().repeat_interleave(group_size, 0).mT * 0.25
    seen = torch.arange(kv_len) <= torch.arange(num_past + num_before, kv_len)[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = weights @ values.double().repeat_interleave(group_size, 0)
    torch.testing.assert_close(o, expected.transpose(0, 1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_pool_computes_what_torch_computes(name: str) -> None:
    """Its kernels, over cached and new tokens in slices, up to the rounding of bfloat16."""
    _, lean = tiny_lean_model(name, torch.bfloat16)
    pool = WorkerPool(2)
    found = []
    for of_run in (None, pool):
        store = store_for(lean, torch.bfloat16)
        seqs = [store.new_sequence(), store.new_sequence()]
        run_prefill(lean, store, seqs, [50, 9], pool=of_run)
        found.append(run_prefill(lean, store, seqs, [70, 33], seed=1, pool=of_run).float())
        store.close()
    pool.close()
    assert (found[0] - found[1]).norm() / found[0].norm() < 2e-2


def test_pool_attends_where_it_has_a_kernel() -> None:
    q = torch.zeros(4, 8, 64, dtype=torch.bfloat16)
    pool = WorkerPool(1)
    kind = NATIVE if has_causal_attention(q.dtype, 64) else CPU
    assert attention_kernel(q, 2, pool) == kind
    assert takes_all_keys(q, pool) == (kind == NATIVE)
    assert attention_kernel(q, 2, None) == attention_kernel(q[..., :40], 2, pool) == CPU
    pool.close()


@pytest.mark.parametrize(
    ("kernel", "num_before", "queries_first"),
    combinations([CUDNN, FLASH, PIECES], [0, 8, 7, 24, 53, 86], [False, True]),
)
def test_attend_in_pieces(monkeypatch, kernel: str, num_before: int, queries_first: bool) -> None:
    """Pieces of keys and what they merge to, on stand-ins that mask as the two do."""
    shapes = []

    def exact(q, keys, values, is_causal, scale, aligned_at):
        group_size = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group_size, 1).double() for x in (keys, values))
        scores = q.double() @ keys.mT * scale
        if is_causal:  # the first query sees the keys up to that one
            hidden = torch.ones(scores.shape[-2:]).triu(1 + aligned_at).bool()
            scores = scores.masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ values).float(), scores.logsumexp(-1).float()

    def cudnn(q, keys, values, bias, with_lse, dropout, is_causal, *, scale):
        shapes.append((q.shape, keys.shape, is_causal))
        o, lse = exact(q, keys, values, is_causal, scale, 0)
        return o, lse[..., None]

    def flash(q, keys, values, dropout, is_causal, debug, *, scale):
        assert is_causal if kernel == PIECES else kernel == FLASH or not is_causal
        assert keys.shape[2] <= 16 + (8 if is_causal else 0)
        return exact(q, keys, values, is_causal, scale, keys.shape[2] - q.shape[2])

    monkeypatch.setattr(prefill_attention, "attention_kernel", lambda *_: kernel)
    monkeypatch.setattr(prefill_attention, "_cudnn_attention", cudnn)
    monkeypatch.setattr(prefill_attention, "_cuda_flash", flash)
    monkeypatch.setattr(prefill_attention, "_PIECE_KEYS", 16)
    q = normal(6, 8, 16, seed=1) * 3
    rows = normal(2, 2, num_before + 8, 16, seed=2)
    if queries_first:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
        rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    o = attend(q, None, (rows[0], rows[1]), 0.25)
    expected, _ = reference_attention(q, rows[0], rows[1], 0.25)
    torch.testing.assert_close(o, expected.float(), rtol=1e-5, atol=1e-5)
    for q_shape, keys_shape, is_causal in shapes:
        assert q_shape == (1, 6, 8, 16)
        assert keys_shape[2] in ((8,) if is_causal else (8, 16))
        assert kernel == CUDNN or keys_shape[2] == 16


def test_what_is_compiled_ahead_is_what_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for dtypes, and for numbers that are multiples of 16."""
    merged: list[set[Any]] = [set(), set()]

    def flash(q: Any, keys: Any, *_: Any, **options: Any) -> Any:
        return q, q[..., 0].float()

    def merge(o: Any, lse: Any, part: Any, part_lse: Any) -> None:
        merged[-1].add((o.dtype, part.dtype, o.shape[1] % 16 == 0))

    monkeypatch.setattr(prefill_attention, "merge_parts", merge)
    monkeypatch.setattr(prefill_attention, "aligns_last", lambda q: True)
    monkeypatch.setattr(prefill_attention, "attention_kernel", lambda *_: FLASH)
    monkeypatch.setattr(prefill_attention, "_cuda_flash", flash)
    monkeypatch.setattr(prefill_attention, "_PIECE_KEYS", 16)
    for n in (32, 5):
        q, rows = (torch.zeros(heads, k, 16).bfloat16() for heads, k in ((6, n), (2, n + 40)))
        attend(q, None, (rows, rows), 0.25)
    merged.append(set())
    prefill_attention.warm_up_attention(6, 16, torch.bfloat16, torch.device("cpu"))
    assert merged[1] == merged[2]
    assert len(merged[2]) == 2


def test_cudnn_gets_few_shapes() -> None:
    """A plan takes it long: the lengths of prompts and their last slices are none of them."""
    assert key_pieces(8, 0) == []
    assert key_pieces(8, 7) == [(0, 7)]
    assert key_pieces(8, 59) == [(0, 32), (32, 48), (48, 56), (56, 59)]
    assert key_pieces(8192, 40000) == [(0, 16384), (16384, 32768), (32768, 40000)]
    assert key_pieces(32768, 40000) == [(0, 32768), (32768, 40000)]
    hopper = (9, 0)
    assert suits_cudnn(8192, 8, 128, hopper)
    assert suits_cudnn(2048, 16, 64, hopper)
    assert suits_cudnn(1024, 16, 64, hopper, 32768)
    assert not suits_cudnn(1024, 16, 64, hopper, 32767)
    assert not suits_cudnn(512, 16, 64, hopper, 2**20)
    for n, num_heads, head_dim, capability in [
        (8191, 8, 128, hopper),
        (6144, 8, 128, hopper),
        (1024, 8, 128, hopper),
        (8192, 9, 64, hopper),
        (8192, 8, 256, hopper),
        (8192, 8, 128, (8, 0)),
        (8192, 8, 128, (12, 0)),
    ]:
        assert not suits_cudnn(n, num_heads, head_dim, capability)


def test_ctrl_c_between_layers_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody looks at the error, too."""
    events: list[str] = []

    def by_layer(*_: Any) -> Any:
        try:
            for layer in range(3):
                events.append(f"layer {layer}")
                yield
        finally:
            events.append("closed")

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not forward.finish.__code__:
            return None
        if len(events) == 2:
            raise KeyboardInterrupt
        return interrupt

    monkeypatch.setattr(forward, "prefill_by_layer", by_layer)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as error:
            forward.prefill(None, None, None)  # type: ignore[arg-type]
    finally:
        sys.settrace(before)
    assert events == ["layer 0", "layer 1", "closed"]
    assert error.traceback


def test_merge_state_with_distant_parts() -> None:
    """One part may outweigh the other by more than exp() can hold."""
    o_a, o_b = torch.ones(2, 4), torch.full((2, 4), 5.0)
    o, lse = merge_softmax(o_a, torch.tensor([500.0, -500.0]), o_b, torch.tensor([-500.0, 500.0]))
    assert torch.equal(o, torch.stack([o_a[0], o_b[1]]))
    assert torch.equal(lse, torch.tensor([500.0, 500.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_rounds_as_transformers(dtype: torch.dtype) -> None:
    x = normal(9, 4, 32, seed=3).to(dtype)
    cos, sin = normal(2, 9, 32, seed=4).to(dtype)
    heads_first = x[None].transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    assert torch.equal(rotate(x, cos, sin), expected[0])


def test_pack_left_out_padding_and_equal_rows() -> None:
    tokens = torch.tensor([[1, 2, 3], [0, 5, 6], [1, 2, 3], [0, 5, 6], [1, 5, 6]])
    attended = tokens != 0
    positions = torch.arange(3)[None]
    batch = pack((5, 3), attended, positions, tokens)
    assert batch.sequence_of_row == [0, 1, 0, 1, 2]
    assert batch.indptr == [0, 3, 5, 8]
    assert batch.num_new_tokens == [3, 2, 3]
    assert batch.position_ids.tolist() == [0, 1, 2, 1, 2, 0, 1, 2]
    assert batch.attended().tolist() == [
        [row not in (1, 3) or column > 0 for column in range(batch.rows_shape[1])]
        for row in range(5)
    ]
    assert list(batch.spans(2, 6)) == [(0, 2, 3), (1, 3, 5), (2, 5, 6)]
    rows = batch.to_rows(tokens.flatten()[batch.columns][:, None].float())
    assert torch.equal(rows[..., 0].long(), tokens)


def test_pack_without_padding() -> None:
    batch = pack((2, 3), None, torch.arange(3)[None])
    assert batch.indptr == [0, 3, 6]
    packed = torch.arange(12.0).view(6, 2)
    assert torch.equal(batch.to_rows(packed), packed.view(2, 3, 2))
