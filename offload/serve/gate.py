"""Before every route: who may come in, with how much, and whether we load or close."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.serve.errors import ApiError
from offload.serve.metrics import while_loading
from offload.serve.page import FILES

_HEALTH = ("/health", "/ping")
PUBLIC = (*FILES, *_HEALTH)


class Gate:
    """An ASGI middleware.

    Args:
        api_keys: one of them must come as bearer; none: everybody may come in.
        public: paths that need no key.

    Attributes:
        app: what answers; None while the model loads.
        is_closing: requests are refused, and load balancers are told to send none.
        num_inside: that are being answered.
    """

    def __init__(
        self,
        app: ASGIApp | None = None,
        *,
        api_keys: Sequence[str] = (),
        public: Collection[str] = PUBLIC,
        max_body_bytes: int,
    ) -> None:
        self.app, self._public, self._max_body_bytes = app, public, max_body_bytes
        self._keys = [key.encode() for key in api_keys]
        self.is_closing, self.num_inside = False, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, got {scope['type']!r}")
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        app = self.app
        if scope["method"] == "HEAD":  # as GET; uvicorn sends no body
            scope = {**scope, "method": "GET"}
        if app is None:
            await _while_loading(scope["path"])(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise self._too_large()
            return message

        self.num_inside += 1
        try:
            await app(scope, limited, send)
        finally:
            self.num_inside -= 1

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._keys and scope["path"] not in self._public:
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self._is_key(given.strip().encode()):
                raise ApiError(401, "missing or wrong API key", code="invalid_api_key")
        if self.is_closing and scope["path"] in _HEALTH:
            raise _unhealthy("draining", "the server is shutting down")
        if self.is_closing and scope["method"] == "POST":
            raise ApiError(503, "the server is shutting down")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise self._too_large()

    def _is_key(self, given: bytes) -> bool:
        return sum(hmac.compare_digest(key, given) for key in self._keys) > 0

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_body_bytes} bytes")


def _while_loading(path: str) -> Response:
    if path == "/metrics":
        return while_loading()
    if path in _HEALTH:
        return _unhealthy("loading", "the model is loading").response()
    return ApiError(503, "the model is loading", code="loading").response()


def _unhealthy(status: str, message: str) -> ApiError:
    error = ApiError(503, message, code=status)
    error.body["status"] = status
    return error
