"""Decode steps on the GPU: how they are made, prepared, run and timed, alone or several at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.decode.attention import DecodeAttention
from offload.decode.gpu.buffers import HostLink
from offload.decode.gpu.gpu_sync import GpuSync, Step, StepStreams, make_gpu_sync
from offload.decode.gpu.layer_heads import LayerHeads
from offload.decode.gpu.linear import DeviceWeights
from offload.decode.gpu.micro_batches import WORTH_A_TRIAL_STEPS
from offload.decode.gpu.pages import PageBudget
from offload.decode.gpu.placed_heads import PlacedHeads
from offload.decode.gpu.placement import HeadPlacement
from offload.decode.gpu.prepared_steps import BoundRows, PreparedSteps
from offload.decode.gpu.step import DeviceStep
from offload.decode.sampling import Draws
from offload.models import LeanModel
from offload.system.errors import DeviceMemoryError, HostBudgetError
from offload.system.interrupts import shielded

# Kinds of steps, and what those that draw are called beside them.
_LAYERS, _TOKENS, _BURSTS, _SAMPLED = "layers", "tokens", "bursts", "sampled "


@dataclass
class _StepsInTurn:
    """Steps of the same sequences, between `begin_steps` and `end_steps`.

    Attributes:
        is_launched: the next one is.
    """

    link: HostLink
    is_launched: bool = False


@dataclass(eq=False)
class CapturedSteps:
    """Every step that runs was prepared before, for the same link, kind and callbacks.

    Args:
        backend, deadline_seconds: as of `DeviceDecoder`.

    Attributes:
        after_projection, on_mark: see `DeviceStep`; steps with others are captured apart.
        place_states: called before `run_layers` runs a step that is prepared, where layers keep
            states of sequences.
        setup_seconds: spent so far on what steps of a new kind or size need.
        num_micro_batches: of each step; None: what proves faster.
        in_turn: steps that follow each other; None: none do.
    """

    model: LeanModel
    weights: DeviceWeights
    attention: DecodeAttention
    placed: PlacedHeads
    device: torch.device
    backend: str
    deadline_seconds: float
    make_gpu_sync: Callable[..., GpuSync] = make_gpu_sync
    after_projection: Callable[[int, int, Tensor, Tensor], None] | None = None
    on_mark: Callable[[str, int], None] | None = None
    place_states: Callable[[BoundRows, HostLink], None] | None = None
    setup_seconds: float = 0.0
    in_turn: _StepsInTurn | None = None
    _streams: list[StepStreams] = field(default_factory=list)
    _kinds: set[str] = field(default_factory=set)  # of steps that there have been

    def __post_init__(self) -> None:
        self.num_micro_batches = None if self.backend == "graph" else 1

    @property
    def is_watched(self) -> bool:
        """Somebody looks at each step by itself."""
        return self.model.ranks is not None or self.on_mark is not None

    def make(
        self,
        placement: HeadPlacement,
        layers: Sequence[LayerHeads],
        num_slots: int,
        max_tokens: int,
        budget: PageBudget,
        taken: StepStreams | None = None,
    ) -> PreparedSteps:
        """Steps of up to `num_slots` sequences of `max_tokens` tokens, with nothing captured yet.

        Args:
            budget: of all pages on the GPU, those of the steps before among them.
            taken: the streams in which steps run meanwhile.

        Raises:
            DeviceMemoryError: the GPU has no room for their buffers.
        """
        budget.limit_bytes = self.placed.budget_bytes
        # More than two streams would cost: cuBLAS keeps a workspace of 32 MiB for each.
        if not self._streams and self.device.type == "cuda":
            self._streams += [StepStreams(self.device), StepStreams(self.device)]
        streams = next((streams for streams in self._streams if streams is not taken), None)
        return PreparedSteps(
            self.model,
            self.weights,
            self.attention,
            placement,
            layers,
            window=self.placed.window,
            num_slots=num_slots,
            max_tokens=max_tokens,
            device=self.device,
            budget=budget,
            deadline_seconds=self.deadline_seconds,
            streams=streams,
            make_gpu_sync=functools.partial(
                self.make_gpu_sync,
                self.backend,
                deadline_seconds=self.deadline_seconds,
                streams=streams,
            ),
            captures=self.backend == "graph",
        )

    def capture_for(self, num_rows: int) -> Callable[[PreparedSteps], None]:
        """What captures steps for so many rows, of all kinds that there have been."""
        kinds = sorted(self._kinds)

        def capture(steps: PreparedSteps) -> None:
            link = steps.choose_link([num_rows - 1], self.num_micro_batches)
            # All that will be tried, or the trial makes everybody wait.
            others = steps.other_ways(link) if self.num_micro_batches is None else []
            for kind in kinds:
                if kind.endswith(_BURSTS):
                    if steps.bursts is not None:
                        samples = kind.startswith(_SAMPLED)
                        steps.bursts.prepare(steps.choose_link([num_rows - 1], 1), samples=samples)
                    continue
                for way in (link, *others):
                    run = _step(kind, steps.step, way)
                    way.gpu_sync.capture((kind, None, None), run)

        return capture

    def run_layers(self, bound: BoundRows, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """All layers, from embeddings `hidden` [rows, hidden_size] to what the final norm takes."""
        step, link = bound.steps.step, self._choose_link(bound)
        b, run = step.buffers, _step(_LAYERS, step, link)
        self._prepare(bound, link, _LAYERS, run)
        b.write_state(bound.slots, bound.kv_lens, position_ids)
        if self.place_states is not None:
            self.place_states(bound, link)
        at = torch.tensor(bound.slots, device=self.device)
        b.hidden[at] = hidden
        self._run(bound, link, _LAYERS, run)
        return b.hidden[at]

    def run_tokens(
        self,
        bound: BoundRows,
        tokens: Tensor,
        position_ids: Tensor,
        draws: Draws | None,
        *,
        ahead: bool,
        beside: Callable[[], None] | None,
    ) -> Tensor:
        """One whole step: see `Decoder.choose_tokens`."""
        in_turn, step = self.in_turn, bound.steps.step
        link = self._choose_link(bound) if in_turn is None else in_turn.link
        kind = _TOKENS if draws is None else _SAMPLED + _TOKENS
        run = _step(kind, step, link)
        if in_turn is None or not in_turn.is_launched:
            self._prepare(bound, link, kind, run)
            step.buffers.write_state(bound.slots, bound.kv_lens, position_ids, tokens, draws)
        self._run(bound, link, kind, run, ahead=ahead, beside=beside)
        return step.buffers.host_tokens[bound.slots]

    def run_burst(
        self,
        bound: BoundRows,
        tokens: Tensor,
        position_ids: Tensor,
        draws: Draws | None,
        count: int,
    ) -> Tensor:
        """`count` whole steps: see `Decoder.choose_several`."""
        (steps, seqs, slots, kv_lens), samples = bound, draws is not None
        bursts, resident = steps.bursts, steps.step.resident
        assert bursts is not None
        start = time.perf_counter()
        link = steps.choose_link(slots, 1, self._most_rows(steps))
        steps.step.after_projection, steps.step.on_mark = self.after_projection, None
        self._kinds.add(_SAMPLED + _BURSTS if samples else _BURSTS)
        if bursts.prepare(link, samples=samples):
            self.setup_seconds += time.perf_counter() - start
        resident.address_pages(slots, seqs, kv_lens)
        firsts = [kv_len - count + 1 for kv_len in kv_lens]
        steps.step.buffers.write_state(slots, firsts, position_ids, tokens, draws)
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

    def may_follow(self) -> bool:
        """Whether steps can follow each other with nothing in between.

        A policy whose shares change between steps, and a compression that wants their queries, look
        at what the GPU writes in the next step.
        """
        attention = self.attention
        # A step is launched when the host's pages are known up to the token before the last.
        is_late = self.placed.window[1] < 2 and any(x.gathered or x.hot for x in self.placed.layers)
        looks = attention.top_p_controller is not None or attention.compression is not None
        return not (self.is_watched or looks or is_late)

    def begin_steps(self, bound: BoundRows, most: int) -> int:
        """As `Decoder.begin_steps`, of steps that `may_follow` each other."""
        (steps, seqs, slots, kv_lens), attention = bound, self.attention
        link, resident, settled = self._choose_link(bound), steps.step.resident, None
        if self.num_micro_batches is None:
            settled = steps.settled_steps(link)
        most = min(most, steps.burst_length.num_steps, most if settled is None else settled)
        most = min(most, steps.max_tokens - max(kv_lens) + 1)
        # Codes and clusters come between two steps, where a sequence needs them.
        if resident.codes is not None or (resident.hot is not None and attention.estimate_clusters):
            budget = attention.policy.budget_tokens
            most = min(most, *(budget - n + 1 for n in kv_lens if n <= budget), most)
        if most < 2:
            return 1
        ends = [kv_len + most - 1 for kv_len in kv_lens]
        # What is built or grown takes memory, and may give some back, for which CUDA waits.
        if not all(map(attention.states.serves, seqs, ends)):
            return 1
        try:  # single steps go as far as they can
            attention.store.make_room(seqs, [most] * len(seqs))
            resident.reserve(slots, ends)
        except (DeviceMemoryError, HostBudgetError):
            return 1
        self.in_turn = _StepsInTurn(link)
        return most

    def end_steps(self) -> None:
        """As `Decoder.end_steps`."""
        if self.in_turn is None:
            return
        with shielded():
            in_turn, self.in_turn = self.in_turn, None
            if in_turn.is_launched:
                mailbox = in_turn.link.mailbox
                mailbox.hot_counts.zero_()  # it fetches nothing: hot rows stay
                mailbox.rest_counts[..., -1] = -1  # nor changes means
                in_turn.link.gpu_sync.discard()

    def _most_rows(self, steps: PreparedSteps) -> int:
        """Rows that a step of fewer sequences may have: many where others join and leave, else
        none."""
        num_sequences, _, read_tokens = self.placed.expected
        return steps.num_slots if read_tokens is not None and num_sequences > 1 else 0

    def _choose_link(self, bound: BoundRows) -> HostLink:
        steps, start = bound.steps, time.perf_counter()
        num_links = len(steps.links)
        link = steps.choose_link(bound.slots, self.num_micro_batches, self._most_rows(steps))
        if len(steps.links) > num_links:
            self.setup_seconds += time.perf_counter() - start
        return link

    def _prepare(self, bound: BoundRows, link: HostLink, kind: str, run: Step) -> None:
        """Do what the first run of a step needs; it may run the step, with no row in use."""
        steps, start = bound.steps, time.perf_counter()
        steps.step.buffers.state.fill_(-1)
        steps.step.buffers.pointers.zero_()
        steps.step.after_projection, steps.step.on_mark = self.after_projection, self.on_mark
        self._kinds.add(kind)
        is_new = link.gpu_sync.prepare(self._key(kind), run)
        if self.weights.hot_experts is not None:  # no step is under way
            self.weights.hot_experts.follow_use()
        if is_new and self._will_try_micro_batches(bound):
            for other in steps.other_ways(link):
                other.gpu_sync.capture(self._key(kind), _step(kind, steps.step, other))
        if is_new:
            self.setup_seconds += time.perf_counter() - start

    def _will_try_micro_batches(self, bound: BoundRows) -> bool:
        """Whether it is known of a generation that it lasts long enough."""
        _, most, read_tokens = self.placed.expected
        if self.num_micro_batches is not None or read_tokens is not None or self.on_mark:
            return False
        is_single = bound.steps.bursts is None  # else most steps are not
        return is_single and most - max(bound.kv_lens) >= WORTH_A_TRIAL_STEPS

    def _key(self, kind: str) -> tuple[object, ...]:
        """The key that steps share if they launch the same."""
        return kind, self.on_mark, self.after_projection

    def _run(
        self,
        bound: BoundRows,
        link: HostLink,
        kind: str,
        run: Step,
        *,
        ahead: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """One prepared step, of rows whose state is written."""
        start, attention, in_turn = time.perf_counter(), self.attention, self.in_turn
        steps, seqs, slots, kv_lens = bound
        is_launched = in_turn is not None and in_turn.is_launched
        rows = attention.begin_step(seqs, kv_lens)
        try:
            if in_turn is not None:
                in_turn.is_launched = ahead
            step = self._key(kind), run, rows, slots
            link.gpu_sync.run(*step, is_launched=is_launched, ahead=ahead, beside=beside)
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
                    attention.store.renew_page_table(seq)
            raise
        steps.step.resident.advance(slots, kv_lens)
        if self.weights.hot_experts is not None:
            self.weights.hot_experts.num_steps += 1
        if beside is None:  # else it takes longer
            steps.burst_length.timed(1, time.perf_counter() - start)
        compression = attention.compression
        if compression is not None and compression.wants_queries(seqs, kv_lens):
            compression.record_step(rows, slice(None), steps.step.buffers.queries[:, slots].cpu())
        attention.count_rows(rows)
        if attention.top_p_controller is not None:
            attention.top_p_controller.after_step()
        is_timed = self.on_mark is None and beside is None  # marks are of one way
        if self.num_micro_batches is None and is_timed:
            steps.record(link, time.perf_counter() - start)


def _step(kind: str, step: DeviceStep, link: HostLink) -> Step:
    if kind == _LAYERS:
        return functools.partial(step.run_layers, link)
    return functools.partial(step.run_tokens, link, samples=kind.startswith(_SAMPLED))
