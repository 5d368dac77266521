"""KV compression by reconstruction (KVzip): what it takes to say the text again stays.

Before a full sequence is condensed, what is new in it is read again, in pieces: the keys and values
of a token that the piece's tokens look up, in any query head of a KV head, when they come a second
time, are those that a later question can need, whether somebody has asked for them yet or not
(KVzip, Kim et al., arXiv 2505.23416). The score of a token is the largest attention weight that it
gets then, among the piece, its second reading, and the sinks; it stays as it is ever after.

KV heads are as unlike as can be: some look up everything, most look at what is near. So the bound
is one for all heads of all layers. The pages of those tokens stay whose scores are the highest
anywhere, beside the sinks and recent tokens of each head, and the store has the heads apart: head
`h` of layer `l` has `starts[l, h]` slots less than the one that has most. The rest is dropped.

Beside the pages there are, for each sequence, a score of every token of every head, and the ids of
tokens that were not read again yet. While it is condensed, there are besides what a prefill of a
piece takes, and the keys and values of one layer, as many rows in each head as the longest has.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from offload.kv.page_pool import Int64Array
from offload.kv.store import HostBudgetError, KVStore
from offload.kv_compression.base import Exposed, KVCompression, Record
from offload.kv_compression.bound import SequenceBound

PIECE = 256  # tokens that are read again at a time
LEAD = 8  # tokens before a piece, which say where the text goes on
SCORE_DTYPE = torch.float16
_UNKNOWN = -1
# A head has at most so many times the mean: the buffers of a layer are for the longest head.
_LONGEST = 16
_ID_BYTES, _TABLE_BYTES = 4, 16  # of a token; of a page
_SINKS = 4  # columns of scores: without them, a head that looks up nothing would look up something

Rows = tuple[Tensor, Tensor]  # keys, values
# Gets (layer_idx, seq, queries [num_qo_heads, n, head_dim], (keys, values) [num_kv_heads, slots
# and then the n tokens', head_dim]).
OnAttended = Callable[[int, int, Tensor, Rows], None]


class Reconstruct(Protocol):
    """A prefill of ids [n] behind a sequence, from `position` on, that leaves it as it was."""

    def __call__(
        self, seq: int, tokens: Tensor, position: int, on_attended: OnAttended
    ) -> None: ...


@dataclass(frozen=True)
class _Scores:
    """Scores of those of a sequence's first `num_tokens` that have slots.

    Attributes:
        of_heads: of each [layer][KV head] float16 [slots]. Never written to: forks have the same.
    """

    num_tokens: int = 0
    of_heads: Sequence[Sequence[Tensor]] = ()

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for of_layer in self.of_heads for x in of_layer)

    def first(self, num_tokens: int) -> _Scores:
        gone = self.num_tokens - num_tokens
        if gone <= 0:
            return self
        return _Scores(num_tokens, [[x[:-gone] for x in of_layer] for of_layer in self.of_heads])

    def then(self, num_tokens: int, of_heads: Sequence[Tensor]) -> _Scores:
        """With those of so many more, [num_kv_heads, num_tokens] of each layer."""
        before = self.of_heads or [[x.new_empty(0) for x in rows] for rows in of_heads]
        pairs = (zip(*of_layer, strict=True) for of_layer in zip(before, of_heads, strict=True))
        joined = [[torch.cat(pair) for pair in of_layer] for of_layer in pairs]
        return _Scores(self.num_tokens + num_tokens, joined)


@dataclass
class _Record(Record):
    """
    Attributes:
        longer: slots of the store beyond those that count against the bound, which are the heads'
            on average.
        ids: of the tokens from `first_id` on; _UNKNOWN where only an embedding was given.
        later: positions of tokens less their numbers.
    """

    longer: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))
    first_id: int = 0
    later: int = 0
    scores: _Scores = _Scores()


class CompressionByReconstruction(KVCompression[_Record]):
    """Condenses by what is looked up when the text is read again.

    Args:
        store: with `per_head_pages`.
        sm_scale: of attention.
        reconstruct: of the model.
    """

    wants_tokens = True

    def __init__(
        self, bound: SequenceBound, store: KVStore, *, sm_scale: float, reconstruct: Reconstruct
    ) -> None:
        super().__init__(bound, store, _Record)
        self._sm_scale = sm_scale
        self._reconstruct = reconstruct

    @staticmethod
    def other_bytes(num_units: int, slots: int, page_tokens: int) -> int:
        """Bytes of scores, ids and page tables of a sequence of so many slots.

        Args:
            num_units: KV heads of all layers.
        """
        of_tables = 2 * _TABLE_BYTES * num_units * slots // page_tokens  # half of them may be spare
        return slots * (num_units * SCORE_DTYPE.itemsize + _ID_BYTES) + of_tables

    def used(self, seq: int) -> int:
        return self._store.kv_len(seq) - (self._records[seq].longer if seq in self._records else 0)

    def fork(self, seq: int, child: int) -> None:
        if seq in self._records:
            record = self._records[seq]
            self._records[child] = replace(record, ids=record.ids[:])

    @property
    def held_bytes(self) -> int:
        return sum(record.scores.num_bytes for record in self._records.values())

    def bytes_needed(
        self, num_rows: int, seqs: Sequence[int], num_tokens: int = sys.maxsize
    ) -> int:
        if num_tokens <= self.bound.slots:
            return 0
        store, own = self._store, [self._records[seq] for seq in seqs if seq in self._records]
        num_units = store.num_layers * store.num_kv_heads
        most = self.bound.slots * num_units * SCORE_DTYPE.itemsize
        return num_rows * most - sum(record.scores.num_bytes for record in own)

    def check_room(self, seqs: Sequence[int]) -> None:
        """Nothing: scores come when a sequence is condensed, and are counted then."""

    def record_tokens(
        self, seq: int, num_tokens: int, ids: Sequence[int] | None, position: int | None
    ) -> None:
        record = self._records[seq]
        seen = self._crop(seq, record)
        record.ids.extend([_UNKNOWN] * num_tokens if ids is None else ids)
        if position is not None:
            record.later = position - seen

    def _crop(self, seq: int, record: _Record) -> int:
        """Forget tokens that were taken back; how many there are."""
        seen = self._store.kv_len(seq) + record.dropped
        del record.ids[seen - record.first_id :]
        record.scores = record.scores.first(seen)
        return seen

    def _condense(self, seq: int, exposed: Exposed) -> None:
        store, record = self._store, self._records[seq]
        seen = self._crop(seq, record)
        if _UNKNOWN in record.ids[max(0, record.scores.num_tokens - LEAD - record.first_id) :]:
            raise ValueError(
                "inputs_embeds with host_bytes_per_sequence: the sequence is full, and its tokens "
                "cannot be read again without their ids; load the model with "
                "condense_by='attention', or raise host_bytes_per_sequence"
            )
        super().check_room([seq])
        kv_len, starts = store.kv_len(seq), store.starts(seq).copy()
        with exposed():
            self._score(seq, record, seen)
            scores = record.scores.of_heads
            lens = self._lens(scores, kv_len - starts)
            kept = [
                [self._kept(of_head, int(n)) for of_head, n in zip(*of_layer, strict=True)]
                for of_layer in zip(scores, lens, strict=True)
            ]
        of_layer = 2 * store.num_kv_heads * kv_len * store.format.row_bytes(store.head_dim)
        self._took_bytes = max(self._took_bytes, 2 * of_layer)

        def rows(layer_idx: int) -> list[Rows]:
            keys, values = store.gather(seq, layer_idx, kept=True)
            slots = [
                chosen + start
                for chosen, start in zip(kept[layer_idx], starts[layer_idx].tolist(), strict=True)
            ]
            return [(keys[h, chosen], values[h, chosen]) for h, chosen in enumerate(slots)]

        try:
            store.rewrite(seq, lens, rows)
        except HostBudgetError:
            raise
        except BaseException:
            record.is_broken = True  # it has no tokens any more
            raise
        left = [
            [of_head[chosen] for of_head, chosen in zip(*of_layer, strict=True)]
            for of_layer in zip(scores, kept, strict=True)
        ]
        record.scores = _Scores(seen, left)
        record.dropped = seen - store.kv_len(seq)
        record.longer = store.kv_len(seq) - self.bound.low
        record.exact_from = store.kv_len(seq) - self.bound.recent
        # Recent tokens may be taken back.
        del record.ids[: max(0, seen - self.bound.recent - LEAD - record.first_id)]
        record.first_id = seen - len(record.ids)

    def _score(self, seq: int, record: _Record, seen: int) -> None:
        """Read again what is new of `seen` tokens, and note which of it was looked up."""
        while record.scores.num_tokens < seen:
            start = record.scores.num_tokens
            stop, lead = min(start + PIECE, seen), min(LEAD, start - record.first_id)
            ids = record.ids[start - lead - record.first_id : stop - record.first_id]
            scorer = _PieceScores(self._store, seq, start - record.dropped, lead, self._sm_scale)
            self._reconstruct(seq, torch.tensor(ids), seen + record.later, scorer)
            record.scores = record.scores.then(stop - start, scorer.found)

    def _lens(self, scores: Sequence[Sequence[Tensor]], lens: Int64Array) -> Int64Array:
        """How many slots each head will have, of `lens` [num_layers, num_kv_heads]: whole pages,
        those whose tokens have the highest scores."""
        page = self._store.page_tokens
        always = -(-(self.bound.sinks + self.bound.recent) // page)
        units = zip((x for of_layer in scores for x in of_layer), lens.flat, strict=True)
        pages, of_unit = [], []
        for unit, (of_head, n) in enumerate(units):
            ranked = self._always_first(of_head).sort(descending=True).values
            values = ranked[page // 2 : n // page * page : page]  # a page's middle speaks for it
            values[:always] = torch.inf
            values[_LONGEST * self.bound.low // page :] = -torch.inf
            pages.append(values)
            of_unit.append(torch.full_like(values, unit, dtype=torch.long))
        num_pages = self.bound.low // page * lens.size
        best = torch.cat(pages).topk(num_pages, sorted=False).indices
        counts = torch.bincount(torch.cat(of_unit)[best], minlength=lens.size)
        found: Int64Array = (counts * page).numpy().reshape(lens.shape)
        return found

    def _kept(self, scores: Tensor, n: int) -> Tensor:
        """Which `n` slots of a head stay, int32, ascending."""
        return self._always_first(scores).topk(n, sorted=False).indices.sort().values.int()

    def _always_first(self, scores: Tensor) -> Tensor:
        """float32, with sinks and recent tokens above all others."""
        ranked = scores.to(torch.float32, copy=True)
        ranked[: self.bound.sinks] = torch.inf
        ranked[len(ranked) - self.bound.recent :] = torch.inf
        return ranked


class _PieceScores:
    """What is looked up of a piece while it is read again.

    Args:
        first: slot of its first token; all of them are in all heads.
        lead: tokens that are read again before it.

    Attributes:
        found: of each layer [num_kv_heads, tokens of the piece], float16.
    """

    def __init__(self, store: KVStore, seq: int, first: int, lead: int, sm_scale: float) -> None:
        self._kv_len, self._starts = store.kv_len(seq), store.starts(seq)
        self._first, self._lead, self._sm_scale = first, lead, sm_scale
        self.found: list[Tensor] = []

    def __call__(self, layer_idx: int, seq: int, queries: Tensor, rows: Rows) -> None:
        keys, kv_len = rows[0], self._kv_len
        num_kv_heads, num_read = len(keys), queries.shape[1]
        length = num_read - self._lead
        piece = keys[:, self._first : self._first + length]
        sinks = keys[:, :0]
        if self._first >= _SINKS:
            starts = self._starts[layer_idx].tolist()
            sinks = torch.stack([keys[h, s : s + _SINKS] for h, s in enumerate(starts)])
        columns = torch.cat([piece, sinks, keys[:, kv_len : kv_len + num_read]], dim=1).float()
        # The token before the piece says what comes first in it.
        asks = max(0, self._lead - 1)
        asked = queries.reshape(num_kv_heads, -1, *queries.shape[1:])[:, :, asks:].float()
        logits = asked.flatten(1, 2) @ columns.mT * self._sm_scale
        logits = logits.view(num_kv_heads, -1, num_read - asks, columns.shape[1])
        is_later = torch.ones(num_read, num_read, dtype=torch.bool).triu(1)[asks:]
        logits[..., -num_read:].masked_fill_(is_later, -math.inf)
        weights = logits.softmax(dim=-1)[..., :length]
        self.found.append(weights.amax(dim=(1, 2)).to(SCORE_DTYPE))
