"""The GPU pipeline and what it is compared with: `python -m perf.bench_gpu --only decode,peers`.

Parts can be chosen, because a lent machine is short of time: each writes its own results file,
NAME-PART.json, as soon as it is done, and parts of one call share the model and a run id. At 128K
tokens with 16 cores expect about a minute for the caches of each context, and 15 s for each of the
peers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from offload.bench.decode.engines import describe
from offload.cli.bench.options import policy_grid
from offload.policies.registry import available_policies
from offload.system.memory import format_bytes, parse_size
from perf import gpu_steps
from perf.results_file import Run, script_options

BUDGET_TOKENS = 1024
PARTS = ("decode", "peers", "prefill")
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; 1 if one failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    run = Run(options)
    policies = policy_grid(options.policies, [BUDGET_TOKENS], {}, option="--policies")
    limit = options.max_memory and parse_size(options.max_memory, name="--max-memory")
    model = gpu_steps.random_model(
        parser,
        options,
        longest=max(options.kv_lens),
        seed=options.seed,
        num_threads=options.threads,
        max_memory={0: limit} if limit and options.backend != "inline" else {},
    )
    bench = gpu_steps.GPUBench(model, policies, options.steps, options.repeats)
    shared = {
        "run": f"{run.machine['date']}-{os.getpid()}-{int(time.time())}",
        "budget_tokens": BUDGET_TOKENS,
        **run.named("shape", "dtype", "backend", "threads", "steps", "repeats", "max_memory"),
    }
    failed = []
    parts = _parts(options)
    for part in options.only:
        run.say(f"== {part}")
        started = time.monotonic()
        measure, of_part = parts[part]
        rows = []
        try:
            for row in measure(bench, **of_part):
                run.say(_line(row))
                if row["milliseconds"] is not None:
                    rows.append(row)
        except Exception:  # the other parts are not lost with it
            traceback.print_exc()
            failed.append(part)
            continue
        finally:
            bench.release()
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        run.write(shared | of_part | seconds, rows, part=part)
    if failed:
        run.say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _parts(options: argparse.Namespace) -> dict[str, tuple[Callable[..., Iterator[Row]], Row]]:
    """What measures each part, and the part's own settings."""
    kv_lens = {"kv_lens": options.kv_lens}
    cap = {"memory_cap_bytes": parse_size(options.memory_cap, name="--memory-cap")}
    of_prefill = {"lengths": options.prefill_lengths, "slice_tokens": options.prefill_slice_tokens}
    return {
        "decode": (gpu_steps.decode, kv_lens),
        "peers": (gpu_steps.baselines, kv_lens),
        "prefill": (gpu_steps.prefill_rows, of_prefill | cap),
    }


def _line(row: Row) -> str:
    """About a row, for the log."""
    line = describe(row)
    if row.get("device_peak_bytes"):
        peak, held = row["device_peak_bytes"], row["device_reserved_bytes"]
        line += f", peak {format_bytes(peak)}, held {format_bytes(held)}"
    return line


def _names(available: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in available:
                raise argparse.ArgumentTypeError(
                    f"unknown {name!r}; available: {', '.join(available)}"
                )
        return names

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = script_options(__doc__, "gpu")
    add, policies = parser.add_argument, available_policies()
    add("--only", type=_names(PARTS), default=list(PARTS), help=", ".join(PARTS))
    gpu_steps.model_options(parser)
    add(
        "--policies",
        type=_names(policies),
        default=["lychee_cluster", "lfps", "tidal_decode"],
        help="that decode; prefill uses the first",
    )
    add("--kv-lens", type=int, nargs="+", default=[4096, 32768, 131072])
    add("--steps", type=int, default=64)
    add("--repeats", type=int, default=2)
    add("--threads", type=int)
    add("--seed", type=int, default=0)
    add("--prefill-lengths", type=int, nargs="+", default=[32768, 131072])
    add("--prefill-slice-tokens", type=int, default=8192)
    add("--max-memory", default="24GiB", help="of the GPU, for our decoding; '': all of it")
    add("--memory-cap", default="24GiB", help="of our prefill")
    return parser


if __name__ == "__main__":
    sys.exit(main())
