"""Grammars at work: compiled, and as masks of logits."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import llguidance.hf
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from offload.serve.errors import ApiError
from offload.serve.structured import Constraint

# llguidance compiles by recursion, and without bounds where regular expressions intersect: a new
# grammar is tried in a process of its own, with less stack than it has here afterwards.
_STACK_BYTES = 64 * 2**20
_TRIAL_SECONDS = 5
_TRIAL = """
import resource, sys
for kind, most in (("AS", 2**32), ("STACK", 2**23), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
from llguidance import LLMatcher, LLParserLimits
limits = LLParserLimits(verbose_errors=False)
print(LLMatcher.validate_grammar(sys.stdin.buffer.read().decode(), limits=limits))
"""
_stack_size = threading.Lock()


@dataclass(frozen=True)
class SchemaLimits:
    """Limits of what one request may have compiled, all its schemas and grammars together."""

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
        grammar = await asyncio.to_thread(self._checked, constraint)
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._thread, self._compile, grammar)
        if _is_stuck(matcher):
            why = _why(matcher)
            raise _refused(constraint, f"no answer satisfies it, or it is too complex: {why}")
        return matcher

    def _checked(self, constraint: Constraint) -> str:
        if not self._ends:
            raise _refused(constraint, "the model has no end-of-sequence token")
        level = [constraint.schemas]
        for _ in range(self._limits.max_depth + 1):
            level = [item for value in level for item in _items(value, constraint)]
        if level:
            raise _refused(constraint, f"it is more than {self._limits.max_depth} levels deep")
        try:
            grammar = constraint.grammar()
            size = len(grammar.encode())
        except UnicodeEncodeError as error:
            raise _refused(constraint, f"it is no text: {error.reason}") from error
        if size > self._limits.max_bytes:
            raise _refused(constraint, f"{size} bytes are more than {self._limits.max_bytes}")
        reason = re.split(r"\n +\d+ \| ", _trial(grammar))[0]  # and not all of the grammar
        if reason:
            raise _refused(constraint, " ".join(reason.split())[:300])
        return grammar

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(1, "offload-grammars")
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
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

    def _compile(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()
        return matcher


@lru_cache(maxsize=64)
def _trial(grammar: str) -> str:
    """Why it cannot be compiled; else empty."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL],
            input=grammar.encode(),
            capture_output=True,
            timeout=_TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_TRIAL_SECONDS} seconds to compile"
    if done.returncode < 0:
        return "it is too complex to compile"
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    return done.stdout.decode().strip()


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
            raise RuntimeError(f"the grammar ends early: {_why(self._matcher)}")
        return logits.masked_fill_(~allowed[: len(logits)], -torch.inf)


def _is_stuck(matcher: LLMatcher) -> bool:
    return matcher.is_stopped() and not matcher.is_accepting()


def _why(matcher: LLMatcher) -> str:
    return (matcher.get_error() or matcher.stop_reason()).split("\n")[0]


def _items(value: Any, constraint: Constraint) -> Iterable[Any]:
    """Items of a JSON value; what llguidance accepts in it but does not keep to is refused."""
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
