"""An application of Ray Serve, each of whose replicas is this server.

Sessions stick to replicas by the header X-Session-ID. Where a replica died, they go on from files.
"""

# Ray reads the annotation of `app`, which must not be a string.
import math
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from offload.cli.commands import add_command
from offload.cli.serve import prepare
from offload.serve.app import create_app
from offload.serve.server import Access, guarded

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_MOST_BESIDE = 64  # requests that the engine does not see, or that it refuses


class Options(BaseModel):
    """Arguments of the application.

    Attributes:
        command: the arguments of `offload serve`, MODEL first, as a shell takes them.
        num_cpus: of each replica, and its threads where `command` has no --threads.
        num_gpus: of each replica; `command` then has --device cuda.
    """

    model_config = ConfigDict(extra="forbid")

    command: str
    num_replicas: int = Field(1, ge=1)
    num_cpus: float = Field(1, gt=0)
    num_gpus: float = Field(0, ge=0)

    def arguments(self) -> list[str]:
        """Arguments of `offload serve`."""
        given = shlex.split(self.command)
        return ["--threads", str(math.ceil(self.num_cpus)), *given]


def _command() -> Any:
    cli = typer.Typer(pretty_exceptions_enable=False)
    add_command(cli, prepare)
    return typer.main.get_command(cli)


class Replica:
    """`offload serve`, but for who listens."""

    def __init__(self, arguments: list[str]) -> None:
        load_served, self._access = _command().main(arguments, standalone_mode=False)
        self._served = load_served()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self._served.engine.engine.start()
            yield
            await self._served.stop()

        _, app = guarded(self._access, create_app(self._served))
        return Starlette(routes=[Mount("", app)], lifespan=lifespan)

    def check_health(self) -> None:
        """Ray replaces a replica whose engine failed."""
        failure = self._served.engine.engine.failure
        if failure is not None:
            raise RuntimeError(f"the engine failed: {failure}")


def app(options: Options) -> serve.Application:
    """For `serve run offload.cli.ray_app:app command='MODEL --session-dir FOLDER'`.

    Raises:
        click.UsageError: `command` has an option that `offload serve` lacks.
        ValueError: it says where to listen, which is Ray's.
    """
    arguments = options.arguments()
    given = _command().make_context("offload serve", [*arguments]).params
    if (given["host"], given["port"]) != (Access.host, Access.port):
        raise ValueError("--host and --port: Ray's proxy listens; see http_options of Ray Serve")
    make = serve.deployment(
        name="offload",
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=given["max_num_seqs"] + given["max_queued"] + _MOST_BESIDE,
        graceful_shutdown_timeout_s=2 * given["shutdown_seconds"] + 15,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    return make(serve.ingress()(Replica)).bind(arguments)
