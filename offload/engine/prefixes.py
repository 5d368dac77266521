"""Prompts that were read, for those that begin as they do."""

from __future__ import annotations

from contextlib import suppress

from offload.engine.prefix_tree import PrefixTree
from offload.engine.request import Request
from offload.runtime.runtime import Runtime
from offload.system.errors import HostBudgetError

_LEAST_SHARED = 16  # tokens: to read fewer is as quick
# A chat's next prompt may differ in what introduces the answer, which is shorter. To read that by
# itself is worth it in prompts of more than the second number.
_INTRODUCTION, _LEAST_MARKED = 16, 64


class Prefixes:
    """Sequences of earlier requests, whose first pages others share.

    Shared are tokens that were read, and those that were decoded with attention to all before them:
    keys and values of others, which a policy decoded sparsely, are not those of a prompt.

    Args:
        is_enabled: else nothing is kept.
    """

    def __init__(self, runtime: Runtime, *, is_enabled: bool) -> None:
        self._is_enabled, self._tree = is_enabled, PrefixTree()
        self._sequences = runtime.sequences
        policy = runtime.config.policy
        self._is_exact = not policy.selects
        self._dense_tokens = 0 if self._is_exact else policy.dense_tokens
        # The policy wants to see the last queries of a prompt.
        self._least_read = 1 if self._is_exact else max(1, policy.state.observed_queries)

    def num_left(self, request: Request) -> int:
        """Tokens of its prompt that have to be read."""
        if request.seq is not None:
            return self.next_stop(request) - request.num_read
        shared = self._shared(request)
        return len(request.prompt) - (0 if shared is None else shared[1])

    def begin(self, request: Request) -> None:
        """Give it a sequence, with what of its prompt was read before."""
        shared = self._shared(request)
        if shared is None:
            request.seq = self._sequences.new()
        else:
            request.seq = self._sequences.fork_prefix(*shared)
            request.num_read = request.num_cached = shared[1]

    def next_stop(self, request: Request) -> int:
        """The last token of its prompt that its next slice may have."""
        self._choose_marks(request)
        places = (place for place in request.marks if place > request.num_read)
        return min(places, default=len(request.prompt))

    def _choose_marks(self, request: Request) -> None:
        """Where another prompt leaves this one, as far as it is known, and before its last
        tokens."""
        is_kept = self._is_enabled or request.session_id is not None
        if request.marks or not (is_kept and self._sequences.is_cut_at_marks):
            return
        size, found = len(request.prompt), self._tree.longest(request.prompt)
        leaves = 0 if found is None else found[1]
        if _LEAST_SHARED <= leaves < size:
            request.marks.append(leaves)
        if size - request.num_read > _LEAST_MARKED:
            request.marks.append(size - _INTRODUCTION)
        request.marks.append(size)

    def mark(self, request: Request) -> None:
        """So much of its prompt is read."""
        if request.seq is not None and request.num_read in request.marks:
            self._sequences.mark(request.seq)

    def keep(self, request: Request) -> None:
        """Its prompt, which was just read."""
        if not self._is_enabled or request.seq is None:
            return
        if request.continues_session and not self._is_exact:
            return  # some of it was decoded
        with suppress(HostBudgetError):
            seq = self._sequences.fork_prefix(request.seq, len(request.prompt))
            self._sequences.free(self._tree.add(request.prompt, seq))

    def end(self, request: Request) -> None:
        """It is finished: keep its sequence or free it."""
        if request.seq is None:
            return
        surplus = [request.seq]
        if self._is_enabled and self._was_exact(request) and request.is_read:
            surplus = self._tree.add([*request.prompt, *request.answer[:-1]], request.seq)
        self._sequences.free(surplus)
        request.seq = None

    def _was_exact(self, request: Request) -> bool:
        """Whether each of its tokens was read, or decoded with attention to all before it."""
        if self._is_exact:
            return True
        if request.continues_session or request.params.budget_tokens is not None:
            return False
        num_tokens = len(request.prompt) + len(request.answer)
        return request.params.exact or num_tokens <= self._dense_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes, at least, that would be free without what is kept."""
        store, seqs = self._sequences.store, self._tree.seqs()
        num_pages = sum(map(store.num_unshared_pages, seqs))
        states = sum(self._sequences.bytes_at(store.kv_len(seq)) for seq in seqs)
        return num_pages * store.page_bytes + states

    def drop(self) -> bool:
        """Free what has been unused for the longest time; False: there is nothing."""
        seq = self._tree.least_recent()
        if seq is not None:
            self._sequences.free([seq])
        return seq is not None

    def _shared(self, request: Request) -> tuple[int, int] | None:
        """A sequence, and how many of its first tokens begin the prompt and need not be read."""
        if request.params.prompt_logprobs is not None:
            return None  # all of it is read
        prompt = request.prompt
        most = len(prompt) - self._least_read

        def cut(seq: int, shared: int) -> int:
            return self._sequences.longest_cut(seq, min(shared, most))

        found = self._tree.longest(prompt, cut)
        return None if found is None or found[1] < _LEAST_SHARED else found
