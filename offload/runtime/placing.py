"""The placement that a model gets when it is loaded and nobody gave one.

Loading must not wait for a measurement. Where `offload plan` has measured this machine before, its
profile decides; else retrieving heads go to the GPU while they fit, and everything else stays where
it was.
"""

from __future__ import annotations

import logging

import torch

from offload.decode.gpu.placement import HeadPlacement
from offload.models import LeanModel
from offload.models.shape import ModelShape
from offload.planning.choose import DeviceRoom, choose_placement, least_placement
from offload.planning.placement_bytes import prefill_bytes
from offload.planning.profile import MachineProfile, cached_profile
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload
from offload.ranks.shares import head_ranges
from offload.runtime.config import RuntimeConfig
from offload.system.errors import DeviceMemoryError

logger = logging.getLogger(__name__)


def placement_for(
    config: RuntimeConfig,
    lean: LeanModel,
    *,
    dtype: torch.dtype,
    host_kv_bytes: int,
    device_kv_bytes: int | None,
    num_threads: int,
) -> HeadPlacement | None:
    """Where the heads of a model that is on its device are attended.

    A given placement is returned, of ranks the part of it. Otherwise one is made for a sequence as
    long as the model and the host's budget allow: for several, `offload plan --batch` makes it.

    Args:
        host_kv_bytes, device_kv_bytes: for the KV cache; None: as much as the GPU has.
        num_threads: of the worker pool.

    Returns:
        None: dense layers on the GPU and everything else on the CPU, or there is no GPU.
    """
    if config.placement is not None:
        placement = config.placement
        if lean.ranks is not None:  # it is of the whole model's heads
            ranges = head_ranges(placement.num_kv_heads, lean.ranks.world_size)
            placement = placement.of_heads(ranges[lean.ranks.rank])
        return placement
    device = torch.device(config.device)
    if device.type != "cuda" or not config.policy.selects:
        return None
    room_bytes = int(torch.cuda.mem_get_info(device)[0])
    if device_kv_bytes is not None:
        room_bytes = min(room_bytes, device_kv_bytes)
    return choose_automatically(
        config,
        lean.shape,
        dtype=dtype,
        host_kv_bytes=host_kv_bytes,
        room_bytes=room_bytes,
        profile=_known_profile(device, num_threads),
    )


def choose_automatically(
    config: RuntimeConfig,
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    host_kv_bytes: int,
    room_bytes: int,
    profile: MachineProfile | None,
) -> HeadPlacement | None:
    """The best that is known for a GPU with `room_bytes` beside the weights; None: as without one.

    Args:
        profile: of this machine; None: it was never measured.
    """
    token_bytes = shape.kv_token_bytes * dtype.itemsize // 2
    of_sequence = host_kv_bytes
    if config.host_bytes_per_sequence is not None:
        of_sequence = min(of_sequence, config.host_bytes_per_sequence)
    tokens = min(shape.max_context, max(config.page_tokens, of_sequence // token_bytes))
    work = Workload(shape, config.policy, tokens, dtype=dtype, page_tokens=config.page_tokens)
    prefill = prefill_bytes(work, config.prefill_slice_tokens)
    device = None if profile is None else profile.device
    room = DeviceRoom(work, room_bytes - prefill, device)
    model = None
    if profile is not None and device is not None:
        model = StepModel(profile, work, on_gpu=True)
    least = least_placement(work)
    try:
        chosen = choose_placement(model, room)
    except DeviceMemoryError:  # perhaps contexts stay short: growing says so when it does not fit
        chosen = least
    if chosen == least:
        return None
    how = "by this machine's profile" if model is not None else "by what fits"
    hint = "" if model is not None else "; `offload plan` measures this machine and does better"
    logger.info("KV heads are placed %s%s:\n%s", how, hint, chosen.text())
    return chosen


def _known_profile(device: torch.device, num_threads: int) -> MachineProfile | None:
    try:
        return cached_profile(device, num_threads)
    except (OSError, ValueError) as error:  # a damaged file is no reason not to load a model
        logger.warning("%s", error)
        return None
