"""Retrieval heads on the GPU: attention over all tokens, and the list of the most important ones.

`python -m perf.bench_heads --output DIR --commit HASH` on a machine with a GPU, a minute or two.
Llama-3.1-8B's shapes in bfloat16, one row. Bytes are those of the keys and values; every launch
reads such as no cache holds. Their share is of what a plain read or copy reaches in the same run.

`--sweep attention top_k` also tries other launch shapes, best first. `--profile` shows the kernels.
`--variants` and `--no-measure` leave rows away.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_ops.launch import has_triton
from gpu_ops.paged_attention import SplitLaunch, num_retrieval_splits, retrieval_attention
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_tokens import top_k_tokens
from perf.gpu_timing import LAUNCHES, ROUNDS, memory_bandwidths, microseconds
from perf.results_file import start_machine, write_results
from perf.tables.markdown import markdown_table

VARIANTS = ("attention", "attention, scores", "attention, top-k", "top-k alone", "top-k shared")
SWEEPS = ("attention", "top_k")
_NUM_KV_HEADS, _GROUP_SIZE, _HEAD_DIM, _PAGE_TOKENS = 8, 4, 128, 256
_SINK_TOKENS, _RECENT_TOKENS = 16, 64
_COLD_BYTES = 512 * 2**20  # of keys and values in turns; the L2 of an H200 holds 60 MB


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--budget-tokens", type=int, default=2048)
    parser.add_argument("--spread", type=float, default=2.0, help="of the scores, nats")
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=[])
    parser.add_argument("--programs", type=int, nargs="+", default=[2, 3], help="per SM")
    parser.add_argument("--tiles", type=int, nargs="+", default=[64, 128], help="tokens")
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048], help="tokens")
    parser.add_argument("--segments", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--segment-tiles", type=int, nargs="+", default=[4096], help="tokens")
    parser.add_argument("--top-k-warps", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--no-measure", action="store_true", help="only sweeps and profiles")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--name", default="gpu-retrieval")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    for num_heads in options.heads:
        if not 1 <= num_heads <= _NUM_KV_HEADS:
            parser.error(f"--heads must be in 1..{_NUM_KV_HEADS}, got {num_heads}")
    if not torch.cuda.is_available() or not has_triton:
        parser.error("bench_heads measures kernels on a CUDA GPU, and there is none here")
    machine = start_machine(options.commit)
    bandwidths = memory_bandwidths()
    for name, bandwidth in bandwidths.items():
        print(f"memory bandwidth, {name}: {bandwidth:.0f} GB/s", flush=True)
    best = max(bandwidths.values())
    rows, sweeps = [], []
    for tokens, num_heads in product(options.tokens, options.heads):
        case = HeadsCase(
            num_heads, tokens, options.budget_tokens, spread=options.spread, device="cuda"
        )
        if not options.no_measure:
            measured = measure(case, best, options.variants)
            print(table(measured), flush=True)
            rows += measured
        if options.profile:
            print(kernel_times(case))
        for sweep in options.sweep:
            found = list(sweep_launches(case, sweep, options))
            for row in found[:8]:
                print(f"  {sweep} {row['launch']}: {row['microseconds']:.2f} us", flush=True)
            sweeps += found
        del case
        torch.cuda.empty_cache()
    print(table(rows))
    path = write_results(
        options.name,
        machine=machine,
        settings={
            "rounds": ROUNDS,
            "launches": LAUNCHES,
            "budget_tokens": options.budget_tokens,
            "spread": options.spread,
            "bandwidth_gigabytes_per_second": bandwidths,
        },
        rows=rows + sweeps,
        folder=options.output,
    )
    print(path)
    return 0


class HeadsCase:
    """Operands of one layer with retrieval heads, in several copies of its keys and values.

    Args:
        num_heads: retrieval heads; the last KV heads of the model.
        tokens: of the row.
        spread: standard deviation of the scores, natural units.
        copies: None: as many as no cache holds.
    """

    def __init__(
        self,
        num_heads: int,
        tokens: int,
        budget_tokens: int,
        *,
        spread: float,
        device: str,
        copies: int | None = None,
    ) -> None:
        self.num_heads, self.tokens, self.budget_tokens = num_heads, tokens, budget_tokens
        self.device = torch.device(device)
        self.dtype = torch.bfloat16
        self.num_bytes = 2 * num_heads * tokens * _HEAD_DIM * self.dtype.itemsize
        if copies is None:
            copies = min(LAUNCHES, max(2, -(-_COLD_BYTES // self.num_bytes)))
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            x = torch.empty(shape, dtype=self.dtype, device=self.device)
            return x.normal_(generator=generator)

        num_pages = -(-tokens // _PAGE_TOKENS)
        self.pages = normal(copies, num_pages, 2, num_heads, _PAGE_TOKENS, _HEAD_DIM)
        # Pages in shuffled order, as after many sequences.
        self.order = [torch.randperm(num_pages) for _ in range(copies)]
        page_bytes = self.pages[0, 0].numel() * self.dtype.itemsize
        self.tables = [
            (self.pages[i].data_ptr() + order * page_bytes)[None].to(self.device)
            for i, order in enumerate(self.order)
        ]
        self.num_qo_heads = _NUM_KV_HEADS * _GROUP_SIZE
        self.query = spread * normal(1, self.num_qo_heads * _HEAD_DIM)
        self.positions = torch.tensor([tokens - 1], device=self.device)
        first = _NUM_KV_HEADS - num_heads
        self.heads = torch.arange(first, _NUM_KV_HEADS, dtype=torch.int32, device=self.device)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.out, self.lse = empty(1, self.num_qo_heads * _HEAD_DIM), empty(1, self.num_qo_heads)
        self.scores = empty(1, num_heads, _GROUP_SIZE, num_pages * _PAGE_TOKENS)
        self.lists = {
            shared: (
                empty(1, 1 if shared else _NUM_KV_HEADS, budget_tokens, dtype=torch.int32),
                empty(1, 1 if shared else _NUM_KV_HEADS, dtype=torch.int32),
            )
            for shared in (False, True)
        }
        self.host_lists = {
            shared: tuple(torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in lists)
            for shared, lists in self.lists.items()
        }
        self.buffers = self.top_k_buffers()
        self.partial = self.scratch(2)

    def top_k_buffers(self, launch: TopKLaunch | None = None) -> TopKBuffers:
        """Scratch of `top_k`."""
        max_tokens = self.scores.shape[-1]
        return TopKBuffers.allocate(
            self.num_heads, max_tokens, self.budget_tokens, self.device, launch=launch
        )

    def scratch(self, per_multiprocessor: int) -> tuple[Tensor, Tensor]:
        """partial_out and partial_lse for so many programs per multiprocessor."""
        multiprocessors = 1
        if self.device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        splits = num_retrieval_splits(
            self.num_heads, multiprocessors, per_multiprocessor=per_multiprocessor
        )
        partial = torch.empty(1, self.num_qo_heads, splits, _HEAD_DIM, device=self.device)
        return partial, partial[..., 0].contiguous()

    def attend(
        self,
        copy: int,
        *,
        with_scores: bool = True,
        partial: tuple[Tensor, Tensor] | None = None,
        launch: SplitLaunch | None = None,
    ) -> None:
        """Attention over one of the copies."""
        partial_out, partial_lse = partial or self.partial
        retrieval_attention(
            self.query,
            self.tables[copy % len(self.tables)],
            self.positions,
            self.heads,
            group_size=_GROUP_SIZE,
            page_tokens=_PAGE_TOKENS,
            sm_scale=_HEAD_DIM**-0.5,
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=self.out,
            lse=self.lse,
            scores=self.scores if with_scores else None,
            launch=launch,
        )

    def top_k(self, *, shared: bool = False, buffers: TopKBuffers | None = None) -> None:
        """The lists, of the scores that are there."""
        selection, counts = self.lists[shared]
        host_selection, host_counts = self.host_lists[shared]
        top_k_tokens(
            self.scores,
            self.lse,
            self.positions,
            self.heads,
            sink_tokens=_SINK_TOKENS,
            recent_tokens=_RECENT_TOKENS,
            budget_tokens=self.budget_tokens,
            shared=shared,
            buffers=buffers or self.buffers,
            selection=selection,
            counts=counts,
            host_selection=host_selection,
            host_counts=host_counts,
        )

    def run(self, variant: str, copy: int) -> None:
        """One launch of a variant."""
        if variant.startswith("attention"):
            self.attend(copy, with_scores=variant != "attention")
        if variant in ("attention, top-k", "top-k alone"):
            self.top_k()
        if variant == "top-k shared":
            self.top_k(shared=True)

    def check(self) -> None:
        """Compare with float64, head by head.

        Raises:
            ArithmeticError: for a wrong output, lse or list.
        """
        self.attend(0)
        self.top_k()
        self.top_k(shared=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        total = torch.zeros(self.tokens, dtype=torch.float64, device=self.device)
        out, lse = self.out.view(_NUM_KV_HEADS, -1), self.lse.view(_NUM_KV_HEADS, -1)
        query = self.query.view(_NUM_KV_HEADS, _GROUP_SIZE, _HEAD_DIM).double()
        order = self.order[0].to(self.device)
        for i, head in enumerate(self.heads.tolist()):
            kv = self.pages[0, order, :, i].transpose(0, 1).reshape(2, -1, _HEAD_DIM)
            keys, values = kv[:, : self.tokens].double()
            scores = query[head] @ keys.T * _HEAD_DIM**-0.5
            weights = scores.softmax(-1)
            _compare("out", out[head], (weights @ values).flatten(), 2e-2)
            _compare("lse", lse[head], scores.logsumexp(-1), 1e-5)
            self._check_list(False, head, weights.sum(0))
            total += weights.sum(0)
        self._check_list(True, 0, total)

    def _check_list(self, shared: bool, list_idx: int, importance: Tensor) -> None:
        on_host, host_counts = self.host_lists[shared]
        count = int(host_counts[0, list_idx])
        tokens = on_host[0, list_idx, : max(count, 0)].long()
        if not torch.equal(tokens, self.lists[shared][0][0, list_idx, : len(tokens)].long().cpu()):
            raise ArithmeticError("the list on the host differs from that on the GPU")
        if count != min(self.tokens, self.budget_tokens) or bool((tokens.diff() <= 0).any()):
            raise ArithmeticError(f"a list is not of ascending tokens: {count} of them")
        if count == self.tokens:
            return
        ends = torch.arange(self.tokens)
        ends = torch.cat((ends[:_SINK_TOKENS], ends[self.tokens - _RECENT_TOKENS :]))
        if not torch.isin(ends, tokens).all():
            raise ArithmeticError("a list lacks sinks or recent tokens")
        chosen = torch.zeros(self.tokens, dtype=torch.bool)
        chosen[tokens] = True
        importance = importance.cpu()
        least = importance[tokens[_SINK_TOKENS:-_RECENT_TOKENS]].min()
        most = importance[~chosen].max()
        if least < most * (1 - 1e-4):
            raise ArithmeticError(f"a list has importance {least:.4g} and lacks {most:.4g}")


def measure(
    case: HeadsCase, bandwidth: float, variants: Sequence[str] = VARIANTS
) -> list[dict[str, Any]]:
    """A row of each variant, after a check of the results."""
    case.check()
    rows = []
    for variant in variants:
        us = microseconds(lambda copy, variant=variant: case.run(variant, copy))
        rows.append(result(case, variant, us, bandwidth))
    return rows


def result(case: HeadsCase, variant: str, us: float, bandwidth: float) -> dict[str, Any]:
    """A row; top-k alone reads no keys, and has no bandwidth."""
    speed = case.num_bytes / us / 1e3 if variant.startswith("attention") else None
    return {
        "heads": case.num_heads,
        "tokens": case.tokens,
        "variant": variant,
        "microseconds": us,
        "gigabytes_per_second": speed,
        "bandwidth_share": None if speed is None else speed / bandwidth,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, as Markdown."""
    lines = []
    for row in rows:
        speed, share = row["gigabytes_per_second"], row["bandwidth_share"]
        lines.append(
            [
                row["variant"],
                f"{row['tokens']:,}",
                str(row["heads"]),
                f"{row['microseconds']:.2f}",
                "" if speed is None else f"{speed:.0f}",
                "" if share is None else f"{share:.1%}",
            ]
        )
    return markdown_table(["variant", "tokens", "heads", "us", "GB/s", "of the memory's"], lines)


def sweep_launches(
    case: HeadsCase, sweep: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of other launch shapes, fastest first; what does not fit the GPU is left out."""
    from triton.runtime.errors import OutOfResources

    rows = []
    for launch, run in launches(case, sweep, options):
        try:
            us = microseconds(run)
        except OutOfResources as error:
            print(f"  {sweep} {launch}: {error}", flush=True)
            continue
        row = {"heads": case.num_heads, "tokens": case.tokens, "variant": f"sweep {sweep}"}
        rows.append(row | {"launch": launch, "microseconds": us})
    yield from sorted(rows, key=lambda row: row["microseconds"])


def launches(
    case: HeadsCase, sweep: str, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[int], None]]]:
    """(what it is, a launch of it) of every shape that the options name."""
    if sweep == "attention":
        for programs in options.programs:
            partial = case.scratch(programs)
            for shape in product(options.tiles, options.warps, options.stages):
                split = SplitLaunch(*shape)
                yield (
                    f"programs={programs} {split}",
                    lambda copy, split=split, partial=partial: case.attend(
                        copy, partial=partial, launch=split
                    ),
                )
        return
    chosen = TopKLaunch.default(case.budget_tokens)
    case.attend(0)  # the scores
    for chunk, segments, segment_tile, first, second in product(
        options.chunks,
        options.segments,
        options.segment_tiles,
        options.top_k_warps,
        options.top_k_warps,
    ):
        launch = TopKLaunch(
            chunk_tokens=chunk,
            max_groups=chosen.max_groups,
            segments=segments,
            segment_tile=segment_tile,
            tile=chosen.tile,
            num_warps=(chosen.num_warps[0], first, second),
        )
        buffers = case.top_k_buffers(launch)
        yield str(launch), lambda copy, buffers=buffers: case.top_k(buffers=buffers)


def kernel_times(case: HeadsCase) -> str:
    """Mean microseconds of each kernel by torch's profiler, which knows no gaps between them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for copy in range(LAUNCHES):
            case.run("attention, top-k", copy)
        torch.cuda.synchronize()
    return "\n".join(
        f"  {event.key:28} {event.device_time_total / event.count:8.2f} us"
        for event in profile.key_averages()
        if event.device_time_total
    )


def _compare(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((actual.double() - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise ArithmeticError(f"{name} is off by {error:.2g} (relative L2)")


if __name__ == "__main__":
    sys.exit(main())
