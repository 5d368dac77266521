"""What the GPU does in a decode step for KV heads to which the host does not attend.

Heads whose KV stays on the GPU attend to all of it; those that retrieve publish their heaviest
tokens, for the GPU's own heads in `selection`, for the CPU's in the mailbox. Other heads attend to
rows that were fetched from the host's pages, of tokens that a head above them published: they are
known before the query is, so they are fetched beside the linear layers.

All results are the GPU's part of a merge with the host's: `out` float32, `lse` natural.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cpu_ops.mailbox import Mailbox
from gpu_ops.gather_rows import gather_rows
from gpu_ops.gathered_attention import gathered_attention, num_gathered_splits
from gpu_ops.retrieval_attention import num_retrieval_splits, retrieval_attention
from gpu_ops.top_k_candidates import TopKBuffers
from gpu_ops.top_k_tokens import top_k_tokens
from offload.decode.gpu.layer_heads import LayerHeads, most_heads
from offload.models import LeanModel
from offload.policies import Policy


class DeviceHeads:
    """Launches of one set of static buffers.

    Args:
        layers: who attends to which heads.
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
        *,
        num_rows: int,
        max_tokens: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self._shape, self._policy, self._page_tokens = model.shape, policy, page_tokens
        self._sm_scale = model.sm_scale
        self._num_rows, self._max_tokens = num_rows, max_tokens
        shape, num_sms = model.shape, _num_multiprocessors(device)

        def indices(heads: Sequence[int]) -> Tensor:
            return torch.tensor(heads, dtype=torch.int32, device=device)

        self._resident = {i: indices(x.resident) for i, x in enumerate(layers) if x.resident}
        self._gathered = {i: indices(x.gathered) for i, x in enumerate(layers) if x.gathered}
        # Rows of two layers: one layer's are fetched while those of the other are attended to.
        self._side = {layer_idx: i % 2 for i, layer_idx in enumerate(self._gathered)}
        self._page_slots = {
            i: _places_of(x.resident, shape.num_kv_heads).to(device)
            for i, x in enumerate(layers)
            if 0 < len(x.resident) < shape.num_kv_heads
        }
        self._splits = {
            i: num_retrieval_splits(len(x.resident), num_sms)
            for i, x in enumerate(layers)
            if x.resident
        }
        most_published = most_heads(layers, "publishing")
        most_gathered = most_heads(layers, "gathered")
        self.num_units = 0
        if most_published:
            self.num_units = 1 if policy.shares_selection else shape.num_kv_heads

        def empty(*sizes: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*sizes, dtype=of, device=device)

        budget = policy.budget_tokens if most_published else 0
        self.selection = empty(num_rows, self.num_units, budget, of=torch.int32)
        self.counts = empty(num_rows, self.num_units, of=torch.int32)
        self._scores = empty(num_rows * most_published * shape.group_size * max_tokens)
        # Parts of a batch publish one after the other, so they share what counts only meanwhile.
        self._top_k: TopKBuffers | None = None
        if most_published:
            lists = num_rows * (1 if policy.shares_selection else most_published)
            self._top_k = TopKBuffers.allocate(lists, max_tokens, budget, device)
        chosen = budget - policy.sink_tokens - policy.recent_tokens if most_gathered else 0
        self._rows = empty(2, num_rows * 2 * most_gathered * chosen * shape.head_dim, of=dtype)
        self._gathered_splits = {
            i: num_gathered_splits(len(x.gathered), chosen, num_sms)
            for i, x in enumerate(layers)
            if x.gathered
        }
        partials = [shape.num_kv_heads * n for n in self._splits.values()]
        partials += [len(self.layers[i].gathered) * n for i, n in self._gathered_splits.items()]
        self._partial_lse = empty(num_rows * shape.group_size * max(partials, default=0))
        self._partial_out = empty(self._partial_lse.numel() * shape.head_dim)

    @property
    def num_bytes(self) -> int:
        """Device bytes of the buffers."""
        tensors = [self.selection, self.counts, self._scores, self._rows]
        tensors += [self._partial_lse, self._partial_out]
        if self._top_k is not None:
            top_k = self._top_k
            tensors += [top_k.importance, top_k.maxima, top_k.candidates, top_k.lengths]
        return sum(tensor.nbytes for tensor in tensors)

    def page_slots(self, layer_idx: int) -> Tensor | None:
        """int32 [num_kv_heads], each head's place in the layer's pages or -1; None: all are there,
        or none."""
        return self._page_slots.get(layer_idx)

    def attend_resident(
        self,
        layer_idx: int,
        rows: slice,
        query: Tensor,
        positions: Tensor,
        page_tables: Mapping[int, Tensor],
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """The layer's resident heads, to all tokens; leaves their scores for `publish`.

        Args:
            query, positions: of all rows of the buffers.
            out, lse: of `rows`; those of other heads are left alone.
        """
        publishes = bool(self.layers[layer_idx].publishing)
        partial_out, partial_lse = self._partials(
            rows, self._shape.num_kv_heads, self._splits[layer_idx]
        )
        retrieval_attention(
            query[rows],
            page_tables[layer_idx][rows],
            positions[rows],
            self._resident[layer_idx],
            group_size=self._shape.group_size,
            page_tokens=self._page_tokens,
            sm_scale=self._sm_scale,
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=out,
            lse=lse,
            scores=self._scores_of(layer_idx, rows) if publishes else None,
        )

    def publish(
        self, layer_idx: int, rows: slice, positions: Tensor, lse: Tensor, mailbox: Mailbox
    ) -> None:
        """The heaviest tokens of the heads that `attend_resident` has just scored."""
        policy, rule = self._policy, self._policy.device_top_k()
        assert self._top_k is not None
        assert rule is not None
        top_k_tokens(
            self._scores_of(layer_idx, rows),
            lse,
            positions[rows],
            self._resident[layer_idx],
            sink_tokens=policy.sink_tokens,
            recent_tokens=policy.recent_tokens,
            budget_tokens=policy.budget_tokens,
            ratio=rule.ratio,
            shared=policy.shares_selection,
            buffers=self._top_k,
            selection=self.selection[rows],
            counts=self.counts[rows],
            host_selection=mailbox.selection[rows],
            host_counts=mailbox.counts[rows],
        )

    def gather(
        self,
        layer_idx: int,
        rows: slice,
        positions: Tensor,
        host_pages: Mapping[int, Tensor],
        *,
        early: bool,
    ) -> None:
        """Fetch rows of the layer's gathered heads: of the early ones, or of the others."""
        num_early = self.layers[layer_idx].num_early
        heads = self._gathered[layer_idx]
        heads = heads[:num_early] if early else heads[num_early:]
        if not len(heads):
            return
        gather_rows(
            self.selection[rows],
            self.counts[rows],
            host_pages[layer_idx][rows],
            positions[rows],
            heads,
            num_kv_heads=self._shape.num_kv_heads,
            page_tokens=self._page_tokens,
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
            out=self._rows_of(layer_idx, rows),
            first_slot=0 if early else num_early,
        )

    def attend_gathered(
        self,
        layer_idx: int,
        rows: slice,
        query: Tensor,
        positions: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """The layer's gathered heads, to what was fetched: merged into their windows' results."""
        gathered = self._rows_of(layer_idx, rows)
        num_heads, num_splits = gathered.shape[2], self._gathered_splits[layer_idx]
        partial_out, partial_lse = self._partials(rows, num_heads, num_splits)
        gathered_attention(
            query[rows],
            gathered,
            self.counts[rows],
            positions[rows],
            self._gathered[layer_idx],
            group_size=self._shape.group_size,
            sink_tokens=self._policy.sink_tokens,
            recent_tokens=self._policy.recent_tokens,
            sm_scale=self._sm_scale,
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=out,
            lse=lse,
        )

    def _partials(self, rows: slice, num_heads: int, num_splits: int) -> tuple[Tensor, Tensor]:
        shape = (rows.stop - rows.start, num_heads * self._shape.group_size, num_splits)
        return (
            _part_of(self._partial_out, rows, self._num_rows, (*shape, self._shape.head_dim)),
            _part_of(self._partial_lse, rows, self._num_rows, shape),
        )

    def _scores_of(self, layer_idx: int, rows: slice) -> Tensor:
        num_heads = len(self.layers[layer_idx].publishing)
        shape = (rows.stop - rows.start, num_heads, self._shape.group_size, self._max_tokens)
        return _part_of(self._scores, rows, self._num_rows, shape)

    def _rows_of(self, layer_idx: int, rows: slice) -> Tensor:
        num_heads, policy = len(self.layers[layer_idx].gathered), self._policy
        chosen = policy.budget_tokens - policy.sink_tokens - policy.recent_tokens
        shape = (rows.stop - rows.start, 2, num_heads, chosen, self._shape.head_dim)
        return _part_of(self._rows[self._side[layer_idx]], rows, self._num_rows, shape)


def _part_of(buffer: Tensor, rows: slice, num_rows: int, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor of `rows`, in their own share of a flat buffer for `num_rows` rows."""
    first = buffer.numel() // num_rows * rows.start
    num_elements = torch.Size(shape).numel()
    return buffer[first : first + num_elements].view(shape)


def _places_of(heads: Sequence[int], num_kv_heads: int) -> Tensor:
    places = torch.full((num_kv_heads,), -1, dtype=torch.int32)
    places[list(heads)] = torch.arange(len(heads), dtype=torch.int32)
    return places


def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
