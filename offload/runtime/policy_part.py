"""The policy's states, as a part of sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from offload.decode.attention import DecodeAttention
from offload.decode.draft_rows import attend_again
from offload.kv.sequence_part import RowToLoad, RowToSave, SequencePart
from offload.selection.remembered import SavedState
from offload.system.errors import SessionMiss


class PolicyPart(SequencePart):
    """What the policy of `attention` remembers of sequences (`PolicyStates`)."""

    def __init__(self, attention: DecodeAttention) -> None:
        self._attention, self._states = attention, attention.states

    @property
    def unsaved_option(self) -> str | None:
        return None if self._attention.top_p_controller is None else "mean_tokens of hard_kv"

    def fork(self, seq: int, child: int) -> None:
        self._states.fork(seq, child)

    def fork_text(self, seq: int, child: int) -> None:
        self._states.fork_text(seq, child)

    def truncate(self, seq: int, kv_len: int) -> Callable[[], None] | None:
        rows = self._states.truncate(seq, kv_len)
        return None if rows is None else partial(attend_again, self._attention, seq, rows)

    def roll_back(self, seq: int, kv_len: int) -> None:
        self._states.roll_back(seq)

    def forget(self, seq: int) -> None:
        self._states.forget(seq)

    def save(self, seq: int, row: RowToSave) -> None:
        saved, records = self._states.save(seq), {}
        row.add("marks", saved.marks)
        for layer_idx, (queries, _) in sorted(saved.queries.items()):
            row.add(f"queries.{layer_idx}", queries)
        for layer_idx, arrays in sorted(saved.layers.items()):
            for name, array in arrays.items():
                if array.dtype.names:
                    records[f"{layer_idx}.{name}"] = array.dtype.descr
                    array = array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
                row.add(f"state.{layer_idx}.{name}", array)
        row.numbers["capacity_tokens"] = saved.capacity_tokens
        row.numbers["num_built"] = saved.num_built
        row.numbers["queries"] = {str(layer): n for layer, (_, n) in saved.queries.items()}
        row.numbers["records"] = records

    def load(self, row: RowToLoad) -> Callable[[int], None]:
        saved, room = self._read(row), self._states.bytes
        room.check_room(saved.num_bytes)

        def put(seq: int) -> None:
            room.check_room(saved.num_bytes)  # which others may have taken meanwhile
            self._states.restore(seq, saved)

        return put

    def _read(self, row: RowToLoad) -> SavedState:
        store, kv_len = self._attention.store, int(row.numbers["kv_len"])
        saved = SavedState(row.read_array("marks"))
        saved.capacity_tokens = int(row.numbers["capacity_tokens"])
        saved.num_built = int(row.numbers.get("num_built", kv_len))  # older files lack it
        if len(saved.marks) > kv_len or saved.marks.dtype != np.uint8:
            raise SessionMiss(f"{len(saved.marks)} marks of {kv_len} tokens")
        for layer, newest in row.numbers["queries"].items():
            name = f"queries.{layer}"
            num_heads, num_kept, _ = row.shape(name)
            head_dim = store.heads_of(int(layer))[1]
            row.check(name, store.dtype, (num_heads, min(num_kept, int(newest)), head_dim))
            saved.queries[int(layer)] = row.read_tensor(name, store.dtype), int(newest)
        for name in row.names("state."):
            _, layer, of_layer = name.split(".", 2)
            array = row.read_array(name)
            record = row.numbers["records"].get(f"{layer}.{of_layer}")
            if record is not None:
                dtype_of = np.dtype([(field, np.dtype(kind)) for field, kind in record])
                array = array.view(dtype_of).reshape(array.shape[:-1])
            saved.layers.setdefault(int(layer), {})[of_layer] = array
        return saved
