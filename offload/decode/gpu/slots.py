"""Which sequence has which row of the decode steps, and the steps that have enough of them.

More rows, more tokens, or heads elsewhere mean other steps. What the GPU has of sequences goes
over to these (`ResidentKV.take_over`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from offload.decode.gpu.aside import StepsAside
from offload.decode.gpu.buffers import num_slots, step_tokens
from offload.decode.gpu.captured_steps import CapturedSteps
from offload.decode.gpu.layer_heads import LayerHeads, scores_tokens
from offload.decode.gpu.pages import PageBudget
from offload.decode.gpu.placement import HeadPlacement
from offload.decode.gpu.prepared_steps import BoundRows, PreparedSteps
from offload.decode.gpu.resident_kv import ResidentKV
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import shielded

logger = logging.getLogger(__name__)


class Slots:
    """A sequence that is bound has a row of `steps`, and pages there for all of its new tokens.

    Args:
        make_room: gives back what others have of the GPU for a while; whether it was anything.

    Attributes:
        steps: of the placement now; None: the next sequences that are bound have them made.
        kept: what the GPU has of sequences where there are no steps now.
        aside: steps that come next.
        captures_aside: steps to come are made while those that there are run.
    """

    def __init__(self, captured: CapturedSteps, make_room: Callable[[], bool]) -> None:
        self.steps: PreparedSteps | None = None
        self.kept: ResidentKV | None = None
        self.aside: StepsAside | None = None
        self._captured, self._make_room, self._placed = captured, make_room, captured.placed
        self._model, self._store = captured.model, captured.attention.store
        self.captures_aside = captured.backend == "graph" and self._model.ranks is None
        self._wanted = self._placed.placement  # of steps aside
        self._keeps_steps = False  # those made aside wait until a burst is over
        self._agreed_on: tuple[object, ...] | None = None  # by `_fails_anywhere`

    @property
    def resident(self) -> ResidentKV | None:
        """What the GPU has of sequences."""
        return self.kept if self.steps is None else self.steps.step.resident

    @property
    def device_bytes(self) -> int:
        """Bytes of the KV cache that is on the device."""
        return 0 if self.resident is None else self.resident.num_bytes

    def bind(self, seqs: Sequence[int], num_new: int = 1, keeps_steps: bool = False) -> BoundRows:
        """A row for each of `seqs`, with room for `num_new` more tokens.

        Where the GPU has no room, others give some back, and then heads leave it.

        Args:
            keeps_steps: those that were made aside wait, unless the ones now have too few rows.

        Raises:
            DeviceMemoryError: no placement that is allowed has room for them.
        """
        self._keeps_steps = keeps_steps
        kv_lens, keeps = [self._store.kv_len(seq) + num_new for seq in seqs], self._placed.keeps
        fallbacks: Iterator[HeadPlacement] | None = None
        while True:
            slots: list[int] = []
            failure: DeviceMemoryError | None = None
            try:
                slots = self._bind_lens(seqs, kv_lens)
            except DeviceMemoryError as error:
                if keeps:
                    raise
                failure = DeviceMemoryError(str(error))  # its traceback would hold the pages
            if keeps or not self._fails_anywhere(failure, seqs, kv_lens):
                assert self.steps is not None
                return BoundRows(self.steps, seqs, slots, kv_lens)
            why = failure or DeviceMemoryError("the GPU of another rank has no room for its part")
            if fallbacks is None:  # only now: a step has no time for it
                less_of = self._placed.fallbacks(len(seqs), max(kv_lens), self.device_bytes)
                fallbacks = iter(less_of)
            less = next(fallbacks, None)
            if less is None:
                raise why
            self._give_up(less, why, sum(map(self._placed.num_pages, kv_lens)))

    def steps_for(self, num_sequences: int, kv_len: int) -> PreparedSteps:
        """Steps with at least `num_sequences` rows, and where heads publish on the GPU with room
        for the scores of `kv_len` tokens; more than there was means new captures.
        """
        if self.aside is not None:
            assert self.steps is not None
            serves = self.steps.has_room(num_sequences, kv_len)
            if not serves or (self.aside.is_done and not self._keeps_steps):
                self._swap(serves=serves)
            if self.aside is not None:
                return self.steps
        # As many as are expected: others join, and tokens come, without new captures.
        expected, max_context = self._placed.expected, self._model.shape.max_context
        num_sequences = max(num_sequences, expected.num_sequences)
        kv_len = min(max(kv_len, expected.kv_len), max_context)
        rows = num_slots(num_sequences)
        if self.steps is not None:
            if self.steps.has_room(num_sequences, kv_len):
                return self.steps
            rows = max(rows, self.steps.num_slots)
        start, placed = time.perf_counter(), self._placed
        self._retire_steps()  # their memory first
        wanted = placed.placement, placed.layers, rows, self._room_for(kv_len, placed.layers)
        if self.kept is not None:
            try:
                new = self._captured.make(*wanted, self.kept.budget)
                with shielded():  # two that own the same pages would give them to others
                    new.step.resident.take_over(self.kept)
                    self.steps, self.kept = new, None
            except (DeviceMemoryError, torch.OutOfMemoryError) as error:
                logger.debug("no room for new steps beside what is there: %s", error)
                new = None
        self.kept = None
        if self.steps is None:
            self.steps = self._captured.make(*wanted, PageBudget())
        self._captured.setup_seconds += time.perf_counter() - start
        return self.steps

    def place(self, placement: HeadPlacement) -> None:
        """Attend as `placement` says from now on; ValueError as of `PlacedHeads.check`."""
        self._placed.check(placement)
        self._drop_aside()
        with shielded():  # no step of one placement may run as another says
            self._placed.use(placement)
            self._retire_steps()
            if self.kept is not None:
                self.kept.keep(self._placed.layers)

    def go_to(self, wanted: HeadPlacement) -> None:
        """Have steps of `wanted` for what is expected: aside, where sequences are bound."""
        captured, steps = self._captured, self.steps
        is_watched = captured.on_mark is not None or captured.after_projection is not None
        goes_aside = self.captures_aside and not is_watched
        if goes_aside and steps is not None and steps.step.resident.is_bound:
            return self._begin_aside(wanted, steps)
        self._drop_aside()
        changes, ranks = wanted != self._placed.placement, self._model.ranks
        if changes if ranks is None else ranks.total(int(changes))[0]:
            self.place(wanted)

    def finish_aside(self) -> None:
        """Nothing is captured in a thread from now on: what is wanted is made by the next step,
        unless it is there."""
        if self.aside is not None:
            steps = self.aside.wait()
            if steps is None or not self._serve_expected(steps, self.aside.placement):
                self.place(self._wanted)

    def give_heads_back(self, why: DeviceMemoryError) -> bool:
        """As `Decoder.give_heads_back`."""
        if self.aside is not None:
            self.place(self._wanted)  # it is made by the next step
            return True
        if self.steps is not None and not self.steps.step.resident.is_bound:
            self.drop()  # they are made again
            return True
        less, expected = self._placed.less_for_prefill(self.device_bytes), self._placed.expected
        if less is not None:
            num_pages = expected.num_sequences * self._placed.num_pages(expected.kv_len)
            self._give_up(less, why, num_pages)
        return less is not None

    def drop(self) -> None:
        """Drop the steps, and what the GPU has of sequences."""
        self._drop_aside()
        with shielded():
            if self.steps is not None:
                self.steps.close()
            self.steps = self.kept = None

    def forget(self, seq: int) -> None:
        """What the GPU has of `seq` is no longer true, or no longer needed."""
        if self.resident is not None:
            self.resident.forget(seq)
        if self.kept is not None and not self.kept.is_bound:
            self.kept = None

    def _give_up(self, less: HeadPlacement, why: DeviceMemoryError, num_pages: int) -> None:
        self.drop()  # and all pages, before others need room
        with shielded():
            self._placed.give_up(less, why, num_pages)

    def _fails_anywhere(
        self, failure: DeviceMemoryError | None, seqs: Sequence[int], kv_lens: Sequence[int]
    ) -> bool:
        """Whether this rank, or another, has no room. Steps are captured by all ranks or by none,
        since capturing runs their sums; they agree whenever some sequence needs new memory.
        """
        ranks, placed = self._model.ranks, self._placed
        if ranks is None:
            return failure is not None
        has_codes = [kv_len > self._captured.attention.budget_tokens for kv_len in kv_lens]
        pages = [placed.num_pages(kv_len) for kv_len in kv_lens]
        new = (list(seqs), pages, has_codes, placed.num_changes)
        if new == self._agreed_on:  # and there was room
            if failure is not None:
                raise failure
            return False
        self._agreed_on = new
        return ranks.total(int(failure is not None))[0] > 0

    def _bind_lens(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        try:
            return self._bind_beside(seqs, kv_lens)
        except DeviceMemoryError:
            if not self._make_room():
                raise
        return self._bind_beside(seqs, kv_lens)

    def _bind_beside(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        if self.aside is not None:
            try:
                return self._bind_in_room(seqs, kv_lens)
            except DeviceMemoryError as error:
                if self.aside is None:
                    raise
                logger.debug("no room beside steps that are being made: %s", error)
            self.place(self._wanted)
        return self._bind_in_room(seqs, kv_lens)

    def _bind_in_room(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        resident = self.steps_for(len(seqs), max(kv_lens)).step.resident
        if resident.took_over:
            resident.took_over = False
            try:
                return self._bind_to(resident, seqs, kv_lens)
            except DeviceMemoryError:  # pages lie as they were needed before
                resident.clear()
        return self._bind_to(resident, seqs, kv_lens)

    @staticmethod
    def _bind_to(resident: ResidentKV, seqs: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        slots = resident.bind(seqs)
        resident.reserve(slots, kv_lens)
        return slots

    def _room_for(self, kv_len: int, layers: Sequence[LayerHeads]) -> int:
        """`step_tokens`; as scores are kept of heads that publish or have codes. All ranks do as if
        they had some: they capture together.
        """
        grows = self._model.ranks is not None or scores_tokens(layers)
        max_context = self._model.shape.max_context
        return step_tokens(max_context, kv_len, self._store.page_tokens, grows=grows)

    def _begin_aside(self, wanted: HeadPlacement, old: PreparedSteps) -> None:
        """Make steps of a placement for what is expected, if there are none. What is being made
        comes to its end: whether it is what is wanted shows then.
        """
        self._wanted, placed = wanted, self._placed
        if self.aside is not None:
            return
        if self._serve_expected(old, placed.placement):
            self._captured.attention.expect_on_device(placed.placement.on_device)  # no others
            return
        resident, expected, layers = old.step.resident, placed.expected, placed.layers_of(wanted)
        rows = num_slots(expected.num_sequences)
        slots = max(rows, num_slots(sum(slot.seq is not None for slot in resident.slots)))
        if wanted == placed.placement:
            slots = max(slots, old.num_slots)
        kv_len = min(expected.kv_len, self._model.shape.max_context)
        max_tokens, budget, taken = self._room_for(kv_len, layers), resident.budget, old.streams
        capture = self._captured.capture_for(rows)

        def make() -> PreparedSteps:
            return self._captured.make(wanted, layers, slots, max_tokens, budget, taken)

        with shielded():  # the thread that was started is ours
            self.aside = StepsAside(wanted, make, capture, self._captured.device)
        self._captured.attention.expect_on_device(wanted.on_device)
        self.aside.wait_for_buffers()  # a prefill counts what is free

    def _serve_expected(self, steps: PreparedSteps, placement: HeadPlacement) -> bool:
        num_sequences, kv_len, _ = self._placed.expected
        kv_len = min(kv_len, self._model.shape.max_context)
        return steps.has_room(num_sequences, kv_len) and placement == self._wanted

    def _swap(self, *, serves: bool) -> None:
        """Between two steps: go on with those that were made aside, when they are done.

        Args:
            serves: those that there are would do for the next step, too.
        """
        old = self.steps
        assert self.aside is not None
        assert old is not None
        start = time.perf_counter()
        self.aside.wait()
        with shielded():
            steps, placement, self.aside = self.aside.wait(), self.aside.placement, None
            if steps is not None and self._serve_expected(steps, placement):
                try:
                    self._replace_steps(steps, placement)
                except torch.OutOfMemoryError as error:
                    logger.debug("no room to go on with steps that were made aside: %s", error)
            else:  # others are expected meanwhile, or these could not be made
                if steps is not None:
                    steps.close()
                can_wait = serves and (
                    steps is not None or self._serve_expected(old, self._placed.placement)
                )
                steps = None  # their memory first
                if can_wait:
                    self._begin_aside(self._wanted, old)
                else:
                    old = None
                    self.place(self._wanted)
        self._captured.setup_seconds += time.perf_counter() - start

    def _replace_steps(self, steps: PreparedSteps, placement: HeadPlacement) -> None:
        old = self.steps
        assert old is not None
        if placement == self._placed.placement:
            steps.learn_from(old)
        self._placed.use(placement)
        try:
            steps.step.resident.take_over(old.step.resident)
        except BaseException:
            steps.close()
            self.drop()
            raise
        self.steps = steps
        old.close()

    def _drop_aside(self) -> None:
        if self.aside is not None:
            steps = self.aside.wait()
            self.aside = None
            if steps is not None:
                steps.close()

    def _retire_steps(self) -> None:
        """Drop the steps; what the GPU has of sequences stays for others.

        With ranks nothing stays: where one of them has no room for it, their slots would differ.
        """
        self._drop_aside()
        with shielded():
            if self.steps is not None:
                resident = self.steps.step.resident
                if self._model.ranks is None and resident.is_bound:
                    self.kept = resident
                self.steps.close()
            self.steps = None
