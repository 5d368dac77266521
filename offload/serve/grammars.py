"""Grammars at work: compiled, and as masks of logits."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance.hf
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from offload.serve.errors import ApiError
from offload.serve.structured import Constraint

# llguidance compiles by recursion, and an overflow would end the process. A byte of a grammar was
# seen to take 1.6 KB of stack.
_STACK_BYTES_EACH = 8192
_stack_size = threading.Lock()


@dataclass(frozen=True)
class SchemaLimits:
    """Of what a request may have compiled: all schemas and grammars of it together."""

    max_bytes: int = 64 * 2**10
    max_depth: int = 64


class Grammars:
    """Compiles constraints for a tokenizer.

    Args:
        ends: tokens that end an answer.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, ends: Sequence[int], limits: SchemaLimits
    ) -> None:
        self._hf, self._ends, self._limits = tokenizer, list(ends), limits
        self._vocab_size = max(vocab_size, len(tokenizer))

    async def compile(self, constraint: Constraint) -> LLMatcher:
        """A matcher to be copied, made in a thread.

        Raises:
            ApiError: too large, wrong, not supported, or nothing satisfies it.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._compile, constraint)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(1, "offload-grammars")
        with _stack_size:
            before = threading.stack_size(2**24 + _STACK_BYTES_EACH * self._limits.max_bytes)
            try:
                pool.submit(int)  # its thread begins
            finally:
                threading.stack_size(before)
        return pool

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return llguidance.hf.from_tokenizer(
            self._hf, n_vocab=self._vocab_size, eos_token=self._ends
        )

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if not self._ends:
            raise _refused(constraint, "the model has no end-of-sequence token")
        level = [constraint.schemas]
        for _ in range(self._limits.max_depth + 1):
            level = [item for value in level for item in _items(value, constraint)]
        if level:
            raise _refused(constraint, f"it is more than {self._limits.max_depth} levels deep")
        grammar = constraint.grammar()
        size = len(grammar.encode(errors="replace"))
        if size > self._limits.max_bytes:
            raise _refused(constraint, f"{size} bytes are more than {self._limits.max_bytes}")
        matcher = LLMatcher(
            self._tokenizer,
            grammar,
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),
        )
        if matcher.is_error():
            reason = re.split(r"\n +\d+ \| ", matcher.get_error())[0]  # and not all of the grammar
            raise _refused(constraint, " ".join(reason.split())[:300])
        matcher.compute_bitmask()
        if _is_stuck(matcher):
            raise _refused(constraint, "no answer satisfies it")
        return matcher


class Mask:
    """A logits processor of one answer: nothing but what the grammar has next."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher, self._num_ids = matcher, 0

    def __call__(self, ids: Sequence[int], logits: Tensor) -> Tensor:
        """As `LogitsProcessor`.

        Raises:
            RuntimeError: a limit of llguidance's was reached.
        """
        if self._num_ids:
            self._matcher.consume_tokens(list(ids[self._num_ids :]))
        self._num_ids = len(ids)
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.bool)
        if _is_stuck(self._matcher):
            raise RuntimeError(f"the grammar ends early: {self._matcher.stop_reason()}")
        return logits.masked_fill_(~allowed[: len(logits)], -torch.inf)


def _is_stuck(matcher: LLMatcher) -> bool:
    return matcher.is_stopped() and not matcher.is_accepting()


def _items(value: Any, constraint: Constraint) -> Iterable[Any]:
    """Of JSON; what llguidance accepts in it and does not keep to is refused."""
    if isinstance(value, (int, float)) and abs(value) > 2**53:
        raise _refused(constraint, f"{value} is beyond 2**53, where numbers are not exact")
    if isinstance(value, dict):
        least = value.get("minProperties", 0)
        if isinstance(least, (int, float)) and least > 1:  # one name twice would do
            raise _refused(constraint, "minProperties beyond 1 is not supported; see required")
        return value.values()
    return value if isinstance(value, list) else ()


def _refused(constraint: Constraint, reason: str) -> ApiError:
    return ApiError(400, f"{constraint.field}: {reason}", param=constraint.field)
