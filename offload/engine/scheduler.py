"""Which requests run, which prompt is read next, and how much of it."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from offload.engine.prefix_tree import num_equal
from offload.engine.request import Request
from offload.engine.working_memory import WorkingMemory
from offload.kv.store import KVStore
from offload.runtime.correcting import Corrections
from offload.runtime.sequences import Sequences
from offload.selection.state import PolicyStates

# Slices while no request decodes, while others wait for them, and in which others decode.
_ALONE, _WAITED, _PAUSED = "alone", "waited", "paused"
# Tokens of a slice at least: fewer take about as long.
_LEAST = {_ALONE: 512, _WAITED: 32, _PAUSED: 32}
# `slice_seconds` of each. Larger ones read more per second (SmolLM2-135M on two cores, a prompt of
# 7,168 tokens: slices of 0.45 s 305 to 366 tokens/s, of 1.8 s 510; on others one of 7,000 in 29.6
# to 33.1 s, and with slices of 4.5 s in 28.0 to 30.1), and others decode, and short prompts that
# come are read, between the layers; on a GPU these wait.
_SECONDS = {_ALONE: 30.0, _WAITED: 1.0, _PAUSED: 12.0}
_SECONDS_ON_GPU = {_ALONE: 6.0, _WAITED: 1.0, _PAUSED: 2.0}
# A slice has at least such a share of the tokens before, or to bring these would be most of its
# time; on a GPU, which reads its weights for each, it has at least so many.
_SHARE, _LEAST_ON_GPU = 1 / 16, 512
# Of the next slice at most, against the last: one that was quick by chance makes no long gap.
_GROWTH = {_ALONE: 4.0, _WAITED: 1.25, _PAUSED: 2.0}
# Of what is left of the longest prompt of a slice, which waits for shorter ones.
_SHORT = 1 / 4
_ANSWER_TOKENS = 1024  # that are expected where a request has no maximum
# Beside the state itself a copy of where a prompt ends, and one while a batch changes.
_STATES = 3
_READING = "what reading a prompt takes"
_LOOKED_THROUGH = 8  # prompts behind the first, for such as fit a slice


class Admission:
    """Counts what requests may come to take of the host's budget.

    Args:
        corrections: of one sequence at a time; None: there are none.
        overcommit: as of `Engine`.
        sequences: what they have beside pages and policy; None: nothing.
        working: what passes take; None: it is not counted.
    """

    def __init__(
        self,
        store: KVStore,
        states: PolicyStates,
        corrections: Corrections | None,
        overcommit: float,
        sequences: Sequences | None = None,
        working: WorkingMemory | None = None,
    ) -> None:
        self._store, self._policy_states, self._overcommit = store, states, overcommit
        self._sequences = sequences
        self._bytes_at = (lambda kv_len: 0) if sequences is None else sequences.bytes_at
        self._corrections = corrections
        self._row_bytes, self._slice_bytes = 0, 0
        if working is not None:
            self._row_bytes, self._slice_bytes = working.row_bytes, working.of_slice
            store.ledger.take_turns(_READING, self, self._slice_bytes)

    def close(self) -> None:
        """Nothing is read any more."""
        self._store.ledger.take_turns(_READING, self, 0)

    @property
    def budget_bytes(self) -> int:
        """For requests: that of the store without what reading a prompt takes."""
        return max(0, self._store.host_budget_bytes - self._slice_bytes)

    def most_bytes(self, num_tokens: int) -> int:
        """Bytes that a request of so many tokens needs at most, when no other runs."""
        pages = self._pages(num_tokens) + self._corrected_pages(num_tokens)
        return pages * self._store.page_bytes + 2 * self._states(num_tokens)

    def most_requests(self, num_tokens: int) -> int:
        """Requests that come to so many tokens, and fit together."""
        pages, corrected = self._pages(num_tokens), self._corrected_pages(num_tokens)
        states, page_bytes = self._states(num_tokens), self._store.page_bytes
        left = self.budget_bytes - corrected * page_bytes - states
        return max(0, left // (pages * page_bytes + states))

    def most_answer(self, prompt_tokens: int, max_tokens: int) -> int:
        """Tokens of an answer that fit when no other request runs: 1 .. `max_tokens`."""
        budget = self.budget_bytes
        few, many = 1, max_tokens + 1
        while many - few > 1:
            middle = (few + many) // 2
            fits = self.most_bytes(prompt_tokens + middle - 1) <= budget
            few, many = (middle, many) if fits else (few, middle)
        return few

    def fits(
        self, requests: Sequence[Request], seq: int | None = None, freed_bytes: int = 0
    ) -> bool:
        """Whether all of them can go on to their ends together.

        Args:
            seq: that the last one goes on from; None: from nothing.
            freed_bytes: that others could give back.
        """
        pages = states = grows = corrected = 0
        for request in requests:
            expected = self.expected_tokens(request)
            pages += self._pages(expected)
            corrected = max(corrected, self._corrected_pages(expected))
            of_request = self._states(request.most_tokens)
            states += of_request
            grows = max(grows, of_request)  # a copy is made of one at a time
            if request.correction is not None:
                for of_seq, copy in request.correction.copies.items():
                    num_shared = request.correction.tokens[of_seq].first // self._store.page_tokens
                    pages -= self._store.num_own_pages(copy)
                    pages += num_shared * self._store.num_page_rows
            own = seq if request.seq is None and request is requests[-1] else request.seq
            if own is not None:
                pages -= self._store.num_own_pages(own)
                states -= self._policy_states.bytes_of([own])
                states -= self._bytes_at(self._store.kv_len(own))
        pages += corrected
        need = pages * self._store.page_bytes + max(0, states) + grows
        return need <= self._store.left_bytes(pages) + freed_bytes

    def fits_device(self, requests: Sequence[Request], held_bytes: int | None = None) -> bool:
        """The same of the device that has what layers outside of the store keep.

        Args:
            held_bytes: that all have there, if all else may go; None: what is not theirs stays.
        """
        sequences = self._sequences
        if sequences is None:
            return True
        sizes = [sequences.device_bytes_at(request.most_tokens) for request in requests]
        need = _STATES * sum(sizes) + max(sizes)
        if not need:
            return True
        if held_bytes is None:
            seqs = [request.seq for request in requests if request.seq is not None]
            held_bytes = sum(sequences.device_bytes_at(self._store.kv_len(seq)) for seq in seqs)
        return need <= sequences.device_left_bytes() + held_bytes

    def expected_tokens(self, request: Request) -> int:
        """That it has at its end, or in its next pages if it has more than was expected."""
        of_answer = request.max_tokens
        if request.params.max_tokens is None:
            of_answer = min(of_answer, _ANSWER_TOKENS)
        expected = len(request.prompt) + int(of_answer / self._overcommit)
        now = len(request.prompt) + len(request.answer) + 2 * self._store.page_tokens
        return min(request.most_tokens, max(expected, now))

    def _pages(self, num_tokens: int) -> int:
        return self._store.pages_at(num_tokens)

    def _corrected_pages(self, num_tokens: int) -> int:
        """That are there twice while a sequence is corrected."""
        return 0 if self._corrections is None else self._corrections.pages(1, num_tokens)

    def _states(self, num_tokens: int) -> int:
        num_bytes = self._policy_states.bytes
        of_parts = _STATES * self._bytes_at(num_tokens)
        of_request = of_parts + self._row_bytes
        return num_bytes.most_at(num_tokens) + num_bytes.of_queries + of_request


class Scheduler:
    """First come, first served, several prompts in a slice. Half of it is for short prompts behind
    a long one. A prompt whose beginning is just being read waits, and shares that. Corrections come
    before prompts, one after the other, and leave them half of each slice.

    Args:
        max_num_seqs, slice_seconds, read_share: as of `Engine`.
        most_slice_tokens: of a slice.
        most_past_tokens: that its prompts have read before, but for the first of them.
        reads_on_gpu: prompts are read there.

    Attributes:
        waiting: requests that were not admitted yet.
        restoring: those whose sequences come back from disk.
        reading: those whose prompts are being read, or come next.
        running: those that decode.
        correcting: those whose decoded tokens are read again, before they go on.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        slice_seconds: float,
        read_share: float,
        most_slice_tokens: int,
        most_past_tokens: int = sys.maxsize,
        reads_on_gpu: bool = False,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.restoring: list[Request] = []
        self.reading: list[Request] = []
        self.running: list[Request] = []
        self.correcting: list[Request] = []
        self.max_num_seqs, self.most_slice_tokens = max_num_seqs, most_slice_tokens
        self._reads_on_gpu, self._most_past_tokens = reads_on_gpu, most_past_tokens
        self._seconds = _SECONDS_ON_GPU if reads_on_gpu else _SECONDS
        self._slice_seconds = slice_seconds
        self._read_share = read_share
        self._whole = 0  # tokens that the last slice might have
        self._most_within = max(1, most_slice_tokens // 4)
        # Of slices that take so long.
        least = _LEAST | ({_PAUSED: _LEAST_ON_GPU} if reads_on_gpu else {})
        self._least = {kind: min(size, most_slice_tokens) for kind, size in least.items()}
        self._sizes = dict(self._least)
        self._kind = _ALONE  # of the last slice
        self._owed = 0.0  # seconds of decoding before more is read
        self._paused_at = 0.0  # seconds of the slice that are in `_owed`
        self._last: Request | None = None  # whose slice was read

    def __len__(self) -> int:
        return len(self.waiting) + self.num_running

    def __iter__(self) -> Iterator[Request]:
        yield from (*self._admitted, *self.waiting)

    @property
    def keeps_waiting(self) -> bool:
        """Whether there are requests that do not decode."""
        return len(self) > len(self.running)

    @property
    def num_running(self) -> int:
        """Requests that are restored, read, corrected or decoded."""
        return len(self._admitted)

    @property
    def _admitted(self) -> list[Request]:
        return [*self.running, *self.correcting, *self.reading, *self.restoring]

    def admit(self, fits: Callable[[list[Request]], bool]) -> None:
        """Move requests from `waiting` to `reading` while there is room."""
        while self.waiting and self.num_running < self.max_num_seqs:
            if not fits([*self._admitted, self.waiting[0]]):
                return
            request = self.waiting.popleft()
            if request.queued_seconds is None:
                request.queued_seconds = time.monotonic() - request.arrived
            if request.restoring is None:
                self.begin(request)
            else:
                self.restoring.append(request)

    def begin(self, request: Request) -> None:
        """Its sequence is as far as it comes: it decodes, or is read from there."""
        (self.running if request.is_read else self.reading).append(request)

    def correct(self, request: Request) -> None:
        """One that was running: its tokens are read again first."""
        self.running.remove(request)
        self.correcting.append(request)

    def was_corrected(self, request: Request) -> None:
        """It goes on."""
        self.correcting.remove(request)
        self.running.append(request)

    def preempt(self, kept: Sequence[Request] = ()) -> Request | None:
        """The youngest request that has a sequence waits again, before all others; None: there is
        no other one, or it is one of `kept`."""
        admitted = (*self.running, *self.correcting, *self.reading)
        with_seq = [request for request in admitted if request.seq is not None]
        if len(with_seq) < 2:
            return None
        request = max(with_seq, key=lambda request: request.arrived)
        if request in kept:
            return None
        self.remove(request)
        self.waiting.appendleft(request)
        return request

    def remove(self, request: Request) -> None:
        """It is finished."""
        for requests in (
            self.running,
            self.correcting,
            self.reading,
            self.restoring,
            self.waiting,
        ):
            if request in requests:
                requests.remove(request)

    def next_slice(self, num_left: Callable[[Request], int]) -> list[tuple[Request, int]]:
        """Corrections and prompts that are read now, and how many tokens of each. If there are
        none, the running requests decode.

        Args:
            num_left: tokens of a prompt that have to be read.
        """
        if not (self.reading or self.correcting) or self.decodes_first:
            return []
        self._owed = self._paused_at = 0.0
        self._kind = _ALONE if not self.running else _WAITED if self.correcting else _PAUSED
        whole = self._sizes[self._kind]
        if self.reading and self._kind != _WAITED:
            longest = max(request.num_read for request in self.reading[: 1 + _LOOKED_THROUGH])
            share = int(_SHARE * longest)
            whole = self._rounded(max(whole, share))
        self._whole = whole
        corrected = self._corrected_in(whole // 2 if self.reading else whole)
        if not self.reading:
            return corrected
        size = left = whole - sum(num_tokens for _, num_tokens in corrected)
        parts: dict[Request, int] = {}
        first, *others = self.reading[: 1 + _LOOKED_THROUGH]
        past = _num_past(first, num_left)
        for request in [*others]:
            of_request = _num_past(request, num_left)
            if past + of_request + whole > self._most_past_tokens:
                others.remove(request)
            else:
                past += of_request
        if first is self._last:  # its rest leaves half of the slice to those that fit in there
            for request in others:
                num_tokens = num_left(request)
                if num_tokens <= left - size // 2 and not _shares(
                    [first, *parts], request, num_left
                ):
                    parts[request] = num_tokens
                    left -= num_tokens
        self._last = first
        for request in (first, *others):
            if left > 0 and request not in parts and not _shares(parts, request, num_left):
                parts[request] = min(left, num_left(request))
                left -= parts[request]
        return [*corrected, *parts.items()]

    def _corrected_in(self, left: int) -> list[tuple[Request, int]]:
        """Corrections, and how much of each, in a slice of so many tokens. Each is a pass of its
        own: a short one counts as what takes as long."""
        parts = list[tuple[Request, int]]()
        for request in self.correcting:
            if left < 1:
                break
            assert request.correction is not None
            parts.append((request, min(left, request.correction.num_left)))
            left -= max(request.correction.num_left, _LEAST[_WAITED])
        return parts

    def owes(self, seconds: float) -> bool:
        """Whether the others decode now, in the middle of a slice where they can.

        Args:
            seconds: of reading since the slice began.
        """
        if self.running:
            share = self._read_share
            self._owed += (seconds - self._paused_at) * (1.0 - share) / share
        self._paused_at = seconds
        # On a CPU several steps in a row: threads of torch's still spin during the first. A GPU has
        # none, and nothing is lost where it goes on sooner.
        part = 8 if self._reads_on_gpu else 2
        return self._kind != _WAITED and self._owed > self._slice_seconds / part

    @property
    def decodes_first(self) -> bool:
        """Whether those that run decode before more is read."""
        return bool(self.running) and self._owed > 0.0

    @property
    def reads_others(self) -> bool:
        """Whether short prompts are read between two layers of the last slice."""
        return not self._reads_on_gpu and self._kind != _WAITED

    def read_within(
        self, own: Sequence[Request], num_left: Callable[[Request], int]
    ) -> tuple[Request, int] | None:
        """A short prompt, and how much of it, that is read between two layers of the slice that
        reads `own`, which it does not begin like; None: there is none."""
        longest, most = max(map(num_left, own)), min(self._least[_ALONE], self._most_within)
        past = self._whole + sum(request.num_read for request in own)
        for request in self.reading:
            left = num_left(request)
            if (
                left <= _SHORT * longest
                and request not in own
                and past + _num_past(request, num_left) + most <= self._most_past_tokens
                and not _shares(own, request, num_left)
            ):
                return request, min(left, most)
        return None

    def was_read(self, num_tokens: int, seconds: float, within: float = 0.0) -> None:
        """A slice took so long, and reading others between its layers `within` of it: the next one
        is as much larger or smaller."""
        kind = self._kind
        size, wanted = self._sizes[kind], self._slice_seconds * self._seconds[kind]
        # A prompt's end says little, and so does more than that behind a long one.
        if size // 2 <= num_tokens <= size:
            size = int(size * min(_GROWTH[kind], max(0.5, wanted / (seconds - within))))
            size = max(self._least[kind], size)
            if kind != _WAITED:  # a growth of a quarter would be rounded away
                size = self._rounded(size)
            self._sizes[kind] = min(self.most_slice_tokens, size)
        self.owes(seconds)

    def _rounded(self, size: int) -> int:
        """On a GPU to a power of two, of which attention is twice as fast as of other slices."""
        if self._reads_on_gpu:
            size = 1 << round(math.log2(size))
        return min(self.most_slice_tokens, size)

    def was_decoded(self, seconds: float) -> None:
        """A step took so long."""
        self._owed -= seconds

    def waits_for_readers(self) -> None:
        """None of those that run can decode: a slice keeps none of them waiting."""
        self._owed = 0.0


def _num_past(request: Request, num_left: Callable[[Request], int]) -> int:
    """Tokens of its prompt that are read, or will be shared when it begins."""
    is_new = request.seq is None
    return len(request.prompt) - num_left(request) if is_new else request.num_read


def _shares(
    others: Iterable[Request], request: Request, num_left: Callable[[Request], int]
) -> bool:
    """Whether most of what has to be read of a prompt is the beginning of one that is being read:
    it waits for that."""
    if request.seq is not None:
        return False
    left = num_left(request)
    return any(2 * num_equal(other.ids, request.ids) >= left for other in others)
