"""Compiles every kernel for an H100/H200 (sm_90); prints `name registers stack shared`.

Needs no GPU. The interpreter is no judge of what the compiler takes. Run by test_compile.py as a
program, as triton either interprets or compiles in a process.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from cases.operands import DTYPES, sampling_buffers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cpu_ops.delta_rule import DeltaHeads
from cpu_ops.packed import FORMATS, PackedWeight, quantise
from gpu_ops import launch
from gpu_ops.append_codes import append_codes
from gpu_ops.checks import num_parts
from gpu_ops.choose_places import HotMap, choose_places
from gpu_ops.chunk_clusters import chunk_boxes, fill_empty, mean_directions
from gpu_ops.code_scores import CodeQuery
from gpu_ops.delta_rule import GpuDeltaRule
from gpu_ops.encode_codes import encode_codes
from gpu_ops.fetch_rows import fetch_rows
from gpu_ops.flags import await_flag, raise_flag
from gpu_ops.gate_heads import gate_heads, split_gates
from gpu_ops.gather_rows import gather_rows
from gpu_ops.gathered_attention import MissingRows, gathered_attention, num_gathered_splits
from gpu_ops.gemv import gemv
from gpu_ops.greedy import greedy_tokens
from gpu_ops.grow_clusters import grow_clusters
from gpu_ops.layout import allocate
from gpu_ops.linear import GpuLinear
from gpu_ops.merge_parts import merge_parts
from gpu_ops.merge_state import merge_state
from gpu_ops.packed_linear import GpuPackedLinear, PackedRows
from gpu_ops.paged_attention import (
    num_kv_splits,
    num_retrieval_splits,
    retrieval_attention,
)
from gpu_ops.rms_norm import add_normed, add_rms_norm, rms_norm
from gpu_ops.rope_publish import rope_publish
from gpu_ops.rotate import rotate_tokens
from gpu_ops.routed_linear import GpuExperts, GpuRoutedMlp
from gpu_ops.row_format import row_items
from gpu_ops.sampling import sample_tokens
from gpu_ops.silu_mul import activate, silu_mul
from gpu_ops.top_k_candidates import TopKBuffers
from gpu_ops.top_k_codes import top_k_codes
from gpu_ops.top_k_lists import TopKLists
from gpu_ops.top_k_tokens import top_k_tokens
from gpu_ops.window_attention import window_attention

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Hopper:
    """A driver that has a target and no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(run: Any) -> Any:
    """`JITFunction.run` that compiles instead of launching, and prints what the kernel takes."""

    def warmup(self: JITFunction, *args: Any, **options: Any) -> None:
        kernel = run(self, *args, **{**options, "warmup": True})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
        registers, stack = (int(re.search(f"{word}:(\\d+)", usage)[1]) for word in ("REG", "STACK"))
        print(kernel.metadata.name, registers, stack, kernel.metadata.shared, flush=True)

    return warmup


def packed_rows(p: PackedWeight) -> PackedRows:
    return PackedRows.of(p.format, p.codes, p.scales, p.minimums, p.in_features)


def call_all(
    dtype: torch.dtype,
    n: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    row_dtype: torch.dtype | None = None,
) -> None:
    """Every operator once."""
    num_qo_heads = num_kv_heads * group_size
    hidden_size = num_qo_heads * head_dim

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    x = zeros(n, hidden_size)
    add_rms_norm(x, x, zeros(hidden_size), 1e-5, x)
    add_rms_norm(x, None, zeros(hidden_size), 1e-5, x)
    silu_mul(zeros(n, 2 * hidden_size), x)
    row, square = x[:1], zeros(hidden_size, hidden_size)
    gemv(row, square, row, norm=(zeros(hidden_size), 1e-5))
    gemv(row, square, row, bias=zeros(hidden_size), residual=row)
    gemv(row, square, zeros(1, hidden_size, dtype=torch.float32), bias=zeros(hidden_size))
    gemv(row, zeros(2 * hidden_size, hidden_size), row, norm=(zeros(hidden_size), 1e-5), glu=True)

    made = [quantise(square, name) for name in FORMATS]
    halves = replace(made[0], scales=made[0].scales.repeat_interleave(2, 1))
    parts = [packed_rows(p) for p in (*made, replace(made[0], minimums=made[0].scales), halves)]
    for packed in (parts[:2], *([part] for part in parts)):
        linear = GpuPackedLinear(packed, dtype, zeros(hidden_size * len(packed)))
        linear(row, norm=(zeros(hidden_size), 1e-5))
        linear(row, glu=len(packed) == 1)
        linear(zeros(4, hidden_size), glu=len(packed) == 1)
        linear(zeros(16, hidden_size))
        linear(zeros(128, hidden_size))
        linear(row, glu=len(packed) == 1, gate="gelu_tanh")
    add_normed(x, x, zeros(hidden_size), 1e-5)
    rms_norm(x, zeros(hidden_size), 1e-5, offset=1, rounds=False)
    silu_mul(zeros(n, 2 * hidden_size), x, "gelu_tanh")
    up, down = zeros(8, 2 * hidden_size, hidden_size), zeros(8, hidden_size, hidden_size)
    router, choice = GpuLinear(zeros(8, hidden_size)), (2, True, True)
    of_packed = quantise(up.flatten(0, 1), "q4"), quantise(down.flatten(0, 1), "q4")
    for weights in ((up, down), map(packed_rows, of_packed)):
        experts = [GpuExperts(weight, 8) for weight in weights]
        for clamp, bias in ((None, None), ((1.7, 7.0), zeros(8, 2 * hidden_size))):
            experts[0].clamp, experts[0].bias = clamp, bias
            GpuRoutedMlp(router, *experts, *choice)(x, x, norm=(zeros(hidden_size), 1e-5))
    for gate, rows in (("gelu_tanh", 2 * hidden_size), ("relu2", hidden_size)):
        experts = [GpuExperts(up[:, :rows].contiguous(), 8, gate=gate), GpuExperts(down, 8)]
        GpuRoutedMlp(router, *experts, *choice)(x, x)

    attend_all(dtype, n, num_kv_heads, group_size, head_dim, row_dtype)


def attend_all(
    dtype: torch.dtype,
    n: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    row_dtype: torch.dtype | None = None,
    latent_dim: int = 0,
    softcap: float = 0.0,
) -> None:
    """The operators of a step's attention to all tokens, once."""
    num_qo_heads = num_kv_heads * group_size

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    qkv = zeros(n, (num_qo_heads + 2 * num_kv_heads) * head_dim)
    angle, norm = zeros(n, head_dim), zeros(head_dim)
    positions = zeros(n, dtype=torch.int64)
    query, kv = zeros(n, num_qo_heads * head_dim), zeros(n, 2, num_kv_heads, head_dim)
    table = zeros(n, 512, dtype=torch.int64)
    row_dtype = row_dtype or dtype
    row = row_items(head_dim, row_dtype)
    parts = num_parts(latent_dim)
    window = zeros(n, parts, num_kv_heads, 16 + 64, row, dtype=row_dtype)
    rope = {"num_kv_heads": num_kv_heads, "query": query, "host_query": query, "host_kv": kv}
    rope |= {"row_dtype": row_dtype, "keys_only": parts == 1}
    rope_publish(qkv, angle, angle, positions, **rope, window=window, sink_tokens=16)
    rope_publish(
        qkv,
        angle,
        angle,
        positions,
        **rope,
        q_norm=norm,
        k_norm=norm,
        page_table=table,
        page_tokens=256,
    )
    grown = {"query_scale": zeros(n)}
    rope_publish(qkv, angle, angle, positions, **rope, **grown, host_pages=table, page_tokens=256)
    part, ring = angle[:, : head_dim // 2].contiguous(), {"page_tokens": 256, "ring_tokens": 512}
    rope_publish(qkv, part, part, positions, **rope, head_dim=head_dim, page_table=table, **ring)

    out, lse = zeros(*query.shape, dtype=torch.float32), zeros(n, num_qo_heads, dtype=torch.float32)
    caps = {"latent_dim": latent_dim, "softcap": softcap}
    window_attention(query, window, positions, sm_scale=0.125, out=out, lse=lse, **caps)
    sinks = zeros(num_qo_heads, dtype=torch.float32)
    for of_heads in (None, sinks):
        merge_state(out, lse, out, lse, query, of_heads)
    flag = zeros(1, dtype=torch.int32)
    raise_flag(flag, flag.device)
    await_flag(flag, flag.device)
    num_splits = num_kv_splits(num_kv_heads, 132)
    for of_heads in (None, sinks):
        retrieval_attention(
            query,
            table,
            positions,
            None,
            group_size=group_size,
            page_tokens=256,
            sm_scale=0.125,
            partial_out=zeros(n, num_qo_heads, num_splits, head_dim, dtype=torch.float32),
            partial_lse=zeros(n, num_qo_heads, num_splits, dtype=torch.float32),
            out=query,
            page_dtype=row_dtype,
            sinks=of_heads,
            **caps,
        )


def select_all(
    dtype: torch.dtype,
    n: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    row_dtype: torch.dtype | None = None,
    latent_dim: int = 0,
    softcap: float = 0.0,
) -> None:
    """The operators on selected tokens, once."""
    capacity, num_qo_heads = 1024, num_kv_heads * group_size
    counts, positions = torch.zeros(n, num_kv_heads, dtype=torch.int32), torch.zeros(n).long()
    selection = torch.zeros(n, num_kv_heads, 4 + capacity + 64, dtype=torch.int32)
    table = torch.zeros(n, 512, dtype=torch.int64)
    heads = torch.arange(num_kv_heads, dtype=torch.int32)
    query = torch.zeros(n, num_qo_heads * head_dim, dtype=dtype)
    row_dtype = row_dtype or dtype
    row = row_items(head_dim, row_dtype)
    parts = num_parts(latent_dim)
    gathered = torch.zeros(n, parts, num_kv_heads, capacity, row, dtype=row_dtype)
    window = {"sink_tokens": 4, "recent_tokens": 64}
    pages = {"num_kv_heads": num_kv_heads, "page_tokens": 256}
    gather_rows(selection, counts, table, positions, heads, out=gathered, **pages, **window)
    fetches = torch.zeros(n, num_kv_heads, capacity, 2, dtype=torch.int32)
    hot_counts, clusters = torch.zeros(n, num_kv_heads, 2, dtype=torch.int32), 64
    means = torch.zeros(n, 2, num_kv_heads, clusters, head_dim, dtype=dtype)
    logs = {"means": means, "log_counts": torch.zeros(n, num_kv_heads, clusters)}
    of_mailbox = {
        "rest_counts": torch.zeros(n, num_kv_heads, clusters + 1, dtype=torch.int32),
        "rest_means": torch.zeros(n, num_kv_heads, 2, head_dim),
    }
    rows = {"page_tokens": 256, "hot": gathered, "counts": counts}
    for rest in ({}, logs | of_mailbox):
        fetch_rows(fetches, hot_counts, table, positions, heads, **rows, **window, **rest)
    sizes = {"max_tokens": 131072, "capacity": 3 * capacity, "clusters": clusters}
    hot_map = HotMap(**allocate(HotMap.layout(n, num_kv_heads, **sizes), heads.device))
    of_layer = {"first_head": 0, **window}
    for log_counts in (None, logs["log_counts"]):
        choose_places(
            selection,
            counts,
            positions,
            heads,
            hot_map,
            scratch=fetches[..., 0].contiguous(),
            held_counts=counts,
            log_counts=log_counts,
            **of_layer,
        )
    kept = torch.zeros(n, parts, num_kv_heads, 68, row, dtype=row_dtype)
    grow_clusters(kept, positions, heads, means, hot_map, **of_layer)
    num_splits = num_gathered_splits(num_kv_heads, capacity, 132)
    alone = {"out": query.float(), "lse": torch.zeros(n, num_qo_heads)}
    whole = {"out": query, "window": kept}
    missing = {"missing": MissingRows(hot_map.token_of, 0, table, 256)}
    is_one_program = not latent_dim or group_size <= 32
    sinks = {"sinks": torch.zeros(num_qo_heads)}
    found = torch.zeros(n, parts, num_kv_heads, 3 * capacity, row, dtype=row_dtype)
    of_missing = (whole | missing, whole | logs | missing) if is_one_program else ()
    for rest in (alone, whole, whole | logs, *of_missing, whole | sinks):
        shape = (n, num_qo_heads, num_splits + ("window" in rest))
        gathered_attention(
            query,
            found if "missing" in rest else gathered,
            counts,
            positions,
            heads,
            group_size=group_size,
            sm_scale=0.125,
            latent_dim=latent_dim,
            softcap=softcap,
            partial_out=torch.zeros(*shape, head_dim),
            partial_lse=torch.zeros(shape),
            **rest,
            **window,
        )


def retrieve_all(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, group_size: int, head_dim: int
) -> None:
    """The operators of retrieval heads, once."""
    num_qo_heads, max_tokens = num_kv_heads * group_size, 131072
    num_splits = num_retrieval_splits(num_heads, 132)
    query = torch.zeros(1, num_qo_heads * head_dim, dtype=dtype)
    lse = torch.zeros(1, num_qo_heads)
    positions, heads = torch.zeros(1, dtype=torch.int64), torch.zeros(num_heads, dtype=torch.int32)
    scores = torch.zeros(1, num_heads, group_size, max_tokens)
    retrieval_attention(
        query,
        torch.zeros(1, 512, dtype=torch.int64),
        positions,
        heads,
        group_size=group_size,
        page_tokens=256,
        sm_scale=0.125,
        partial_out=torch.zeros(1, num_qo_heads, num_splits, head_dim),
        partial_lse=torch.zeros(1, num_qo_heads, num_splits),
        out=query.float(),
        lse=lse,
        scores=scores,
    )
    for shared, rule in (
        (False, {}),
        (True, {"ratio": 0.1}),
        (False, {"top_p": 0.9}),
        (True, {"threshold": 0.001}),
    ):
        lists = 1 if shared else num_kv_heads
        selection = torch.zeros(1, lists, 2048, dtype=torch.int32)
        counts = torch.zeros(1, lists, dtype=torch.int32)
        top_k_tokens(
            scores,
            lse,
            positions,
            heads,
            sink_tokens=16,
            recent_tokens=64,
            budget_tokens=2048,
            shared=shared,
            buffers=TopKBuffers.allocate(num_heads, max_tokens, 2048, "cpu"),
            selection=selection,
            counts=counts,
            host_selection=selection,
            host_counts=counts,
            **rule,
        )


def score_codes_all(
    dtype: torch.dtype, num_kv_heads: int, group_size: int, head_dim: int, bits: int
) -> None:
    """The operators on codes of keys, once."""
    num_qo_heads, max_tokens = num_kv_heads * group_size, 131072
    heads = torch.arange(num_kv_heads, dtype=torch.int32)
    layout = CodeQuery.layout(1, num_kv_heads, num_qo_heads, group_size, head_dim, bits)
    levels = (-1.0, 1.0) if bits == 1 else (-3.0, -1.0, 1.0, 3.0)
    encode_codes(
        torch.zeros(num_kv_heads, 100, head_dim),
        levels,
        1.0,
        torch.zeros(num_kv_heads, 2, head_dim * bits // 8, 64, dtype=torch.uint8),
        torch.zeros(num_kv_heads, 128),
    )
    append_codes(
        torch.zeros(1, 2, num_kv_heads, 80, head_dim, dtype=dtype),
        torch.zeros(head_dim, head_dim),
        torch.zeros(1, num_kv_heads, head_dim),
        torch.zeros(1, max_tokens // 256, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        heads,
        first_token=1024,
        sink_tokens=16,
        levels=levels,
        outer=1.0,
        page_tokens=256,
    )
    top_k_codes(
        torch.zeros(1, num_qo_heads * head_dim, dtype=dtype),
        torch.zeros(head_dim, head_dim),
        torch.zeros(1, num_kv_heads, head_dim),
        torch.zeros(1, max_tokens // 256, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        heads,
        group_size=group_size,
        bits=bits,
        page_tokens=256,
        sm_scale=0.125,
        level=1.0,
        scratch=CodeQuery(**allocate(layout, "cpu")),
        buffers=TopKBuffers.allocate(num_kv_heads, max_tokens, 2048, "cpu"),
        lists=TopKLists(
            16,
            64,
            2048,
            torch.zeros(1, num_kv_heads, 2048, dtype=torch.int32),
            torch.zeros(1, num_kv_heads, dtype=torch.int32),
        ),
    )


def sample_all(dtype: torch.dtype, n: int, vocab_size: int) -> None:
    """The operators on logits, once."""
    logits = torch.zeros(n, vocab_size, dtype=dtype)
    tokens, option = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    buffers = sampling_buffers(n, vocab_size, "cpu")
    greedy_tokens(logits, tokens, buffers)
    sample_tokens(
        logits,
        temperature=option,
        top_k=tokens,
        top_p=option,
        uniform=option,
        out=tokens,
        buffers=buffers,
    )


def prefill_all(dtype: torch.dtype, n: int, num_heads: int, head_dim: int) -> None:
    """The operators on a prefill slice, once."""
    x, table = torch.zeros(n, num_heads, head_dim, dtype=dtype), torch.zeros(n, head_dim)
    rotate_tokens(x, table.to(dtype), table.to(dtype))
    o, lse = x.transpose(0, 1), torch.zeros(num_heads, n)
    merge_parts(o.float(), lse, o, lse)
    activate(x, x)


def cluster_all(dtype: torch.dtype, heads: int, n: int, num_clusters: int, head_dim: int) -> None:
    """The steps of clustering, once."""
    starts = torch.arange(0, 16 * n + 1, 16)
    chunk_boxes(torch.zeros(heads, 16 * n, head_dim, dtype=dtype), starts)
    points, centroids = torch.zeros(heads, n, head_dim), torch.zeros(heads, num_clusters, head_dim)
    labels = torch.zeros(heads, n, dtype=torch.int64)
    fill_empty(labels, torch.zeros(heads, n), num_clusters)
    mean_directions(points, labels, centroids.to(torch.int64), centroids)


def step_all(dtype: torch.dtype, heads: DeltaHeads, width: int) -> None:
    """The operators of layers with the gated delta rule, and of attention with gates, once."""
    conv, norm = torch.zeros(heads.channels, width, dtype=dtype), torch.zeros(heads.v_dim).to(dtype)
    gates = torch.zeros(2, heads.num_v_heads)
    rows = torch.zeros(2, heads.row_size, dtype=dtype)
    GpuDeltaRule(heads, conv, (norm, 1e-6), *gates)(rows, torch.zeros(2, 2).long())
    gate_heads(*split_gates(torch.zeros(2, 24 * 2 * 256, dtype=dtype), 24, 256))


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.run = compile_only(JITFunction.run)
    launch._on_cpu.set(True)  # what interpreted() does, but here triton compiles
    for dtype in DTYPES:
        call_all(dtype, 2, 8, 4, 128)
        select_all(dtype, 2, 8, 4, 128)
    for head_dim in (64, 80, 128):
        call_all(torch.bfloat16, 2, 8, 4, head_dim, torch.int8)
        select_all(torch.bfloat16, 2, 8, 4, head_dim, torch.int8)
    call_all(torch.bfloat16, 1, 3, 3, 64)
    select_all(torch.bfloat16, 64, 3, 3, 64)
    for group_size in (20, 128):  # of latents
        attend_all(torch.bfloat16, 2, 1, group_size, 576, latent_dim=512)
    for head_dim, rows in ((128, None), (256, None), (256, torch.int8)):
        attend_all(torch.bfloat16, 2, 4, 2, head_dim, rows, softcap=50.0)
        select_all(torch.bfloat16, 2, 4, 2, head_dim, rows, softcap=50.0)
    for dtype in DTYPES:
        retrieve_all(dtype, 1, 8, 4, 128)
    retrieve_all(torch.bfloat16, 2, 3, 3, 64)
    for bits in (1, 2):
        score_codes_all(torch.bfloat16, 8, 4, 128, bits)
        score_codes_all(torch.float32, 3, 3, 80, bits)
        score_codes_all(torch.bfloat16, 2, 16, 256, bits)
    sample_all(torch.bfloat16, 1, 128256)
    cluster_all(torch.bfloat16, 8, 2048, 1024, 128)
    prefill_all(torch.bfloat16, 8192, 32, 128)
    for dtype in DTYPES:
        step_all(dtype, DeltaHeads(16, 48, 128, 128), 4)
    step_all(torch.bfloat16, DeltaHeads(2, 6, 7, 9), 3)
