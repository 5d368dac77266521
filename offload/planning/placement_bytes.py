"""Every byte that decoding with a placement takes, of a model that need not be loaded.

What a step allocates its owners declare (`layout`); here is which there are, and their sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from cpu_ops.mailbox import Mailbox
from gpu_ops.layout import Layout, layout_bytes
from offload.decode.gpu.buffers import StepBuffers, num_slots, step_tokens
from offload.decode.gpu.heads import DeviceHeads
from offload.decode.gpu.hot_rows import HotRows, fetch_tokens
from offload.decode.gpu.layer_heads import LayerHeads, layer_heads, requests_of, scores_tokens
from offload.decode.gpu.linear import linear_layout
from offload.decode.gpu.placement import HeadPlacement
from offload.decode.gpu.resident_codes import CodeShape
from offload.decode.gpu.resident_kv import ResidentKV, resident_pages, window_of
from offload.decode.sampling import TokenChooser
from offload.kv.page_pool import DEFAULT_SLAB_BYTES, page_shape, pages_at, pool_bytes
from offload.models.shape import ModelShape
from offload.planning.profile import DeviceProfile
from offload.planning.workload import Workload
from offload.prefill.memory import PrefillMemory
from offload.selection.layer_state import BuildContext
from offload.selection.policy import Policy
from offload.selection.state import capacity_for

# What torch gives cuBLAS for each stream: 32 MiB on Hopper, 8,320 KiB before.
_CUBLAS_BYTES, _CUBLAS_HOPPER_BYTES = 8320 * 2**10, 32 * 2**20
_STATE_LENS = (8192, 24576)  # that a policy's state is built at, to tell it at others


def step_layouts(
    placement: HeadPlacement, work: Workload, *, num_multiprocessors: int = 1
) -> dict[str, Layout]:
    """What `DeviceDecoder` allocates for steps of `work`, by what it is for; on the device all but
    the mailbox.

    Args:
        num_multiprocessors: of the device.
    """
    shape, policy, dtype, kv_format = work.shape, work.policy, work.dtype, work.kv_format
    row_items = kv_format.row_items(shape.head_dim)
    layers = layer_heads(
        placement.places,
        work.selected_roles,
        shares_selection=policy.shares_selection,
        windows=shape.windows,
    )
    slots = num_slots(work.batch_size)
    grows = scores_tokens(layers)
    max_tokens = step_tokens(shape.max_context, work.kv_len, work.page_tokens, grows=grows)
    heads = DeviceHeads.layout(
        shape,
        layers,
        policy,
        num_rows=slots,
        max_tokens=max_tokens,
        kv_format=kv_format,
        num_multiprocessors=num_multiprocessors,
    )
    _, selection_units, selection_tokens = heads["selection"][0]
    codes, tables, lists = _code_layouts(layers, work, num_slots=slots, max_tokens=max_tokens)
    if lists and not all(layer.finds for layer in layers if layer.coded):
        _, selection_units, selection_tokens = lists["selection"][0]
    resident = ResidentKV.layout(
        layers,
        num_slots=slots,
        num_kv_heads=shape.num_kv_heads,
        row_items=row_items,
        window_tokens=sum(window_of(policy)),
        max_pages=max_tokens // work.page_tokens,
        dtype=kv_format.page_dtype,
        num_parts=kv_format.num_parts,
    )
    of_step = {
        "rows": StepBuffers.layout(shape, slots, dtype, num_multiprocessors, kv_format.page_dtype),
        "heads": {name: heads.pop(name) for name in ("partial_out", "partial_lse", "head_lists")},
        "linear": linear_layout(shape, slots, dtype),
        "tokens": TokenChooser.layout(slots, shape.vocab_size),
    }
    return {
        "KV of resident heads": resident_pages(
            layers,
            num_sequences=work.batch_size,
            kv_len=work.kv_len,
            page_tokens=work.page_tokens,
            row_items=row_items,
            dtype=kv_format.page_dtype,
            num_parts=kv_format.num_parts,
        ),
        "codes of keys": codes,
        "windows": {"windows": resident.pop("windows")},
        "page tables": resident | tables,
        "fetched rows": {"rows": heads.pop("rows")},
        "hot rows": HotRows.layout(
            shape,
            layers,
            policy,
            num_slots=slots,
            max_tokens=max_tokens,
            kv_format=kv_format,
            num_multiprocessors=num_multiprocessors,
            estimate_clusters=policy.estimate_clusters if policy.selects else 0,
        ),
        "scores and top-k": heads | {f"candidates: {name}": of for name, of in lists.items()},
        "step buffers": {
            f"{owner}: {name}": declared
            for owner, layout in of_step.items()
            for name, declared in layout.items()
        },
        "mailbox": Mailbox.layout(
            **shape.heads,
            num_requests=len(requests_of(layers, [slice(0, slots)])),
            max_rows=slots,
            dtype=dtype,
            selection_units=selection_units,
            selection_tokens=selection_tokens,
            fetch_tokens=fetch_tokens(policy) if any(layer.hot for layer in layers) else 0,
            rest_clusters=policy.estimate_clusters if policy.selects else 0,
        ),
    }


def _code_layouts(
    layers: Sequence[LayerHeads], work: Workload, *, num_slots: int, max_tokens: int
) -> tuple[Layout, Layout, Layout]:
    """Layouts of heads with codes: pages and means, tables, and the buffers of their lists."""
    if not any(layer.coded for layer in layers):
        return {}, {}, {}
    shape = CodeShape.of(work.policy, work.shape, work.page_tokens)
    if shape is None:
        return {}, {}, {}
    pages = shape.pages_layout(layers, work.pages_per_layer if work.is_sparse else 0)
    slots = shape.slots_layout(layers, num_slots=num_slots, max_tokens=max_tokens)
    tables = {"code_tables": slots.pop("code_tables")}
    lists = shape.lists_layout(layers, num_rows=num_slots, max_tokens=max_tokens)
    return pages | slots, tables, lists


def step_device_bytes(
    placement: HeadPlacement, work: Workload, device: DeviceProfile | None
) -> dict[str, int]:
    """Bytes on the device that decoding takes without weights and prefill, by what they are for.

    Args:
        device: what runs it; None: it is not known which GPU, or it is the CPU.
    """
    num_sms = 1 if device is None else device.num_multiprocessors
    layouts = step_layouts(placement, work, num_multiprocessors=num_sms)
    del layouts["mailbox"]
    counted = {name: layout_bytes(layout) for name, layout in layouts.items()}
    if device is not None:
        is_hopper = device.capability[0] == 9
        counted["step buffers"] += _CUBLAS_HOPPER_BYTES if is_hopper else _CUBLAS_BYTES
    return counted


def store_bytes(work: Workload, slab_bytes: int = DEFAULT_SLAB_BYTES) -> int:
    """Bytes of the host store's slabs with sequences that share nothing."""
    shape = work.shape
    of_page = shape.num_kv_heads, work.page_tokens, work.row_bytes, work.kv_format.num_parts
    page_bytes = math.prod(page_shape(*of_page))
    windows = shape.windows or [0] * shape.num_layers
    num_pages = work.batch_size * pages_at(work.kv_len, work.page_tokens, windows)
    return pool_bytes(num_pages, page_bytes, slab_bytes)


def prefill_bytes(work: Workload, slice_tokens: int, read_tokens: int | None = None) -> int:
    """Peak bytes of a prefill.

    Args:
        read_tokens: of a sequence, behind as many as it may have; None: the whole batch at once.
    """
    num_tokens, past_tokens = work.batch_size * work.kv_len, 0
    if read_tokens is not None:
        num_tokens = min(read_tokens, work.kv_len)
        past_tokens = work.kv_len - num_tokens
    return PrefillMemory.of(
        work.shape,
        num_tokens=num_tokens,
        past_tokens=past_tokens,
        item_bytes=work.item_bytes,
        slice_tokens=slice_tokens,
        page_tokens=work.page_tokens,
        builds_index=work.policy.selects
        and (work.policy.state.has_arrays or work.policy.estimate_clusters > 0),
        copied_heads=work.policy.device.copied_heads(
            work.shape.num_layers, work.shape.num_kv_heads
        ),
    ).total_bytes


def next_prompt_bytes(work: Workload, slice_tokens: int, read_tokens: int | None = None) -> int:
    """`prefill_bytes` of one more prompt, as long as the sequences that decode may be.

    What is kept on the GPU leaves room for it. More than one is read before anything is kept, or
    takes room from what is (`Decoder.give_heads_back`).
    """
    return prefill_bytes(replace(work, batch_size=1), slice_tokens, read_tokens)


def head_state_bytes(
    policy: Policy, shape: ModelShape, dtype: torch.dtype, kv_len: int
) -> tuple[float, ...]:
    """As `Workload` takes them: `policy_state_bytes` of each member, for one KV head."""
    if not policy.selects:
        return ()
    return tuple(
        policy_state_bytes(member, shape, dtype, kv_len) / shape.num_kv_heads
        for member in policy.members
    )


def policy_state_bytes(policy: Policy, shape: ModelShape, dtype: torch.dtype, kv_len: int) -> float:
    """What the policy keeps of one sequence and layer that asks it, at `kv_len` tokens.

    It is built from random keys of two short contexts; what grows, grows with the room for tokens.
    """
    if not policy.selects or not policy.state.has_arrays or kv_len <= policy.dense_tokens:
        return 0.0
    try:
        sizes = _state_bytes(policy, shape, dtype)
    except TypeError:  # an option of a policy of one's own that has no hash
        sizes = _state_bytes.__wrapped__(policy, shape, dtype)
    first, second = (capacity_for(n) for n in _STATE_LENS)
    per_token = (sizes[1] - sizes[0]) / (second - first)
    return float(sizes[0] + per_token * (capacity_for(kv_len) - first))


@functools.lru_cache(maxsize=64)
def _state_bytes(policy: Policy, shape: ModelShape, dtype: torch.dtype) -> list[int]:
    """Bytes of the policy's state for one sequence and layer, at each of _STATE_LENS."""
    from cpu_ops.worker_pool import WorkerPool

    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_heads, num_tokens, shape.head_dim, generator=generator).to(dtype)

    sizes = []
    with closing(WorkerPool(1)) as pool:
        for num_tokens in _STATE_LENS:
            context = BuildContext(
                layer_idx=shape.num_layers - 1,
                keys=random(shape.num_kv_heads, num_tokens),
                values=random(shape.num_kv_heads, num_tokens),
                queries=random(shape.num_qo_heads, max(1, policy.state.observed_queries)),
                sm_scale=shape.head_dim**-0.5,
                capacity_tokens=capacity_for(num_tokens),
                text_marks=None,
                pool=pool,
                num_layers=shape.num_layers,
            )
            sizes.append(sum(array.nbytes for array in policy.state.build(context).values()))
    return sizes
