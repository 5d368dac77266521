"""What a model will take and how fast it will decode, before anything is loaded.

`make_plan` places the heads, counts every byte on both sides, refuses what cannot fit, and predicts
a decode step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu_ops.layout import layout_bytes
from offload.decode.gpu.placement import HeadPlacement, Place, check_dense_until
from offload.kv.format import KVFormat
from offload.kv.page_pool import page_shape
from offload.loading.planned_model import PlannedModel
from offload.planning.choose import DeviceRoom, choose_beside_prefill
from offload.planning.placement_bytes import (
    head_state_bytes,
    next_prompt_bytes,
    prefill_bytes,
    step_device_bytes,
    step_layouts,
    store_bytes,
)
from offload.planning.prefill_time import PrefillTime, prefill_time
from offload.planning.profile import MachineProfile
from offload.planning.step_time import StepModel, StepTime
from offload.planning.workload import Workload
from offload.selection.policy import Policy
from offload.system.errors import DeviceMemoryError, HostBudgetError
from offload.system.memory import HostMemory, format_bytes, host_memory
from offload.system.slow_here import slow_here


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        context: tokens of each sequence at its end.
        prompt_tokens: of each sequence's prompt, for the time to the first token; None: the
            context.
        max_memory: bytes by device index or "cpu", as in `RuntimeConfig`.
        on_this_machine: memory that is not named is what this machine has left; a plan that needs
            more on the host says so.
        placement: a given one; None: the best is chosen.
        kv_dtype: of keys and values, as in `RuntimeConfig`.
    """

    model: PlannedModel
    policy: Policy
    context: int
    batch_size: int
    device: str
    max_memory: Mapping[int | str, int]
    page_tokens: int = 256
    prefill_slice_tokens: int = 8192
    on_this_machine: bool = True
    placement: HeadPlacement | None = None
    prompt_tokens: int | None = None
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        self.model.check_context(self.context)
        if self.prompt_tokens is not None and not 1 <= self.prompt_tokens <= self.context:
            raise ValueError(
                f"prompt_tokens must be from 1 to the context's {self.context:,}, got "
                f"{self.prompt_tokens:,}; raise --context or lower --prompt-tokens"
            )
        known = {"cpu", self.device_index} if self.on_gpu else {"cpu"}
        for key in self.max_memory:
            if key not in known:
                named = ", ".join(sorted(map(repr, known)))
                raise ValueError(
                    f"max_memory names {key!r}, but device is {self.device!r}; it may name {named}"
                )
        self.policy.check_model(**self.model.shape.heads)
        KVFormat.of(self.kv_dtype, self.model.dtype, [self.model.shape.head_dim])
        if self.on_gpu:
            check_dense_until(self.policy)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def device_index(self) -> int:
        return torch.device(self.device).index or 0


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found.

    Attributes:
        device_bytes, host_bytes: by what they are for.
        device_limit_bytes, host_limit_bytes: of all of them; None: none was named.
        host_memory: where the host's limit comes from it.
        prefill: of the prompts; None: not measured for such a model.
        notes: what a user should know in addition to the numbers.
    """

    request: PlanRequest
    profile: MachineProfile
    placement: HeadPlacement
    device_bytes: dict[str, int]
    device_limit_bytes: int | None
    host_bytes: dict[str, int]
    host_limit_bytes: int | None
    host_memory: HostMemory | None
    step: StepTime
    prefill: PrefillTime | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; `HeadPlacement.load` takes them, too."""
        request, model = self.request, self.request.model
        return {
            "model": model.name,
            "model_type": model.model_type,
            "dtype": model.dtype_name,
            "weights": model.weights,
            "kv_dtype": request.kv_dtype,
            "policy": request.policy.name,
            "max_tokens": request.policy.budget_tokens if request.policy.selects else None,
            "context": request.context,
            "batch_size": request.batch_size,
            "device": request.device,
            "num_threads": self.profile.num_threads,
            "machine": self.profile.key,
            "placement": self.placement.as_json(),
            "device_bytes": self.device_bytes,
            "device_total_bytes": sum(self.device_bytes.values()),
            "device_limit_bytes": self.device_limit_bytes,
            "host_bytes": self.host_bytes,
            "host_total_bytes": sum(self.host_bytes.values()),
            "host_limit_bytes": self.host_limit_bytes,
            "host_memory": None if self.host_memory is None else self.host_memory.explained(),
            "milliseconds_per_step": self.step.milliseconds,
            "tokens_per_second": self.step.tokens_per_second,
            "first_token_seconds": None if self.prefill is None else self.prefill.as_json(),
            "microseconds": {
                "layers": self.step.breakdown(),
                "last": self.step.last,
                "fixed": self.step.fixed,
            },
            "assumed": list(self.step.assumed),
            "notes": list(self.notes),
        }


def make_plan(request: PlanRequest, profile: MachineProfile) -> Plan:
    """Place the heads, count the bytes, predict a step.

    Raises:
        DeviceMemoryError, HostBudgetError: it cannot fit; names both numbers and the options.
        ValueError: no GPU in the profile, or a placement that is not for this model and policy.
    """
    model, shape = request.model, request.model.shape
    work = Workload(
        shape=shape,
        policy=request.policy,
        kv_len=request.context,
        batch_size=request.batch_size,
        dtype=model.dtype,
        page_tokens=request.page_tokens,
        head_state_bytes=head_state_bytes(request.policy, shape, model.dtype, request.context),
        weight_share=model.weight_share,
        kv_dtype=request.kv_dtype,
    )
    step_model = StepModel(profile, work, on_gpu=request.on_gpu)
    limit: int | None = None
    device_bytes: dict[str, int] = {}
    notes: list[str] = []
    if request.on_gpu and profile.device is not None:
        limit = request.max_memory.get(request.device_index, profile.device.memory_bytes or None)
        slice_tokens = request.prefill_slice_tokens
        _check_prefill(request, prefill_bytes(work, slice_tokens), limit)
        prefill = next_prompt_bytes(work, slice_tokens)
        left = None if limit is None else limit - model.weight_bytes - model.copied_bytes
        room = DeviceRoom(work, left, profile.device)
        if request.placement is not None:
            placement = _given(request, room, limit)
        else:
            placement, notes = _chosen(step_model, room, prefill)
        device_bytes = {"weights": model.weight_bytes}
        if model.copied_bytes:
            device_bytes["copies of experts"] = model.copied_bytes
        device_bytes |= step_device_bytes(placement, work, profile.device)
        device_bytes["prefill, at its peak"] = prefill
    else:
        placement = HeadPlacement.filled(shape.num_layers, shape.num_kv_heads, Place.CPU)
        if request.placement is not None and request.placement != placement:
            raise ValueError(
                "a placement with heads on the GPU needs a GPU, but the device is 'cpu'"
            )
    memory = None if "cpu" in request.max_memory or not request.on_this_machine else host_memory()
    step = step_model.step(placement)
    prompt = replace(work, kv_len=request.prompt_tokens or request.context)
    if model.host_bytes:
        notes.append("the step's time is predicted as if the GPU had all experts")
    notes += slow_here(model.dtype, on_cpu=not request.on_gpu) if request.on_this_machine else []
    host_bytes, host_limit = _host(request, work, placement, memory, notes)
    return Plan(
        request=request,
        profile=profile,
        placement=placement,
        device_bytes=device_bytes,
        device_limit_bytes=limit,
        host_bytes=host_bytes,
        host_limit_bytes=host_limit,
        host_memory=memory,
        step=step,
        prefill=prefill_time(profile, prompt, step.last, on_gpu=request.on_gpu),
        notes=tuple(notes),
    )


def _check_prefill(request: PlanRequest, prefill: int, limit: int | None) -> None:
    """Refuse what does not fit whatever the placement is: weights, and prefill with them."""
    weights = request.model.weight_bytes + request.model.copied_bytes
    where = f"max_memory[{request.device_index}]"
    if limit is None or weights + prefill <= limit:
        return
    if weights > limit:
        raise DeviceMemoryError(
            f"the weights need {format_bytes(weights)}, but {where} is {format_bytes(limit)}; "
            "raise it, or choose a smaller dtype or model"
        )
    raise DeviceMemoryError(
        f"prefill of {request.batch_size} x {request.context:,} tokens needs "
        f"{format_bytes(prefill)} beside weights of {format_bytes(weights)}, but {where} is "
        f"{format_bytes(limit)}; raise it, lower prefill_slice_tokens, the batch size or the "
        "context"
    )


def _chosen(model: StepModel, room: DeviceRoom, prefill: int) -> tuple[HeadPlacement, list[str]]:
    """The best placement, and what there is to say about it."""
    placement, used = choose_beside_prefill(model, room, prefill)
    if used != room or room.budget_bytes is None:
        return placement, []
    return placement, [
        "a second prompt of this length does not fit beside what decoding the first keeps on "
        f"the GPU: prefill takes {format_bytes(prefill)} at its peak"
    ]


def _given(request: PlanRequest, room: DeviceRoom, limit: int | None) -> HeadPlacement:
    """The placement of the request, if it fits."""
    placement, shape = request.placement, request.model.shape
    assert placement is not None
    placement.check_model(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads)
    placement.check_policy(request.policy, shape.num_qo_heads, shape.windows)
    heads = sum(placement.counts(Place.GPU))
    if room.holds(placement):
        return placement
    row_bytes = KVFormat.of(request.kv_dtype, request.model.dtype).row_bytes(shape.head_dim)
    of_pages = heads * math.prod(page_shape(1, request.page_tokens, row_bytes))
    budget = room.budget_bytes or 0
    smallest = (
        f"; not even one page of {request.page_tokens} tokens of each of its {heads} heads, "
        f"{format_bytes(of_pages)}, fits"
        if of_pages > budget
        else ""
    )
    raise DeviceMemoryError(
        f"the placement with {heads} KV heads on the GPU needs "
        f"{format_bytes(room.num_bytes(placement))} beside the weights, but {format_bytes(budget)} "
        f"are left of max_memory[{request.device_index}] = {format_bytes(limit or 0)}{smallest}; "
        "raise it, place fewer heads there, lower the batch size or the context"
    )


def _host(
    request: PlanRequest,
    work: Workload,
    placement: HeadPlacement,
    memory: HostMemory | None,
    notes: list[str],
) -> tuple[dict[str, int], int | None]:
    """Bytes of host memory, and their limit. A note tells what this machine has too little for.

    Raises:
        HostBudgetError: they do not fit the limit that the request names.
    """
    weights = request.model.weight_bytes
    counted = {
        "KV cache": store_bytes(work),
        "kept by the policy": round(work.kept_bytes * request.batch_size),
    }
    budgeted, program = counted["KV cache"], 0
    if request.on_gpu:
        if request.model.host_bytes:
            counted = {"experts": request.model.host_bytes, **counted}
            budgeted += request.model.host_bytes
        counted["mailbox"] = layout_bytes(step_layouts(placement, work)["mailbox"])
    else:
        counted = {"weights": weights, **counted}
        budgeted += weights
    limit = named = request.max_memory.get("cpu")
    if memory is not None:
        limit, program = memory.usable_bytes, memory.program_bytes
        counted["the program itself"] = program
        budgeted += program
    if limit is None or budgeted <= limit:
        return counted, limit
    what = "the KV cache" if request.on_gpu else "weights and KV cache"
    what += ", and the program itself," if program else ""
    need = (
        f"{what} of {request.batch_size} x {request.context:,} tokens need "
        f"{format_bytes(budgeted)} of host memory, but"
    )
    if named is not None:
        half = "" if work.kv_format.is_int8 else "give --kv-dtype int8, "
        raise HostBudgetError(
            f"{need} max_memory['cpu'] is {format_bytes(limit)}; raise max_memory={{'cpu': ...}}, "
            f"{half}lower the batch size or the context"
        )
    longest = _longest_context(work, limit - program - (0 if request.on_gpu else weights))
    fits = f"at most {longest:,} tokens fit" if longest else "no context fits"
    notes.append(f"{need} this process may use {format_bytes(limit)}: {fits}")
    return counted, limit


def _longest_context(work: Workload, num_bytes: int) -> int:
    """Tokens of each sequence whose KV cache fits in so many bytes of host memory."""
    lengths = range(work.kv_len + 1)
    fitting = bisect_right(
        lengths, num_bytes, lo=1, key=lambda kv_len: store_bytes(replace(work, kv_len=kv_len))
    )
    return fitting - 1
