"""rope_append: rotation, per-head norms and where rows land in the pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import relative_error
from cases.pairwise import pairwise
from cases.seeded import new_rng

from cpu_ops import native
from cpu_ops.rope import rotate_heads
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.policies import make_policy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = native.available_isas()
# Relative L2; the reference rounds after the norm, each product and the sum, as transformers does:
# the 16-bit kernels give the same bits, unless a norm's sum falls on the other side of a rounding.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 0.0, torch.bfloat16: 0.0}
NORM_TOLERANCE = {dtype: max(1e-6, torch.finfo(dtype).eps) for dtype in DTYPES}
NUM_QO_HEADS, NUM_KV_HEADS, PAGE_TOKENS = 6, 2, 4
EPS = 1e-6


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x).to(dtype).double().numpy()


def random(rng: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def make_store(head_dim: int, dtype: torch.dtype, page_tokens: int = PAGE_TOKENS) -> KVStore:
    return KVStore(
        num_layers=3,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        dtype=dtype,
        page_tokens=page_tokens,
    )


def append_rows(
    store: KVStore, seqs, positions, qkv, cos, sin, layer_idx=1, isa=None, **options
) -> None:
    """Reserve what the positions need and run rope_append, row i into seqs[i]."""
    for seq in set(seqs):
        last = max(p for s, p in zip(seqs, positions, strict=True) if s == seq)
        store.reserve([seq], [last + 1 - store.kv_len(seq)])
    full, pool = make_policy("full"), WorkerPool(1)
    attention = DecodeAttention(full, store, num_qo_heads=NUM_QO_HEADS, pool=pool, isa=isa)
    step = attention.begin_step(seqs, [position + 1 for position in positions])
    attention.rope_append(layer_idx, step, qkv, (cos, sin), **options)


def expected_rotation(x, cos, sin, dtype, norm_weight=None):
    """x float64 [heads, head_dim], with the rounding points of apply_rotary_pos_emb; behind the
    width of cos and sin nothing is rotated."""
    if norm_weight is not None:
        normed = rounded(reference.rms_norm(x, np.ones(x.shape[-1]), EPS), dtype)
        x = rounded(normed * norm_weight.double().numpy(), dtype)
    cos, sin = cos.double().numpy(), sin.double().numpy()
    zero, (x, rest) = np.zeros_like(cos), np.split(x, [len(cos)], axis=-1)
    products = [reference.rope(x, cos, zero), reference.rope(x, zero, sin)]
    rotated = rounded(sum(rounded(product, dtype) for product in products), dtype)
    return np.concatenate([rotated, rest], axis=-1)


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim", "with_norm", "part"),
    pairwise(ISAS, DTYPES, [16, 48, 64, 96, 128, 256, 512], [False, True], [1, 4], together=2),
    ids=str,
)
def test_rows_of_several_sequences(isa, dtype, head_dim, with_norm, part):
    """Rows land at their positions, across page boundaries, and leave everything else alone."""
    rng = new_rng()
    store = make_store(head_dim, dtype)
    seqs = [store.new_sequence() for _ in range(3)]
    rows = [seqs[i] for i in (0, 1, 1, 1, 2, 0)]
    positions = [0, 3, 4, 5, 8, 7]
    qkv = random(rng, dtype, len(rows), (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * head_dim)
    angles = rng.uniform(0, 2 * np.pi, (len(rows), head_dim // part))
    cos, sin = (torch.from_numpy(f(angles)).to(dtype) for f in (np.cos, np.sin))
    norms = {}
    tolerance = NORM_TOLERANCE[dtype] if with_norm else TOLERANCE[dtype]
    if with_norm:
        norms = {"q_norm": random(rng, dtype, head_dim), "k_norm": random(rng, dtype, head_dim)}
    heads = qkv.double().numpy().reshape(len(rows), -1, head_dim)
    given_cos = cos.clone()
    append_rows(store, rows, positions, qkv, cos, sin, norm_eps=EPS, isa=isa, **norms)
    assert torch.equal(cos, given_cos)
    rotated = qkv.double().numpy().reshape(heads.shape)
    for seq in seqs:
        last = max(p for s, p in zip(rows, positions, strict=True) if s == seq)
        store.commit([seq], [last + 1])
    for row, (seq, position) in enumerate(zip(rows, positions, strict=True)):
        q, k, v = np.split(heads[row], [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS])
        expected = expected_rotation(q, cos[row], sin[row], dtype, norms.get("q_norm"))
        assert relative_error(rotated[row, :NUM_QO_HEADS], expected) <= tolerance
        keys, values = store.gather(seq, 1, position, position + 1)
        expected = expected_rotation(k, cos[row], sin[row], dtype, norms.get("k_norm"))
        assert relative_error(keys[:, 0].double().numpy(), expected) <= tolerance
        assert np.array_equal(values[:, 0].double().numpy(), v)


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim"), pairwise(ISAS, DTYPES, [16, 48, 64, 96, 128, 256, 512]), ids=str
)
def test_heads_of_a_prompt(isa, dtype, head_dim, pool):
    """The same for many tokens, whose heads come out first in memory, on both sides of a task's."""
    rng = new_rng()
    for n in (1, 63, 130):
        x = random(rng, dtype, n, NUM_QO_HEADS + 1, head_dim)[:, 1:]
        angles = rng.uniform(0, 2 * np.pi, (n, head_dim))
        cos, sin = (torch.from_numpy(f(angles)).to(dtype) for f in (np.cos, np.sin))
        rotated = rotate_heads(pool, x, cos, sin, isa=isa)
        assert rotated.is_contiguous()
        expected = np.stack(
            [expected_rotation(x[i].double().numpy(), cos[i], sin[i], dtype) for i in range(n)]
        )
        found = rotated.transpose(0, 1).double().numpy()
        assert relative_error(found, expected) <= TOLERANCE[dtype]
        half = [table[:, : head_dim // 2].contiguous() for table in (cos, sin)]
        part = rotate_heads(pool, x, *half, isa=isa)
        if head_dim % 32:
            continue
        narrow = rotate_heads(pool, x[..., : head_dim // 2].contiguous(), *half, isa=isa)
        assert torch.equal(part, torch.cat([narrow, x[..., head_dim // 2 :].transpose(0, 1)], -1))
    for wrong in ({"x": x.transpose(0, 1)}, {"cos": cos[1:]}, {"sin": sin.double()}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            rotate_heads(pool, **({"x": x, "cos": cos, "sin": sin} | wrong))


@pytest.mark.parametrize("isa", ISAS)
def test_other_rows_and_layers_keep_their_bytes(isa):
    rng = new_rng()
    store = make_store(64, torch.float32)
    seq = store.new_sequence()
    store.reserve([seq], [10])
    before = random(rng, torch.float32, 10, NUM_KV_HEADS, 64)
    for layer_idx in range(3):
        store.append(seq, layer_idx, before, -before)
    store.commit([seq], [10])
    qkv = random(rng, torch.float32, 1, (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * 64)
    append_rows(store, [seq], [10], qkv, torch.ones(1, 64), torch.zeros(1, 64), isa=isa)
    store.commit([seq], [1])
    for layer_idx in range(3):
        keys, values = store.gather(seq, layer_idx, 0, 10)
        assert torch.equal(keys, before.transpose(0, 1))
        assert torch.equal(values, -before.transpose(0, 1))
    keys, _ = store.gather(seq, 1, 10, 11)
    assert torch.equal(keys.flatten(), qkv[0, NUM_QO_HEADS * 64 : (NUM_QO_HEADS + 2) * 64])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_transformers(isa, dtype):
    """LlamaRotaryEmbedding and apply_rotary_pos_emb give the same bits.

    Except in float32, where the kernels fuse a product and the sum.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    head_dim, positions = 64, [0, 1, 5, 300]
    config = LlamaConfig(
        hidden_size=NUM_QO_HEADS * head_dim, num_attention_heads=NUM_QO_HEADS, head_dim=head_dim
    )
    rotary = LlamaRotaryEmbedding(config)
    rng = new_rng()
    qkv = random(rng, dtype, len(positions), (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * head_dim)
    cos, sin = rotary(qkv, torch.tensor([positions]))
    heads = qkv.clone().view(1, len(positions), -1, head_dim).transpose(1, 2)
    q, k = apply_rotary_pos_emb(
        heads[:, :NUM_QO_HEADS], heads[:, NUM_QO_HEADS : NUM_QO_HEADS + NUM_KV_HEADS], cos, sin
    )
    store = make_store(head_dim, dtype, page_tokens=256)
    seq = store.new_sequence()
    append_rows(store, [seq] * 4, positions, qkv, cos[0].contiguous(), sin[0].contiguous(), isa=isa)
    store.commit([seq], [301])
    rotated = qkv.view(len(positions), -1, head_dim)[:, :NUM_QO_HEADS]
    keys, _ = store.gather(seq, 1)
    tolerance = 1e-6 if dtype == torch.float32 else 0.0
    for actual, expected in ((rotated, q[0].transpose(0, 1)), (keys[:, positions], k[0])):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_bad_input_is_refused():
    store = make_store(64, torch.float32)
    seq = store.new_sequence()
    width = (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * 64
    good = {"qkv": torch.zeros(1, width), "cos": torch.zeros(1, 64), "sin": torch.zeros(1, 64)}
    for change, message in (
        ({"qkv": torch.zeros(1, width - 64)}, rf"qkv must be .* \[1, {width}\]"),
        ({"qkv": torch.zeros(1, width, dtype=torch.float64)}, "qkv must be torch.float32"),
        ({"cos": torch.zeros(1, 66)}, "an even number of elements up to 64, got 66"),
        ({"cos": torch.zeros(1, 32)}, r"sin must be .* \[1, 32\] .* \[1, 64\]"),
        ({"sin": torch.zeros(2, 64)}, r"sin must be .* \[1, 64\] .* \[2, 64\]"),
        ({"sin": torch.zeros(1, 64).half()}, "sin must be torch.float32"),
        ({"q_norm": torch.zeros(32)}, r"q_norm must be torch.float32 \[64\]"),
        ({"q_norm": torch.zeros(64)}, "q_norm and k_norm must both be given, or neither"),
        ({"k_norm": torch.zeros(64).half()}, r"k_norm must be torch.float32 \[64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            append_rows(store, [seq], [0], **{**good, **change})
