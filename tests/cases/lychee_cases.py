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
from offload.policies.base import State
from offload.policies.lychee_cluster.index import FIXED, bfloat16_value, links_of, starts_of
from offload.policies.lychee_cluster.layout import starts_bytes
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.policies.text_marks import text_mark

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 32
TEXT = np.array([text_mark(t) for t in (b"a", b" a", b" a", b" a", b",", b".", b"\n")], np.uint8)


@dataclass(frozen=True)
class LycheeIndex:
    """What is in the arrays of an index."""

    arrays: State

    def __getattr__(self, column: str) -> int:
        """num_chunks, num_clusters, num_units, capacity_chunks, indexed_end …"""
        return int(self.arrays["header"][column][0])

    @property
    def index_bytes(self) -> int:
        """Bytes of the index proper: without room for chunks to come, and without scratch."""
        links = self.links().size * (3 if self.has_high_links else 2)
        fixed = sum(self.arrays[name].nbytes for name in FIXED)
        return fixed + links + starts_bytes(self.num_chunks)

    def starts(self) -> np.ndarray:
        return starts_of(self.arrays)

    def links(self) -> np.ndarray:
        return links_of(self.arrays)

    def members(self, head: int) -> list[list[int]]:
        """Chunks of each cluster of a KV head, the newest first."""
        links = self.links()[head]
        result = []
        for cluster in range(self.num_clusters):
            chunks = []
            link = int(links[cluster])
            while link:
                chunks.append(link - 1)
                link = int(links[self.num_clusters + link - 1])
            result.append(chunks)
        return result

    def centroids(self) -> tuple[np.ndarray, np.ndarray]:
        """Dequantised centroids [heads, num_units + num_clusters, head_dim] and their radii."""
        scales, radii = (
            bfloat16_value(self.arrays["scales"][:, i]).astype(np.float64) for i in (0, 1)
        )
        return self.arrays["rows"] * scales[..., None], radii

    def norms_and_spreads(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean norm and largest spread of the chunks below each row of `centroids`."""
        codes = self.arrays["scales"][:, 2].astype(np.int64)
        norm_steps, spread_steps = (
            self.arrays["header"][name].astype(np.float64) for name in ("norm_step", "spread_step")
        )
        return (codes & 0xFF) * norm_steps[:, None], (codes >> 8) * spread_steps[:, None]

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
            self.attention.states.append_marks(self.seq, self.rng.choice(TEXT, n))
        self.kv_len += n

    def step(self, query: torch.Tensor | None = None) -> torch.Tensor:
        """Decode one token; returns its query [1, heads * head_dim]."""
        self.store.reserve([self.seq], [1])
        if self.text:
            self.attention.states.append_marks(self.seq, self.rng.choice(TEXT, 1))
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
    """Chunks are whole and in one cluster of each head; every bound of eq. 2 holds."""
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
    keys = stream.keys()
    points = reference.chunk_means(keys, starts)
    chunk_norms, spreads = index.norms_and_spreads()
    centroids, radii = index.centroids()
    for head in range(KV_HEADS):
        members = index.members(head)
        assert sorted(c for chunks in members for c in chunks) == list(range(index.num_chunks))
        assert all(chunks == sorted(chunks, reverse=True) for chunks in members)
        unit_of = index.unit_of_cluster(head)
        queries = np.concatenate(
            [stream.rng.standard_normal((20, HEAD_DIM)), centroids[head, :20], -points[head, :20]]
        )
        norms = np.linalg.norm(queries, axis=1)
        for cluster, chunks in enumerate(members):
            for row in (index.num_units + cluster, unit_of[cluster]):
                away = np.linalg.norm(points[head, chunks] - centroids[head, row], axis=1)
                assert (away <= radii[head, row]).all()
                bounds = queries @ centroids[head, row] + norms * radii[head, row]
                assert (queries @ points[head, chunks].T <= bounds[:, None] + 1e-12).all()
            row = index.num_units + cluster
            tokens = [keys[head, starts[c] : starts[c + 1]] for c in chunks]
            means = [chunk.mean(axis=0) for chunk in tokens]
            away = [
                np.linalg.norm(chunk - mean, axis=1).max()
                for chunk, mean in zip(tokens, means, strict=True)
            ]
            steps = spreads[head].max() / 255
            assert max(away) <= spreads[head, row] + 1e-5 or spreads[head, row] >= 254 * steps
            mean_norm = np.mean([np.linalg.norm(mean) for mean in means])
            assert abs(chunk_norms[head, row] / mean_norm - 1) < 0.15  # a moving average of bytes
