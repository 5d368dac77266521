"""Connections that do not wait forever for a client's request, and leave file descriptors free."""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from offload.serve.errors import ApiError

REQUEST_SECONDS = 120.0  # from a connection, or the answer before, to the last byte of a request

# That one tick of the event loop accepts: beyond the limit of descriptors asyncio logs a traceback
# for each, and does nothing else.
BACKLOG = 128
_SPARE_FILES = 512  # descriptors for those, and for files

_Protocol: Any = AutoHTTPProtocol  # by httptools, where that is installed


class TimedConnection(_Protocol):  # type: ignore[misc]
    """uvicorn's, which would keep a connection that sends a byte now and then, and its file
    descriptor, for as long as the client likes."""

    _timer: asyncio.TimerHandle | None = None
    _has_part = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """As uvicorn's."""
        super().connection_made(transport)
        if len(self.connections) > _most_connections():
            waiting = [each for each in self.connections if each._timer is not None]
            if not waiting:
                self.transport.write(_answer(ApiError(503, "too many connections")))
                self.transport.close()
                return
            min(waiting, key=lambda each: each._timer.when())._is_late()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's."""
        self._has_part = True
        super().data_received(data)
        if not self._is_waiting:
            self._end_wait()

    def on_response_complete(self) -> None:
        """As uvicorn's."""
        super().on_response_complete()
        if not self.transport.is_closing() and self._is_waiting:
            self._wait()

    @property
    def _is_waiting(self) -> bool:
        """For a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _wait(self) -> None:
        self._end_wait()
        self._has_part = False
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._is_late)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        cycle = self.cycle
        if self._has_part and (
            cycle is None or cycle.response_complete or not cycle.response_started
        ):
            self.transport.write(_answer(ApiError(408, "the request did not come in time")))
        self._end_wait()
        self.transport.close()


def raise_file_limit() -> None:
    """Let this process have as many file descriptors as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _most_connections() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limit - _SPARE_FILES, limit // 2)


def _answer(error: ApiError) -> bytes:
    body = json.dumps(error.body).encode()
    lines = [
        f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}",
        *(f"{name}: {value}" for name, value in (error.headers or {}).items()),
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
