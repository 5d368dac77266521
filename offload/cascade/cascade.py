"""The cascade of one model: its sequences never have more slots than their bound allows.

A slot is a position of the KV store. Keys are rotated before they are stored, so that a key may be
in any slot, and the heads of a layer may have different tokens there, as long as they are as many:
pages, kernels and policies need not know. When a pass would take a sequence past its bound, it is
condensed first (`condense`), to `SequenceBound.low` slots:

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

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.cascade.bound import SequenceBound
from offload.cascade.condense import Condensed, Split, condense
from offload.cascade.window import SPACING, QueryWindow
from offload.kv.store import KVStore
from offload.system.errors import HostBudgetError
from offload.system.memory import format_bytes, give_back_free_memory
from offload.system.torch_threads import torch_threads

# Tokens are chosen, and condensed keys fitted, for the last queries, in turn as tokens would ask
# them that come later by so many times the bound: measured, beyond what is generated until they are
# fitted again. All queries at all of these are three times the work; with them, and of twice as
# many tokens, KL was 2 to 8 % less in five of six rows of `perf.papers.cascade`, and perplexity of
# fitted keys the same.
AHEAD = (0.0, 0.5, 1.5)
# Of KV heads at a time; where one has more, another thread is worth waiting for.
_MANY_LOGITS = 2**20
_MUCH_BYTES = 2**20

Exposed = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class SequenceTokens:
    """What became of the tokens of a sequence, in every KV head.

    Attributes:
        seen: by the model.
        kept: that are in the cache as they were.
        condensed: slots that the others have become.
    """

    seen: int
    kept: int
    condensed: int


@dataclass
class _Record:
    """Of a sequence: tokens that have no slot of their own any more, slots that are condensed, and
    from where on slots are tokens one after the other."""

    window: QueryWindow
    dropped: int = 0
    condensed: int = 0
    exact_from: int = 0
    is_broken: bool = False  # writing to its pages failed half way


class Cascade:
    """Keeps the sequences of one store within `bound`.

    Args:
        rotary: of the model: (x, position_ids) -> cos, sin.
        sm_scale: of its attention.
        num_threads: that torch uses for long sequences.
        device: that `rotary` is on. The store, and what is condensed, are on the host.

    Attributes:
        condense_heads: what condenses KV heads of a layer.
    """

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
        self._num_threads = num_threads or torch.get_num_threads()
        self.bound = bound
        self._condensed_tokens, self._seconds, self._took_bytes = 0, 0.0, 0
        self.condense_heads = condense
        self._store = store
        self._num_qo_heads = num_qo_heads
        self._sm_scale = sm_scale
        self._turns = _rotations(rotary, [round(share * bound.slots) for share in AHEAD], device)
        self._records: defaultdict[int, _Record] = defaultdict(self._new_record)

    # What a sequence is.

    def dropped(self, seq: int) -> int:
        """Tokens seen less slots."""
        return self._records[seq].dropped if seq in self._records else 0

    def tokens(self, seq: int) -> SequenceTokens:
        """What became of the tokens of `seq`."""
        slots, condensed = self._store.kv_len(seq), 0
        if seq in self._records:
            condensed = self._records[seq].condensed
        return SequenceTokens(slots + self.dropped(seq), slots - condensed, condensed)

    def take_counts(self) -> tuple[int, float]:
        """Tokens that have lost their slots, and the seconds it took, since this was asked last."""
        counts = self._condensed_tokens, self._seconds
        self._condensed_tokens, self._seconds = 0, 0.0
        return counts

    def check_truncate(self, seq: int, kv_len: int) -> None:
        """Refuse to cut `seq` to `kv_len` slots where these are not its first tokens.

        Raises:
            ValueError: tokens that would be the last are condensed.
        """
        record = self._records.get(seq)
        if record is not None and kv_len < record.exact_from:
            raise ValueError(
                f"cannot crop a sequence of {self._store.kv_len(seq) + record.dropped} tokens to "
                f"{kv_len + record.dropped}: the first {record.exact_from + record.dropped} were "
                "condensed to stay within host_bytes_per_sequence; start a new cache, or raise it"
            )

    def fork(self, seq: int, child: int) -> None:
        """`child` is as `seq` is."""
        if seq in self._records:
            record = self._records[seq]
            self._records[child] = replace(record, window=record.window.copy())

    def forget(self, seq: int) -> None:
        """The sequence is gone."""
        record = self._records.pop(seq, None)
        if record is not None:
            record.window.release()

    # What queries take, within the budget of the store.

    @property
    def held_bytes(self) -> int:
        """Of all windows."""
        return QueryWindow.held_bytes(record.window for record in self._records.values())

    def window_bytes_needed(self, num_rows: int, seqs: Sequence[int]) -> int:
        """That the windows of `num_rows` sequences, among them `seqs`, will take beyond now."""
        own = sum(seq in self._records and self._records[seq].window.is_own for seq in seqs)
        return (num_rows - own) * QueryWindow.bytes_for(**self._window_shape)

    def make_windows(self, seqs: Sequence[int]) -> None:
        """Give each of `seqs` a window of its own.

        Raises:
            HostBudgetError: they do not fit; nothing has changed then.
        """
        need = self.window_bytes_needed(len(seqs), seqs)
        if not need:
            return
        if need > self._store.left_bytes():
            self._store.trim()
        left = self._store.left_bytes()
        if need > left:
            raise HostBudgetError(
                f"the queries that are kept of sequences with host_bytes_per_sequence need "
                f"{format_bytes(need)} more, but {format_bytes(max(0, left))} of the host budget "
                f"of {format_bytes(self._store.host_budget_bytes)} are left; raise "
                "max_memory={'cpu': ...} or lower the batch size"
            )
        for seq in seqs:
            self._records[seq].window.make_own()

    # What it was asked for.

    def record_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        """Queries [num_qo_heads, n, head_dim] of one layer, of the last n of `kv_len` slots."""
        record = self._records[seq]
        record.window.record(layer_idx, queries, kv_len + record.dropped)

    def wants_queries(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> bool:
        """Whether `record_step` would keep any, of rows of one token each."""
        return any(
            (kv_len + self.dropped(seq)) % SPACING == 0
            for seq, kv_len in zip(seqs, kv_lens, strict=True)
        )

    def record_step(self, step: DecodeStep, layer_idx: int | slice, queries: Tensor) -> None:
        """Queries [(layers,) n, num_qo_heads * head_dim] of the rows of a step."""
        heads = queries.view(*queries.shape[:-1], self._num_qo_heads, -1)
        for row, (seq, kv_len) in enumerate(zip(step.seqs, step.kv_lens.tolist(), strict=True)):
            record, num_tokens = self._records[seq], kv_len + self.dropped(seq)
            if num_tokens % SPACING == 0:
                record.window.record(layer_idx, heads[..., row, :, None, :], num_tokens)

    # Making room.

    def check_usable(self, seq: int) -> None:
        """Refuse a sequence of which only some layers are condensed.

        Raises:
            RuntimeError: an error came while it was written to.
        """
        if seq in self._records and self._records[seq].is_broken:
            raise RuntimeError(
                "an error came while the tokens of this cache were condensed to stay within "
                "host_bytes_per_sequence, and its layers no longer have the same; start a new cache"
            )

    def needs_room(self, seq: int, num_new: int) -> bool:
        """Whether `num_new` more tokens would exceed the bound."""
        return num_new > 0 and self._store.kv_len(seq) + num_new > self.bound.slots

    def room(self, seq: int, num_new: int) -> int:
        """How many of `num_new` tokens can come next, after condensing if that is worth it."""
        free = self.bound.slots - self._store.kv_len(seq)
        return max(free, self.bound.freed) if num_new > free else num_new

    def condense(self, seq: int, exposed: Exposed = contextlib.nullcontext) -> None:
        """Bring `seq` down to `bound.low` slots.

        Args:
            exposed: of the `shielded` part that the caller is in: around what only computes.

        Raises:
            HostBudgetError: forks have its pages, and there is no room for others; nothing has
                changed then.
        """
        start, num_slots = time.perf_counter(), self._store.kv_len(seq)
        self._condense(seq, exposed)
        self._condensed_tokens += num_slots - self._store.kv_len(seq)
        self._seconds += time.perf_counter() - start

    def give_back_memory(self) -> None:
        """What condensing took since the last time goes back to the system, where it was much: the
        allocator keeps it otherwise, beside the bound. All of the heap is walked for it."""
        took_bytes, self._took_bytes = self._took_bytes, 0
        if took_bytes > _MUCH_BYTES:
            start = time.perf_counter()
            give_back_free_memory()
            self._seconds += time.perf_counter() - start

    def _condense(self, seq: int, exposed: Exposed) -> None:
        store, record = self._store, self._records[seq]
        split = Split.of(self.bound, store.kv_len(seq), record.condensed)
        queries = self.last_queries(seq)
        shape = (2, store.num_kv_heads, split.num_slots, store.head_dim)
        logits_of_head = split.num_slots * queries[0, :, :, 0].numel() // store.num_kv_heads
        together = max(logits_of_head, min(logits_of_head * store.num_kv_heads, _MANY_LOGITS))
        took_bytes = math.prod(shape) * store.dtype.itemsize + 4 * together
        self._took_bytes = max(self._took_bytes, took_bytes)
        with exposed(), torch_threads(self._num_threads if logits_of_head > _MANY_LOGITS else 1):
            rows = torch.empty(shape, dtype=store.dtype)
            layers = []
            for layer_idx in range(store.num_layers):
                store.gather(seq, layer_idx, out=(rows[0], rows[1]))
                layers.append(self._condense_layer(rows, queries[layer_idx], split))
        left = torch.empty_like(rows[:, :, : split.num_left])
        store.unshare(seq, split.num_left)
        try:
            for layer_idx, condensed in enumerate(layers):
                store.gather(seq, layer_idx, out=(rows[0], rows[1]))
                _place(rows, condensed, split.before_new, left)
                keys, values = left.transpose(1, 2)
                store.append(seq, layer_idx, keys, values, start=0)
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
        """The last of `last_queries`, n = 1, if there is any, and of how many slots it is."""
        kv_len = self._store.kv_len(seq)
        after = (kv_len + self.dropped(seq)) % SPACING
        return self.last_queries(seq)[:, :, -1:], kv_len - after

    def _condense_layer(self, rows: Tensor, queries: Tensor, split: Split) -> Condensed:
        """What becomes of the KV heads of `rows` [K|V, num_kv_heads, num_slots, head_dim], some at
        a time, with `queries` [num_qo_heads, n, head_dim]."""
        keys, values = rows
        if queries.shape[1]:
            of_kv_heads = queries.reshape(len(keys), -1, *queries.shape[1:])
        else:  # taken back: the newest keys ask for what is like them
            of_kv_heads = keys[:, None, -split.recent :]
        asked = self._now_or_later(of_kv_heads.float()).flatten(1, 2) * self._sm_scale
        size = max(1, _MANY_LOGITS // (split.num_slots * asked.shape[1]))
        parts = [
            self.condense_heads(k.float(), v.float(), q, split)
            for k, v, q in zip(*(x.split(size) for x in (keys, values, asked)), strict=True)
        ]
        return _storable(parts, self._store.dtype)

    def _now_or_later(self, queries: Tensor) -> Tensor:
        """Rotated queries [..., n, head_dim], of three neighbours one as it is (so the newest), and
        two as later tokens would ask them."""
        half = queries.shape[-1] // 2
        turned = torch.cat([-queries[..., half:], queries[..., :half]], dim=-1)
        turn = torch.arange(queries.shape[-2] - 1, -1, -1) % len(self._turns[0])
        cos, sin = (x[turn] for x in self._turns)
        return queries * cos + turned * sin

    @property
    def _window_shape(self) -> dict[str, Any]:
        store = self._store
        shape = {"num_layers": store.num_layers, "head_dim": store.head_dim}
        return {**shape, "num_qo_heads": self._num_qo_heads, "dtype": store.dtype}

    def _new_record(self) -> _Record:
        return _Record(QueryWindow(**self._window_shape))


def _rotations(
    rotary: Any, distances: Sequence[int], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cos, sin [n, head_dim], on the CPU, that take a rotated query further; some models scale
    theirs, too."""
    cos, sin = rotary(torch.zeros(1, device=device), torch.tensor([distances], device=device))
    scale = (cos.square() + sin.square()).sqrt()
    return (cos / scale)[0].float().cpu(), (sin / scale)[0].float().cpu()


def _storable(parts: Sequence[Condensed], dtype: torch.dtype) -> Condensed:
    """All heads, in the store's dtype, within its range."""
    most = torch.finfo(dtype).max
    keys, values = (
        torch.cat(rows).nan_to_num().clamp(-most, most).to(dtype)
        for rows in ([x.keys for x in parts], [x.values for x in parts])
    )
    return Condensed(torch.cat([x.kept for x in parts]), keys, values)


def _place(rows: Tensor, condensed: Condensed, before_new: int, out: Tensor) -> None:
    """The slots [K|V, num_heads, num_left, head_dim] of heads after they were condensed, from those
    before."""
    stop = before_new + condensed.keys.shape[1]
    for old, new, left in zip(rows, (condensed.keys, condensed.values), out, strict=True):
        left[:, before_new:stop] = new
        for head, kept in enumerate(condensed.kept):
            torch.index_select(old[head], 0, kept[:before_new], out=left[head, :before_new])
            torch.index_select(old[head], 0, kept[before_new:], out=left[head, stop:])
