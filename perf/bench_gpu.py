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
from functools import partial
from typing import Any

from offload.bench.decode.engines import describe
from offload.loading.gguf import EMBEDDED_MODEL
from offload.models.dtypes import DTYPES
from offload.policies import Policy
from offload.policies.registry import available_policies, make_policy
from offload.system.memory import format_bytes, parse_size
from perf import gpu_steps
from perf.results_file import Run, script_options

BUDGET_TOKENS = 1024
PARTS = ("decode", "peers", "prefill", "batch", "handshake", "smollm2")
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; 1 if one failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    run = Run(options)
    policies = [_policy(name) for name in options.policies]
    settings = gpu_steps.model_settings(
        parser,
        options,
        kv_len=options.kv_lens[0],
        policy=policies[0],
        num_threads=options.threads,
        seed=options.seed,
        as_shipped=True,
        device_bytes=options.max_memory and parse_size(options.max_memory, name="--max-memory"),
    )
    bench = gpu_steps.GPUBench(settings, policies, options.steps, options.repeats, run.say)
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
                rows.append(row)
        except Exception:  # the other parts are not lost with it
            traceback.print_exc()
            failed.append(part)
            continue
        finally:
            bench.release()
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        named = {"model": EMBEDDED_MODEL} if part == "smollm2" else {}  # whatever folder it is in
        run.write(shared | of_part | named | seconds, rows, part=part)
    if failed:
        run.say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _parts(options: argparse.Namespace) -> dict[str, tuple[Callable[..., Iterator[Row]], Row]]:
    """Of each part: what measures it, and its own settings."""
    kv_lens = {"kv_lens": options.kv_lens}
    cap = {"memory_cap_bytes": parse_size(options.memory_cap, name="--memory-cap")}
    of_prefill = {"lengths": options.prefill_lengths, "slice_tokens": options.prefill_slice_tokens}
    of_batch = {
        "kv_len": options.batch_kv_len,
        "batch_size": options.batch_size,
        "distinct_layers": options.batch_distinct_layers,
    }
    of_smollm2 = {
        "model": options.smollm2,
        "context": options.smollm2_context,
        "new_tokens": options.smollm2_tokens,
        "dtype": options.smollm2_dtype,
    }
    return {
        "decode": (gpu_steps.decode, kv_lens),
        "peers": (gpu_steps.peers, kv_lens),
        "prefill": (gpu_steps.prefill_rows, of_prefill | cap),
        "batch": (gpu_steps.batch, of_batch | cap),
        "handshake": (gpu_steps.handshake, {"kv_len": options.handshake_kv_len}),
        "smollm2": (partial(gpu_steps.smollm2, policies=options.smollm2_policies), of_smollm2),
    }


def _line(row: Row) -> str:
    """About a row, for the log."""
    if "same_tokens" in row:
        return f"{row['policy']}: {row['same_tokens']} of {row['tokens']} are the CPU backend's"
    line = describe(row)
    if row.get("device_peak_bytes"):
        peak, held = row["device_peak_bytes"], row["device_reserved_bytes"]
        line += f", peak {format_bytes(peak)}, held {format_bytes(held)}"
    return line


def _policy(name: str) -> Policy:
    options: dict[str, Any] = {}
    if "budget_tokens" in type(make_policy(name)).option_names():
        options["budget_tokens"] = BUDGET_TOKENS
    return make_policy(name, **options)


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
        help="that decode; prefill and batch use the first",
    )
    add("--kv-lens", type=int, nargs="+", default=[4096, 32768, 131072])
    add("--steps", type=int, default=64)
    add("--repeats", type=int, default=2)
    add("--threads", type=int)
    add("--seed", type=int, default=0)
    add("--prefill-lengths", type=int, nargs="+", default=[32768, 131072])
    add("--prefill-slice-tokens", type=int, default=8192)
    add("--batch-size", type=int, default=8)
    add("--batch-kv-len", type=int, default=32768)
    add("--batch-distinct-layers", type=int, default=8)
    add("--max-memory", default="24GiB", help="of the GPU, for our decoding; '': all of it")
    add("--memory-cap", default="24GiB", help="of our prefill and of the part batch")
    add("--handshake-kv-len", type=int, default=4096)
    add("--smollm2", default=EMBEDDED_MODEL, help="folder of the converted model")
    add("--smollm2-policies", type=_names(policies), default=list(policies))
    add("--smollm2-context", type=int, default=7168)
    add("--smollm2-tokens", type=int, default=64)
    add(
        "--smollm2-dtype",
        choices=list(DTYPES),
        default="float32",
        help="in bfloat16 GPU and CPU round a prompt otherwise, and near-ties part their tokens",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
