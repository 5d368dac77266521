"""LycheeCluster: structure-aware chunks under a two-level index of clusters.

Source: Li et al., LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking and
Hierarchical KV Indexing (arXiv 2603.08453). Chunks: `chunks`; index: `index`; search: `search`;
updates: `graft`; the arrays: `layout`, and as callbacks see them: `views`.

Two things differ from the paper, both for the attention mass they keep on real text. The clusters
found hold `candidate_ratio` times the tokens that are attended, and exact attention weights choose
among them: a chunk's mean key tells where the attention is, not which tokens have it. And clusters
are ranked by an upper bound for their tokens' keys, not for their chunks' means (`search`),
in which radius and spread count with `radius_weight`: at 1 wide clusters win whatever their
centroids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from offload.policies.base import BuildContext, DeviceBuild, SparsePolicy, State, StateShape
from offload.policies.callback import Callback
from offload.policies.device_build import to_host
from offload.policies.layouts import NumberLayout, StateLayout
from offload.policies.lychee_cluster.chunks import MAX_CHUNK_TOKENS, cut_chunks
from offload.policies.lychee_cluster.graft import append, forget_graft, take_back_graft
from offload.policies.lychee_cluster.index import (
    Clusters,
    IndexShape,
    cluster_chunks,
    grow_index,
    index_arrays,
    no_clusters,
    room_for,
)
from offload.policies.lychee_cluster.index_on_device import cluster_on_device
from offload.policies.lychee_cluster.layout import (
    HEADER,
    MAX_UNITS,
    STATE,
    scratch_bytes,
    starts_bytes,
)
from offload.policies.lychee_cluster.prefetch import prepare
from offload.policies.lychee_cluster.search import NUMBERS, SHORT_CONTEXT_BUDGETS, propose, select

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LycheeCluster(SparsePolicy):
    """The chunks of the best clusters, a buffer of the newest tokens, sinks.

    Args:
        buffer_tokens: newest tokens kept out of the index, the recent window included; attended in
            full. At small budgets less, so that the buffer takes at most a quarter.
        min_chunk_tokens, max_chunk_tokens: a chunk ends at the best delimiter in between.
        chunks_per_cluster: mean size of a fine cluster when the index is built.
        max_units: coarse units, at most 64; about the square root of the number of clusters.
        kept_units: coarse units whose clusters a search looks at (more where they are small).
        candidate_ratio: tokens whose keys are scored exactly, for each one attended.
        short_context_ratio: the same, if it is more, in contexts of up to 16 budgets, where it
            costs little: with about 2.4 SmolLM2 misses the end of one needle in eight, with 4 none.
        radius_weight: of a cluster's radius and spread in its rank: 1 is the upper bound, 0 ranks
            by centroids alone.
        iterations: of spherical k-means.
    """

    name: ClassVar[str] = "lychee_cluster"
    reads_text: ClassVar[bool] = True
    prepare: ClassVar[Callback | None] = prepare
    propose: ClassVar[Callback | None] = propose
    select: ClassVar[Callback | None] = select
    append: ClassVar[Callback | None] = append
    state_layout: ClassVar[StateLayout | None] = STATE
    number_layout: ClassVar[NumberLayout | None] = NUMBERS
    builds_on_device: ClassVar[bool] = True

    sink_tokens: int = 16
    buffer_tokens: int = 128
    min_chunk_tokens: int = 8
    max_chunk_tokens: int = 16
    chunks_per_cluster: int = 2
    max_units: int = MAX_UNITS
    kept_units: int = 6
    candidate_ratio: float = 1.75
    short_context_ratio: float = 4.0
    radius_weight: float = 0.35
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {
            "buffer_tokens": (0, 1 << 20),
            "min_chunk_tokens": (1, self.max_chunk_tokens),
            "max_chunk_tokens": (1, MAX_CHUNK_TOKENS),
            "chunks_per_cluster": (1, 1 << 20),
            "max_units": (1, MAX_UNITS),
            "kept_units": (1, MAX_UNITS),
            "iterations": (1, 1000),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name} must be an int in [{low}, {high}], got {value!r}")
        for name in ("candidate_ratio", "short_context_ratio"):
            if not 1 <= getattr(self, name) <= 64:
                raise ValueError(f"{name} must be in [1, 64], got {getattr(self, name)}")
        if not 0 <= self.radius_weight <= 1:
            raise ValueError(f"radius_weight must be in [0, 1], got {self.radius_weight}")

    @property
    def _chosen_tokens(self) -> int:
        """What is left of the budget beside sinks and the recent window."""
        return self.budget_tokens - self.sink_tokens - self.recent_tokens

    @property
    def unindexed_limit(self) -> int:
        """Newest tokens that may be in no chunk; beyond it the oldest are grafted."""
        beside_recent = min(self.buffer_tokens - self.recent_tokens, self._chosen_tokens // 4)
        return self.recent_tokens + max(self.max_chunk_tokens, beside_recent)

    def looked_at_bytes(
        self, *, kv_len: int, chosen_tokens: int, row_bytes: int, state_bytes: float
    ) -> tuple[float, bool]:
        """All coarse units' centroids, the clusters of a few of them, and candidates' keys."""
        ratio = self.candidate_ratio
        if kv_len <= SHORT_CONTEXT_BUDGETS * chosen_tokens:
            ratio = max(ratio, self.short_context_ratio)
        chunk = (self.min_chunk_tokens + self.max_chunk_tokens) / 2
        clusters = max(1.0, kv_len / (chunk * self.chunks_per_cluster))
        units = min(self.max_units, clusters**0.5)
        kept = state_bytes * min(1.0, self.kept_units / units)
        return kept + ratio * chosen_tokens * row_bytes, False

    def build(self, context: BuildContext) -> State:
        """Cut the text before the recent window into chunks and cluster their keys."""
        shape = self._index_shape(context)
        return index_arrays(cluster_chunks(context, shape, self.iterations), shape)

    def build_on_device(self, context: BuildContext) -> DeviceBuild:
        """The same, clustered on the device."""
        shape = self._index_shape(context)
        num_heads, _, head_dim = context.keys.shape
        if not shape.num_chunks:
            return lambda: index_arrays(no_clusters(num_heads, head_dim), shape)
        found = cluster_on_device(
            context.keys,
            shape.starts,
            num_clusters=shape.num_clusters,
            num_units=shape.num_units,
            iterations=self.iterations,
        )
        on_host = {name: to_host(x) for name, x in found.items()}

        def finish() -> State:
            arrays: dict[str, Any] = {name: x.numpy().copy() for name, x in on_host.items()}
            arrays["scales"] = arrays["scales"].view(np.uint16)
            return index_arrays(Clusters(**arrays), shape)

        return finish

    def rehearse_on_device(self, keys: Tensor) -> None:
        starts = np.arange(0, keys.shape[1] + 1, 8)
        cluster_on_device(keys, starts, num_clusters=4, num_units=2, iterations=1)

    def _index_shape(self, context: BuildContext) -> IndexShape:
        last = context.keys.shape[1] - self.recent_tokens
        starts = cut_chunks(
            context.text_marks,
            self.sink_tokens,
            max(last, self.sink_tokens),
            self.min_chunk_tokens,
            self.max_chunk_tokens,
        )
        num_chunks = len(starts) - 1
        num_clusters = max(1, num_chunks // self.chunks_per_cluster)
        room = room_for(int(starts[-1]), context.capacity_tokens, self.min_chunk_tokens)
        return IndexShape(
            starts=starts,
            num_clusters=num_clusters,
            num_units=min(self.max_units, max(1, round(num_clusters**0.5))),
            capacity_chunks=num_chunks + room,
            candidate_capacity=self._candidate_capacity,
        )

    @property
    def _candidate_capacity(self) -> int:
        most = max(self.candidate_ratio, self.short_context_ratio)
        return int(1.25 * most * self._chosen_tokens) + 256

    def state_bytes(self, shape: StateShape) -> int:
        """Of chunks as short as they may be."""
        chunks = shape.capacity_tokens // self.min_chunk_tokens + 2
        clusters = max(1, chunks // self.chunks_per_cluster)
        rows = self.max_units + clusters
        of_head = HEADER.itemsize + rows * (shape.head_dim + 6) + 4 * (2 * self.max_units + 1)
        of_head += 3 * (clusters + chunks) + scratch_bytes(
            clusters, chunks, self._candidate_capacity, shape.head_dim
        )
        return shape.num_kv_heads * of_head + starts_bytes(chunks)

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int) -> State:
        """Make room for more chunks."""
        return grow_index(arrays, capacity_tokens, self.min_chunk_tokens)

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """True while only tokens go that are in no chunk."""
        forget_graft(arrays)
        return bool(kv_len >= arrays["header"]["indexed_end"][0])

    def rewind(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Takes back a graft."""
        take_back_graft(arrays, kv_len)
        return True
