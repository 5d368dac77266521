"""The engine behind `async for`, for servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from offload.engine.engine import Engine
from offload.engine.request import RequestOutput
from offload.engine.sampling_params import SamplingParams

# Outputs that were not read yet: a request with more waits for its reader.
_MOST_UNREAD = 64


@dataclass
class _Reader:
    """Where the outputs of one request wait until they are read.

    Attributes:
        has_begun: a token of the answer has come.
    """

    unread: asyncio.Queue[RequestOutput] = field(default_factory=asyncio.Queue)
    has_begun: bool = False


class AsyncEngine:
    """Requests to an engine that runs in a thread of its own.

    Use it in one event loop:

        async with AsyncEngine(Engine(model, tokenizer)) as engine:
            async for output in engine.generate(ids, SamplingParams(max_tokens=64)):
                print(output.text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._readers: dict[str, _Reader] = {}

    @property
    def num_answering(self) -> int:
        """Requests of which a token has come."""
        return sum(reader.has_begun for reader in self._readers.values())

    @property
    def num_reading(self) -> int:
        """Requests of which none has: their prompts wait, or are read."""
        return len(self._readers) - self.num_answering

    def cancel_all(self, *, also_begun: bool = True) -> None:
        """Tell readers that their requests are cancelled, at once: the engine may be in a step. It
        cancels them as soon as it can.

        Args:
            also_begun: those of which a token has come, too.
        """
        for request_id, reader in self._readers.items():
            if also_begun or not reader.has_begun:
                reader.unread.put_nowait(RequestOutput(request_id, finish_reason="cancelled"))
                self.engine.cancel(request_id)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of a request. It is cancelled if its reader stops.

        The first, which has nothing, says at once that the request was accepted; the next ones are
        of its prompt's slices. A reader who is 64 outputs behind is waited for, until the
        engine is stopped.

        Raises:
            As `Engine.add_request`, and the error that ended the request.
            RuntimeError: the engine was not started.
        """
        engine = self.engine
        if not (engine.has_thread or engine.is_stopping or engine.failure):
            raise RuntimeError("the engine was not started: use `async with AsyncEngine(engine)`")
        loop, reader = asyncio.get_running_loop(), _Reader()
        num_sent = num_taken = 0  # the queue's size would lag behind

        def on_output(output: RequestOutput) -> None:
            nonlocal num_sent
            num_sent += 1
            loop.call_soon_threadsafe(reader.unread.put_nowait, output)

        request_id = self.engine.add_request(
            prompt,
            params,
            request_id,
            on_output,
            is_ready=lambda: num_sent - num_taken < _MOST_UNREAD or self.engine.is_stopping,
            session_id=session_id,
        )
        self._readers[request_id] = reader
        try:
            yield RequestOutput(request_id, num_prompt_tokens=len(prompt))
            while True:
                output = await reader.unread.get()
                num_taken += 1
                reader.has_begun |= bool(output.tokens)
                if output.error is not None:
                    raise output.error
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._readers[request_id]
            self.engine.cancel(request_id)

    async def __aenter__(self) -> AsyncEngine:
        self.engine.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop(finish=exc_info[0] is None)

    async def stop(self, *, finish: bool = False, timeout: float | None = None) -> None:
        """As `Engine.stop`."""
        await asyncio.to_thread(self.engine.stop, finish=finish, timeout=timeout)
