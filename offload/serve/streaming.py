"""A streamed answer: server-sent events, and a comment every second."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from offload.serve.answers import Answers, Choice
from offload.serve.formats import Format

logger = logging.getLogger(__name__)

_SEP = "\n"  # some clients split events at two of these
SEND_SECONDS = 30.0  # a client that has not read for so long is taken for one that left


class AnswerStream(EventSourceResponse):
    """The answer of a request; who leaves cancels it."""

    def __init__(self, answers: Answers, choices: Sequence[Choice], form: Format) -> None:
        self._answers = answers
        super().__init__(
            form.events(answers, choices),
            ping=1,
            ping_message_factory=lambda: ServerSentEvent(comment=_progress(choices), sep=_SEP),
            sep=_SEP,
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
