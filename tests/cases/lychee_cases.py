"""Sequences that grow token by token under LycheeCluster, and checks of its index."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from cases import kernel_references as reference
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.policies.lychee_cluster.index import links_of, starts_of
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
        """num_chunks, num_groups, num_units, capacity_chunks, indexed_end …"""
        return int(self.arrays["header"][column][0])

    @property
    def index_bytes(self) -> int:
        """Bytes of the index proper: without room for chunks to come, and without scratch."""
        links = self.links().size * (3 if self.has_high_links else 2)
        heads, _, head_dim = self.arrays["rows"].shape
        rows = (self.num_units + self.num_groups) * (head_dim + 4)
        sizes = self.arrays["header"].nbytes + self.arrays["ranges"].nbytes
        return sizes + heads * rows + links + starts_bytes(self.num_chunks)

    def starts(self) -> np.ndarray:
        return starts_of(self.arrays)

    def links(self) -> np.ndarray:
        return links_of(self.arrays)

    def members(self, head: int) -> list[list[int]]:
        """Chunks of each group of a KV head, the newest first."""
        links = self.links()[head]
        result = []
        for group in range(self.num_groups):
            chunks = []
            link = int(links[group])
            while link:
                chunks.append(link - 1)
                link = int(links[self.num_groups + link - 1])
            result.append(chunks)
        return result

    def _scales(self, kind: int) -> np.ndarray:
        num_rows = self.num_units + self.num_groups
        bits = self.arrays["scales"][:, kind, :num_rows].astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)

    def rows(self) -> np.ndarray:
        """Dequantised rows [heads, num_units + num_groups, head_dim]."""
        steps = self._scales(0)
        return self.arrays["rows"][:, : steps.shape[1]] * steps[..., None]

    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """Centres and half-widths: [heads, num_units + num_groups, head_dim]."""
        packed = self.arrays["rows"][:, : self.num_units + self.num_groups].view(np.uint8)
        packed = packed.astype(np.int16)
        steps, of_widths = (self._scales(kind)[..., None] for kind in range(2))
        return ((packed & 15 ^ 8) - 8) * steps, (packed >> 4) * of_widths

    def radii(self) -> np.ndarray:
        """Radii of units and groups."""
        return self._scales(1)

    def unit_of_cluster(self, head: int) -> np.ndarray:
        """Coarse unit of each cluster of a KV head."""
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
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=self.dtype,
            page_tokens=16,
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
    """Chunks are whole and in one group of each head, and groups are what their chunks are."""
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
        members = index.members(head)
        assert sorted(c for chunks in members for c in chunks) == list(range(index.num_chunks))
        assert all(chunks == sorted(chunks, reverse=True) for chunks in members)
        if policy.paper:
            _check_bounds(stream, head, members)
        else:
            _check_rows(stream, head, members)


def _check_rows(stream: Stream, head: int, members: list[list[int]]) -> None:
    """Every group is one chunk, of this box."""
    index, keys = stream.index, stream.keys()[head]
    centres, widths = (x[head, index.num_units :] for x in index.boxes())
    assert all(len(chunks) == 1 for chunks in members)
    starts = index.starts()
    for group, (chunk,) in enumerate(members):
        tokens = keys[starts[chunk] : starts[chunk + 1]]
        low, high = tokens.min(axis=0), tokens.max(axis=0)
        centre, width = (tokens.mean(axis=0) + (low + high) / 2) / 2, (high - low) / 2
        assert np.abs(centres[group] - centre).max() < 0.51 * 1.01 / 7 * np.abs(centre).max()
        assert np.abs(widths[group] - width).max() < 0.51 * 1.01 / 15 * width.max()


def _check_bounds(stream: Stream, head: int, members: list[list[int]]) -> None:
    """Every bound of eq. 2 holds."""
    index = stream.index
    points = reference.chunk_means(stream.keys(), index.starts())[head]
    centroids, radii = index.rows()[head], index.radii()[head]
    unit_of = index.unit_of_cluster(head)
    queries = np.concatenate(
        [stream.rng.standard_normal((20, HEAD_DIM)), centroids[:20], -points[:20]]
    )
    norms = np.linalg.norm(queries, axis=1)
    for cluster, chunks in enumerate(members):
        for row in (index.num_units + cluster, unit_of[cluster]):
            away = np.linalg.norm(points[chunks] - centroids[row], axis=1)
            assert (away <= radii[row]).all()
            bounds = queries @ centroids[row] + norms * radii[row]
            assert (queries @ points[chunks].T <= bounds[:, None] + 1e-12).all()
