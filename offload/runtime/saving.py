"""Sequences into a file, and back: keys and values, and what the policy keeps of them.

A file has, for each row `r`:

    r.tokens                int64 [n], where they are known
    r.kv.LAYER              the store's dtype [K|V, num_kv_heads, kv_len, head_dim]
    r.marks                 uint8, of the text
    r.queries.LAYER         the store's dtype [num_qo_heads, n, head_dim], the recent ones
    r.state.LAYER.NAME      arrays of the policy; of records their bytes

and in its metadata the format, the fingerprint and the numbers that these need, tokens that wait
for a correction among them.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.kv.store import KVStore
from offload.runtime.correcting import SparseTokens
from offload.runtime.sequences import Sequences
from offload.selection.remembered import SavedState
from offload.system.checked_file import (
    Bytes,
    CheckedFile,
    CheckedReader,
    Entry,
    bytes_of,
    finish,
)
from offload.system.errors import HostBudgetError, SessionMiss
from offload.system.torch_threads import torch_threads

FORMAT = "offload-session-1"

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SavedRow:
    """A sequence that was read from a file.

    Attributes:
        tokens: None: they were not known.
    """

    seq: int
    tokens: Int64s | None


def file_of(
    sequences: Sequences,
    seqs: Sequence[int],
    tokens: Sequence[Sequence[int]] | None = None,
    attended: torch.Tensor | None = None,
    fingerprint: dict[str, str] | None = None,
) -> CheckedFile:
    """The file of some sequences, which stay as they are until it is written.

    Args:
        tokens: ids of each.
        attended: bool [rows, columns], kept with them.
        fingerprint: if it was made before.

    Raises:
        NotImplementedError: a model whose options are of one generation at a time.
    """
    sequences.check_saves()
    rows, entries = list[dict[str, Any]](), list[Entry]()
    for row, seq in enumerate(seqs):
        saved, waiting = sequences.states.save(seq), SparseTokens()
        if sequences.corrections is not None:
            waiting = sequences.corrections.waiting(seq)
        rows.append(
            {
                "kv_len": sequences.store.kv_len(seq),
                "capacity_tokens": saved.capacity_tokens,
                "queries": {str(layer): kv_len for layer, (_, kv_len) in saved.queries.items()},
                "records": {
                    f"{layer}.{name}": array.dtype.descr
                    for layer, arrays in saved.layers.items()
                    for name, array in arrays.items()
                    if array.dtype.names
                },
                "sparse": {"ids": waiting.ids, "positions": waiting.positions},
            }
        )
        if tokens is not None:
            entries.append(Entry.of(f"{row}.tokens", np.asarray(tokens[row], np.int64)))
        entries += _entries(sequences.store, row, seq, saved)
    if attended is not None:
        entries.append(Entry.of("attended", attended.to(torch.uint8).numpy()))
    metadata = {
        "format": FORMAT,
        "fingerprint": json.dumps(fingerprint or sequences.fingerprint(), sort_keys=True),
        "rows": json.dumps(rows),
    }
    return CheckedFile(metadata, entries)


def _entries(store: KVStore, row: int, seq: int, saved: SavedState) -> Iterator[Entry]:
    dtype, kv_len = str(store.dtype).removeprefix("torch."), store.kv_len(seq)
    shape = (2, store.num_kv_heads, kv_len, store.head_dim)

    def keys_and_values(layer_idx: int) -> Bytes:
        both = torch.empty(shape, dtype=store.dtype)
        with torch_threads(1):
            store.gather(seq, layer_idx, out=(both[0], both[1]))
        return bytes_of(both)

    for layer_idx in range(store.num_layers):
        yield Entry(f"{row}.kv.{layer_idx}", dtype, shape, partial(keys_and_values, layer_idx))
    yield Entry.of(f"{row}.marks", saved.marks)
    for layer_idx, (queries, _) in sorted(saved.queries.items()):
        name = f"{row}.queries.{layer_idx}"
        yield Entry(name, dtype, tuple(queries.shape), partial(bytes_of, queries))
    for layer_idx, arrays in sorted(saved.layers.items()):
        for name, array in arrays.items():
            if array.dtype.names:
                array = array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
            yield Entry.of(f"{row}.state.{layer_idx}.{name}", array)


def saved_rows(reader: CheckedReader) -> list[dict[str, Any]]:
    """The numbers of each row of a file.

    Raises:
        SessionMiss: it is no file of sequences, or of another format.
    """
    found = reader.metadata.get("format")
    if found != FORMAT:
        raise SessionMiss(f"its format is {found!r}, not {FORMAT!r}")
    rows: list[dict[str, Any]] = json.loads(reader.metadata["rows"])
    return rows


def read_sequences(
    sequences: Sequences, path: Path, most_tokens: int
) -> tuple[list[SavedRow], torch.Tensor | None]:
    """New sequences as they were saved, and `attended` of `file_of`.

    Args, Raises: as `read_in_parts`.
    """
    return finish(read_in_parts(sequences, path, most_tokens))


def read_in_parts(
    sequences: Sequences,
    path: Path,
    most_tokens: int,
    fingerprint: dict[str, str] | None = None,
) -> Generator[None, None, tuple[list[SavedRow], torch.Tensor | None]]:
    """`read_sequences` in steps. Closing the generator gives it up.

    Args:
        most_tokens: that a sequence of the model may have.

    Raises:
        SessionMiss: anything does not fit; there is no new sequence then.
        NotImplementedError: as `file_of`.
    """
    sequences.check_saves()
    rows = list[SavedRow]()
    try:
        with CheckedReader(path) as reader:
            found = saved_rows(reader)
            _check_fingerprint(reader, fingerprint or sequences.fingerprint())
            for row, numbers in enumerate(found):
                rows.append(SavedRow(sequences.new(), None))
                seq = rows[-1].seq
                tokens = yield from _read_row(sequences, reader, row, seq, numbers, most_tokens)
                rows[-1] = SavedRow(seq, tokens)
            attended = None
            if "attended" in reader.tensors:
                attended = torch.from_numpy(reader.read_array("attended")).bool()
                kv_lens = [sequences.store.kv_len(row.seq) for row in rows]
                if attended.ndim != 2 or attended.sum(dim=1).tolist() != kv_lens:
                    raise SessionMiss("attended is of other tokens")
        return rows, attended
    except BaseException as error:
        sequences.free(row.seq for row in rows)
        if isinstance(error, SessionMiss):
            raise
        if isinstance(error, (HostBudgetError, MemoryError)):
            raise SessionMiss(f"no room: {error}") from error
        if isinstance(error, Exception):  # a file that was not damaged, but made otherwise
            raise SessionMiss(f"{path}: {error!r}") from error
        raise


def _check_fingerprint(reader: CheckedReader, expected: dict[str, str]) -> None:
    found = json.loads(reader.metadata["fingerprint"])
    for name, value in expected.items():
        if found.get(name) != value:
            another = "other" if name in ("weights", "options of the policy") else "another"
            raise SessionMiss(f"saved with {another} {name}: {found.get(name)}, not {value}")


def _read_row(
    sequences: Sequences,
    reader: CheckedReader,
    row: int,
    seq: int,
    numbers: dict[str, Any],
    most_tokens: int,
) -> Generator[None, None, Int64s | None]:
    """Its tokens, if they are known."""
    store, kv_len = sequences.store, int(numbers["kv_len"])
    dtype = str(store.dtype).removeprefix("torch.")
    if not 0 <= kv_len <= most_tokens:
        raise SessionMiss(f"it has {kv_len} tokens, and the model at most {most_tokens}")
    shape = (2, store.num_kv_heads, kv_len, store.head_dim)
    for layer_idx in range(store.num_layers):
        reader.check(f"{row}.kv.{layer_idx}", dtype, shape)
    saved, waiting = _read_state(reader, row, numbers, dtype, store), _waiting_of(numbers)
    sequences.states.bytes.check_room(saved.num_bytes)
    store.reserve([seq], [kv_len])
    for layer_idx in range(store.num_layers):
        data = yield from reader.read_in_parts(f"{row}.kv.{layer_idx}")
        both = torch.from_numpy(data).view(store.dtype).view(shape)
        with torch_threads(1):  # copies are small: with more they would wait for each other
            store.append(seq, layer_idx, both[0].transpose(0, 1), both[1].transpose(0, 1))
    store.commit([seq], [kv_len])
    sequences.states.bytes.check_room(saved.num_bytes)  # which others may have taken meanwhile
    sequences.states.restore(seq, saved)
    if sequences.corrections is not None:
        sequences.corrections.put_back(seq, waiting)
    if f"{row}.tokens" not in reader.tensors:
        return None
    reader.check(f"{row}.tokens", "int64", (kv_len,))
    return reader.read_array(f"{row}.tokens")


def _waiting_of(numbers: dict[str, Any]) -> SparseTokens:
    """What lies at its end and waits for a correction."""
    sparse = numbers.get("sparse", {"ids": [], "positions": []})
    ids, positions = map(int, sparse["ids"]), map(int, sparse["positions"])
    waiting = SparseTokens(0, [*ids], [*positions])
    waiting.first = int(numbers["kv_len"]) - len(waiting.ids)
    if waiting.first < 0 or len(waiting.ids) != len(waiting.positions):
        raise SessionMiss(
            f"{len(waiting.ids)} tokens with {len(waiting.positions)} positions wait for a "
            f"correction, of {numbers['kv_len']}"
        )
    return waiting


def _read_state(
    reader: CheckedReader, row: int, numbers: dict[str, Any], dtype: str, store: KVStore
) -> SavedState:
    kv_len = int(numbers["kv_len"])
    saved = SavedState(reader.read_array(f"{row}.marks"))
    saved.capacity_tokens = int(numbers["capacity_tokens"])
    if len(saved.marks) > kv_len or saved.marks.dtype != np.uint8:
        raise SessionMiss(f"{len(saved.marks)} marks of {kv_len} tokens")
    for layer, newest in numbers["queries"].items():
        name = f"{row}.queries.{layer}"
        _, shape = reader.tensors[name]
        reader.check(name, dtype, (shape[0], min(shape[1], int(newest)), store.head_dim))
        saved.queries[int(layer)] = _tensor(reader, name, store.dtype), int(newest)
    for name in reader.tensors:
        if name.startswith(f"{row}.state."):
            layer, of_layer = name.split(".", 3)[2:]
            array = reader.read_array(name)
            record = numbers["records"].get(f"{layer}.{of_layer}")
            if record is not None:
                dtype_of = np.dtype([(field, np.dtype(kind)) for field, kind in record])
                array = array.view(dtype_of).reshape(array.shape[:-1])
            saved.layers.setdefault(int(layer), {})[of_layer] = array
    return saved


def _tensor(reader: CheckedReader, name: str, dtype: torch.dtype) -> torch.Tensor:
    _, shape = reader.tensors[name]
    if 0 in shape:
        reader.read(name)
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(reader.read(name)).view(dtype).view(shape)
