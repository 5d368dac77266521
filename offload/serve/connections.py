"""Connections that do not wait forever for a client's request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from offload.serve.errors import ApiError

REQUEST_SECONDS = 120.0  # from a connection, or the answer before, to the last byte of a request

_Protocol: Any = AutoHTTPProtocol  # by httptools, where that is installed


class TimedConnection(_Protocol):  # type: ignore[misc]
    """uvicorn's, which would keep a connection that sends a byte now and then, and its file
    descriptor, for as long as the client likes."""

    _timer: asyncio.TimerHandle | None = None
    _has_part = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """As uvicorn's."""
        super().connection_made(transport)
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
            self.transport.write(_too_late())
        self.transport.close()


def _too_late() -> bytes:
    error = ApiError(408, f"the request did not come within {REQUEST_SECONDS:g} seconds")
    body = json.dumps(error.body).encode()
    head = "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
