"""uvicorn, and how it ends: requests that run are finished, those that come are refused."""

from __future__ import annotations

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


def guarded(served: Served, access: Access) -> tuple[Gate, ASGIApp]:
    """The application behind its gate, and all that a server runs."""
    gate = Gate(
        create_app(served),
        api_keys=access.api_keys,
        public=(*PUBLIC, "/v1/models") if access.public_models else PUBLIC,
        max_body_bytes=access.max_body_bytes,
    )
    if not access.cors_origins:
        return gate, gate
    origins = list(access.cors_origins)
    return gate, CORSMiddleware(
        gate, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT; a second one waits for nothing."""

    def __init__(
        self,
        served: Served,
        access: Access,
        on_start: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._served, self._on_start = served, on_start
        self.gate, app = guarded(served, access)
        self._shutdown_seconds, self._until = access.shutdown_seconds, 0.0
        super().__init__(
            uvicorn.Config(
                app,
                host=access.host,
                port=access.port,
                ws="none",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=2,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and say where it listens."""
        await super().startup(sockets)
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._on_start(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to close; the loop's next tick sees it."""
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
            if not await self._served.stop(lambda: self.force_exit):
                self.force_exit = True
            return True
        return False
