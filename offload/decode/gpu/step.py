"""What one decode step launches on the device.

`DeviceStep.all_layers` is the hot path; read it first. It works on static buffers, one row per
slot, and reads everything that changes from step to step (positions, page tables, flags) from
memory, so that it can be captured once and replayed for any lengths. Rows whose position is -1 are
not in use.

The rows of a step may go through the layers in two micro-batches that take turns, so that the
host attends for one while the device computes for the other:

    device   … mlp A 3, qkv A 4 | mlp B 3, qkv B 4 | mlp A 4, qkv A 5 | …
    host     … attend B 3       | attend A 4       | attend B 4       | …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from gpu_ops.gate_heads import gate_heads, split_gates
from gpu_ops.merge_state import merge_state
from gpu_ops.rope_publish import rope_publish
from offload.decode.gpu.buffers import AttentionSource, HostLink, StepBuffers
from offload.decode.gpu.gpu_sync import SideWork
from offload.decode.gpu.heads import DeviceHeads
from offload.decode.gpu.linear import DeviceLayer, DeviceWeights, LinearPath, linear_path
from offload.decode.gpu.resident_codes import CodeLists
from offload.decode.gpu.resident_kv import ResidentKV
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.stock_view import StockView

_SENDING, _GATHERING = 0, 1  # lanes of side streams


@dataclass
class _MicroBatch:
    """Some rows on their way through the layers, and what runs beside them and was not joined."""

    rows: slice
    x: Tensor  # [n, hidden_size]
    ropes: list[tuple[Tensor, Tensor]]  # cos, sin: [n, rotary_dim], of each of the model's ropes
    linears: LinearPath
    query_scale: Tensor | None = None  # [n], of `LeanModel.query_scale`
    selection: SideWork | None = None  # on its way to the mailbox
    gathering: list[SideWork] = field(default_factory=list)  # rows of a layer's heads from the host
    growing: SideWork | None = None  # what the next step finds its tokens by
    gates: Tensor | None = None  # of the layer that attends, in a hybrid model


@dataclass
class DeviceStep:
    """Launches steps over one set of buffers.

    Attributes:
        after_projection: called after the q, k, v projection of each layer with (layer_idx, first
            row, qkv [n, (num_qo_heads + 2 num_kv_heads) * head_dim], positions [n]) and may
            overwrite qkv; and before, where they are predicted, with the queries; for benches.
        on_mark: called with (kind, layer_idx) of what was launched since the call before; for
            traces.
    """

    model: LeanModel
    weights: DeviceWeights
    store: KVStore
    buffers: StepBuffers
    resident: ResidentKV
    heads: DeviceHeads
    lists: CodeLists | None = None  # None: no layer has codes
    after_projection: Callable[[int, int, Tensor, Tensor], None] | None = None
    on_mark: Callable[[str, int], None] | None = None
    _linear_paths: dict[tuple[int, int], LinearPath] = field(default_factory=dict)
    _writes_pages: bool = False

    def run_layers(self, link: HostLink) -> None:
        """From `buffers.hidden` to `buffers.hidden`, before the final norm."""
        self.all_layers(link)
        link.gpu_sync.await_begin()

    def run_tokens(self, link: HostLink, *, samples: bool) -> None:
        """From the tokens in `buffers.tokens` to the next there and in `buffers.host_tokens`, whose
        positions follow."""
        b, n = self.buffers, link.num_rows
        self._mark("start")
        b.hidden[:n] = self.model.embed_tokens(b.tokens[:n].clamp(min=0))
        self.all_layers(link)
        logits = self._linears(slice(0, n)).logits(self.weights, b.hidden[:n])
        self._mark("linear")
        tokens = b.chooser.choose(logits, b.positions[:n] if samples else None)
        if self.model.ranks is not None:  # one of them draws for all
            self.model.ranks.broadcast(tokens)
        link.gpu_sync.await_begin()
        b.host_tokens[:n].copy_(tokens, non_blocking=True)
        self._feed(tokens, n)
        self._mark("sample")

    def run_resident(self, link: HostLink, *, samples: bool) -> None:
        """From the tokens in `buffers.tokens` to the next there, whose positions follow; where no
        head is elsewhere. Keys and values go into the host's pages."""
        b, n = self.buffers, link.num_rows
        b.hidden[:n] = self.model.embed_tokens(b.tokens[:n].clamp(min=0))
        self._writes_pages = True
        try:
            self.all_layers(link)
        finally:
            self._writes_pages = False
        logits = self._linears(slice(0, n)).logits(self.weights, b.hidden[:n])
        self._feed(b.chooser.choose(logits, b.positions[:n] if samples else None), n)

    def _feed(self, tokens: Tensor, num_rows: int) -> None:
        b = self.buffers
        b.tokens[:num_rows] = tokens
        b.state[:2, :num_rows] += (b.positions[:num_rows] >= 0).long()

    def all_layers(self, link: HostLink) -> None:
        """Rows [0, link.num_rows) of `buffers.hidden` through all layers, in place."""
        if isinstance(self.model, StockView):
            self._run_modules(self.model, link)
            return
        b, num_layers = self.buffers, len(self.weights.layers)
        rope_positions = b.rope_positions[None, : link.num_rows].clamp(min=0)
        tables = [rope(b.hidden[: link.num_rows], rope_positions) for rope in self.model.ropes]
        tables = [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in tables]
        scale = self.model.query_scale
        scales = None if scale is None else scale(b.hidden, rope_positions[0])
        batches = [
            _MicroBatch(
                rows,
                b.hidden[rows],
                [(cos[rows], sin[rows]) for cos, sin in tables],
                self._linears(rows),
                None if scales is None else scales[rows],
            )
            for rows in link.micro_batches
        ]
        for batch in batches:
            batch.linears.begin()
        for layer_idx in range(num_layers + 1):
            for batch in batches:
                if layer_idx > 0:
                    self.attend_and_finish(layer_idx - 1, batch, link)
                if layer_idx < num_layers:
                    self.project_and_send(layer_idx, batch, link)
                else:
                    self._mix(layer_idx, batch, link)
        for batch in batches:
            self._join(batch, link)
            batch.linears.finish(batch.x)

    def _run_modules(self, model: StockView, link: HostLink) -> None:
        """As `all_layers`, by the stock model's own modules; the final norm is among them."""
        b, rows, nothing = self.buffers, slice(0, link.num_rows), cast("LinearPath", None)
        x, (earlier, positions) = b.hidden[rows], b.state[:2, rows].clamp(min=0)
        ones = x.new_ones(len(x), model.shape.head_dim)
        batch = _MicroBatch(rows, x, [(ones, torch.zeros_like(ones))], nothing)

        def attend(layer_idx: int, qkv: Tensor) -> Tensor:
            self._mark("linear", layer_idx)
            if qkv.shape[1] == b.queries.shape[2]:
                self._attend_again(layer_idx, rows, qkv)
            else:
                self._send(layer_idx, batch, link, qkv, None)
                self._append_codes(layer_idx, batch)
                self._attend_to_all(layer_idx, batch, link)
            return b.attended[rows]

        assert model.run is not None
        x.copy_(model.run(positions, earlier, attend))
        self._join(batch, link)

    def _attend_again(self, layer_idx: int, rows: slice, queries: Tensor) -> None:
        """To the keys of a layer that has attended, with queries of another one."""
        if not self.heads.layers[layer_idx].is_resident:
            raise NotImplementedError(
                "layers share keys, and not all KV heads of these attend to all tokens on the GPU"
            )
        self.buffers.queries[layer_idx, rows] = queries
        self._attend(self.heads.held, layer_idx, rows)

    def _join(self, batch: _MicroBatch, link: HostLink) -> None:
        """What runs beside the last layers."""
        self._join_selection(batch, link)
        if batch.growing is not None:
            link.gpu_sync.join(batch.growing)

    def project_and_send(self, layer_idx: int, batch: _MicroBatch, link: HostLink) -> None:
        """q, k and v of a layer, to wherever they are needed."""
        layer = self.weights.layers[layer_idx]
        self._mix(layer_idx, batch, link)
        qkv = batch.linears.qkv(layer, batch.x)
        if self.weights.recurrent:
            qkv, batch.gates = self._split_gates(qkv)
        if self.after_projection is not None:
            positions = self.buffers.positions[batch.rows]
            self.after_projection(layer_idx, batch.rows.start, qkv, positions)
        self._send(layer_idx, batch, link, qkv, layer)
        self._ask_ahead(layer_idx + 1, batch, link)
        self._append_codes(layer_idx, batch)  # while the host attends

    def _send(
        self,
        layer_idx: int,
        batch: _MicroBatch,
        link: HostLink,
        qkv: Tensor,
        layer: DeviceLayer | None,
    ) -> None:
        """Where they are needed, after the norms of `layer`, which has some of each head."""
        b, rows, placed = self.buffers, batch.rows, self.heads.layers[layer_idx]
        window = self.resident.windows.get(layer_idx)
        page_table = self.resident.page_tables.get(layer_idx)
        normed = None if layer is None or layer.norms_all_heads else layer
        rope_publish(
            qkv,
            *self._rope(layer_idx, batch),
            b.positions[rows],
            num_kv_heads=self.model.shape.num_kv_heads,
            head_dim=self.model.shape.head_dim,
            q_norm=None if normed is None else normed.q_norm,
            k_norm=None if normed is None else normed.k_norm,
            norm_eps=0.0 if normed is None else normed.qk_norm_eps,
            query_scale=batch.query_scale,
            query=b.queries[layer_idx, rows],
            host_query=link.mailbox.query[rows] if placed.host else None,
            host_kv=None if self._writes_pages else link.mailbox.kv[layer_idx, rows],
            host_pages=(
                self.resident.host_pages.tables[layer_idx][rows] if self._writes_pages else None
            ),
            window=None if window is None else window[rows],
            sink_tokens=self.resident.sink_tokens,
            page_table=None if page_table is None else page_table[rows],
            page_tokens=self.store.page_tokens,
            page_slots=self.heads.page_slots(layer_idx),
            num_page_heads=len(placed.resident),
            ring_tokens=placed.window,
            row_dtype=self.resident.row_dtype,
            keys_only=self.store.format.keys_only,
        )
        self._mark("linear", layer_idx)
        lists = self.lists if placed.coded else None
        if lists is not None:
            lists.find(layer_idx, rows, b, None if placed.finds else link.mailbox)
            if placed.finds:
                assert self.resident.hot is not None
                self.resident.hot.find_places(layer_idx, rows, b, lists)
            self._mark("candidates", layer_idx)
        if placed.host:
            self._join_selection(batch, link)
            link.gpu_sync.request_attention(link.request_of[layer_idx, rows.start])

    def _append_codes(self, layer_idx: int, batch: _MicroBatch) -> None:
        placed = self.heads.layers[layer_idx]
        if self.lists is not None and placed.coded and not placed.finds:
            window = self.resident.windows[layer_idx]
            self.lists.append(layer_idx, batch.rows, self.buffers, window)

    def attend_and_finish(self, layer_idx: int, batch: _MicroBatch, link: HostLink) -> None:
        """The rest of a layer."""
        layer = self.weights.layers[layer_idx]
        self._attend_to_all(layer_idx, batch, link)
        self._fetch_ahead(layer_idx + 1, batch, link)
        attended = self.buffers.attended[batch.rows]
        if batch.gates is not None:
            gate_heads(attended, batch.gates)
        batch.linears.add_attention(layer, batch.x, attended)
        self._add_mlp(self.weights.numbers[layer_idx], layer, batch, link)

    def _attend_to_all(self, layer_idx: int, batch: _MicroBatch, link: HostLink) -> None:
        """Attention of a layer, into `buffers.attended`."""
        if self.heads.layers[layer_idx].is_resident:  # straight into `attended`
            self.gather_ahead(layer_idx + 1, batch, link, early=True)
            self._attend(self.heads.held, layer_idx, batch.rows)
        else:
            self.attend_to_sources(layer_idx, batch, link)
        if self.heads.layers[layer_idx].finds:
            assert self.resident.hot is not None
            assert self.lists is not None
            step = (layer_idx, batch.rows, self.buffers, self.resident.windows[layer_idx])
            with link.gpu_sync.side_stream(_SENDING) as batch.growing:
                self.lists.append(*step)
                self.resident.hot.grow(*step)
        self.gather_ahead(layer_idx + 1, batch, link, early=False)

    def attend_to_sources(self, layer_idx: int, batch: _MicroBatch, link: HostLink) -> None:
        """What the GPU holds and has fetched, here; what the host attends to, there meanwhile. Who
        writes `attended` of a head takes its sink into account."""
        self._join_selection(batch, link)  # which reads the scores and lse that are written here
        b, rows, placed = self.buffers, batch.rows, self.heads.layers[layer_idx]
        self._attend(self.heads.held, layer_idx, rows)
        if placed.publishing:
            with link.gpu_sync.side_stream(_SENDING) as batch.selection:
                self.heads.send_selection(layer_idx, rows, b, link.mailbox)
        for gathering in batch.gathering:
            link.gpu_sync.join(gathering)
        batch.gathering.clear()
        self.gather_ahead(layer_idx + 1, batch, link, early=True)
        self._attend(self.heads.fetched, layer_idx, rows)
        if placed.host:  # else it is all in `attended`
            of_host = link.attend(layer_idx, rows)
            self._mark("wait", layer_idx)
            of_device = b.device_out[rows], b.device_lse[rows]
            sinks = self.model.layers[layer_idx].sinks
            merge_state(*of_device, *of_host, b.attended[rows], sinks)
            self._mark("merge", layer_idx)

    def gather_ahead(
        self, layer_idx: int, batch: _MicroBatch, link: HostLink, *, early: bool
    ) -> None:
        """Fetch rows of a layer's gathered heads, while the layer above attends, or is finished."""
        if layer_idx == len(self.heads.layers):
            return
        placed = self.heads.layers[layer_idx]
        if (placed.num_early if early else len(placed.gathered) - placed.num_early) == 0:
            return
        # The selection comes first in its lane; the others need not wait for it.
        with link.gpu_sync.side_stream(_GATHERING if early else _SENDING) as gathering:
            self.heads.gather(layer_idx, batch.rows, self.buffers, early=early)
        batch.gathering.append(gathering)

    def _attend(self, sources: Sequence[AttentionSource], layer_idx: int, rows: slice) -> None:
        for source in sources:
            if layer_idx in source.layers:
                source.attend(layer_idx, rows, self.buffers)
                self._mark(source.kind, layer_idx)

    def _ask_ahead(self, layer_idx: int, batch: _MicroBatch, link: HostLink) -> None:
        """Have the host choose a layer's hot rows by the query of the input of the layer above."""
        if not self._asks_ahead(layer_idx):
            return
        hot, rows, layer = self.resident.hot, batch.rows, self.weights.layers[layer_idx]
        assert hot is not None
        self._join_selection(batch, link)
        if self.heads.layers[layer_idx].predicts:
            positions, query = self.buffers.positions[rows], batch.linears.query(layer, batch.x)
            if self.weights.recurrent:
                query, _ = self._split_gates(query)
            if self.after_projection is not None:
                self.after_projection(layer_idx, rows.start, query, positions)
            rope_publish(
                query,
                *self._rope(layer_idx, batch),
                positions,
                num_kv_heads=0,
                head_dim=self.model.shape.head_dim,
                q_norm=None if layer.norms_all_heads else layer.q_norm,
                k_norm=None if layer.norms_all_heads else layer.k_norm,
                norm_eps=layer.qk_norm_eps,
                query_scale=batch.query_scale,
                query=hot.predicted[rows],
                host_query=link.mailbox.predicted[layer_idx % 2, rows],
            )
        self._mark("predicted", layer_idx)
        link.gpu_sync.request_attention(link.request_of[layer_idx, rows.start])

    def _fetch_ahead(self, layer_idx: int, batch: _MicroBatch, link: HostLink) -> None:
        """Fetch what a layer's hot rows lack, while the layer above is finished."""
        if not self._asks_ahead(layer_idx):
            return
        hot, rows, b = self.resident.hot, batch.rows, self.buffers
        assert hot is not None
        with link.gpu_sync.side_stream(_GATHERING) as fetching:
            link.gpu_sync.await_reply(link.request_of[layer_idx, rows.start])
            hot.fetch(layer_idx, rows, b, link.mailbox, self.resident.host_pages.tables[layer_idx])
        batch.gathering.append(fetching)

    def _add_mlp(self, number: int, layer: DeviceLayer, batch: _MicroBatch, link: HostLink) -> None:
        """The MLP of the layer that has this number in the stock model."""
        if number not in self.model.host_experts:
            batch.linears.add_mlp(layer, batch.x)
            return
        normed, hot = batch.linears.mlp_input(layer, batch.x), self.weights.hot_experts
        assert hot is not None
        self._mark("linear", number)
        link.run_experts(number, batch.rows, normed, hot, self.buffers.positions[batch.rows])
        self._mark("wait", number)
        batch.linears.add_summed(batch.x, normed)

    def _mix(self, layer_idx: int, batch: _MicroBatch, link: HostLink) -> None:
        """The layers with a rule before a layer, or behind the last."""
        if not self.weights.recurrent:
            return
        pointers = self.buffers.pointers
        for number, stock_number, layer, rule in self.weights.recurrent[layer_idx]:
            projected = batch.linears.qkv(layer, batch.x)
            mixed = rule(projected, pointers[number, :, batch.rows])
            batch.linears.add_attention(layer, batch.x, mixed)
            self._add_mlp(stock_number, layer, batch, link)
            self._mark("linear", layer_idx)

    def _split_gates(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, and what is behind them, without their gates; and these."""
        shape = self.model.shape
        return split_gates(projected, shape.num_qo_heads, shape.head_dim)

    def _rope(self, layer_idx: int, batch: _MicroBatch) -> tuple[Tensor, Tensor]:
        return batch.ropes[self.model.layers[layer_idx].spec.rope_idx]

    def _asks_ahead(self, layer_idx: int) -> bool:
        return layer_idx < len(self.heads.layers) and self.heads.layers[layer_idx].asks_ahead

    def _join_selection(self, batch: _MicroBatch, link: HostLink) -> None:
        if batch.selection is not None:
            link.gpu_sync.join(batch.selection)
            batch.selection = None

    def _linears(self, rows: slice) -> LinearPath:
        key = (rows.start, rows.stop)
        if key not in self._linear_paths:
            self._linear_paths[key] = linear_path(self.weights, rows.stop - rows.start)
        return self._linear_paths[key]

    def _mark(self, kind: str, layer_idx: int = -1) -> None:
        if self.on_mark is not None:
            self.on_mark(kind, layer_idx)
