"""Sequences that grow token by token under LycheeCluster, and checks of its index."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.policies.lychee_cluster.index import order_of, starts_of
from offload.policies.lychee_cluster.layout import starts_bytes
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.selection.layer_state import State
from offload.selection.text_marks import text_mark

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 32
TEXT = np.array([text_mark(t) for t in (b"a", b" a", b" a", b" a", b",", b".", b"\n")], np.uint8)


@dataclass(frozen=True)
class LycheeIndex:
    """What is in the arrays of an index."""

    arrays: State

    def __getattr__(self, column: str) -> int:
        """num_chunks, num_units, capacity_chunks, indexed_end …"""
        return int(self.arrays["header"][column][0])

    @property
    def index_bytes(self) -> int:
        """Bytes of the index proper: without room for chunks to come, and without scratch."""
        order = self.order().size * (3 if self.has_high_order else 2)
        heads, _, head_dim = self.arrays["rows"].shape
        rows = (self.num_units + self.num_chunks) * (head_dim + 4)
        sizes = self.arrays["header"].nbytes + self.arrays["ranges"].nbytes
        return sizes + heads * rows + order + starts_bytes(self.num_chunks)

    def starts(self) -> np.ndarray:
        return starts_of(self.arrays)

    def order(self) -> np.ndarray:
        return order_of(self.arrays)

    def _scales(self, kind: int) -> np.ndarray:
        num_rows = self.num_units + self.num_chunks
        bits = self.arrays["scales"][:, kind, :num_rows].astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)

    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """Centres and half-widths: [heads, num_units + num_chunks, head_dim]."""
        packed = self.arrays["rows"][:, : self.num_units + self.num_chunks].view(np.uint8)
        packed = packed.astype(np.int16)
        steps, of_widths = (self._scales(kind)[..., None] for kind in range(2))
        return ((packed & 15 ^ 8) - 8) * steps, (packed >> 4) * of_widths

    def units(self, head: int) -> np.ndarray:
        """Coarse unit of each place of a KV head that has one."""
        first = self.arrays["ranges"][head, : self.num_units + 1]
        return np.repeat(np.arange(self.num_units), np.diff(first))


@dataclass
class Stream:
    """One sequence in a store of one layer, its keys and its attention."""

    policy: LycheeCluster
    pool: WorkerPool
    rng: np.random.Generator = field(default_factory=new_rng)
    text: bool = True
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.store = KVStore(
            num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=self.dtype, page_tokens=16
        )
        self.attention = DecodeAttention(
            self.policy, self.store, num_qo_heads=KV_HEADS * GROUP, pool=self.pool
        )
        self.seq = self.store.new_sequence()
        self.topics = self.rng.standard_normal((12, KV_HEADS, HEAD_DIM), dtype=np.float32)
        self.kv_len = 0

    def _keys(self, n: int) -> torch.Tensor:
        """Runs of tokens about one topic."""
        topics = np.repeat(self.rng.integers(0, len(self.topics), n // 9 + 1), 9)[:n]
        noise = self.rng.standard_normal((n, KV_HEADS, HEAD_DIM), dtype=np.float32)
        return torch.from_numpy(1.5 * self.topics[topics] + noise).to(self.dtype)

    def prefill(self, n: int) -> None:
        keys = self._keys(n)
        self.store.reserve([self.seq], [n])
        self.store.append(self.seq, 0, keys, keys)
        self.store.commit([self.seq], [n])
        if self.text:
            self.attention.states.append_delimiter_classes(self.seq, self.rng.choice(TEXT, n))
        self.kv_len += n

    def step(self, query: torch.Tensor | None = None) -> torch.Tensor:
        """Decode one token; returns its query [1, heads * head_dim]."""
        self.store.reserve([self.seq], [1])
        if self.text:
            self.attention.states.append_delimiter_classes(self.seq, self.rng.choice(TEXT, 1))
        self.kv_len += 1
        step = self.attention.begin_step([self.seq], [self.kv_len])
        keys = self._keys(1)
        self.store.append(self.seq, 0, keys, keys)
        if query is None:
            numbers = self.rng.standard_normal((1, KV_HEADS * GROUP * HEAD_DIM), dtype=np.float32)
            query = torch.from_numpy(numbers).to(self.dtype)
        out = torch.empty_like(query)
        self.attention.attend(0, step, query, out)
        self.store.commit([self.seq], [1])
        return query

    @property
    def index(self) -> LycheeIndex:
        arrays = self.attention.states.arrays_of(self.seq)
        assert arrays is not None
        return LycheeIndex(arrays.layers[0])

    def selection(self) -> list[np.ndarray]:
        """Tokens of each KV head in the last step."""
        return [np.array(tokens) for tokens in self.attention.last_selection()]

    def keys(self) -> np.ndarray:
        """float64 [num_kv_heads, kv_len, head_dim]."""
        keys, _ = self.store.gather(self.seq, 0)
        return keys.double().numpy()


def check_index(stream: Stream) -> None:
    """Chunks are whole and in one place of each head, with the box of their keys."""
    index, policy = stream.index, stream.policy
    starts = index.starts()
    lengths = np.diff(starts)
    assert starts[0] == policy.sink_tokens
    assert starts[-1] == index.indexed_end
    assert (lengths >= policy.min_chunk_tokens).all()
    assert (lengths <= policy.max_chunk_tokens).all()
    for head in range(KV_HEADS):  # every head has taken in the same chunks
        assert index.arrays["header"][["num_chunks", "indexed_end"]][head].tolist() == (
            index.num_chunks,
            index.indexed_end,
        )
    if index.num_chunks == 0:
        return
    for head in range(KV_HEADS):
        order = index.order()[head]
        assert sorted(order) == list(range(index.num_chunks))
        _check_boxes(stream, head, order)


def _check_boxes(stream: Stream, head: int, order: np.ndarray) -> None:
    """Every chunk has this box."""
    index, keys = stream.index, stream.keys()[head]
    centres, widths = (x[head, index.num_units :] for x in index.boxes())
    starts = index.starts()
    for place, chunk in enumerate(order):
        tokens = keys[starts[chunk] : starts[chunk + 1]]
        low, high = tokens.min(axis=0), tokens.max(axis=0)
        centre, width = (tokens.mean(axis=0) + (low + high) / 2) / 2, (high - low) / 2
        assert np.abs(centres[place] - centre).max() < 0.51 * 1.01 / 7 * np.abs(centre).max()
        assert np.abs(widths[place] - width).max() < 0.51 * 1.01 / 15 * width.max()
