"""Rows that stay on the GPU from step to step, where the host chooses tokens a layer ahead.

While layer l is projected, the query of layer l + 1 is predicted from the same input, by the next
layer's own norm and projection. The host chooses by it, and says which rows are missing; the GPU
fetches these beside the rest of layer l, and then attends to all that it holds of the head, with
the true query: what was chosen now, and what was in the last steps. Where the policy estimates the
rest (`offload/selection/estimate.py`), the means of its clusters are here, too, from when a
sequence is bound: in each step the host tells how many tokens they stand for, and the means that
have changed.

Heads whose keys have codes on the GPU need no host: it finds their tokens by the true query, and
keeps the map of what is hot (`gpu_ops/choose_places.py`) and the clusters
(`gpu_ops/grow_clusters.py`), which the host only has as they were when the prompt was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.mailbox import Mailbox
from gpu_ops.choose_places import HotMap, choose_places
from gpu_ops.fetch_rows import fetch_rows
from gpu_ops.gathered_attention import MissingRows, gathered_attention, num_gathered_splits
from gpu_ops.grow_clusters import grow_clusters
from gpu_ops.launch import _num_multiprocessors
from gpu_ops.layout import Layout, allocate
from offload.decode.gpu.buffers import StepBuffers
from offload.decode.gpu.layer_heads import LayerHeads
from offload.decode.gpu.placement import HOT_BUDGETS
from offload.decode.gpu.resident_codes import CodeLists
from offload.kv.format import KVFormat
from offload.models import LeanModel, ModelShape
from offload.policies import Policy
from offload.selection.estimate import NO_CLUSTER
from offload.selection.layer_state import State
from offload.selection.sequence_state import LayerArrays

# Of a sequence, with the clusters that serve its next token; None: it is short, and all is chosen.
ArraysOf = Callable[[int], LayerArrays | None]
# Has all tokens of a sequence but the recent ones in the clusters of those arrays.
CatchUp = Callable[[int, LayerArrays], None]


def fetch_tokens(policy: Policy) -> int:
    """Tokens of a KV head that a step fetches at most: a budget, or all that stay where a policy
    chooses what it names in most steps (`observes_every`)."""
    names = any(member.observes_every > 1 for member in policy.members)
    names &= policy.selection_top_p >= 1.0  # what is cut by weights is scored
    return policy.budget_tokens * (HOT_BUDGETS if names else 1)


class HotRows:
    """Launches, and the buffers of up to `num_slots` sequences.

    Args:
        arrays_of: what the policy keeps of a sequence; only called where it estimates the rest.
        catch_up: called before clusters are loaded.
        estimate_clusters: of each KV head.

    Attributes:
        map: which tokens are hot that the host chooses; the coprocessor's, which changes it.
        found: the same of those that the GPU finds; None: there are none.
        fetch_tokens: of a KV head at most, in a step.
        predicted: [num_slots, num_qo_heads * head_dim], queries of the next layer.
    """

    def __init__(
        self,
        model: LeanModel,
        layers: Sequence[LayerHeads],
        policy: Policy,
        *,
        num_slots: int,
        max_tokens: int,
        page_tokens: int,
        kv_format: KVFormat,
        device: torch.device,
        arrays_of: ArraysOf,
        catch_up: CatchUp,
        estimate_clusters: int,
    ) -> None:
        self._policy, self._page_tokens = policy, page_tokens
        self._arrays_of, self._catch_up = arrays_of, catch_up
        self._estimates = estimate_clusters > 0
        self._loaded: dict[int, LayerArrays | None] = {}
        self.fetch_tokens = fetch_tokens(policy)
        self._head_dim, self._latent_dim = model.shape.head_dim, model.shape.latent_dim
        self._group_size, self._sm_scales = model.shape.group_size, model.sm_scales
        self._sinks, self._softcaps = model.sinks, model.each("softcap")
        self._num_multiprocessors = num_sms = _num_multiprocessors(device)
        layout = self.layout(
            model.shape,
            layers,
            policy,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_format=kv_format,
            num_multiprocessors=num_sms,
            estimate_clusters=estimate_clusters,
        )
        del layout["head_lists"]
        buffers = allocate(layout, device)
        self.predicted = buffers.pop("predicted")
        self._counts = buffers.pop("counts")
        self._partial_out = buffers.pop("partial_out")
        self._partial_lse = buffers.pop("partial_lse")
        hot = {i: layer.hot for i, layer in enumerate(layers) if layer.hot}
        self._log_counts = buffers.pop("log_counts")
        self.found: HotMap | None = None
        self._first_found = {}
        if "place_of" in buffers:
            self.found = HotMap(**{x.name: buffers.pop(x.name) for x in fields(HotMap)})
            self._missing, first = buffers.pop("missing"), 0
            for i, layer in enumerate(layers):
                if layer.finds:
                    self._first_found[i], first = first, first + len(layer.hot)
        self._means = {i: buffers.pop(f"means of layer {i}") for i in hot if self._estimates}
        self.rows = dict(zip(hot, buffers.values(), strict=True))
        self._heads = {
            i: torch.tensor(heads, dtype=torch.int32, device=device) for i, heads in hot.items()
        }
        shape = model.shape
        self.map = _native.HotRows(
            num_slots, shape.num_layers, shape.num_kv_heads, HOT_BUDGETS * policy.budget_tokens
        )

    @staticmethod
    def layout(
        shape: ModelShape,
        layers: Sequence[LayerHeads],
        policy: Policy,
        *,
        num_slots: int,
        max_tokens: int,
        kv_format: KVFormat,
        num_multiprocessors: int,
        estimate_clusters: int,
    ) -> Layout:
        """Layout of all buffers; nothing where no head has hot rows."""
        hot = {i: len(layer.hot) for i, layer in enumerate(layers) if layer.hot}
        if not hot:
            return {}
        hot_tokens, num_sms = HOT_BUDGETS * policy.budget_tokens, num_multiprocessors
        splits = max(n * (num_gathered_splits(n, hot_tokens, num_sms) + 1) for n in hot.values())
        partial = num_slots * shape.group_size * splits
        found: Layout = {}
        if num_found := sum(len(layer.hot) for layer in layers if layer.finds):
            sizes = {"max_tokens": max_tokens, "capacity": hot_tokens}
            found = dict(HotMap.layout(num_slots, num_found, **sizes, clusters=estimate_clusters))
            lists = (num_slots, shape.num_kv_heads, policy.budget_tokens)
            found["missing"] = (lists, torch.int32)
        return (
            found
            | {
                "predicted": ((num_slots, shape.query_width), kv_format.dtype),
                "head_lists": ((sum(hot.values()),), torch.int32),
                "counts": ((num_slots, shape.num_kv_heads), torch.int32),
                "partial_out": ((partial * shape.head_dim,), torch.float32),
                "partial_lse": ((partial,), torch.float32),
                "log_counts": ((num_slots, shape.num_kv_heads, estimate_clusters), torch.float32),
            }
            | {
                f"{name} {i}": (
                    (num_slots, row.num_parts, n, num_rows, row.row_items(shape.head_dim)),
                    row.page_dtype,
                )
                for name, num_rows, row in (
                    ("means of layer", estimate_clusters, KVFormat(kv_format.dtype)),
                    ("layer", hot_tokens, kv_format),
                )
                for i, n in hot.items()
                if num_rows
            }
        )

    @property
    def num_bytes(self) -> int:
        held = [*self.rows.values(), *self._means.values()]
        if self.found is not None:
            held += [getattr(self.found, field.name) for field in fields(self.found)]
        return sum(x.nbytes for x in held)

    def bind(self, slot: int, seq: int, kv_len: int) -> None:
        """Have the clusters of `seq`, which is in `slot` and has `kv_len` tokens."""
        arrays = self._arrays_of(seq) if self._estimates else None
        if slot in self._loaded and _are_alike(self._loaded[slot], arrays, next(iter(self.rows))):
            self._loaded[slot] = arrays  # with room for more tokens
            return
        self._loaded.pop(slot, None)  # until all is there
        if self.found is not None:
            self.found.clear(slot)
        if arrays is not None:
            self._catch_up(seq, arrays)
            self._load(slot, arrays, kv_len)
        self._loaded[slot] = arrays

    def _load(self, slot: int, arrays: LayerArrays, kv_len: int) -> None:
        for layer_idx, means in self._means.items():
            of_layer = arrays.layers[layer_idx]
            heads = self._heads[layer_idx].tolist()
            for side, name in enumerate(("estimate_keys", "estimate_values")):
                held = torch.from_numpy(of_layer[name][heads])
                means[slot, side].copy_(held.to(means.dtype), non_blocking=True)
            if self.found is not None and layer_idx in self._first_found:
                self._load_clusters(self.found, slot, layer_idx, of_layer, kv_len)
        self.map.estimate(slot)

    def _load_clusters(
        self, found: HotMap, slot: int, layer_idx: int, of_layer: State, kv_len: int
    ) -> None:
        first, heads = self._first_found[layer_idx], self._heads[layer_idx].tolist()
        mapped = slice(first, first + len(heads))
        cluster_of = torch.from_numpy(of_layer["estimate_cluster_of"][heads])
        counts = torch.from_numpy(of_layer["estimate_counts"][heads])
        # After tokens were cropped some of the window are in clusters: they join again.
        window = slice(max(0, kv_len - self._policy.recent_tokens), None)
        for head, of_window in enumerate(cluster_of[:, window]):
            in_both = torch.bincount(of_window, minlength=NO_CLUSTER + 1)[: counts.shape[1]]
            counts[head] -= in_both.int()
        cluster_of[:, window] = NO_CLUSTER
        num_tokens = min(found.cluster_of.shape[2], cluster_of.shape[1])
        found.cluster_of[slot, mapped, :num_tokens] = cluster_of[:, :num_tokens].to(
            found.cluster_of.device, non_blocking=True
        )
        found.cluster_counts[slot, mapped] = counts.to(found.cluster_counts.device)

    def forget(self, slot: int) -> None:
        """The slot has another sequence, or none."""
        self._loaded.pop(slot, None)
        self.map.forget(slot)

    def fetch(
        self, layer_idx: int, rows: slice, b: StepBuffers, mailbox: Mailbox, page_table: Tensor
    ) -> None:
        """What the host has said is missing of a layer."""
        side = layer_idx % 2
        fetch_rows(
            mailbox.fetches[side, rows],
            mailbox.hot_counts[side, rows],
            page_table[rows],
            b.positions[rows],
            self._heads[layer_idx],
            page_tokens=self._page_tokens,
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
            hot=self.rows[layer_idx][rows],
            counts=self._counts[rows],
            **self._rest(layer_idx, rows),
            rest_counts=mailbox.rest_counts[side, rows] if self._estimates else None,
            rest_means=mailbox.rest_means[side, rows] if self._estimates else None,
        )

    def find_places(self, layer_idx: int, rows: slice, b: StepBuffers, lists: CodeLists) -> None:
        """For the rows of a layer's lists, which have just been made; `attend` brings them."""
        assert self.found is not None
        choose_places(
            lists.selection_of(layer_idx)[rows],
            lists.counts[rows],
            b.positions[rows],
            self._heads[layer_idx],
            self.found.rows(rows),
            first_head=self._first_found[layer_idx],
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
            scratch=self._missing[rows],
            held_counts=self._counts[rows],
            log_counts=self._log_counts[rows] if self._estimates else None,
        )

    def grow(self, layer_idx: int, rows: slice, b: StepBuffers, window: Tensor) -> None:
        """Have the next token to leave the window in a cluster, where the GPU keeps these."""
        if self.found is None or not self._estimates:
            return
        grow_clusters(
            window[rows],
            b.positions[rows],
            self._heads[layer_idx],
            self._means[layer_idx][rows],
            self.found.rows(rows),
            first_head=self._first_found[layer_idx],
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
        )

    def _rest(self, layer_idx: int, rows: slice) -> dict[str, Tensor]:
        """What stands for tokens that are not hot."""
        if not self._estimates:
            return {}
        return {"means": self._means[layer_idx][rows], "log_counts": self._log_counts[rows]}

    def attend(
        self, layer_idx: int, rows: slice, b: StepBuffers, window: Tensor, page_table: Tensor
    ) -> None:
        """The layer's heads, to their hot rows and the `window` of the rows."""
        missing = None
        if self.found is not None and layer_idx in self._first_found:
            first = self._first_found[layer_idx]
            token_of = self.found.token_of[rows]
            missing = MissingRows(token_of, first, page_table[rows], self._page_tokens)
        hot = self.rows[layer_idx][rows]
        (n, _, num_heads, hot_tokens, _), head_dim = hot.shape, self._head_dim
        num_splits = num_gathered_splits(num_heads, hot_tokens, self._num_multiprocessors)
        partial = (n, num_heads * self._group_size, num_splits + 1)
        # Of these rows only: micro-batches attend one after the other.
        size = torch.Size(partial).numel()
        gathered_attention(
            b.queries[layer_idx, rows],
            hot,
            self._counts[rows],
            b.positions[rows],
            self._heads[layer_idx],
            group_size=self._group_size,
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
            sm_scale=self._sm_scales[layer_idx],
            latent_dim=self._latent_dim,
            softcap=self._softcaps[layer_idx],
            partial_out=self._partial_out[: size * head_dim].view(*partial, head_dim),
            partial_lse=self._partial_lse[:size].view(partial),
            out=b.attended[rows],
            window=window,
            **self._rest(layer_idx, rows),
            missing=missing,
            sinks=self._sinks[layer_idx],
        )


def _are_alike(before: LayerArrays | None, now: LayerArrays | None, layer_idx: int) -> bool:
    """Whether both are the same, or one a copy of the other, by the clusters of a layer."""
    if before is None or now is None or before is now:
        return before is now
    names = ("estimate_header", "estimate_counts", "estimate_keys")
    both = [(x.layers[layer_idx][name] for name in names) for x in (before, now)]
    (header, *held), (new_header, *new) = both
    alike = all(np.array_equal(x, y) for x, y in zip(held, new, strict=True))
    return alike and np.array_equal(header["end"], new_header["end"])
