"""Parts of a session's file: files beside it, which are never changed, with keys and values of its
first tokens. The next file of the session names them, and has only what is behind them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from offload.kv.sequence_part import SequencePart
from offload.kv.store import KVStore
from offload.system.checked_file import CheckedReader
from offload.system.errors import SessionMiss

_NAME = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})\.[0-9a-f]{16}\.part")


@dataclass(frozen=True)
class FilePart:
    """A part, as a session uses it.

    Attributes:
        name: of its file; no other part ever has it.
        start, stop: tokens that the session has from it.
        end: the file has those up to here, `stop` at least.
    """

    name: str
    start: int
    stop: int
    end: int

    @staticmethod
    def new(session_id: str, start: int, stop: int) -> FilePart:
        """One that is not written yet."""
        return FilePart(f"{session_id}.{secrets.token_hex(8)}.part", start, stop, stop)


def session_of(name: str) -> str | None:
    """The session whose part a file is, by its name; None: it is no part."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def as_text(parts: Iterable[FilePart]) -> str:
    """For `parts_of`."""
    return json.dumps([asdict(part) for part in parts])


def parts_of(reader: CheckedReader) -> list[FilePart]:
    """Those that a session's file names, in their order.

    Raises:
        SessionMiss: they are not of tokens from the first on without a gap, or of other folders.
    """
    text, begin = reader.metadata.get("parts", "[]"), 0
    try:
        parts = [FilePart(**facts) for facts in json.loads(text)]
        for part in parts:
            if session_of(part.name) is None or not begin == part.start < part.stop <= part.end:
                raise ValueError(part)
            begin = part.stop
    except (TypeError, ValueError) as error:
        raise SessionMiss(f"{reader.path}: its parts are wrong: {error!r}") from None
    return parts


class RowsOnDisk(SequencePart):
    """Which of a sequence's first tokens still have the keys and values that are in parts.

    A sequence that is cut below a part's end, or whose tokens are read again, keeps what is before
    that.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._noted: dict[int, tuple[FilePart, ...]] = {}

    def note(self, seq: int, parts: Sequence[FilePart]) -> None:
        """The first tokens of `seq` are those of `parts`."""
        self._noted[seq] = tuple(parts)
        if not parts:
            del self._noted[seq]

    def parts(self, seq: int) -> tuple[FilePart, ...]:
        """What of them `seq` still has."""
        return self._noted.get(seq, ())

    def fork(self, seq: int, child: int) -> None:
        self.note(child, self.parts(seq))

    def fork_text(self, seq: int, child: int) -> None:
        self.rebase(seq, self._store.kv_len(child), child)

    def rebase(self, seq: int, kv_len: int, to: int) -> None:
        parts = self.parts(seq)
        if parts and parts[-1].stop > kv_len:
            left = [part for part in parts if part.start < kv_len]
            parts = tuple(replace(part, stop=min(part.stop, kv_len)) for part in left)
        self.note(to, parts)

    def truncate(self, seq: int, kv_len: int) -> None:
        self.rebase(seq, kv_len, seq)

    def roll_back(self, seq: int, kv_len: int) -> None:
        self.rebase(seq, kv_len, seq)

    def forget(self, seq: int) -> None:
        self._noted.pop(seq, None)


def worth_keeping(parts: Iterable[FilePart], names: Collection[str]) -> list[FilePart]:
    """The first of `parts` that are among `names`, as far as half of each is used."""
    kept = list[FilePart]()
    for part in parts:
        if part.name not in names or 2 * (part.stop - part.start) < part.end - part.start:
            break
        kept.append(part)
    return kept
