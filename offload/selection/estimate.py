"""The rest: what is not chosen, estimated instead of dropped.

Each KV head keeps its tokens in `estimate_clusters` clusters of their keys (cosine; a few
iterations of k-means on a sample of the prompt's keys, then every key joins one). A cluster is one
more row of attention: the mean of its keys and of its values, with the logarithm of how many of its
tokens were not chosen added to its score. Means are those of all members, chosen or not; only the
count tells. Tokens join the nearest cluster when they leave the recent window
(`cpp/attention/estimate.cpp`).

Dropping is wrong where attention is flat, as in counting words: exact top-k of 4 % of the tokens is
0.0066 of KL away from full attention there, with 64 clusters beside them 0.0007 (hard tasks of
RULER at 8K). What clusters hold is the runtime's, for every policy, in arrays behind its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from offload.selection.device_build import to_host
from offload.selection.device_support import DeviceBuild
from offload.selection.layer_state import BuildContext, LayerState, State, StateShape
from offload.selection.layouts import StateLayout

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpu_ops.worker_pool import WorkerPool
    from offload.selection.policy import Policy
    from offload.selection.revised import Revised

NO_CLUSTER = 255  # of sinks
# EstimateHeader of cpp/attention/estimate.h.
HEADER = np.dtype([(name, np.int64) for name in ("end", "capacity", "taken", "cluster")])
ESTIMATE = StateLayout(
    estimate_header=HEADER,  # [num_kv_heads]
    estimate_keys=np.float32,  # [num_kv_heads, clusters, head_dim]: means
    estimate_values=np.float32,  # the same
    estimate_inverse_norms=np.float32,  # [num_kv_heads, clusters]: of the keys
    estimate_counts=np.int32,  # [num_kv_heads, clusters]
    estimate_undo=np.float32,  # [num_kv_heads, 2 * head_dim + 2]: a cluster before it grew
    estimate_cluster_of=np.uint8,  # [num_kv_heads, capacity]
)
_PREFIX = "estimate_"  # of all their names

_SAMPLE = 32  # keys of each cluster that k-means sees
_ITERATIONS = 4
# Keys of all heads that are assigned at once, on a GPU in part of WORKSPACE_BYTES.
_SLICE_ROWS, _DEVICE_SLICE_ROWS = 16384, 53248


@dataclass(frozen=True)
class Clusters:
    """Clusters of the tokens [first, last) of every KV head, float32 and on the keys' device.

    Attributes:
        cluster_of: uint8 [num_kv_heads, last - first].
        keys, values: [num_kv_heads, clusters, head_dim], means; 0 where there are no members.
        counts: [num_kv_heads, clusters].
    """

    cluster_of: Tensor
    keys: Tensor
    values: Tensor
    counts: Tensor


def cluster_keys(keys: Tensor, values: Tensor, num_clusters: int) -> Clusters:
    """Cluster keys [num_kv_heads, n, head_dim], by the cosine, and their values with them."""
    num_heads, n, head_dim = keys.shape
    centres = _centres(keys, num_clusters) if n else keys.new_zeros(0)
    cluster_of = torch.empty(num_heads, n, dtype=torch.uint8, device=keys.device)
    key_sums = keys.new_zeros(num_heads, num_clusters, head_dim, dtype=torch.float32)
    value_sums, counts = torch.zeros_like(key_sums), torch.zeros_like(key_sums[..., 0])
    one = counts.new_ones(1, 1)
    step = max(1, (_DEVICE_SLICE_ROWS if keys.is_cuda else _SLICE_ROWS) // num_heads)
    for first in range(0, n, step):
        rows = slice(first, first + step)
        key = keys[:, rows].float()
        nearest = _nearest(key, centres)
        cluster_of[:, rows] = nearest
        counts.scatter_add_(1, nearest, one.expand_as(nearest))  # whole: the same in any order
        members = _members(nearest, num_clusters)
        key_sums += _sums(key, members, num_clusters)
        del key  # values take its place
        value_sums += _sums(values[:, rows].float(), members, num_clusters)
        del members
    at_least_one = counts.clamp_min(1.0)[..., None]
    return Clusters(cluster_of, key_sums / at_least_one, value_sums / at_least_one, counts)


def _centres(keys: Tensor, num_clusters: int) -> Tensor:
    """[num_kv_heads, clusters, head_dim], normalised, of evenly spaced keys."""
    n = keys.shape[1]
    count = min(n, _SAMPLE * num_clusters)
    # Made on the device: moving indices there would wait for it.
    sampled = torch.arange(count, device=keys.device) * n // max(count, 1)
    sample = torch.nn.functional.normalize(keys[:, sampled].float(), dim=-1)
    first = torch.arange(num_clusters, device=keys.device) * count // num_clusters
    centres = sample[:, first].clone()
    for _ in range(_ITERATIONS):
        nearest = _nearest(sample, centres)
        sums = _sums(sample, _members(nearest, num_clusters), num_clusters)
        norms = sums.norm(dim=-1, keepdim=True)
        centres = torch.where(norms > 0.0, sums / norms.clamp_min(1e-12), centres)
    return centres


def _nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """int64 [num_kv_heads, n], by the product."""
    products = torch.bmm(rows, centres.transpose(1, 2))
    if products.is_cuda:
        return products.max(-1).indices
    return torch.from_numpy(products.numpy().argmax(-1))  # torch's takes over twice as long


def _members(nearest: Tensor, num_clusters: int) -> Tensor:
    """What `_sums` takes: `nearest`, or on a GPU, where additions in any order would give other
    sums each time, float32 [num_kv_heads, n, clusters], 1 for the nearest and else 0."""
    if not nearest.is_cuda:
        return nearest
    zeros = torch.zeros(*nearest.shape, num_clusters, device=nearest.device)
    return zeros.scatter_(-1, nearest[..., None], 1.0)


def _sums(rows: Tensor, members: Tensor, num_clusters: int) -> Tensor:
    """Sums [num_kv_heads, clusters, m] of the rows [num_kv_heads, n, m] of each cluster."""
    if rows.is_cuda:
        return torch.bmm(members.transpose(1, 2), rows)
    num_heads, _, width = rows.shape
    cluster = members + num_clusters * torch.arange(num_heads)[:, None]
    sums = rows.new_zeros(num_heads * num_clusters, width)
    sums.index_add_(0, cluster.flatten(), rows.reshape(-1, width))
    return sums.view(num_heads, num_clusters, width)


def join_clusters(arrays: State, last: int, gather: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    """Tokens before `last` that are in no cluster join those whose mean key is nearest now, all at
    once. Heads differ in how far they are: those that a GPU holds all of take in none.

    Args:
        gather: keys and values [num_kv_heads, n, head_dim] of the tokens from one on up to `last`.
    """
    header = arrays["estimate_header"]
    for first in sorted({int(end) for end in header["end"] if end < last}):
        heads = np.flatnonzero(header["end"] == first)
        keys, values = (x[heads].float() for x in gather(first))
        _join(arrays, heads, first, keys, values)
        header["end"][heads], header["taken"][heads] = last, 0


def _join(
    arrays: State, heads: npt.NDArray[np.int64], first: int, keys: Tensor, values: Tensor
) -> None:
    """Tokens [first, first + n) of some heads, float32 [num_heads, n, head_dim]."""
    of_heads = {
        name: torch.from_numpy(arrays[f"estimate_{name}"][heads])
        for name in ("counts", "keys", "values", "inverse_norms")
    }
    counts, means, mean_values, inverse = of_heads.values()
    cosines = keys @ means.mT * inverse[:, None]
    nearest = cosines.masked_fill((counts == 0)[:, None], float("-inf")).argmax(-1)
    before = counts[..., None].to(torch.float32)
    counts.scatter_add_(1, nearest, torch.ones_like(nearest, dtype=counts.dtype))
    share = 1.0 / counts[..., None].clamp_min(1).to(torch.float32)
    cluster = (nearest + counts.shape[1] * torch.arange(len(counts))[:, None]).flatten()
    for held, rows in ((means, keys), (mean_values, values)):
        held.mul_(before).flatten(0, 1).index_add_(0, cluster, rows.flatten(0, 1))
        held.mul_(share)
    norms = means.norm(dim=-1)
    inverse.copy_(torch.where(norms > 0.0, 1.0 / norms.clamp_min(1e-30), 0.0))
    for name, x in of_heads.items():
        arrays[f"estimate_{name}"][heads] = x.numpy()
    tokens = slice(first, first + keys.shape[1])
    arrays["estimate_cluster_of"][heads, tokens] = nearest.numpy().astype(np.uint8)


class EstimateState(LayerState):
    """What a policy keeps of a layer, and behind it the clusters of the rest.

    Args:
        asking, estimating: layers in which the policy keeps its own, and in which there is a rest;
            they may change between passes.
    """

    def __init__(self, policy: Policy, num_clusters: int) -> None:
        super().__init__(policy)
        self._own, self._num_clusters = policy.state, num_clusters
        self.asking: Set[int] = frozenset()
        self.estimating: Set[int] = frozenset()
        self.layout = EstimateLayout(self._own.layout)
        self.observed_queries = self._own.observed_queries
        self.reads_text = self._own.reads_text
        self.catches_up = self._own.catches_up or not self._own.has_arrays

    def build(self, context: BuildContext) -> State:
        built = self._own.build(context) if self._asks(context.layer_idx) else {}
        return built | self._estimate_of(context)()

    def build_on_device(self, context: BuildContext) -> DeviceBuild:
        """As `DeviceSupport.build`, of a policy that has it or keeps nothing of its own."""
        own: DeviceBuild = dict
        if self._asks(context.layer_idx):
            own = self.policy.device.build(context)
        rest = self._estimate_of(context)
        return lambda: own() | rest()

    def num_bytes(self, shape: StateShape) -> int:
        own = self._own.num_bytes(shape) if self._asks(shape.layer_idx) else 0
        if shape.layer_idx not in self.estimating:
            return own
        of_head = estimate_bytes(self._num_clusters, shape.head_dim, shape.capacity_tokens)
        return own + shape.num_kv_heads * of_head

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        own, rest = _parts(arrays)
        grown = self._own.grow(layer_idx, own, capacity_tokens, pool) if own else {}
        if not rest:
            return grown
        there, header = rest["estimate_cluster_of"], rest["estimate_header"].copy()
        cluster_of = np.full((len(there), capacity_tokens), NO_CLUSTER, np.uint8)
        cluster_of[:, : there.shape[1]] = there[:, :capacity_tokens]
        header["capacity"] = capacity_tokens
        copies = {
            name: array.copy() for name, array in rest.items() if name != "estimate_cluster_of"
        }
        return grown | copies | {"estimate_header": header, "estimate_cluster_of": cluster_of}

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """False once tokens that are in clusters go."""
        own, rest = _parts(arrays)
        if rest and bool((rest["estimate_header"]["end"] > kv_len).any()):
            return False
        return self._own.truncate(layer_idx, own, kv_len) if own else True

    def rewind(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Takes the last token out of its cluster again."""
        own, rest = _parts(arrays)
        done = self._own.rewind(layer_idx, own, kv_len) if own else True
        return done and (not rest or self._take_back(rest, kv_len - self.policy.recent_tokens))

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """Clusters stay as they are: tokens that were written anew have nearly their old keys."""
        own, _ = _parts(arrays)
        return self._own.revise(layer_idx, own, revised) if own else True

    def compile_revise(self) -> None:
        self._own.compile_revise()

    def read_bytes(self, **sizes: Any) -> tuple[float, bool]:
        return self._own.read_bytes(**sizes)

    def _asks(self, layer_idx: int) -> bool:
        return self._own.has_arrays and layer_idx in self.asking

    def _estimate_of(self, context: BuildContext) -> DeviceBuild:
        """Queues the clustering, if the layer has a rest; what makes its arrays."""
        if context.layer_idx not in self.estimating:
            return dict
        policy, n = self.policy, context.keys.shape[1]
        last = max(policy.sink_tokens, n - policy.recent_tokens)
        tokens = slice(policy.sink_tokens, last)
        found = cluster_keys(context.keys[:, tokens], context.values[:, tokens], self._num_clusters)
        on_host = {name: to_host(x) for name, x in vars(found).items()}
        capacity = context.capacity_tokens
        return lambda: _estimate_arrays(Clusters(**on_host), policy.sink_tokens, last, capacity)

    def _take_back(self, rest: State, end: int) -> bool:
        header = rest["estimate_header"]
        for head in np.flatnonzero(header["end"] > end):
            if header["taken"][head] != 1 or header["end"][head] != end + 1:
                return False
            cluster, undo = header["cluster"][head], rest["estimate_undo"][head]
            dim = rest["estimate_keys"].shape[2]
            rest["estimate_keys"][head, cluster] = undo[:dim]
            rest["estimate_values"][head, cluster] = undo[dim : 2 * dim]
            rest["estimate_inverse_norms"][head, cluster] = undo[2 * dim]
            rest["estimate_counts"][head, cluster] -= 1
            rest["estimate_cluster_of"][head, end] = NO_CLUSTER
            header["end"][head] = end
            header["taken"][head] = 0
        return True


def estimate_bytes(num_clusters: int, head_dim: int, capacity_tokens: int) -> int:
    """Bytes of the clusters of one KV head of a layer."""
    of_cluster = 4 * (2 * head_dim + 2)
    return HEADER.itemsize + (num_clusters + 1) * of_cluster + capacity_tokens


class EstimateLayout(StateLayout):
    """Arrays of a policy, if it has some, and those of the rest; of a layer both, or either."""

    def __init__(self, own: StateLayout | None) -> None:
        self._own = own

    def __len__(self) -> int:
        return len(ESTIMATE) + (0 if self._own is None else len(self._own))

    def addresses(self, state: Mapping[str, npt.NDArray[Any]]) -> list[int]:
        """Those of arrays that the layer does not have are 0."""
        own, rest = _parts(dict(state))
        num_own = 0 if self._own is None else len(self._own)
        of_own = self._own.addresses(own) if own and self._own is not None else [0] * num_own
        return of_own + (ESTIMATE.addresses(rest) if rest else [0] * len(ESTIMATE))


def _parts(arrays: State) -> tuple[State, State]:
    """A policy's own arrays, and those of the rest."""
    rest = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
    return {name: array for name, array in arrays.items() if name not in rest}, rest


def _estimate_arrays(found: Clusters, first: int, end: int, capacity_tokens: int) -> State:
    num_heads, _, head_dim = found.keys.shape
    header = np.zeros(num_heads, HEADER)
    header["end"], header["capacity"] = end, capacity_tokens
    cluster_of = np.full((num_heads, capacity_tokens), NO_CLUSTER, np.uint8)
    cluster_of[:, first:end] = found.cluster_of.numpy()
    norms = found.keys.norm(dim=-1)
    inverse = torch.where(norms > 0.0, 1.0 / norms.clamp_min(1e-30), torch.zeros_like(norms))
    return {
        "estimate_header": header,
        "estimate_keys": found.keys.numpy().copy(),
        "estimate_values": found.values.numpy().copy(),
        "estimate_inverse_norms": inverse.numpy(),
        "estimate_counts": found.counts.numpy().astype(np.int32),
        "estimate_undo": np.zeros((num_heads, 2 * head_dim + 2), np.float32),
        "estimate_cluster_of": cluster_of,
    }
