"""Codes of keys on the GPU: the tokens that score most, and making the codes in a prefill.

`python -m perf.bench_codes --output DIR --commit HASH` on a machine with a GPU, under a minute.
A layer of Llama-3.1-8B's shapes in bfloat16, one row; a list is of as many tokens as the sketch has
candidates. Every launch reads codes that no cache holds. Lists are checked against float64 first.
`--launch` and `--top-k-launch` also try other launches, best first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gpu_ops.code_scores import CodeLaunch, CodeQuery, code_page_bytes
from gpu_ops.early_launch import can_launch_early
from gpu_ops.launch import runs_kernel
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_codes import select_scored, top_k_codes
from gpu_ops.top_k_lists import TopKLists
from offload.bench.decode.models import synchronize
from offload.policies.sketch.codes import LEVELS, rotation
from offload.policies.sketch.codes_on_device import encode_keys, mean_keys
from offload.policies.sketch.policy import Sketch
from perf.gpu_timing import (
    COLD_BYTES,
    DTYPE,
    GROUP_SIZE,
    HEAD_DIM,
    KV_HEADS,
    PAGE_TOKENS,
    QO_HEADS,
    SM_SCALE,
    graph_microseconds,
    launch_option,
    launches,
    memory_bandwidths,
    print_kernels,
    require_gpu,
)
from perf.results_file import Run, script_options
from perf.tables.placement_tables import gpu_codes_table

LISTED, SELECTED, BUILT = "scores, top-k", "top-k alone", "codes of all keys"
LAUNCHES, ROUNDS = 20, 15


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = script_options(__doc__, "gpu-codes")
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    launch_option(parser, "--launch", CodeLaunch)
    launch_option(parser, "--top-k-launch", TopKLaunch)
    parser.add_argument("--profile", action="store_true", help="also print the kernels' times")
    options = parser.parse_args(arguments)
    for num_heads in options.heads:
        if not 1 <= num_heads <= KV_HEADS:
            parser.error(f"--heads must be in 1..{KV_HEADS}, got {num_heads}")
    require_gpu()
    run = Run(options)
    bandwidths = memory_bandwidths()
    rows, sweeps = [], []
    for tokens, num_heads, bits in product(options.tokens, options.heads, options.bits):
        case = CodesCase(num_heads, tokens, bits, device="cuda")
        case.check()
        for variant, measure in (
            (LISTED, microseconds),
            (SELECTED, microseconds),
            (BUILT, queued_microseconds),
        ):
            rows.append(case.row(variant, measure(partial(case.run, variant))))
            run.say(f"{tokens:,} tokens, {num_heads} heads, {bits} bits, {_time(rows[-1])}")
        if options.profile:
            print_kernels([partial(case.run, LISTED, i) for i in range(LAUNCHES)])
        found = sweep(case, options)
        for row in found[:8]:
            run.say(f"{row['launch']}: {_time(row)}")
        sweeps += found
        del case
        torch.cuda.empty_cache()
    settings = {
        "rounds": ROUNDS,
        "launches": LAUNCHES,
        "bandwidth_gigabytes_per_second": bandwidths,
        "budget_tokens": Sketch().budget_tokens,
        "candidate_ratio": Sketch().candidate_ratio,
    }
    print(gpu_codes_table(run.write(settings, rows + sweeps)))
    return 0


def microseconds(run: Callable[[int], object]) -> float:
    """Of a launch, over copies 0, 1, ... in turn."""
    return graph_microseconds([partial(run, copy) for copy in range(LAUNCHES)], rounds=ROUNDS)


def queued_microseconds(run: Callable[[int], object]) -> float:
    """Of a launch, queued as in a prefill: its copies from host memory cannot be captured."""
    run(0)
    make: Any = torch.cuda.Event
    start, end = make(enable_timing=True), make(enable_timing=True)
    start.record()
    for copy in range(LAUNCHES):
        run(copy)
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return 1e3 * milliseconds / LAUNCHES


def _time(row: dict[str, Any]) -> str:
    return f"{row['variant']}: {row['microseconds']:.2f} us"


def sweep(case: CodesCase, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of other launches, the fastest first; what does not fit the GPU is left out."""
    from triton.runtime.errors import OutOfResources

    if not options.launch and not options.top_k_launch:
        return []
    rows = []
    tried = product(
        launches(CodeLaunch.default(case.bits, HEAD_DIM, GROUP_SIZE), options.launch),
        launches(case.buffers.launch, options.top_k_launch),
    )
    for launch, top_k in tried:
        try:
            time = microseconds(partial(case.list_tokens, launch=launch, top_k=top_k))
        except OutOfResources as error:
            print(f"  {launch} {top_k}: {error}", flush=True)
            continue
        rows.append(case.row(f"sweep {LISTED}", time) | {"launch": f"{launch} {top_k}"})
    return sorted(rows, key=lambda row: row["microseconds"])


class CodesCase:
    """A layer's codes, random ones, in several copies, and a query.

    Args:
        num_heads: KV heads that have codes; the last of the model.
        copies: None: as many as no cache holds.
    """

    def __init__(
        self, num_heads: int, tokens: int, bits: int, *, device: str, copies: int | None = None
    ) -> None:
        self.num_heads, self.tokens, self.bits = num_heads, tokens, bits
        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(0)
        self.num_bytes = code_page_bytes(num_heads, tokens, HEAD_DIM, bits)
        if copies is None:
            copies = min(LAUNCHES, max(2, -(-COLD_BYTES // self.num_bytes)))
        num_pages, width = -(-tokens // PAGE_TOKENS), HEAD_DIM * bits // 8
        page_bytes = code_page_bytes(num_heads, PAGE_TOKENS, HEAD_DIM, bits)
        shape = (copies, num_pages, page_bytes)
        self.pages = torch.empty(shape, dtype=torch.uint8, device=self.device)
        self.pages.random_(generator=generator)
        split = num_heads * PAGE_TOKENS * width
        self._codes = self.pages[..., :split].view(*shape[:2], num_heads, PAGE_TOKENS, width)
        self._scales = self.pages[..., split:].view(torch.float32)
        self._scales.uniform_(0.5, 1.5, generator=generator)
        order = torch.stack([torch.randperm(num_pages) for _ in range(copies)]).to(self.device)
        self._order = order
        first = (
            self.pages.data_ptr()
            + torch.arange(copies, device=self.device) * num_pages * page_bytes
        )
        self.tables = (first[:, None] + order * page_bytes)[:, None].contiguous()

        def normal(*of: int, dtype: torch.dtype = torch.float32) -> Tensor:
            x = torch.empty(of, dtype=torch.float32, device=self.device)
            return x.normal_(generator=generator).to(dtype)

        self.query = normal(1, QO_HEADS * HEAD_DIM, dtype=DTYPE)
        self.means = normal(1, num_heads, HEAD_DIM)
        self.rotation = torch.from_numpy(rotation(HEAD_DIM)).to(self.device)
        self.positions = torch.tensor([tokens - 1], device=self.device)
        self.heads = torch.arange(
            KV_HEADS - num_heads, KV_HEADS, dtype=torch.int32, device=self.device
        )
        self.keys = normal(num_heads, tokens, HEAD_DIM, dtype=DTYPE)
        self.scratch = CodeQuery.allocate(
            1, num_heads, QO_HEADS, GROUP_SIZE, HEAD_DIM, bits, self.device
        )
        policy = Sketch()
        ends = policy.sink_tokens + policy.recent_tokens
        chosen = int(policy.candidate_ratio * (policy.budget_tokens - ends))
        budget = min(ends + chosen, tokens)
        self.lists = TopKLists(
            policy.sink_tokens,
            policy.recent_tokens,
            budget,
            torch.zeros(1, KV_HEADS, budget, dtype=torch.int32, device=self.device),
            torch.zeros(1, KV_HEADS, dtype=torch.int32, device=self.device),
        )
        pinned = [
            torch.zeros_like(x, device="cpu", pin_memory=x.is_cuda)
            for x in (self.lists.selection, self.lists.counts)
        ]
        self.lists = replace(self.lists, host_selection=pinned[0], host_counts=pinned[1])
        self.buffers = self._top_k_buffers(None)

    def _top_k_buffers(self, launch: TopKLaunch | None) -> TopKBuffers:
        max_tokens = self.tables.shape[-1] * PAGE_TOKENS
        return TopKBuffers.allocate(
            self.num_heads, max_tokens, self.lists.budget_tokens, self.device, launch=launch
        )

    def row(self, variant: str, time: float) -> dict[str, Any]:
        """Of the results; bytes are those of codes and scales."""
        return {
            "heads": self.num_heads,
            "tokens": self.tokens,
            "bits": self.bits,
            "variant": variant,
            "microseconds": time,
            "bytes": self.num_bytes,
        }

    def run(self, variant: str, copy: int) -> None:
        """One launch of a variant."""
        if variant == LISTED:
            self.list_tokens(copy)
        elif variant == BUILT:
            mean = mean_keys(self.keys)
            encode_keys(self.keys, mean, self.bits)
        elif runs_kernel(self.query):  # of the scores that are there
            select_scored(
                self.positions,
                self.heads,
                group_size=GROUP_SIZE,
                scratch=self.scratch,
                buffers=self.buffers,
                lists=self.lists,
                launch=CodeLaunch.default(self.bits, HEAD_DIM, GROUP_SIZE),
                early=can_launch_early(self.query),
            )

    def list_tokens(
        self, copy: int, *, launch: CodeLaunch | None = None, top_k: TopKLaunch | None = None
    ) -> None:
        """The lists of one of the copies."""
        if top_k is not None and top_k != self.buffers.launch:
            self.buffers = self._top_k_buffers(top_k)
        top_k_codes(
            self.query,
            self.rotation,
            self.means,
            self.tables[copy % len(self.tables)],
            self.positions,
            self.heads,
            group_size=GROUP_SIZE,
            bits=self.bits,
            page_tokens=PAGE_TOKENS,
            sm_scale=SM_SCALE,
            level=float(LEVELS[self.bits][-1]),
            scratch=self.scratch,
            buffers=self.buffers,
            lists=self.lists,
            launch=launch,
        )

    def check(self) -> None:
        """ArithmeticError unless the lists of the first copy are nearly those of float64."""
        self.list_tokens(0)
        synchronize(self.device)
        sinks, recent, budget = self.lists.sizes
        levels = torch.from_numpy(LEVELS[self.bits]).to(self.device).double()
        shifts = torch.arange(0, 8, self.bits, device=self.device, dtype=torch.uint8)
        query = self.query.view(KV_HEADS, GROUP_SIZE, HEAD_DIM).double() * SM_SCALE
        for i, head in enumerate(self.heads.tolist()):
            codes = self._codes[0, self._order[0], i].flatten(0, 1)[: self.tokens]
            of_page = self._scales[0, self._order[0]].view(-1, self.num_heads, PAGE_TOKENS)
            scales = of_page[:, i].flatten()[: self.tokens].double()
            keys = levels[(codes[..., None] >> shifts & (1 << self.bits) - 1).flatten(1).int()]
            products = query[head] @ self.rotation.double() @ keys.mT * scales
            scores = (products + (query[head] @ self.means[0, i].double())[:, None]).amax(0)
            self._check_list(head, scores[sinks : self.tokens - recent], sinks, budget)

    def _check_list(self, head: int, scores: Tensor, sinks: int, budget: int) -> None:
        on_host, count = self.lists.host_selection, int(self.lists.counts[0, head])
        assert on_host is not None
        tokens = on_host[0, head].long()
        if count != budget or not torch.equal(tokens, self.lists.selection[0, head].long().cpu()):
            raise ArithmeticError(f"a list has {count} tokens, or others on the host")
        k = budget - sinks - self.lists.recent_tokens
        if k == len(scores):
            return
        chosen = tokens[sinks : sinks + k].to(scores.device) - sinks
        kth, slack = scores.topk(k).values[-1], 0.05 * scores.std()
        if bool((chosen.diff() <= 0).any()) or bool(scores[chosen].min() < kth - slack):
            raise ArithmeticError(f"a list has {scores[chosen].min():.4g}, the {k}th is {kth:.4g}")


if __name__ == "__main__":
    sys.exit(main())
