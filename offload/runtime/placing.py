"""The placement that a model gets when it is loaded and nobody gave one.

Loading must not wait for a measurement. Where `offload plan` has measured this machine before, its
profile decides; else retrieving heads go to the GPU while they fit, and everything else stays where
it was.
"""

from __future__ import annotations

import logging

import torch

from offload.decode.gpu.placement import HeadPlacement
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.shape import ModelShape
from offload.planning.choose import DeviceRoom, choose_placement, least_placement
from offload.planning.placement_bytes import step_device_bytes
from offload.planning.profile import MachineProfile
from offload.planning.profile_cache import cached_profile
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload
from offload.prefill.memory import PrefillMemory
from offload.ranks.shares import head_ranges
from offload.runtime.config import RuntimeConfig
from offload.system.errors import DeviceMemoryError
from offload.system.memory import available_cpus

logger = logging.getLogger(__name__)


def placement_for(
    config: RuntimeConfig, lean: LeanModel, store: KVStore, weight_bytes: int
) -> HeadPlacement | None:
    """Where the heads of a model that is being loaded are attended.

    A given placement is checked and returned. Otherwise one is made for a sequence as long as the
    model and the host's budget allow: for several sequences, `offload plan --batch` makes it.

    Returns:
        None: dense layers on the GPU and everything else on the CPU, or there is no GPU.

    Raises:
        ValueError: a placement for another model or policy.
    """
    shape = lean.shape
    if config.placement is not None:
        placement = config.placement
        if lean.ranks is not None:  # it is of the whole model's heads
            ranges = head_ranges(placement.num_kv_heads, lean.ranks.world_size)
            placement = placement.of_heads(ranges[lean.ranks.rank])
        placement.check_model(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads)
        placement.check_policy(config.policy, shape.num_qo_heads)
        return placement
    device = torch.device(config.device)
    if device.type != "cuda" or not config.policy.selects:
        return None
    room_bytes = _room_bytes(config, device, weight_bytes)
    profile = _known_profile(device, num_threads_of(config, device))
    return choose_automatically(config, shape, store, room_bytes, profile)


def choose_automatically(
    config: RuntimeConfig,
    shape: ModelShape,
    store: KVStore,
    room_bytes: int,
    profile: MachineProfile | None,
) -> HeadPlacement | None:
    """The best that is known for a GPU with `room_bytes` beside the weights; None: as without one.

    Args:
        profile: of this machine; None: it was never measured.
    """
    item, policy = store.dtype.itemsize, config.policy
    token_bytes = store.page_bytes * shape.num_layers // store.page_tokens
    tokens = min(shape.max_context, max(store.page_tokens, store.host_budget_bytes // token_bytes))
    work = Workload(shape=shape, policy=policy, kv_len=tokens, item_bytes=item)
    device = None if profile is None else profile.device
    prefill = PrefillMemory.of(
        shape,
        num_tokens=tokens,
        item_bytes=item,
        slice_tokens=config.prefill_slice_tokens,
        page_tokens=store.page_tokens,
        builds_index=policy.selects and policy.has_state(),
    ).total_bytes

    def num_bytes(placement: HeadPlacement) -> int:
        counted = step_device_bytes(
            placement,
            shape,
            policy,
            kv_len=tokens,
            batch_size=1,
            page_tokens=store.page_tokens,
            dtype=store.dtype,
            device=device,
        )
        return sum(counted.values())

    room = DeviceRoom(room_bytes - prefill, num_bytes, store.page_tokens)
    model = None
    if profile is not None and device is not None:
        model = StepModel(profile, work, on_gpu=True)
    least = least_placement(work)
    try:
        chosen = choose_placement(model, work, room)
    except DeviceMemoryError:  # perhaps contexts stay short: growing says so when it does not fit
        chosen = least
    if chosen == least:
        return None
    how = "by this machine's profile" if model is not None else "by what fits"
    hint = "" if model is not None else "; `offload plan` measures this machine and does better"
    logger.info("KV heads are placed %s%s:\n%s", how, hint, chosen.text())
    return chosen


def num_threads_of(config: RuntimeConfig, device: torch.device) -> int:
    """Of the worker pool; with a GPU the driver and Python need a CPU, too."""
    if config.num_threads is not None:
        return config.num_threads
    return max(1, available_cpus() - (device.type == "cuda"))


def _room_bytes(config: RuntimeConfig, device: torch.device, weight_bytes: int) -> int:
    """What is left on the GPU beside the weights, which are there already."""
    free, _ = torch.cuda.mem_get_info(device)
    limit = config.max_memory.get(device.index or 0)
    return int(free) if limit is None else min(int(free), limit - weight_bytes)


def _known_profile(device: torch.device, num_threads: int) -> MachineProfile | None:
    try:
        return cached_profile(device, num_threads)
    except (OSError, ValueError) as error:  # a damaged file is no reason not to load a model
        logger.warning("%s", error)
        return None
