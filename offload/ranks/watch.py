"""A rank that fails must not leave the others waiting in a collective operation for ever.

Every rank has a daemon thread that says twice a second, in a store that all ranks reach, that its
process lives, and looks after the others. Work in which ranks wait for each other is a *section*;
all ranks go through the same sections in the same order. A rank that raises in a section first
writes down why. Who is still in that section some time later waits for a rank that will not come:
the thread prints the other's error and ends the process, since nothing else can interrupt a
collective. Ranks that raise the same error together all leave the section, and nothing happens.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0  # to leave a section by oneself
SILENT_SECONDS = 30.0  # of a process that lives: loading or compiling may hold the interpreter
UNSEEN_SECONDS = 6.0  # of a process that cannot be looked at


class PeerError(RuntimeError):
    """Another rank failed or is gone; the message is its error."""


class LostConnectionError(RuntimeError):
    """A collective operation failed: another rank is probably gone."""


@dataclass
class _Peer:
    """What is known of another rank."""

    process: psutil.Process | None = None
    beat: bytes = b""
    beat_at: float = 0.0  # when `beat` was new
    error: tuple[int, str] | None = None  # section, message
    ended_after: int | None = None  # section


class RankWatch:
    """Watches over the other ranks, and tells them of this one.

    Args:
        store: a `torch.distributed.Store` that has no other user (`dist.PrefixStore`): its client
            serves this object's thread and the main one.

    Attributes:
        has_failed: whether the last section ended with an error, or did not end.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        now = time.monotonic()
        self._peers = {r: _Peer(beat_at=now) for r in range(world_size) if r != rank}
        self._section = 0  # number of the last one that was entered
        self._is_inside = False
        self.has_failed = False
        self._reason: str | None = None
        self._reason_at = 0.0
        self._changed = threading.Condition()
        self._ended = threading.Event()
        me = psutil.Process()
        store.set(f"process/{rank}", json.dumps([me.pid, me.create_time()]))
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """Around work in which ranks wait for each other; may be nested.

        Raises:
            PeerError: instead of a `LostConnectionError`, once it is known what the other had.
        """
        if self._is_inside:
            yield
            return
        with self._changed:
            self._section += 1
            self._is_inside, self._reason = True, None
        self.has_failed = True
        try:
            yield
            self.has_failed = False
        except LostConnectionError as error:
            reason = self._wait_for_reason() or f"the connection to another rank broke: {error}"
            raise PeerError(reason) from error
        except BaseException as error:
            self._say(f"error/{self._rank}", json.dumps([self._section, describe(error)]))
            raise
        finally:
            with self._changed:
                self._is_inside = False

    def close(self) -> None:
        """This rank takes no part in further sections."""
        if not self._ended.is_set():
            self._ended.set()
            # The interpreter ends threads that it finds in native code by aborting the process.
            self._thread.join(5.0)
            self._say(f"ended/{self._rank}", str(self._section))

    def _say(self, key: str, text: str) -> None:
        # Whoever held the store may be what failed.
        with contextlib.suppress(RuntimeError):
            self._store.set(key, text)

    def _wait_for_reason(self) -> str | None:
        with self._changed:
            seconds = UNSEEN_SECONDS + 2 * POLL_SECONDS
            self._changed.wait_for(lambda: self._reason is not None, seconds)
            return self._reason

    def _watch(self) -> None:
        beats = 0
        while not self._ended.wait(POLL_SECONDS):
            beats += 1
            try:
                self._store.set(f"beat/{self._rank}", str(beats))
                for rank, peer in self._peers.items():
                    self._look(rank, peer)
            except RuntimeError:
                pass  # its host is gone; processes can still be looked at
            self._judge()

    def _look(self, rank: int, peer: _Peer) -> None:
        """Read what `rank` has written."""
        if peer.process is None and self._store.check([f"process/{rank}"]):
            pid, created = json.loads(self._store.get(f"process/{rank}"))
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                # Another one of this number: its processes are not to be seen from here.
                if abs(process.create_time() - created) < 1.0:
                    peer.process = process
        if self._store.check([f"beat/{rank}"]):
            beat = self._store.get(f"beat/{rank}")
            if beat != peer.beat:
                peer.beat, peer.beat_at = beat, time.monotonic()
        if self._store.check([f"error/{rank}"]):
            section, text = json.loads(self._store.get(f"error/{rank}"))
            peer.error = (section, text)
        if self._store.check([f"ended/{rank}"]):
            peer.ended_after = int(self._store.get(f"ended/{rank}"))

    def _judge(self) -> None:
        """End the process if this rank has waited in vain for long enough."""
        with self._changed:
            reasons = (self._why(rank, peer) for rank, peer in self._peers.items())
            found = next(filter(None, reasons), None) if self._is_inside else None
            if found is None:
                self._reason = None
                return
            if self._reason is None:
                self._reason_at = time.monotonic()
            self._reason = found
            self._changed.notify_all()
            is_stuck = time.monotonic() - self._reason_at > GRACE_SECONDS
        if is_stuck:
            _end_process(found)

    def _why(self, rank: int, peer: _Peer) -> str | None:
        """Why `rank` will not come to what is left of this section; None: it may."""
        if peer.error is not None and peer.error[0] == self._section:
            return f"rank {rank} failed: {peer.error[1]}"
        if peer.ended_after is not None and peer.ended_after < self._section:
            return f"rank {rank} has ended; every rank must make the same calls"
        if peer.process is not None and not _is_alive(peer.process):
            if peer.ended_after is not None and peer.error is None:
                return None  # it was through with this section, and then ended as it should
            last = f"; its last error: {peer.error[1]}" if peer.error is not None else ""
            return f"the process of rank {rank} (pid {peer.process.pid}) is gone{last}"
        limit = UNSEEN_SECONDS if peer.process is None else SILENT_SECONDS
        silent = time.monotonic() - peer.beat_at
        if silent > limit and peer.ended_after is None:
            return f"rank {rank} has given no sign of life for {silent:.0f} s"
        return None


def describe(error: BaseException) -> str:
    """`ValueError: what it says (decode.py:12 in step)`."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _end_process(reason: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
