"""Retrieval heads on the GPU: attention over all tokens, and the list of the most important ones.

`python -m perf.bench_heads --output DIR --commit HASH` on a machine with a GPU, a minute or two.
Llama-3.1-8B's shapes in bfloat16, one row. Bytes are those of the keys and values; every launch
reads such as no cache holds. Their share is of what a plain read or copy reaches in the same run.
`--launch` and `--top-k-launch` also try other launches, best first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gpu_ops.paged_attention import SplitLaunch, num_retrieval_splits, retrieval_attention
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_tokens import top_k_tokens
from offload.bench.decode.models import synchronize
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
    memory_bandwidths,
    print_kernels,
    require_gpu,
)
from perf.results_file import Run, script_options
from perf.tables.placement_tables import gpu_retrieval_table

RULES: dict[str, dict[str, Any]] = {
    "top-p alone": {"top_p": 0.5},
    "threshold alone": {"threshold": 2e-5},
}
VARIANTS = (
    *("attention", "attention, scores", "attention, top-k", "top-k alone", "top-k shared"),
    *RULES,
)
LAUNCHES, ROUNDS = 20, 15
_SINK_TOKENS, _RECENT_TOKENS = 16, 64


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = script_options(__doc__, "gpu-retrieval")
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--budget-tokens", type=int, default=2048)
    parser.add_argument("--spread", type=float, default=2.0, help="of the scores, nats")
    parser.add_argument("--per-sm", type=int, nargs="+", default=[2], help="programs, of --launch")
    launch_option(parser, "--launch", SplitLaunch)
    launch_option(parser, "--top-k-launch", TopKLaunch)
    parser.add_argument("--profile", action="store_true", help="also print the kernels' times")
    options = parser.parse_args(arguments)
    for num_heads in options.heads:
        if not 1 <= num_heads <= KV_HEADS:
            parser.error(f"--heads must be in 1..{KV_HEADS}, got {num_heads}")
    require_gpu()
    run = Run(options)
    bandwidths = memory_bandwidths()
    for name, bandwidth in bandwidths.items():
        run.say(f"memory bandwidth, {name}: {bandwidth:.0f} GB/s")
    rows, sweeps = [], []
    for tokens, num_heads in product(options.tokens, options.heads):
        case = HeadsCase(
            num_heads, tokens, options.budget_tokens, spread=options.spread, device="cuda"
        )
        case.check()
        for variant in VARIANTS:
            rows.append(result(case, variant, microseconds(partial(case.run, variant))))
            run.say(f"{tokens:,} tokens, {num_heads} heads, {variant}: {_time(rows[-1])}")
        if options.profile:
            print_kernels([partial(case.run, "attention, top-k", i) for i in range(LAUNCHES)])
        found = sweep(case, options)
        for row in found[:8]:
            run.say(f"{row['variant']} {row['launch']}: {_time(row)}")
        sweeps += found
        del case
        torch.cuda.empty_cache()
    for row in rows:
        speed = row["gigabytes_per_second"]
        row["bandwidth_share"] = speed and speed / max(bandwidths.values())
    settings = {
        "rounds": ROUNDS,
        "launches": LAUNCHES,
        "bandwidth_gigabytes_per_second": bandwidths,
        **run.named("budget_tokens", "spread"),
    }
    print(gpu_retrieval_table(run.write(settings, rows + sweeps)))
    return 0


def microseconds(run: Callable[[int], object]) -> float:
    """Of a launch, over copies 0, 1, ... in turn."""
    return graph_microseconds([partial(run, copy) for copy in range(LAUNCHES)], rounds=ROUNDS)


def result(case: HeadsCase, variant: str, time: float) -> dict[str, Any]:
    """A row; top-k alone reads no keys, and has no bandwidth."""
    return {
        "heads": case.num_heads,
        "tokens": case.tokens,
        "variant": variant,
        "microseconds": time,
        "gigabytes_per_second": (
            case.num_bytes / time / 1e3 if variant.startswith("attention") else None
        ),
    }


def _time(row: dict[str, Any]) -> str:
    return f"{row['microseconds']:.2f} us"


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
        self.num_bytes = num_heads * tokens * ROW_BYTES
        if copies is None:
            copies = min(LAUNCHES, max(2, -(-COLD_BYTES // self.num_bytes)))
        generator = torch.Generator(self.device).manual_seed(0)
        self.copies = [Pages(num_heads, tokens, generator) for _ in range(copies)]
        self.query = torch.empty(1, QO_HEADS * HEAD_DIM, dtype=DTYPE, device=self.device)
        self.query.normal_(std=spread, generator=generator)
        self.positions = torch.tensor([tokens - 1], device=self.device)
        first = KV_HEADS - num_heads
        self.heads = torch.arange(first, KV_HEADS, dtype=torch.int32, device=self.device)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.out, self.lse = empty(1, QO_HEADS * HEAD_DIM), empty(1, QO_HEADS)
        max_tokens = self.copies[0].table.shape[1] * PAGE_TOKENS
        self.scores = empty(1, num_heads, GROUP_SIZE, max_tokens)
        self.lists, self.host_lists = {}, {}
        for shared in (False, True):
            count = 1 if shared else KV_HEADS
            self.lists[shared] = lists = (
                empty(1, count, budget_tokens, dtype=torch.int32),
                empty(1, count, dtype=torch.int32),
            )
            self.host_lists[shared] = tuple(
                torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in lists
            )
        self.buffers = self.top_k_buffers()
        self.partial_state = self.scratch(2)

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
        partial = torch.empty(1, QO_HEADS, splits, HEAD_DIM, device=self.device)
        return partial, partial[..., 0].contiguous()

    def attend(
        self,
        copy: int,
        *,
        with_scores: bool = True,
        partial_state: tuple[Tensor, Tensor] | None = None,
        launch: SplitLaunch | None = None,
    ) -> None:
        """Attention over one of the copies."""
        partial_out, partial_lse = partial_state or self.partial_state
        retrieval_attention(
            self.query,
            self.copies[copy % len(self.copies)].table,
            self.positions,
            self.heads,
            group_size=GROUP_SIZE,
            page_tokens=PAGE_TOKENS,
            sm_scale=SM_SCALE,
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=self.out,
            lse=self.lse,
            scores=self.scores if with_scores else None,
            launch=launch,
        )

    def top_k(
        self, *, shared: bool = False, buffers: TopKBuffers | None = None, **rule: float
    ) -> None:
        """The lists, of the scores that are there; `rule` ends them sooner."""
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
            **rule,
        )

    def run(self, variant: str, copy: int) -> None:
        """One launch of a variant."""
        if variant.startswith("attention"):
            self.attend(copy, with_scores=variant != "attention")
        if variant in ("attention, top-k", "top-k alone"):
            self.top_k()
        if variant == "top-k shared":
            self.top_k(shared=True)
        if variant in RULES:
            self.top_k(**RULES[variant])

    def check(self) -> None:
        """Compare with float64, head by head.

        Raises:
            ArithmeticError: for a wrong output, lse or list.
        """
        self.attend(0)
        self.top_k()
        self.top_k(shared=True)
        synchronize(self.device)
        total = torch.zeros(self.tokens, dtype=torch.float64, device=self.device)
        out, lse = self.out.view(KV_HEADS, -1), self.lse.view(KV_HEADS, -1)
        query = self.query.view(KV_HEADS, GROUP_SIZE, HEAD_DIM).double()
        kv = self.copies[0].keys_and_values()
        for i, head in enumerate(self.heads.tolist()):
            keys, values = kv[:, i].double()
            scores = query[head] @ keys.T * SM_SCALE
            weights = scores.softmax(-1)
            checked_error("out", out[head], (weights @ values).flatten())
            checked_error("lse", lse[head], scores.logsumexp(-1), 1e-5)
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


def sweep(case: HeadsCase, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of other launches, the fastest first; what does not fit the GPU is left out."""
    from triton.runtime.errors import OutOfResources

    rows = []
    for what, launch, run in other_launches(case, options):
        try:
            time = microseconds(run)
        except OutOfResources as error:
            print(f"  {what} {launch}: {error}", flush=True)
            continue
        row = {"heads": case.num_heads, "tokens": case.tokens, "variant": f"sweep {what}"}
        rows.append(row | {"launch": launch, "microseconds": time})
    return sorted(rows, key=lambda row: (row["variant"], row["microseconds"]))


def other_launches(
    case: HeadsCase, options: argparse.Namespace
) -> Iterator[tuple[str, str, Callable[[int], object]]]:
    """(attention or top_k, what it is, a launch of it) of all that the options name."""
    if options.launch:
        split = SplitLaunch.default(HEAD_DIM, DTYPE.itemsize)
        for programs, launch in product(options.per_sm, launches(split, options.launch)):
            scratch = case.scratch(programs)
            attend = partial(case.attend, partial_state=scratch, launch=launch)
            yield "attention", f"{programs} per SM, {launch}", attend
    if options.top_k_launch:
        case.attend(0)  # the scores
        default = TopKLaunch.default(case.budget_tokens)
        for top_k_launch in launches(default, options.top_k_launch):
            yield "top_k", str(top_k_launch), _top_k_with(case, case.top_k_buffers(top_k_launch))


def _top_k_with(case: HeadsCase, buffers: TopKBuffers) -> Callable[[int], object]:
    return lambda _: case.top_k(buffers=buffers)


if __name__ == "__main__":
    sys.exit(main())
