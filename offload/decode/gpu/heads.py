"""What the GPU attends to in a decode step, and what it publishes and fetches for that.

Heads whose KV stays on the GPU attend to all of it; those that retrieve publish their heaviest
tokens, for the GPU's own heads in `selection`, for the CPU's in the mailbox. All other heads attend
to their windows, and some to rows that were fetched from the host's pages, too: of tokens that a
head above them published, known before the query is, so that they are fetched beside the linear
layers; or of those in `hot_rows`.

Each of these is an `AttentionSource`. Together they are the whole, or where the host attends to
some of a layer's heads the GPU's part of a merge with the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cpu_ops.mailbox import Mailbox
from gpu_ops.checks import num_parts
from gpu_ops.gather_rows import gather_rows
from gpu_ops.gathered_attention import gathered_attention, num_gathered_splits
from gpu_ops.launch import _num_multiprocessors
from gpu_ops.layout import Layout, allocate
from gpu_ops.paged_attention import num_retrieval_splits, retrieval_attention
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_tokens import top_k_tokens
from gpu_ops.window_attention import window_attention
from offload.decode.gpu.buffers import AttentionSource, StepBuffers
from offload.decode.gpu.layer_heads import LayerHeads, most_heads
from offload.decode.gpu.resident_kv import ResidentKV
from offload.kv.format import KVFormat
from offload.models import LeanModel, ModelShape
from offload.policies import Policy


class DeviceHeads:
    """Launches of one set of static buffers.

    Args:
        layers: who attends to which heads.
        kv: what stays on the GPU, to which sources attend.
        num_rows: of a step at most.
        max_tokens: of a sequence whose heads publish.

    Attributes:
        selection, counts: int32 [num_rows, units, budget_tokens] and [num_rows, units], what was
            last published of each KV head, or of all where they share it.
    """

    def __init__(
        self,
        model: LeanModel,
        layers: Sequence[LayerHeads],
        policy: Policy,
        kv: ResidentKV,
        *,
        num_rows: int,
        max_tokens: int,
        page_tokens: int,
        kv_format: KVFormat,
        device: torch.device,
    ) -> None:
        self._row_dtype = kv_format.page_dtype
        self._row_items = kv_format.row_items(model.shape.head_dim)
        self.layers = tuple(layers)
        self._shape, self._policy, self._page_tokens = model.shape, policy, page_tokens
        self._group_size, self._sm_scales, self._kv = model.shape.group_size, model.sm_scales, kv
        self._sinks, self._softcaps = model.sinks, model.each("softcap")
        self._num_rows, self._max_tokens = num_rows, max_tokens
        self._chosen_tokens = _chosen_tokens(layers, policy)
        self._num_multiprocessors = num_sms = _num_multiprocessors(device)
        self._resident, self._gathered, self._page_slots = (
            {i: torch.tensor(heads, dtype=torch.int32, device=device) for i, heads in of.items()}
            for of in _head_lists(layers, model.shape.num_kv_heads)
        )
        # Rows of two layers: one layer's are fetched while those of the other are attended to.
        self._side = {layer_idx: i % 2 for i, layer_idx in enumerate(self._gathered)}
        layout = self.layout(
            model.shape,
            layers,
            policy,
            num_rows=num_rows,
            max_tokens=max_tokens,
            kv_format=kv_format,
            num_multiprocessors=num_sms,
        )
        del layout["head_lists"]
        buffers = allocate(layout, device)
        self.selection, self.counts = buffers.pop("selection"), buffers.pop("counts")
        self._scores, self._rows = buffers.pop("scores"), buffers.pop("rows")
        self._partial_out = buffers.pop("partial_out")
        self._partial_lse = buffers.pop("partial_lse")
        # Micro-batches publish one after the other, so they share what counts only meanwhile.
        scored = buffers["importance"].shape[1]
        self._top_k = TopKBuffers(TopKLaunch.default(self.selection.shape[2], scored), **buffers)

    @staticmethod
    def layout(
        shape: ModelShape,
        layers: Sequence[LayerHeads],
        policy: Policy,
        *,
        num_rows: int,
        max_tokens: int,
        kv_format: KVFormat,
        num_multiprocessors: int,
    ) -> Layout:
        """Layout of all buffers, the scratch of `TopKBuffers` and the lists of heads among them."""
        published, gathered = most_heads(layers, "publishing"), most_heads(layers, "gathered")
        units = lists = budget = scored = 0
        if published:
            units, lists = shape.num_kv_heads, num_rows * published
            if policy.shares_selection:
                units, lists = 1, num_rows
            budget, scored = policy.budget_tokens, max_tokens
        chosen, num_sms = _chosen_tokens(layers, policy), num_multiprocessors
        partials = [
            shape.num_kv_heads * num_retrieval_splits(n, num_sms, kv_format.page_dtype)
            for n in {len(x.resident) for x in layers} - {0}
        ]
        partials += [
            n * (num_gathered_splits(n, chosen, num_sms) + 1)
            for n in {len(x.gathered) for x in layers} - {0}
        ]
        partial = num_rows * shape.group_size * max(partials, default=0)
        scores = num_rows * published * shape.group_size * scored
        row = kv_format.num_parts * gathered * chosen * kv_format.row_items(shape.head_dim)
        head_lists = _head_lists(layers, shape.num_kv_heads)
        num_listed = sum(len(heads) for of in head_lists for heads in of.values())
        return {
            "selection": ((num_rows, units, budget), torch.int32),
            "counts": ((num_rows, units), torch.int32),
            "scores": ((scores,), torch.float32),
            "rows": ((2, num_rows * row), kv_format.page_dtype),
            "partial_out": ((partial * shape.head_dim,), torch.float32),
            "partial_lse": ((partial,), torch.float32),
            "head_lists": ((num_listed,), torch.int32),  # each in a tensor of its own
        } | TopKBuffers.layout(lists, scored, TopKLaunch.default(budget, scored))

    def page_slots(self, layer_idx: int) -> Tensor | None:
        """int32 [num_kv_heads], each head's place in the layer's pages or -1; None: all are there,
        or none."""
        return self._page_slots.get(layer_idx)

    @property
    def held(self) -> list[AttentionSource]:
        """What is on the GPU when a layer begins."""
        merged = [i for i, layer in enumerate(self.layers) if layer.host]
        return [
            AttentionSource("window", merged, self._attend_window),
            AttentionSource("attention", self._kv.page_tables, self._attend_resident),
        ]

    @property
    def fetched(self) -> list[AttentionSource]:
        """What comes from the host until a layer needs it."""
        sources = [AttentionSource("gathered", self._gathered, self._attend_gathered)]
        if self._kv.hot is not None:
            sources.append(AttentionSource("hot", self._kv.hot.rows, self._attend_hot))
        return sources

    def _attend_window(self, layer_idx: int, rows: slice, b: StepBuffers) -> None:
        """All heads, to their windows."""
        window_attention(
            b.queries[layer_idx, rows],
            self._kv.windows[layer_idx][rows],
            b.positions[rows],
            sm_scale=self._sm_scales[layer_idx],
            latent_dim=self._shape.latent_dim,
            softcap=self._softcaps[layer_idx],
            out=b.device_out[rows],
            lse=b.device_lse[rows],
        )

    def _attend_resident(self, layer_idx: int, rows: slice, b: StepBuffers) -> None:
        """The layer's resident heads, to all tokens; leaves their scores for `send_selection`."""
        layer, heads, lse = self.layers[layer_idx], None, None
        partial_out, partial_lse, out = b.partial_out[rows], b.partial_lse[rows], b.attended[rows]
        if not layer.is_resident:
            heads, lse = self._resident[layer_idx], b.device_lse[rows]
            out = b.device_out[rows] if layer.host else out
            num_splits = num_retrieval_splits(
                len(heads), self._num_multiprocessors, self._row_dtype
            )
            partial_out, partial_lse = self._partials(rows, self._shape.num_kv_heads, num_splits)
        retrieval_attention(
            b.queries[layer_idx, rows],
            self._kv.page_tables[layer_idx][rows],
            b.positions[rows],
            heads,
            group_size=self._group_size,
            page_tokens=self._page_tokens,
            ring_tokens=layer.window,
            sm_scale=self._sm_scales[layer_idx],
            latent_dim=self._shape.latent_dim,
            softcap=self._softcaps[layer_idx],
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=out,
            lse=lse,
            scores=self._scores_of(layer_idx, rows) if layer.publishing else None,
            page_dtype=self._row_dtype,
            sinks=None if layer.host else self._sinks[layer_idx],
        )

    def send_selection(self, layer_idx: int, rows: slice, b: StepBuffers, mailbox: Mailbox) -> None:
        """The heaviest tokens of the resident heads, which have just been scored."""
        policy, rule = self._policy, self._policy.device.top_k()
        assert rule is not None
        top_k_tokens(
            self._scores_of(layer_idx, rows),
            b.device_lse[rows],
            b.positions[rows],
            self._resident[layer_idx],
            sink_tokens=policy.sink_tokens,
            recent_tokens=policy.recent_tokens,
            budget_tokens=policy.budget_tokens,
            ratio=rule.ratio,
            top_p=rule.top_p,
            threshold=rule.threshold,
            shared=policy.shares_selection,
            buffers=self._top_k,
            selection=self.selection[rows],
            counts=self.counts[rows],
            host_selection=mailbox.selection[rows],
            host_counts=mailbox.counts[rows],
        )

    def gather(self, layer_idx: int, rows: slice, b: StepBuffers, *, early: bool) -> None:
        """Fetch rows of the layer's gathered heads: of the early ones, or of the others."""
        num_early = self.layers[layer_idx].num_early
        heads = self._gathered[layer_idx]
        heads = heads[:num_early] if early else heads[num_early:]
        if not len(heads):
            return
        gather_rows(
            self.selection[rows],
            self.counts[rows],
            self._kv.host_pages.tables[layer_idx][rows],
            b.positions[rows],
            heads,
            num_kv_heads=self._shape.num_kv_heads,
            page_tokens=self._page_tokens,
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
            out=self._rows_of(layer_idx, rows),
            first_slot=0 if early else num_early,
        )

    def _attend_gathered(self, layer_idx: int, rows: slice, b: StepBuffers) -> None:
        """The layer's gathered heads, to what was fetched; and where the host attends to no head,
        whose part would be merged, to their windows."""
        gathered, is_whole = self._rows_of(layer_idx, rows), not self.layers[layer_idx].host
        num_heads = gathered.shape[2]
        num_splits = num_gathered_splits(num_heads, self._chosen_tokens, self._num_multiprocessors)
        partial_out, partial_lse = self._partials(rows, num_heads, num_splits + is_whole)
        gathered_attention(
            b.queries[layer_idx, rows],
            gathered,
            self.counts[rows],
            b.positions[rows],
            self._gathered[layer_idx],
            group_size=self._group_size,
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
            sm_scale=self._sm_scales[layer_idx],
            latent_dim=self._shape.latent_dim,
            softcap=self._softcaps[layer_idx],
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=(b.attended if is_whole else b.device_out)[rows],
            lse=None if is_whole else b.device_lse[rows],
            window=self._kv.windows[layer_idx][rows] if is_whole else None,
            sinks=self._sinks[layer_idx] if is_whole else None,
        )

    def _attend_hot(self, layer_idx: int, rows: slice, b: StepBuffers) -> None:
        """The layer's hot heads."""
        assert self._kv.hot is not None
        addresses = self._kv.host_pages.tables[layer_idx]
        self._kv.hot.attend(layer_idx, rows, b, self._kv.windows[layer_idx][rows], addresses)

    def _partials(self, rows: slice, num_heads: int, num_splits: int) -> tuple[Tensor, Tensor]:
        shape = (rows.stop - rows.start, num_heads * self._group_size, num_splits)
        return (
            _part_of(self._partial_out, rows, self._num_rows, (*shape, self._shape.head_dim)),
            _part_of(self._partial_lse, rows, self._num_rows, shape),
        )

    def _scores_of(self, layer_idx: int, rows: slice) -> Tensor:
        num_heads = len(self.layers[layer_idx].publishing)
        shape = (rows.stop - rows.start, num_heads, self._group_size, self._max_tokens)
        return _part_of(self._scores, rows, self._num_rows, shape)

    def _rows_of(self, layer_idx: int, rows: slice) -> Tensor:
        num_heads = len(self.layers[layer_idx].gathered)
        parts = num_parts(self._shape.latent_dim)
        shape = (rows.stop - rows.start, parts, num_heads, self._chosen_tokens, self._row_items)
        return _part_of(self._rows[self._side[layer_idx]], rows, self._num_rows, shape)


def _part_of(buffer: Tensor, rows: slice, num_rows: int, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor of `rows`, in their own share of a flat buffer for `num_rows` rows."""
    first = buffer.numel() // num_rows * rows.start
    num_elements = torch.Size(shape).numel()
    return buffer[first : first + num_elements].view(shape)


def _head_lists(
    layers: Sequence[LayerHeads], num_kv_heads: int
) -> tuple[Mapping[int, Sequence[int]], ...]:
    """By layer: its resident heads; its gathered ones; of each head its place in the layer's pages,
    where some heads are there.
    """
    resident = {i: x.resident for i, x in enumerate(layers) if x.resident}
    places = {
        i: [heads.index(head) if head in heads else -1 for head in range(num_kv_heads)]
        for i, heads in resident.items()
        if len(heads) < num_kv_heads
    }
    return resident, {i: x.gathered for i, x in enumerate(layers) if x.gathered}, places


def _chosen_tokens(layers: Sequence[LayerHeads], policy: Policy) -> int:
    """Rows that are fetched of a head at most."""
    if not most_heads(layers, "gathered"):
        return 0
    return policy.budget_tokens - policy.sink_tokens - policy.recent_tokens
