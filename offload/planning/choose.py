"""Chooses where KV heads are attended, by the predicted time of a step and the GPU's budget.

Under full attention the GPU holds as many layers as fit. Under a policy that selects: dense layers,
which must be there, then retrieving heads and dense heads of other layers, most saved time per byte
first. Then whole layers, the last ones first: no layer below waits for what they would select. Each
other layer's reusing heads are shared out between the CPU and rows that the GPU fetches, so that
the slower of the two takes least, and codes of keys come layer by layer while they fit. How many
whole layers are best is tried, with hot rows in those others that they make faster, as far as these
fit, and without: a GPU that attends to everything may be slower than a selection, and so may one
that waits for no other. The result depends on nothing but the arguments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from offload.decode.gpu.placement import (
    BoolArray,
    HeadPlacement,
    Place,
    UInt8Array,
    has_codes,
    least_places,
    may_be_gathered,
    may_stay_on_gpu,
)
from offload.planning.placement_bytes import step_device_bytes
from offload.planning.profile import DeviceProfile
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload
from offload.system.errors import DeviceMemoryError
from offload.system.memory import format_bytes

IntArray = npt.NDArray[np.intp]

_TRIED_COUNTS = 8  # of whole layers, beside the most that fit
_MUCH_SLOWER = 1.1  # than without room for a prompt


@dataclass(frozen=True)
class DeviceRoom:
    """What decoding may take of a GPU.

    Attributes:
        budget_bytes: of everything that `num_bytes` counts; None: no limit.
        device: see `step_device_bytes`.
    """

    work: Workload
    budget_bytes: int | None
    device: DeviceProfile | None = None

    def num_bytes(self, placement: HeadPlacement) -> int:
        """That a placement takes, in all: pages, windows, tables and buffers."""
        return sum(step_device_bytes(placement, self.work, self.device).values())

    def holds(self, placement: HeadPlacement) -> bool:
        return self.budget_bytes is None or self.num_bytes(placement) <= self.budget_bytes


def choose_placement(model: StepModel | None, room: DeviceRoom) -> HeadPlacement:
    """The best placement for a GPU that decodes.

    Args:
        model: predicts steps of the room's `work`; None: retrieving heads go to the GPU in the
            order of their layers, and nothing is fetched, as the time of that is not known.

    Raises:
        DeviceMemoryError: the dense layers do not fit; names the sizes and the options.
    """
    work = room.work
    least = least_placement(work)
    _check_dense(least, room)
    if not work.policy.selects:
        found = [_more_full_heads(least.places.copy(), room)]
    else:
        found = _with_layers(least.places.copy(), model, room)
    if model is None:
        return HeadPlacement(found[0])
    # Of equally fast ones that with most on the GPU; `least` where a GPU is slower than the CPU.
    placements = [*map(HeadPlacement, found), least]
    if work.is_sparse:  # with hot rows where there may be any
        placements += [_hot_where_it_fits(placement, model, room) for placement in placements]
    distinct = dict.fromkeys(placements)
    fastest = sorted(distinct, key=lambda each: round(model.step(each).milliseconds, 4))
    return next(placement for placement in fastest if room.holds(placement))


def choose_beside_prefill(
    model: StepModel | None, room: DeviceRoom, prefill_bytes: int
) -> tuple[HeadPlacement, DeviceRoom]:
    """The best placement that leaves a prefill its bytes, and the room without them.

    The best placement, and all of the room, where that one has no room even for the dense layers,
    or sequences would decode much slower. The first prompts are read before anything stays
    on the GPU; others take their room from heads (`Decoder.give_heads_back`).

    Raises:
        DeviceMemoryError: as `choose_placement` of all of the room.
    """
    if room.budget_bytes is None:
        return choose_placement(model, room), room
    beside = replace(room, budget_bytes=room.budget_bytes - prefill_bytes)
    try:
        placement = choose_placement(model, beside)
    except DeviceMemoryError:
        return choose_placement(model, room), room
    if model is not None:
        whole = choose_placement(model, room)
        slower, faster = (model.step(places).milliseconds for places in (placement, whole))
        # One alone only where its tokens are found there: the CPU's scan is what takes so long.
        is_worth = room.work.batch_size > 1 or any(whole.counts(Place.FOUND))
        if is_worth and slower > _MUCH_SLOWER * faster:
            return whole, room
    return placement, beside


def least_placement(work: Workload) -> HeadPlacement:
    """Dense layers on the GPU, everything else on the CPU."""
    shape = work.shape
    heads = shape.num_qo_heads, shape.num_kv_heads
    return HeadPlacement(least_places(work.policy, shape.num_layers, *heads, shape.windows))


def _check_dense(placement: HeadPlacement, room: DeviceRoom) -> None:
    if room.holds(placement):
        return
    work = room.work
    budget, needed = room.budget_bytes or 0, room.num_bytes(placement)
    num_heads = sum(placement.counts(Place.GPU))
    one_page = num_heads * work.page_tokens * work.pair_bytes
    of_pages = (
        f", and one page of {work.page_tokens} tokens of each of the {num_heads} KV heads that "
        f"must stay there takes {format_bytes(one_page)}"
        if one_page > budget
        else ""
    )
    raise DeviceMemoryError(
        f"decoding {work.batch_size} sequences of {work.kv_len:,} tokens needs "
        f"{format_bytes(needed)} on the GPU beside the weights and prefill ({num_heads} KV heads "
        f"of dense layers, windows and buffers), but {format_bytes(budget)} are left of its "
        f"budget{of_pages}; raise max_memory of the device, lower the policy's dense_layers, the "
        "context or the batch size"
    )


def _most_that_fit(most: int, placed: Callable[[int], UInt8Array], room: DeviceRoom) -> int:
    """A count up to `most` whose places fit, the largest where what they take grows with it; 0
    fits."""

    def fails(count: int) -> bool:
        return not room.holds(HeadPlacement(placed(count)))

    if most and not fails(most):  # as a rule
        return most
    return bisect_left(range(1, most), True, key=fails)


def _more_full_heads(places: UInt8Array, room: DeviceRoom) -> UInt8Array:
    """As many layers of a policy that selects nothing as fit, the first ones first."""

    def with_first(layers: int, heads: int = 0) -> UInt8Array:
        trial: UInt8Array = places.copy()
        trial[:layers] = Place.GPU
        trial[layers : layers + 1, :heads] = Place.GPU
        return trial

    layers = _most_that_fit(len(places), with_first, room)
    if layers == len(places):
        return with_first(layers)
    most_heads = places.shape[1] - 1
    return with_first(layers, _most_that_fit(most_heads, lambda n: with_first(layers, n), room))


def _add_retrieving(places: UInt8Array, model: StepModel | None, room: DeviceRoom) -> None:
    """Put heads that may stay there on the GPU while they fit, most saved time per byte first."""
    policy = room.work.policy
    movable = may_stay_on_gpu(policy, room.work.roles()) & (places == Place.CPU)
    layers = _by_benefit(places, movable, model)

    def with_first(count: int) -> UInt8Array:
        trial: UInt8Array = places.copy()
        trial[layers[:count]] = np.where(movable, Place.GPU, places)[layers[:count]]
        return trial

    whole = _most_that_fit(len(layers), with_first, room)
    places[:] = with_first(whole)
    for layer_idx in layers[whole:]:
        heads = np.flatnonzero(movable[layer_idx])
        for count in range(len(heads), 0, -1):
            if policy.shares_selection and count < len(heads):
                break  # they publish together
            trial = places.copy()
            trial[layer_idx, heads[:count]] = Place.GPU
            if room.holds(HeadPlacement(trial)):
                places[:] = trial
                break


def _with_layers(places: UInt8Array, model: StepModel | None, room: DeviceRoom) -> list[UInt8Array]:
    """Placements with more and more whole layers on the GPU beside retrieving heads; the most that
    fit come first."""
    _add_retrieving(places, model, room)
    num_layers = len(places)

    def with_last(count: int) -> UInt8Array:
        trial: UInt8Array = places.copy()
        trial[num_layers - count :] = Place.GPU
        return trial

    most = _most_that_fit(num_layers, with_last, room)
    counts = {most}
    if model is not None:
        counts |= set(range(0, most, -(-num_layers // _TRIED_COUNTS)))
        work = room.work
        hot = _most_that_fit(most, lambda n: _hot(HeadPlacement(with_last(n)), work).places, room)
        counts.add(hot)
        order = _fetching_order(places, model, work)
    found = []
    for count in sorted(counts, reverse=True):
        trial = with_last(count)
        if model is not None and room.work.is_sparse:
            _add_gathered(trial, order, room)
        if room.work.is_sparse:
            _add_codes(trial, room)
        found.append(trial)
    return found


def _hot(placement: HeadPlacement, work: Workload) -> HeadPlacement:
    heads = work.shape.num_qo_heads
    return placement.with_hot_rows(work.policy, heads, roles=work.selected_roles)


def _hot_where_it_fits(
    placement: HeadPlacement, model: StepModel, room: DeviceRoom
) -> HeadPlacement:
    """Hot rows in the layers that they make faster, as far as these fit, most saved time first;
    codes in what is left."""
    places = placement.without_codes().places
    hot = _hot(placement, room.work).places
    saved_us = {}
    for layer_idx in np.flatnonzero((hot != places).any(axis=1)).tolist():
        before, after = (model.layer(layer_idx, x[layer_idx]).total for x in (places, hot))
        saved_us[layer_idx] = round(before - after, 3)
    layers = sorted(
        (layer_idx for layer_idx, saved in saved_us.items() if saved > 0.0),
        key=lambda layer_idx: (-saved_us[layer_idx], layer_idx),
    )

    def with_first(count: int) -> UInt8Array:
        trial: UInt8Array = places.copy()
        trial[layers[:count]] = hot[layers[:count]]
        return trial

    found = with_first(_most_that_fit(len(layers), with_first, room))
    _add_codes(found, room)
    return HeadPlacement(found)


def _by_benefit(places: UInt8Array, movable: BoolArray, model: StepModel | None) -> list[int]:
    """Layers with movable heads; those whose moving saves most time per head come first."""
    layers: list[int] = np.flatnonzero(movable.any(axis=1)).tolist()
    if model is None:
        return layers

    def saved_us(layer_idx: int) -> float:
        moved = places[layer_idx].copy()
        moved[movable[layer_idx]] = Place.GPU
        before = model.layer(layer_idx, places[layer_idx]).total
        after = model.layer(layer_idx, moved).total
        return (before - after) / int(movable[layer_idx].sum())

    # Rounded: equal layers keep their order on every machine.
    return sorted(layers, key=lambda layer_idx: (-round(saved_us(layer_idx), 3), layer_idx))


def _fetching_order(places: UInt8Array, model: StepModel, work: Workload) -> IntArray:
    """[num_layers, num_kv_heads]: from 1 on, reusing heads in the order in which a layer had better
    have the GPU fetch their rows; 0: not at all.

    It depends on the layers above alone: whole layers below may go to the GPU.
    """
    order = np.zeros(places.shape, np.intp)
    if work.is_sparse:
        eligible = may_be_gathered(work.policy, work.roles(), places) & (places == Place.CPU)
        for layer_idx in np.flatnonzero(eligible.any(axis=1)).tolist():
            heads = np.flatnonzero(eligible[layer_idx])
            heads = heads[: _best_count(places, heads, layer_idx, model)]
            order[layer_idx, heads] = range(1, len(heads) + 1)
    return order


def _add_gathered(places: UInt8Array, order: IntArray, room: DeviceRoom) -> None:
    """Share each layer's reusing heads out between the CPU and rows that the GPU fetches.

    All layers use one buffer, as wide as the layer that fetches most needs it: how wide it may be
    is found first.
    """
    order = np.where(places == Place.CPU, order, 0)
    for most in range(int(order.max()), 0, -1):
        trial = np.where((order > 0) & (order <= most), Place.GATHER, places).astype(np.uint8)
        if room.holds(HeadPlacement(trial)):
            places[:] = trial
            return


def _add_codes(places: UInt8Array, room: DeviceRoom) -> None:
    """Let the GPU list candidates for the CPU's heads whose keys have codes, in as many layers as
    fit, the first ones first.
    """
    work = room.work
    eligible = has_codes(work.policy, work.roles()) & (places == Place.CPU)
    layers = np.flatnonzero(eligible.any(axis=1))

    def with_first(count: int) -> UInt8Array:
        coded: UInt8Array = places.copy()
        for layer_idx in layers[:count]:
            coded[layer_idx, eligible[layer_idx]] = Place.CODES
        return coded

    places[:] = with_first(_most_that_fit(len(layers), with_first, room))


def _best_count(places: UInt8Array, heads: IntArray, layer_idx: int, model: StepModel) -> int:
    """How many of these heads of a layer to fetch; of equally fast numbers the least.

    The CPU's part falls with the number and the fetching rises, so that a faster link can only
    move the best number up.
    """
    top_k_us = model.top_k_us(layer_idx - 1, places[layer_idx - 1]) if layer_idx else 0.0
    totals = []
    for count in range(len(heads) + 1):
        trial = places[layer_idx].copy()
        trial[heads[:count]] = Place.GATHER
        totals.append(model.layer(layer_idx, trial, top_k_us=top_k_us).total)
    return int(np.argmin(totals))
