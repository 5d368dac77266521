"""Dense and block-sparse heads in one launch, against torch's attention over the same KV.

`python -m perf.bench_hybrid` on a machine with a GPU: one layer of Llama-3.1-8B's shape, batch 1,
bf16. Every call of a graph reads another layer's KV, so that no cache holds it. `--sweep` tries
launches, and prints the fastest of each case; the options name them one by one. Returns 1 if a
launch's output was wrong; it has no row then.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_ops.hybrid_attention import DENSE, HybridLaunch, hybrid_attention
from perf.gpu_timing import graph_microseconds, print_kernels, require_gpu
from perf.results_file import start_machine, write_results
from perf.tables.markdown import markdown_table

KV_HEADS, GROUP_SIZE, HEAD_DIM, PAGE_TOKENS = 8, 4, 128, 256
QO_HEADS = KV_HEADS * GROUP_SIZE
SM_SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
ROW_BYTES = 2 * HEAD_DIM * DTYPE.itemsize  # key and value of a token and head
_COLD_BYTES = 512 * 2**20  # read in turns; the L2 of an H200 holds 60 MB
_MAX_ERROR = 2e-2  # relative L2, against float64
EARLY = ("none", "merge", "both")
_SHARED_BYTES = 227 * 1024  # of a multiprocessor


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
        shape = (kv_len // PAGE_TOKENS, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
        self.pages = torch.randn(shape, generator=generator, dtype=DTYPE, device="cuda")
        kv = self.pages.permute(1, 2, 0, 3, 4).reshape(2, 1, KV_HEADS, kv_len, HEAD_DIM)
        self.keys, self.values = kv[0], kv[1]
        page_bytes = self.pages[0].numel() * DTYPE.itemsize
        order = self.rng.permutation(len(self.pages))
        # Pages in shuffled order; the tensors above are in the same one.
        self.pages = self.pages[torch.from_numpy(np.argsort(order)).cuda()]
        table = torch.from_numpy(self.pages.data_ptr() + order * page_bytes)
        self.table = table[None].cuda()
        self.query = torch.randn(
            1, QO_HEADS * HEAD_DIM, generator=generator, dtype=DTYPE, device="cuda"
        )

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-lens", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--dense-heads", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--sparse-tokens", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--no-all-dense", action="store_true", help="leave that case away")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiles", nargs="+", type=int, help="tokens of a tile")
    parser.add_argument("--per-sm", nargs="+", type=int, help="programs per multiprocessor")
    parser.add_argument("--stages", nargs="+", type=int)
    parser.add_argument("--warps", nargs="+", type=int)
    parser.add_argument("--segment-tiles", nargs="+", type=int)
    parser.add_argument("--early", nargs="+", choices=EARLY, help="kernels that are launched early")
    parser.add_argument("--prefetch", nargs="+", type=int, choices=(0, 1), help="prefetches")
    parser.add_argument(
        "--sweep", action="store_true", help="some of what is left open before this"
    )
    parser.add_argument("--no-torch", action="store_true", help="leave torch's functions away")
    parser.add_argument("--profile", action="store_true", help="also print each kernel's time")
    parser.add_argument("--name", default="gpu-hybrid")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    for kv_len in options.kv_lens:
        if kv_len % PAGE_TOKENS or kv_len % options.block_tokens:
            parser.error(f"--kv-lens must be multiples of {PAGE_TOKENS} and blocks, got {kv_len}")
    require_gpu()
    machine = start_machine(options.commit)
    rows, wrong = [], []
    with torch.inference_mode():
        for kv_len in options.kv_lens:
            rows += measure(kv_len, options, wrong)
    print_table(rows)
    settings = {"block_tokens": options.block_tokens, "rounds": options.rounds}
    write_results(
        options.name, machine=machine, settings=settings, rows=rows, folder=options.output
    )
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def measure(kv_len: int, options: argparse.Namespace, wrong: list[str]) -> list[dict[str, Any]]:
    """Rows of all cases and launches at one length; torch's first. Adds to `wrong`."""
    from triton.runtime.errors import TritonError

    cases = [
        Case(kv_len, dense_heads, sparse_tokens)
        for dense_heads in options.dense_heads
        for sparse_tokens in options.sparse_tokens
    ]
    cases += [] if options.no_all_dense else [Case(kv_len, KV_HEADS, kv_len)]
    least_bytes = min(case.num_bytes for case in cases)
    num_layers = min(12, max(4, -(-_COLD_BYTES // least_bytes)))
    layers = [Layer(kv_len, options.block_tokens, seed) for seed in range(num_layers)]
    rows: list[dict[str, Any]] = []
    torch_microseconds = None
    if not options.no_torch:
        found = torch_times(layers, options.rounds)
        name, torch_microseconds = min(found.items(), key=lambda item: item[1])
        rows += [
            {
                "kv_len": kv_len,
                "case": "all dense",
                "engine": f"torch, {engine}",
                "fastest": engine == name,
                "microseconds": microseconds,
                "gigabytes_per_second": KV_HEADS * kv_len * ROW_BYTES / microseconds / 1e3,
            }
            for engine, microseconds in found.items()
        ]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for case in cases:
        of_case = []
        for per_sm, launch in launches(options):
            num_programs = per_sm * multiprocessors
            try:
                calls = hybrid_calls(layers, case, num_programs, launch)
                error = check(layers[0], *calls[0])
                microseconds = graph_microseconds(
                    [call for call, *_ in calls], rounds=options.rounds
                )
            except TritonError as problem:  # shared memory or registers
                print(f"{case.name}, {launch}: {str(problem)[:90]}", flush=True)
                continue
            except ArithmeticError as problem:
                wrong.append(f"{kv_len} tokens, {case.name}, {per_sm} per SM, {launch}: {problem}")
                print("WRONG", wrong[-1], flush=True)
                continue
            of_case.append(
                {
                    "kv_len": kv_len,
                    "case": case.name,
                    "engine": "offload",
                    "per_multiprocessor": per_sm,
                    "launch": asdict(launch),
                    "microseconds": microseconds,
                    "gigabytes_per_second": case.num_bytes / microseconds / 1e3,
                    "torch_ratio": torch_microseconds and torch_microseconds / microseconds,
                    "relative_error": error,
                }
            )
            print(_line(of_case[-1]), flush=True)
            if options.profile:
                print_kernels(calls[0][0])
        fastest = min(of_case, key=lambda row: row["microseconds"], default=None)
        rows += [row | {"fastest": row is fastest} for row in of_case]
    return rows


def launches(options: argparse.Namespace) -> Iterator[tuple[int, HybridLaunch]]:
    """(programs per multiprocessor, launch) that the options ask for, if there is room for them."""
    default, sweep = HybridLaunch(), options.sweep
    chosen = [
        options.tiles or [default.tile_tokens],
        options.per_sm or ([2, 3] if sweep else [2]),
        options.stages or [default.num_stages],
        options.warps or [default.num_warps],
        options.segment_tiles or [default.segment_tiles],
        options.early or (["merge", "both"] if sweep else [_early_name(default)]),
        options.prefetch or ([0, 1] if sweep else [default.prefetches]),
    ]
    for tile, per_sm, stages, warps, segment_tiles, early, prefetch in itertools.product(*chosen):
        launch = replace(
            default,
            tile_tokens=tile,
            num_stages=stages,
            num_warps=warps,
            segment_tiles=segment_tiles,
            merges_early=early != "none",
            starts_early=early == "both",
            prefetches=bool(prefetch),
        )
        shared_bytes = (stages - 1) * min(tile or 32, options.block_tokens) * ROW_BYTES
        if shared_bytes * per_sm <= _SHARED_BYTES:
            yield per_sm, launch


def _early_name(launch: HybridLaunch) -> str:
    return EARLY[launch.merges_early + launch.starts_early]


def hybrid_calls(
    layers: list[Layer], case: Case, num_programs: int, launch: HybridLaunch
) -> list[tuple[Callable[[], None], Tensor, tuple[Tensor, Tensor]]]:
    """Of each layer (call, its output, its lists)."""
    slots = num_programs + KV_HEADS
    partial_out = torch.empty(slots, GROUP_SIZE, HEAD_DIM, device="cuda")
    partial_lse = torch.empty(slots, GROUP_SIZE, device="cuda")
    position = torch.tensor([case.kv_len - 1], device="cuda")
    calls = []
    for layer in layers:
        lists, out = layer.lists(case), torch.full_like(layer.query, float("nan"))

        def call(
            layer: Layer = layer, lists: tuple[Tensor, Tensor] = lists, out: Tensor = out
        ) -> None:
            hybrid_attention(
                layer.query,
                layer.table,
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


def check(
    layer: Layer, call: Callable[[], object], out: Tensor, lists: tuple[Tensor, Tensor]
) -> float:
    """The relative L2 error of a call; ArithmeticError if it is more than rounding."""
    call()
    expected = layer.expected(*lists)
    error = float((out[0].double() - expected).norm() / expected.norm())
    if not error <= _MAX_ERROR:
        raise ArithmeticError(f"the output is off by {error:.2g} (relative L2)")
    return error


def torch_times(layers: list[Layer], rounds: int) -> dict[str, float]:
    """Microseconds of attention of all heads to everything, by what torch has for it."""

    def gqa(layer: Layer) -> Tensor:
        q = layer.query.view(1, QO_HEADS, 1, HEAD_DIM)
        return scaled_dot_product_attention(q, layer.keys, layer.values, enable_gqa=True)

    def group_as_queries(layer: Layer) -> Tensor:
        q = layer.query.view(1, KV_HEADS, GROUP_SIZE, HEAD_DIM)
        return scaled_dot_product_attention(q, layer.keys, layer.values)

    found = {}
    backends = {
        "as chosen": list(SDPBackend.__members__.values()),
        "FLASH": [SDPBackend.FLASH_ATTENTION],
        "cuDNN": [SDPBackend.CUDNN_ATTENTION],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    }
    backends["as chosen"].remove(SDPBackend.ERROR)
    for backend, allowed in backends.items():
        for function in (gqa, group_as_queries):
            name = f"{function.__name__}, {backend}"
            try:
                with sdpa_kernel(allowed):
                    calls = [lambda layer=x, function=function: function(layer) for x in layers]
                    found[name] = graph_microseconds(calls, rounds=rounds)
            except RuntimeError as error:
                print(f"torch, {name}: {str(error).splitlines()[0][:90]}", flush=True)
                continue
            print(f"torch, {name}: {found[name]:.2f} us", flush=True)
    found["expanded, as chosen"] = _expanded_time(layers[0], rounds)
    print(f"torch, expanded, as chosen: {found['expanded, as chosen']:.2f} us", flush=True)
    return found


def _expanded_time(layer: Layer, rounds: int) -> float:
    """With keys and values repeated for every query head, before the time is taken."""
    keys, values = (x.repeat_interleave(GROUP_SIZE, 1) for x in (layer.keys, layer.values))
    q = layer.query.view(1, QO_HEADS, 1, HEAD_DIM)
    return graph_microseconds(
        [lambda: scaled_dot_product_attention(q, keys, values)] * 4, rounds=rounds
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """The fastest of each case."""
    lines = [
        [
            f"{row['kv_len']:,}",
            row["case"],
            row["engine"],
            f"{row['microseconds']:.2f}",
            f"{row['gigabytes_per_second']:,.0f}",
            f"{row['torch_ratio']:.2f}" if row.get("torch_ratio") else "",
            _launch_name(row),
        ]
        for row in rows
        if row["fastest"]
    ]
    header = ["tokens", "heads", "engine", "us", "GB/s", "times as fast as torch", "launch"]
    print(markdown_table(header, lines))


def _line(row: dict[str, Any]) -> str:
    ratio = f"{row['torch_ratio']:6.2f} x torch" if row["torch_ratio"] else ""
    return (
        f"{row['kv_len']:7} {row['case']:26} {row['microseconds']:8.2f} us"
        f" {row['gigabytes_per_second']:7.0f} GB/s {ratio} {_launch_name(row)}"
    )


def _launch_name(row: dict[str, Any]) -> str:
    if "launch" not in row:
        return ""
    named = ", ".join(f"{name} {value}" for name, value in row["launch"].items())
    return f"{row['per_multiprocessor']} per SM, {named}"


if __name__ == "__main__":
    sys.exit(main())
