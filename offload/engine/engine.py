"""The engine: many requests to one model, which join and leave at every step.

`Engine.step` is where to begin: each decodes one token of every request that has read its prompt,
and then reads a slice of a prompt, or of decoded tokens that are corrected, if decoding has had its
share of the time. On a CPU it also decodes between the layers of a prompt's slice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from offload.engine.checks import check_model, check_options
from offload.engine.prefixes import Prefixes
from offload.engine.request import Request, RequestOutput
from offload.engine.request_maker import RequestMaker
from offload.engine.runner import GenericPasses, Passes
from offload.engine.sampling_params import SamplingParams
from offload.engine.scheduler import Scheduler
from offload.engine.sessions import SessionInUseError, Sessions, check_session_id
from offload.engine.steps import EngineStats, Steps
from offload.engine.working_memory import WorkingMemory
from offload.runtime.cache import check_offloaded
from offload.runtime.runtime import Runtime
from offload.system.interrupts import shielded
from offload.system.memory import format_bytes

logger = logging.getLogger(__name__)

OnOutput = Callable[[RequestOutput], None]

_IDLE_SECONDS = 0.05  # until it is looked again whether somebody else gave memory back


class QueueFullError(RuntimeError):
    """As many requests wait as may."""


class Engine:
    """Serves requests with one `OffloadedModel`.

    Call `step` while `has_work`, or `start` a thread that does. Requests may come, and be
    cancelled, from any thread. A step holds the model's lock; between steps others may use it.

    Args:
        tokenizer: a fast one of transformers, for text and stop strings; None: token ids only.
        max_num_seqs: requests that are read and decoded at a time; of about equally long ones
            fewer where a GPU holds so little of more that they would take longer than in turns.
        max_queued: requests that wait for these; one more is refused.
        slice_seconds: about what those wait that decode between the layers of a prompt's slice. The
            slice takes twelve times as long on a CPU (thirty times where nobody decodes), where
            short prompts are read between its layers, too, and twice as long on a GPU; behind a
            long text more.
        read_share: of the time for prompts while others decode.
        prefix_caching: prompts that begin as earlier ones share what was read. Pages are given
            back, the least recently used first, when requests need them.
        sessions: what is kept of the requests of a session for the next one, in memory and on disk;
            `stop` saves them.
        overcommit: requests are admitted as if answers were so many times shorter than they may be.
            Where memory then runs out, the youngest request makes room: its sequence goes to a
            temporary folder, and it goes on with the same tokens when others have ended.

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
        overcommit: float = 1.0,
    ) -> None:
        check_options(max_num_seqs, max_queued, slice_seconds, read_share, overcommit)
        check_offloaded(model, takes_generic=True)
        self._runtime = runtime = model._offload
        check_model(runtime)
        self.model, self.tokenizer = model, tokenizer
        self.max_num_seqs, self.max_queued, self.sessions = max_num_seqs, max_queued, sessions
        working = WorkingMemory.of(model, runtime)
        scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            slice_seconds=slice_seconds,
            read_share=read_share,
            most_slice_tokens=working.slice_tokens,
            most_past_tokens=working.past_tokens,
            reads_on_gpu=runtime.device.type == "cuda",
        )
        passes = Passes(runtime) if isinstance(runtime, Runtime) else GenericPasses(runtime)
        prefixes = Prefixes(runtime, is_enabled=prefix_caching)
        if sessions is not None:
            sessions.open(runtime)
        self._steps = Steps(
            passes,
            scheduler,
            prefixes,
            sessions,
            self._take_arrived,
            self._take_cancelled,
            self._forget,
            overcommit,
            working,
        )
        self._maker = RequestMaker(model, tokenizer, self._steps.admission)
        self._inbox = threading.Condition()
        self._arrived: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._to_cancel: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._say_room()
        self._until: float | None = None  # when sessions have to be written
        self.failure: BaseException | None = None

    def _say_room(self) -> None:
        admission, most = self._steps.admission, self.max_context
        budget = format_bytes(admission.budget_bytes)
        if count := admission.most_requests(most):
            logger.info(
                "%s of host KV cache have room for %d requests of all %s tokens at a time",
                budget,
                min(count, self.max_num_seqs),
                f"{most:,}",
            )
            return
        fits = admission.most_answer(1, most) if admission.most_requests(1) else 0
        if fits and not self._runtime.has_positions:
            logger.info("%s of host KV cache have room for %s tokens", budget, f"{fits:,}")
            return
        logger.warning(
            "%s of host KV cache have room for %s of the context's %s tokens; raise "
            "max_memory={'cpu': ...} (--max-memory cpu=SIZE)",
            budget,
            f"{fits:,}",
            f"{most:,}",
        )

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
            is_ready: asked before each token, or a few, whether it may be chosen now.
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
                num_queued = self.num_waiting - self._num_free_places  # others start at once
                raise QueueFullError(
                    f"{num_queued} requests wait already, and max_queued is "
                    f"{self.max_queued}; try again later"
                )
            self._requests[request.request_id] = request
            self._arrived.append(request)
            self._inbox.notify_all()
        return request.request_id

    def cancel(self, request_id: str) -> bool:
        """Have a request end with the reason "cancelled", at the next step, or behind a layer of a
        slice that is read of its prompt; False: it has ended."""
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
    def stats(self) -> EngineStats:
        """Counts since the engine was made."""
        return self._steps.stats

    @property
    def has_work(self) -> bool:
        """Whether there is a request."""
        with self._inbox:
            return bool(self._requests)

    @property
    def has_thread(self) -> bool:
        """Whether a thread steps."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether no request is taken any more."""
        return self._stopping

    @property
    def kv_device_bytes(self) -> int:
        """Bytes of the KV cache that is on a device."""
        return int(self._runtime.decoder.device_bytes)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together that the model can have."""
        return int(self._runtime.max_context)

    @property
    def num_running(self) -> int:
        """Requests that are read or decoded."""
        return self._steps.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that are not."""
        return len(self._arrived) + len(self._steps.scheduler.waiting)

    @property
    def _num_free_places(self) -> int:
        return max(0, self.max_num_seqs - self.num_running)

    @torch.inference_mode(False)
    def step(self) -> list[RequestOutput]:
        """Decode a token of each running request, or with a GPU up to four where no request waits,
        and read a slice of a prompt if it is time.

        Errors of a request end that request. What `on_output` was called with is returned. Ctrl-C
        comes behind the step.
        """
        with self._runtime.run_lock.lock, shielded():
            return self._steps.run()

    def _take_arrived(self) -> None:
        """The scheduler knows of those that came."""
        if not self._arrived:  # as a rule, and asked behind every layer of a slice
            return
        with self._inbox:
            arrived, self._arrived = self._arrived, []
            self._steps.scheduler.waiting.extend(arrived)

    def _take_cancelled(self) -> list[Request]:
        """Those to be cancelled that the scheduler knows; each is told once."""
        if not self._to_cancel:  # as a rule, and asked behind every layer of a slice
            return []
        with self._inbox:
            cancelled, arrived = list[Request](), {request.request_id for request in self._arrived}
            for request_id in self._to_cancel - arrived:
                if request_id in self._requests:
                    cancelled.append(self._requests[request_id])
            self._to_cancel &= arrived
            return cancelled

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
        thread = self._thread
        is_own = thread is threading.current_thread()
        with self._inbox:
            self._stopping, self._until = True, until
            self._inbox.notify_all()
            if finish and thread is not None and not is_own:
                left = None if until is None else max(0.0, until - time.monotonic())
                self._inbox.wait_for(lambda: not self._requests, left)
            if not (finish and is_own):
                self._to_cancel.update(self._requests)
            self._inbox.notify_all()
        if is_own:  # called by a callback: the thread closes when it is done
            return
        if thread is not None:
            thread.join()
            self._thread = None
        elif self.has_work:
            self.step()
        self._close()

    def _close(self) -> None:
        """Give all memory back; nothing is left to do when it is called again."""
        until = self._until
        with self._runtime.run_lock.lock:
            self._steps.close()
            if self.sessions is not None:
                self.sessions.close(None if until is None else max(0.0, until - time.monotonic()))

    def clear_prefixes(self) -> None:
        """Give back what is kept of prompts that were read."""
        with self._runtime.run_lock.lock:
            while self._steps.prefixes.drop():
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
        """The thread's loop."""
        while True:
            with self._inbox:
                self._inbox.wait_for(
                    lambda: self._requests or self._stopping or self._saves,
                    None if self.sessions is None else self.sessions.seconds_to_work,
                )
                if self._stopping and not self._requests:
                    break
            try:
                has_outputs = bool(self.step())
            except BaseException as error:
                logger.exception("the engine failed")
                self._fail(error)
                return
            # All wait: for memory that others have, or for their readers.
            if not has_outputs and not self._saves and not self._steps.scheduler.correcting:
                with self._inbox:
                    self._inbox.wait(_IDLE_SECONDS)
        self._close()

    def _fail(self, error: BaseException) -> None:
        """End all requests, and take no more."""
        with self._inbox:
            self.failure = error
            requests = [*self._requests.values()]
            self._arrived.clear()
        with self._runtime.run_lock.lock:
            for request in requests:
                try:
                    self._steps.emit_error(request, error)
                except BaseException:  # a callback's SystemExit, too: the others are told
                    logger.exception("request %s could not be ended", request.request_id)
                    self._requests.pop(request.request_id, None)

    def _forget(self, request: Request) -> None:
        """It is finished."""
        with self._inbox:
            del self._requests[request.request_id]
            self._inbox.notify_all()

    @property
    def _saves(self) -> bool:
        return self.sessions is not None and self.sessions.has_work
