"""One line of the log for each request: how it ended, and what it took. It has no text of prompts
or answers."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.serve.log_lines import request_id

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
_SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_POLLED = ("/health", "/ping", "/metrics", "/load")
_MOST_CHARACTERS = 300  # of an error, or a route
_CLIENT_LEFT = 499


class Counted(Protocol):
    """What is told of a choice."""

    num_prompt_tokens: int
    num_read: int
    num_cached: int
    num_tokens: int
    finish_reason: str | None


@dataclass
class RequestRecord:
    """A request, while it is answered.

    Attributes:
        request_id: the client's, or a new one.
        status: that was sent; 499 where the client left before.
        error: one line, without what the request has in its fields.
        choices: of the answer; empty: none is made.
        choices_per_prompt: one behind the other.
        is_whole: the last byte of the answer was sent.
        has_left: the client, before that.
    """

    method: str = ""
    route: str = ""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: int | None = None
    error: str | None = None
    choices: Sequence[Counted] = ()
    choices_per_prompt: int = 1
    is_whole: bool = False
    has_left: bool = False

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._worst = 0  # status, of errors that end a stream, too
        self._queued: float | None = None
        self._first = self._last = 0.0
        self._num_gaps = 0

    def fails(self, status: int, error: str) -> None:
        """It ends with an error, which is its answer or, with a status of 200, in its stream."""
        self._worst, self.error = status, error

    def was_queued(self, seconds: float) -> None:
        """A choice was admitted; the last of them counts."""
        self._queued = max(seconds, self._queued or 0.0)

    def took_token(self, now: float, *, is_first: bool) -> None:
        """A choice has its first or next token, at `now` by time.monotonic."""
        self._first = self._first or now
        self._last = now
        self._num_gaps += not is_first

    def leaves(self) -> None:
        """The client has closed the connection."""
        if not self.is_whole:
            self.has_left, self.status = True, self.status or _CLIENT_LEFT

    @property
    def end(self) -> str | None:
        """Why the answer ends: cancelled, error, or what its choices say; None: it has none."""
        if self.has_left or not (self.is_whole or self.error):
            return "cancelled"
        if self.error:
            return "error"
        return ",".join(sorted({c.finish_reason or "" for c in self.choices})) or None

    def fields(self) -> dict[str, Any]:
        """What its line has, by name."""
        told: dict[str, Any] = {"method": self.method, "route": self.route, "status": self.status}
        told["seconds"] = round(time.monotonic() - self._start, 3)
        if self.choices:
            firsts = self.choices[:: self.choices_per_prompt]  # as `usage` counts a prompt
            told["prompt_tokens"] = sum(choice.num_prompt_tokens for choice in firsts)
            read = sum(choice.num_read for choice in firsts)
            if read < told["prompt_tokens"]:
                told["read_tokens"] = read
            told["cached_tokens"] = sum(choice.num_cached for choice in firsts)
            told["answer_tokens"] = sum(choice.num_tokens for choice in self.choices)
        if self._queued is not None:
            told["queued_seconds"] = round(self._queued, 3)
        if self._first:
            told["ttft_seconds"] = round(self._first - self._start, 3)
        if self._last > self._first:
            told["tokens_per_second"] = round(self._num_gaps / (self._last - self._first), 2)
        end = self.end
        if end is not None:
            told["end"] = end
        if self.error and end == "error":
            told["error"] = self.error.split("\n")[0][:_MOST_CHARACTERS]
        return told | {"id": self.request_id}

    def log(self) -> None:
        """Write its line."""
        told, level = self.fields(), logging.INFO
        if told.get("end") == "error" and self._worst >= 500:
            level = logging.ERROR if self._worst == 500 else logging.WARNING
        if self.route in _POLLED:
            level = logging.DEBUG
        line = "%s %s %s", self.method, self.route, self.status
        logger.log(level, *line, extra={"fields": told})


_current: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


def current() -> RequestRecord:
    """The request whose task this is; outside of any, one that is not logged."""
    return _current.get() or RequestRecord()


class RequestLog:
    """An ASGI middleware that is the first to see a request, and the last."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope["method"], quote(scope["path"])[:_MOST_CHARACTERS])
        given = Headers(scope=scope).getlist(HEADER)
        if len(given) == 1 and _SANE.fullmatch(given[0]):
            record.request_id = given[0]
        _current.set(record)  # to the end of the task, so that uvicorn's lines have the id, too
        request_id.set(record.request_id)

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                record.leaves()
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                MutableHeaders(scope=message)[HEADER] = record.request_id
            elif not message.get("more_body", False):
                record.is_whole = True
            await send(message)

        try:
            await self._app(scope, received, sent)
        except Exception as error:  # uvicorn writes its traceback
            record.fails(500, type(error).__name__)
            record.status = record.status or 500
            raise
        finally:
            record.log()
