"""Sequences into a file, and back: keys and values, and what the policy keeps of them.

A file has, for each row `r`:

    r.tokens                int64 [n], where they are known
    r.kv.LAYER              the store's dtype [K|V, num_kv_heads, kv_len, head_dim], or int8 with
                            rows as in pages (`KVFormat`), which may have keys alone; without the
                            first `starts[LAYER]` tokens, which a layer with a window has freed
    r.marks                 uint8, of the text
    r.queries.LAYER         the store's dtype [num_qo_heads, n, head_dim], the recent ones
    r.state.LAYER.NAME      arrays of the policy; of records their bytes

and in its metadata the format, the fingerprint and the numbers that these need, tokens that wait
for a correction among them. What is not of tokens or pages is of the parts of `Sequences`.
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

from offload.kv.sequence_part import RowToLoad, RowToSave
from offload.kv.store import KVStore
from offload.runtime.sequences import Sequences
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

FORMAT = "offload-session-2"

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
    rows, entries = list[RowToSave](), list[Entry]()
    for place, seq in enumerate(seqs):
        row = RowToSave(place, {"kv_len": sequences.store.kv_len(seq)})
        if any(starts := _starts(sequences.store, seq)):
            row.numbers["starts"] = starts
        if tokens is not None:
            row.add("tokens", np.asarray(tokens[place], np.int64))
        row.entries += _pages(sequences.store, place, seq)
        for part in sequences.parts:
            part.save(seq, row)
        rows.append(row)
        entries += row.entries
    if attended is not None:
        entries.append(Entry.of("attended", attended.to(torch.uint8).numpy()))
    metadata = {
        "format": FORMAT,
        "fingerprint": json.dumps(fingerprint or sequences.fingerprint(), sort_keys=True),
        "rows": json.dumps([row.numbers for row in rows]),
    }
    return CheckedFile(metadata, entries)


def _pages(store: KVStore, row: int, seq: int) -> Iterator[Entry]:
    dtype, kv_len = store.format.page_dtype, store.kv_len(seq)

    def keys_and_values(layer_idx: int, start: int) -> Bytes:
        rows = torch.empty(_kept_shape(store, layer_idx, kv_len - start), dtype=dtype)
        parts = rows.unbind()
        with torch_threads(1):
            store.gather(seq, layer_idx, start, out=(parts[0], parts[-1]), kept=True)
        return bytes_of(rows)

    for layer_idx, start in enumerate(_starts(store, seq)):
        name, shape = f"{row}.kv.{layer_idx}", _kept_shape(store, layer_idx, kv_len - start)
        values = partial(keys_and_values, layer_idx, start)
        yield Entry(name, str(dtype).removeprefix("torch."), shape, values)


def _starts(store: KVStore, seq: int) -> list[int]:
    """Of each layer, the first token that it has."""
    starts: list[int] = store.starts(seq)[:, 0].tolist()
    return starts


def _kept_shape(store: KVStore, layer_idx: int, kv_len: int) -> tuple[int, int, int, int]:
    num_kv_heads, head_dim = store.heads_of(layer_idx)
    return store.format.num_parts, num_kv_heads, kv_len, store.format.row_items(head_dim)


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
            for place, numbers in enumerate(found):
                rows.append(SavedRow(sequences.new(), None))
                seq, row = rows[-1].seq, RowToLoad(reader, place, numbers)
                tokens = yield from _read_row(sequences, row, seq, most_tokens)
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
            remedy = ""
            if name == "kv_dtype":
                option = "int8" if found.get(name) == "int8" else "auto"
                remedy = f"; load the model with kv_dtype={option!r}"
            raise SessionMiss(
                f"saved with {another} {name}: {found.get(name)}, not {value}{remedy}"
            )


def _read_row(
    sequences: Sequences, row: RowToLoad, seq: int, most_tokens: int
) -> Generator[None, None, Int64s | None]:
    """Its tokens, if they are known."""
    store, kv_len = sequences.store, int(row.numbers["kv_len"])
    if not 0 <= kv_len <= most_tokens:
        raise SessionMiss(f"it has {kv_len} tokens, and the model at most {most_tokens}")
    dtype, starts = store.format.page_dtype, row.numbers.get("starts", [0] * store.num_layers)
    store.check_starts(starts, kv_len)
    shapes = [_kept_shape(store, i, kv_len - start) for i, start in enumerate(starts)]
    for layer_idx, shape in enumerate(shapes):
        row.check(f"kv.{layer_idx}", dtype, shape)
    of_parts = [part.load(row) for part in sequences.parts]
    store.reserve([seq], [kv_len], at_once=True)
    for layer_idx, (start, shape) in enumerate(zip(starts, shapes, strict=True)):
        data = yield from row.reader.read_in_parts(f"{row.row}.kv.{layer_idx}")
        parts = torch.from_numpy(data).view(dtype).view(shape).transpose(1, 2).unbind()
        with torch_threads(1):  # copies are small: with more they would wait for each other
            store.append(seq, layer_idx, parts[0], parts[-1], start, kept=True)
    store.commit([seq], [kv_len])
    store.free_behind([seq], starts)
    for give in of_parts:
        give(seq)
    if "tokens" not in row.names():
        return None
    row.check("tokens", torch.int64, (kv_len,))
    return row.read_array("tokens")
