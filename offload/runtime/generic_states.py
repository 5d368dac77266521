"""What layers outside of the store keep of each sequence of an engine: windows, recurrent states.

A sequence that has passes is a row of the `GenericCache` of its last pass; any other has a copy,
a `RowState`, which forks share. States cannot be shortened: a sequence is cut only where it was
marked, or where it ends.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from offload.decode.gpu.decoder import DeviceDecoder
from offload.kv.sequence_part import RowToLoad, RowToSave, SequencePart
from offload.kv.store import KVStore
from offload.runtime.generic_cache import GenericCache, LayerStates, RowState
from offload.runtime.modules_device import LEAST_SLICE
from offload.system.errors import HostBudgetError, SessionMiss

_MOST_MARKS = 4  # of a sequence: the first, and the latest


class SequenceStates(SequencePart):
    """The states of sequences of one store, and the `Decoder` of which an engine asks nothing else.

    Args:
        layers: sizes of them, and who has some.
        steps: what decodes on the modules' device; None: the modules do.
    """

    samples = False

    def __init__(
        self, store: KVStore, layers: LayerStates, steps: DeviceDecoder | None = None
    ) -> None:
        self._store, self._layers, self._steps = store, layers, steps
        self._rows: dict[int, RowState | tuple[GenericCache, int]] = {}
        self._marks: dict[int, tuple[RowState, ...]] = {}

    def begin_generation(
        self, num_sequences: int, kv_len: int, read_tokens: int | None = None
    ) -> None:
        """As of `Decoder`."""
        if self._steps is not None:
            self._steps.begin_generation(num_sequences, kv_len, read_tokens)

    def most_together(self, most: int, kv_len: int, read_tokens: int | None = None) -> int:
        """As of `Decoder`."""
        return most if self._steps is None else self._steps.most_together(most, kv_len, read_tokens)

    def end_generation(self) -> None:
        """As of `Decoder`."""
        if self._steps is not None:
            self._steps.end_generation()

    def begin_prompt(self, seqs: Sequence[int]) -> None:
        """The stock modules read more of these."""
        if self._steps is not None:
            self._steps.trim()
            for seq in seqs:
                self._steps.rebase(seq, self._store.kv_len(seq), seq)

    @property
    def is_cut_at_marks(self) -> bool:
        return bool(self._layers.shapes)

    def bytes_at(self, kv_len: int) -> int:
        return self._layers.host_bytes_at(kv_len)

    def device_bytes_at(self, kv_len: int) -> int:
        return 0 if self._layers.modules is None else self._layers.at(kv_len)

    def device_left_bytes(self) -> int:
        """Beside a pass of few tokens."""
        modules = self._layers.modules
        if modules is None:
            return sys.maxsize
        return modules.left_bytes() - modules.bytes.need(1, LEAST_SLICE, LEAST_SLICE, 0)

    def kept_bytes(self, seq: int) -> int:
        if self._layers.modules is not None:
            return 0
        place, marks = self._rows.get(seq), {*self._marks.get(seq, ())}
        if isinstance(place, RowState):
            marks.add(place)
        is_row = isinstance(place, tuple)
        of_row = self._layers.at(self._store.kv_len(seq)) if is_row else 0
        return of_row + sum(state.num_bytes for state in marks)

    @property
    def device_bytes(self) -> int:
        """Of states on the device of the model's modules, and of keys and values there."""
        modules = self._layers.modules
        of_steps = 0 if self._steps is None else self._steps.device_bytes
        return of_steps + (0 if modules is None else modules.device_bytes)

    def cache_of(
        self, seqs: Sequence[int], new_cache: Callable[[Sequence[int]], GenericCache]
    ) -> GenericCache:
        """A cache whose rows are these sequences, for their next pass.

        Raises:
            HostBudgetError, DeviceMemoryError: there is no room to put them together; all are as
                they were.
            RuntimeError: a pass of one has failed before.
        """
        found = [self._rows.get(seq) for seq in seqs]
        caches = {id(x[0]): x[0] for x in found if isinstance(x, tuple)}
        for cache in caches.values():
            if found == [(cache, row) for row in range(len(cache.seqs))]:
                return cache
        states = [self.current(seq) for seq in seqs]
        cache = new_cache(seqs)
        cache.take_rows(states)
        self._rows |= {seq: (cache, row) for row, seq in enumerate(seqs)}
        for seq, place in self._rows.items():  # rows that stay behind keep no others alive
            if isinstance(place, tuple) and id(place[0]) in caches:
                self._rows[seq] = place[0].row_state(place[1])
        return cache

    def current(self, seq: int) -> RowState:
        """The state of a sequence.

        Raises:
            RuntimeError: it is lost.
        """
        kv_len, place = self._store.kv_len(seq), self._rows.get(seq)
        marked = self._marked(seq, kv_len)
        if marked is not None:
            return marked
        if isinstance(place, RowState):
            return place
        if place is None:
            raise RuntimeError(
                "a forward pass of this sequence has failed in its middle, and the states of its "
                "windows and recurrent layers are lost; read it again"
            )
        return place[0].row_state(place[1])

    @contextlib.contextmanager
    def lent(self, cache: GenericCache) -> Iterator[None]:
        """Inside, sequences are the rows of a cache of `generate()`."""
        rows = {seq: (cache, row) for row, seq in enumerate(cache.seqs)}
        self._rows |= rows
        try:
            yield
        finally:
            for seq in rows:
                del self._rows[seq]

    def taken(self, seq: int) -> RowState:
        """What was loaded of a sequence, which a cache has from now on."""
        state = self.current(seq)
        del self._rows[seq]
        self._marks.pop(seq, None)
        return state

    def _marked(self, seq: int, kv_len: int) -> RowState | None:
        if kv_len == 0 or not self.is_cut_at_marks:
            return RowState(kv_len, {})
        return next((x for x in self._marks.get(seq, ()) if x.kv_len == kv_len), None)

    @contextlib.contextmanager
    def kept(self, seqs: Sequence[int]) -> Iterator[None]:
        """Inside, sequences can go back to where they are."""
        before = {seq: self._marks.get(seq, ()) for seq in seqs}
        try:
            for seq in seqs:
                self._marks[seq] = *before[seq], self._copy(seq)
            yield
        finally:
            self._marks |= before

    def mark(self, seq: int) -> None:
        if not self.is_cut_at_marks or self._marked(seq, self._store.kv_len(seq)) is not None:
            return
        if self._layers.at(self._store.kv_len(seq)) > self._layers.left_bytes(self._store):
            return  # what is cut there later is read again
        marks = *self._marks.get(seq, ()), self.current(seq)
        first = [] if len(marks) <= _MOST_MARKS else [marks[0]]
        self._marks[seq] = *first, *marks[-_MOST_MARKS + len(first) :]

    def longest_cut(self, seq: int, kv_len: int) -> int:
        is_whole = seq in self._rows and kv_len == self._store.kv_len(seq)
        if is_whole or not self.is_cut_at_marks:
            return kv_len
        lens = [x.kv_len for x in self._marks.get(seq, ()) if x.kv_len <= kv_len]
        return max(lens, default=0)

    def _copy(self, seq: int) -> RowState:
        """`current`, if there is room."""
        kv_len = self._store.kv_len(seq)
        if isinstance(self._rows.get(seq), tuple) and self._marked(seq, kv_len) is None:
            what, need = "a copy of windows and recurrent states", self._layers.at(kv_len)
            if self._layers.modules is not None:
                self._layers.modules.check(1, 1, kv_len, need)
            else:
                self._store.check_room(need, what, "serve fewer requests at a time")
        return self.current(seq)

    def fork(self, seq: int, child: int) -> None:
        if seq in self._rows:  # else nothing was read, or its state is lost
            self._rows[child] = self._copy(seq)
        self._marks[child] = self._marks.get(seq, ())

    fork_text = fork

    def truncate(self, seq: int, kv_len: int) -> None:
        if kv_len == self._store.kv_len(seq):
            return
        state = self._marked(seq, kv_len)
        if seq not in self._rows and seq not in self._marks:
            return  # of a cache of `generate()`, which has them
        if state is None:
            raise ValueError(
                f"a sequence of {self._store.kv_len(seq)} tokens cannot be cut to {kv_len}, where "
                "it has no windows and recurrent states, but to "
                f"{self.longest_cut(seq, kv_len)}"
            )
        if self._steps is not None:
            self._steps.truncate(seq, kv_len)
        self._rows[seq] = state
        marks = self._marks.get(seq, ())
        self._marks[seq] = tuple(mark for mark in marks if mark.kv_len <= kv_len)

    def roll_back(self, seq: int, kv_len: int) -> None:
        if self._steps is not None:
            self._steps.roll_back(seq, kv_len)
        place = self._rows.get(seq)
        if isinstance(place, tuple) and place[0].has_failed:
            del self._rows[seq]
            state = self._marked(seq, kv_len)
            if state is not None:
                self._rows[seq] = state

    def forget(self, seq: int) -> None:
        if self._steps is not None:
            self._steps.forget(seq)
        self._rows.pop(seq, None)
        self._marks.pop(seq, None)

    def save(self, seq: int, row: RowToSave) -> None:
        states = self.current(seq), *self._marks.get(seq, ())
        row.numbers["marks"] = [state.kv_len for state in states]
        for number, state in enumerate(states):
            for name, tensor in state.tensors.items():
                row.add(f"layers.{number}.{name}", tensor.cpu())

    def load(self, row: RowToLoad) -> Callable[[int], None]:
        lens = [int(n) for n in row.numbers["marks"]]
        if lens[0] != int(row.numbers["kv_len"]) or not all(0 <= n <= lens[0] for n in lens):
            raise SessionMiss(f"states of {lens} tokens are of another sequence")
        need = sum(map(self._layers.at, lens))
        if need > self._layers.left_bytes(self._store):
            raise HostBudgetError("no room for windows and recurrent states")
        states = [
            RowState(n, self._tensors(row, f"layers.{number}", n)) for number, n in enumerate(lens)
        ]
        self._layers.rows.update(states)
        return partial(self._give, states)

    def _tensors(self, row: RowToLoad, prefix: str, kv_len: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in self._layers.shapes.items() if kv_len else ():
            if name.endswith((".keys", ".values")):
                shape = *shape[:2], min(shape[2], kv_len), *shape[3:]
            row.check(f"{prefix}.{name}", dtype, shape)
            tensor, modules = row.read_tensor(f"{prefix}.{name}", dtype), self._layers.modules
            tensors[name] = tensor if modules is None else tensor.to(modules.device)
        return tensors

    def _give(self, states: Sequence[RowState], seq: int) -> None:
        self._rows[seq], *marks = states
        self._marks[seq] = tuple(marks)
