"""What requests leave for the next request of their session: in host memory, and on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from offload.engine.prefix_tree import num_equal
from offload.engine.request import Request
from offload.engine.session_folder import SessionFolder, check_session_id
from offload.runtime.runtime import Runtime
from offload.runtime.saving import SessionFiles, read_in_parts, session_files
from offload.system.errors import SessionMiss

__all__ = ["SessionInUseError", "Sessions", "check_session_id"]

logger = logging.getLogger(__name__)

_LEAST_KEPT = 16  # tokens: to read fewer is as quick
_RETRY_SECONDS = 10.0  # after the disk was full, or gone


class SessionInUseError(RuntimeError):
    """A request of this session has not ended yet."""


@dataclass(eq=False)
class _Session:
    """A session in host memory.

    Attributes:
        tokens: ids of those in the cache.
        num_bytes: of its KV cache, and of what the policy keeps of it.
        is_saved: its file is as it is, or can never be written.
        retries: when writing it, which failed, is tried again: seconds of `time.monotonic()`, or 0.
        used: what its file said when this was kept, or saved; a file that says else is another's.
    """

    seq: int
    tokens: list[int]
    num_bytes: int = 0
    is_saved: bool = False
    retries: float = 0.0
    used: float = 0.0


@dataclass
class SessionStats:
    """Counts since the sessions were made.

    Attributes:
        memory_hits, disk_hits: requests that went on from there.
        misses: requests that went on from nothing, new sessions included.
        saved: files that were written.
        spilled: sessions that left memory, and are on disk only.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    saved: int = 0
    spilled: int = 0
    last_miss: str = ""


@dataclass(frozen=True)
class SessionEntry:
    """A session that no request uses now.

    Attributes:
        num_tokens: None: its file is damaged.
        where: it would be taken up from.
    """

    session_id: str
    num_tokens: int | None
    num_bytes: int
    where: Literal["memory", "disk"]


class Sessions:
    """Keeps the sequence of a session's last request for the next one, for `Engine(sessions=...)`.

    A session that is idle is written to a file of `folder`, in parts between the engine's steps,
    and stays in memory, too, until the limit of it is reached: then, once it is written, the one
    that was not used for the longest time leaves memory. It comes back in parts between steps, too.
    What is in files outlives the process, however that ends. What cannot be written is tried again
    every 10 s while it is in memory.

    A prompt that does not go on as the session does keeps what is the same. What cannot be taken
    up is read again, and `SessionStats.last_miss` says why.

    Args:
        host_limit_bytes: of KV cache of idle sessions, within the host's budget; None: half of
            that. They give way to running requests in any case.
        disk_limit_bytes: of files in the folder; None: no limit.
    """

    def __init__(
        self,
        folder: str | Path,
        host_limit_bytes: int | None = None,
        disk_limit_bytes: int | None = None,
    ) -> None:
        self.folder = SessionFolder(folder, disk_limit_bytes)
        self.stats = SessionStats()
        if host_limit_bytes is not None and host_limit_bytes < 0:
            raise ValueError(f"host_limit_bytes must not be negative, got {host_limit_bytes}")
        self._given_limit_bytes = host_limit_bytes
        self._in_memory: dict[str, _Session] = {}  # the least recently used first
        # What is being written.
        self._running: tuple[_Session, SessionFiles, Iterator[None]] | None = None

    def open(self, runtime: Runtime) -> None:
        """Be those of an engine, from now on.

        Raises:
            NotImplementedError: sequences of such a model cannot be saved.
        """
        runtime.sequences.check_saves()
        self._runtime, self._fingerprint = runtime, runtime.sequences.fingerprint()
        of_budget, given = runtime.store.host_budget_bytes // 2, self._given_limit_bytes
        self._host_limit_bytes = of_budget if given is None else given

    @property
    def host_bytes(self) -> int:
        """Bytes of the sessions in memory: of their KV caches, and of what the policy keeps of
        them."""
        return sum(session.num_bytes for session in list(self._in_memory.values()))

    def entries(self) -> list[SessionEntry]:
        """Those in memory and on disk, by their ids. Any thread may ask."""
        in_memory, found = dict(self._in_memory), list[SessionEntry]()
        for session_id, session in in_memory.items():
            size = len(session.tokens), session.num_bytes
            found.append(SessionEntry(session_id, *size, "memory"))
        for saved in self.folder.sessions():
            if saved.session_id in in_memory:
                continue
            num_tokens = None
            with suppress(SessionMiss):
                num_tokens = self.folder.num_tokens(saved.session_id)
            found.append(SessionEntry(saved.session_id, num_tokens, saved.num_bytes, "disk"))
        return sorted(found, key=lambda entry: entry.session_id)

    # The methods below are called by the engine, which has the model's lock.

    def attach(self, request: Request) -> bool:
        """Give a request the sequence of its session, if that is in memory; False: what is on disk
        may serve it."""
        session_id = str(request.session_id)
        session = self._in_memory.pop(session_id, None)
        if session is None:
            return False
        self._give_up_writing(session)
        missed = self._continue(request, session)
        if missed is None:
            self.stats.memory_hits += 1
        elif self.folder.used(session_id) not in (session.used, 0.0):
            return False
        else:
            self._miss(session_id, missed)
        return True

    def restore(self, request: Request) -> Iterator[None]:
        """Give a request the sequence of its session, in parts, if that is on disk."""
        session_id = str(request.session_id)
        with suppress(OSError):  # as reading it will, which says why
            if not self.folder.path(session_id).exists():
                self._miss(session_id, "a new one")
                return
        self.folder.touch(session_id)  # or it might be the first to go while it is read
        try:
            rows, _ = yield from read_in_parts(
                self._runtime.sequences,
                self.folder.path(session_id),
                self._runtime.max_context,
                self._fingerprint,
            )
        except SessionMiss as miss:
            self._miss(session_id, str(miss))
            return
        if len(rows) != 1 or rows[0].tokens is None:
            self._runtime.sequences.free(row.seq for row in rows)
            self._miss(session_id, "a cache of several rows, or without token ids")
            return
        self.folder.touch(session_id)
        missed = self._continue(request, _Session(rows[0].seq, rows[0].tokens.tolist()))
        if missed is None:
            self.stats.disk_hits += 1
        else:
            self._miss(session_id, missed)

    def keep(self, request: Request) -> None:
        """Take the sequence of a request that has ended."""
        if request.session_id is None or request.seq is None:
            return
        tokens = [*request.prompt[: request.num_read], *request.answer[:-1]]
        num_tokens = self._runtime.store.kv_len(request.seq)
        if request.finish_reason == "error" or num_tokens != len(tokens):
            return
        session = _Session(request.seq, tokens, self._bytes_of(request.seq))
        session.used = self.folder.used(request.session_id)
        request.seq = None
        self._in_memory[request.session_id] = session

    def seq_of(self, request: Request) -> int | None:
        """The sequence of its session, if that is in memory."""
        session = self._in_memory.get(request.session_id or "")
        return None if session is None else session.seq

    def has_others(self, session_id: str | None) -> bool:
        """Whether a session but this one is in memory."""
        return any(found != session_id for found in self._in_memory)

    def spill(self, keeps: str | None = None, *, writes: bool = True) -> bool:
        """Have on disk only the session that was not used for the longest time, of those that are
        saved, or else that could not be, or else, if it `writes`, of all but `keeps`; False: there
        is none."""
        others = {i: session for i, session in self._in_memory.items() if i != keeps}
        saved = {i: session for i, session in others.items() if session.is_saved}
        failed = {i: session for i, session in others.items() if session.retries}
        for session_id, session in (saved or failed or (others if writes else {})).items():
            while not session.is_saved and not session.retries:
                self._write_some(session_id, session)
            self._give_up_writing(session)
            del self._in_memory[session_id]
            self._runtime.sequences.free([session.seq])
            self.stats.spilled += session.is_saved
            return True
        return False

    def remove(self, session_id: str) -> bool:
        """Forget a session, in memory and on disk; False: there is none.

        Raises:
            ValueError: as `check_session_id`.
        """
        check_session_id(session_id)
        session = self._in_memory.pop(session_id, None)
        if session is not None:
            self._give_up_writing(session)
            self._runtime.sequences.free([session.seq])
        try:
            self.folder.remove(session_id)
        except FileNotFoundError:
            return session is not None
        return True

    @property
    def has_work(self) -> bool:
        """Whether there are sessions to be written now."""
        seconds = self.seconds_to_work
        return seconds is not None and seconds <= 0

    @property
    def seconds_to_work(self) -> float | None:
        """Until there are sessions to be written; None: all are."""
        unsaved = [each.retries for each in [*self._in_memory.values()] if not each.is_saved]
        return min(unsaved) - time.monotonic() if unsaved else None

    def work(self, seconds: float) -> None:
        """Write for about so long what is in memory only; beyond the limit, what is saved goes."""
        until = time.monotonic() + seconds
        for session_id, session in [*self._in_memory.items()]:
            while not session.is_saved and session.retries <= time.monotonic():
                if time.monotonic() >= until:
                    return
                self._write_some(session_id, session)
            if self.host_bytes > self._host_limit_bytes:
                self.spill(writes=False)

    def close(self, seconds: float | None = None) -> None:
        """Write for so long what is in memory only, then give all memory back."""
        for session in self._in_memory.values():
            session.retries = 0.0  # once more
        self.work(float("inf") if seconds is None else seconds)
        for session in self._in_memory.values():
            self._give_up_writing(session)
            if not session.is_saved:
                logger.warning("a session of %d tokens was not saved", len(session.tokens))
            self._runtime.sequences.free([session.seq])
        self._in_memory.clear()

    def _continue(self, request: Request, session: _Session) -> str | None:
        """Have a request go on from what it shares with a session, whose sequence becomes its. Why
        it cannot, where that is too little."""
        kept = min(
            num_equal(np.asarray(session.tokens, np.int64), request.ids), len(request.prompt) - 1
        )
        shared, kept = kept, self._runtime.sequences.longest_cut(session.seq, kept)
        if kept < min(_LEAST_KEPT, len(session.tokens)):
            self._runtime.sequences.free([session.seq])
            cut = "" if kept == shared else f", and it can be cut to {kept}"
            return f"the prompt shares {shared} tokens with it{cut}"
        if kept < len(session.tokens):
            self._runtime.sequences.truncate(session.seq, kept)
        kept = self._without_sparse(session, kept)
        request.seq, request.num_read, request.num_cached = session.seq, kept, kept
        request.continues_session = True
        return None

    def _without_sparse(self, session: _Session, kept: int) -> int:
        """Take out tokens that wait for a correction: the prompt reads them. How many stay."""
        corrections = self._runtime.sequences.corrections
        if corrections is None or not (waiting := corrections.waiting(session.seq)).ids:
            return kept
        seq = self._runtime.sequences.fork_prefix(session.seq, waiting.first)
        self._runtime.sequences.free([session.seq])
        session.seq = seq
        return waiting.first

    def _miss(self, session_id: str, reason: str) -> None:
        self.stats.misses += 1
        self.stats.last_miss = f"{session_id}: {reason}"
        logger.info("session %s", self.stats.last_miss)

    def _write_some(self, session_id: str, session: _Session) -> None:
        """The next part of a session's file. One that fails is tried again later, if it can be."""
        if self._running is None or self._running[0] is not session:
            if self._running is not None:
                self._give_up_writing(self._running[0])
            names = list[str]()
            with suppress(SessionMiss):
                names = self.folder.part_names(session_id)
            files = session_files(
                self._runtime.sequences,
                session.seq,
                session.tokens,
                session_id,
                names,
                self._fingerprint,
            )
            self._running = session, files, self.folder.write(session_id, files)
        _, files, steps = self._running
        try:
            next(steps)
            return
        except StopIteration:
            self._runtime.sequences.on_disk.note(session.seq, files.parts)
            self.stats.saved += 1
        except Exception as error:
            level = logging.DEBUG if session.retries else logging.WARNING
            logger.log(level, "session %s was not saved: %s", session_id, error)
            self._running = None
            if isinstance(error, OSError) and error.errno is not None:
                session.retries = time.monotonic() + _RETRY_SECONDS
                return
        session.is_saved, self._running = True, None
        session.used = self.folder.used(session_id)

    def _give_up_writing(self, session: _Session) -> None:
        if self._running is not None and self._running[0] is session:
            self._running[2].close()  # type: ignore[attr-defined]
            self._running = None

    def _bytes_of(self, seq: int) -> int:
        store = self._runtime.store
        sequences = self._runtime.sequences
        num_pages = store.num_present_pages(seq)
        of_parts = sequences.states.bytes_of([seq]) + sequences.kept_bytes(seq)
        return num_pages * store.page_bytes + of_parts
