"""LycheeCluster: structure-aware chunks below an index of clusters.

Source: Li et al., LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking and
Hierarchical KV Indexing (arXiv 2603.08453). Chunks: `chunks`; index: `index`; search: `search`;
updates: `graft`, `units`; the arrays: `layout`, and as callbacks see them: `views`.

Five things differ from the paper, all for what they keep of the attention
(docs/notes/lychee-cluster.md has the ablation). Chunks are ranked by themselves, not in clusters of
two, and in coarse units only where there are more of them than a search ranks: what is in a unit
that is not opened cannot be found. They are ranked for each query head, the best of which counts,
by an ellipsoid around their keys, instead of for the sum of the heads by a ball, in which the
widest cluster wins. What had the most attention in one step is looked at again in the next. And
more candidates are found than are attended, among which exact attention weights choose, also of the
newest tokens, which are in no chunk yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from offload.policies.base import SparsePolicy
from offload.policies.lychee_cluster.chunks import MAX_CHUNK_TOKENS, cut_chunks
from offload.policies.lychee_cluster.graft import append, forget_graft, take_back_graft
from offload.policies.lychee_cluster.index import (
    Groups,
    IndexShape,
    group_chunks,
    grow_index,
    index_arrays,
    no_groups,
    room_for,
)
from offload.policies.lychee_cluster.index_on_device import group_on_device
from offload.policies.lychee_cluster.layout import (
    HEADER,
    MAX_UNITS,
    STATE,
    scratch_bytes,
    starts_bytes,
)
from offload.policies.lychee_cluster.prefetch import prepare
from offload.policies.lychee_cluster.revise import compile_rank, revise_chunks
from offload.policies.lychee_cluster.search import NUMBERS, propose, select
from offload.policies.lychee_cluster.units import place_grafts
from offload.selection.callback import Callback
from offload.selection.device_build import to_host
from offload.selection.device_support import DeviceBuild, DeviceSupport
from offload.selection.layer_state import BuildContext, LayerState, State, StateShape
from offload.selection.layouts import NumberLayout
from offload.selection.revised import Revised

if TYPE_CHECKING:
    from torch import Tensor

    from cpu_ops.worker_pool import WorkerPool


_CHUNKS_PER_UNIT = 8  # at least, where chunks are few
_FLAT_SHARE = 1.5  # of the ranked chunks: so many are ranked in the time that opening units takes


class ClusterState(LayerState):
    """The index of chunks."""

    layout = STATE
    reads_text = True
    policy: LycheeCluster

    def build(self, context: BuildContext) -> State:
        """Cut the text before the recent window into chunks and cluster their keys."""
        shape = self.index_shape(context)
        return index_arrays(group_chunks(context, shape, self.policy.iterations), shape)

    def index_shape(self, context: BuildContext) -> IndexShape:
        policy = self.policy
        last = context.keys.shape[1] - policy.recent_tokens
        starts = cut_chunks(
            context.text_marks,
            policy.sink_tokens,
            max(last, policy.sink_tokens),
            policy.min_chunk_tokens,
            policy.max_chunk_tokens,
        )
        num_chunks = len(starts) - 1
        room = room_for(int(starts[-1]), context.capacity_tokens, policy.min_chunk_tokens)
        return IndexShape(
            starts=starts,
            num_units=policy.num_units(num_chunks),
            capacity_chunks=num_chunks + room,
            candidate_capacity=policy.candidate_capacity,
            carried_tokens=policy.carried_tokens,
        )

    def num_bytes(self, shape: StateShape) -> int:
        """Bytes of the state if chunks are as short as they may be."""
        policy = self.policy
        chunks = shape.capacity_tokens // policy.min_chunk_tokens + 2
        rows = policy.max_units + chunks
        of_head = HEADER.itemsize + rows * (shape.head_dim + 4) + 4 * (policy.max_units + 1)
        of_head += 3 * chunks + 4 * 2 * (2 + policy.carried_tokens)
        of_head += scratch_bytes(chunks, policy.candidate_capacity, shape.head_dim)
        return shape.num_kv_heads * of_head + starts_bytes(chunks)

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        """Make room for more chunks, and put those of the last ones into units."""
        policy = self.policy
        num_chunks = int(arrays["header"]["num_chunks"][0])
        arrays = place_grafts(arrays, policy.num_units(int(num_chunks / _FLAT_SHARE)), pool)
        return grow_index(arrays, capacity_tokens, policy.min_chunk_tokens)

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """True while only tokens go that are in no chunk."""
        forget_graft(arrays)
        carried = arrays["carried"]
        carried[carried[..., 0] > kv_len, 0] = 0
        return bool(kv_len >= arrays["header"]["indexed_end"][0])

    def rewind(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Takes back a graft."""
        take_back_graft(arrays, kv_len)
        return True

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """Boxes of the chunks that have such tokens, which end where they did."""
        revise_chunks(arrays, revised)
        return True

    def compile_revise(self) -> None:
        compile_rank()

    def read_bytes(
        self, *, kv_len: int, chosen_tokens: int, row_bytes: int, state_bytes: float
    ) -> tuple[float, bool]:
        """Rows of coarse units and of the ranked chunks, and candidates' keys."""
        policy = self.policy
        chunks = max(1.0, 2 * kv_len / (policy.min_chunk_tokens + policy.max_chunk_tokens))
        candidates = max(policy.candidate_ratio * chosen_tokens, policy.least_candidates)
        candidates = min(kv_len, candidates + policy.carried_share * chosen_tokens)
        kept = state_bytes * min(1.0, policy.ranked_chunks / chunks)
        return kept + candidates * row_bytes, False


class ClusterDevice(DeviceSupport):
    """Chunks are clustered there."""

    builds = True
    policy: LycheeCluster

    def build(self, context: BuildContext) -> DeviceBuild:
        """The same, clustered on the device."""
        shape = self.policy.state.index_shape(context)
        num_heads, _, head_dim = context.keys.shape
        if not shape.num_chunks:
            return lambda: index_arrays(no_groups(num_heads, head_dim, shape), shape)
        found = vars(group_on_device(context.keys, shape, self.policy.iterations))
        on_host = {name: to_host(x) for name, x in found.items()}
        return lambda: index_arrays(Groups(**{k: x.clone() for k, x in on_host.items()}), shape)

    def warm_up_kernels(self, keys: Tensor) -> None:
        policy = self.policy
        starts = np.arange(0, keys.shape[1] + 1, 8)
        shape = IndexShape(starts, 2, len(starts), policy.candidate_capacity, policy.carried_tokens)
        group_on_device(keys, shape, 1)


@dataclass(frozen=True)
class LycheeCluster(SparsePolicy):
    """The best chunks, what the last step looked at, a buffer of the newest tokens, sinks.

    Args:
        buffer_tokens: newest tokens kept out of the index, the recent window included; all are
            candidates. At small budgets less, so that the buffer takes at most a quarter.
        min_chunk_tokens, max_chunk_tokens: a chunk ends at the best delimiter in between.
        ranked_chunks: of so many a search looks at the keys: of all chunks where there are no more,
            and else of those of the best coarse units.
        max_units: coarse units, at most 128.
        candidate_ratio: tokens of chunks whose keys are scored exactly, for each one attended.
        least_candidates: of them, however small the budget: what finds a token costs the same.
        carried_share: of the attended tokens, those that are candidates of the next step, too.
        spread_weight: half-axes of the ellipsoid by which a chunk is ranked, in half-widths of the
            box that its keys fill (`search`); 0 ranks by centres alone.
        iterations: of spherical k-means.

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "lychee_cluster"
    prepare: ClassVar[Callback | None] = prepare
    propose: ClassVar[Callback | None] = propose
    select: ClassVar[Callback | None] = select
    append: ClassVar[Callback | None] = append
    number_layout: ClassVar[NumberLayout | None] = NUMBERS
    state = cached_property(ClusterState)
    device = cached_property(ClusterDevice)

    sink_tokens: int = 16
    buffer_tokens: int = 128
    min_chunk_tokens: int = 3
    max_chunk_tokens: int = 5
    max_units: int = MAX_UNITS
    ranked_chunks: int = 4096
    candidate_ratio: float = 1.5
    least_candidates: int = 1792
    carried_share: float = 0.25
    spread_weight: float = 1.8
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {
            "buffer_tokens": (0, 1 << 20),
            "min_chunk_tokens": (1, self.max_chunk_tokens),
            "max_chunk_tokens": (1, MAX_CHUNK_TOKENS),
            "max_units": (1, MAX_UNITS),
            "ranked_chunks": (1, 1 << 24),
            "least_candidates": (0, 1 << 20),
            "iterations": (1, 1000),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name} must be an int in [{low}, {high}], got {value!r}")
        for name, (least, most) in {
            "candidate_ratio": (1, 64),
            "carried_share": (0, 1),
            "spread_weight": (0, 16),
        }.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be in [{least}, {most}], got {getattr(self, name)}")

    @property
    def chosen_tokens(self) -> int:
        """What is left of the budget without sinks and the recent window."""
        return self.budget_tokens - self.sink_tokens - self.recent_tokens

    def num_units(self, num_chunks: int) -> int:
        """Coarse units of an index; nothing ranks them where all chunks are ranked."""
        if num_chunks <= self.ranked_chunks:
            return 1
        return min(self.max_units, max(1, num_chunks // _CHUNKS_PER_UNIT))

    @property
    def unindexed_limit(self) -> int:
        """Newest tokens that may be in no chunk; beyond it the oldest are grafted."""
        beside_recent = min(self.buffer_tokens - self.recent_tokens, self.chosen_tokens // 4)
        return self.recent_tokens + max(self.max_chunk_tokens, beside_recent)

    @property
    def carried_tokens(self) -> int:
        return int(self.carried_share * self.chosen_tokens)

    @property
    def candidate_capacity(self) -> int:
        most = max(self.candidate_ratio * self.chosen_tokens, self.least_candidates)
        return int(1.25 * most) + 256 + self.carried_tokens
