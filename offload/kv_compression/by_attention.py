"""KV compression that condenses by attention: what the last queries asked for stays.

A slot is a position of the KV store. Keys are rotated before they are stored, so that a key may be
in any slot. Here the heads of a layer have different tokens there, but as many: pages, kernels and
policies need not know. When a pass would take a sequence past its bound, it is condensed first
(`condense`), to `SequenceBound.low` slots:

    [sinks | condensed | exact, those that were asked for most | recent]

Nothing changes before all that shall be written is known, and ctrl-C comes until then. The pages
of forks are left to them: of those that stay and are shared, a sequence gets its own. Beside the
pages there is a window of queries for each sequence, which forks share until one of the two records
more. While it is condensed, there are besides

- the keys and values of one layer, before and after,
- those of some of its KV heads in float32, and logits, [NUM_QUERIES * query heads of one, slots]
  each: of as many heads as have `_MANY_LOGITS` together, of one at least,
- of every head of every layer an int32 for each slot that stays, and the new rows,
- a second copy of the window of queries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.kv.store import KVStore
from offload.kv_compression.base import Exposed, KVCompression, Record
from offload.kv_compression.bound import SequenceBound
from offload.kv_compression.condense import Condensed, Split, condense
from offload.kv_compression.window import SPACING, QueryWindow
from offload.system.torch_threads import torch_threads

# Tokens are chosen, and condensed keys fitted, for the last queries, in turn as tokens would ask
# them that come later by so many times the bound: measured, beyond what is generated until they are
# fitted again. All queries at all of these are three times the work; with them, and of twice as
# many tokens, KL was 2 to 8 % less in five of six measurements, and perplexity of
# fitted keys the same.
AHEAD = (0.0, 0.5, 1.5)
# Of KV heads at a time; where one has more, another thread is worth waiting for.
_MANY_LOGITS = 2**20


@dataclass
class _Record(Record):
    window: QueryWindow = field(kw_only=True)


class CompressionByAttention(KVCompression[_Record]):
    """Condenses by the attention of a window of queries.

    Args:
        rotary: of the model: (x, position_ids) -> cos, sin.
        sm_scale: of its attention.
        num_threads: that torch uses for long sequences.
        device: that `rotary` is on. The store, and what is condensed, are on the host.

    Attributes:
        condense_heads: what condenses KV heads of a layer.
    """

    observes_queries = True

    def __init__(
        self,
        bound: SequenceBound,
        store: KVStore,
        *,
        num_qo_heads: int,
        rotary: Any,
        sm_scale: float,
        num_threads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(bound, store, self._new_record)
        self._num_threads = num_threads or torch.get_num_threads()
        self.condense_heads = condense
        self._num_qo_heads = num_qo_heads
        self._sm_scale = sm_scale
        self._turns = _rotations(rotary, [round(share * bound.slots) for share in AHEAD], device)

    def fork(self, seq: int, child: int) -> None:
        if seq in self._records:
            record = self._records[seq]
            self._records[child] = replace(record, window=record.window.copy())

    def forget(self, seq: int) -> None:
        if seq in self._records:
            self._records[seq].window.release()
        super().forget(seq)

    @property
    def held_bytes(self) -> int:
        return QueryWindow.held_bytes(record.window for record in self._records.values())

    def bytes_needed(
        self, num_rows: int, seqs: Sequence[int], num_tokens: int = sys.maxsize
    ) -> int:
        own = sum(seq in self._records and self._records[seq].window.is_own for seq in seqs)
        return (num_rows - own) * QueryWindow.bytes_for(**self._window_shape)

    def check_room(self, seqs: Sequence[int]) -> None:
        super().check_room(seqs)
        for seq in seqs:
            self._records[seq].window.make_own()

    def record_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        record = self._records[seq]
        record.window.record(layer_idx, queries, kv_len + record.dropped)

    def wants_queries(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> bool:
        return any(
            (kv_len + self.dropped(seq)) % SPACING == 0
            for seq, kv_len in zip(seqs, kv_lens, strict=True)
        )

    def record_step(self, step: DecodeStep, layer_idx: int | slice, queries: Tensor) -> None:
        heads = queries.view(*queries.shape[:-1], self._num_qo_heads, -1)
        for row, (seq, kv_len) in enumerate(zip(step.seqs, step.kv_lens.tolist(), strict=True)):
            record, num_tokens = self._records[seq], kv_len + self.dropped(seq)
            if num_tokens % SPACING == 0:
                record.window.record(layer_idx, heads[..., row, :, None, :], num_tokens)

    def _condense(self, seq: int, exposed: Exposed) -> None:
        store, record = self._store, self._records[seq]
        split = Split.of(self.bound, store.kv_len(seq), record.condensed)
        queries = self.last_queries(seq)
        row, dtype = store.format.row_items(store.head_dim), store.format.page_dtype
        shape = (2, store.num_kv_heads, split.num_slots, row)
        logits_of_head = split.num_slots * queries[0, :, :, 0].numel() // store.num_kv_heads
        together = max(logits_of_head, min(logits_of_head * store.num_kv_heads, _MANY_LOGITS))
        took_bytes = math.prod(shape) * dtype.itemsize + 4 * together
        self._took_bytes = max(self._took_bytes, took_bytes)
        with exposed(), torch_threads(self._num_threads if logits_of_head > _MANY_LOGITS else 1):
            rows = torch.empty(shape, dtype=dtype)
            layers = []
            for layer_idx in range(store.num_layers):
                store.gather(seq, layer_idx, out=(rows[0], rows[1]), kept=True)
                layers.append(self._condense_layer(rows, queries[layer_idx], split))
        left = torch.empty_like(rows[:, :, : split.num_left])
        store.unshare(seq, split.num_left)
        try:
            for layer_idx, condensed in enumerate(layers):
                store.gather(seq, layer_idx, out=(rows[0], rows[1]), kept=True)
                _place(rows, condensed, split.before_new, left)
                keys, values = left.transpose(1, 2)
                store.append(seq, layer_idx, keys, values, start=0, kept=True)
            store.truncate(seq, split.num_left)
        except BaseException:
            record.is_broken = True  # some layers are condensed, and others are not
            raise
        record.dropped += split.num_slots - split.num_left
        record.condensed = split.stay + split.new
        record.exact_from = split.num_left - split.recent

    def last_queries(self, seq: int) -> Tensor:
        """[num_layers, num_qo_heads, n, head_dim] of the window, of slots `SPACING` apart."""
        record = self._records[seq]
        return record.window.last(self._store.kv_len(seq) + record.dropped)

    def newest_query(self, seq: int) -> tuple[Tensor, int]:
        kv_len = self._store.kv_len(seq)
        after = (kv_len + self.dropped(seq)) % SPACING
        return self.last_queries(seq)[:, :, -1:], kv_len - after

    def _condense_layer(self, rows: Tensor, queries: Tensor, split: Split) -> Condensed:
        """What becomes of the KV heads of `rows` [K|V, num_kv_heads, num_slots, row], as the store
        keeps them, some at a time, with `queries` [num_qo_heads, n, head_dim]. All is computed in
        float32; keys and values of the result are rows again."""
        keys, values = rows
        if queries.shape[1]:
            of_kv_heads = queries.reshape(len(keys), -1, *queries.shape[1:])
        else:  # taken back: the newest keys ask for what is like them
            of_kv_heads = self._numbers(keys[:, -split.recent :])[:, None]
        asked = self._now_or_later(of_kv_heads.float()).flatten(1, 2) * self._sm_scale
        size = max(1, _MANY_LOGITS // (split.num_slots * asked.shape[1]))
        parts = [
            self.condense_heads(self._numbers(k), self._numbers(v), q, split)
            for k, v, q in zip(*(x.split(size) for x in (keys, values, asked)), strict=True)
        ]
        return Condensed(
            torch.cat([x.kept for x in parts]),
            self._storable([x.keys for x in parts]),
            self._storable([x.values for x in parts]),
        )

    def _numbers(self, rows: Tensor) -> Tensor:
        """float32 [.., head_dim] of rows as the store keeps them."""
        numbers = torch.empty(*rows.shape[:-1], self._store.head_dim)
        self._store.format.read(rows, numbers)
        return numbers

    def _storable(self, parts: Sequence[Tensor]) -> Tensor:
        """float32 [heads, n, head_dim] of all heads as rows that the store keeps, within its
        range."""
        of_rows, numbers = self._store.format, torch.cat([*parts])
        numbers = numbers.nan_to_num().clamp(-of_rows.largest, of_rows.largest)
        row = of_rows.row_items(self._store.head_dim)
        rows = torch.empty(*numbers.shape[:-1], row, dtype=of_rows.page_dtype)
        of_rows.write(numbers, rows)
        return rows

    def _now_or_later(self, queries: Tensor) -> Tensor:
        """Rotated queries [..., n, head_dim], of three neighbours one as it is (so the newest), and
        two as later tokens would ask them."""
        turn = torch.arange(queries.shape[-2] - 1, -1, -1) % len(self._turns[0])
        cos, sin = (x[turn] for x in self._turns)
        x, rest = queries[..., : cos.shape[-1]], queries[..., cos.shape[-1] :]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([x * cos + torch.cat([-second, first], -1) * sin, rest], dim=-1)

    @property
    def _window_shape(self) -> dict[str, Any]:
        store = self._store
        shape = {"num_layers": store.num_layers, "head_dim": store.head_dim}
        return {**shape, "num_qo_heads": self._num_qo_heads, "dtype": store.dtype}

    def _new_record(self) -> _Record:
        return _Record(window=QueryWindow(**self._window_shape))


def _rotations(
    rotary: Any, distances: Sequence[int], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cos, sin [n, elements that are rotated], on the CPU, that take a rotated query further; some
    models scale theirs, too."""
    cos, sin = rotary(torch.zeros(1, device=device), torch.tensor([distances], device=device))
    scale = (cos.square() + sin.square()).sqrt()
    return (cos / scale)[0].float().cpu(), (sin / scale)[0].float().cpu()


def _place(rows: Tensor, condensed: Condensed, before_new: int, out: Tensor) -> None:
    """The slots [K|V, num_heads, num_left, row] of heads after they were condensed, from those
    before."""
    stop = before_new + condensed.keys.shape[1]
    for old, new, left in zip(rows, (condensed.keys, condensed.values), out, strict=True):
        left[:, before_new:stop] = new
        for head, kept in enumerate(condensed.kept):
            torch.index_select(old[head], 0, kept[:before_new], out=left[head, :before_new])
            torch.index_select(old[head], 0, kept[before_new:], out=left[head, stop:])
