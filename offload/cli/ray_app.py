"""An application of Ray Serve, each of whose replicas is this server.

Sessions stick to replicas by the header X-Session-ID, or prompts by what they share. Where a
replica died or was replaced, sessions go on from files.
"""

# Ray reads the annotation of `app`, which must not be a string.
import math
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message

from offload.cli.commands import add_command
from offload.cli.ray_prefix import ROUTER as PREFIX_ROUTER
from offload.cli.ray_prefix import Asked, Front, answered
from offload.cli.serve import prepare
from offload.serve.app import create_app
from offload.serve.server import Access, guarded

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_MOST_BESIDE = 64  # requests that the engine does not see, or that it refuses
_MOST_OF_FRONT = 10_000  # requests, which it only hands on


class Options(BaseModel):
    """Arguments of the application.

    Attributes:
        command: the arguments of `offload serve`, MODEL first, as a shell takes them.
        autoscaling_config: that of Ray Serve, instead of `num_replicas`; without its
            target_ongoing_requests, that is --max-num-seqs of `command`.
        router: where a request goes: to its session's replica, or to that which has read most of
            its prompt.
        num_cpus: of each replica, and its threads where `command` has no --threads.
        num_gpus: of each replica; `command` then has --device cuda.
    """

    model_config = ConfigDict(extra="forbid")

    command: str
    num_replicas: int = Field(1, ge=1)
    autoscaling_config: dict[str, Any] | None = None
    router: Literal["session", "prefix"] = "session"
    num_cpus: float = Field(1, gt=0)
    num_gpus: float = Field(0, ge=0)

    @model_validator(mode="after")
    def _check_autoscaling(self) -> "Options":
        given = self.autoscaling_config
        if given is not None:
            if "num_replicas" in self.model_fields_set:
                raise ValueError("give num_replicas or autoscaling_config, not both")
            if unknown := sorted({*given} - {*AutoscalingConfig.model_fields}):
                known = ", ".join(AutoscalingConfig.model_fields)
                raise ValueError(f"autoscaling_config has no {unknown[0]!r}; available: {known}")
            AutoscalingConfig(**given)
        return self

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


class Behind(Replica):
    """A replica that `Front` asks."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(arguments)
        _, self._app = guarded(self._access, create_app(self._served))
        self._served.engine.engine.start()

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        """Messages of ASGI."""
        async for message in answered(self._app, asked):
            yield message

    async def __del__(self) -> None:
        await self._served.stop()


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
    scaling: dict[str, Any] = {"num_replicas": options.num_replicas}
    if options.autoscaling_config is not None:
        target = {"target_ongoing_requests": given["max_num_seqs"]}
        scaling = {"autoscaling_config": target | options.autoscaling_config}
    is_session = options.router == "session"
    # Prompts that share their beginning do not all go to one replica while others are idle.
    far = {} if is_session else {"imbalanced_threshold": given["max_num_seqs"], "do_eviction": True}
    most = given["max_num_seqs"] + given["max_queued"] + _MOST_BESIDE
    make = serve.deployment(
        name="offload",
        **scaling,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=most,
        graceful_shutdown_timeout_s=2 * given["shutdown_seconds"] + 15,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER if is_session else PREFIX_ROUTER,
            request_router_kwargs=far,
        ),
    )
    if is_session:
        return make(serve.ingress()(Replica)).bind(arguments)
    front = serve.deployment(
        name="front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MOST_OF_FRONT,
        graceful_shutdown_timeout_s=2 * given["shutdown_seconds"] + 15,
    )
    replicas = make(Behind).bind(arguments)
    return front(serve.ingress()(Front)).bind(replicas, given["max_body_bytes"])
