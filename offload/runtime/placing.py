"""The placement of a model for which none was given: as many heads on the GPU as there is room.

Loading must not wait for a measurement. Where `offload plan` has measured this machine before, its
profile decides what the CPU had better do; else a typical machine's.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.kv.format import KVFormat
from offload.kv.page_pool import pages_at
from offload.models import LeanModel
from offload.models.shape import ModelShape
from offload.planning.choose import DeviceRoom, choose_beside_prefill, least_placement
from offload.planning.placement_bytes import head_state_bytes, next_prompt_bytes
from offload.planning.profile import MachineProfile, cached_profile, typical_profile
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.ranks.shares import head_ranges
from offload.runtime.config import RuntimeConfig
from offload.system.errors import DeviceMemoryError

logger = logging.getLogger(__name__)

# Of a placement's heads on the GPU, and of its predicted time: another one that is about as good is
# not worth new captures.
_ABOUT = 0.1
_ROOM_SHARES = 2**10  # of a room's next power of two: 16 MiB of 9 GiB; choosing takes up to 10 ms
_KEPT_CHOICES = 64
# Of a room's next power of two, where only the time of steps is asked for: 0.5 GiB of 9.
_COARSE_SHARES = 2**5
# Of the most tokens per second that any number of sequences gets: for less nobody waits.
_WORTH_WAITING = 0.7
_KEPT_TOKENS = 32768


@dataclass
class Chooser:
    """Chooses placements for what is about to run (`DeviceDecoder.choose`).

    Args:
        profile: of this machine; None: as many heads are on the GPU as fit.
        is_measured: whether it is; else it is a typical one.
        predicts: whether a layer's queries can be told before the one above is finished.
    """

    policy: Policy
    shape: ModelShape
    dtype: torch.dtype
    page_tokens: int
    prefill_slice_tokens: int
    profile: MachineProfile | None
    is_measured: bool = True
    kv_dtype: str = "auto"
    predicts: bool = True
    _known: dict[tuple[int, int, int | None, int | None], tuple[HeadPlacement, DeviceRoom]] = field(
        default_factory=dict
    )
    _together: dict[tuple[int, int, int | None, int | None], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: RuntimeConfig, shape: ModelShape, dtype: torch.dtype, num_threads: int
    ) -> Chooser:
        """For a model on a GPU."""
        measured = known_profile(torch.device(config.device), num_threads)
        profile = measured or typical_profile(num_threads)
        sizes, is_known = (config.page_tokens, config.prefill_slice_tokens), measured is not None
        return cls(config.policy, shape, dtype, *sizes, profile, is_known, config.kv_dtype)

    def __call__(
        self,
        now: HeadPlacement,
        num_sequences: int,
        kv_len: int,
        room_bytes: int | None,
        read_tokens: int | None = None,
    ) -> HeadPlacement:
        """The best that is known for sequences of `kv_len` tokens; `now` if that is about as good.

        Args:
            room_bytes: of the GPU, beside the weights and what other models have; None: no limit.
            read_tokens: of prompts, that a prefill reads at most; None: of all sequences at once.
        """
        kv_len = min(self.shape.max_context, _rounded_up(kv_len))
        room_bytes = _rounded_down(room_bytes, _ROOM_SHARES)
        work = self.workload(num_sequences, kv_len)
        key = (num_sequences, kv_len, read_tokens, room_bytes)
        if key not in self._known:
            if len(self._known) == _KEPT_CHOICES:
                self._known.clear()
            self._known[key] = self._choose(work, read_tokens, room_bytes)
        wanted, room = self._known[key]
        if now == wanted or not room.holds(now):
            return wanted
        had, has = (int((x.places == Place.GPU).sum()) for x in (now, wanted))
        is_about, model = abs(has - had) <= _ABOUT * has, self._model(work)
        if is_about and model is not None:
            had_ms, has_ms = (model.step(x).milliseconds for x in (now, wanted))
            is_about = had_ms <= (1 + _ABOUT) * has_ms
        return now if is_about else wanted

    def most_together(
        self, most: int, kv_len: int, room_bytes: int | None, read_tokens: int | None = None
    ) -> int:
        """Sequences of `kv_len` tokens, `most` at most, that had best be decoded in the same steps:
        where heads of more have no room on the GPU, steps may take longer by more than sequences
        are more. Other arguments as of a call.
        """
        kv_len = min(self.shape.max_context, _rounded_up(kv_len))
        room_bytes = _rounded_down(room_bytes, _COARSE_SHARES)
        key = (most, kv_len, read_tokens, room_bytes)
        if key not in self._together:
            rates = dict[int, float]()
            for count in sorted({*(1 << i for i in range(most.bit_length())), most}):
                work = self.workload(count, kv_len)
                if (model := self._model(work)) is None:
                    return most
                chosen, _ = self._choose(work, read_tokens, room_bytes)
                rates[count] = count / model.step(chosen).milliseconds
                least = _WORTH_WAITING * max(rates.values())
                if rates[count] < least:
                    break
            self._together[key] = max(count for count, rate in rates.items() if rate >= least)
        return self._together[key]

    def workload(self, num_sequences: int, kv_len: int) -> Workload:
        """The workload of sequences of `kv_len` tokens."""
        return Workload(
            self.shape,
            self.policy,
            kv_len,
            num_sequences,
            dtype=self.dtype,
            page_tokens=self.page_tokens,
            kv_dtype=self.kv_dtype,
        )

    @cached_property
    def _kept_per_token(self) -> tuple[float, ...]:
        """Bytes of a KV head that each of the policy's members keeps, by one made head: under 1 s.

        Where the CPU reads these to choose, it decides whether hot rows are faster.
        """
        tokens = max(_KEPT_TOKENS, 2 * self.policy.dense_tokens)
        head = replace(self.shape, num_kv_heads=1, num_qo_heads=self.shape.group_size)
        of_head = head_state_bytes(self.policy, head, self.dtype, tokens)
        return tuple(num_bytes / tokens for num_bytes in of_head)

    def _model(self, work: Workload) -> StepModel | None:
        if self.profile is None or self.profile.device is None:
            return None
        if work.is_sparse:
            kept = tuple(work.kv_len * num_bytes for num_bytes in self._kept_per_token)
            work = replace(work, head_state_bytes=kept)
        return StepModel(self.profile, work, on_gpu=True)

    def _choose(
        self, work: Workload, read_tokens: int | None, room_bytes: int | None
    ) -> tuple[HeadPlacement, DeviceRoom]:
        """The placement, and the room that it was chosen for."""
        device = None if self.profile is None else self.profile.device
        model = self._model(work)
        room = DeviceRoom(work, room_bytes, device)
        prefill = next_prompt_bytes(work, self.prefill_slice_tokens, read_tokens)
        try:
            chosen, room = choose_beside_prefill(model, room, prefill)
            return chosen if self.predicts else chosen.without_prediction(), room
        except DeviceMemoryError:  # growing says so when it does not fit
            return least_placement(work), room


_PLACES = {
    Place.GPU: "on the GPU",
    Place.HOT: "with hot rows there",
    Place.FOUND: "with hot rows that it finds",
    Place.GATHER: "with rows fetched to it",
    Place.CODES: "on the CPU with codes on the GPU",
    Place.CPU: "on the CPU",
}


def _rounded_down(room_bytes: int | None, shares: int) -> int | None:
    """What is free changes a little all the time."""
    if room_bytes is None:
        return None
    step = max(1, (1 << room_bytes.bit_length()) // shares)
    return room_bytes // step * step


def _rounded_up(kv_len: int) -> int:
    """To one of eight lengths between powers of two: contexts of about a length share a choice."""
    step = max(1, (1 << (kv_len - 1).bit_length()) // 16)
    return -(-kv_len // step) * step


def placement_for(
    config: RuntimeConfig,
    lean: LeanModel,
    choose: Chooser | None,
    *,
    dtype: torch.dtype,
    host_kv_bytes: int,
    device_kv_bytes: int | None,
    taken_bytes: int = 0,
) -> HeadPlacement | None:
    """Where the heads of a model that is on its device are attended.

    A given placement is returned, of ranks the part of it. Otherwise `choose` makes one for a
    sequence as long as the model and the host's budget allow.

    Args:
        host_kv_bytes, device_kv_bytes: for the KV cache; None: as much as the GPU has.
        taken_bytes: of what is free there now, that weights will take.

    Returns:
        None: dense layers on the GPU and everything else on the CPU, or there is no GPU.
    """
    if config.placement is not None:
        placement = config.placement
        if lean.ranks is not None:  # it is of the whole model's heads
            ranges = head_ranges(placement.num_kv_heads, lean.ranks.world_size)
            placement = placement.of_heads(ranges[lean.ranks.rank])
        return placement
    if choose is None:
        return None
    room_bytes = int(torch.cuda.mem_get_info(torch.device(config.device))[0]) - taken_bytes
    if device_kv_bytes is not None:
        room_bytes = min(room_bytes, device_kv_bytes)
    tokens = longest_context(config, lean.shape, dtype, host_kv_bytes)
    least = least_placement(choose.workload(1, tokens))
    chosen = choose(least, 1, tokens, room_bytes)
    how = "by this machine's profile" if choose.is_measured else "as on a typical machine"
    hint = "" if choose.is_measured else " (`offload plan` measures this one)"
    of_places = {place: sum(chosen.counts(place)) for place in _PLACES}
    where = ", ".join(
        f"{of_places[place]} {_PLACES[place]}" for place in _PLACES if of_places[place]
    )
    logger.info("KV heads are placed %s%s: %s", how, hint, where)
    return chosen


def longest_context(
    config: RuntimeConfig, shape: ModelShape, dtype: torch.dtype, host_kv_bytes: int
) -> int:
    """Tokens of a sequence that the model and the host's budget allow."""
    of_rows = KVFormat.of(config.kv_dtype, dtype, keys_only=shape.latent_dim > 0)
    token_bytes = of_rows.token_bytes(**shape.kv_heads)
    of_sequence = host_kv_bytes
    if config.host_bytes_per_sequence is not None:
        of_sequence = min(of_sequence, config.host_bytes_per_sequence)
    longest = of_sequence // token_bytes
    if shape.windows:
        of_page = token_bytes // shape.num_layers * config.page_tokens
        longest = bisect_right(
            range(shape.max_context + 1),
            of_sequence,
            lo=1,
            key=lambda n: pages_at(n, config.page_tokens, shape.windows) * of_page,
        )
        longest -= 1
    return min(shape.max_context, max(config.page_tokens, longest))


def known_profile(device: torch.device, num_threads: int) -> MachineProfile | None:
    """What was measured of this machine; None: nothing, or its file is damaged."""
    try:
        return cached_profile(device, num_threads)
    except (OSError, ValueError) as error:  # a damaged file is no reason not to load a model
        logger.warning("%s", error)
        return None
