"""A request to an engine, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from cpu_ops.step_rows import ATTENDS_TO_ALL
from offload.decode.sampling import Sampler, SamplingOptions
from offload.engine.sampler import Chosen
from offload.engine.sampling_params import SamplingParams
from offload.engine.text import TextStream
from offload.runtime.correcting import RunningCorrection

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class RequestOutput:
    """What is new of a request.

    Attributes:
        tokens: chosen since the last output.
        text: that they add; "" where the engine has no tokenizer.
        prompt_scores: tokens of the prompt that were read since the last output, after its first,
            where `prompt_logprobs` asks for them.
        num_read: tokens of the prompt that are read, those that were shared included.
        num_cached: of these, what was there of an earlier prompt, or of the session.
        finish_reason: of the last output; None: more comes. "stop" for an end-of-sequence token, a
            stop token or a stop string.
        queued_seconds: before it was admitted; None: it waits.
        error: with the reason "error".
    """

    request_id: str
    tokens: tuple[Chosen, ...] = ()
    text: str = ""
    num_prompt_tokens: int = 0
    num_read: int = 0
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    prompt_scores: tuple[Chosen, ...] = ()
    queued_seconds: float | None = None


@dataclass(eq=False)
class Request:
    """The state of a request.

    Attributes:
        prompt: token ids; `ids` are the same.
        max_tokens: of the answer, as the context has room for.
        ends: tokens that end the answer.
        text: None: the engine has no tokenizer.
        on_output: called with each output in the thread that runs the engine, which waits for it.
        is_ready: whether its next token may be chosen now.
        seq: its sequence of the KV store; None: it waits, or is finished.
        num_read: tokens of `prompt` in the cache.
        queued_seconds: before it was first admitted; None: it waits for that.
        marks: tokens of the prompt at which later prompts may leave it.
        answer: tokens chosen so far; the last one is not in the cache.
        sampler: its random numbers; they do not depend on what runs at the same time.
        prompt_scores: that no output has had.
        session_id: that keeps its sequence for the next request.
        restoring: brings its sequence back from disk, in parts; None: it has come, or none will.
        is_preempted: its sequence is on disk until there is room.
        continues_session: it began with the sequence of an earlier one.
        correction: of its sequence, before its next token; None: it is not due.
        is_over: what it had is given back; `finish_reason` is known before.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    ends: frozenset[int]
    text: TextStream | None
    on_output: Callable[[RequestOutput], None] | None = None
    is_ready: Callable[[], bool] = lambda: True
    seq: int | None = None
    num_read: int = 0
    num_cached: int = 0
    marks: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrived: float = field(default_factory=time.monotonic)
    queued_seconds: float | None = None
    sampler: Sampler = field(init=False)
    prompt_scores: tuple[Chosen, ...] = ()
    session_id: str | None = None
    continues_session: bool = False
    restoring: Iterator[None] | None = None
    is_preempted: bool = False
    correction: RunningCorrection | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.ids = np.asarray(self.prompt, np.int64)
        params, generator = self.params, None
        if params.seed is not None:
            generator = torch.Generator().manual_seed(params.seed)
        options = SamplingOptions(params.temperature, params.top_k, params.top_p)
        self.sampler = Sampler(options, 1, generator)

    @property
    def most_tokens(self) -> int:
        """That it may come to have in the cache: the last of an answer is not kept."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def budget(self) -> int | None:
        """As of `DecodeAttention.budgets`; None: the policy's."""
        return ATTENDS_TO_ALL if self.params.exact else self.params.budget_tokens

    @property
    def is_read(self) -> bool:
        """Whether it decodes."""
        return self.num_read == len(self.prompt)

    @property
    def needs_logits(self) -> bool:
        """Whether a step cannot choose its next token by itself."""
        params = self.params
        has_min_p = params.temperature > 0.0 and params.min_p > 0.0
        return params.changes_logits or has_min_p or params.logprobs is not None or self.must_go_on

    @property
    def must_go_on(self) -> bool:
        """Whether its next token must not end it."""
        return len(self.answer) < self.params.min_tokens and bool(self.ends)

    def take(self, chosen: Chosen) -> RequestOutput:
        """The next token of the answer, and whether it is the last."""
        token = chosen.token
        self.sampler.take()
        self.answer.append(token)
        num_chosen = len(self.answer)
        may_end = num_chosen > self.params.min_tokens
        new, ended = "", may_end and token in self.ends
        if self.text is not None and not ended:
            new = self.text.add(token, may_stop=may_end)
            if new and self.params.ends_after is not None:
                ended = self.params.ends_after(new) and may_end
        if ended or (self.text is not None and self.text.is_stopped):
            self.finish_reason = "stop"
        elif num_chosen == self.max_tokens:
            self.finish_reason = "length"
        if self.text is not None and self.finish_reason is not None:
            new += self.text.end()
        return self.output((chosen,), new)

    def output(
        self,
        tokens: tuple[Chosen, ...] = (),
        text: str = "",
        error: BaseException | None = None,
    ) -> RequestOutput:
        """What there is to say now."""
        scores, self.prompt_scores = self.prompt_scores, ()
        return RequestOutput(
            self.request_id,
            tokens,
            text,
            len(self.prompt),
            self.num_read,
            self.num_cached,
            self.finish_reason,
            error,
            scores,
            self.queued_seconds,
        )
