"""The tokens whose keys' codes score most: for heads whose keys themselves have no room on the GPU.

A code is of 1 or 2 bits a dimension, made and scaled as offload/policies/sketch/codes.py says.
Three launches:

1. Of each query head its rotated query in steps of 1/127 of its largest element.
2. Of every token the largest score over the group, and how many scores there are of each size.
   Tensor cores multiply bytes: the levels of 2 bits are as 3 to 10 but for 0.08 %, and that of all
   codes of 8 bits are added up exactly. The CPU's rounding is coarser (cpp/kernels/codes-inl.h).
3. The lists.

What is no number counts as infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_ops.checks import check_dims, check_dtype, check_head_dim, check_page_tokens, check_tensor
from gpu_ops.code_scores import (
    PEAK,
    CodeLaunch,
    CodeQuery,
    code_blocks,
    code_page_bytes,
    code_query_kernel,
    score_codes_kernel,
)
from gpu_ops.cpu_pages import page_at
from gpu_ops.early_launch import can_launch_early, early_option
from gpu_ops.launch import compiles, next_power_of_2, pointer, runs_kernel
from gpu_ops.score_bins import BINS, counting
from gpu_ops.score_select import select_scored_kernel
from gpu_ops.top_k_candidates import SCORE_ALIGNMENT, TopKBuffers
from gpu_ops.top_k_lists import TopKLists


def top_k_codes(
    query: Tensor,
    rotation: Tensor,
    means: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    *,
    group_size: int,
    bits: int,
    page_tokens: int,
    sm_scale: float,
    level: float,
    scratch: CodeQuery,
    buffers: TopKBuffers,
    lists: TopKLists,
    launch: CodeLaunch | None = None,
) -> None:
    """List the tokens whose codes score most of all, for some KV heads.

    A token's importance is the largest score over the group: scale * query . levels + query . mean,
    times sm_scale; all less the largest query . mean. Its last bit does not count.

    Args:
        query: [n, num_qo_heads * head_dim], all of the model's query heads, rotary embedding done.
        rotation: float32 [head_dim, head_dim]; a key's code is of (key - mean) @ rotation.
        means: float32 [n, H, head_dim] of the rows' heads.
        page_table: int64 [n, max_pages], addresses of pages of `code_page_bytes`, aligned to 16
            bytes. Index i of a page is KV head heads[i].
        positions: int64 [n], each row's last token; -1 for an inactive row. Of rows of more tokens
            than a list has, all before the recent ones have codes; others need no pages.
        heads: int32 [H], ascending KV heads, on the device, whose existence is not checked.
        page_tokens: a power of two.
        level: the outermost one of a code.
        scratch: for n rows and these heads.
        buffers: for n * H lists of all pages' tokens.
        lists: one for each head; a count is -1 for NaN or infinity in a query or among the scores
            to choose from.
        launch: how codes are scored; None: as is guessed to suit a Hopper GPU.
    """
    check_dtype("query", query)
    check_dims("means", means, "[n, H, head_dim]")
    n, num_heads, head_dim = means.shape
    num_qo_heads, device = query.shape[-1] // head_dim, query.device
    check_head_dim(head_dim)
    check_page_tokens(page_tokens)
    if bits not in PEAK:
        raise ValueError(f"bits must be 1 or 2, got {bits}")
    if group_size < 1 or num_qo_heads % group_size or num_heads > num_qo_heads // group_size:
        raise ValueError(
            f"query must have the heads of at least {num_heads} groups of {group_size},"
            f" got {num_qo_heads}"
        )
    max_pages = page_table.shape[-1]
    max_tokens = -(-max_pages * page_tokens // SCORE_ALIGNMENT) * SCORE_ALIGNMENT
    check_tensor("query", query, (n, num_qo_heads * head_dim), query.dtype, device)
    check_tensor("rotation", rotation, (head_dim, head_dim), torch.float32, device)
    check_tensor("means", means, means.shape, torch.float32, device)
    check_tensor("page_table", page_table, (n, max_pages), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    layout = CodeQuery.layout(n, num_heads, num_qo_heads, group_size, head_dim, bits)
    for name, (shape, dtype) in layout.items():
        check_tensor(f"scratch.{name}", getattr(scratch, name)[:n], shape, dtype, device)
    lists.check(n, num_heads, num_qo_heads // group_size, max_tokens, buffers, device)
    if lists.top_p is not None or lists.threshold is not None:
        raise ValueError("top_p and threshold are of attention weights, which codes do not give")
    operands = (query, rotation, means, page_table, positions, heads)
    unit = level / PEAK[bits]
    if not runs_kernel(query):
        return top_k_codes_reference(
            *operands, group_size, bits, page_tokens, sm_scale, unit, lists
        )
    launch = launch or CodeLaunch.default(bits, head_dim, group_size)
    share, block_g, block_w = code_blocks(group_size, head_dim, bits)
    blocks = (share, block_g, block_w)
    width = head_dim * bits // 8
    early, block_d = can_launch_early(query), next_power_of_2(head_dim)
    code_query_kernel[(num_heads * group_size, n)](
        query,
        rotation,
        means,
        heads,
        scratch.bytes,
        scratch.steps,
        scratch.offsets,
        scratch.bins,
        scratch.arrivals,
        sm_scale,
        unit,
        num_heads,
        num_qo_heads,
        group_size,
        head_dim,
        bits,
        *blocks,
        block_d,
        min(block_d, 16384 // block_d),  # 64 elements a thread
        BINS,
        early,
        num_warps=8,
        maxnreg=128,  # without it all loads would not be under way together: 32 would do
        **early_option(early),
    )
    chunk = buffers.launch.chunk_tokens
    packed = query.is_cuda or compiles()
    count_pack = chunk // (32 * launch.num_warps) if packed else 0
    assembly, constraints = counting(count_pack, launch.num_warps) or (None, None)
    score_codes_kernel[(-(-max_tokens // chunk), num_heads, n)](
        scratch.bytes,
        scratch.steps,
        scratch.offsets,
        page_table,
        positions,
        heads,
        buffers.importance,
        scratch.bins,
        max_pages,
        buffers.importance.shape[1],
        *lists.sizes,
        num_heads,
        num_qo_heads,
        group_size,
        bits,
        width,
        16 if width == block_w else math.gcd(width, 16),
        page_tokens,
        *blocks,
        min(page_tokens, launch.tile_tokens, chunk),
        chunk,
        BINS,
        packed,
        assembly,
        constraints,
        count_pack,
        early,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.max_registers,
        **early_option(early),
    )
    segments, found = buffers.launch.segments, buffers.candidates.view(torch.int32)
    for phase in (None,) if packed else (1, 2):  # interpreted programs cannot wait for each other
        select_scored_kernel[(segments, num_heads, n)](
            scratch.offsets,
            positions,
            heads,
            buffers.importance,
            scratch.bins,
            scratch.arrivals,
            found,
            buffers.lengths,
            buffers.certain,
            lists.selection,
            lists.counts,
            pointer(lists.host_selection),
            pointer(lists.host_counts),
            buffers.importance.shape[1],
            found.shape[1],
            *lists.sizes,
            lists.ratio,
            num_heads,
            lists.selection.shape[1],
            num_qo_heads,
            group_size,
            next_power_of_2(group_size),
            segments,
            launch.segment_tile,
            max(launch.found_tile, segments),
            BINS,
            min(launch.found_tile, 1024),
            phase,
            early,
            num_warps=launch.select_warps,
            **early_option(early),
        )


def top_k_codes_reference(
    query: Tensor,
    rotation: Tensor,
    means: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    group_size: int,
    bits: int,
    page_tokens: int,
    sm_scale: float,
    unit: float,
    lists: TopKLists,
) -> None:
    """`top_k_codes` by torch and a sort; pages are CPU memory."""
    num_heads, head_dim = means.shape[1:]
    scaled = query.float().view(len(query), -1, group_size, head_dim) * sm_scale
    for row, position in enumerate(positions.tolist()):
        kv_len = position + 1
        scored = kv_len if kv_len > lists.budget_tokens else 0  # of other rows nothing is read
        codes, scales = read_pages(page_table[row], scored, num_heads, page_tokens, head_dim, bits)
        for i, head in enumerate(heads.tolist()):
            q = scaled[row, head]
            steps, elements = query_steps(q @ rotation, unit)
            offsets = q @ means[row, i]
            relative = offsets - offsets.max()
            score = torch.zeros(kv_len)
            score[:scored] = scores_of(codes[i], scales[i], elements, steps, relative, bits)
            between = score[lists.sink_tokens : kv_len - lists.recent_tokens]
            is_known = bool(offsets.isfinite().all()) and (
                kv_len <= lists.budget_tokens or bool((between < math.inf).all())
            )
            lists.write((row, head), key_of(score), is_known=is_known)


def query_steps(rotated: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """float32 [group_size], and elements in steps, int32 [group_size, head_dim]."""
    largest = rotated.abs().amax(-1)
    factor = torch.where((largest > 1e-30) & (largest < math.inf), 127.0 / largest, 0.0)[:, None]
    elements = torch.where(factor > 0.0, rotated * factor, 0.0).add(0.5).floor().int()
    return largest / 127.0 * unit, elements


def scores_of(
    codes: Tensor, scales: Tensor, elements: Tensor, steps: Tensor, offsets: Tensor, bits: int
) -> Tensor:
    """float32 [n], the largest over the group, of codes uint8 [n, head_dim * bits / 8]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    of_dims = (codes[..., None] >> shifts & (1 << bits) - 1).flatten(-2).int()
    levels = 2 * of_dims - 1 if bits == 1 else 7 * of_dims - (of_dims >> 1) - 10
    scores = scales[:, None] * (steps * (levels @ elements.mT).float()) + offsets
    return torch.where(scales.abs() < math.inf, scores.amax(-1), math.inf)


def key_of(scores: Tensor) -> Tensor:
    """int32 in the order of float32 scores, from 0 up; that of infinity is its bits."""
    bits = scores.view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 1) + 0x3FC00000


def read_pages(
    addresses: Tensor, kv_len: int, num_heads: int, page_tokens: int, head_dim: int, bits: int
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [H, kv_len, head_dim * bits / 8] and scales float32 [H, kv_len] of CPU pages."""
    width = head_dim * bits // 8
    count = -(-kv_len // page_tokens)
    if not count:
        return torch.zeros(num_heads, 0, width, dtype=torch.uint8), torch.zeros(num_heads, 0)
    shape = (code_page_bytes(num_heads, page_tokens, head_dim, bits),)
    pages = torch.stack([page_at(x, shape, torch.uint8) for x in addresses[:count].tolist()])
    codes = pages[:, : num_heads * page_tokens * width]
    codes = codes.reshape(count, num_heads, page_tokens, width).transpose(0, 1).flatten(1, 2)
    scales = pages[:, num_heads * page_tokens * width :].contiguous().view(torch.float32)
    scales = scales.view(count, num_heads, page_tokens).transpose(0, 1).flatten(1)
    return codes[:, :kv_len], scales[:, :kv_len]
