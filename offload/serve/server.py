"""uvicorn, and how it begins and ends: it listens before the model is loaded; at the end answers
that have begun are finished, prompts that are still read end with an error, and what comes is
refused."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from offload.serve.app import Served, create_app
from offload.serve.connections import BACKLOG, REQUEST_SECONDS, TimedConnection
from offload.serve.gate import PUBLIC, Gate
from offload.serve.request_log import HEADER, RequestLog

# After a first signal prompts that are still read have so long: short ones come to an answer.
_PROMPT_SECONDS = 0.5
_ERROR_SECONDS = 1.0  # in which clients take the error that ends their request


@dataclass(frozen=True)
class Access:
    """Where the server listens, and to whom.

    Attributes:
        shutdown_seconds: in which answers that have begun may finish after SIGTERM.

    Raises:
        ValueError: a key that no header can have.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    public_models: bool = False
    max_body_bytes: int = 8 * 2**20
    cors_origins: tuple[str, ...] = ()
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not all(key.isascii() for key in self.api_keys):
            raise ValueError("an API key has a character that is not ASCII; clients cannot send it")


def guarded(access: Access, app: ASGIApp | None = None) -> tuple[Gate, ASGIApp]:
    """The gate before an application that there is, or will be, and all that a server runs."""
    gate = Gate(
        app,
        api_keys=access.api_keys,
        public=(*PUBLIC, "/v1/models") if access.public_models else PUBLIC,
        max_body_bytes=access.max_body_bytes,
    )
    if not access.cors_origins:
        return gate, RequestLog(gate)
    shared = CORSMiddleware(
        gate,
        allow_origins=list(access.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[HEADER],
    )
    return gate, RequestLog(shared)


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT; a second one waits for nothing, nor does one while it loads.
    Requests that do not come to their end get an error, streamed or not.

    Args:
        load: makes what is served, in a thread. Until then requests get a 503.
        say: takes a line when it listens, when it serves, and when it ends.

    Attributes:
        served: None until it is loaded.
        url: where it listens.
    """

    def __init__(
        self,
        load: Callable[[], Served],
        access: Access,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._load, self._say = load, say
        self.served: Served | None = None
        self._failure: Exception | None = None
        self.gate, app = guarded(access)
        self._shutdown_seconds, self._until, self._prompts_until = access.shutdown_seconds, 0.0, 0.0
        self._is_told = self._at_once = False
        super().__init__(
            uvicorn.Config(
                app,
                host=access.host,
                port=access.port,
                http=TimedConnection,
                backlog=BACKLOG,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=2,
                # Clients that ask every few seconds would meet uvicorn's 5 s at the wrong moment.
                timeout_keep_alive=int(REQUEST_SECONDS),
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's.

        Raises:
            OSError: it cannot listen at this address.
            Exception: of `load`.
        """
        super().run(sockets)
        if self._failure is not None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then it loads."""
        try:
            await super().startup(sockets or await _bound(self.config.host, self.config.port))
        except _AddressError as error:  # said when uvicorn has ended
            self._failure, self.should_exit = error, True
            return
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._say(f"loading; {self.url} answers 503 until then")
        self._loading = asyncio.create_task(self._start())

    async def _start(self) -> None:
        def load() -> tuple[Served, ASGIApp]:
            served = self._load()
            app = create_app(served)
            served.engine.engine.start()
            return served, app

        try:
            self.served, self.gate.app = await asyncio.to_thread(load)
        except Exception as error:
            self._failure, self.should_exit = error, True
        else:
            self._say(f"serving at {self.url}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to close; the loop's next tick sees it."""
        if self.served is None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        now = time.monotonic()
        if self.gate.is_closing:
            self._until, self._at_once = now, True
        else:
            self._until = now + self._shutdown_seconds
            self._prompts_until = min(self._until, now + _PROMPT_SECONDS)
            self.gate.is_closing = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now."""
        served = self.served
        if served is not None and self.gate.is_closing:
            self._tell(served)
            now = time.monotonic()
            if now >= self._prompts_until:
                served.engine.cancel_all(also_begun=False)
            if self.gate.num_inside == 0 or now >= self._until:
                # Before `should_exit`, at which streams are cut.
                await self._end_requests(served)
                self.should_exit = True
        if await super().on_tick(counter):
            if served is not None:
                if not self.gate.is_closing:
                    await self._end_requests(served)
                if not await served.stop(lambda: self._at_once):
                    self.force_exit = True
            return True
        return False

    def _tell(self, served: Served) -> None:
        """What is waited for, once."""
        if self._is_told:
            return
        self._is_told = True
        parts = []
        if num_answering := served.engine.num_answering:
            seconds = f"up to {self._shutdown_seconds:g} s"
            parts.append(f"waiting {seconds} for {_number(num_answering, 'answer')} to finish")
        if num_reading := served.engine.num_reading:
            parts.append(f"ending {_number(num_reading, 'request')} whose prompt is still read")
        if served.engine.engine.sessions is not None:
            parts.append(f"then writing sessions, up to {served.flush_seconds:g} s")
        if parts:
            self._say(f"stopping: {', '.join(parts)}; Ctrl-C again stops at once")

    async def _end_requests(self, served: Served) -> None:
        """Those that run end with an error, of which clients are told."""
        until = time.monotonic() + _ERROR_SECONDS
        while self.gate.num_inside and time.monotonic() < until:
            served.engine.cancel_all()
            await asyncio.sleep(0.01)


class _AddressError(OSError):
    """With what to do about it."""


async def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets at all addresses of a host, as uvicorn would make them: it ends the process where one
    of them is in use.

    Raises:
        _AddressError: there is none, or it is in use.
    """
    try:
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, host, port, start_serving=False
        )
    except OSError as error:
        raise _AddressError(_why_not(host, port, error)) from error
    sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    server.close()
    return sockets


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; give another one with --port (0: a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not allowed to this user; give --port 1024 or above"
    return f"cannot listen at {host}: {error.strerror or error}; give another address with --host"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
