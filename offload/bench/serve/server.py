"""What answers requests: our engine, or transformers' continuous batching of the stock model."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import ContinuousBatchingConfig, GenerationConfig

from offload.bench.decode.baselines.transformers_decode import cache_bytes
from offload.engine.engine import Engine
from offload.engine.request import RequestOutput
from offload.engine.sampling_params import SamplingParams

ENGINES = ("offload", "transformers")
REFUSALS = (ValueError, MemoryError, RuntimeError)  # of `Server.send`
_PAGE_TOKENS = 256


@dataclass(frozen=True)
class Event:
    """Something new of a request.

    Attributes:
        num_tokens: that are new.
        time: by time.perf_counter, when whoever asked had it.
        is_last: nothing comes any more.
        error: with the last one, why the answer is not whole.
    """

    request_id: str
    num_tokens: int
    time: float
    is_last: bool
    error: str | None = None


class Server(Protocol):
    """Answers requests in the background; who sends them is one thread."""

    def send(self, request_id: str, prompt: Sequence[int], num_tokens: int) -> None:
        """Have so many tokens decoded greedily behind a prompt.

        Raises:
            One of `REFUSALS`: it is not taken.
        """

    def receive(self, timeout: float) -> Event | None:
        """What comes next; None if nothing does in so many seconds."""

    def cancel(self, request_id: str) -> None:
        """Have a request end."""

    def costs(self) -> dict[str, Any]:
        """What it took so far; None where the engine does not say.

        `cached_tokens` of prompts that others had read, `own_share` of its time outside of the
        model's passes, and the most `kv_host_bytes` at a time.
        """

    def close(self) -> None:
        """Cancel what there is, and give memory back."""


class OffloadServer:
    """Our engine, in its own thread.

    Args:
        options: of `Engine`.
        temperature: of all answers.
    """

    def __init__(self, model: Any, *, temperature: float = 0.0, **options: Any) -> None:
        self._engine, self._temperature = Engine(model, **options).start(), temperature
        self._store = model.kv_store
        self._events: queue.Queue[Event] = queue.Queue()
        self._most_bytes = 0

    def send(self, request_id: str, prompt: Sequence[int], num_tokens: int) -> None:
        params = SamplingParams(
            temperature=self._temperature, max_tokens=num_tokens, ignore_eos=True
        )
        self._engine.add_request(prompt, params, request_id, self._on_output)

    def _on_output(self, output: RequestOutput) -> None:
        self._most_bytes = max(self._most_bytes, self._store.host_bytes_used)
        is_last = output.finish_reason is not None
        if output.tokens or is_last:
            error = None if output.error is None else str(output.error)
            now = time.perf_counter()
            event = Event(output.request_id, len(output.tokens), now, is_last, error)
            self._events.put(event)

    def receive(self, timeout: float) -> Event | None:
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def costs(self) -> dict[str, Any]:
        stats = self._engine.stats
        own_seconds = stats.step_seconds - stats.pass_seconds
        return {
            "cached_tokens": stats.cached_tokens,
            "own_share": own_seconds / stats.step_seconds if stats.step_seconds else None,
            "kv_host_bytes": self._most_bytes,
        }

    def close(self) -> None:
        self._engine.stop()


class TransformersServer:
    """Continuous batching as transformers has it, but for the size of its cache.

    By default that is most of the machine's memory. Here it has room for what may run, and for what
    its scheduler leaves free.

    Args:
        stock: a stock model.
        max_num_seqs: requests at a time.
        most_tokens: of a prompt and its answer.
        prefix_caching: prompts share what they begin with.
        temperature: of all answers.
    """

    def __init__(
        self,
        stock: Any,
        *,
        max_num_seqs: int,
        most_tokens: int,
        prefix_caching: bool,
        temperature: float = 0.0,
    ) -> None:
        num_blocks = math.ceil(1.25 * max_num_seqs * math.ceil(most_tokens / _PAGE_TOKENS))
        config = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=num_blocks,
            max_requests_per_batch=max_num_seqs,
            allow_block_sharing=prefix_caching,
            auto_switch_to_flash=stock.device.type != "cpu",
        )
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0.0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0}
        generation = GenerationConfig(**options, eos_token_id=-1)  # type: ignore[no-untyped-call]
        self._manager = stock.init_continuous_batching(generation, config)
        self._manager.start()
        self._num_received: dict[str, int] = {}
        on_host = stock.device.type == "cpu"
        self._host_bytes = on_host * cache_bytes(stock, kv_len=num_blocks * _PAGE_TOKENS)

    def send(self, request_id: str, prompt: Sequence[int], num_tokens: int) -> None:
        self._num_received[request_id] = 0
        self._manager.add_request(
            list(prompt), request_id, max_new_tokens=num_tokens, streaming=True
        )

    def receive(self, timeout: float) -> Event | None:
        result = self._manager.get_result(timeout=timeout)
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching ended by itself")
            return None
        request_id, total = result.request_id, len(result.generated_tokens)
        new = total - self._num_received[request_id]
        self._num_received[request_id] = total
        return Event(request_id, new, time.perf_counter(), result.is_finished(), result.error)

    def cancel(self, request_id: str) -> None:
        self._manager.cancel_request(request_id)

    def costs(self) -> dict[str, Any]:
        return {"cached_tokens": None, "own_share": None, "kv_host_bytes": self._host_bytes}

    def close(self) -> None:
        self._manager.stop(hard_stop=True)
        self._manager.destroy()
