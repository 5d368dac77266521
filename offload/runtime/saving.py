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

A long session is several files, so that a turn writes little more than what is new. Layers without
windows have the keys and values of its first tokens in parts (`FilePart`), files beside it with

    0.kv.LAYER              as above, of tokens start .. end of the metadata

and the session's own file has those from `firsts[LAYER]` on, with the parts in its metadata. What
is read of a part is compared with its checksums and with the name that it was written with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.kv.sequence_part import RowToLoad, RowToSave
from offload.kv.store import KVStore
from offload.runtime.file_parts import FilePart, as_text, parts_of, worth_keeping
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
FORMAT_WITH_PARTS = "offload-session-3"

Int64s = npt.NDArray[np.int64]

_PART_FORMAT = "offload-part-1"
_LEAST_PART_BYTES = 16 * 2**20  # what is behind the parts is written again each turn until then


class _PartGone(SessionMiss):
    """A part is not there: the session may have been written meanwhile."""


@dataclass(frozen=True)
class SavedRow:
    """A sequence that was read from a file.

    Attributes:
        tokens: None: they were not known.
    """

    seq: int
    tokens: Int64s | None


@dataclass(frozen=True)
class SessionFiles:
    """What will be written of a session.

    Attributes:
        file: its own.
        parts: that it names.
        new: the last of these, if it has to be written first.
    """

    file: CheckedFile
    parts: Sequence[FilePart] = ()
    new: CheckedFile | None = None


def session_files(
    sequences: Sequences,
    seq: int,
    tokens: Sequence[int],
    session_id: str,
    names: Collection[str],
    fingerprint: dict[str, str],
) -> SessionFiles:
    """A sequence as a session, with what its tokens have in parts on disk already.

    Args:
        names: of the parts that the session has on disk.

    Raises:
        NotImplementedError: as `file_of`.
    """
    store, new = sequences.store, None
    parts = worth_keeping(sequences.on_disk.parts(seq), names)
    begin, kv_len = _end(parts), store.kv_len(seq)
    shapes = [_kept_shape(store, layer_idx, kv_len - begin) for layer_idx in _in_parts(store)]
    if sum(map(math.prod, shapes)) * store.format.page_dtype.itemsize >= _LEAST_PART_BYTES:
        parts.append(FilePart.new(session_id, begin, kv_len))
        facts = {"name": parts[-1].name, "start": str(begin), "end": str(kv_len)}
        pages = [_page_entry(store, 0, seq, i, begin) for i in _in_parts(store)]
        new = CheckedFile({"format": _PART_FORMAT} | facts, pages)
    file = file_of(sequences, [seq], [tokens], fingerprint=fingerprint, parts=parts)
    return SessionFiles(file, parts, new)


def file_of(
    sequences: Sequences,
    seqs: Sequence[int],
    tokens: Sequence[Sequence[int]] | None = None,
    attended: torch.Tensor | None = None,
    fingerprint: dict[str, str] | None = None,
    parts: Sequence[FilePart] = (),
) -> CheckedFile:
    """The file of some sequences, which stay as they are until it is written.

    Args:
        tokens: ids of each.
        attended: bool [rows, columns], kept with them.
        fingerprint: if it was made before.
        parts: of the only sequence, which have its first tokens.

    Raises:
        NotImplementedError: a model whose options are of one generation at a time.
    """
    sequences.check_saves()
    rows, entries = list[RowToSave](), list[Entry]()
    for place, seq in enumerate(seqs):
        row = RowToSave(place, {"kv_len": sequences.store.kv_len(seq)})
        if any(starts := _starts(sequences.store, seq)):
            row.numbers["starts"] = starts
        firsts = starts
        if parts:
            in_parts = _in_parts(sequences.store)
            firsts = [_end(parts) if i in in_parts else first for i, first in enumerate(starts)]
            row.numbers["firsts"] = firsts
        if tokens is not None:
            row.add("tokens", np.asarray(tokens[place], np.int64))
        row.entries += [
            _page_entry(sequences.store, place, seq, layer_idx, first)
            for layer_idx, first in enumerate(firsts)
        ]
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
    if parts:
        metadata |= {"format": FORMAT_WITH_PARTS, "parts": as_text(parts)}
    return CheckedFile(metadata, entries)


def _page_entry(store: KVStore, row: int, seq: int, layer_idx: int, start: int) -> Entry:
    """Keys and values of a layer from token `start` on."""
    dtype, shape = (
        store.format.page_dtype,
        _kept_shape(store, layer_idx, store.kv_len(seq) - start),
    )

    def keys_and_values() -> Bytes:
        rows = torch.empty(shape, dtype=dtype)
        parts = rows.unbind()
        with torch_threads(1):
            store.gather(seq, layer_idx, start, out=(parts[0], parts[-1]), kept=True)
        return bytes_of(rows)

    name = str(dtype).removeprefix("torch.")
    return Entry(f"{row}.kv.{layer_idx}", name, shape, keys_and_values)


def _end(parts: Sequence[FilePart]) -> int:
    return parts[-1].stop if parts else 0


def _in_parts(store: KVStore) -> list[int]:
    """Layers that are: those that keep all their tokens."""
    return [layer_idx for layer_idx in range(store.num_layers) if not store.has_window(layer_idx)]


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
    if found not in (FORMAT, FORMAT_WITH_PARTS):
        raise SessionMiss(f"its format is {found!r}, not {FORMAT!r}")
    try:
        rows: list[dict[str, Any]] = json.loads(reader.metadata["rows"])
    except (KeyError, ValueError) as error:
        raise SessionMiss(f"{reader.path}: its rows are wrong: {error!r}") from None
    return rows


def whole_file(reader: CheckedReader) -> CheckedFile:
    """A file as it would be without parts, which are read, as `reader` is, when it is written.

    Raises:
        SessionMiss: as `saved_rows`; when it is written, also where anything is damaged.
    """
    rows, parts, entries = saved_rows(reader), parts_of(reader), reader.entries()
    if not parts:
        return CheckedFile(reader.metadata, entries)
    (row,) = rows
    firsts = row.pop("firsts")
    starts, kv_len = row.get("starts", [0] * len(firsts)), row["kv_len"]
    of_layers = {f"0.kv.{i}": start for i, start in enumerate(starts) if start < firsts[i]}

    def whole(entry: Entry) -> Bytes:
        num_parts, num_kv_heads, num_tokens, row_items = entry.shape
        pieces = list[Bytes]()
        for part in parts:
            with _part_reader(reader.path, part) as of_part:
                shape = (num_parts, num_kv_heads, part.end - part.start, row_items)
                of_part.check(entry.name, entry.dtype, shape)
                of_heads = of_part.read(entry.name).reshape(num_parts * num_kv_heads, shape[2], -1)
            pieces.append(of_heads[:, : part.stop - part.start])
        if num_tokens:
            pieces.append(entry.load().reshape(num_parts * num_kv_heads, num_tokens, -1))
        return bytes_of(np.concatenate(pieces, axis=1))

    for place, entry in enumerate(entries):
        if entry.name in of_layers:
            num_parts, num_kv_heads, _, row_items = entry.shape
            shape = num_parts, num_kv_heads, kv_len - of_layers[entry.name], row_items
            entries[place] = replace(entry, shape=shape, load=partial(whole, entry))
    metadata = reader.metadata | {"format": FORMAT, "rows": json.dumps(rows)}
    del metadata["parts"]
    return CheckedFile(metadata, entries)


def _part_reader(path: Path, part: FilePart) -> CheckedReader:
    """Of a part of the session that is at `path`."""
    beside = path.with_name(part.name)
    try:
        reader = CheckedReader(beside)
    except SessionMiss as miss:
        if beside.exists():
            raise
        raise _PartGone(f"{path}: {miss}, which is a part of it") from None
    expected = {"format": _PART_FORMAT, "name": part.name}
    expected |= {"start": str(part.start), "end": str(part.end)}
    if reader.metadata != expected:
        reader.close()
        raise SessionMiss(f"{beside} is not the part that was written: {reader.metadata}")
    return reader


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
    try:
        return (yield from _read_file(sequences, path, most_tokens, fingerprint))
    except _PartGone:  # of a file that another process has replaced, perhaps
        return (yield from _read_file(sequences, path, most_tokens, fingerprint))


def _read_file(
    sequences: Sequences,
    path: Path,
    most_tokens: int,
    fingerprint: dict[str, str] | None,
) -> Generator[None, None, tuple[list[SavedRow], torch.Tensor | None]]:
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
    starts, parts = row.numbers.get("starts", [0] * store.num_layers), parts_of(row.reader)
    store.check_starts(starts, kv_len)
    firsts = row.numbers["firsts"] if parts else starts
    in_parts = [i for i, (first, at) in enumerate(zip(firsts, starts, strict=True)) if first > at]
    if any(firsts[i] != _end(parts) or starts[i] for i in in_parts) or _end(parts) > kv_len:
        raise SessionMiss(f"parts of {_end(parts)} of {kv_len} tokens, and {firsts} behind them")
    pages = [(layer_idx, first, kv_len) for layer_idx, first in enumerate(firsts)]
    for layer_idx, first, stop in pages:
        shape = _kept_shape(store, layer_idx, stop - first)
        row.check(f"kv.{layer_idx}", store.format.page_dtype, shape)
    of_parts = [part.load(row) for part in sequences.parts]
    store.reserve([seq], [kv_len], at_once=True)
    for part in parts:
        with _part_reader(row.reader.path, part) as reader:
            of_part = RowToLoad(reader, 0, {})
            of_layers = [(layer_idx, part.start, part.end) for layer_idx in in_parts]
            yield from _read_pages(store, of_part, seq, of_layers, part.stop)
    yield from _read_pages(store, row, seq, pages, kv_len)
    store.commit([seq], [kv_len])
    store.free_behind([seq], starts)
    for give in of_parts:
        give(seq)
    sequences.on_disk.note(seq, parts)
    if "tokens" not in row.names():
        return None
    row.check("tokens", torch.int64, (kv_len,))
    return row.read_array("tokens")


def _read_pages(
    store: KVStore, row: RowToLoad, seq: int, pages: Iterable[tuple[int, int, int]], stop: int
) -> Iterator[None]:
    """Put what a file has of tokens before `stop` into a sequence with room for it.

    Args:
        pages: of each layer that the file has (layer_idx, first, last + 1).
    """
    dtype = store.format.page_dtype
    for layer_idx, first, end in pages:
        shape = _kept_shape(store, layer_idx, end - first)
        row.check(f"kv.{layer_idx}", dtype, shape)
        data = yield from row.reader.read_in_parts(f"{row.row}.kv.{layer_idx}")
        if not len(data):
            continue
        rows = torch.from_numpy(data).view(dtype).view(shape)[:, :, : stop - first]
        parts = rows.transpose(1, 2).unbind()
        with torch_threads(1):  # copies are small: with more they would wait for each other
            store.append(seq, layer_idx, parts[0], parts[-1], first, kept=True)
