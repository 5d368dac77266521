"""What `auto` comes to when a model is opened or planned, and why.

With a GPU that has room for the longest context: exact attention, all of it there. On a CPU: exact
attention up to the context from which a policy is faster. Else by the table of
`offload.planning.measured_loss`: the fastest policy that is shown to lose at most a point of hard
look-ups; where none is, the one that keeps most. The reason ends with what was measured.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.decode.gpu.free_room import SPARE_BYTES
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.loading.checkpoint import Checkpoint
from offload.loading.gguf import embedded_name
from offload.loading.planned_model import PlannedModel
from offload.models.shape import ModelShape, layer_elements
from offload.planning.choose import DeviceRoom, choose_beside_prefill, least_placement
from offload.planning.measured_loss import HOT_ROWS, TRUE_QUERY, Loss, measured_losses
from offload.planning.placement_bytes import head_state_bytes, next_prompt_bytes
from offload.planning.profile import MachineProfile, typical_profile
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload, policy_key
from offload.policies import Policy
from offload.policies.auto import Auto
from offload.policies.full import Full
from offload.policies.registry import make_policy
from offload.ranks.group import TensorParallel
from offload.ranks.shares import head_ranges
from offload.runtime.budgets import (
    device_kv_budget_bytes,
    kv_budget_bytes,
    pool_threads,
    weight_bytes_before_loading,
)
from offload.runtime.config import RuntimeConfig
from offload.runtime.host_experts import host_expert_bytes
from offload.runtime.placing import known_profile, longest_context
from offload.system.errors import DeviceMemoryError
from offload.system.memory import format_bytes

logger = logging.getLogger(__name__)

# Up to which context exact attention is faster than a policy on a CPU that was not measured: in
# docs/results.md sketch is 1.08 times as fast at 8,192 tokens and 0.96 times at 4,096.
CROSSOVER_TOKENS = 8192
# Of each KV head. Twice as many as 64 take no longer, and keep 0.1 points more (462 prompts).
ESTIMATE_CLUSTERS = 128
_PROJECTION = re.compile(r"\.layers\.\d+\.self_attn\.([qk]_proj)\.weight$")
_MEASURED_CLUSTERS = (ESTIMATE_CLUSTERS, 64)


@dataclass(frozen=True)
class Room:
    """Where `auto` is resolved.

    Attributes:
        on_gpu: the linear layers are on a GPU.
        room_bytes: of it beside the weights, of each rank's; None: no limit.
        prefill_slice_tokens: as in `RuntimeConfig`.
        profile: of this machine; None: it was never measured.
        num_ranks: processes that run the model together.
        exact_because: on a CPU, why a policy that selects is out of the question; "": it is not.
        model: name of the embedded model that runs; "": another one does.
    """

    on_gpu: bool
    room_bytes: int | None = None
    prefill_slice_tokens: int = 8192
    profile: MachineProfile | None = None
    num_ranks: int = 1
    exact_because: str = ""
    model: str = ""


def with_resolved_policy(
    checkpoint: Checkpoint, config: RuntimeConfig, ranks: TensorParallel | None
) -> tuple[RuntimeConfig, str]:
    """The config with what its policy comes to if that is `auto`, and why, which is logged; "" if
    it is not. Before any weight is read.

    Raises:
        HostBudgetError, DeviceMemoryError: the weights do not fit.
        ValueError: more ranks than KV heads.
    """
    dtype = checkpoint.loaded_dtype(config.dtype)
    weight_bytes = weight_bytes_before_loading(checkpoint, config)
    host_bytes, copied = host_expert_bytes(checkpoint, config)
    weight_bytes += copied - host_bytes
    model, because = embedded_name(checkpoint.folder) or "", ""
    if isinstance(config.policy, Auto) and _heads_differ(checkpoint):
        because = "heads of layers differ, and estimating what is not selected needs them alike"
    return resolved_config(config, checkpoint.shape, dtype, weight_bytes, ranks, model, because)


def _heads_differ(checkpoint: Checkpoint) -> bool:
    """Whether layers have projections of different sizes, by the header of their file."""
    sizes: dict[str, set[tuple[int, ...]]] = {}
    for name, size in checkpoint.stored_shapes.items():
        if (match := _PROJECTION.search(name)) is not None:
            sizes.setdefault(match[1], set()).add(tuple(size))
    return any(len(found) > 1 for found in sizes.values())


def resolved_config(
    config: RuntimeConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    weight_bytes: int,
    ranks: TensorParallel | None = None,
    model: str = "",
    exact_because: str = "",
) -> tuple[RuntimeConfig, str]:
    """As `with_resolved_policy`, of a model of this shape with so many bytes of weights.

    Args:
        model, exact_because: as `Room` has them.
    """
    auto = config.policy
    if not isinstance(auto, Auto):
        return config, ""
    host_kv_bytes = kv_budget_bytes(config, weight_bytes, loaded=False)
    named = shape if shape.max_context else replace(shape, max_context=sys.maxsize)
    tokens = longest_context(config, named, dtype, host_kv_bytes)
    work = Workload(
        shape,
        auto,
        tokens,
        dtype=dtype,
        page_tokens=config.page_tokens,
        kv_dtype=config.kv_dtype,
    )
    room = _room_of(config, work, weight_bytes, ranks)
    room = replace(room, model=model, exact_because=exact_because or room.exact_because)

    def resolve() -> tuple[Policy, str]:
        policy, reason = resolve_auto(auto, work, room)
        logger.info("auto: %s", reason)
        return policy, reason

    policy, reason = resolve() if ranks is None else ranks.once(resolve)
    every = config.cache_correction_every
    if every is not None and not policy.selects:
        logger.info("cache_correction_every=%d: exact attention has nothing to correct", every)
        every = None
    return replace(config, policy=policy, cache_correction_every=every), reason


def resolve_auto(auto: Auto, work: Workload, room: Room) -> tuple[Policy, str]:
    """What `auto` comes to for sequences as `work` describes them, and why.

    Args:
        work: of the whole model, with the longest context; its policy does not matter.
    """
    if work.shape.latent_dim:
        return (
            Full(),
            "exact: keys and values are latents of all heads, of which no choice was measured",
        )
    if room.on_gpu:
        return _on_gpu(auto, work, room)
    return _on_cpu(auto, work, room)


def resolve_planned(
    auto: Auto,
    model: PlannedModel,
    kv_len: int,
    batch_size: int,
    device: str,
    max_memory: Mapping[int | str, int],
    profile: MachineProfile,
    kv_dtype: str = "auto",
) -> tuple[Policy, str]:
    """The same for a model that is not loaded, on the machine of `profile`.

    Args:
        max_memory, kv_dtype: as in `RuntimeConfig`; without a limit the GPU has all of its memory.
    """
    work = Workload(model.shape, auto, kv_len, batch_size, model.dtype, kv_dtype=kv_dtype)
    limit = None
    if profile.device is not None:
        limit = max_memory.get(torch.device(device).index or 0, profile.device.memory_bytes or None)
    left = None if limit is None else max(0, limit - model.weight_bytes)
    name = "" if model.folder is None else embedded_name(model.folder) or ""
    return resolve_auto(auto, work, Room(device != "cpu", left, profile=profile, model=name))


def told_loss(checkpoint: Checkpoint, config: RuntimeConfig) -> str:
    """What the policy that a user named loses of hard look-ups; "" where that is at most a point,
    was not measured, or only in contexts of more than twice what the model has."""
    policy, context = config.policy, checkpoint.shape.max_context or sys.maxsize
    if not policy.selects or policy.dense_tokens >= context:
        return ""
    where = TRUE_QUERY if config.device == "cpu" else HOT_ROWS
    loss = _loss_of(policy, where, context)
    if loss is None or loss.is_small or loss.context > 2 * context:
        return ""
    model = embedded_name(checkpoint.folder) or ""
    return measured_losses().told(loss, policy.budget_tokens, model)


def _loss_of(policy: Policy, where: str, context: int) -> Loss | None:
    """As `LossTable.find`, of a policy whose other options are the defaults; else None."""
    options = {"budget_tokens": policy.budget_tokens}
    if policy.estimate_clusters:
        options["estimate_clusters"] = policy.estimate_clusters
    try:
        usual = make_policy(policy.name, dense_until=policy.dense_until, **options)
    except ValueError:  # a budget so small that sinks and recent window are others
        return None
    if usual != policy:
        return None
    # Without clusters it loses no less, with more of them no more.
    tried = [options, *(options | {"estimate_clusters": n} for n in _MEASURED_CLUSTERS)]
    found = (measured_losses().find(policy.name, each, where, context) for each in tried)
    return next((loss for loss in found if loss is not None), None)


def _on_gpu(auto: Auto, work: Workload, room: Room) -> tuple[Policy, str]:
    exact = _placed(Full(), work, room, known=False)
    if (exact.places == Place.GPU).all():
        token_bytes = work.kv_format.token_bytes(**work.shape.kv_heads)
        num_bytes = work.batch_size * work.kv_len * token_bytes
        where = "the GPU" if room.num_ranks == 1 else f"{room.num_ranks} GPUs"
        return Full(), f"all of {format_bytes(num_bytes)} of KV on {where}, exact"
    # Those before sketch choose a layer ahead, and do not find what is asked for in decoded text.
    names = ["tidal_decode", "lychee_cluster", "per_head", "sketch"]
    if room.num_ranks > 1:  # tidal_decode selects by all heads of a layer together
        names.insert(2, "lychee_decode")
    policy, loss = _chosen(names, HOT_ROWS, auto, work, room.num_ranks)
    placement = _placed(policy, work, room, known=True) if policy.selects else exact
    count = f"{sum(placement.counts(Place.GPU))} of {placement.places.size} KV heads on "
    count += "the GPU" if room.num_ranks == 1 else "each GPU"
    if not policy.selects:
        return policy, f"{count}, exact"
    num_hot = sum(placement.counts(Place.HOT)) + sum(placement.counts(Place.FOUND))
    count += f", hot rows of {num_hot}" if num_hot else ""
    told = measured_losses().told(loss, auto.budget_tokens, room.model)
    return policy, f"{count}, {policy.name}, budget {auto.budget_tokens:,}; {told}"


def _chosen(
    names: Sequence[str], where: str, auto: Auto, work: Workload, num_ranks: int = 1
) -> tuple[Policy, Loss | None]:
    """A policy that can run the model, and what was measured of it.

    The fastest that is shown to lose at most a point, else the one that keeps most by the point
    estimates, else, where none was measured, the last. Exact attention if none can run it.

    Args:
        names: by speed; not lfps, which does not find what is asked for in decoded text.
        where: HOT_ROWS or TRUE_QUERY.
    """
    made = (_estimating(name, auto) for name in names)
    able = [policy for policy in made if _can_run(policy, work.shape, num_ranks)]
    if not able:
        return Full(), None
    found = ((policy, _loss_of(policy, where, work.kv_len)) for policy in able)
    measured = [(policy, loss) for policy, loss in found if loss is not None]
    if not measured:
        return able[-1], None
    kept = (each for each in measured if each[1].is_small and each[1].shows)
    return next(kept, max(measured, key=lambda each: each[1].points))


def _estimating(name: str, auto: Auto, **options: Any) -> Policy:
    return make_policy(
        name,
        budget_tokens=auto.budget_tokens,
        estimate_clusters=ESTIMATE_CLUSTERS,
        **options,
    )


def _can_run(policy: Policy, shape: ModelShape, num_ranks: int = 1) -> bool:
    try:
        policy.check_model(**shape.heads)
        if num_ranks > 1:
            policy.of_heads(head_ranges(shape.num_kv_heads, num_ranks)[0], **shape.kv_heads)
    except (ValueError, NotImplementedError) as error:
        logger.debug("auto passes over %s: %s", policy.name, error)
        return False
    return True


def _placed(policy: Policy, work: Workload, room: Room, *, known: bool) -> HeadPlacement:
    """Where the heads would be, of ranks those of the first; as when nothing fits if so.

    Args:
        known: by the machine's profile, if there is one; else as many heads as fit.
    """
    shape = work.shape
    if room.num_ranks > 1:
        heads = head_ranges(shape.num_kv_heads, room.num_ranks)[0]
        policy = policy.of_heads(heads, **shape.kv_heads)
        num_qo_heads = len(heads) * shape.group_size
        shape = replace(shape, num_kv_heads=len(heads), num_qo_heads=num_qo_heads)
    work = replace(work, shape=shape, policy=policy)
    device = None if room.profile is None else room.profile.device
    model = None
    if known and device is not None and room.profile is not None:
        model = StepModel(room.profile, work, on_gpu=True)
    try:
        whole = DeviceRoom(work, room.room_bytes, device)
        prefill = next_prompt_bytes(work, room.prefill_slice_tokens)
        return choose_beside_prefill(model, whole, prefill)[0]
    except DeviceMemoryError:
        return least_placement(work)


def _on_cpu(auto: Auto, work: Workload, room: Room) -> tuple[Policy, str]:
    if room.exact_because:
        return Full(), f"exact: {room.exact_because}"
    policy, loss = _chosen_on_cpu(auto, work)
    if not policy.selects:
        return policy, "exact: no other policy takes this model"
    tokens, measured = crossover(policy, work, room.profile)
    budget = auto.budget_tokens
    if work.kv_len <= tokens:
        where = " on this machine" if measured else ""
        return Full(), f"exact: contexts up to {tokens:,} tokens are faster so{where}"
    if tokens != budget:
        policy = _estimating(policy.name, auto, dense_until=tokens)
    told = measured_losses().told(loss, budget, room.model)
    return policy, (
        f"exact up to {tokens:,} tokens, then {policy.name}, budget {budget:,}, the rest estimated "
        f"by {ESTIMATE_CLUSTERS} clusters a head; {told}"
    )


def beyond_crossover(auto: Auto, shape: ModelShape, kv_len: int) -> Policy:
    """What `auto` takes on a CPU in contexts in which exact attention is slower."""
    return _chosen_on_cpu(auto, Workload(shape, auto, kv_len))[0]


def _chosen_on_cpu(auto: Auto, work: Workload) -> tuple[Policy, Loss | None]:
    return _chosen(["lychee_cluster", "sketch"], TRUE_QUERY, auto, work)


def crossover(policy: Policy, work: Workload, profile: MachineProfile | None) -> tuple[int, bool]:
    """The context up to which exact attention is faster on a CPU than a policy, and whether that
    was measured here.

    The profile predicts both where the policy was measured (`offload plan` does that); elsewhere
    CROSSOVER_TOKENS stands for it. At least the budget; `work.kv_len` or more if the policy is
    never faster. What the policy gains grows with the context.
    """
    faster_from = max(CROSSOVER_TOKENS, policy.budget_tokens)
    name = f"{type(policy).__name__}("
    if profile is None or not any(name in key for key in profile.select_scale):
        return faster_from, False
    measured, found = False, max(work.kv_len, faster_from)
    longest = replace(work, policy=policy, kv_len=found)
    states = functools.cache(lambda: _kept_per_token(longest))
    for kv_len in reversed([*_tried_contexts(policy.budget_tokens, found)]):
        faster = _is_faster(replace(longest, kv_len=kv_len), states, profile)
        measured |= faster is not None
        if faster is False:
            break
        if faster or kv_len >= faster_from:
            found = kv_len
    return found, measured


def _tried_contexts(least: int, most: int) -> Iterator[int]:
    """`least`, and powers of two and the halves between them from there to `most`."""
    powers = (1 << bits for bits in itertools.count(least.bit_length() - 1))
    tried = itertools.chain.from_iterable((power, power * 3 // 2) for power in powers)
    more = itertools.takewhile(lambda n: n <= most, tried)
    return itertools.chain([least], (n for n in more if n > least))


def _kept_per_token(work: Workload) -> tuple[float, ...]:
    """Bytes of a KV head; what a policy keeps grows with the context. Building it is slow."""
    states = head_state_bytes(work.policy, work.shape, work.dtype, work.kv_len)
    return tuple(num_bytes / work.kv_len for num_bytes in states)


def _is_faster(
    work: Workload, kept_per_token: Callable[[], tuple[float, ...]], profile: MachineProfile
) -> bool | None:
    """Than exact attention, by the profile; None: the policy was not measured at this length."""
    if policy_key(work.policy, work.shape, work.kv_len) not in profile.select_scale:
        return None
    states = tuple(num_bytes * work.kv_len for num_bytes in kept_per_token())
    places = HeadPlacement.filled(work.shape.num_layers, work.shape.num_kv_heads, Place.CPU)
    works = (replace(work, head_state_bytes=states), replace(work, policy=Full()))
    sparse, exact = (
        StepModel(profile, each, on_gpu=False).step(places).milliseconds for each in works
    )
    return sparse < exact


def _room_of(
    config: RuntimeConfig, work: Workload, weight_bytes: int, ranks: TensorParallel | None
) -> Room:
    device, num_ranks = torch.device(config.device), 1 if ranks is None else ranks.world_size
    room_bytes, exact_because = None, ""
    if device.type == "cuda":
        room_bytes = _device_room_bytes(config, work, weight_bytes, ranks)
    elif config.host_bytes_per_sequence is not None:
        exact_because = "host_bytes_per_sequence keeps most of what is asked for so"
    elif config.backend == "inline" or ranks is not None:  # which take no dense_until
        exact_because = "layers that run one by one on a CPU select from the budget on, too early"
    threads = pool_threads(config, ranks)
    profile = known_profile(device, threads)
    if profile is None and device.type == "cuda":
        profile = typical_profile(threads)
    return Room(
        on_gpu=device.type == "cuda",
        room_bytes=room_bytes,
        prefill_slice_tokens=config.prefill_slice_tokens,
        profile=profile,
        num_ranks=num_ranks,
        exact_because=exact_because,
    )


def _device_room_bytes(
    config: RuntimeConfig, work: Workload, weight_bytes: int, ranks: TensorParallel | None
) -> int:
    """What the GPU will have beside the weights, of ranks the one that has least."""
    if ranks is None:
        room = torch.cuda.mem_get_info(torch.device(config.device))[0] - weight_bytes
        budget = device_kv_budget_bytes(config, weight_bytes)  # as `FreeRoom` counts later
        return max(0, room - SPARE_BYTES if budget is None else min(room, budget))
    # Each has its part of the layers and all of the rest.
    of_layers = layer_elements(work.shape) * work.shape.num_layers * work.item_bytes
    part = weight_bytes - of_layers + -(-of_layers // ranks.world_size)
    room = torch.cuda.mem_get_info(torch.device("cuda", ranks.rank))[0]
    return ranks.least(max(0, min(room, config.max_memory.get(ranks.rank, room)) - part))
