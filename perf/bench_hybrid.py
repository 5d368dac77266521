"""Dense and block-sparse heads in one launch, against torch's attention over the same KV.

`python -m perf.bench_hybrid` on a machine with a GPU. Every call of a graph reads another layer's
KV, so that no cache holds it. `--launch` and `--per-sm` try launches; the fastest of each case is
marked. Returns 1 if a launch's output was wrong; it has no row then.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_ops.hybrid_attention import DENSE, HybridLaunch, hybrid_attention
from perf.gpu_timing import (
    COLD_BYTES,
    DTYPE,
    GROUP_SIZE,
    HEAD_DIM,
    KV_HEADS,
    PAGE_TOKENS,
    QO_HEADS,
    ROW_BYTES,
    SM_SCALE,
    Pages,
    checked_error,
    graph_microseconds,
    launch_option,
    launches,
    print_kernels,
    require_gpu,
)
from perf.results_file import Run, script_options
from perf.tables.placement_tables import gpu_hybrid_table

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """How many KV heads attend to everything, and to how many tokens the others."""

    kv_len: int
    dense_heads: int
    sparse_tokens: int

    @property
    def num_bytes(self) -> int:
        """Keys and values that have to be read."""
        sparse = (KV_HEADS - self.dense_heads) * min(self.sparse_tokens, self.kv_len)
        return (self.dense_heads * self.kv_len + sparse) * ROW_BYTES

    @property
    def name(self) -> str:
        if self.dense_heads == KV_HEADS:
            return "all dense"
        return f"{self.dense_heads}/{KV_HEADS} dense, {self.sparse_tokens:,} tokens"


class Layer:
    """One layer's random KV, as pages and as torch takes it, and block lists over it."""

    def __init__(self, kv_len: int, block_tokens: int, seed: int) -> None:
        self.kv_len, self.block_tokens = kv_len, block_tokens
        self.rng = np.random.default_rng(seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        self.pages = Pages(KV_HEADS, kv_len, generator)
        self.keys, self.values = self.pages.keys_and_values()[:, None]
        shape = (1, QO_HEADS * HEAD_DIM)
        self.query = torch.randn(shape, generator=generator, dtype=DTYPE, device="cuda")

    def lists(self, case: Case) -> tuple[Tensor, Tensor]:
        """block_indices and block_counts of `hybrid_attention`."""
        num_blocks = self.kv_len // self.block_tokens
        count = min(case.sparse_tokens, self.kv_len) // self.block_tokens
        blocks = [np.sort(self.rng.permutation(num_blocks)[:count]) for _ in range(KV_HEADS)]
        counts = [DENSE] * case.dense_heads + [count] * (KV_HEADS - case.dense_heads)
        return (
            torch.from_numpy(np.stack(blocks)).int()[None].cuda(),
            torch.tensor([counts], dtype=torch.int32, device="cuda"),
        )

    def expected(self, indices: Tensor, counts: Tensor) -> Tensor:
        """float64 [num_qo_heads * head_dim]."""
        outputs = []
        for kv_head, count in enumerate(counts[0].tolist()):
            q = self.query.view(KV_HEADS, GROUP_SIZE, HEAD_DIM)[kv_head].double()
            tokens = torch.arange(self.kv_len, device="cuda")
            if count != DENSE:
                listed = indices[0, kv_head, :count]
                tokens = tokens[torch.isin(tokens // self.block_tokens, listed)]
            keys, values = (x[0, kv_head, tokens].double() for x in (self.keys, self.values))
            outputs.append((q @ keys.T * SM_SCALE).softmax(-1) @ values)
        return torch.stack(outputs).flatten()


def main(arguments: list[str] | None = None) -> int:
    parser = script_options(__doc__, "gpu-hybrid")
    parser.add_argument("--kv-lens", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--dense-heads", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--sparse-tokens", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--per-sm", nargs="+", type=int, default=[2], help="programs")
    launch_option(parser, "--launch", HybridLaunch)
    parser.add_argument("--profile", action="store_true", help="also print the kernels' times")
    options = parser.parse_args(arguments)
    for kv_len in options.kv_lens:
        if kv_len % PAGE_TOKENS or kv_len % options.block_tokens:
            parser.error(f"--kv-lens must be multiples of {PAGE_TOKENS} and blocks, got {kv_len}")
    require_gpu()
    run = Run(options)
    rows: list[Row] = []
    wrong: list[str] = []
    with torch.inference_mode():
        for kv_len in options.kv_lens:
            rows += measure(kv_len, options, wrong)
    print(gpu_hybrid_table(run.write(run.named("block_tokens", "rounds"), rows)))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def measure(kv_len: int, options: argparse.Namespace, wrong: list[str]) -> list[Row]:
    """Rows of all cases and launches at one length; torch's first. Adds to `wrong`."""
    cases = [
        Case(kv_len, *sizes)
        for sizes in itertools.product(options.dense_heads, options.sparse_tokens)
    ]
    cases.append(Case(kv_len, KV_HEADS, kv_len))
    least_bytes = min(case.num_bytes for case in cases)
    num_layers = min(12, max(4, -(-COLD_BYTES // least_bytes)))
    layers = [Layer(kv_len, options.block_tokens, seed) for seed in range(num_layers)]
    rows = [
        row_of(cases[-1], f"torch, {name}", microseconds)
        for name, microseconds in torch_times(layers, options.rounds).items()
    ]
    fastest_torch = _mark_fastest(rows)
    for case in cases:
        of_case = []
        for per_sm, launch in itertools.product(
            options.per_sm, launches(HybridLaunch(), options.launch)
        ):
            measured = measure_launch(layers, case, per_sm, launch, options, wrong)
            if measured is not None:
                measured["torch_ratio"] = fastest_torch / measured["microseconds"]
                of_case.append(measured)
        _mark_fastest(of_case)
        rows += of_case
    return rows


def measure_launch(
    layers: list[Layer],
    case: Case,
    per_sm: int,
    launch: HybridLaunch,
    options: argparse.Namespace,
    wrong: list[str],
) -> Row | None:
    """One launch's row; None if the GPU has no room for it, or its output is wrong."""
    from triton.runtime.errors import TritonError

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    what = f"{case.kv_len} tokens, {case.name}, {per_sm} per SM, {launch}"
    try:
        calls = hybrid_calls(layers, case, per_sm * multiprocessors, launch)
        (call, out, lists), runs = calls[0], [call for call, *_ in calls]
        call()
        error = checked_error("the output", out[0], layers[0].expected(*lists))
        microseconds = graph_microseconds(runs, rounds=options.rounds)
    except TritonError as problem:  # shared memory or registers
        print(f"{what}: {str(problem)[:90]}", flush=True)
        return None
    except ArithmeticError as problem:
        wrong.append(f"{what}: {problem}")
        print("WRONG", wrong[-1], flush=True)
        return None
    print(f"{what}: {microseconds:.2f} us", flush=True)
    if options.profile:
        print_kernels(runs)
    row = row_of(case, "offload", microseconds)
    of_launch = {"per_multiprocessor": per_sm, "launch": asdict(launch)}
    return row | of_launch | {"relative_error": error}


def row_of(case: Case, engine: str, microseconds: float) -> Row:
    """A line of the results."""
    return {
        "kv_len": case.kv_len,
        "case": case.name,
        "engine": engine,
        "microseconds": microseconds,
        "gigabytes_per_second": case.num_bytes / microseconds / 1e3,
    }


def _mark_fastest(rows: list[Row]) -> float:
    """Say of each row whether it is the fastest; its microseconds."""
    least = min((row["microseconds"] for row in rows), default=float("nan"))
    for row in rows:
        row["fastest"] = row["microseconds"] == least
    return least


def hybrid_calls(
    layers: list[Layer], case: Case, num_programs: int, launch: HybridLaunch
) -> list[tuple[Callable[[], object], Tensor, tuple[Tensor, Tensor]]]:
    """Of each layer (call, its output, its lists)."""
    slots = num_programs + KV_HEADS
    partial_out = torch.empty(slots, GROUP_SIZE, HEAD_DIM, device="cuda")
    partial_lse = torch.empty(slots, GROUP_SIZE, device="cuda")
    position = torch.tensor([case.kv_len - 1], device="cuda")
    calls: list[tuple[Callable[[], object], Tensor, tuple[Tensor, Tensor]]] = []
    for layer in layers:
        lists, out = layer.lists(case), torch.full_like(layer.query, float("nan"))
        call = partial(
            hybrid_attention,
            layer.query,
            layer.pages.table,
            position,
            *lists,
            num_kv_heads=KV_HEADS,
            page_tokens=PAGE_TOKENS,
            block_tokens=layer.block_tokens,
            sm_scale=SM_SCALE,
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=out,
            launch=launch,
        )
        calls.append((call, out, lists))
    return calls


def torch_times(layers: list[Layer], rounds: int) -> dict[str, float]:
    """Microseconds of attention of all heads to everything, by what torch has for it."""

    def gqa(layer: Layer) -> Tensor:
        q = layer.query.view(1, QO_HEADS, 1, HEAD_DIM)
        return scaled_dot_product_attention(q, layer.keys, layer.values, enable_gqa=True)

    def group_as_queries(layer: Layer) -> Tensor:
        q = layer.query.view(1, KV_HEADS, GROUP_SIZE, HEAD_DIM)
        return scaled_dot_product_attention(q, layer.keys, layer.values)

    # With keys and values repeated for every query head, before the time is taken.
    repeated = [x.repeat_interleave(GROUP_SIZE, 1) for x in (layers[0].keys, layers[0].values)]

    def expanded(layer: Layer) -> Tensor:
        q = layer.query.view(1, QO_HEADS, 1, HEAD_DIM)
        return scaled_dot_product_attention(q, *repeated)

    every: list[SDPBackend] = [x for x in SDPBackend.__members__.values() if x != SDPBackend.ERROR]
    backends: dict[str, list[SDPBackend]] = {
        "as chosen": every,
        "FLASH": [SDPBackend.FLASH_ATTENTION],
        "cuDNN": [SDPBackend.CUDNN_ATTENTION],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    }
    functions = [*itertools.product(backends, (gqa, group_as_queries)), ("as chosen", expanded)]
    found = {}
    for backend, function in functions:
        name = f"{function.__name__}, {backend}"
        try:
            with sdpa_kernel(backends[backend]):
                calls = [partial(function, layer) for layer in layers]
                found[name] = graph_microseconds(calls, rounds=rounds)
        except RuntimeError as error:
            print(f"torch, {name}: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        print(f"torch, {name}: {found[name]:.2f} us", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
