"""Made caches of whole models: what is in the store, in the rows of the steps and in the arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from gpu_ops.row_format import as_rows
from offload.decode.attention import DecodeAttention
from offload.kv.store import HostBudgetError
from offload.measuring.synthetic.model_cache import (
    ModelCache,
    QKVRows,
    structured_model_cache,
    unrotated,
)
from offload.measuring.synthetic.one_slab import PAGE_TOKENS, page_bytes
from offload.measuring.synthetic.random_model import random_model
from offload.measuring.synthetic.structured_cache import structured_layer
from offload.models import lean_model_maker
from offload.models.shape import MODEL_SHAPES
from offload.policies.registry import make_policy
from offload.prefill.layer import rotate
from offload.system.memory import HostMemory

SHAPE = MODEL_SHAPES["tiny"]
CPU = torch.device("cpu")
KV_LEN, NUM_STEPS = 700, 6


@pytest.fixture(scope="module")
def rotary_emb() -> Any:
    return random_model(SHAPE, device=CPU, dtype=torch.float32).model.rotary_emb


def make(pool: WorkerPool, rotary_emb: Any, **changes: Any) -> ModelCache:
    options: dict[str, Any] = {
        "kv_len": KV_LEN,
        "num_steps": NUM_STEPS,
        "ropes": [rotary_emb] * SHAPE.num_layers,
        "device": CPU,
        "dtype": torch.float32,
        "pool": pool,
    }
    return structured_model_cache(SHAPE, **(options | changes))


def layer_of(layer_idx: int, seed: int = 0) -> Any:
    return structured_layer(
        SHAPE,
        kv_len=KV_LEN,
        num_steps=NUM_STEPS,
        dtype=torch.float32,
        seed=seed,
        layer_idx=layer_idx,
    )


@pytest.mark.parametrize("kv_len", [3 * PAGE_TOKENS, 3 * PAGE_TOKENS - 3])
def test_steps_need_no_second_slab(
    kv_len: int, pool: WorkerPool, rotary_emb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the caches take more than an eighth of the memory, and end with their pages."""
    batch_size = 3
    need = SHAPE.num_layers * batch_size * 5 * page_bytes(SHAPE, torch.float32)
    memory = HostMemory(2 * need, in_cgroup=False, left_bytes=2 * need, own_bytes=0)
    monkeypatch.setattr("offload.kv.store.host_memory", lambda: memory)
    monkeypatch.setattr("offload.kv.page_pool.host_memory_limit_bytes", lambda: 2 * need)
    policies = [make_policy("quest", budget_tokens=128)]
    cache = make(pool, rotary_emb, kv_len=kv_len, batch_size=batch_size, policies=policies)
    taken = cache.store.host_bytes_reserved
    assert taken <= need
    for _ in range(2):
        forks = [cache.store.fork(seq) for seq in cache.seqs]
        cache.store.reserve(forks, [NUM_STEPS] * batch_size)
        cache.store.commit(forks, [NUM_STEPS] * batch_size)
        for fork in forks:
            cache.store.free(fork)
    assert cache.store.host_bytes_reserved == taken
    cache.close()


def test_random_model() -> None:
    model = random_model(SHAPE, device=CPU, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    weight = model.model.layers[-1].mlp.down_proj.weight.float()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    assert bool((model.model.norm.weight == 1).all())
    lean = lean_model_maker("llama")(model)
    assert (lean.shape.num_qo_heads, lean.shape.head_dim) == (4, 32)
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert bool(torch.isfinite(logits).all())
    again = random_model(SHAPE, device=CPU, dtype=torch.bfloat16)
    assert torch.equal(again(torch.tensor([[1, 2, 3]])).logits, logits)


def test_the_8b_shape_is_that_of_the_model() -> None:
    shape = MODEL_SHAPES["llama-3.1-8b"]
    assert shape.kv_token_bytes * 131072 == 17179869184
    assert shape.qkv_width == 6144


def test_store_holds_the_layers(pool: WorkerPool, rotary_emb: Any) -> None:
    cache = make(pool, rotary_emb, batch_size=2)
    assert [cache.store.kv_len(seq) for seq in cache.seqs] == [KV_LEN, KV_LEN]
    for row, seq in enumerate(cache.seqs):
        for layer_idx in range(SHAPE.num_layers):
            keys, values = cache.store.gather(seq, layer_idx)
            layer = layer_of(layer_idx, seed=row)
            assert torch.equal(keys, layer.keys[:, :KV_LEN])
            assert torch.equal(values, layer.values[:, :KV_LEN])
    cache.close()


@pytest.mark.parametrize("distinct_layers", [None, 2])
def test_int8_rows(distinct_layers: int | None, pool: WorkerPool, rotary_emb: Any) -> None:
    """Each row is rounded once, also where layers repeat."""
    cache = make(pool, rotary_emb, kv_dtype="int8", distinct_layers=distinct_layers)
    store, (seq,) = cache.store, cache.seqs
    assert store.format.is_int8
    for layer_idx in range(SHAPE.num_layers):
        layer = layer_of(layer_idx % (distinct_layers or SHAPE.num_layers))
        made = layer.keys[:, :KV_LEN], layer.values[:, :KV_LEN]
        for kept, numbers in zip(store.gather(seq, layer_idx, kept=True), made, strict=True):
            assert torch.equal(kept, as_rows(numbers, torch.int8))
    cache.close()


def test_rows_become_the_steps_when_they_are_rotated(pool: WorkerPool, rotary_emb: Any) -> None:
    cache = make(pool, rotary_emb)
    layer = layer_of(2)
    rows = cache.rows.rows[:, 2, 0].unflatten(1, (-1, SHAPE.head_dim))
    cos, sin = rotary_emb(rows, torch.arange(KV_LEN, KV_LEN + NUM_STEPS)[None])
    q, k, v = rows.split([SHAPE.num_qo_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads], 1)
    torch.testing.assert_close(
        rotate(q, cos[0], sin[0]), layer.queries[:, -NUM_STEPS:], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        rotate(k, cos[0], sin[0]), layer.keys[:, KV_LEN:], rtol=1e-4, atol=1e-4
    )
    assert torch.equal(v.transpose(0, 1), layer.values[:, KV_LEN:])
    cache.close()


def test_layers_may_repeat_in_memory_of_their_own(pool: WorkerPool, rotary_emb: Any) -> None:
    policy = make_policy("quest", budget_tokens=256)
    done: list[tuple[int, int]] = []
    cache = make(
        pool, rotary_emb, distinct_layers=2, policies=[policy], on_layer=lambda *at: done.append(at)
    )
    assert done == [(1, 2), (2, 2)]
    store, (seq,) = cache.store, cache.seqs
    assert torch.equal(store.gather(seq, 0)[0], store.gather(seq, 2)[0])
    assert not torch.equal(store.gather(seq, 0)[0], store.gather(seq, 1)[0])
    assert len(np.unique(store.page_table(seq)[:, :3])) == SHAPE.num_layers * -(-KV_LEN // 256)
    first, second = cache.arrays[policy][0][2], cache.arrays[policy][0][3]
    assert sorted(cache.arrays[policy][0]) == [2, 3]  # the first two are dense
    assert first["bounds"].ctypes.data != second["bounds"].ctypes.data
    cache.close()


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("quest", "auto"), ("quest", "int8"), ("lfps", "auto"), ("lychee_cluster", "auto")],
)
def test_installed_arrays_are_those_that_would_be_built(
    name: str, kv_dtype: str, pool: WorkerPool, rotary_emb: Any
) -> None:
    policy = make_policy(name, budget_tokens=256)
    cache = make(pool, rotary_emb, policies=[policy], kv_dtype=kv_dtype)
    store, seq = cache.store, cache.seqs[0]

    def attended(*, installs: bool) -> torch.Tensor:
        attention = DecodeAttention(policy, store, num_qo_heads=SHAPE.num_qo_heads, pool=pool)
        for layer_idx in range(2, SHAPE.num_layers):
            prompt = layer_of(layer_idx).queries[:, :32]
            attention.record_queries(seq, layer_idx, prompt, KV_LEN)
        if installs:
            cache.install(attention, cache.seqs)
            assert attention.build_states([seq], [KV_LEN]) < 0.05
        step = attention.begin_step([seq], [KV_LEN])
        query = layer_of(3).queries[:, 31].reshape(1, -1)
        out = torch.full_like(query, float("nan"))
        attention.attend(3, step, query, out)
        return out

    assert torch.equal(attended(installs=True), attended(installs=False))
    cache.close()


def test_nothing_is_kept_of_contexts_within_the_budget(pool: WorkerPool, rotary_emb: Any) -> None:
    quest, full = make_policy("quest", budget_tokens=1024), make_policy("full")
    cache = make(pool, rotary_emb, policies=[quest, full])
    assert cache.arrays == {quest: [{}], full: [{}]}
    attention = DecodeAttention(quest, cache.store, num_qo_heads=SHAPE.num_qo_heads, pool=pool)
    cache.install(attention, cache.seqs)
    assert attention.states.arrays_of(cache.seqs[0]) is None
    cache.close()


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_rows_are_copied_by_the_position(is_contiguous: bool) -> None:
    rows = torch.arange(3 * 2 * 4 * 5, dtype=torch.float32).view(3, 2, 4, 5)
    chosen = QKVRows(rows, 700, torch.zeros(1, dtype=torch.int64))
    for position, step in ((700, 0), (701, 1), (702, 2), (700, 0), (-1, 0), (900, 2)):
        positions = torch.full((4,), position)
        for layer_idx in range(2):
            whole = torch.full((4, 8), float("nan"))
            qkv = torch.full((4, 5), float("nan")) if is_contiguous else whole[:, :5]
            chosen.after_projection(layer_idx, 0, qkv, positions)
            assert torch.equal(qkv, rows[step, layer_idx])
            queries = (torch.empty(4, 2) if is_contiguous else whole[:, 5:7]).fill_(-1.0)
            chosen.after_projection(layer_idx, 0, queries, positions)  # they are predicted
            assert torch.equal(queries, rows[step, layer_idx, :, :2])


@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_steps_of_fewer_and_of_more_rows(num_rows: int) -> None:
    rows = torch.arange(3 * 2 * 4 * 5, dtype=torch.float32).view(3, 2, 4, 5)
    chosen = QKVRows(rows, 10, torch.zeros(1, dtype=torch.int64))
    qkv = torch.full((num_rows, 5), -1.0)
    chosen.after_projection(0, 0, qkv, torch.full((num_rows,), 11))
    assert torch.equal(qkv[:4], rows[1, 0, :num_rows])
    assert bool((qkv[4:] == -1).all())


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_unrotated_undoes_the_rotation(scale: float) -> None:
    rng = new_rng()
    x = torch.from_numpy(rng.standard_normal((7, 3, 16)))
    phases = torch.from_numpy(rng.uniform(0, 6, (7, 8)))
    cos, sin = (scale * table.repeat(1, 2) for table in (phases.cos(), phases.sin()))
    back = rotate(unrotated(x, cos, sin).double(), cos, sin).transpose(0, 1)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_bad_numbers_are_refused(pool: WorkerPool, rotary_emb: Any) -> None:
    with pytest.raises(ValueError, match=r"distinct_layers must be in \[1, 4\], got 5"):
        make(pool, rotary_emb, distinct_layers=5)
    with pytest.raises(HostBudgetError, match="lower --context or the batch size"):
        make(pool, rotary_emb, kv_len=10**9)


def test_what_policies_keep_counts(
    pool: WorkerPool, rotary_emb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.selection.state_bytes.StateBytes.at", lambda *_: 2**60)
    with pytest.raises(HostBudgetError, match="with what policies keep of them, need"):
        make(pool, rotary_emb, policies=[make_policy("quest", budget_tokens=256)])


@pytest.mark.cuda
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["quest", "lfps", "lychee_cluster"])
def test_caches_made_on_a_gpu(name: str, kv_dtype: str, pool: WorkerPool) -> None:
    device = torch.device("cuda")
    model = random_model(SHAPE, device=device, dtype=torch.bfloat16)
    policy = make_policy(name, budget_tokens=256)
    cache = make(
        pool,
        model.model.rotary_emb,
        device=device,
        dtype=torch.bfloat16,
        kv_len=1500,
        kv_dtype=kv_dtype,
        policies=[policy],
    )
    layer = structured_layer(
        SHAPE,
        kv_len=1500,
        num_steps=NUM_STEPS,
        dtype=torch.bfloat16,
        seed=0,
        layer_idx=3,
        device=device,
    )
    row_dtype = cache.store.format.page_dtype
    kept = cache.store.gather(cache.seqs[0], 3, kept=True)
    for rows, made in zip(kept, (layer.keys, layer.values), strict=True):
        assert torch.equal(rows, as_rows(made[:, :1500].contiguous(), row_dtype).cpu())
    attention = DecodeAttention(policy, cache.store, num_qo_heads=SHAPE.num_qo_heads, pool=pool)
    cache.install(attention, cache.seqs)
    step = attention.begin_step(cache.seqs, [1500])
    query = layer.queries[:, 31].reshape(1, -1).cpu()
    out = torch.full_like(query, float("nan"))
    attention.attend(3, step, query, out)
    assert bool(torch.isfinite(out).all())
    attended = sum(len(unit) for unit in attention.last_selection())
    assert 0 < attended <= 256 * SHAPE.num_kv_heads
    cache.close()
