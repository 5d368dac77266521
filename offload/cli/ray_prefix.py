"""Replicas of Ray Serve chosen by what their prompts share: Ray's own router, which reads prompts.

Ray's proxy does not hand a request's body to a router, so that a deployment stands between them: it
reads the body, and hands on what the router is to compare.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The public name, in ray.serve.llm, cannot be imported without vLLM or SGLang.
ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
_PROMPTS = ("messages", "prompt", "input")
# Of an ASGI scope: what can be sent to another process.
_SCOPE = {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path"}
_SCOPE |= {"query_string", "root_path", "headers"}


@dataclass(frozen=True)
class Asked:
    """A request whose body is there.

    Attributes:
        prompt: the text that Ray's router compares; the path where there is no prompt.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: str

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Asked:
        """With the prompt that the body has."""
        given: Any = None
        with suppress(ValueError, RecursionError):  # the replica says what is wrong with it
            given = json.loads(body or b"null")
        fields = given if isinstance(given, dict) else {}
        prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), None)
        text = scope["path"] if prompt is None else json.dumps(prompt)
        return cls({name: scope[name] for name in _SCOPE & {*scope}}, body, text)


class Front:
    """Answers as the replica does that the router chooses.

    Args:
        max_body_bytes: of a body no more is read, which the replica then refuses.
    """

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._answer = replicas.options(method_name="answer", stream=True)
        self._most = max_body_bytes

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                while (kind := (await receive())["type"]) != "lifespan.shutdown":
                    await send({"type": f"{kind}.complete"})
                await send({"type": "lifespan.shutdown.complete"})
                return
            body, more = bytearray(), True
            while more and len(body) <= self._most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                more = message.get("more_body", False)
            answer = self._answer.remote(Asked.of(scope, bytes(body)))
            try:
                async for each in answer:
                    await send(each)
            finally:
                answer.cancel()  # if the client has left

        return app


async def answered(app: ASGIApp, asked: Asked) -> AsyncGenerator[Message, None]:
    """What an application answers; it is cancelled when nobody reads on."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(16)
    body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

    is_left = False

    async def receive() -> Message:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    async def run() -> None:
        try:
            await app(asked.scope, receive, messages.put)
        finally:
            if not is_left:
                await messages.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        is_left = True
        task.cancel()
        await asyncio.wait([task])
