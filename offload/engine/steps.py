"""What a step of the engine does, between the requests that come and the outputs that go."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.engine.preemption import Preempted
from offload.engine.prefixes import Prefixes
from offload.engine.request import Request, RequestOutput
from offload.engine.runner import Passes
from offload.engine.sampler import Chosen, choose
from offload.engine.scheduler import Admission, Scheduler
from offload.engine.sessions import Sessions
from offload.engine.working_memory import WorkingMemory
from offload.system.errors import DeviceMemoryError, HostBudgetError, SessionMiss
from offload.system.memory import give_back_free_memory
from offload.system.torch_threads import torch_threads

logger = logging.getLogger(__name__)

# Of each step in which requests are answered.
_SAVING_SECONDS = 0.01
_RESTORING_SECONDS = 0.03
# Of a `run`, where no request waits: one that comes meanwhile does.
_STEPS_IN_TURN = 4
_ABOUT_AS_LONG = 1.25
_MANY_TOKENS = 2048  # reading them takes seconds, giving back what they leave milliseconds


@dataclass
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        prompt_tokens: that were read; those that were shared are `cached_tokens`.
        answer_tokens: that were chosen.
        corrected_tokens: decoded ones that were read again.
        preempted: times that a running request made room for others.
        decode_steps: each of all running requests.
        read_seconds, decode_seconds: of slices and steps.
        step_seconds: of all that `Engine.step` does; `pass_seconds` of it the model takes.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    corrected_tokens: int = 0
    decode_steps: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: float = 0.0
    pass_seconds: float = 0.0


class _SliceGivenUp(Exception):
    """Nobody waits any more for what a slice reads."""


class Steps:
    """Steps of one engine, whose model's lock the caller has.

    Args:
        take_arrived: has the scheduler know of those that came; called before a step, and behind
            layers of a slice.
        take_cancelled: gives requests whose answers are no longer wanted, each once; asked before a
            step, and behind every layer of a slice.
        on_finished: told of each request that has ended.
    """

    def __init__(
        self,
        passes: Passes,
        scheduler: Scheduler,
        prefixes: Prefixes,
        sessions: Sessions | None,
        take_arrived: Callable[[], None],
        take_cancelled: Callable[[], list[Request]],
        on_finished: Callable[[Request], None],
        overcommit: float,
        working: WorkingMemory,
    ) -> None:
        self.scheduler, self.prefixes, self.stats = scheduler, prefixes, EngineStats()
        runtime = passes.runtime
        self.admission = Admission(
            runtime.store,
            runtime.attention.states,
            runtime.sequences.corrections,
            overcommit,
            runtime.sequences,
            working,
        )
        self._num_read = 0  # since free memory was given back
        self._preempted = Preempted(runtime)
        self._passes, self._sessions, self._on_finished = passes, sessions, on_finished
        self._take_arrived, self._take_cancelled = take_arrived, take_cancelled
        self._cancelled: list[Request] = []  # that have not ended yet
        self._begun = (0, 0)  # sequences and tokens that the decoder expects
        self._most_at_once = 1  # requests since one was alone
        self._others = runtime.current_generation
        self._outputs: list[RequestOutput] = []
        self._slice_began = 0.0
        self._in_slice: list[Request] = []  # that a pass reads just now
        self._next_tokens = 0  # of their next slice, for which there are no pages yet
        self._within_seconds = 0.0  # of reading others between its layers
        self._reads_others = False  # which there is room for
        self._read_again: Request | None = None  # once, for want of a GPU's memory

    def run(self) -> list[RequestOutput]:
        """One step: its outputs."""
        start, self._outputs = time.perf_counter(), []
        self._passes.runtime.sequences.collect()
        self._take_arrived()
        self._cancel()
        self.scheduler.admit(self._fits)
        self._restore(_RESTORING_SECONDS if self.scheduler.running else math.inf)
        self._decode(1 if self.scheduler.keeps_waiting else _STEPS_IN_TURN)
        self._read()
        if self._sessions is not None:
            self._sessions.work(_SAVING_SECONDS)
        self.stats.step_seconds += time.perf_counter() - start
        self.stats.pass_seconds = self._passes.seconds
        return self._outputs

    def _cancel(self) -> None:
        """End those whose answers are no longer wanted, unless their prompts are being read."""
        self._cancelled += self._take_cancelled()
        ending = [request for request in self._cancelled if request not in self._in_slice]
        self._cancelled = [request for request in self._cancelled if request in self._in_slice]
        for request in ending:
            if not request.is_over:
                request.finish_reason = "cancelled"
                self._emit(request, request.output())

    def _fits(self, requests: list[Request]) -> bool:
        """Whether the last of `requests` may join the others."""
        newest, sessions, sizes = requests[-1], self._sessions, self._sizes(requests)
        # Short ones do not count: they are not what takes long.
        alike = sum(2 * size > max(sizes) for size in sizes)
        is_alike = 2 * sizes[-1] > max(sizes)
        if is_alike and alike > 1 and alike > self._most_together(sizes):
            return False
        seq = None if sessions is None else sessions.seq_of(newest)
        if not self.admission.fits(requests, seq):
            self._passes.runtime.store.trim()
        while not self.admission.fits(requests, seq):
            if sessions is not None and sessions.has_others(newest.session_id):
                if sessions.spill(newest.session_id, writes=False):
                    continue
                return False  # until one is written
            # Prefixes are kept until they are all that is in the way.
            if len(requests) > 1 and not self.admission.fits(
                requests, seq, self.prefixes.num_bytes
            ):
                return False
            if not self.prefixes.drop():
                return False
            self._passes.runtime.store.trim()
        if len(requests) > 1 and not self._fits_device(requests):
            return False
        if not self._expect(requests):
            return False
        if newest.is_preempted:
            newest.restoring = self._preempted.restore(newest)
        elif sessions is not None and newest.session_id and not sessions.attach(newest):
            newest.restoring = sessions.restore(newest)
        return True

    def _sizes(self, requests: Iterable[Request]) -> list[int]:
        """Tokens of each at its end, as is expected."""
        return [*map(self.admission.expected_tokens, requests)]

    def _most_together(self, sizes: Sequence[int]) -> int:
        """Requests as long as the longest that had best be decoded together."""
        most, reads = self.scheduler.max_num_seqs, self.scheduler.most_slice_tokens
        return self._passes.runtime.decoder.most_together(most, max(sizes), reads)

    def _expect(self, requests: list[Request]) -> bool:
        """Have the decoder place heads for them, and for as many of those behind them as fit too,
        where they are more or longer than before; whether it has room."""
        runtime, waiting = self._passes.runtime, self.scheduler.waiting
        if runtime.current_generation is not self._others:  # who has had the decoder meanwhile
            self._others, self._begun = runtime.current_generation, (0, 0)
        # All is for one alone where the last one was, too: behind many as many are soon to come,
        # if they are about as long.
        is_alone = len(requests) == 1
        is_for_one = is_alone and self._most_at_once == 1
        self._most_at_once = 1 if is_alone else max(self._most_at_once, len(requests))
        sizes = [request.most_tokens for request in requests]
        about = _ABOUT_AS_LONG * max(sizes)
        most = self._most_together(self._sizes(requests)) if len(requests) + len(waiting) > 2 else 1
        behind = [
            x.most_tokens for x in itertools.islice(waiting, 1, max(1, 1 + most - len(sizes)))
        ]
        together = [*sizes, *itertools.takewhile(lambda size: size <= about, behind)]
        together = together[: max(len(sizes), self.admission.most_requests(max(together)))]
        (num_begun, kv_len), tried = self._begun, set[tuple[int, int]]()
        # Where there is no room for as many as before, those that are there may have some.
        for expected, before in ((together, num_begun), (sizes, num_begun), (sizes, 0)):
            # A power of two, so that the decoder rarely has to place heads anew.
            count = 1 << (len(expected) - 1).bit_length()
            count = min(self.scheduler.max_num_seqs, count)
            longest = max(expected)
            if not is_for_one:
                if longest <= _ABOUT_AS_LONG * kv_len:
                    count = max(count, before)
                if count <= num_begun and longest <= kv_len:
                    return True
            if (count, longest) in tried:
                continue
            tried.add((count, longest))
            try:
                if (corrections := runtime.sequences.corrections) is not None:
                    corrections.check_device(1, longest)
                runtime.decoder.begin_generation(count, longest, self.scheduler.most_slice_tokens)
            except DeviceMemoryError as error:
                failure = error.with_traceback(None)
                continue
            except Exception as error:
                self.emit_error(requests[-1], error)
                return False
            self._begun = (count, longest)
            return True
        if is_alone:
            self.emit_error(requests[-1], failure)
        return False

    def _fits_device(self, requests: list[Request]) -> bool:
        """The same of states on a GPU: kept prompts and idle sessions give way."""
        if not self.admission.fits_device(requests, self._passes.runtime.decoder.device_bytes):
            return False
        newest, sessions = requests[-1], self._sessions
        while not self.admission.fits_device(requests):
            has_gone = sessions is not None and sessions.spill(newest.session_id, writes=False)
            if not (has_gone or self.prefixes.drop()):
                return False
        return True

    def _restore(self, seconds: float) -> None:
        """Some of what is on disk, for so long and a piece more."""
        until = time.perf_counter() + seconds
        for request in [*self.scheduler.restoring]:
            assert request.restoring is not None
            try:
                for _ in request.restoring:
                    if time.perf_counter() >= until:
                        return
            except SessionMiss as miss:
                self.scheduler.remove(request)
                request.restoring = None
                has_no_room = isinstance(miss.__cause__, MemoryError)  # else its file is damaged
                if has_no_room and self.scheduler.num_running:  # which give memory back
                    self.scheduler.waiting.appendleft(request)
                else:
                    self.emit_error(request, miss)
                continue
            self.scheduler.restoring.remove(request)
            request.restoring = None
            self.scheduler.begin(request)

    def _decode(self, most: int = 1) -> None:
        """Up to `most` tokens of each that runs."""
        rows = self._not_due(self._ready())
        if not rows:
            self.scheduler.waits_for_readers()
            return
        start = time.perf_counter()
        self.stats.decode_steps += self._decode_rows(rows, most)
        seconds = time.perf_counter() - start
        self.scheduler.was_decoded(seconds)
        self.stats.decode_seconds += seconds

    def _ready(self) -> list[Request]:
        """Those that run, and whose next token may be chosen now."""
        ready: list[Request] = []
        for request in [*self.scheduler.running]:
            try:
                if request.is_ready():
                    ready.append(request)
            except Exception as error:  # in a slice it would be taken for one of the prompt's
                self.emit_error(request, error)
        return ready

    def _not_due(self, rows: list[Request]) -> list[Request]:
        """Those that decode their next token; the others are corrected before it."""
        for request in rows:
            assert request.seq is not None
            request.correction = self._passes.correction(request.seq)
            if request.correction is not None:
                self.scheduler.correct(request)
        return [request for request in rows if request.correction is None]

    def _decode_rows(self, rows: list[Request], most: int = 1) -> int:
        """One token of each, or a few; where that fails, of each by itself. How many steps."""
        if not rows:
            return 1
        seqs = [request.seq for request in rows if request.seq is not None]
        tokens = [request.answer[-1] for request in rows]
        asked = ((request.seq, request.budget) for request in rows)
        budgets = {seq: n for seq, n in asked if seq is not None and n is not None}
        # What is told meanwhile may wait for the GPU.
        taken: list[Callable[[], None]] = []

        def take(tokens: list[int]) -> bool:
            pairs = zip(rows, tokens, strict=True)
            taken.extend(self._taken(request, Chosen(token)) for request, token in pairs)
            return min(tokens) >= 0 and all(request.finish_reason is None for request in rows)

        failure: Exception | None = None
        try:
            if all(map(self._chooses_in_step, rows)):
                left = min(request.max_tokens - len(request.answer) for request in rows)
                samplers = [request.sampler for request in rows]
                self._passes.choose(seqs, tokens, samplers, budgets, min(most, left), take)
            else:
                logits = self._passes.logits_after(seqs, tokens, budgets)
                found = self._chosen_at_once(rows, logits)
                for i, request in enumerate(rows):
                    if i in found:
                        taken.append(self._taken(request, Chosen(found[i])))
                    else:
                        taken.append(functools.partial(self._choose, request, logits[i]))
        except Exception as error:
            failure = error
        num_steps = len(taken) // len(rows) + (failure is not None)
        for tell in taken:
            tell()
        rows = [request for request in rows if request.finish_reason is None]
        if failure is None or not rows:  # callbacks of all have failed meanwhile
            return num_steps
        if isinstance(failure, HostBudgetError):
            if self._make_room():
                self._decode_rows([row for row in rows if row.seq is not None])
            elif self._in_slice:  # when it has ended, the youngest of those it reads makes room
                self.scheduler.waits_for_readers()
            else:
                self.emit_error(rows[-1], failure)
        elif len(rows) == 1:
            self.emit_error(rows[0], failure)
        else:
            logger.warning("a step of %d requests failed: %s", len(rows), failure)
            for row in rows:
                self._decode_rows([row])
        return num_steps

    def _chosen_at_once(self, rows: list[Request], logits: torch.Tensor) -> dict[int, int]:
        """By row the tokens of those that need no logits, in a step with others that do."""
        plain = [i for i, request in enumerate(rows) if self._chooses_in_step(request)]
        try:
            chosen = self._passes.chosen(logits[plain], [rows[i].sampler for i in plain])
        except Exception as error:  # their last tokens are in the cache: no step may do it again
            logger.debug("one by one: %s", error)
            return {}
        return dict(zip(plain, chosen, strict=True))

    def _chooses_in_step(self, request: Request) -> bool:
        is_greedy = request.params.temperature == 0.0
        return (is_greedy or self._passes.runtime.decoder.samples) and not request.needs_logits

    def close(self) -> None:
        """Give back what is kept of prompts that were read, and for requests that have ended."""
        while self.prefixes.drop():
            pass
        self._preempted.close()
        self.admission.close()
        self._passes.runtime.decoder.end_generation()

    def _make_room(self) -> bool:
        """More came than was expected: prefixes go, then idle sessions, then what comes back from
        disk, then the youngest request waits there, unless a pass reads it just now."""
        if (
            self.prefixes.drop()
            or (self._sessions is not None and self._sessions.spill())
            or self._give_up_restoring()
        ):
            self._passes.runtime.store.trim()
            return True
        request = self.scheduler.preempt(self._in_slice)
        if request is None:
            return False
        self._give_up_correction(request)
        try:
            self._preempted.save(request)
        except Exception as error:
            self.emit_error(request, error)
        self.stats.preempted += 1
        self._passes.runtime.store.trim()
        return True

    def _give_up_restoring(self) -> bool:
        """The last request that comes back from disk waits there again; False: there is none."""
        if not self.scheduler.restoring:
            return False
        request = self.scheduler.restoring.pop()
        assert request.restoring is not None
        request.restoring.close()  # type: ignore[attr-defined]
        request.restoring = None
        self.scheduler.waiting.appendleft(request)
        return True

    def _read(self) -> None:
        parts = self.scheduler.next_slice(self.prefixes.num_left)
        if not parts:
            return
        # What is decoded in between does not count.
        self._slice_began = time.perf_counter() - self.stats.decode_seconds
        self._within_seconds, self._reads_others = 0.0, self.scheduler.reads_others
        for request, size in parts:
            if request.is_read:
                self._correct(request, size)
        if prompts := [part for part in parts if not part[0].is_read]:
            self._read_parts(prompts)
        seconds = self._slice_seconds()
        num_tokens = sum(size for request, size in parts if request.finish_reason != "cancelled")
        self.scheduler.was_read(num_tokens, seconds, self._within_seconds)
        self._give_back(num_tokens)
        self.stats.read_seconds += seconds

    def _give_back(self, num_tokens: int) -> None:
        """What slices of so many more tokens leave to the allocator, once they are many."""
        self._num_read += num_tokens
        if self._passes.runtime.device.type == "cpu" and self._num_read >= _MANY_TOKENS:
            give_back_free_memory()
            self._num_read = 0

    def _slice_seconds(self) -> float:
        """Seconds of reading since the slice began."""
        return time.perf_counter() - self.stats.decode_seconds - self._slice_began

    def _pause(self, own: Sequence[Request]) -> None:
        """Between two layers of a slice the others decode, if reading has had its share of time:
        how long a slice takes is not how long they wait. Who is cancelled ends here, too.

        Args:
            own: whose prompts the slice reads.

        Raises:
            _SliceGivenUp: all of them are cancelled. One of several waits for the slice's end: what
                the others have of it is not read again.
        """
        self._cancel()
        if self._next_tokens:  # this slice has its own by now
            self._passes.runtime.store.prepare(self._next_tokens)
            self._next_tokens = 0
        if all(request in self._cancelled for request in own):
            raise _SliceGivenUp
        if self.scheduler.owes(self._slice_seconds()):
            self._passes.wait()  # a step would, in its own time
            self.scheduler.owes(self._slice_seconds())
            self._decode()
            while self.scheduler.decodes_first:
                self._decode()
        if len(own) == len(self._in_slice):  # it is not within another
            self._restore_within()
            if self._reads_others:
                self._read_within(own)

    def _restore_within(self) -> None:
        """Sequences come back from disk between the layers, too: a slice takes as long as many of
        their pieces. They have as much time as the slice has had."""
        if self.scheduler.restoring and 2 * self._within_seconds <= self._slice_seconds():
            began = self._slice_seconds()
            self._restore(_RESTORING_SECONDS)
            self._within_seconds += self._slice_seconds() - began

    def _read_within(self, own: Sequence[Request]) -> None:
        """Short prompts, also those that have come meanwhile, do not wait for a long one's end.
        They have as much time as the slice has had."""
        while self._reads_others and 2 * self._within_seconds <= self._slice_seconds():
            self._take_arrived()
            self.scheduler.admit(self._fits)
            part = self.scheduler.read_within(own, self.prefixes.num_left)
            if part is None:
                return
            began = self._slice_seconds()
            self._read_parts([part])
            self._within_seconds += self._slice_seconds() - began

    def _correct(self, request: Request, size: int) -> None:
        """Read some decoded tokens again; behind the last of them it goes on."""
        correction = request.correction
        if correction is None or request.seq is None:
            return  # it has made room for another one
        try:
            self._passes.correct(request.seq, correction, size)
            if correction.num_left:
                return
        except Exception as error:
            self._passes.give_up(correction)  # the next slice begins it again
            if not isinstance(error, HostBudgetError) or not self._make_room():
                self.emit_error(request, error)
            return
        request.correction = None
        self.stats.corrected_tokens += correction.num_tokens
        self.scheduler.was_corrected(request)

    def _give_up_correction(self, request: Request) -> None:
        if request.correction is not None:
            self._passes.give_up(request.correction)
            request.correction = None

    def _read_parts(self, parts: list[tuple[Request, int]]) -> None:
        """Some tokens of each prompt; where that fails, of each by itself."""
        spans: list[tuple[Request, int, int]] = []
        # Others have made room, or could not be saved.
        parts = [part for part in parts if part[0] in self.scheduler.reading]
        if not parts:
            return
        try:
            for request, size in parts:
                self._begin(request)
                stop = min(request.num_read + size, self.prefixes.next_stop(request))
                spans.append((request, request.num_read, stop))
            self._next_tokens = sum(min(b - a, len(r.prompt) - b) for r, a, b in spans)
            own, outer = [request for request, _, _ in spans], self._in_slice
            self._in_slice = [*outer, *own]
            try:
                hidden = self._passes.read(
                    [(r.seq, r.prompt[a:b]) for r, a, b in spans if r.seq is not None],
                    builds=any(stop == len(request.prompt) for request, _, stop in spans),
                    between=functools.partial(self._pause, own),
                )
            finally:
                self._in_slice = outer
        except _SliceGivenUp:
            self._cancel()
            return
        except Exception as error:
            if isinstance(error, HostBudgetError):
                if self._make_room():
                    return  # the next step reads them
                if self._in_slice:  # they wait for what the slice around them reads
                    self._reads_others = False
                    return
            # Those that decode in its middle may have taken what a slice has counted.
            is_new = parts[0][0] is not self._read_again
            if isinstance(error, DeviceMemoryError) and self.scheduler.running and is_new:
                self._read_again = parts[0][0]
                return
            if len(parts) == 1:
                self.emit_error(parts[0][0], error)
                return
            logger.warning("a slice of %d prompts failed: %s", len(parts), error)
            for part in parts:
                self._read_parts([part])
            return
        for (request, start, stop), of_prompt in zip(spans, hidden, strict=True):
            self._was_read(request, start, stop, of_prompt)

    def _begin(self, request: Request) -> None:
        """Give it a sequence, with what there is of others' prompts."""
        if request.seq is None:
            self.prefixes.begin(request)

    def _was_read(self, request: Request, start: int, stop: int, hidden: torch.Tensor) -> None:
        request.num_read = stop
        self.stats.prompt_tokens += stop - start
        self.prefixes.mark(request)
        try:
            if request.params.prompt_logprobs is not None:
                following = request.prompt[start + 1 : stop + 1]
                request.prompt_scores = self._passes.scores(
                    hidden, following, request.params.prompt_logprobs
                )
            if not request.is_read:
                self._emit(request, request.output())
                return
            logits = self._passes.logits(hidden[-1:])[0]
        except Exception as error:
            self.emit_error(request, error)
            return
        self.stats.cached_tokens += request.num_cached
        self.scheduler.reading.remove(request)
        self.scheduler.running.append(request)
        self.prefixes.keep(request)
        self._choose(request, logits)

    def _choose(self, request: Request, logits: torch.Tensor) -> None:
        try:
            ends = request.ends if request.must_go_on else ()
            uniform = float(request.sampler.uniform())
            with torch_threads(1):  # others would wait for CPUs on which our workers still spin
                chosen = choose(
                    logits, request.params, request.prompt, request.answer, uniform, ends
                )
        except Exception as error:
            self.emit_error(request, error)
            return
        self._taken(request, chosen)()

    def _taken(self, request: Request, chosen: Chosen) -> Callable[[], None]:
        """Adds the next token of an answer; what tells of it."""
        if chosen.token < 0:
            error = RuntimeError("non-finite logits")
            return functools.partial(self.emit_error, request, error)
        self.stats.answer_tokens += 1
        try:
            return functools.partial(self._emit, request, request.take(chosen))
        except Exception as error:
            request.finish_reason = "error"  # and no further token
            return functools.partial(self.emit_error, request, error)

    def emit_error(self, request: Request, error: BaseException) -> None:
        """End a request."""
        logger.warning("request %s failed: %s", request.request_id, error)
        request.finish_reason = "error"
        self._emit(request, request.output(error=error))

    def _emit(self, request: Request, output: RequestOutput) -> None:
        """Tell who asked; free what a finished request has."""
        if request.is_over:  # its callback has failed
            return
        if output.finish_reason is not None:
            self._finish(request)
        if request.on_output is not None:
            try:
                request.on_output(output)
            except Exception as error:
                logger.exception("on_output of request %s", request.request_id)
                request.finish_reason = "error"
                if not request.is_over:
                    self._finish(request)
                output = replace(output, finish_reason="error", error=error)
        self._outputs.append(output)

    def _finish(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._give_up_correction(request)
        if request.restoring is not None:
            request.restoring.close()  # type: ignore[attr-defined]
        if request.finish_reason == "error":
            self.stats.failed += 1
        elif request.finish_reason == "cancelled":
            self.stats.cancelled += 1
        else:
            self.stats.finished += 1
        if self._sessions is not None:
            self._sessions.keep(request)
        self.prefixes.end(request)
        self._preempted.forget(request)
        self._on_finished(request)
        request.is_over = True  # where something failed before, `Engine.failure` ends it
