"""A paged cache of random keys and values with its float64 copy, for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import kernel_references as reference
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.format import KVFormat
from offload.kv.store import KVStore
from offload.policies import Full, Policy
from offload.selection.layer_state import BuildContext, State

GROUP_SIZE = 3
# Relative L2 of the output: rounding of what is stored, and of the weights for bf16 dot products.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@dataclass
class Cache:
    """One sequence in a store, one layer of it filled."""

    store: KVStore
    seq: int
    keys: np.ndarray  # float64 [num_kv_heads, kv_len, head_dim]
    values: np.ndarray
    layer_idx: int = 1

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        *,
        kv_len: int,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        page_tokens: int = 256,
        num_layers: int = 2,
        kv_dtype: str = "auto",
    ) -> Cache:
        """Layer 1 has the returned keys, 0 their negatives, others hold them rotated."""
        store = KVStore(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_tokens=page_tokens,
        )
        seq = store.new_sequence()
        store.reserve([seq], [kv_len])
        shape = (kv_len, num_kv_heads, head_dim)
        keys, values = (
            torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)
            for _ in range(2)
        )
        for layer_idx in range(num_layers):
            of_layer = torch.roll(keys, layer_idx - 1, 0) if layer_idx else -keys
            store.append(seq, layer_idx, of_layer, values)
        store.commit([seq], [kv_len])
        if store.format.is_int8:
            keys, values = stored_numbers(store, seq)
        return cls(
            store,
            seq,
            keys.double().numpy().transpose(1, 0, 2),
            values.double().numpy().transpose(1, 0, 2),
        )

    @property
    def kv_len(self) -> int:
        return int(self.keys.shape[1])

    def reference(
        self,
        queries: torch.Tensor,
        layer_idx: int,
        selection: list[np.ndarray] | None = None,
        kv_len: int | None = None,
        softcap: float = 0.0,
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """float64 o, lse and weights of one query row over a layer above 0, or over -keys in 0."""
        keys = np.roll(self.keys, layer_idx - 1, 1) if layer_idx else -self.keys
        head_dim = self.store.head_dim
        return reference.attention(
            queries.double().numpy().reshape(-1, head_dim),
            keys[:, :kv_len],
            self.values[:, :kv_len],
            sm_scale=head_dim**-0.5,
            softcap=softcap,
            selection=selection,
        )

    def expected(
        self,
        queries: torch.Tensor,
        kv_len: int,
        selection: list[np.ndarray] | None = None,
        softcap: float = 0.0,
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """`reference` of layer 1 with so many tokens."""
        return self.reference(queries, 1, selection, kv_len, softcap)

    def attention(
        self,
        pool: WorkerPool,
        group_size: int,
        policy: Policy | None = None,
        isa: str | None = None,
        softcap: float = 0.0,
    ) -> DecodeAttention:
        return DecodeAttention(
            policy or Full(),
            self.store,
            num_qo_heads=self.store.num_kv_heads * group_size,
            pool=pool,
            softcap=softcap,
            isa=isa,
        )


def stored_numbers(store: KVStore, seq: int, layer_idx: int = 1) -> list[torch.Tensor]:
    """Keys and values of int8 rows, not rounded: float32 [kv_len, num_kv_heads, head_dim] each."""
    of_rows = KVFormat(torch.float32, is_int8=True)
    shape = (store.kv_len(seq), store.num_kv_heads, store.head_dim)
    out = [torch.empty(shape) for _ in range(2)]
    for first, last, pages in store.page_views(seq, layer_idx):
        for side, rows in enumerate(out):
            paged = torch.empty(*pages[:, side].shape[:-1], store.head_dim)
            of_rows.read(pages[:, side], paged)
            rows[first:last] = paged.transpose(1, 2).flatten(0, 1)
    return out


def random_queries(
    rng: np.random.Generator, n: int, num_qo_heads: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Query rows [n, num_qo_heads * head_dim]; their attention is neither flat nor one-hot."""
    values = 2.0 * rng.standard_normal((n, num_qo_heads * head_dim), dtype=np.float32)
    return torch.from_numpy(values).to(dtype)


def attend(
    attention: DecodeAttention,
    seqs: list[int],
    kv_lens: list[int],
    queries: torch.Tensor,
    layer_idx: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Run one layer into NaN-poisoned outputs; returns float64 o [n, heads, head_dim] and lse."""
    step = attention.begin_step(seqs, kv_lens)
    out = torch.full_like(queries, float("nan"))
    lse = torch.full((len(seqs), attention.num_qo_heads), float("nan"))
    attention.prepare(layer_idx, step)
    attention.attend(layer_idx, step, queries, out, lse)
    shape = (len(seqs), attention.num_qo_heads, attention.store.head_dim)
    return out.double().numpy().reshape(shape), lse.double().numpy()


def make_case(
    dtype: torch.dtype = torch.float32, kv_len: int = 600, rows: int = 60, **options: Any
) -> tuple[Cache, torch.Tensor]:
    """A cache in small pages, and query rows in groups of GROUP_SIZE heads."""
    rng = new_rng()
    cache = Cache.random(rng, kv_len=kv_len, dtype=dtype, page_tokens=16, **options)
    heads, head_dim = cache.store.num_kv_heads * GROUP_SIZE, cache.store.head_dim
    return cache, random_queries(rng, rows, heads, head_dim, dtype)


def build_context(keys: torch.Tensor, **given: Any) -> BuildContext:
    """A context with keys [num_kv_heads, kv_len, head_dim], which are the values, too."""
    options = {"layer_idx": 1, "keys": keys, "values": keys, "queries": keys[:, :0]}
    options |= {"sm_scale": 0.2, "capacity_tokens": keys.shape[1] + 1}
    return BuildContext(**options | {"text_marks": None, "pool": None} | given)


def built(policy: Policy, keys: torch.Tensor, **given: Any) -> State:
    """The policy's arrays for keys [num_kv_heads, kv_len, head_dim]."""
    return policy.state.build(build_context(keys, **given))


def assert_same_arrays(actual: State, expected: State) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array, name)


def grow_by_one(
    cache: Cache,
    attention: DecodeAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq: int | None = None,
) -> list[list[int]]:
    """A decode step of one new token: its selection, after it has entered the store."""
    seq = cache.seq if seq is None else seq
    kv_len = cache.store.kv_len(seq) + 1
    cache.store.reserve([seq], [1])
    for layer_idx in range(2):
        cache.store.append(seq, layer_idx, key[None], value[None])
    attend(attention, [seq], [kv_len], query)
    cache.store.commit([seq], [1])
    return attention.last_selection()


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2; NaN counts as infinite."""
    error = float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")
