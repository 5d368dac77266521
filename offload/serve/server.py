"""uvicorn, and how it begins and ends: it listens before the model is loaded; at the end requests
that run are finished, those that come are refused."""

from __future__ import annotations

import asyncio
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
from offload.serve.gate import PUBLIC, Gate
from offload.serve.request_log import HEADER, RequestLog


@dataclass(frozen=True)
class Access:
    """Where the server listens, and to whom.

    Attributes:
        shutdown_seconds: in which requests may finish after SIGTERM.

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

    Args:
        load: makes what is served, in a thread. Until then requests get a 503.
        say: takes a line when it listens, and one when it serves.

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
        self._shutdown_seconds, self._until = access.shutdown_seconds, 0.0
        super().__init__(
            uvicorn.Config(
                app,
                host=access.host,
                port=access.port,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=2,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's.

        Raises:
            Exception: of `load`.
        """
        super().run(sockets)
        if self._failure is not None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then it loads."""
        await super().startup(sockets)
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
        if self.gate.is_closing:
            self.should_exit = self.force_exit = True
        else:
            self._until = time.monotonic() + self._shutdown_seconds
            self.gate.is_closing = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now."""
        if self.gate.is_closing and (self.gate.num_inside == 0 or time.monotonic() >= self._until):
            self.should_exit = True
        if await super().on_tick(counter):
            # Streams that run end with an error.
            served = self.served
            if served is not None and not await served.stop(lambda: self.force_exit):
                self.force_exit = True
            return True
        return False
