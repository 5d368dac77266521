"""Which KV heads the GPU attends to now, and how much of it they may take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from offload.decode.attention import DecodeAttention
from offload.decode.gpu.free_room import FreeRoom
from offload.decode.gpu.layer_heads import LayerHeads, layer_heads
from offload.decode.gpu.placement import HOT_BUDGETS, HeadPlacement, Place, least_places
from offload.decode.gpu.resident_codes import CodeShape
from offload.decode.gpu.resident_kv import check_resident_room, window_of
from offload.models import LeanModel
from offload.system.errors import DeviceMemoryError

logger = logging.getLogger(__name__)

# Given the placement now, sequences, tokens of each, the GPU's bytes for it (None: no limit), and
# the tokens that a prefill reads (None: all), it returns the placement for them.
PlacementChooser = Callable[[HeadPlacement, int, int, "int | None", "int | None"], HeadPlacement]


class Expected(NamedTuple):
    """What `Decoder.begin_generation` was told last."""

    num_sequences: int = 1
    kv_len: int = 1
    read_tokens: int | None = None


class PlacedHeads:
    """The host's attention leaves to the GPU exactly the heads that `placement` has there.

    Args:
        placement, keeps, choose, budget_bytes: as of `DeviceDecoder`.

    Attributes:
        placement: where each KV head is attended to now.
        layers: the same, layer by layer.
        num_changes: how often `use` was called; the same on all ranks.
        least: the placement of the heads alone that the policy needs on the GPU.
        keeps: heads for which the GPU has no room are an error.
        budget_bytes: of what stays on the GPU beside weights and buffers; None: no limit.
        window: sink tokens and recent tokens, which the GPU attends to.
    """

    def __init__(
        self,
        model: LeanModel,
        attention: DecodeAttention,
        free_room: FreeRoom,
        placement: HeadPlacement | None,
        *,
        keeps: bool,
        choose: PlacementChooser | None,
        budget_bytes: int | None,
    ) -> None:
        self._model, self._attention, self._free_room = model, attention, free_room
        self._policy, self._store = attention.policy, attention.store
        self.keeps, self.choose, self.budget_bytes = keeps, choose, budget_bytes
        self.window = window_of(self._policy)
        self.expected, self.num_changes = Expected(), 0
        heads = attention.num_qo_heads, self._store.num_kv_heads
        self._windows = windows = model.shape.windows
        self.least = HeadPlacement(least_places(self._policy, len(model.layers), *heads, windows))
        self._code_shape = CodeShape.of(self._policy, model.shape, self._store.page_tokens)
        placement = placement or self.least
        self.check(placement)
        self.use(placement)

    def check(self, placement: HeadPlacement) -> None:
        """Raise ValueError for one of another model, or that the policy does not allow."""
        num_kv_heads = self._store.num_kv_heads
        placement.check_model(num_layers=len(self._model.layers), num_kv_heads=num_kv_heads)
        placement.check_policy(self._policy, self._model.shape.num_qo_heads, self._windows)

    def use(self, placement: HeadPlacement) -> None:
        """Attend as `placement`, which was checked, says."""
        self.placement, places = placement, placement.places
        self.layers = self.layers_of(placement)
        self._attention.leave_to_device(
            self.window, placement.on_device, places == Place.GATHER, places == Place.HOT
        )
        # What was given up, and pages that it had no room for.
        self._gave_up: tuple[HeadPlacement, int] | None = None
        self.num_changes += 1

    def layers_of(self, placement: HeadPlacement) -> tuple[LayerHeads, ...]:
        policy = self._policy
        roles = None if policy.per_query_head else self._attention.roles
        return layer_heads(
            placement.places,
            roles,
            shares_selection=policy.shares_selection,
            windows=self._windows,
        )

    def num_pages(self, kv_len: int) -> int:
        """Pages of each KV head."""
        return -(-kv_len // self._store.page_tokens)

    def expect(self, expected: Expected, now: HeadPlacement, held_bytes: int) -> HeadPlacement:
        """The placement for a generation that begins.

        One that was given up comes back for fewer pages than it had no room for. So each time that
        this proves wrong, the number is smaller than before; all ranks know the same one.

        Args:
            now: the placement for what was expected before.
            held_bytes: of the GPU, for the placement now.

        Raises:
            DeviceMemoryError: the budget cannot hold its pages; nothing has changed.
        """
        num_pages = expected.num_sequences * self.num_pages(expected.kv_len)
        gave_up = self._gave_up
        comes_back = gave_up is not None and num_pages < gave_up[1]
        keeps = self.keeps and self.choose is None and not comes_back
        self._check_room(self.placement if keeps else self.least, expected)
        self.keeps, self.expected = keeps, expected
        if self.choose is not None:
            return self._chosen(now, *expected[:2], held_bytes)
        return gave_up[0] if comes_back and gave_up is not None else self.placement

    def room_bytes(self, held_bytes: int) -> int | None:
        """That a placement may take in all; arguments as of `expect`. None: there is no limit."""
        return self._free_room.num_bytes(self.budget_bytes, held_bytes)

    def fallbacks(self, num_sequences: int, kv_len: int, held_bytes: int) -> list[HeadPlacement]:
        """Placements that need less of the GPU, as many on all ranks: the codes go first."""
        # Steps have rows for all that are expected (`Slots.steps_for`).
        num_sequences = max(num_sequences, self.expected.num_sequences)
        less = [self.least]
        if self._code_shape is not None:
            less.insert(0, self.placement.without_codes())
        if self._model.ranks is None:
            if self.choose is not None:
                to_come = max(kv_len + kv_len // 4, self.expected.kv_len)
                to_come = min(to_come, self._model.shape.max_context)
                self._free_room.failed(self.room_bytes(held_bytes))
                chosen = self._chosen(self.least, num_sequences, to_come, held_bytes)
                # More may be free than when the placement now was chosen.
                if self._num_rows(chosen, to_come) < self._num_rows(self.placement, to_come):
                    less.insert(-1, chosen)
            less = [placement for placement in dict.fromkeys(less) if placement != self.placement]
        return less

    def less_for_prefill(self, held_bytes: int) -> HeadPlacement | None:
        """A placement that leaves more of the GPU to a prefill; None: it has to do without."""
        less, expected = None, self.expected
        if not self.keeps and self._model.ranks is None:
            less = next(iter(self.fallbacks(*expected[:2], held_bytes)), None)
        if less is None:
            self._free_room.forget()
        return less

    def give_up(self, less: HeadPlacement, why: DeviceMemoryError, num_pages: int) -> None:
        """Attend as `less` says until a generation needs fewer than `num_pages` of each head."""
        wanted, failed = self._gave_up or (self.placement, num_pages)
        self.keeps = less == self.least
        heads, hot = sum(less.counts(Place.GPU)), _num_hot(less)
        rest = f"{heads} KV heads stay there"
        if self.choose is None:
            rest = "lists are made without codes"
        rest += f", and hot rows of {hot}" if hot else ""
        if self.keeps:
            rest = "only dense layers stay there"
        logger.warning("%s. While sequences need so much, %s", why, rest)
        self.use(less)
        self._gave_up = wanted, min(failed, num_pages)

    def _check_room(self, placement: HeadPlacement, expected: Expected) -> None:
        """Raises DeviceMemoryError where the budget cannot hold its pages."""
        shape, codes = self._code_shape, 0
        if shape is not None and expected.kv_len > shape.budget_tokens:
            coded = zip(*map(placement.counts, (Place.CODES, Place.FOUND)), strict=True)
            codes = sum(shape.page_bytes(sum(counts)) for counts in coded)
        layers = self.layers_of(placement)
        check_resident_room(self._store, layers, *expected[:2], self.budget_bytes, codes)

    def _chosen(
        self, now: HeadPlacement, num_sequences: int, kv_len: int, held_bytes: int
    ) -> HeadPlacement:
        """What `choose` makes of what is free."""
        assert self.choose is not None
        room = self.room_bytes(held_bytes)
        return self.choose(now, num_sequences, kv_len, room, self.expected.read_tokens)

    def _num_rows(self, placement: HeadPlacement, kv_len: int) -> int:
        """Keys and values of a sequence that are on the GPU beside windows, or come there."""
        budget_tokens = self._policy.budget_tokens if self._policy.selects else 0
        num_rows = sum(placement.counts(Place.GPU)) * kv_len
        num_rows += _num_hot(placement) * HOT_BUDGETS * budget_tokens
        return num_rows + max(placement.counts(Place.GATHER)) * 2 * budget_tokens


def _num_hot(placement: HeadPlacement) -> int:
    return sum(placement.counts(Place.HOT)) + sum(placement.counts(Place.FOUND))
