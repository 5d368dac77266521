"""Every byte that decoding with a placement takes, of a model that need not be loaded.

`step_bytes` has the arithmetic of each allocation; here is which there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from offload.decode.gpu.placement import HeadPlacement, Place, kv_head_roles
from offload.models.shape import ModelShape
from offload.planning.buffer_bytes import (
    cublas_bytes,
    gather_bytes,
    most,
    num_slots,
    page_table_bytes,
    partial_bytes,
    resident_bytes,
    retrieval_bytes,
    step_buffer_bytes,
    window_bytes,
)
from offload.planning.profile import DeviceProfile
from offload.policies.base import RETRIEVE, BuildContext, Policy
from offload.policies.state import capacity_for

# What the GPU keeps of policies that name no window (`device_decode`).
_SINK_TOKENS, _RECENT_TOKENS = 4, 64
_STATE_LENS = (8192, 24576)  # that a policy's state is built at, to tell it at others


def step_device_bytes(
    placement: HeadPlacement,
    shape: ModelShape,
    policy: Policy,
    *,
    kv_len: int,
    batch_size: int,
    page_tokens: int,
    item_bytes: int,
    device: DeviceProfile | None,
) -> dict[str, int]:
    """Of the decode step on the GPU beside the weights: what `DeviceDecoder` takes.

    Args:
        device: None: its number of multiprocessors and its cuBLAS are not known, and not counted.
    """
    item, slots = item_bytes, num_slots(batch_size)
    resident = placement.counts(Place.GPU)
    gathered = placement.counts(Place.GATHER)
    on_cpu = placement.counts(Place.CPU)
    sinks, recent = window_of(policy)
    publishing = publishing_heads(placement, policy, shape.num_qo_heads)
    group_size = shape.num_qo_heads // shape.num_kv_heads
    num_sms = 1 if device is None else device.num_multiprocessors
    apart = [
        heads if fetched or others or published else 0
        for heads, fetched, others, published in zip(
            resident, gathered, on_cpu, publishing, strict=True
        )
    ]
    tables = sum(map(bool, resident)) + sum(map(bool, gathered))
    budget = policy.budget_tokens if policy.selects else 0
    buffers = step_buffer_bytes(
        shape, slots=slots, item_bytes=item, num_splits=_num_splits(shape.num_kv_heads, num_sms)
    )
    buffers += partial_bytes(
        apart,
        slots=slots,
        group_size=group_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_multiprocessors=num_sms,
    )
    return {
        "KV of resident heads": resident_bytes(
            resident,
            kv_len=kv_len,
            batch_size=batch_size,
            page_tokens=page_tokens,
            head_dim=shape.head_dim,
            item_bytes=item,
        ),
        "windows": window_bytes(
            sum(map(bool, np.add(gathered, on_cpu))),
            slots=slots,
            num_kv_heads=shape.num_kv_heads,
            window_tokens=sinks + recent,
            head_dim=shape.head_dim,
            item_bytes=item,
        ),
        "page tables": page_table_bytes(
            tables, slots=slots, max_context=shape.max_context, page_tokens=page_tokens
        ),
        "fetched rows": gather_bytes(
            most(gathered),
            slots=slots,
            chosen_tokens=max(0, budget - sinks - recent),
            head_dim=shape.head_dim,
            item_bytes=item,
        ),
        "scores and top-k": retrieval_bytes(
            most(publishing),
            slots=slots,
            group_size=group_size,
            kv_len=kv_len,
            max_context=shape.max_context,
            budget_tokens=budget,
            shared=policy.shares_selection,
            num_kv_heads=shape.num_kv_heads,
        ),
        "step buffers": buffers + (0 if device is None else cublas_bytes(device.capability)),
    }


def window_of(policy: Policy) -> tuple[int, int]:
    """Sink tokens and recent tokens that the GPU keeps of a head."""
    if policy.selects:
        return policy.sink_tokens, policy.recent_tokens
    return _SINK_TOKENS, _RECENT_TOKENS


def policy_state_bytes(policy: Policy, shape: ModelShape, dtype: torch.dtype, kv_len: int) -> float:
    """What the policy keeps of one sequence and layer that asks it, at `kv_len` tokens.

    It is built from random keys of two short contexts; what grows, grows with the room for tokens.
    """
    inner: Any = getattr(policy, "inner", policy)
    if not policy.selects or not policy.has_state() or kv_len <= policy.budget_tokens:
        return 0.0
    from cpu_ops.worker_pool import WorkerPool

    generator = torch.Generator().manual_seed(0)
    sizes = []
    pool = WorkerPool(1)
    try:
        for num_tokens in _STATE_LENS:

            def random(heads: int, n: int, generator: torch.Generator = generator) -> torch.Tensor:
                made = torch.randn(heads, n, shape.head_dim, generator=generator)
                return made.to(dtype)

            context = BuildContext(
                layer_idx=shape.num_layers - 1,
                keys=random(shape.num_kv_heads, num_tokens),
                values=random(shape.num_kv_heads, num_tokens),
                queries=random(shape.num_qo_heads, max(1, inner.observed_queries)),
                sm_scale=shape.head_dim**-0.5,
                capacity_tokens=capacity_for(num_tokens),
                text_marks=None,
                pool=pool,
            )
            sizes.append(sum(array.nbytes for array in inner.build(context)))
    finally:
        pool.close()
    first, second = (capacity_for(n) for n in _STATE_LENS)
    per_token = (sizes[1] - sizes[0]) / (second - first)
    return float(sizes[0] + per_token * (capacity_for(kv_len) - first))


def publishing_heads(placement: HeadPlacement, policy: Policy, num_qo_heads: int) -> list[int]:
    """Of each layer: KV heads on the GPU whose selection others reuse."""
    roles = kv_head_roles(policy, placement.num_layers, num_qo_heads, placement.num_kv_heads)
    if roles is None:
        return [0] * placement.num_layers
    return [int(n) for n in ((placement.places == Place.GPU) & (roles == RETRIEVE)).sum(1)]


def _num_splits(num_kv_heads: int, num_multiprocessors: int) -> int:
    from gpu_ops.paged_attention import num_kv_splits

    return num_kv_splits(num_kv_heads, num_multiprocessors)
