"""What decode steps on the GPU share: made together before the first, dropped together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from cpu_ops.coprocessor import Coprocessor
from cpu_ops.mailbox import Mailbox
from offload.decode.attention import DecodeAttention
from offload.decode.gpu.buffers import HostLink, StepBuffers, micro_batch_rows, num_slots
from offload.decode.gpu.bursts import Bursts
from offload.decode.gpu.gpu_sync import GpuSync, StepStreams
from offload.decode.gpu.heads import DeviceHeads
from offload.decode.gpu.hot_rows import HotRows
from offload.decode.gpu.layer_heads import LayerHeads, requests_of
from offload.decode.gpu.linear import DeviceWeights
from offload.decode.gpu.micro_batches import MicroBatchChoice
from offload.decode.gpu.pages import PageBudget
from offload.decode.gpu.placement import HeadPlacement
from offload.decode.gpu.resident_codes import CodeLists, CodeShape, ResidentCodes
from offload.decode.gpu.resident_kv import ResidentKV
from offload.decode.gpu.step import DeviceStep
from offload.decode.sampling import MOST_STEPS
from offload.models import LeanModel
from offload.selection.estimate import join_clusters
from offload.selection.layer_state import State
from offload.selection.sequence_state import LayerArrays
from offload.system.errors import DeviceMemoryError
from offload.system.map_in_threads import map_in_threads
from offload.system.torch_threads import torch_threads

# A link of more rows than a step needs does for so many steps.
_STEPS_WITH_LARGER = 256
# Of a burst: as much as a reader of the text may wait, and a caller whose answer has ended.
_BURST_SECONDS = 0.064


class BurstLength:
    """How many steps follow each other before somebody sees their tokens."""

    def __init__(self) -> None:
        self._step_seconds = _BURST_SECONDS / 2  # until one was timed

    @property
    def num_steps(self) -> int:
        """Steps of the next burst."""
        return max(1, min(MOST_STEPS, int(_BURST_SECONDS / self._step_seconds)))

    def timed(self, num_steps: int, seconds: float) -> None:
        """So many took so long."""
        self._step_seconds = max(seconds / num_steps, 1e-6)


@dataclass(eq=False)
class PreparedSteps:
    """Steps of up to `num_slots` sequences under one placement of the KV heads.

    Attributes:
        window: sink tokens and recent tokens, which the GPU attends to.
        max_tokens: that scores have room for, of heads which publish or have codes.
        budget: of pages on the GPU.
        streams: where steps run; None: there is no GPU.
        make_gpu_sync: of a coprocessor and its mailbox.
        captures: whether steps are CUDA graphs.
        step: what a step launches, with its buffers and what stays on the GPU in the slots.
        links: to the host, by rows and micro-batches of the steps that there have been.
        bursts: of several steps; None: some heads, or experts, are not on the GPU.
        burst_length: of these, or of steps that are launched ahead.

    Raises:
        DeviceMemoryError: the GPU has no memory left for them.
    """

    model: LeanModel
    weights: DeviceWeights
    attention: DecodeAttention
    placement: HeadPlacement
    layers: Sequence[LayerHeads]
    window: tuple[int, int]
    num_slots: int
    max_tokens: int
    device: torch.device
    budget: PageBudget
    deadline_seconds: float
    streams: StepStreams | None
    make_gpu_sync: Callable[[Coprocessor, Mailbox], GpuSync]
    captures: bool
    step: DeviceStep = field(init=False)
    links: dict[tuple[int, int], HostLink] = field(default_factory=dict, init=False)
    bursts: Bursts | None = field(default=None, init=False)
    burst_length: BurstLength = field(default_factory=BurstLength, init=False)
    _steps_with_larger: dict[int, int] = field(default_factory=dict, init=False)  # by rows
    _choices: dict[int, MicroBatchChoice] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        try:
            self.step = self._make_step()
            asks = bool(self.model.host_experts)
            if not asks and all(layer.is_resident for layer in self.layers):
                stream = None if self.streams is None else self.streams.main
                self.bursts = Bursts(self.step, stream, captures=self.captures)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU has no memory left for decode steps of {self.num_slots} sequences ("
                f"{str(error).partition(chr(10))[0]}); lower the batch size or raise max_memory of "
                "the device"
            ) from error

    def has_room(self, num_sequences: int, kv_len: int) -> bool:
        """For a step of so many sequences of up to `kv_len` tokens."""
        return num_sequences <= self.num_slots and kv_len <= self.max_tokens

    def choose_link(
        self, slots: Sequence[int], num_micro_batches: int | None, most_rows: int = 0
    ) -> HostLink:
        """Link of the step that fits these slots; None: as many micro-batches as are fastest.

        Args:
            most_rows: a link for more rows, up to as many, does for a while where there is none of
                as few: a new one makes all sequences wait.
        """
        num_rows = num_slots(max(slots) + 1)
        larger = [rows for rows, _ in self.links if num_rows <= rows <= most_rows]
        if larger and min(larger) > num_rows:
            num_borrowed = self._steps_with_larger.get(num_rows, 0)
            if num_borrowed < _STEPS_WITH_LARGER:
                self._steps_with_larger[num_rows] = num_borrowed + 1
                num_rows = min(larger)
        if num_micro_batches is None:
            num_micro_batches = self._choice(num_rows).num_micro_batches
        num_micro_batches = min(num_micro_batches, num_rows)
        if (num_rows, num_micro_batches) not in self.links:
            self.links[num_rows, num_micro_batches] = self.make_link(num_rows, num_micro_batches)
        return self.links[num_rows, num_micro_batches]

    def record(self, link: HostLink, seconds: float) -> None:
        """A step took so long: `choose_link` learns from it."""
        self._choice(link.num_rows).record(link.num_micro_batches, seconds)

    def settled_steps(self, link: HostLink) -> int | None:
        """Steps that `link` is certain to serve; None: all."""
        return self._choice(link.num_rows).settled_steps

    def other_ways(self, link: HostLink) -> list[HostLink]:
        """Links for the same rows in other numbers of micro-batches, which will be tried."""
        options = self._choice(link.num_rows).options
        others = [count for count in options if count != link.num_micro_batches]
        return [self.choose_link([link.num_rows - 1], count) for count in others]

    def learn_from(self, others: PreparedSteps) -> None:
        """Go on with what steps of the same placement have found out, where all ways are there."""
        for num_rows, choice in others._choices.items():
            if all((num_rows, count) in self.links for count in choice.options):
                self._choices[num_rows] = choice

    def close(self) -> None:
        """End the threads of the links, and drop what was captured."""
        for link in self.links.values():
            link.gpu_sync.close()
        self.links.clear()
        if self.bursts is not None:
            self.bursts.close()

    def _choice(self, num_rows: int) -> MicroBatchChoice:
        if num_rows not in self._choices:
            ranks = self.model.ranks
            # Nobody waits where the host attends to no head; of ranks it may be so on one alone.
            waits = ranks is not None or any(layer.host for layer in self.layers)
            self._choices[num_rows] = MicroBatchChoice(
                (1, 2) if num_rows > 1 and waits else (1,), int if ranks is None else ranks.agree
            )
        return self._choices[num_rows]

    def _make_step(self) -> DeviceStep:
        model, layers, store, device = self.model, self.layers, self.attention.store, self.device
        policy = self.attention.policy
        sink_tokens, recent_tokens = self.window
        codes, hot = self._make_codes(self.budget), None
        if any(layer.hot for layer in layers):
            hot = HotRows(
                model,
                layers,
                policy,
                num_slots=self.num_slots,
                max_tokens=self.max_tokens,
                page_tokens=store.page_tokens,
                kv_format=store.format,
                device=device,
                arrays_of=partial(_arrays_of, self.attention),
                catch_up=partial(_catch_up, self.attention, recent_tokens),
                estimate_clusters=self.attention.estimate_clusters,
            )
        resident = ResidentKV(
            store,
            layers,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            num_slots=self.num_slots,
            max_context=self.max_tokens,
            device=device,
            budget=self.budget,
            codes=codes,
            hot=hot,
        )
        heads = DeviceHeads(
            model,
            layers,
            policy,
            resident,
            num_rows=self.num_slots,
            max_tokens=self.max_tokens,
            page_tokens=store.page_tokens,
            kv_format=store.format,
            device=device,
        )
        num_recurrent = self.weights.num_recurrent
        buffers = StepBuffers(
            model, self.num_slots, store.dtype, device, num_recurrent, store.format.page_dtype
        )
        lists = None
        if codes is not None:
            lists = CodeLists(
                codes,
                layers,
                sm_scales=model.sm_scales,
                num_rows=self.num_slots,
                max_tokens=self.max_tokens,
                device=device,
            )
        return DeviceStep(model, self.weights, store, buffers, resident, heads, lists)

    def _make_codes(self, budget: PageBudget) -> ResidentCodes | None:
        """None: the placement has no codes."""
        attention, store = self.attention, self.attention.store
        shape = CodeShape.of(attention.policy, self.model.shape, store.page_tokens)
        if shape is None or not any(layer.coded for layer in self.layers):
            return None
        heads = shape.codes.heads

        def codes_of(seq: int, layer_idx: int, kv_len: int) -> State:
            def keys_from(first: int) -> torch.Tensor:
                return store.gather(seq, layer_idx, first, kv_len)[0][heads[layer_idx]]

            arrays = attention.states.ensure(seq, kv_len + 1).layers[layer_idx]
            return attention.policy.device.code_state(arrays, kv_len, keys_from)

        return ResidentCodes(
            shape,
            self.layers,
            codes_of,
            num_slots=self.num_slots,
            max_tokens=self.max_tokens,
            device=self.device,
            budget=budget,
        )

    def make_link(self, num_rows: int, num_micro_batches: int) -> HostLink:
        """A new one, for steps of so many rows in so many micro-batches."""
        host_experts, experts = self.model.host_experts, self.weights.hot_experts
        requests = requests_of(
            self.layers,
            micro_batch_rows(num_rows, num_micro_batches),
            [[i for i in numbers if i in host_experts] for numbers in self.model.mlp_order],
        )
        lists = self.step.lists
        if all(layer.finds for layer in self.layers if layer.coded):
            lists = None  # the host needs none of them
        selection = self.step.heads.selection if lists is None else lists.selection
        hot = self.step.resident.hot
        mailbox = Mailbox.allocate(
            **self.model.shape.heads,
            max_rows=num_rows,
            dtype=self.attention.store.dtype,
            num_requests=len(requests),
            pinned=self.device.type == "cuda",
            selection_units=selection.shape[1],
            selection_tokens=selection.shape[2],
            fetch_tokens=0 if hot is None else hot.fetch_tokens,
            rest_clusters=self.attention.estimate_clusters,
            hidden_size=self.model.shape.hidden_size if host_experts else 0,
            experts_per_token=0 if experts is None else experts.per_token,
        )
        publishing, listed, is_hot = np.zeros((3, *self.placement.places.shape), bool)
        for layer_idx, layer in enumerate(self.layers):
            publishing[layer_idx, list(layer.publishing)] = True
            if not layer.finds:
                listed[layer_idx, list(layer.coded)] = True
                is_hot[layer_idx, list(layer.hot)] = True
        sink_tokens, recent_tokens = self.window
        coprocessor = Coprocessor(
            self.attention,
            mailbox,
            requests,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            deadline_seconds=self.deadline_seconds,
            device_heads=self.placement.on_device,
            publishing_heads=publishing,
            listed_heads=listed,
            hot_heads=is_hot,
            hot_rows=None if hot is None else hot.map,
            experts=self.weights.host_experts,
            on_done=self.attention.record_step_queries,
        )
        gpu_sync = self.make_gpu_sync(coprocessor, mailbox)
        request_of, experts_of = (
            {(x.layer_idx, x.first_row): i for i, x in enumerate(requests) if x.of_experts == of}
            for of in (False, True)
        )
        of_requests = request_of, experts_of
        return HostLink(num_rows, num_micro_batches, mailbox, coprocessor, gpu_sync, *of_requests)


# Not methods: steps that hold themselves would keep the GPU's memory until they are collected.


def _arrays_of(attention: DecodeAttention, seq: int) -> LayerArrays | None:
    kv_len = attention.store.kv_len(seq) + 1
    if kv_len <= attention.dense_tokens or seq in attention.states.unasked:
        return None
    return attention.states.ensure(seq, kv_len)


def _catch_up(
    attention: DecodeAttention, recent_tokens: int, seq: int, arrays: LayerArrays
) -> None:
    store = attention.store
    last = store.kv_len(seq) - recent_tokens

    def join(layer_idx: int) -> None:
        gather = partial(store.gather, seq, layer_idx, stop=last)
        with torch_threads(1):
            join_clusters(arrays.layers[layer_idx], last, gather)

    lagging = [
        layer_idx
        for layer_idx, of_layer in enumerate(arrays.layers)
        if "estimate_header" in of_layer and (of_layer["estimate_header"]["end"] < last).any()
    ]
    map_in_threads(join, lagging, min(attention.pool.num_threads, max(1, len(lagging))))


class BoundRows(NamedTuple):
    """Sequences of the next step, or several, each in its row of `steps`.

    Attributes:
        slots: the row of each of `seqs`.
        kv_lens: tokens of each after the steps.
    """

    steps: PreparedSteps
    seqs: Sequence[int]
    slots: list[int]
    kv_lens: list[int]
