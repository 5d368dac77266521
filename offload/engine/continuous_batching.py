"""transformers' interface to continuous batching, on our engine.

`model.init_continuous_batching()` returns the manager; `model.generate_batch(...)` and
`model.continuous_batching_context_manager(...)` are transformers' own, which use it.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload.engine.engine import Engine
from offload.engine.request import RequestOutput
from offload.engine.sampling_params import SamplingParams

_PER_REQUEST = ("temperature", "top_k", "top_p")
_MOST_AT_A_TIME, _UNLIMITED = 32, 2**31


@dataclass(frozen=True)
class BackgroundThreadStatus:
    """What a manager's thread does.

    Attributes:
        is_running: it answers requests.
        fatal_error: what ended it, and all requests.
    """

    is_running: bool
    fatal_error: BaseException | None

    def can_accept_new_requests(self) -> str | None:
        """Why it does not answer requests; None: it does."""
        if self.fatal_error is not None:
            return f"the engine failed: {self.fatal_error}"
        return None if self.is_running else "the manager is not running"


class ContinuousBatchingManager:
    """Answers requests in a background thread, as transformers' class of this name does.

    Args:
        generation_config: of all requests, but for what they bring themselves.
        config: its `max_requests_per_batch` (None: 32), `allow_block_sharing`, `return_logprobs`
            and `seed` count. Without a seed, torch's own random numbers seed each request as it is
            added.
    """

    warmed_up = True

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        config: ContinuousBatchingConfig | None = None,
    ) -> None:
        config = ContinuousBatchingConfig() if config is None else config
        self.model, self.generation_config = model, generation_config
        self._engine = Engine(
            model,
            max_num_seqs=config.max_requests_per_batch or _MOST_AT_A_TIME,
            max_queued=_UNLIMITED,  # transformers' `max_queue_size` refuses no request, either
            prefix_caching=config.allow_block_sharing,
        )
        self._returns_logprobs = config.return_logprobs
        self._seeds: torch.Generator | None = None
        if config.seed is not None:
            self._seeds = torch.Generator().manual_seed(config.seed)
        self._cancelled: set[str] = set()
        self._results: queue.Queue[GenerationOutput] = queue.Queue()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], Any], Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def background_thread_status(self) -> BackgroundThreadStatus:
        """Whether it runs, and what has ended it."""
        return BackgroundThreadStatus(self.is_running(), self._engine.failure)

    def warmup(self) -> None:
        """Nothing: kernels are warm when a model is loaded."""

    def start(self) -> None:
        """Answer requests from now on."""
        self._engine.start()

    def is_running(self) -> bool:
        """Whether requests are answered."""
        return self._engine.has_thread

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests, and answer those that there are. With `hard_stop`, or when
        `timeout` seconds have passed, they fail, with what there is of their answers."""

        def stop() -> None:
            self._engine.stop(finish=not hard_stop, timeout=timeout)

        if block:
            stop()
        else:
            threading.Thread(target=stop, daemon=True).start()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait until a `stop(block=False)` is done."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.is_running() and (until is None or time.monotonic() < until):
            time.sleep(0.01)

    def destroy(self) -> None:
        """`stop`."""
        self.stop()

    def pause(self) -> AbstractContextManager[Any]:
        """Around what needs the model for itself: no step runs meanwhile."""
        lock: AbstractContextManager[Any] = self.model._offload.run_lock.lock
        return lock

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Have a prompt answered; its id. `temperature`, `top_k` and `top_p` may be the request's.

        Raises:
            As `Engine.add_request`; ValueError for other options of a request.
        """
        request_id = f"req_{next(self._numbers)}" if request_id is None else request_id
        prompt = list(input_ids)
        copies = self.generation_config.num_return_sequences or 1
        ids = [request_id, *(f"{request_id}__child#{i}" for i in range(copies - 1))]
        for of_copy in ids:
            answer = _Answer(self, of_copy, prompt, streaming, record_timestamps)
            params = self._params(
                answer, max_new_tokens, eos_token_id, logit_processor_kwargs, len(prompt)
            )
            self._engine.add_request(input_ids, params, of_copy, answer.on_output)
        return request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """`add_request` of each. One that is refused fails with the reason as its error."""
        request_ids = []
        for input_ids in inputs:
            request_id = f"req_{next(self._numbers)}"
            request_ids.append(request_id)
            try:
                self.add_request(
                    input_ids,
                    request_id,
                    max_new_tokens,
                    streaming,
                    record_timestamps,
                    **logit_processor_kwargs,
                )
            except (ValueError, MemoryError, RuntimeError) as error:
                failed = _Answer(self, request_id, list(input_ids), streaming, record_timestamps)
                failed.on_output(RequestOutput(request_id, finish_reason="error", error=error))
        return request_ids

    def cancel_request(self, request_id: str) -> None:
        """Have it end; its result has what there is of the answer."""
        self._cancelled.add(request_id)
        if not self._engine.cancel(request_id):
            self._cancelled.discard(request_id)

    def was_cancelled(self, request_id: str) -> bool:
        """Whether a request that has just ended was to be cancelled."""
        was_cancelled = request_id in self._cancelled
        self._cancelled.discard(request_id)
        return was_cancelled

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next result, of this request if given; None if there is none within `timeout`
        seconds, or another request's comes first."""
        if not self.is_running() and self._results.empty():  # its thread tells all, and ends
            return None
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        if request_id is not None and result.request_id != request_id:
            self._results.put(result)
            return None
        return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until it is stopped, and those that are left."""
        while self.is_running() or not self._results.empty():
            result = self.get_result(timeout=0.1)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Results of one request, until its last."""
        is_running = True
        while is_running:
            is_running = self.is_running()
            for _ in range(max(1, self._results.qsize())):  # those of others go to the end
                result = self.get_result(request_id, timeout=0.1)
                if result is not None:
                    yield result
                    if result.is_finished():
                        return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], Any]
    ) -> None:
        """Have results of a request go to `callback` in the running event loop instead."""
        with self._lock:
            self._handlers[request_id] = (callback, asyncio.get_running_loop())

    def deliver(self, result: GenerationOutput) -> None:
        """To its handler, or to `get_result`."""
        with self._lock:
            handler = self._handlers.get(result.request_id)
            if handler is not None and result.is_finished():
                del self._handlers[result.request_id]
        if handler is None:
            self._results.put(result)
        else:
            callback, loop = handler
            loop.call_soon_threadsafe(callback, result)

    def _params(
        self,
        answer: _Answer,
        max_new_tokens: int | None,
        eos_token_id: int | list[int] | None,
        given: dict[str, Any],
        num_prompt_tokens: int,
    ) -> SamplingParams:
        for name in given:
            if name not in _PER_REQUEST:
                raise ValueError(
                    f"unknown option {name!r} of a request; available: {', '.join(_PER_REQUEST)}"
                )
        config = copy.deepcopy(self.generation_config)
        for name, value in given.items():
            setattr(config, name, getattr(config, name) if value is None else value)
        if eos_token_id is None:
            eos_token_id = config.eos_token_id
        ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
        ends = [token for token in ends if token is not None and token >= 0]
        config.eos_token_id = ends or None  # -1 is no token that processors could know
        options: dict[str, Any] = {"temperature": 0.0}
        self.model._prepare_special_tokens(config, device="cpu")
        processors = self.model._get_logits_processor(
            config, input_ids_seq_length=num_prompt_tokens
        )
        if config.do_sample:
            seed = torch.randint(2**63 - 1, (), device="cpu", generator=self._seeds)
            options = {"temperature": 1.0, "seed": int(seed)}
            while processors and not self._returns_logprobs:  # which are of what these leave
                option = _own_option(processors[-1])
                if option is None:
                    break
                options |= option
                processors.pop()
        if processors or self._returns_logprobs:

            def process(ids: Sequence[int], logits: Tensor) -> Tensor:
                scores: Tensor = processors(torch.tensor([ids]), logits[None])[0]
                answer.scores = scores if self._returns_logprobs else None
                return scores

            options["logits_processors"] = (process,)
        return SamplingParams(
            max_tokens=config.max_new_tokens if max_new_tokens is None else max_new_tokens,
            stop_token_ids=tuple(ends),
            ignore_eos=True,
            **options,
        )


def _own_option(warper: Any) -> dict[str, Any] | None:
    """As which option of ours the last of transformers' warpers does the same."""
    if isinstance(warper, TemperatureLogitsWarper):
        return {"temperature": float(warper.temperature)}
    if isinstance(warper, TopKLogitsWarper):
        return {"top_k": int(warper.top_k)}
    if isinstance(warper, TopPLogitsWarper) and warper.min_tokens_to_keep == 1:
        return {"top_p": float(warper.top_p)}
    return None


class _Answer:
    """What has come of a request, as transformers tells it.

    Attributes:
        scores: [vocab_size] that the next token is chosen by, where its log probability is told.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        request_id: str,
        prompt: list[int],
        streaming: bool,
        record_timestamps: bool,
    ) -> None:
        self._manager, self._streaming = manager, streaming
        self.scores: Tensor | None = None
        self._output = GenerationOutput(
            request_id, prompt, timestamps=[] if record_timestamps else None
        )

    def on_output(self, output: RequestOutput) -> None:
        """Note it, and deliver what is to be delivered."""
        now, so_far = time.perf_counter(), self._output
        so_far.generated_tokens += [chosen.token for chosen in output.tokens]
        if self.scores is not None:
            logprobs, self.scores = self.scores.log_softmax(dim=-1), None
            so_far.logprobs += [float(logprobs[chosen.token]) for chosen in output.tokens]
        if so_far.timestamps is not None:
            so_far.timestamps += [now] * len(output.tokens)
        if so_far.lifespan[0] < 0:
            so_far.lifespan = (now, -1)
        so_far.status = RequestStatus.DECODING if output.tokens else RequestStatus.PREFILLING
        if output.finish_reason is not None:
            error: object = output.error
            was_cancelled = self._manager.was_cancelled(output.request_id)
            if output.finish_reason == "cancelled" and not was_cancelled:
                error = "the manager was stopped before the answer's end"
            so_far.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
            so_far.error = None if error is None else str(error)
            so_far.lifespan = (so_far.lifespan[0], now)
        if output.finish_reason is not None or (self._streaming and output.tokens):
            self._manager.deliver(self._copy())

    def _copy(self) -> GenerationOutput:
        """With lists of its own, but for the prompt's."""
        so_far = self._output
        times = None if so_far.timestamps is None else [*so_far.timestamps]
        tokens, logprobs = [*so_far.generated_tokens], [*so_far.logprobs]
        return replace(so_far, generated_tokens=tokens, logprobs=logprobs, timestamps=times)
