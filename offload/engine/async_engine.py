"""The engine behind `async for`, for servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from offload.engine.engine import Engine
from offload.engine.request import RequestOutput
from offload.engine.sampling_params import SamplingParams

# Outputs that nobody has taken: a request with more waits for its reader.
_MOST_UNREAD = 64


class AsyncEngine:
    """Requests to an engine that runs in a thread of its own.

    Use it in one event loop:

        async with AsyncEngine(Engine(model, tokenizer)) as engine:
            async for output in engine.generate(ids, SamplingParams(max_tokens=64)):
                print(output.text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of a request. It is cancelled if nobody reads on.

        The first, which has nothing, says at once that the request was accepted; the next ones are
        of its prompt's slices. A reader who is 64 outputs behind is waited for, until the
        engine is stopped.

        Raises:
            As `Engine.add_request`, and the error that ended the request.
            RuntimeError: nobody has started the engine.
        """
        engine = self.engine
        if not (engine.has_thread or engine.is_stopping or engine.failure):
            raise RuntimeError("the engine was not started: use `async with AsyncEngine(engine)`")
        loop, unread = asyncio.get_running_loop(), asyncio.Queue[RequestOutput]()
        num_sent = num_taken = 0  # the queue's size would lag behind

        def on_output(output: RequestOutput) -> None:
            nonlocal num_sent
            num_sent += 1
            loop.call_soon_threadsafe(unread.put_nowait, output)

        request_id = self.engine.add_request(
            prompt,
            params,
            request_id,
            on_output,
            is_ready=lambda: num_sent - num_taken < _MOST_UNREAD or self.engine.is_stopping,
            session_id=session_id,
        )
        try:
            yield RequestOutput(request_id, num_prompt_tokens=len(prompt))
            while True:
                output = await unread.get()
                num_taken += 1
                if output.error is not None:
                    raise output.error
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.engine.cancel(request_id)

    async def __aenter__(self) -> AsyncEngine:
        self.engine.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop(finish=exc_info[0] is None)

    async def stop(self, *, finish: bool = False, timeout: float | None = None) -> None:
        """As `Engine.stop`."""
        await asyncio.to_thread(self.engine.stop, finish=finish, timeout=timeout)
