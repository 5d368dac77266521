"""Cache correction: what was decoded sparsely is read again with exact attention.

The keys and values of a token that was decoded sparsely are not those of full attention, and what
comes later attends to them. So every `cache_correction_every` such tokens they are written anew, in
all layers. Source: TidalDecode (Yang et al., ICLR 2025), LycheeDecode (arXiv 2602.04541).

They are written in a copy of the sequence that shares the pages before them, and whose pages take
the place of the old when all are there; one that fails leaves the sequence as it was. Tokens that
wait for it lie one after the other at a sequence's end: a prompt that follows them reads them
before its own, in a copy that takes the place of the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.decode.decoder import Decoder
from offload.kv.sequence_part import RowToLoad, RowToSave, SequencePart
from offload.kv.store import KVStore
from offload.models import ModelShape
from offload.models.batch import RaggedBatch
from offload.prefill.memory import PrefillMemory, available_bytes, check_fits
from offload.runtime.model_loading import LoadedModel
from offload.system.errors import DeviceMemoryError, SessionMiss
from offload.system.interrupts import shielded


@dataclass
class SparseTokens:
    """Tokens of a sequence that were decoded sparsely since its last correction.

    Attributes:
        first: where in the sequence they begin.
    """

    first: int = 0
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def part(self, start: int = 0, stop: int | None = None) -> SparseTokens:
        """A copy of those from number `start` up to `stop`, which are not changed any more."""
        ids, positions = self.ids[start:stop], self.positions[start:stop]
        return SparseTokens(self.first + start, ids, positions)

    def truncate(self, kv_len: int) -> None:
        """Forget those from token `kv_len` of the sequence on."""
        num_left = max(0, kv_len - self.first)
        del self.ids[num_left:], self.positions[num_left:]


@dataclass(frozen=True)
class Correction:
    """A prompt, some sequences of which are read from where they were decoded sparsely.

    Attributes:
        batch: with the tokens that are read again before a sequence's new ones.
        ids: int64, of these.
        is_new: bool [num_tokens], which of `batch` are not.
        firsts: of each such sequence of the batch the tokens that stay.
    """

    batch: RaggedBatch
    ids: Tensor
    is_new: Tensor
    firsts: dict[int, int]

    def embedded(self, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """[num_tokens, hidden_size], of `hidden` of the new tokens."""
        both = hidden.new_empty(self.batch.num_tokens, hidden.shape[1])
        both[self.is_new] = hidden
        both[~self.is_new] = embed(self.ids.to(hidden.device))
        return both


@dataclass(eq=False)
class RunningCorrection:
    """Tokens that are read again into copies of their sequences, whose pages then take the place of
    the old.

    Attributes:
        tokens: of each sequence, as they waited when it began.
        copies: the sequence that each is read into, which shares the pages of the tokens before;
            empty until something is read.
        num_read: tokens of each that are in its copy already.
    """

    tokens: dict[int, SparseTokens]
    copies: dict[int, int] = field(default_factory=dict)
    num_read: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(tokens.ids) for tokens in self.tokens.values())

    @property
    def num_left(self) -> int:
        """Of one sequence, tokens that have to be read."""
        return self.num_tokens - self.num_read


@dataclass(eq=False, kw_only=True)
class BackgroundCorrection(RunningCorrection):
    """One that is read layer by layer, while its sequences are decoded or before they are.

    Attributes:
        layers: `prefill_by_layer` of all tokens.
        steps_left: times that it has to go on.
        is_beside: it may do so beside steps; else the next step waits for it.
        error: that came beside a step.
    """

    layers: Generator[None, None, Tensor]
    steps_left: int
    is_beside: bool
    error: Exception | None = None

    def go_on(self) -> None:
        """One more layer, beside a step: an error is not the step's."""
        try:
            next(self.layers)
        except Exception as error:
            self.error = error.with_traceback(None)  # which keeps what it has on the GPU
        self.steps_left -= 1

    def finish(self) -> None:
        """Wait for the last.

        Raises:
            DeviceMemoryError, ValueError: it cannot be finished.
        """
        if self.error is None:
            try:
                next(self.layers)
            except StopIteration:
                return
        assert self.error is not None
        raise self.error


class Background(SequencePart):
    """The correction that goes on in the background, if any.

    It is given up when one of its sequences loses tokens that it reads.

    Args:
        free: gives back its copies.

    Attributes:
        running: None: there is none.
    """

    def __init__(self, free: Callable[[Iterable[int]], None]) -> None:
        self._free = free
        self.running: BackgroundCorrection | None = None

    def give_up(self) -> bool:
        """What it has not read waits on; whether there was one."""
        with shielded():
            running, self.running = self.running, None
            if running is not None:
                running.layers.close()
                self._free(running.copies.values())
        return running is not None

    def truncate(self, seq: int, kv_len: int) -> None:
        if self.running is not None and seq in self.running.tokens:
            tokens = self.running.tokens[seq]
            if kv_len < tokens.first + len(tokens.ids):
                self.give_up()

    def roll_back(self, seq: int, kv_len: int) -> None:
        """Ctrl-C may have come in what goes on beside the pass."""
        self.truncate(seq, 0)

    def forget(self, seq: int) -> None:
        self.truncate(seq, 0)


def corrections_for(opened: LoadedModel, store: KVStore, decoder: Decoder) -> Corrections | None:
    """None where nothing is corrected."""
    config, device, room = opened.config, opened.device, None
    every = config.cache_correction_every
    if every is None:
        return None
    if device.type == "cuda":
        room = functools.partial(
            _check_room,
            opened.lean.shape,
            decoder,
            item_bytes=store.dtype.itemsize,
            slice_tokens=config.prefill_slice_tokens,
            page_tokens=store.page_tokens,
            device=device,
            budget_bytes=config.max_memory.get(device.index or 0),
        )
    return Corrections(every, store, config.policy.dense_tokens, room)


def _check_room(
    shape: ModelShape,
    decoder: Decoder,
    num_tokens: int,
    past_tokens: int,
    *,
    device: torch.device,
    budget_bytes: int | None,
    **sizes: int,
) -> None:
    """Refuse what `num_tokens` that are read again behind `past_tokens` take of a GPU, where what
    the decoder has of sequences makes room.
    """
    memory = PrefillMemory.of(
        shape, num_tokens=num_tokens, past_tokens=past_tokens, builds_index=False, **sizes
    )
    check_fits(memory, available_bytes(device, budget_bytes) + decoder.device_bytes)


class Corrections(SequencePart):
    """Which tokens of the sequences of one store wait to be read again.

    Args:
        every: so many tokens of a sequence at most.
        dense_tokens: sequences of at most so many are decoded exactly.
        check_room: refuses a pass of so many tokens behind others that a device has no room for;
            None: there is no device.

    Attributes:
        in_background: steps that choose their own tokens go on while others are read again.
    """

    def __init__(
        self,
        every: int,
        store: KVStore,
        dense_tokens: int,
        check_room: Callable[[int, int], None] | None = None,
    ) -> None:
        self.every, self._check_room = every, check_room
        self.in_background = check_room is not None
        self._store, self._dense_tokens = store, dense_tokens
        self._waiting: dict[int, SparseTokens] = {}

    def pages(self, num_rows: int, max_tokens: int) -> int:
        """Pages at most that `num_rows` sequences of at most `max_tokens` have twice, while they
        are corrected."""
        most = min(self._most_waiting, max_tokens - self._dense_tokens)
        store = self._store
        return 0 if most < 1 else num_rows * store.num_page_rows * (most // store.page_tokens + 2)

    def check_device(self, num_rows: int, max_tokens: int) -> None:
        """Refuse `num_rows` sequences of `max_tokens` that a device could not correct at the end.

        Raises:
            DeviceMemoryError: names the sizes and the options.
        """
        num_sparse = max_tokens - self._dense_tokens
        if self._check_room is None or num_sparse <= self.every:
            return
        again = min(self._most_waiting, num_sparse)
        try:
            self._check_room(num_rows * again, num_rows * (max_tokens - again))
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"cache_correction_every={self.every} reads {again} tokens of {num_rows} sequences "
                f"of up to {max_tokens} again, for which {error}; or lower max_new_tokens, lower "
                "cache_correction_every, or leave it out"
            ) from None

    @property
    def steps_beside(self) -> int:
        """Beside which one in the background goes on: cached tokens come in beside the first."""
        return 1 + self._store.num_layers

    @property
    def _most_waiting(self) -> int:
        """Tokens at most that one pass reads again.

        Some may be due when others have just begun in the background. So many steps later they
        begin, and it may turn out at their end that there is no room for it.
        """
        return self.every + (2 * self.steps_beside if self.in_background else 0)

    def may_wait(self, tokens: SparseTokens) -> bool:
        """Whether `tokens` that are due are no more than where others' correction ends first. Else
        they would become ever more."""
        return len(tokens.ids) <= self.every + self.steps_beside

    def fork(self, seq: int, child: int) -> None:
        if seq in self._waiting:
            self._waiting[child] = self._waiting[seq].part()

    def forget(self, seq: int) -> None:
        self._waiting.pop(seq, None)

    def save(self, seq: int, row: RowToSave) -> None:
        waiting = self.waiting(seq)
        row.numbers["sparse"] = {"ids": waiting.ids, "positions": waiting.positions}

    def load(self, row: RowToLoad) -> Callable[[int], None]:
        sparse, kv_len = (
            row.numbers.get("sparse", {"ids": [], "positions": []}),
            row.numbers["kv_len"],
        )
        ids, positions = [*map(int, sparse["ids"])], [*map(int, sparse["positions"])]
        first = int(kv_len) - len(ids)
        if first < 0 or len(ids) != len(positions):
            raise SessionMiss(
                f"{len(ids)} tokens with {len(positions)} positions wait for a correction, of "
                f"{kv_len}"
            )
        return lambda seq: self._waiting.update({seq: SparseTokens(first, ids, positions)})

    def waiting(self, seq: int) -> SparseTokens:
        """Those of `seq`, without what was taken back."""
        known = self._waiting.setdefault(seq, SparseTokens())
        known.truncate(self._store.kv_len(seq))
        return known

    def note_corrected(self, seq: int, num_tokens: int) -> None:
        """The first `num_tokens` of those that waited were read again."""
        known = self._waiting[seq]
        known.first += num_tokens
        del known.ids[:num_tokens], known.positions[:num_tokens]

    def are_due(self, seqs: Sequence[int]) -> bool:
        """Whether one of them is corrected before its next token."""
        return any(len(self.waiting(seq).ids) >= self.every for seq in seqs)

    def steps_left(self, seqs: Sequence[int]) -> int:
        """Steps of `seqs` until some of them are corrected; 1 where they are before the next."""
        return max(1, self.every - max(len(self.waiting(seq).ids) for seq in seqs))

    def note(
        self,
        batch: RaggedBatch,
        seqs: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        exact: Container[int] = (),
    ) -> None:
        """Tokens [num_tokens] that are decoded next, but for those of the sequences `exact`."""
        for sequence, start, stop in batch.spans():
            seq = seqs[sequence]
            if seq in exact:
                continue
            known = self.waiting(seq)
            kv_len = self._store.kv_len(seq)
            begin = start + max(0, self._dense_tokens - kv_len)
            if not known.ids:
                known.first = kv_len + begin - start
            known.ids += tokens[begin:stop].tolist()
            known.positions += positions[begin:stop].tolist()

    def behind(self, seqs: Sequence[int], batch: RaggedBatch) -> Correction | None:
        """What the prompts of `batch` are read behind, if anything."""
        again = {
            sequence: known
            for sequence, (seq, num_new) in enumerate(zip(seqs, batch.num_new_tokens, strict=False))
            if num_new and (known := self.waiting(seq)).ids
        }
        return _correction(batch, again) if again else None


def _correction(batch: RaggedBatch, again: Mapping[int, SparseTokens]) -> Correction:
    ids: list[int] = []
    indptr, is_new, columns, positions = [0], [], [], []
    for sequence in range(batch.num_sequences):
        first, last = batch.indptr[sequence : sequence + 2]
        known = again.get(sequence, SparseTokens())
        num_again = len(known.ids)
        ids += known.ids
        is_new += [False] * num_again + [True] * (last - first)
        # They are in the column of the first new one: it is new, too.
        columns += [batch.columns[first : first + 1].expand(num_again), batch.columns[first:last]]
        positions += [torch.tensor(known.positions).long(), batch.position_ids[first:last]]
        indptr.append(indptr[-1] + num_again + last - first)
    whole = RaggedBatch(
        indptr=indptr,
        columns=torch.cat(columns),
        position_ids=torch.cat(positions),
        sequence_of_row=batch.sequence_of_row,
        rows_shape=batch.rows_shape,
    )
    firsts = {sequence: known.first for sequence, known in again.items()}
    return Correction(whole, torch.tensor(ids), torch.tensor(is_new), firsts)
