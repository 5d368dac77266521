"""Flash decoding over pages of KV on the GPU: of all KV heads, or of those that a page holds.

The latter are retrieval heads, which may leave the scores of all tokens, from which `top_k_tokens`
finds what the other heads attend to.

Every row's tokens are split into equal pieces, each attended to by one program per KV head, and a
second kernel merges the pieces. The grid is fixed when a CUDA graph is captured, so the number of
splits is too; how long they are is computed on the device from the row's position. All splits of
the longest row run at once on the whole GPU, whatever the lengths of the others.

Why a second launch and not the last program to arrive: with one KV head there are 264 pieces of
each of its query heads, half a megabyte that a single multiprocessor would read one after the other
(5 us and more), and that a launch reads on many.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dims,
    check_dtype,
    check_head_dim,
    check_latent_dim,
    check_page_tokens,
    check_sinks,
    check_tensor,
    num_parts,
)
from gpu_ops.cpu_pages import gather_pages
from gpu_ops.early_launch import await_inputs, can_launch_early, early_option
from gpu_ops.launch import compiles, jit_for_any, next_power_of_2, runs_kernel, tl
from gpu_ops.load_rows import load_codes
from gpu_ops.online_softmax import (
    NUM_STAGES,
    Tiles,
    capped,
    load_query,
    merge_states,
    query_codes,
    score_codes,
    score_tile,
    split_length,
    tile_tokens,
    weigh_codes,
    weigh_tile,
    with_sink,
)
from gpu_ops.row_format import as_numbers, row_items

# By what rows take: those of int8 are converted, for which a program alone has too few threads.
_PROGRAMS_PER_MULTIPROCESSOR, _INT8_PROGRAMS, _INT8_STAGES = 2, 4, 2
_MAX_SPLITS = 128
_MAX_RETRIEVAL_SPLITS = 1024  # of one head: all of their lse are in one program's registers
# Rows of a batch fill the GPU together, so that their pieces need not be as small.
_MAX_TILES_PER_SPLIT = 8
_MERGE_PROGRAMS = 256  # that the merge has at least, by parts of a head's output
_MERGED_ELEMENTS = 4096  # of the pieces of a head, that a program has in registers at once


@jit_for_any("min_tiles")
def paged_attention_kernel(
    query: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,  # the KV head of each head in a page; None: pages have all, in order
    partial_out: tl.tensor,
    partial_lse: tl.tensor,  # in base 2
    scores: tl.tensor,  # None, or of [row, head in a page, query head of the group, token]; base 2
    max_pages: tl.tensor,
    max_tokens: tl.tensor,  # of scores
    scale: tl.tensor,  # sm_scale * log2(e)
    cap: tl.tensor,  # softcap * log2(e); None: scores are not capped
    NUM_SPLITS: tl.constexpr,
    min_tiles: tl.tensor,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    RING_TOKENS: tl.constexpr,  # of which there are at most so many; 0: all. So below.
    LATENT_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of BLOCK_G query heads, of a KV head
    BLOCK_T: tl.constexpr,  # divides PAGE_TOKENS: a tile lies in one page, contiguous
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr,  # as of `code_numbers`
    EARLY: tl.constexpr,
) -> None:
    """One program per split, BLOCK_G query heads of a head of the pages, and row."""
    split, page_head = tl.program_id(0), tl.program_id(1) // NUM_GROUPS
    row = tl.program_id(2).to(tl.int64)
    pages = page_table + row * max_pages
    await_inputs(EARLY)
    position = tl.load(positions + row)
    kv_head = page_head
    if heads is not None:
        kv_head = tl.load(heads + page_head)
    kv_len = (position + 1).to(tl.int32)
    if RING_TOKENS > 0:
        kv_len = tl.minimum(kv_len, RING_TOKENS)
    length = split_length(kv_len, NUM_SPLITS, BLOCK_T, min_tiles)
    first = split * length
    last = tl.minimum(first + length, kv_len)
    if first >= last:
        return  # nor does the second kernel read it

    # Where a tile is gets loaded an iteration ahead, by hand: the compiler would give that most of
    # its pipeline's stages, and wait for the query before it looks for the first one.
    page = tl.load(pages + first // PAGE_TOKENS)
    first_head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE
    g = tl.program_id(1) % NUM_GROUPS * BLOCK_G + tl.arange(0, BLOCK_G)
    q, q_rest = load_query(query, first_head, g, GROUP_SIZE, HEAD_DIM, BLOCK_D), None
    if BLOCK_R > 0:
        q_rest = load_query(query, first_head, g, GROUP_SIZE, HEAD_DIM, BLOCK_R, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    IS_INT8: tl.constexpr = (
        ROW_ITEMS != HEAD_DIM
        and query.dtype.element_ty != tl.float32
        and BLOCK_D >= 32
        and BLOCK_R == 0
        and LATENT_DIM == 0
    )
    OF_VALUES: tl.constexpr = PAGE_HEADS * PAGE_TOKENS * ROW_ITEMS
    row_type: tl.constexpr = query.dtype.element_ty if ROW_ITEMS == HEAD_DIM else tl.int8
    if IS_INT8:
        WIDTH: tl.constexpr = min(BLOCK_D, 64)
        q_groups, acc = (), ()
        for i in tl.static_range(BLOCK_D // WIDTH):
            of_group = load_query(query, first_head, g, GROUP_SIZE, HEAD_DIM, WIDTH, 64 * i)
            q_groups += (query_codes(of_group),)  # type: ignore[assignment]
            acc += (tl.zeros([BLOCK_G, WIDTH], tl.float32),)
    for start in range(first, last, BLOCK_T):
        following = start + BLOCK_T
        in_page = (page_head * PAGE_TOKENS + start % PAGE_TOKENS).to(tl.int64)
        keys = page.to(tl.pointer_type(row_type)) + in_page * ROW_ITEMS
        page = tl.load(pages + following // PAGE_TOKENS, mask=following < last, other=0)
        if IS_INT8:
            exists = start + t < last
            k, k_scales = load_codes(keys, t, exists, HEAD_DIM, ROW_ITEMS, BLOCK_D)
            v, v_scales = load_codes(keys + OF_VALUES, t, exists, HEAD_DIM, ROW_ITEMS, BLOCK_V)
            of_tile = score_codes(q_groups, k, k_scales, exists, scale, cap)
        else:
            of_tile, tile = score_tile(
                q, q_rest, keys, last - start, scale, cap, HEAD_DIM, ROW_ITEMS, BLOCK_T
            )
        if scores is not None:
            score_row = (row * PAGE_HEADS + page_head) * GROUP_SIZE + g
            target = scores + score_row[:, None] * max_tokens + (start + t)[None, :]
            kept = (g < GROUP_SIZE)[:, None] & (start + t < last)[None, :]
            tl.store(target, of_tile, mask=kept)
        state = (row_max, row_sum, acc)
        if IS_INT8:
            row_max, row_sum, acc = weigh_codes(of_tile, v, v_scales, *state, q.dtype, PACKED)
        else:
            values = keys if LATENT_DIM > 0 else keys + OF_VALUES
            row_max, row_sum, acc = weigh_tile(
                of_tile,
                tile,
                values,
                last - start,
                *state,
                q.dtype,
                HEAD_DIM,
                ROW_ITEMS,
                LATENT_DIM,
            )

    slots = (first_head + g) * NUM_SPLITS + split
    VALUE_DIM: tl.constexpr = LATENT_DIM if LATENT_DIM > 0 else HEAD_DIM
    lse = row_max + tl.log2(row_sum)
    tl.store(partial_lse + slots, lse, mask=g < GROUP_SIZE)
    parts = acc if IS_INT8 else (acc,)
    for part in tl.static_range(len(parts)):
        d = 64 * part + tl.arange(0, parts[part].shape[1])
        inside = (g < GROUP_SIZE)[:, None] & (d < VALUE_DIM)[None, :]
        o = parts[part] / row_sum[:, None]
        tl.store(partial_out + slots[:, None] * HEAD_DIM + d[None, :], o, mask=inside)


@jit_for_any("min_tiles")
def merge_splits_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,  # as above
    out: tl.tensor,
    lse: tl.tensor,  # natural log; None: not wanted
    sinks: tl.tensor,  # None: heads have none
    NUM_SPLITS: tl.constexpr,
    min_tiles: tl.tensor,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # which of them values have
    RING_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # of the kernel before
    TILE_S: tl.constexpr,  # of splits
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per row, query head of the pages' heads, and BLOCK_D elements of it."""
    row = tl.program_id(0).to(tl.int64)
    page_head, piece = tl.program_id(1) // GROUP_SIZE, tl.program_id(2)
    kv_head = page_head
    if heads is not None:
        kv_head = tl.load(heads + page_head)
    head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE + tl.program_id(1) % GROUP_SIZE
    kv_len = (tl.load(positions + row) + 1).to(tl.int32)
    if RING_TOKENS > 0:
        kv_len = tl.minimum(kv_len, RING_TOKENS)
    used = tl.cdiv(kv_len, split_length(kv_len, NUM_SPLITS, BLOCK_T, min_tiles))
    d = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    # Only here: the first kernel had waited for what is read above before this one could start.
    await_inputs(EARLY)
    largest, total, acc = merge_states(
        partial_out, partial_lse, head * NUM_SPLITS, 1, used, d, HEAD_DIM, VALUE_DIM, TILE_S
    )
    attended = used > 0  # an inactive row has no splits: 0, and an lse of -inf
    total = tl.where(attended, total, 1.0)
    of_all = total
    if sinks is not None:
        of_all = with_sink(total, largest, sinks, head - row * NUM_QO_HEADS)
    o = (acc / of_all).to(out.dtype.element_ty)
    tl.store(out + head * HEAD_DIM + d, o, mask=d < VALUE_DIM)
    if lse is not None:
        natural = tl.where(attended, (largest + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + head, natural, mask=piece == 0)


def num_kv_splits(
    num_kv_heads: int, num_multiprocessors: int, page_dtype: torch.dtype | None = None
) -> int:
    """Splits with which one row fills the GPU."""
    programs = _programs(num_multiprocessors, page_dtype)
    return max(1, min(_MAX_SPLITS, programs // num_kv_heads))


def num_retrieval_splits(
    num_heads: int, num_multiprocessors: int, page_dtype: torch.dtype | None = None
) -> int:
    """Splits with which `num_heads` KV heads of one row fill the GPU.

    Args:
        num_heads: retrieval heads of the layer; scratch for several layers takes their smallest
            and is viewed with the splits of each.

    Raises:
        ValueError: unless there is at least one head.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    programs = _programs(num_multiprocessors, page_dtype)
    return max(1, min(_MAX_RETRIEVAL_SPLITS, programs // num_heads))


def _programs(num_multiprocessors: int, page_dtype: torch.dtype | None) -> int:
    is_int8 = page_dtype == torch.int8
    return (_INT8_PROGRAMS if is_int8 else _PROGRAMS_PER_MULTIPROCESSOR) * num_multiprocessors


def retrieval_attention(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor | None,
    *,
    group_size: int,
    page_tokens: int,
    ring_tokens: int = 0,
    sm_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    scores: Tensor | None = None,
    page_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
    latent_dim: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend to all tokens [0, position] of each row with the query heads of some KV heads.

    Args:
        query: [n, num_qo_heads * head_dim], all of the model's query heads.
        page_table: int64 [n, max_pages], addresses of GPU pages of this layer, each laid out
            [K|V][H][page_tokens][row] in page_dtype and aligned to 16 bytes. Index i of a
            page is KV head heads[i].
        positions: int64 [n], each row's last token, whose K/V are in their page; -1 for an
            inactive row, whose out is 0 and lse -inf.
        heads: int32 [H], ascending KV heads, on the device; below num_qo_heads / group_size, which
            nobody checks. None: all.
        group_size: query heads of a KV head.
        page_tokens: a power of two; of at least 64 for full speed.
        ring_tokens: that pages have, and that are attended to, the last ones, in any order (as
            `rope_publish` writes them); 0: all.
        partial_out, partial_lse: scratch, float32 [n, num_qo_heads, num_splits, head_dim] and
            [n, num_qo_heads, num_splits]; for full speed with the num_splits of
            `num_retrieval_splits`, or where all heads are there of `num_kv_splits`.
        out: [n, num_qo_heads * head_dim], in query's dtype, or of some `heads` float32.
        lse: float32 [n, num_qo_heads], natural log, or None. Of both only the query heads of
            `heads` are written.
        scores: None, or float32 [n, H, group_size, max_tokens], written for the tokens
            [0, position]: query times key times sm_scale, capped, in base 2, that is times log2(e).
            A token has the weight 2**score / e**lse.
        page_dtype: of the rows in pages: query's dtype, also where None is given, or int8
            (`row_format`).
        sinks: float32 [num_qo_heads], logits that join each softmax and have no value; or None.
            They count in `out` alone, not in `lse`.
        latent_dim: a token's value is the first so many elements of its key, as of latent attention
            (DeepSeek-V2), and the value in its page is not read; of a head of `out` only so many
            are written. 0: it is not.
        softcap: scores are softcap * tanh(score / softcap); 0: not capped.
    """
    check_dtype("query", query)
    check_dims("partial_out", partial_out, "[n, num_qo_heads, num_splits, head_dim]")
    n, num_qo_heads, num_splits, head_dim = partial_out.shape
    device = query.device
    check_head_dim(head_dim)
    check_page_tokens(page_tokens)
    if group_size < 1 or num_qo_heads % group_size:
        raise ValueError(
            f"num_qo_heads must be a multiple of group_size, got {num_qo_heads} and {group_size}"
        )
    num_kv_heads = num_qo_heads // group_size
    num_heads = num_kv_heads if heads is None else heads.numel()
    if not 1 <= num_heads <= num_kv_heads:
        raise ValueError(f"heads must be 1 to {num_kv_heads} KV heads, got {num_heads}")
    check_latent_dim(latent_dim, head_dim)
    if ring_tokens < 0 or (ring_tokens and scores is not None):
        raise ValueError(f"ring_tokens must be 0, or positive without scores, got {ring_tokens}")
    if not 1 <= num_splits <= _MAX_RETRIEVAL_SPLITS:
        raise ValueError(f"num_splits must be in 1..{_MAX_RETRIEVAL_SPLITS}, got {num_splits}")
    shape = (n, num_qo_heads * head_dim)
    check_tensor("query", query, shape, query.dtype, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    if heads is not None:
        check_tensor("heads", heads, (num_heads,), torch.int32, device)
    check_tensor("partial_out", partial_out, partial_out.shape, torch.float32, device)
    check_tensor("partial_lse", partial_lse, (n, num_qo_heads, num_splits), torch.float32, device)
    if heads is None or out.dtype != torch.float32:
        check_tensor("out", out, shape, query.dtype, device)
    else:
        check_tensor("out", out, shape, torch.float32, device)
    if lse is not None:
        check_tensor("lse", lse, (n, num_qo_heads), torch.float32, device)
    check_sinks(sinks, num_qo_heads, device)
    max_tokens = 0
    if scores is not None:
        max_tokens = scores.shape[-1]
        if max_tokens < page_table.shape[1] * page_tokens:
            raise ValueError(
                f"scores must have room for all pages' {page_table.shape[1] * page_tokens} tokens,"
                f" got {max_tokens}"
            )
        scores_shape = (n, num_heads, group_size, max_tokens)
        check_tensor("scores", scores, scores_shape, torch.float32, device)
    operands, page_dtype = (query, page_table, positions, heads), page_dtype or query.dtype
    if page_dtype not in (query.dtype, torch.int8):
        raise ValueError(f"page_dtype must be {query.dtype} or torch.int8, got {page_dtype}")
    row = row_items(head_dim, page_dtype)
    if not runs_kernel(query):
        page_shape = (num_parts(latent_dim), num_heads, page_tokens, row)
        return retrieval_attention_reference(
            *operands,
            group_size,
            page_shape,
            page_dtype,
            head_dim,
            ring_tokens,
            sm_scale,
            out,
            lse,
            scores,
            sinks,
            latent_dim,
            softcap,
        )
    # What two programs on each multiprocessor have the shared memory for, of wide heads one.
    tiles = Tiles.of(head_dim, group_size, query.element_size(), page_dtype, latent_dim)
    tokens = tiles.tokens
    if page_dtype == torch.int8 and query.element_size() == 2 and not latent_dim:  # see IS_INT8
        tokens = tile_tokens(tiles.dims, 4 if tiles.rest_dims else 2)
    block_t, value_dim = min(page_tokens, tokens), latent_dim or head_dim
    splits = (num_splits, min(n, _MAX_TILES_PER_SPLIT), num_qo_heads, group_size, head_dim)
    early = can_launch_early(query)  # the merge, while the splits run
    paged_attention_kernel[(num_splits, num_heads * tiles.num_groups, n)](
        *operands,
        partial_out,
        partial_lse,
        scores,
        page_table.shape[1],
        max_tokens,
        sm_scale * math.log2(math.e),
        softcap * math.log2(math.e) or None,
        *splits,
        row,
        num_heads,
        page_tokens,
        ring_tokens,
        latent_dim,
        tiles.group,
        tiles.num_groups,
        block_t,
        tiles.dims,
        tiles.rest_dims,
        tiles.value_dims,
        query.is_cuda or compiles(),
        early,
        num_warps=tiles.num_warps,
        num_stages=_INT8_STAGES if page_dtype == torch.int8 else NUM_STAGES,
    )
    block_d = tiles.value_dims
    parts = min(block_d // 16, max(1, _MERGE_PROGRAMS // (n * num_heads * group_size)))
    merged_d = block_d // next_power_of_2(parts)
    merge_splits_kernel[(n, num_heads * group_size, -(-value_dim // merged_d))](
        partial_out,
        partial_lse,
        positions,
        heads,
        out,
        lse,
        sinks,
        *splits,
        value_dim,
        ring_tokens,
        block_t,
        min(_MERGED_ELEMENTS // merged_d, next_power_of_2(num_splits)),
        merged_d,
        early,
        num_warps=4,
        **early_option(early),
    )


def retrieval_attention_reference(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor | None,
    group_size: int,
    page_shape: tuple[int, int, int, int],
    page_dtype: torch.dtype,
    head_dim: int,
    ring_tokens: int,
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
    scores: Tensor | None,
    sinks: Tensor | None,
    latent_dim: int,
    softcap: float,
) -> None:
    """`retrieval_attention` by torch, in float32; pages [*page_shape] are CPU memory."""
    n = len(query)
    num_kv_heads = query.shape[1] // (group_size * head_dim)
    if lse is None:
        lse = out.new_empty(n, num_kv_heads * group_size, dtype=torch.float32)
    kv_heads = slice(None) if heads is None else heads.long()
    value_dim = latent_dim or head_dim
    grouped_query = query.view(n, num_kv_heads, group_size, head_dim)
    grouped_out, grouped_lse = out.view(grouped_query.shape), lse.view(n, num_kv_heads, group_size)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            grouped_out[row, kv_heads, :, :value_dim] = 0.0
            grouped_lse[row, kv_heads] = float("-inf")
            continue
        kv_len = min(position + 1, ring_tokens or position + 1)
        rows = gather_pages(page_table[row], kv_len, page_shape, page_dtype)
        parts = as_numbers(rows, head_dim)
        keys, values = parts[0], parts[-1, ..., :value_dim]
        of_row = grouped_query[row, kv_heads].float() @ keys.transpose(1, 2) * sm_scale
        of_row = capped(of_row, softcap)
        of_heads = of_row.logsumexp(-1)
        of_heads = of_heads.masked_fill(of_heads == float("-inf"), float("nan"))
        grouped_lse[row, kv_heads] = of_heads
        of_all = of_heads
        if sinks is not None:
            of_all = of_heads.logaddexp(sinks.view(num_kv_heads, group_size)[kv_heads])
        o = (of_row - of_all[..., None]).exp() @ values
        grouped_out[row, kv_heads, :, :value_dim] = o.to(out.dtype)
        if scores is not None:
            scores[row, :, :, : position + 1] = of_row * math.log2(math.e)
