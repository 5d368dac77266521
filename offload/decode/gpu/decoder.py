"""Decode on the GPU with the KV cache on the host; the CPU attends as its coprocessor.

Here is who decodes: sequences get slots, steps are run and accounted for. What they share is in
`prepared_steps`, what one launches in `step`, who waits for whom in `gpu_sync`, what stays on the
GPU in `resident_kv`. With device "cpu" and backend "inline" the same step runs on CPU tensors.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cpu_ops.coprocessor import Coprocessor
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.decode.gpu.aside import StepsAside
from offload.decode.gpu.buffers import HostLink, num_slots, step_tokens
from offload.decode.gpu.free_room import FreeRoom
from offload.decode.gpu.gpu_sync import GpuSync, Step, StepStreams, make_gpu_sync
from offload.decode.gpu.layer_heads import LayerHeads, layer_heads, scores_tokens
from offload.decode.gpu.linear import DeviceWeights, linear_path
from offload.decode.gpu.micro_batches import WORTH_A_TRIAL_STEPS
from offload.decode.gpu.pages import PageBudget
from offload.decode.gpu.placement import HOT_BUDGETS, HeadPlacement, Place, least_places
from offload.decode.gpu.prepared_steps import PreparedSteps
from offload.decode.gpu.resident_codes import CodeShape
from offload.decode.gpu.resident_kv import ResidentKV, check_resident_room, window_of
from offload.decode.gpu.step import DeviceStep
from offload.decode.sampling import MOST_STEPS, Draws, TokenChooser
from offload.kv.sequence_part import SequencePart
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.batch import RaggedBatch
from offload.policies import Policy
from offload.system.errors import DeviceMemoryError, HostBudgetError
from offload.system.interrupts import shielded

logger = logging.getLogger(__name__)

# Of the placement now, sequences, tokens of each, the GPU's bytes for it (None: no limit), and the
# tokens that a prefill reads (None: all).
PlacementChooser = Callable[[HeadPlacement, int, int, "int | None", "int | None"], HeadPlacement]
_NOTHING_EXPECTED = (1, 1, None)

# Kinds of steps, and what those that draw are called beside them.
_TOKENS, _BURSTS, _SAMPLED = "tokens", "bursts", "sampled "


@dataclass
class _StepsInTurn:
    """Steps of the same sequences, between `begin_steps` and `end_steps`.

    Attributes:
        is_launched: the next one is.
    """

    link: HostLink
    is_launched: bool = False


class DeviceDecoder(SequencePart):
    """The `Decoder` of a model with a GPU.

    Args:
        backend: as `gpu_sync.choose_backend` returns it.
        deadline_seconds: after which a step that one side does not finish is an error.
        device_budget_bytes: of what stays on the GPU beside weights and buffers.
        device_limit_bytes: of all that torch has there.
        placement: where each KV head is attended to; None: layers that the policy leaves dense on
            the GPU, all others on the CPU.
        keeps_placement: False: where the GPU has no room for the placement, it goes on without one
            until a generation begins that takes less room.
        choose: the placement for what is to come, asked whenever a generation begins, and when its
            placement does not fit. None: `placement` is for all.
        make_room: gives back what others have of the GPU for a while; whether it was anything.

    Attributes:
        after_projection, on_mark: see `DeviceStep`; steps with others are captured apart.
        setup_seconds: spent so far on what steps of a new kind or size need.
    """

    max_step_tokens: int | None = 1
    samples = True

    def __init__(
        self,
        model: LeanModel,
        store: KVStore,
        policy: Policy,
        *,
        device: torch.device,
        backend: str,
        num_threads: int,
        deadline_seconds: float = 5.0,
        device_budget_bytes: int | None = None,
        device_limit_bytes: int | None = None,
        placement: HeadPlacement | None = None,
        keeps_placement: bool = True,
        choose: PlacementChooser | None = None,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.store, self.device = model, store, device
        self._policy = policy
        self.pool = WorkerPool(num_threads)
        self.attention = DecodeAttention(
            policy,
            store,
            num_qo_heads=model.shape.num_qo_heads,
            pool=self.pool,
            sm_scale=model.sm_scale,
        )
        self.after_projection: Callable[[int, int, Tensor, Tensor], None] | None = None
        self.on_mark: Callable[[str, int], None] | None = None
        self.setup_seconds = 0.0
        self._window = window_of(policy)
        self._weights = DeviceWeights.of(model)
        self._backend = backend
        self._make_gpu_sync: Callable[..., GpuSync] = make_gpu_sync
        self._deadline_seconds = deadline_seconds
        self._device_budget_bytes = device_budget_bytes
        self._num_micro_batches = None if backend == "graph" else 1  # None: what proves faster
        self._keeps_placement = keeps_placement
        self._choose, self._make_room = choose, make_room
        self._free_room = FreeRoom(device, device_limit_bytes)
        self._agreed_on: tuple[list[int], list[int], list[bool]] | None = (
            None  # by `_fails_anywhere`
        )
        self._gave_up: tuple[HeadPlacement, int] | None = None  # and pages that it had no room for
        # By `begin_generation`: sequences, tokens of each, tokens that a prefill reads.
        self._expected: tuple[int, int, int | None] = _NOTHING_EXPECTED
        self._steps: PreparedSteps | None = None  # with the first sequences
        self._kept: ResidentKV | None = None  # of the last steps, for those that come next
        self._took_over = False
        self._keeps_steps = False  # those made aside wait until a burst is over
        self._in_turn: _StepsInTurn | None = None
        self._streams: list[StepStreams] = []
        self._captures_aside = backend == "graph" and model.ranks is None
        self._aside: StepsAside | None = None  # those that come next
        self._wanted: HeadPlacement | None = None  # of them
        self._kinds: set[str] = set()  # of steps that there have been
        self.place(placement or self._least_placement())
        if model.ranks is not None:
            model.ranks.close_before_leaving(self.close)

    @property
    def device_bytes(self) -> int:
        """Bytes of the KV cache that is on the device."""
        return 0 if self._resident is None else self._resident.num_bytes

    @property
    def coprocessors(self) -> list[Coprocessor]:
        """The coprocessors of all kinds of steps that there have been."""
        links = {} if self._steps is None else self._steps.links
        return [link.coprocessor for link in links.values()]

    def place(self, placement: HeadPlacement) -> None:
        """Attend as `placement` says from now on.

        Raises:
            ValueError: a placement of another model, or that the policy does not allow.
        """
        policy = self._policy
        num_kv_heads = self.store.num_kv_heads
        placement.check_model(num_layers=len(self.model.layers), num_kv_heads=num_kv_heads)
        placement.check_policy(policy, self.model.shape.num_qo_heads)
        self._drop_aside()
        with shielded():  # no step of one placement may run as another says
            self._attend_as(placement)
            self._retire_steps()
            if self._kept is not None:
                self._kept.keep(self._layers)

    def _attend_as(self, placement: HeadPlacement) -> None:
        self.placement, places = placement, placement.places
        self._layers = self._layers_of(placement)
        self.attention.leave_to_device(
            self._window, placement.on_device, places == Place.GATHER, places == Place.HOT
        )
        self._gave_up = self._agreed_on = None

    def _layers_of(self, placement: HeadPlacement) -> tuple[LayerHeads, ...]:
        policy = self._policy
        roles = None if policy.per_query_head else self.attention.roles
        return layer_heads(placement.places, roles, shares_selection=policy.shares_selection)

    def decode(self, hidden: Tensor, batch: RaggedBatch, seqs: Sequence[int]) -> Tensor:
        """As `Decoder.decode`, of one new token per sequence."""
        slots, kv_lens = self._bind(seqs)
        link, step = self._choose_link(slots), self._prepared.step
        run, b = self._step("layers", step, link), step.buffers
        self._prepare(link, "layers", run, kv_lens)
        self._write_state(slots, kv_lens, batch.position_ids)
        at = torch.tensor(slots, device=self.device)
        b.hidden[at] = hidden
        self._run(link, "layers", run, seqs, slots, kv_lens)
        hidden = b.hidden[at]
        # The keys below tell of every layer but the last.
        if not bool(hidden.isfinite().all()):
            raise RuntimeError(f"non-finite hidden states after layer {len(self.model.layers) - 1}")
        return hidden

    def choose_tokens(
        self,
        seqs: Sequence[int],
        tokens: Tensor,
        position_ids: Tensor,
        draws: Draws | None = None,
        *,
        ahead: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> Tensor:
        """One whole step: see `Decoder.choose_tokens`."""
        slots, kv_lens = self._bind(seqs)
        in_turn, step = self._in_turn, self._prepared.step
        link = self._choose_link(slots) if in_turn is None else in_turn.link
        kind = _TOKENS if draws is None else _SAMPLED + _TOKENS
        run = self._step(kind, step, link)
        if in_turn is None or not in_turn.is_launched:
            self._prepare(link, kind, run, kv_lens)
            self._write_state(slots, kv_lens, position_ids, tokens, draws)
        self._run(link, kind, run, seqs, slots, kv_lens, ahead=ahead, beside=beside)
        return step.buffers.host_tokens[slots]

    def begin_steps(self, seqs: Sequence[int], most: int) -> int:
        """As `Decoder.begin_steps`: the GPU begins with each when the CPU has what the last leaves.

        A policy whose shares change between steps, and a compression that wants their queries, look
        at what the GPU writes in the next step.
        """
        is_watched = self.model.ranks is not None or self.on_mark is not None
        attention = self.attention
        is_watched |= attention.top_p_controller is not None or attention.compression is not None
        # A step is launched when the host's pages are known up to the token before the last.
        is_late = self._window[1] < 2 and any(x.gathered or x.hot for x in self._layers)
        if most < 2 or is_watched or is_late:
            return 1
        slots, kv_lens = self._bind(seqs)
        link, steps = self._choose_link(slots), self._prepared
        resident, settled = steps.step.resident, None
        if self._num_micro_batches is None:
            settled = steps.settled_steps(link)
        most = min(most, steps.burst_length.num_steps, most if settled is None else settled)
        most = min(most, steps.max_tokens - max(kv_lens) + 1)
        # Codes and clusters come between two steps, where a sequence needs them.
        if resident.codes is not None or (resident.hot is not None and attention.estimate_clusters):
            budget = self._policy.budget_tokens
            most = min(most, *(budget - n + 1 for n in kv_lens if n <= budget), most)
        if most < 2:
            return 1
        ends = [kv_len + most - 1 for kv_len in kv_lens]
        # What is built or grown takes memory, and may give some back, for which CUDA waits.
        if not all(map(attention.states.serves, seqs, ends)):
            return 1
        try:  # single steps go as far as they can
            self.store.make_room(seqs, [most] * len(seqs))
            resident.reserve(slots, ends)
        except (DeviceMemoryError, HostBudgetError):
            return 1
        self._in_turn, self._keeps_steps = _StepsInTurn(link), True
        return most

    def end_steps(self) -> None:
        """As `Decoder.end_steps`."""
        if self._in_turn is None:
            return
        with shielded():
            in_turn, self._in_turn = self._in_turn, None
            self._keeps_steps = False
            if in_turn.is_launched:
                mailbox = in_turn.link.mailbox
                mailbox.hot_counts.zero_()  # it fetches nothing: hot rows stay
                mailbox.rest_counts[..., -1] = -1  # nor changes means
                in_turn.link.gpu_sync.discard()

    def tokens_at_once(self, seqs: Sequence[int], most: int) -> int:
        """As `Decoder.tokens_at_once`: a burst, if the GPU has all heads of all of them."""
        is_watched = self.model.ranks is not None or self.on_mark is not None
        if most < 2 or is_watched or not all(layer.is_resident for layer in self._layers):
            return 1
        self._bind(seqs, min(most, MOST_STEPS))  # which may have to place heads elsewhere
        bursts = self._prepared.bursts
        return 1 if bursts is None else min(most, self._prepared.burst_length.num_steps)

    def choose_several(
        self,
        seqs: Sequence[int],
        tokens: Tensor,
        position_ids: Tensor,
        draws: Draws | None,
        count: int,
    ) -> Tensor:
        """`count` whole steps: see `Decoder.choose_several`."""
        if count == 1:
            return self.choose_tokens(seqs, tokens, position_ids, draws)[:, None]
        # As `tokens_at_once` has bound them: other steps may have no bursts.
        self._keeps_steps = True
        try:
            slots, kv_lens = self._bind(seqs, count)
        finally:
            self._keeps_steps = False
        steps, samples = self._prepared, draws is not None
        bursts, resident = steps.bursts, steps.step.resident
        assert bursts is not None
        start = time.perf_counter()
        link = steps.choose_link(slots, 1, self._most_rows)
        steps.step.after_projection, steps.step.on_mark = self.after_projection, None
        self._kinds.add(_SAMPLED + _BURSTS if samples else _BURSTS)
        if bursts.prepare(link, samples=samples):
            self.setup_seconds += time.perf_counter() - start
        resident.address_pages(slots, seqs, kv_lens)
        firsts = [kv_len - count + 1 for kv_len in kv_lens]
        self._write_state(slots, firsts, position_ids, tokens, draws)
        start = time.perf_counter()
        try:
            chosen = bursts.run(link, slots, count, samples=samples)
        except BaseException:
            bursts.wait()
            for seq in seqs:  # who knows what was written
                resident.forget(seq)
            raise
        resident.advance(slots, kv_lens)
        steps.burst_length.timed(count, time.perf_counter() - start)
        return chosen

    def first_tokens(self, logits: Tensor, draws: Draws | None = None) -> Tensor:
        """The choice after a prompt, of logits [n, vocab_size]; with ranks rank 0's."""
        num_rows, vocab_size = logits.shape
        chooser, positions = TokenChooser(num_rows, vocab_size, logits.device), None
        if draws is not None:
            chooser.use(draws, range(num_rows), [0] * num_rows)
            positions = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
        chosen = chooser.choose(logits.contiguous(), positions)
        ranks = self.model.ranks
        return (chosen if ranks is None else ranks.broadcast(chosen)).cpu()

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        return linear_path(self._weights, len(hidden)).logits(self._weights, hidden)

    def forget(self, seq: int) -> None:
        if self._resident is not None:
            self._resident.forget(seq)
        if self._kept is not None and not self._kept.is_bound:
            self._kept = None

    def roll_back(self, seq: int, kv_len: int) -> None:
        self.forget(seq)

    def rebase(self, seq: int, kv_len: int, to: int) -> None:
        if self.model.ranks is not None:  # one that had to make room would have other slots
            self.forget(seq)
        elif self._resident is not None:
            self._resident.rebase(seq, kv_len, to)

    def truncate(self, seq: int, kv_len: int) -> None:
        if self._resident is not None:
            self._resident.crop(seq, kv_len)

    def trim(self) -> None:
        if self._resident is not None:
            self._resident.trim()

    def begin_generation(
        self, num_sequences: int, kv_len: int, read_tokens: int | None = None
    ) -> None:
        """As `Decoder.begin_generation`.

        A placement that was given up comes back for fewer pages than it had no room for. So each
        time that this proves wrong, the number is smaller than before; all ranks know the same one.
        """
        num_pages = num_sequences * self._num_pages(kv_len)
        comes_back = self._gave_up is not None and num_pages < self._gave_up[1]
        keeps = self._keeps_placement and self._choose is None and not comes_back
        placement = self.placement if keeps else self._least_placement()
        self._check_room(placement, num_sequences, kv_len)  # before those that run lose anything
        self._keeps_placement = keeps
        self._expected = num_sequences, kv_len, read_tokens
        wanted = self.placement
        if self._choose is not None:
            now = self.placement if self._aside is None else self._aside.placement
            wanted = self._chosen(now, num_sequences, kv_len)
        elif comes_back and self._gave_up is not None:
            wanted = self._gave_up[0]
        if self._goes_aside():
            self._begin_aside(wanted)
        else:
            self._drop_aside()
            changes, ranks = wanted != self.placement, self.model.ranks
            if changes if ranks is None else ranks.total(int(changes))[0]:
                self.place(wanted)

    def end_generation(self) -> None:
        """As `Decoder.end_generation`: steps that are made anew are for those that come. The
        caller's code may draw there, or wait for the whole GPU, which is refused while a thread
        captures.
        """
        self.end_steps()  # where ctrl-C came before it
        self._expected = _NOTHING_EXPECTED
        if self._aside is not None:
            self._aside.wait()

    def finish_captures(self) -> None:
        """As `Decoder.finish_captures`."""
        if self._aside is not None:
            steps = self._aside.wait()
            if steps is None or not self._serve_expected(steps, self._aside.placement):
                self._end_aside()

    def give_heads_back(self, why: DeviceMemoryError) -> bool:
        """As `Decoder.give_heads_back`; never where somebody has asked for the placement."""
        if self._aside is not None:
            self._end_aside()
            return True
        if self._steps is not None and not self._steps.step.resident.is_bound:
            self._drop_steps()  # they are made again
            return True
        less, (num_sequences, kv_len, _) = None, self._expected
        if not self._keeps_placement and self.model.ranks is None:
            less = next(iter(self._fallbacks(num_sequences, kv_len)), None)
        if less is None:
            self._free_room.forget()
            return False
        self._give_up(less, why, num_sequences * self._num_pages(kv_len))
        return True

    def _check_room(self, placement: HeadPlacement, num_sequences: int, kv_len: int) -> None:
        """Raises DeviceMemoryError where the budget cannot hold its pages."""
        heads = int((placement.places == Place.GPU).sum())
        shape = CodeShape.of(self._policy, self.model.shape, self.store.page_tokens)
        codes = 0
        if shape is not None and kv_len > shape.budget_tokens:
            coded = zip(*map(placement.counts, (Place.CODES, Place.FOUND)), strict=True)
            codes = sum(shape.page_bytes(sum(counts)) for counts in coded)
        check_resident_room(
            self.store, heads, num_sequences, kv_len, self._device_budget_bytes, codes
        )

    def _chosen(
        self, now: HeadPlacement, num_sequences: int, kv_len: int, *, after_failure: bool = False
    ) -> HeadPlacement:
        """What `choose` makes of what is free."""
        assert self._choose is not None
        room = self._free_room.num_bytes(self._device_budget_bytes, self.device_bytes)
        if after_failure:
            self._free_room.failed(room)
            room = self._free_room.num_bytes(self._device_budget_bytes, self.device_bytes)
        return self._choose(now, num_sequences, kv_len, room, self._expected[2])

    def check_usable(self) -> None:
        for coprocessor in self.coprocessors:
            coprocessor.check_usable()

    def close(self) -> None:
        self._drop_steps()
        self.pool.close()

    @property
    def _prepared(self) -> PreparedSteps:
        assert self._steps is not None
        return self._steps

    @property
    def _resident(self) -> ResidentKV | None:
        """What the GPU has of sequences."""
        return self._kept if self._steps is None else self._steps.step.resident

    def _bind(self, seqs: Sequence[int], num_new: int = 1) -> tuple[list[int], list[int]]:
        """Slots for `seqs`, and their kv_lens after the steps, for which there is room."""
        kv_lens = [self.store.kv_len(seq) + num_new for seq in seqs]
        if self._keeps_placement:
            return self._bind_lens(seqs, kv_lens), kv_lens
        fallbacks: Iterator[HeadPlacement] | None = None
        while True:
            slots: list[int] = []
            failure: DeviceMemoryError | None = None
            try:
                slots = self._bind_lens(seqs, kv_lens)
            except DeviceMemoryError as error:
                failure = DeviceMemoryError(str(error))  # its traceback would hold the pages
            if not self._fails_anywhere(failure, seqs, kv_lens):
                return slots, kv_lens
            why = failure or DeviceMemoryError("the GPU of another rank has no room for its part")
            if fallbacks is None:  # only now: a step has no time for it
                fallbacks = iter(self._fallbacks(len(seqs), max(kv_lens)))
            less = next(fallbacks, None)
            if less is None:
                raise why
            self._give_up(less, why, sum(self._num_pages(kv_len) for kv_len in kv_lens))

    def _fallbacks(self, num_sequences: int, kv_len: int) -> list[HeadPlacement]:
        """Placements that need less of the GPU, as many on all ranks: the codes go first."""
        # Steps have rows for all that are expected (`_make_slots`).
        num_sequences = max(num_sequences, self._expected[0])
        least = self._least_placement()
        less = [self.placement.without_codes(), least]
        if CodeShape.of(self._policy, self.model.shape, self.store.page_tokens) is None:
            less = [least]
        if self.model.ranks is None:
            if self._choose is not None:
                to_come = max(kv_len + kv_len // 4, self._expected[1])
                to_come = min(to_come, self.model.shape.max_context)
                chosen = self._chosen(least, num_sequences, to_come, after_failure=True)
                # More may be free than when the placement now was chosen.
                if self._num_rows(chosen, to_come) < self._num_rows(self.placement, to_come):
                    less.insert(-1, chosen)
            less = [placement for placement in dict.fromkeys(less) if placement != self.placement]
        return less

    def _num_rows(self, placement: HeadPlacement, kv_len: int) -> int:
        """Keys and values of a sequence that are on the GPU beside windows, or come there."""
        budget_tokens = self._policy.budget_tokens if self._policy.selects else 0
        num_rows = sum(placement.counts(Place.GPU)) * kv_len
        num_hot = sum(placement.counts(Place.HOT)) + sum(placement.counts(Place.FOUND))
        num_rows += num_hot * HOT_BUDGETS * budget_tokens
        return num_rows + max(placement.counts(Place.GATHER)) * 2 * budget_tokens

    def _give_up(self, less: HeadPlacement, why: DeviceMemoryError, num_pages: int) -> None:
        """Attend as `less` says until a generation needs fewer than `num_pages` of each head."""
        wanted, failed = self._gave_up or (self.placement, num_pages)
        self._keeps_placement = less == self._least_placement()
        heads, *hot_heads = (
            sum(less.counts(place)) for place in (Place.GPU, Place.HOT, Place.FOUND)
        )
        hot = sum(hot_heads)
        rest = (
            "lists are made without codes"
            if self._choose is None
            else f"{heads} KV heads stay there"
        )
        rest += f", and hot rows of {hot}" if hot else ""
        if self._keeps_placement:
            rest = "only dense layers stay there"
        logger.warning("%s. While sequences need so much, %s", why, rest)
        self._drop_steps()  # and all pages, before others need room
        self.place(less)
        self._gave_up = wanted, min(failed, num_pages)

    def _fails_anywhere(
        self, failure: DeviceMemoryError | None, seqs: Sequence[int], kv_lens: Sequence[int]
    ) -> bool:
        """Whether this rank, or another, has no room. Steps are captured by all ranks or by none,
        since capturing runs their sums; they agree whenever some sequence needs new memory.
        """
        ranks = self.model.ranks
        if ranks is None:
            return failure is not None
        pages = [self._num_pages(kv_len) for kv_len in kv_lens]
        has_codes = [kv_len > self.attention.budget_tokens for kv_len in kv_lens]
        new = (list(seqs), pages, has_codes)
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
        if self._aside is not None:
            try:
                return self._bind_in_room(seqs, kv_lens)
            except DeviceMemoryError as error:
                if self._aside is None:
                    raise
                logger.debug("no room beside steps that are being made: %s", error)
            self._end_aside()
        return self._bind_in_room(seqs, kv_lens)

    def _bind_in_room(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        self._make_slots(len(seqs), max(kv_lens))
        resident = self._prepared.step.resident
        if self._took_over:
            self._took_over = False
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

    def _num_pages(self, kv_len: int) -> int:
        """Pages of each KV head."""
        return -(-kv_len // self.store.page_tokens)

    def _least_placement(self) -> HeadPlacement:
        heads = self.attention.num_qo_heads, self.store.num_kv_heads
        return HeadPlacement(least_places(self._policy, len(self.model.layers), *heads))

    @property
    def _most_rows(self) -> int:
        """Rows that a step of fewer sequences may have: many where others join and leave, else
        none."""
        num_sequences, _, read_tokens = self._expected
        joins = read_tokens is not None and num_sequences > 1
        return self._prepared.num_slots if joins else 0

    def _choose_link(self, slots: Sequence[int]) -> HostLink:
        steps, start = self._prepared, time.perf_counter()
        num_links = len(steps.links)
        link = steps.choose_link(slots, self._num_micro_batches, self._most_rows)
        if len(steps.links) > num_links:
            self.setup_seconds += time.perf_counter() - start
        return link

    @staticmethod
    def _step(kind: str, step: DeviceStep, link: HostLink) -> Step:
        if kind == "layers":
            return functools.partial(step.run_layers, link)
        return functools.partial(step.run_tokens, link, samples=kind.startswith(_SAMPLED))

    def _prepare(self, link: HostLink, kind: str, run: Step, kv_lens: Sequence[int]) -> None:
        """Do what the first run of a step needs; it may run the step, with no row in use.

        Args:
            kv_lens: after the step.
        """
        step, start = self._prepared.step, time.perf_counter()
        step.buffers.state.fill_(-1)
        step.after_projection, step.on_mark = self.after_projection, self.on_mark
        self._kinds.add(kind)
        is_new = link.gpu_sync.prepare(self._key(kind), run)
        if is_new and self._will_try_micro_batches(kv_lens):
            for other in self._prepared.other_ways(link):
                other.gpu_sync.capture(self._key(kind), self._step(kind, step, other))
        if is_new:
            self.setup_seconds += time.perf_counter() - start

    def _will_try_micro_batches(self, kv_lens: Sequence[int]) -> bool:
        """Whether it is known of a generation that it lasts long enough."""
        _, most, read_tokens = self._expected
        if self._num_micro_batches is not None or read_tokens is not None or self.on_mark:
            return False
        is_single = self._prepared.bursts is None  # else most steps are not
        return is_single and most - max(kv_lens) >= WORTH_A_TRIAL_STEPS

    def _key(self, kind: str) -> tuple[object, ...]:
        """The key that steps share if they launch the same."""
        return kind, self.on_mark, self.after_projection

    def _write_state(
        self,
        slots: Sequence[int],
        kv_lens: Sequence[int],
        position_ids: Tensor,
        tokens: Tensor | None = None,
        draws: Draws | None = None,
    ) -> None:
        rows = np.zeros((3, len(slots)), np.int64)
        rows[0], rows[1] = kv_lens, position_ids.numpy()
        rows[0] -= 1
        if tokens is not None:
            rows[2] = tokens.numpy()
        b = self._prepared.step.buffers
        state = b.host_state.numpy()
        state.fill(-1)
        state[:, slots] = rows
        b.state.copy_(b.host_state, non_blocking=True)
        if draws is not None:
            b.chooser.use(draws, slots, rows[0].tolist())

    def _run(
        self,
        link: HostLink,
        kind: str,
        run: Step,
        seqs: Sequence[int],
        slots: Sequence[int],
        kv_lens: Sequence[int],
        *,
        ahead: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """One step of bound sequences that end with `kv_lens` tokens."""
        start, steps, in_turn = time.perf_counter(), self._prepared, self._in_turn
        is_launched = in_turn is not None and in_turn.is_launched
        rows = self.attention.begin_step(seqs, kv_lens)
        try:
            if in_turn is not None:
                in_turn.is_launched = ahead
            link.gpu_sync.run(
                self._key(kind),
                run,
                rows,
                slots,
                is_launched=is_launched,
                ahead=ahead,
                beside=beside,
            )
        except BaseException:
            with shielded():  # ctrl-C may have come before `run`, or behind it
                if in_turn is not None:
                    in_turn.is_launched = False
                link.gpu_sync.discard()
            if link.coprocessor.is_stuck:  # perhaps in the map of hot rows
                steps.step.resident.hot = None
            for seq in seqs:  # who knows what was written
                steps.step.resident.forget(seq)
                if link.coprocessor.is_stuck:
                    self.store.renew_page_table(seq)
            raise
        steps.step.resident.advance(slots, kv_lens)
        if beside is None:  # else it takes longer
            steps.burst_length.timed(1, time.perf_counter() - start)
        compression = self.attention.compression
        if compression is not None and compression.wants_queries(seqs, kv_lens):
            compression.record_step(rows, slice(None), steps.step.buffers.queries[:, slots].cpu())
        self.attention.count_rows(rows)
        if self.attention.top_p_controller is not None:
            self.attention.top_p_controller.after_step()
        is_timed = self.on_mark is None and beside is None  # marks are of one way
        if self._num_micro_batches is None and is_timed:
            steps.record(link, time.perf_counter() - start)

    def _make_slots(self, num_sequences: int, kv_len: int) -> None:
        """Room for at least `num_sequences` rows, and where heads publish on the GPU for the scores
        of `kv_len` tokens; more than there was means new captures.
        """
        if self._aside is not None:
            serves = self._prepared.has_room(num_sequences, kv_len)
            if not serves or (self._aside.is_done and not self._keeps_steps):
                self._swap(serves=serves)
            if self._aside is not None:
                return
        # As many as are expected: others join, and tokens come, without new captures.
        num_sequences = max(num_sequences, self._expected[0])
        kv_len = min(max(kv_len, self._expected[1]), self.model.shape.max_context)
        slots, steps = num_slots(num_sequences), self._steps
        if steps is not None:
            if steps.has_room(num_sequences, kv_len):
                return
            slots = max(slots, steps.num_slots)
        start = time.perf_counter()
        steps = None
        self._retire_steps()  # their memory first
        max_tokens, kept = self._room_for(kv_len, self._layers), self._kept
        new: PreparedSteps | None
        make = functools.partial(self._make_steps, self.placement, self._layers, slots, max_tokens)
        if kept is not None:
            try:
                new = make(kept.budget)
                with shielded():  # two that own the same pages would give them to others
                    new.step.resident.take_over(kept)
                    self._steps, self._took_over, self._kept = new, True, None
            except (DeviceMemoryError, torch.OutOfMemoryError) as error:
                logger.debug("no room for new steps beside what is there: %s", error)
                new = None
        self._kept = kept = None
        if self._steps is None:
            self._steps = make(PageBudget())
        self.setup_seconds += time.perf_counter() - start

    def _make_steps(
        self,
        placement: HeadPlacement,
        layers: Sequence[LayerHeads],
        slots: int,
        max_tokens: int,
        budget: PageBudget,
    ) -> PreparedSteps:
        budget.limit_bytes = self._device_budget_bytes
        streams = self._free_streams()
        return PreparedSteps(
            self.model,
            self._weights,
            self.attention,
            placement,
            layers,
            window=self._window,
            num_slots=slots,
            max_tokens=max_tokens,
            device=self.device,
            budget=budget,
            deadline_seconds=self._deadline_seconds,
            streams=streams,
            make_gpu_sync=functools.partial(
                self._make_gpu_sync,
                self._backend,
                deadline_seconds=self._deadline_seconds,
                streams=streams,
            ),
            captures=self._backend == "graph",
        )

    def _free_streams(self) -> StepStreams | None:
        """Those of two that the steps now do not run in. More would cost: cuBLAS keeps a workspace
        of 32 MiB for each.
        """
        if not self._streams and self.device.type == "cuda":
            self._streams += [StepStreams(self.device), StepStreams(self.device)]
        taken = None if self._steps is None else self._steps.streams
        return next((streams for streams in self._streams if streams is not taken), None)

    def _room_for(self, kv_len: int, layers: Sequence[LayerHeads]) -> int:
        """`step_tokens`; as scores are kept of heads that publish or have codes. All ranks do as if
        they had some: they capture together.
        """
        grows = self.model.ranks is not None or scores_tokens(layers)
        max_context = self.model.shape.max_context
        return step_tokens(max_context, kv_len, self.store.page_tokens, grows=grows)

    def _goes_aside(self) -> bool:
        """Whether steps to come are made while those that there are run."""
        is_watched = self.on_mark is not None or self.after_projection is not None
        if not self._captures_aside or is_watched or self._steps is None:
            return False
        return self._steps.step.resident.is_bound

    def _begin_aside(self, wanted: HeadPlacement) -> None:
        """Make steps of a placement for what is expected, if there are none. What is being made
        comes to its end: whether it is what is wanted shows then.
        """
        self._wanted = wanted
        if self._aside is not None or self._serve_expected(self._prepared, self.placement):
            return
        layers, old = self._layers_of(wanted), self._prepared
        bound = sum(slot.seq is not None for slot in old.step.resident.slots)
        rows = num_slots(self._expected[0])
        slots = max(rows, num_slots(bound))
        if wanted == self.placement:
            slots = max(slots, old.num_slots)
        kv_len = min(self._expected[1], self.model.shape.max_context)
        max_tokens, kinds = self._room_for(kv_len, layers), sorted(self._kinds)
        budget = old.step.resident.budget

        def capture(steps: PreparedSteps) -> None:
            link = steps.choose_link([rows - 1], self._num_micro_batches)
            # All that will be tried, or the trial makes everybody wait.
            others = steps.other_ways(link) if self._num_micro_batches is None else []
            for kind in kinds:
                if kind.endswith(_BURSTS):
                    if steps.bursts is not None:
                        samples = kind.startswith(_SAMPLED)
                        steps.bursts.prepare(steps.choose_link([rows - 1], 1), samples=samples)
                    continue
                for way in (link, *others):
                    run = self._step(kind, steps.step, way)
                    way.gpu_sync.capture((kind, None, None), run)

        make = functools.partial(self._make_steps, wanted, layers, slots, max_tokens, budget)
        with shielded():  # the thread that was started is ours
            self._aside = StepsAside(wanted, make, capture, self.device)
        self._aside.wait_for_buffers()  # a prefill counts what is free

    def _serve_expected(self, steps: PreparedSteps, placement: HeadPlacement) -> bool:
        num_sequences, kv_len, _ = self._expected
        kv_len = min(kv_len, self.model.shape.max_context)
        return steps.has_room(num_sequences, kv_len) and placement == self._wanted

    def _swap(self, *, serves: bool) -> None:
        """Between two steps: go on with those that were made aside, when they are done.

        Args:
            serves: those that there are would do for the next step, too.
        """
        assert self._aside is not None
        start = time.perf_counter()
        self._aside.wait()
        with shielded():
            steps, placement, self._aside = self._aside.wait(), self._aside.placement, None
            if steps is not None and self._serve_expected(steps, placement):
                try:
                    self._replace_steps(steps, placement)
                except torch.OutOfMemoryError as error:
                    logger.debug("no room to go on with steps that were made aside: %s", error)
            else:
                if steps is not None:
                    steps.close()
                can_wait = serves and (
                    steps is not None or self._serve_expected(self._prepared, self.placement)
                )
                steps = None  # their memory first
                self._go_on(can_wait=can_wait)
        self.setup_seconds += time.perf_counter() - start

    def _go_on(self, *, can_wait: bool) -> None:
        """Without what was made aside: others are expected meanwhile, or it could not be made."""
        assert self._wanted is not None
        if can_wait:
            self._begin_aside(self._wanted)
        else:
            self.place(self._wanted)

    def _replace_steps(self, steps: PreparedSteps, placement: HeadPlacement) -> None:
        old = self._prepared
        if placement == self.placement:
            steps.learn_from(old)
        self._attend_as(placement)
        try:
            steps.step.resident.take_over(old.step.resident)
        except BaseException:
            steps.close()
            self._drop_steps()
            raise
        self._steps, self._took_over = steps, True
        old.close()

    def _drop_aside(self) -> None:
        if self._aside is not None:
            steps = self._aside.wait()
            self._aside = None
            if steps is not None:
                steps.close()

    def _end_aside(self) -> None:
        """What is wanted is made by the next step."""
        assert self._wanted is not None
        self.place(self._wanted)

    def _retire_steps(self) -> None:
        """Drop the steps; what the GPU has of sequences stays for others.

        With ranks nothing stays: where one of them has no room for it, their slots would differ.
        """
        self._drop_aside()
        with shielded():
            if self._steps is not None:
                resident = self._steps.step.resident
                if self.model.ranks is None and resident.is_bound:
                    self._kept = resident
                self._steps.close()
            self._steps = None

    def _drop_steps(self) -> None:
        self._drop_aside()
        with shielded():
            if self._steps is not None:
                self._steps.close()
            self._steps = self._kept = None
            self._took_over = False
