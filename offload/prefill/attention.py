"""Exact attention of many queries at once, with the log-sum-exp, on whatever device they are.

The public scaled_dot_product_attention calls the same functions of torch but does not return the
log-sum-exp, without which two parts of a softmax cannot be merged. `attention_kernel` chooses; they
differ in what they take:

    NATIVE      CPU: our own; fewer KV heads than query heads, the last query is aligned with the
                last key
    CPU         `is_causal` takes as many keys as queries
    EFFICIENT   CUDA, float32: `is_causal` aligns the first query with the first key; the
                log-sum-exp is padded to a multiple of 32 queries
    FLASH       CUDA, bfloat16 and float16 (FlashAttention 2): fewer KV heads than query heads;
                `is_causal` aligns the last query with the last key (torch.nn.attention.bias relies
                on it too), so that one call does for a slice
    CUDNN       the same dtypes on Hopper and datacenter Blackwell, whose tensor cores FLASH leaves
                half idle: fewer KV heads, too; `is_causal` aligns the first query with the first
                key, so that a slice takes a square call for its own keys and calls without a mask
                for those before, whose results are merged

cuDNN makes a plan for each shape and stride that it has not seen yet, which takes it 0.1 to 0.4 s.
So it gets few: power-of-two slices, over pieces of keys that are such a slice times a power of two.
The last slice of a prompt is of any length and goes to FLASH, and so does a small model's whole
prompt, of which FLASH needs less time than cuDNN to plan. A power of two below such slices, behind
many keys, goes to CUDNN for whole pieces of keys and to FLASH for its own and the last (PIECES).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_ops.causal_attention import causal_attention, has_causal_attention
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.merge_parts import merge_parts

KV = tuple[Tensor, Tensor]  # keys, values: each [num_kv_heads, kv_len, head_dim]
# `_grouped` or `_cudnn`: gets queries [num_kv_heads, group_size, n, head_dim], keys and values,
# is_causal and sm_scale, gives (o, lse).
Attend = Callable[[Tensor, KV, bool, float], tuple[Tensor, Tensor]]

NATIVE, CPU, EFFICIENT, FLASH = "native", "cpu", "efficient", "flash"
CUDNN, PIECES = "cudnn", "pieces"
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cuda_flash = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
_cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
_FLASH_HEAD_DIM = 256  # the largest that flash attention takes on CUDA
_FLASH_CAPABILITY = (8, 0)
_CUDNN_HEAD_DIM = 128
_CUDNN_CAPABILITIES = (9, 10)  # majors
_CUDNN_VERSION = 90100
_CUDNN_QUERIES = 2048  # below, a call's overhead is as much as it saves,
_FEW_QUERIES, _MANY_KEYS = 1024, 32768  # unless they are these: 3.4 ms behind 128K, FLASH 6.3
_CUDNN_WIDTH = 1024  # of all heads
# Of one call. A block goes through all keys of its queries, behind 128K of them for 3 ms, and what
# runs beside it (`LayerStream`) waits for some block to end: 1,025 tokens took 508 ms, now 380.
_PIECE_KEYS = 16384
_WINDOW_QUERIES = 512  # whose mask exists at one time


def attend(
    q: Tensor,
    past: KV | None,
    new: KV,
    sm_scale: float,
    pool: WorkerPool | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Exact causal attention of the last n tokens of `new` over `past` and `new`.

    Args:
        q: [num_qo_heads, n, head_dim].
        past, new: K/V of the tokens cached before, and of those that end with the n queries; any
            strides but a unit stride in the last dimension. No `past` where `takes_all_keys`.
        pool: the threads of NATIVE; None leaves a CPU to torch.
        sinks: float32 [num_qo_heads], logits that join each softmax and have no value; or None.

    Returns:
        [n, num_qo_heads, head_dim].
    """
    num_kv_heads, num_new, _ = new[0].shape
    kernel = attention_kernel(q, num_kv_heads, pool, num_new)
    assert past is None or kernel in (CPU, EFFICIENT), "takes_all_keys"
    if kernel == NATIVE:
        assert pool is not None
        return causal_attention(pool, q, *new, sm_scale, sinks=sinks)
    o, lse = attend_with_lse(q, past, new, sm_scale)
    return o if sinks is None else without_sinks(o, lse, sinks)


def attend_in_window(
    q: Tensor,
    kv: KV,
    window: int,
    sm_scale: float,
    pool: WorkerPool | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` where each query sees `window` tokens, itself the last of them.

    Args:
        q: [num_qo_heads, n, head_dim], of the last n tokens of `kv`.
        kv: all the tokens that the first of them sees, and those up to the last.
    """
    keys, values = kv
    n, kv_len = q.shape[1], keys.shape[1]
    if _is_native(q, pool):
        assert pool is not None
        return causal_attention(pool, q, keys, values, sm_scale, window=window, sinks=sinks)
    parts = []
    for start in range(0, n, _WINDOW_QUERIES):
        stop = min(start + _WINDOW_QUERIES, n)
        first, last = max(0, kv_len - n + start - window + 1), kv_len - n + stop
        queries = torch.arange(last - stop + start, last, device=q.device)[:, None]
        positions = torch.arange(first, last, device=q.device)
        seen = (positions <= queries) & (positions > queries - window)
        some, k, v = q[None, :, start:stop], keys[None, :, first:last], values[None, :, first:last]
        if sinks is not None:  # one key more, whose scores are in the mask
            of_tokens = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
            shape = len(q), stop - start
            of_sinks = sinks.to(q.dtype)[:, None, None].expand(*shape, 1)
            seen = torch.cat([of_tokens.expand(*shape, -1), of_sinks], dim=2)[None]
            repeats = len(q) // len(keys)  # kernels of a GPU with a mask take no groups
            k, v = (F.pad(x.repeat_interleave(repeats, 1), (0, 0, 0, 1)) for x in (k, v))
        o = F.scaled_dot_product_attention(
            some, k, v, attn_mask=seen, scale=sm_scale, enable_gqa=sinks is None
        )
        parts.append(o[0].transpose(0, 1))
    return torch.cat(parts)


def without_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`out` [..., num_qo_heads, v_dim] less the share of the softmax that sinks take, where `lse`
    float32 [..., num_qo_heads] is of the tokens alone: exp(lse) / (exp(lse) + exp(sink)) is left.
    """
    return out * torch.sigmoid(lse - sinks.float()).to(out.dtype)[..., None]


def attend_with_lse(q: Tensor, past: KV | None, new: KV, sm_scale: float) -> tuple[Tensor, Tensor]:
    """`attend` without threads of ours; also the log-sum-exp, float32 [n, num_qo_heads]."""
    num_kv_heads, num_new, _ = new[0].shape
    num_before = num_new - q.shape[1]
    kernel = attention_kernel(q, num_kv_heads, None, num_new)
    q = q.reshape(num_kv_heads, -1, *q.shape[1:])  # the group's query heads together
    if kernel in (FLASH, PIECES):
        return _attend_by_flash(q, new, sm_scale, _grouped if kernel == FLASH else _cudnn)
    if kernel == CUDNN:
        return _attend_by_cudnn(q, new, sm_scale)
    o, lse = _causal(q, (new[0][:, num_before:], new[1][:, num_before:]), sm_scale)
    before = (new[0][:, :num_before], new[1][:, :num_before]) if num_before else None
    for part in (before, past):
        if part is not None:
            o, lse = merge_softmax(o, lse, *_unmasked(q, part, sm_scale))
    return o.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1).transpose(0, 1)


def attention_kernel(
    q: Tensor, num_kv_heads: int, pool: WorkerPool | None = None, num_keys: int = 0
) -> str:
    """What attends with queries [num_qo_heads, n, head_dim]: one of the constants above."""
    if not q.is_cuda:
        return NATIVE if _is_native(q, pool) else CPU
    if not aligns_last(q):
        return EFFICIENT
    num_heads, n, head_dim = q.shape
    capability = torch.cuda.get_device_capability(q.device)
    if not suits_cudnn(n, num_heads, head_dim, capability, num_keys):
        return FLASH
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return FLASH
    if not _cudnn_works(q.device, q.dtype, num_heads, num_kv_heads, head_dim):
        return FLASH
    return CUDNN if n >= _CUDNN_QUERIES else PIECES


def suits_cudnn(
    n: int, num_heads: int, head_dim: int, capability: tuple[int, int], num_keys: int = 0
) -> bool:
    """Whether cuDNN is the faster one for n queries: many, and not of a length of their own."""
    is_power_of_two = n & (n - 1) == 0
    return (
        capability[0] in _CUDNN_CAPABILITIES
        and n >= (_FEW_QUERIES if num_keys >= _MANY_KEYS else _CUDNN_QUERIES)
        and is_power_of_two
        and num_heads * head_dim >= _CUDNN_WIDTH
        and head_dim <= _CUDNN_HEAD_DIM
        and head_dim % 8 == 0
    )


@functools.cache
def _cudnn_works(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether this torch's cuDNN takes such heads: its answer to two small calls."""
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is None or version < _CUDNN_VERSION:
        return False
    shape = (num_kv_heads, num_heads // num_kv_heads, 128, head_dim)
    q = torch.zeros(shape, dtype=dtype, device=device)
    rows = q.new_zeros(num_kv_heads, 256, head_dim)
    try:
        _cudnn(q, (q[:, 0], q[:, 0]), True, 1.0)
        _cudnn(q, (rows, rows), False, 1.0)
    except RuntimeError:
        return False
    return True


def begin_cudnn(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """cuDNN's first call in a process takes two seconds, which a long prompt would wait for."""
    q = torch.empty(num_qo_heads, _CUDNN_QUERIES, head_dim, dtype=dtype, device=device)
    attention_kernel(q, num_kv_heads)


def warm_up_attention(
    num_qo_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Launch the kernels of ours that long slices take (`compile_ahead`)."""
    for n in (32, 31):  # a multiple of 16, and a prompt's last slice
        o = torch.empty(n, num_qo_heads, head_dim, dtype=dtype, device=device).transpose(0, 1)
        lse = torch.empty(num_qo_heads, n, device=device)
        if aligns_last(o):
            merge_parts(o.float(), lse, o, lse)


def aligns_last(q: Tensor) -> bool:
    """Whether causal attention takes more keys than queries, the last of each aligned."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= _FLASH_HEAD_DIM
        and torch.cuda.get_device_capability(q.device) >= _FLASH_CAPABILITY
    )


def takes_all_keys(q: Tensor, pool: WorkerPool | None) -> bool:
    """Whether `attend` wants the cached keys and the new ones as one array, without `past`."""
    return aligns_last(q) or _is_native(q, pool)


def _is_native(q: Tensor, pool: WorkerPool | None) -> bool:
    return pool is not None and q.is_cpu and has_causal_attention(q.dtype, q.shape[-1])


def merge_softmax(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial softmaxes over disjoint keys as one: o [..., head_dim], lse [...] (natural)."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - lse).exp()[..., None] for part in (lse_a, lse_b))
    o = (o_a * weight_a).add_(o_b * weight_b)
    return o.to(o_a.dtype), lse


def key_pieces(n: int, num_keys: int) -> list[tuple[int, int]]:
    """(first, last + 1) of keys in pieces of n times a power of two, then what is left."""
    pieces, first = [], 0
    while num_keys - first >= n:
        most = min(num_keys - first, max(n, _PIECE_KEYS)) // n
        last = first + n * (1 << most.bit_length() - 1)
        pieces.append((first, last))
        first = last
    return [*pieces, (first, num_keys)] if first < num_keys else pieces


def _attend_by_flash(q: Tensor, new: KV, sm_scale: float, whole: Attend) -> tuple[Tensor, Tensor]:
    """`attend` of queries [num_kv_heads, group_size, n, head_dim], whole pieces by `whole`."""
    begins = range(0, max(1, new[0].shape[1] - q.shape[2]), _PIECE_KEYS)
    o, lse = _grouped(q, (new[0][:, begins[-1] :], new[1][:, begins[-1] :]), True, sm_scale)
    return _merged(
        (o, lse),
        (
            whole(q, (new[0][:, first:last], new[1][:, first:last]), False, sm_scale)
            for first, last in itertools.pairwise(begins)
        ),
    )


def _attend_by_cudnn(q: Tensor, new: KV, sm_scale: float) -> tuple[Tensor, Tensor]:
    """`attend` of queries [num_kv_heads, group_size, n, head_dim]."""
    n, keys, values = q.shape[2], *new
    num_before = keys.shape[1] - n

    def unmasked(first: int, last: int) -> tuple[Tensor, Tensor]:
        kernel = _cudnn if (last - first) % n == 0 else _grouped
        return kernel(q, (keys[:, first:last], values[:, first:last]), False, sm_scale)

    own = _cudnn(q, (keys[:, num_before:], values[:, num_before:]), True, sm_scale)
    return _merged(own, itertools.starmap(unmasked, key_pieces(n, num_before)))


def _merged(
    own: tuple[Tensor, Tensor], parts: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """[n, num_qo_heads, head_dim] and the log-sum-exp of parts, each o [num_kv_heads, group_size,
    n, head_dim] and lse, in float32 until all are there."""
    o, lse = (x.flatten(0, 1) for x in own)
    whole, lse = o, lse.contiguous()
    for part, part_lse in parts:
        if whole is o:
            whole = o.float()
        merge_parts(whole, lse, part.flatten(0, 1), part_lse.flatten(0, 1).contiguous())
    return whole.to(o.dtype).transpose(0, 1), lse.transpose(0, 1)


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
    """FLASH, which knows that a group of query heads shares a KV head."""
    keys, values = (_as_batch(rows) for rows in kv)
    o, lse, *_ = _cuda_flash(
        _as_batch(q.flatten(0, 1)), keys, values, 0.0, is_causal, False, scale=sm_scale
    )
    # Older versions of torch pad the log-sum-exp to a multiple of 128 queries.
    return o[0].unflatten(0, q.shape[:2]), lse[0, :, : q.shape[2]].unflatten(0, q.shape[:2])


def _cudnn(q: Tensor, kv: KV, is_causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """CUDNN: of as many queries as keys, if causal."""
    if is_causal and q.shape[2] != kv[0].shape[1]:
        raise ValueError(
            f"cuDNN's causal mask needs as many keys as queries, got {kv[0].shape[1]} and "
            f"{q.shape[2]}"
        )
    keys, values = (_as_batch(rows) for rows in kv)
    o, lse, *_ = _cudnn_attention(
        _as_batch(q.flatten(0, 1)), keys, values, None, True, 0.0, is_causal, scale=sm_scale
    )
    return o[0].unflatten(0, q.shape[:2]), lse.reshape(q.shape[:3])


def _as_batch(rows: Tensor) -> Tensor:
    """rows [num_heads, n, head_dim] as a batch of one.

    Its stride depends on nothing else in the buffer that `rows` is part of, if tokens come before
    heads there: cuDNN's plans are for strides, too.
    """
    if rows.stride(0) < rows.stride(1):
        return rows.transpose(0, 1)[None].transpose(1, 2)
    return rows[None]


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, is_causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """[batch, num_heads, n, head_dim] over as many heads: o, and lse [batch, num_heads, n]."""
    if q.is_cuda:
        o, lse, *_ = _cuda_efficient(q, keys, values, None, True, 0.0, is_causal, scale=sm_scale)
        return o.contiguous(), lse[..., : q.shape[2]].contiguous()
    o, lse = _cpu_flash(q, keys, values, 0.0, is_causal, scale=sm_scale)
    return o, lse
