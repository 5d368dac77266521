"""A streamed answer: server-sent events, and a comment every second."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from offload.serve.answers import Answers, Choice
from offload.serve.errors import ApiError
from offload.serve.formats import Format

logger = logging.getLogger(__name__)

SEND_SECONDS = 30.0  # a client that has not read for so long is taken for one that left


class AnswerStream(EventSourceResponse):
    """The answer of a request; who leaves cancels it."""

    def __init__(self, answers: Answers, choices: Sequence[Choice], form: Format) -> None:
        self._answers = answers
        super().__init__(
            _events(answers, choices, form),
            ping=1,
            ping_message_factory=lambda: ServerSentEvent(comment=_progress(choices)),
            sep="\n",
            send_timeout=SEND_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.info("a client did not read its stream for %g seconds", SEND_SECONDS)
        finally:
            await self._answers.close()


def _progress(choices: Sequence[Choice]) -> str:
    read = sum(choice.num_read for choice in choices)
    total = sum(choice.num_prompt_tokens for choice in choices)
    return f"ping, {read} of {total} prompt tokens read"


async def _events(
    answers: Answers, choices: Sequence[Choice], form: Format
) -> AsyncIterator[dict[str, str]]:
    options, request = form.request.stream_options, form.request
    has_usage = options is not None and options.include_usage
    continuous = options is not None and options.continuous_usage_stats

    def chunk(choice: Choice, content: dict[str, Any]) -> dict[str, str]:
        made = {"index": choice.index, **content, "finish_reason": form.finish_reason(choice)}
        usage = {"usage": form.usage(choices) if continuous else None}
        return _event(form.chunk([made], **(usage if has_usage or continuous else {})))

    for choice in choices:
        first = form.first(choice)
        if first is not None:
            yield chunk(choice, first)
    try:
        async for index, output in answers:
            choice = choices[index]
            read = choice.num_read
            text, tokens = choice.take(output)
            if request.return_progress and choice.num_read > read:
                yield _event(form.chunk([], prompt_progress=_prompt_progress(choice)))
            if text or choice.finish_reason or (tokens and request.num_logprobs is not None):
                yield chunk(choice, form.delta(choice, text, tokens))
    except ApiError as error:
        yield _event(error.body)
    else:
        if has_usage:
            yield _event(form.chunk([], usage=form.usage(choices)))
    yield {"data": "[DONE]"}


def _prompt_progress(choice: Choice) -> dict[str, int]:
    return {
        "index": choice.index,
        "total": choice.num_prompt_tokens,
        "cache": choice.num_cached,
        "processed": choice.num_read,
    }


def _event(data: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(data, ensure_ascii=False)}
