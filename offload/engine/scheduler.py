"""Which requests run, which prompt is read next, and how much of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from offload.engine.prefix_tree import num_same
from offload.engine.request import Request
from offload.kv.store import KVStore
from offload.policies.state import PolicyStates

_LEAST_SLICE = 16  # tokens; fewer take as long
_LOOKED_THROUGH = 8  # prompts behind the first, for one that a single slice reads


class Admission:
    """Counts what requests may come to take of the host's budget."""

    def __init__(self, store: KVStore, states: PolicyStates) -> None:
        self._store, self._policy_states = store, states

    def most_bytes(self, request: Request) -> int:
        """Of a request at its end, when nobody else is there."""
        pages = self._pages(request.most_tokens)
        return pages * self._store.page_bytes + 2 * self._states(request)

    def fits(self, requests: Sequence[Request], seq: int | None = None) -> bool:
        """Whether all of them can go on to their ends together; the last one from `seq`."""
        pages = states = grows = 0
        for request in requests:
            pages += self._pages(request.most_tokens)
            states += self._states(request)
            grows = max(grows, self._states(request))  # a copy is made of one at a time
            own = seq if request.seq is None and request is requests[-1] else request.seq
            if own is not None:
                pages -= self._store.num_own_pages(own) * self._store.num_page_rows
                states -= self._policy_states.bytes_of([own])
        need = pages * self._store.page_bytes + max(0, states) + grows
        return need <= self._store.left_bytes(pages)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._store.page_tokens) * self._store.num_page_rows

    def _states(self, request: Request) -> int:
        num_bytes = self._policy_states.bytes
        return num_bytes.most_at(request.most_tokens) + num_bytes.of_queries


class Scheduler:
    """First come, first served; a prompt that one slice reads may go before a long one's rest,
    unless most of it is the beginning of that one: then it waits, and shares it.

    Attributes:
        waiting: requests that were not admitted yet.
        reading: those whose prompts are being read, or come next.
        running: those that decode.
    """

    def __init__(self, *, max_num_seqs: int, slice_seconds: float, read_share: float) -> None:
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []
        self.running: list[Request] = []
        self._max_num_seqs = max_num_seqs
        self._slice_seconds, self._read_share = slice_seconds, read_share
        self._token_seconds = slice_seconds / 64  # of reading, until it was measured
        self._owed = 0.0  # seconds of decoding before the next slice
        self._last: Request | None = None  # whose slice was read

    def __len__(self) -> int:
        return len(self.waiting) + len(self.reading) + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        yield from (*self.running, *self.reading, *self.waiting)

    def admit(self, fits: Callable[[list[Request]], bool]) -> None:
        """Move requests from `waiting` to `reading` while there is room."""
        while self.waiting and len(self.reading) + len(self.running) < self._max_num_seqs:
            if not fits([*self.running, *self.reading, self.waiting[0]]):
                return
            self.reading.append(self.waiting.popleft())

    def remove(self, request: Request) -> None:
        """It is finished."""
        for requests in (self.running, self.reading, self.waiting):
            if request in requests:
                requests.remove(request)

    def next_slice(self, num_left: Callable[[Request], int]) -> tuple[Request, int] | None:
        """Of which prompt how many tokens are read now; None: decoding has its turn.

        Args:
            num_left: tokens of a prompt that have to be read.
        """
        if not self.reading or (self.running and self._owed > 0.0):
            return None
        seconds = self._slice_seconds * (1 if self.running else 2)
        size = max(_LEAST_SLICE, int(seconds / self._token_seconds))
        request = self.reading[0]
        if request is self._last:
            for other in self.reading[1 : 1 + _LOOKED_THROUGH]:
                left = num_left(other)
                if left <= size and 2 * num_same(other.prompt, request.prompt) < left:
                    request = other
                    break
        self._last = request
        return request, min(size, num_left(request))

    def was_read(self, num_tokens: int, seconds: float) -> None:
        """A slice took so long."""
        # Few tokens take as long as some more do.
        measured = seconds / max(num_tokens, _LEAST_SLICE)
        self._token_seconds += 0.5 * (measured - self._token_seconds)
        self._owed = seconds * (1.0 - self._read_share) / self._read_share

    def was_decoded(self, seconds: float) -> None:
        """A step took so long."""
        self._owed -= seconds
