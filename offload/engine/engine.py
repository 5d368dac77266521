"""The engine: many requests to one model, which join and leave at every step.

`Engine.step` is where to begin: each decodes one token of every request that has read its prompt,
and then reads a slice of a prompt, if decoding has had its share of the time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from offload.engine.checks import check_model, check_options
from offload.engine.prefixes import Prefixes
from offload.engine.request import Request, RequestOutput
from offload.engine.request_maker import RequestMaker
from offload.engine.runner import Runner
from offload.engine.sampler import Chosen, choose
from offload.engine.sampling_params import SamplingParams
from offload.engine.scheduler import Admission, Scheduler
from offload.engine.sessions import SessionInUseError, Sessions, check_session_id
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import shielded

logger = logging.getLogger(__name__)

OnOutput = Callable[[RequestOutput], None]

_IDLE_SECONDS = 0.05  # until it is looked again whether somebody else gave memory back
_SAVING_SECONDS = 0.01  # of each step in which requests are answered


class QueueFullError(RuntimeError):
    """As many requests wait as may."""


@dataclass
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        prompt_tokens: that were read; those that were shared are `cached_tokens`.
        answer_tokens: that were chosen.
        decode_steps: each of all running requests.
        read_seconds, decode_seconds: of slices and steps.
        step_seconds: of all that `Engine.step` does; `pass_seconds` of it the model takes.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    decode_steps: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: float = 0.0
    pass_seconds: float = 0.0


class Engine:
    """Serves requests with one `OffloadedModel`.

    Call `step` while `has_work`, or `start` a thread that does. Requests may come, and be
    cancelled, from any thread. A step holds the model's lock; between steps others may use it.

    Args:
        tokenizer: a fast one of transformers, for text and stop strings; None: token ids only.
        max_num_seqs: requests that are read and decoded at a time.
        max_queued: that wait beside them; one more is refused.
        slice_seconds: that a slice of a prompt takes while others decode.
        read_share: of the time for prompts while others decode.
        prefix_caching: prompts that begin as earlier ones share what was read. Pages are given
            back, the least recently used first, when requests need them.
        sessions: what is kept of the requests of a session for the next one, in memory and on disk;
            `stop` saves them.

    Attributes:
        failure: of a step, outside of any request; it ended the thread and all requests.

    Raises:
        NotImplementedError: a model whose options are of one generation at a time.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_num_seqs: int = 32,
        max_queued: int = 256,
        slice_seconds: float = 0.15,
        read_share: float = 0.45,
        prefix_caching: bool = True,
        sessions: Sessions | None = None,
    ) -> None:
        check_options(max_num_seqs, max_queued, slice_seconds, read_share)
        self._runtime = runtime = model._offload
        check_model(runtime)
        self.model, self.tokenizer = model, tokenizer
        self.stats = EngineStats()
        self._runner = Runner(runtime)
        self._scheduler = Scheduler(
            max_num_seqs=max_num_seqs, slice_seconds=slice_seconds, read_share=read_share
        )
        self.max_num_seqs, self.max_queued = max_num_seqs, max_queued
        self._admission = Admission(runtime.store, runtime.attention.states)
        self._prefixes = Prefixes(self._runner, is_enabled=prefix_caching)
        self.sessions = sessions
        if sessions is not None:
            sessions.open(runtime)
        self._maker = RequestMaker(model, tokenizer, self._admission)
        self._inbox = threading.Condition()
        self._arrived: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._to_cancel: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.failure: BaseException | None = None
        self._begun = (0, 0)  # sequences and tokens that the decoder expects

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        on_output: OnOutput | None = None,
        is_ready: Callable[[], bool] = lambda: True,
        session_id: str | None = None,
    ) -> str:
        """Have a prompt answered.

        Args:
            prompt: token ids.
            request_id: default: a new one, which is returned.
            on_output: called with every output, in the thread that runs the engine.
            is_ready: asked before each token whether it may be chosen now.
            session_id: of the prompt, only what the session's last request and its answer do not
                begin with is read. Needs `sessions`.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, more tokens than the context
                has, a request id that is in use, stop strings without a tokenizer, a session id
                that is none or that the engine keeps no sessions for.
            SessionInUseError: a request of this session has not ended.
            HostBudgetError: more than the whole budget of the host.
            QueueFullError: as many requests wait as may.
            RuntimeError: the engine was stopped, or its thread ended by `failure`.
        """
        request = self._maker.make(
            prompt, params or SamplingParams(), request_id, on_output, is_ready
        )
        if session_id is not None:
            if self.sessions is None:
                raise ValueError("session_id needs Engine(..., sessions=Sessions(folder))")
            if request.params.prompt_logprobs is not None:
                raise ValueError("prompt_logprobs has all of a prompt read; give no session_id")
            request.session_id = check_session_id(session_id)
        with self._inbox:
            if self.failure is not None:
                raise RuntimeError(f"the engine failed: {self.failure}") from self.failure
            if self._stopping:
                raise RuntimeError("the engine was stopped")
            if request.request_id in self._requests:
                raise ValueError(f"request_id {request.request_id!r} is in use")
            self._check_unused(session_id)
            if self.num_waiting >= self.max_queued + self._num_free_places:
                raise QueueFullError(
                    f"{self.num_waiting} requests wait already, and max_queued is "
                    f"{self.max_queued}; try again later"
                )
            self._requests[request.request_id] = request
            self._arrived.append(request)
            self._inbox.notify_all()
        return request.request_id

    def cancel(self, request_id: str) -> bool:
        """Have a request end with the reason "cancelled", at the next step; False: it has ended."""
        with self._inbox:
            if request_id not in self._requests:
                return False
            self._to_cancel.add(request_id)
            self._inbox.notify_all()
            return True

    def remove_session(self, session_id: str) -> bool:
        """Forget a session, in memory and on disk, between two steps; False: there is none.

        Raises:
            ValueError: an id that is none, or the engine keeps no sessions.
            SessionInUseError: a request of this session has not ended.
        """
        if self.sessions is None:
            raise ValueError("this needs Engine(..., sessions=Sessions(folder))")
        with self._runtime.run_lock.lock:
            with self._inbox:
                self._check_unused(session_id)
            return self.sessions.remove(session_id)

    def _check_unused(self, session_id: str | None) -> None:
        if session_id is not None and any(
            request.session_id == session_id for request in self._requests.values()
        ):
            raise SessionInUseError(f"session {session_id!r} has a request that has not ended")

    @property
    def has_work(self) -> bool:
        """Whether there is a request."""
        with self._inbox:
            return bool(self._requests)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together that the model can have."""
        return int(self._runtime.lean.shape.max_context)

    @property
    def num_running(self) -> int:
        """Requests that are read or decoded."""
        return len(self._scheduler.reading) + len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not."""
        return len(self._arrived) + len(self._scheduler.waiting)

    @property
    def _num_free_places(self) -> int:
        return max(0, self.max_num_seqs - self.num_running)

    @torch.inference_mode(False)
    def step(self) -> list[RequestOutput]:
        """Decode a token of each running request, and read a slice of a prompt if it is time.

        Errors of a request end that request. What `on_output` was called with is returned. Ctrl-C
        comes behind the step.
        """
        with self._runtime.run_lock.lock, shielded():
            start = time.perf_counter()
            self._runtime.sequences.collect()
            outputs = self._take_arrived()
            self._scheduler.admit(self._fits)
            outputs += self._decode()
            outputs += self._read()
            if self.sessions is not None:
                self.sessions.work(_SAVING_SECONDS)
            self.stats.step_seconds += time.perf_counter() - start
            self.stats.pass_seconds = self._runner.seconds
        return outputs

    # A thread that steps.

    def start(self) -> Engine:
        """Step in a thread of its own until `stop`."""
        with self._inbox:
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(
                    target=self._run, name="offload-engine", daemon=True
                )
                self._thread.start()
        return self

    def stop(self, *, finish: bool = False, timeout: float | None = None) -> None:
        """No request is taken any more, and the thread ends.

        Args:
            finish: requests that are there are answered first; else they are cancelled.
            timeout: seconds until they are cancelled after all, and sessions that are not saved
                are given up.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._inbox:
            self._stopping = True
            self._inbox.notify_all()
            if finish and self._thread is not None:
                left = None if until is None else max(0.0, until - time.monotonic())
                self._inbox.wait_for(lambda: not self._requests, left)
            self._to_cancel.update(self._requests)
            self._inbox.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None
        elif thread is None and self.has_work:
            self.step()
        self.clear_prefixes()
        if self.sessions is not None:
            with self._runtime.run_lock.lock:
                self.sessions.close(None if until is None else max(0.0, until - time.monotonic()))

    def clear_prefixes(self) -> None:
        """Give back what is kept of prompts that were read."""
        with self._runtime.run_lock.lock:
            while self._prefixes.drop():
                pass

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(finish=exc is None)

    def _run(self) -> None:
        while True:
            with self._inbox:
                self._inbox.wait_for(lambda: self._requests or self._stopping or self._saves)
                if self._stopping and not self._requests:
                    return
            try:
                has_outputs = bool(self.step())
            except BaseException as error:
                logger.exception("the engine failed")
                self._fail(error)
                return
            # All wait: for memory that others have, or for their readers.
            if not has_outputs and not self._saves:
                with self._inbox:
                    self._inbox.wait(_IDLE_SECONDS)

    def _fail(self, error: BaseException) -> None:
        """End all requests, and take no more."""
        with self._inbox:
            self.failure = error
            requests = [*self._requests.values()]
        for request in requests:
            self._emit_error(request, error)

    @property
    def _saves(self) -> bool:
        return self.sessions is not None and self.sessions.has_work

    # The parts of a step.

    def _take_arrived(self) -> list[RequestOutput]:
        with self._inbox:
            self._scheduler.waiting.extend(self._arrived)
            self._arrived.clear()
            cancelled = [self._requests[i] for i in self._to_cancel if i in self._requests]
            self._to_cancel.clear()
        for request in cancelled:
            request.finish_reason = "cancelled"
        return [self._emit(request, request.output()) for request in cancelled]

    def _fits(self, requests: list[Request]) -> bool:
        """Whether the last of `requests` may join the others."""
        newest, sessions = requests[-1], self.sessions
        seq = None if sessions is None else sessions.seq_of(newest)
        if not self._admission.fits(requests, seq):
            self._runtime.store.trim()
        while not self._admission.fits(requests, seq):
            if sessions is not None and sessions.spill(keeps=newest.session_id):
                continue
            # Prefixes are kept until they are all that is in the way.
            if len(requests) > 1 and not self._admission.fits(
                requests, seq, self._prefixes.num_pages
            ):
                return False
            if not self._prefixes.drop():
                return False
            self._runtime.store.trim()
        # A power of two, so that the decoder rarely has to place heads anew.
        count = min(self.max_num_seqs, 1 << (len(requests) - 1).bit_length())
        longest = max(request.most_tokens for request in requests)
        if count > self._begun[0] or longest > self._begun[1] or len(requests) == 1:
            try:
                self._runtime.decoder.begin_generation(count, longest)
            except Exception as error:
                if len(requests) == 1 or not isinstance(error, DeviceMemoryError):
                    self._emit_error(requests[-1], error)
                return False
            self._begun = (count, longest)
        if sessions is not None:
            sessions.attach(newest)
        return True

    def _decode(self) -> list[RequestOutput]:
        rows = [request for request in self._scheduler.running if request.is_ready()]
        if not rows:
            self._scheduler.was_decoded(math.inf)  # nobody is kept waiting by a slice
            return []
        start = time.perf_counter()
        outputs = self._decode_rows(rows)
        seconds = time.perf_counter() - start
        self._scheduler.was_decoded(seconds)
        self.stats.decode_steps += 1
        self.stats.decode_seconds += seconds
        return outputs

    def _decode_rows(self, rows: list[Request]) -> list[RequestOutput]:
        """One token of each; where that fails, of each by itself."""
        seqs = [request.seq for request in rows if request.seq is not None]
        tokens = [request.answer[-1] for request in rows]
        greedy = all(request.params.is_greedy for request in rows)
        try:
            result = self._runner.decode(seqs, tokens, greedy=greedy)
        except Exception as error:
            if len(rows) == 1:
                return [self._emit_error(rows[0], error)]
            logger.warning("a step of %d requests failed: %s", len(rows), error)
            return [output for row in rows for output in self._decode_rows([row])]
        if greedy:
            return [
                self._take(request, None if token < 0 else Chosen(token))
                for request, token in zip(rows, result.tolist(), strict=True)
            ]
        return [self._choose(*row) for row in zip(rows, result, strict=True)]

    def _read(self) -> list[RequestOutput]:
        parts = self._scheduler.next_slice(self._prefixes.num_left)
        if not parts:
            return []
        start = time.perf_counter()
        outputs = self._read_parts(parts)
        seconds, num_tokens = time.perf_counter() - start, sum(size for _, size in parts)
        self._scheduler.was_read(num_tokens, seconds)
        self.stats.read_seconds += seconds
        return outputs

    def _read_parts(self, parts: list[tuple[Request, int]]) -> list[RequestOutput]:
        """Some tokens of each prompt; where that fails, of each by itself."""
        spans: list[tuple[Request, int, int]] = []
        try:
            for request, size in parts:
                self._begin(request)
                stop = min(len(request.prompt), request.num_read + size)
                spans.append((request, request.num_read, stop))
            hidden = self._runner.read(
                [(r.seq, r.prompt[a:b]) for r, a, b in spans if r.seq is not None],
                builds=any(stop == len(request.prompt) for request, _, stop in spans),
            )
        except Exception as error:
            if len(parts) == 1:
                return [self._emit_error(parts[0][0], error)]
            logger.warning("a slice of %d prompts failed: %s", len(parts), error)
            return [output for part in parts for output in self._read_parts([part])]
        return [self._was_read(*span, x) for span, x in zip(spans, hidden, strict=True)]

    def _begin(self, request: Request) -> None:
        """Give it a sequence, with what there is of its session or of others' prompts."""
        if request.seq is None:
            if self.sessions is not None:
                self.sessions.begin(request)
            if request.seq is None:
                self._prefixes.begin(request)

    def _was_read(
        self, request: Request, start: int, stop: int, hidden: torch.Tensor
    ) -> RequestOutput:
        request.num_read = stop
        self.stats.prompt_tokens += stop - start
        try:
            if request.params.prompt_logprobs is not None:
                following = request.prompt[start + 1 : stop + 1]
                request.prompt_scores = self._runner.scores(
                    hidden, following, request.params.prompt_logprobs
                )
            if not request.is_read:
                return self._emit(request, request.output())
            logits = self._runner.logits(hidden[-1:])[0]
        except Exception as error:
            return self._emit_error(request, error)
        self.stats.cached_tokens += request.num_cached
        self._scheduler.reading.remove(request)
        self._scheduler.running.append(request)
        self._prefixes.keep(request)
        return self._choose(request, logits)

    # Outputs.

    def _choose(self, request: Request, logits: torch.Tensor) -> RequestOutput:
        try:
            ends = request.ends if request.params.min_tokens else ()
            chosen = choose(
                logits, request.params, request.prompt, request.answer, request.generator, ends
            )
        except Exception as error:
            return self._emit_error(request, error)
        return self._take(request, chosen)

    def _take(self, request: Request, chosen: Chosen | None) -> RequestOutput:
        if chosen is None:
            return self._emit_error(request, RuntimeError("non-finite logits"))
        self.stats.answer_tokens += 1
        return self._emit(request, request.take(chosen))

    def _emit_error(self, request: Request, error: BaseException) -> RequestOutput:
        logger.warning("request %s failed: %s", request.request_id, error)
        request.finish_reason = "error"
        return self._emit(request, request.output(error=error))

    def _emit(self, request: Request, output: RequestOutput) -> RequestOutput:
        """Tell who asked; free what a finished request has."""
        if request.finish_reason is not None:
            self._finish(request)
        if request.on_output is not None:
            try:
                request.on_output(output)
            except Exception as error:
                logger.exception("on_output of request %s", request.request_id)
                if request.finish_reason is None:
                    request.finish_reason = "error"
                    self._finish(request)
                return replace(output, finish_reason="error", error=error)
        return output

    def _finish(self, request: Request) -> None:
        self._scheduler.remove(request)
        if request.finish_reason == "error":
            self.stats.failed += 1
        elif request.finish_reason == "cancelled":
            self.stats.cancelled += 1
        else:
            self.stats.finished += 1
        if self.sessions is not None:
            self.sessions.keep(request)
        self._prefixes.end(request)
        with self._inbox:
            del self._requests[request.request_id]
            self._inbox.notify_all()
