"""Prefill on a GPU: attention, copies to registered memory, streams, memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from cases.attention_cases import relative_error
from cases.prefill_cases import (
    cached,
    reference_attention,
    run_prefill,
    store_for,
    tiny_lean_model,
)
from cases.slowly import combinations

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.policies.registry import make_policy
from offload.prefill import attention as prefill_attention
from offload.prefill.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    PIECES,
    _causal,
    _unmasked,
    attend,
    attention_kernel,
    takes_all_keys,
)
from offload.prefill.kv_stream import LayerStream
from offload.prefill.memory import PrefillMemory
from offload.system.errors import DeviceMemoryError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
}


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error(actual.double().cpu().numpy(), expected.double().cpu().numpy())


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def cuda_model(dtype: torch.dtype = torch.float32, **changes):
    stock, lean = tiny_lean_model(dtype=dtype, **changes)
    stock.to("cuda")
    return stock, lean


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_past", "num_before", "n", "group_size"),
    combinations(
        DTYPES,
        [64, 128, 80, 256],
        [(0, 0, 1), (0, 0, 129), (0, 300, 70), (33, 0, 1), (50, 31, 97)],
        [1, 3, 4],
    ),
)
def test_attend(dtype, head_dim, num_past, num_before, n, group_size):
    """Queries see the keys up to their own token, where there are more keys than queries too."""
    num_kv_heads, kv_len = 2, num_past + num_before + n
    # Rows of a longer buffer, as in prefill.
    q = random(num_kv_heads * group_size, n + 5, head_dim, dtype=dtype, scale=2)[:, 2 : n + 2]
    rows = random(2, num_kv_heads, kv_len + 9, head_dim, dtype=dtype)[:, :, 3 : kv_len + 3]
    expected, _ = reference_attention(q, rows[0], rows[1], 0.11)
    past, first = None, 0
    if num_past and not takes_all_keys(q, None):
        past, first = (rows[0][:, :num_past], rows[1][:, :num_past]), num_past
    o = attend(q, past, (rows[0][:, first:], rows[1][:, first:]), 0.11)
    assert o.shape == expected.shape
    assert error_of(o, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "n", "num_before", "tokens_first"),
    combinations(
        [torch.float16, torch.bfloat16],
        [64, 128],
        [(2048, 0), (2048, 2048), (2048, 10300), (1024, 32800), (300, 0), (300, 10300)],
        [False, True],
    ),
)
def test_attend_in_pieces(monkeypatch, dtype, head_dim, n, num_before, tokens_first):
    """Whole slices by cuDNN on a Hopper, others by FLASH: as one softmax over all keys."""
    monkeypatch.setattr(prefill_attention, "_PIECE_KEYS", 4096)
    num_kv_heads = 2
    q = random(16, n, head_dim, dtype=dtype, scale=2)
    rows = random(2, num_kv_heads, num_before + n, head_dim, dtype=dtype)
    if tokens_first:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
        rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    kernel = attention_kernel(q, num_kv_heads, None, num_before + n)
    if n >= 1024 and kernel not in (CUDNN, PIECES):
        pytest.skip("cuDNN's attention is for Hopper and datacenter Blackwell")
    o = attend(q, None, (rows[0], rows[1]), 0.11)
    expected, _ = reference_attention(q, rows[0], rows[1], 0.11)
    assert error_of(o, expected) < TOLERANCE[dtype]


def test_attention_kernels():
    """What is chosen where: a prompt's last slice, of any length, does not go to cuDNN."""
    q = random(16, 4096, 64, dtype=torch.bfloat16)
    assert attention_kernel(q[:8], 2) == FLASH
    assert attention_kernel(q.float(), 2) == EFFICIENT
    assert attention_kernel(q[:, :4000], 2) == FLASH
    assert attention_kernel(q.cpu(), 2) == "cpu"
    if torch.cuda.get_device_capability() == (9, 0) and torch.backends.cudnn.version() >= 90100:
        assert attention_kernel(q, 2) == CUDNN
        assert attention_kernel(q[:, :1024], 2, None, 40000) == PIECES
        assert attention_kernel(q[:, :1024], 2, None, 4096) == FLASH


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 200])
def test_log_sum_exp(dtype, n):
    """Natural logarithm, one for each query, without padding."""
    q = random(2, 3, n, 64, dtype=dtype)
    keys, values = random(2, 2, n, 64, dtype=dtype)
    expected, expected_lse = reference_attention(q.flatten(0, 1), keys, values, 0.125)
    o, lse = _causal(q, (keys, values), 0.125)
    assert lse.dtype == torch.float32
    assert lse.shape == (2, 3, n)
    assert error_of(lse.flatten(0, 1), expected_lse) < 1e-4
    assert error_of(o.flatten(0, 1).transpose(0, 1), expected) < TOLERANCE[dtype]

    o, lse = _unmasked(q, (keys, values), 0.125)
    scores = q.double() @ keys.double()[:, None].mT * 0.125
    assert error_of(lse, scores.logsumexp(-1)) < 1e-4
    assert error_of(o, scores.softmax(-1) @ values.double()[:, None]) < TOLERANCE[dtype]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("start", "n"), [(0, 64), (0, 63), (5, 3), (5, 200), (16, 100)])
def test_append_async_and_gather(pinned, start, n):
    _, lean = tiny_lean_model()
    store = store_for(lean, torch.bfloat16, pinned=pinned)
    seq = store.new_sequence()
    store.reserve([seq], [256])
    zeros = torch.zeros(256, store.num_kv_heads, store.head_dim, dtype=torch.bfloat16)
    store.append(seq, 1, zeros, zeros)
    rows = random(2, store.num_kv_heads, n, store.head_dim, dtype=torch.bfloat16).transpose(1, 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        store.append_async(seq, 1, rows[0], rows[1], start)
    stream.synchronize()
    written = torch.stack(store.gather(seq, 1, 0, 256))
    assert torch.equal(written[:, :, start : start + n], rows.transpose(1, 2).cpu())
    assert (written[:, :, :start] == 0).all()
    assert (written[:, :, start + n :] == 0).all()
    out = tuple(torch.full_like(rows[0].transpose(0, 1), torch.nan) for _ in range(2))
    store.gather(seq, 1, start, start + n, out=out)
    assert torch.equal(torch.stack(out), rows.transpose(1, 2))
    store.close()


def test_slabs_are_pinned_and_let_go():
    _, lean = tiny_lean_model()
    for _ in range(3):  # the system gives the same addresses again
        store = store_for(lean, pinned=True, slab_bytes=4 << 20)
        seq = store.new_sequence()
        store.reserve([seq], [100])
        assert store._pool.page(0).is_pinned()
        store.close()
        dropped = store_for(lean, pinned=True, slab_bytes=4 << 20)
        dropped.reserve([dropped.new_sequence()], [100])
        del dropped
        gc.collect()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("past", [[0, 0], [5, 140], [16, 0]])
def test_as_on_the_cpu(dtype, past):
    _, on_cpu = tiny_lean_model(dtype=dtype)
    _, on_cuda = cuda_model(dtype)
    results = []
    for lean, device in ((on_cpu, "cpu"), (on_cuda, "cuda")):
        store = store_for(lean, dtype, pinned=device == "cuda")
        seqs = [store.new_sequence() for _ in past]
        for seq, n in zip(seqs, past, strict=True):
            if n:
                run_prefill(lean, store, [seq], [n], seed=n, device=device)
        hidden = run_prefill(lean, store, seqs, [170, 33], device=device)
        results.append((hidden, [torch.cat(cached(store, seq)) for seq in seqs]))
        store.close()
    (hidden, stored), (other_hidden, other_stored) = results
    tolerance = 5 * TOLERANCE[dtype]
    assert error_of(other_hidden, hidden) < tolerance
    for rows, other in zip(stored, other_stored, strict=True):
        assert error_of(other, rows) < tolerance


@pytest.mark.parametrize("pinned", [False, True])
def test_what_is_stored_is_what_was_computed(pinned):
    """Bit by bit, while layers overtake each other: no buffer is used again too early."""
    _, lean = cuda_model(torch.bfloat16, **SHAPE, max_position_embeddings=16384)
    for round_ in range(3):
        store = store_for(lean, torch.bfloat16, pinned=pinned)
        seqs = [store.new_sequence() for _ in range(2)]
        computed = {}

        def on_layer(layer_idx, seq, keys, values, computed=computed):
            computed[layer_idx, seq] = torch.stack([keys, values])

        run_prefill(lean, store, seqs, [1000, 300], seed=round_, device="cuda", slice_tokens=4096)
        run_prefill(
            lean,
            store,
            seqs,
            [777, 4096],
            seed=round_ + 9,
            device="cuda",
            slice_tokens=4096,
            on_layer=on_layer,
        )
        for seq in seqs:
            for layer_idx, layer in enumerate(cached(store, seq)):
                assert torch.equal(computed[layer_idx, seq].cpu(), layer)
        store.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["quest", "lfps", "lychee_cluster", "sketch", "per_head"])
def test_the_host_waits_for_nothing(monkeypatch, name):
    """From the first layer to the last."""
    _, lean = cuda_model(torch.bfloat16, **SHAPE, max_position_embeddings=4096)
    store = store_for(lean, torch.bfloat16, pinned=True)
    pool = WorkerPool(2)
    policy = make_policy(name, budget_tokens=200, dense_layers=1)
    attention = DecodeAttention(
        policy, store, num_qo_heads=lean.shape.num_qo_heads, pool=pool, sm_scale=0.125
    )
    begin, finish = LayerStream.begin, LayerStream.finish

    def begin_strictly(self, layer_idx):
        begin(self, layer_idx)
        torch.cuda.set_sync_debug_mode("error")

    def finish_leniently(self):
        torch.cuda.set_sync_debug_mode("default")
        finish(self)

    for n in (600, 900):  # the second time with the pinned memory of the first
        seq = store.new_sequence()
        build = attention.prefill_build([seq], [n])
        with monkeypatch.context() as patch:
            if n == 900:
                patch.setattr(LayerStream, "begin", begin_strictly)
                patch.setattr(LayerStream, "finish", finish_leniently)
            try:
                run_prefill(
                    lean,
                    store,
                    [seq],
                    [n],
                    device="cuda",
                    slice_tokens=256,
                    on_queries=attention.on_prefill_queries,
                    on_layer=build.on_layer,
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
        build.finish()
        built = attention.states.arrays_of(seq)
        assert built is not None
        # Of `auto` the first layer retrieves, too.
        assert [len(arrays) > 0 for arrays in built.layers] == [name == "per_head"] + [True] * 5
    pool.close()
    store.close()


@pytest.mark.parametrize("name", ["quest", "lychee_cluster"])
def test_an_index_built_beside_the_next_layer(name):
    """Bit by bit the one that is built from the same keys when nothing else runs."""
    _, lean = cuda_model(torch.bfloat16, **SHAPE, max_position_embeddings=16384)
    store = store_for(lean, torch.bfloat16, pinned=True, host_budget_bytes=1 << 30)
    pool = WorkerPool(2)
    policy = make_policy(name, budget_tokens=200, dense_layers=1)
    attention = DecodeAttention(
        policy, store, num_qo_heads=lean.shape.num_qo_heads, pool=pool, sm_scale=0.125
    )
    for n in (9000, 12_000):
        seq = store.new_sequence()
        build = attention.prefill_build([seq], [n])
        run_prefill(
            lean,
            store,
            [seq],
            [n],
            device="cuda",
            slice_tokens=4096,
            on_queries=attention.on_prefill_queries,
            on_layer=build.on_layer,
        )
        build.finish()
        built = attention.states.arrays_of(seq)
        for layer_idx in range(1, store.num_layers):
            keys, values = (x.to("cuda") for x in store.gather(seq, layer_idx))
            context = attention.states.build_context(seq, layer_idx, keys, values, n + 1)
            finish = policy.device.build(context)
            torch.cuda.synchronize()
            for name, expected in finish().items():
                np.testing.assert_array_equal(built.layers[layer_idx][name], expected)
    pool.close()
    store.close()


def test_non_finite_values_name_the_layer():
    stock, lean = cuda_model()
    stock.model.layers[1].self_attn.v_proj.weight.data[3, 4] = torch.nan
    store = store_for(lean, pinned=True)
    seqs = [store.new_sequence() for _ in range(2)]
    with pytest.raises(ValueError, match="non-finite values in layer 1 of sequence 0"):
        run_prefill(lean, store, seqs, [40, 8], device="cuda")


def test_memory_is_counted_and_given_back():
    """The peak is at most what was counted, and not much less; a smaller budget is refused."""
    changes = {**SHAPE, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3}
    _, lean = cuda_model(torch.bfloat16, **changes, max_position_embeddings=65536)
    num_tokens = 50_000
    memory = PrefillMemory.of(lean.shape, item_bytes=2, num_tokens=num_tokens, slice_tokens=8192)
    options = {"device": "cuda", "slice_tokens": 8192}
    store = store_for(lean, torch.bfloat16, pinned=True, host_budget_bytes=1 << 30)
    seq, first = store.new_sequence(), store.new_sequence()
    run_prefill(lean, store, [first], [64], **options)  # cuBLAS keeps a workspace of each stream
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hidden = run_prefill(lean, store, [seq], [num_tokens], **options)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"\ncounted {memory}; measured {peak / 2**20:.0f} MiB")
    assert peak <= memory.total_bytes
    assert memory.total_bytes - memory.index_bytes - (512 << 20) <= peak
    del hidden
    other = store.new_sequence()
    for budget in (before + num_tokens * 2048 * 2, before + memory.total_bytes // 2):
        with pytest.raises(DeviceMemoryError, match="lower prefill_slice_tokens"):
            run_prefill(lean, store, [other], [num_tokens], **options, device_budget_bytes=budget)
        gc.collect()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_running_out_of_memory_gives_it_back():
    """The estimate passes, torch's allocator does not: the device's other users have room left."""
    _, lean = cuda_model(torch.bfloat16, **SHAPE, max_position_embeddings=65536)
    store = store_for(lean, torch.bfloat16, pinned=True, host_budget_bytes=1 << 30)
    seq = store.new_sequence()
    before = torch.cuda.memory_allocated()
    taken: list[torch.Tensor] = []

    def on_layer(layer_idx, seq, keys, values):
        if layer_idx == 2:
            while True:
                taken.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))

    allowed = torch.cuda.memory_reserved() + (12 << 30)
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, allowed / torch.cuda.get_device_properties(0).total_memory)
    )
    try:
        with pytest.raises(DeviceMemoryError, match="ran out of device memory"):
            run_prefill(lean, store, [seq], [30_000], device="cuda", on_layer=on_layer)
        assert taken
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    taken.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    store.truncate(seq, 0)
    hidden = run_prefill(lean, store, [seq], [300], device="cuda")
    assert hidden.isfinite().all()
