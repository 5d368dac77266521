"""Exact attention of many queries at once, with the log-sum-exp, on whatever device they are.

The public scaled_dot_product_attention calls the same functions of torch but does not return the
log-sum-exp, without which two parts of a softmax cannot be merged. They differ in what they take:

    CPU                        flash; with `is_causal`, as many keys as queries
    CUDA, bfloat16, float16    flash; fewer KV heads than query heads; `is_causal` aligns the last
                               query with the last key (torch.nn.attention.bias relies on it too)
    CUDA, float32              memory-efficient; `is_causal` aligns the first query with the first
                               key; the log-sum-exp is padded to a multiple of 32 queries
"""

from __future__ import annotations

import torch
from torch import Tensor

KV = tuple[Tensor, Tensor]  # keys, values: each [num_kv_heads, kv_len, head_dim]

_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cuda_flash = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
_FLASH_HEAD_DIM = 256  # the largest that flash attention takes on CUDA
_FLASH_CAPABILITY = (8, 0)


def attend(q: Tensor, past: KV | None, new: KV, sm_scale: float) -> Tensor:
    """Exact causal attention of the last n tokens of `new` over `past` and `new`.

    Args:
        q: [num_qo_heads, n, head_dim].
        past, new: K/V of the tokens cached before, and of those that end with the n queries; any
            strides but a unit stride in the last dimension.

    Returns:
        [n, num_qo_heads, head_dim].
    """
    num_kv_heads, num_new, head_dim = new[0].shape
    num_before = num_new - q.shape[1]
    q = q.reshape(num_kv_heads, -1, q.shape[1], head_dim)  # the group's query heads together
    if aligns_last(q):
        o, lse = _causal(q, new, sm_scale)
        parts = [past]
    else:
        o, lse = _causal(q, (new[0][:, num_before:], new[1][:, num_before:]), sm_scale)
        before = (new[0][:, :num_before], new[1][:, :num_before]) if num_before else None
        parts = [before, past]
    for part in parts:
        if part is not None:
            o, lse = merge_state(o, lse, *_unmasked(q, part, sm_scale))
    return o.flatten(0, 1).transpose(0, 1)


def aligns_last(q: Tensor) -> bool:
    """Whether causal attention takes more keys than queries, the last of each aligned."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= _FLASH_HEAD_DIM
        and torch.cuda.get_device_capability(q.device) >= _FLASH_CAPABILITY
    )


def merge_state(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial softmaxes over disjoint keys as one: o [..., head_dim], lse [...] (natural)."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - lse).exp()[..., None] for part in (lse_a, lse_b))
    o = (o_a * weight_a).add_(o_b * weight_b)
    return o.to(o_a.dtype), lse


def _causal(q: Tensor, kv: KV, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Queries [num_kv_heads, group_size, n, head_dim], the last of which sees all keys of `kv`."""
    if aligns_last(q):
        return _grouped(q, kv, True, sm_scale)
    # A KV head is a batch entry whose query heads see the same keys through a stride of zero.
    keys, values = (rows[:, None].expand(-1, q.shape[1], -1, -1) for rows in kv)
    return _attention(q, keys, values, True, sm_scale)


def _unmasked(q: Tensor, kv: KV, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Queries [num_kv_heads, group_size, n, head_dim] over all keys of `kv`."""
    if aligns_last(q):
        return _grouped(q, kv, False, sm_scale)
    # Without a mask the group's query heads are only more queries of the same KV head.
    keys, values = (rows[:, None] for rows in kv)
    o, lse = _attention(q.flatten(1, 2)[:, None], keys, values, False, sm_scale)
    return o.view(q.shape), lse.view(q.shape[:-1])


def _grouped(q: Tensor, kv: KV, is_causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Flash attention on CUDA, which knows that a group of query heads shares a KV head."""
    keys, values = (rows[None] for rows in kv)
    o, lse, *_ = _cuda_flash(
        q.flatten(0, 1)[None], keys, values, 0.0, is_causal, False, scale=sm_scale
    )
    # Older versions of torch pad the log-sum-exp to a multiple of 128 queries.
    return o[0].unflatten(0, q.shape[:2]), lse[0, :, : q.shape[2]].unflatten(0, q.shape[:2])


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, is_causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """[batch, num_heads, n, head_dim] over as many heads: o, and lse [batch, num_heads, n]."""
    if q.is_cuda:
        o, lse, *_ = _cuda_efficient(q, keys, values, None, True, 0.0, is_causal, scale=sm_scale)
        return o.contiguous(), lse[..., : q.shape[2]].contiguous()
    o, lse = _cpu_flash(q, keys, values, 0.0, is_causal, scale=sm_scale)
    return o, lse
