"""The choices of one HTTP request, as they come from the engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from offload.engine.async_engine import AsyncEngine
from offload.engine.engine import Engine
from offload.engine.request import RequestOutput
from offload.engine.sampler import Chosen
from offload.engine.sampling_params import SamplingParams
from offload.engine.sessions import SessionInUseError
from offload.serve.errors import ApiError, of_engine
from offload.serve.metrics import Metrics
from offload.serve.request_log import current


@dataclass(frozen=True)
class Job:
    """A choice to be made: the answer to `prompt` of this index."""

    prompt: Sequence[int]
    params: SamplingParams
    session_id: str | None = None


@dataclass
class Choice:
    """A choice so far.

    Attributes:
        ends: tokens that are no part of `text` where they end it.
        shown: the tokens of `text`, without what ended it.
        only_echoes: what comes of the answer is dropped.
        prompt_scores: logprobs of the prompt's tokens after the first.
    """

    index: int
    ends: set[int]
    only_echoes: bool = False
    text: str = ""
    shown: list[Chosen] = field(default_factory=list)
    prompt_scores: list[Chosen] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_read: int = 0
    num_cached: int = 0
    _held: list[Chosen] = field(default_factory=list)

    def take(self, output: RequestOutput) -> tuple[str, list[Chosen]]:
        """What it adds to `text` and to `shown`: tokens wait until their text is out."""
        if self.only_echoes:
            reason: Literal["length"] | None = "length" if output.finish_reason else None
            output = replace(output, tokens=(), text="", finish_reason=reason)
        self.num_prompt_tokens, self.num_read = output.num_prompt_tokens, output.num_read
        self.num_cached = output.num_cached
        self.num_tokens += len(output.tokens)
        self.prompt_scores += output.prompt_scores
        self.finish_reason = output.finish_reason
        self._held += output.tokens
        if output.finish_reason == "stop" and self._held[-1].token in self.ends:
            self._held.pop()
        new: list[Chosen] = []
        if output.text or output.finish_reason == "length":
            new, self._held = self._held, []
        self.text += output.text
        self.shown += new
        return output.text, new


class Answers:
    """Outputs of several requests to the engine, each with the index of its choice."""

    def __init__(
        self,
        engine: Engine,
        streams: Sequence[AsyncIterator[RequestOutput]],
        metrics: Metrics,
    ) -> None:
        self._engine, self._metrics, self._start = engine, metrics, time.monotonic()
        self._record = current()
        self._queue: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue(16)
        self._left = len(streams)
        self._tasks = [asyncio.create_task(self._pump(i, s)) for i, s in enumerate(streams)]

    @classmethod
    async def start(cls, engine: AsyncEngine, jobs: Sequence[Job], metrics: Metrics) -> Answers:
        """Have all of them answered, or none.

        Raises:
            ApiError: one was refused.
        """
        streams = []
        try:
            for job in jobs:
                name = f"{current().request_id}-{secrets.token_hex(4)}"  # clients may repeat theirs
                streams.append(engine.generate(job.prompt, job.params, name, job.session_id))
                await anext(streams[-1])
        except BaseException as error:
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]
            if isinstance(error, Exception):
                raise of_engine(error) from error
            raise
        return cls(engine.engine, streams, metrics)

    async def _pump(self, index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(stream) as outputs:  # type: ignore[type-var]
                is_queued, last = True, None  # when a token came
                async for output in outputs:
                    now = time.monotonic()
                    if is_queued and output.queued_seconds is not None:
                        is_queued = False
                        self._record.was_queued(output.queued_seconds)
                        self._metrics.queued.observe(output.queued_seconds)
                    if output.tokens:
                        self._record.took_token(now, is_first=last is None)
                        if last is None:
                            self._metrics.first_token.observe(now - self._start)
                        else:
                            self._metrics.inter_token.observe(now - last)
                        last = now
                    if output.finish_reason in ("stop", "length"):
                        self._metrics.answer.observe(now - self._start)
                    await self._queue.put((index, output))
        except Exception as error:
            await self._queue.put((index, error))

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Until the last output of each.

        Raises:
            ApiError: one failed, or the server stops.
        """
        while self._left:
            index, output = await self._queue.get()
            if isinstance(output, Exception):
                raise self._told(self._failure(output)) from output
            assert isinstance(output, RequestOutput)
            if output.finish_reason == "cancelled":
                raise self._told(ApiError(503, "the server is shutting down"))
            self._left -= output.finish_reason is not None
            yield index, output

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, SessionInUseError):
            return of_engine(error)
        status = 500 if self._engine.failure is None else 503
        return ApiError(status, f"{type(error).__name__}: {error}")

    def _told(self, error: ApiError) -> ApiError:
        """The log tells it, where it is an event of a stream, too."""
        self._record.fails(error.status_code, error.logged)
        return error

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
