"""Decode on the GPU with the KV cache on the host; the CPU attends as its coprocessor.

`DeviceDecoder` is what other packages see of three parts: `slots` says which sequence has which
row of the steps, `placed_heads` which heads the GPU has, and `captured_steps` runs the steps. What
one launches is in `step`, who waits for whom in `gpu_sync`, what stays on the GPU in `resident_kv`.
With device "cpu" and backend "inline" the same step runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cpu_ops.coprocessor import Coprocessor
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention, MakeCompression
from offload.decode.gpu.captured_steps import CapturedSteps
from offload.decode.gpu.free_room import FreeRoom
from offload.decode.gpu.linear import DeviceWeights, linear_path
from offload.decode.gpu.placed_heads import Expected, PlacedHeads, PlacementChooser
from offload.decode.gpu.placement import HeadPlacement
from offload.decode.gpu.slots import Slots
from offload.decode.sampling import MOST_STEPS, Draws, TokenChooser
from offload.kv.sequence_part import SequencePart
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.batch import RaggedBatch
from offload.policies import Policy
from offload.system.errors import DeviceMemoryError


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
        most_together: as `Chooser.most_together`; None: there is no such limit.
        make_room: gives back what others have of the GPU for a while; whether it was anything.
        pool: of `num_threads`; None: a new one.
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
        most_together: Callable[[int, int, int | None, int | None], int] | None = None,
        make_room: Callable[[], bool] = lambda: False,
        make_compression: MakeCompression = lambda attention, pool: None,
        pool: WorkerPool | None = None,
    ) -> None:
        self.model, self.store, self.device = model, store, device
        self.pool = pool or WorkerPool(num_threads)
        self.attention = DecodeAttention(
            policy,
            store,
            num_qo_heads=model.shape.num_qo_heads,
            pool=self.pool,
            sm_scale=model.sm_scales,
            softcap=model.each("softcap"),
            windows=model.each("window"),
            sinks=[None if x is None else x.cpu() for x in model.sinks],  # of what it answers alone
            make_compression=make_compression,
        )
        self.attention.states.device = device if device.type == "cuda" else None
        self._weights = weights = DeviceWeights.of(model)
        self.placed = PlacedHeads(
            model,
            self.attention,
            FreeRoom(device, device_limit_bytes),
            placement,
            keeps=keeps_placement,
            choose=choose,
            budget_bytes=device_budget_bytes,
        )
        of_model = model, weights, self.attention, self.placed
        self._most_together = most_together if model.ranks is None else None  # they would differ
        self.captured = CapturedSteps(*of_model, device, backend, deadline_seconds)
        self.slots = Slots(self.captured, make_room)
        if model.ranks is not None:
            model.ranks.close_before_leaving(self.close)

    @property
    def placement(self) -> HeadPlacement:
        """Where each KV head is attended to now."""
        return self.placed.placement

    @property
    def device_bytes(self) -> int:
        return self.slots.device_bytes

    @property
    def setup_seconds(self) -> float:
        return self.captured.setup_seconds

    @property
    def after_projection(self) -> Callable[[int, int, Tensor, Tensor], None] | None:
        """See `DeviceStep`; steps with another are captured apart."""
        return self.captured.after_projection

    @after_projection.setter
    def after_projection(self, after: Callable[[int, int, Tensor, Tensor], None] | None) -> None:
        self.captured.after_projection = after

    @property
    def on_mark(self) -> Callable[[str, int], None] | None:
        """See `DeviceStep`; steps with another are captured apart."""
        return self.captured.on_mark

    @on_mark.setter
    def on_mark(self, mark: Callable[[str, int], None] | None) -> None:
        self.captured.on_mark = mark

    @property
    def coprocessors(self) -> list[Coprocessor]:
        """The coprocessors of all kinds of steps that there have been."""
        links = {} if self.slots.steps is None else self.slots.steps.links
        return [link.coprocessor for link in links.values()]

    def place(self, placement: HeadPlacement) -> None:
        """Attend as `placement` says from now on.

        Raises:
            ValueError: a placement of another model, or that the policy does not allow.
        """
        self.slots.place(placement)

    def decode(self, hidden: Tensor, batch: RaggedBatch, seqs: Sequence[int]) -> Tensor:
        """As `Decoder.decode`, of one new token per sequence."""
        hidden = self.captured.run_layers(self.slots.bind(seqs), hidden, batch.position_ids)
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
        bound = self.slots.bind(seqs, keeps_steps=self.captured.in_turn is not None)
        step = (bound, tokens, position_ids, draws)
        return self.captured.run_tokens(*step, ahead=ahead, beside=beside)

    def begin_steps(self, seqs: Sequence[int], most: int) -> int:
        """As `Decoder.begin_steps`: the GPU begins when the CPU has what the last leaves."""
        if most < 2 or not self.captured.may_follow():
            return 1
        return self.captured.begin_steps(self.slots.bind(seqs), most)

    def end_steps(self) -> None:
        self.captured.end_steps()

    def tokens_at_once(self, seqs: Sequence[int], most: int) -> int:
        """As `Decoder.tokens_at_once`: a burst, if the GPU has all heads of all of them."""
        is_resident = all(layer.is_resident for layer in self.placed.layers)
        if most < 2 or self.captured.is_watched or not is_resident:
            return 1
        # Which may have to place heads elsewhere.
        steps = self.slots.bind(seqs, min(most, MOST_STEPS)).steps
        return 1 if steps.bursts is None else min(most, steps.burst_length.num_steps)

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
        bound = self.slots.bind(seqs, count, keeps_steps=True)
        return self.captured.run_burst(bound, tokens, position_ids, draws, count)

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
        self.slots.forget(seq)

    def roll_back(self, seq: int, kv_len: int) -> None:
        self.forget(seq)

    def rebase(self, seq: int, kv_len: int, to: int) -> None:
        if self.model.ranks is not None:  # one that had to make room would have other slots
            self.forget(seq)
        elif self.slots.resident is not None:
            self.slots.resident.rebase(seq, kv_len, to)

    def truncate(self, seq: int, kv_len: int) -> None:
        if self.slots.resident is not None:
            self.slots.resident.crop(seq, kv_len)

    def trim(self) -> None:
        if self.slots.resident is not None:
            self.slots.resident.trim()

    def begin_generation(
        self, num_sequences: int, kv_len: int, read_tokens: int | None = None
    ) -> None:
        aside, expected = self.slots.aside, Expected(num_sequences, kv_len, read_tokens)
        now = self.placement if aside is None else aside.placement
        self.slots.go_to(self.placed.expect(expected, now, self.device_bytes))

    def most_together(self, most: int, kv_len: int, read_tokens: int | None = None) -> int:
        """As `Decoder.most_together`, by the predicted times of steps."""
        if self._most_together is None:
            return most
        room_bytes = self.placed.room_bytes(self.device_bytes)
        return self._most_together(most, kv_len, room_bytes, read_tokens)

    def end_generation(self) -> None:
        """As `Decoder.end_generation`: steps that are made anew are for those that come. The
        caller's code may draw there, or wait for the whole GPU, which is refused while a thread
        captures.
        """
        self.end_steps()  # where ctrl-C came before it
        self.placed.expected = Expected()
        if self.slots.aside is not None:
            self.slots.aside.wait()

    def finish_captures(self) -> None:
        self.slots.finish_aside()

    def give_heads_back(self, why: DeviceMemoryError) -> bool:
        """As `Decoder.give_heads_back`; never where somebody has asked for the placement."""
        return self.slots.give_heads_back(why)

    def check_usable(self) -> None:
        for coprocessor in self.coprocessors:
            coprocessor.check_usable()

    def close(self) -> None:
        self.slots.drop()
        self.pool.close()
