"""The GPU pipeline and what it is compared with: `python -m perf.bench_gpu --only decode,peers`.

Parts can be chosen, because a lent machine is short of time: each writes its own results file as
soon as it is done, and parts of one call share the model and a run id. At 128K tokens with 16 cores
expect about a minute for the caches of each context, and 15 s for each of the peers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.bench.pipeline.session import BACKENDS, check_settings
from offload.bench.pipeline.settings import PipelineSettings
from offload.loading.gguf import EMBEDDED_MODEL
from offload.models.dtypes import DTYPES
from offload.models.shape import MODEL_SHAPES
from offload.policies.registry import available_policies, make_policy
from offload.system.memory import parse_size
from perf import gpu_heads, gpu_steps
from perf.gpu_smollm2 import compare_devices
from perf.results_file import start_machine, write_results

BUDGET_TOKENS = 1024
LFPS_ALPHA = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; 1 if one failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", flush=True)

    machine = start_machine() | _gpu_machine(options.commit)
    policies = [_policy(name) for name in options.policies]
    settings = PipelineSettings(
        shape=options.shape,
        kv_len=options.kv_lens[0],
        policy=policies[0],
        backend=options.backend,
        num_threads=options.threads,
        dtype=DTYPES[options.dtype],
        seed=options.seed,
    )
    try:
        check_settings(settings)
    except NotImplementedError as error:  # no GPU: one line, before a traceback of every part
        parser.error(str(error))
    bench = gpu_steps.GPUBench(
        settings=settings,
        policies=policies,
        kv_lens=options.kv_lens,
        num_steps=options.steps,
        repeats=options.repeats,
        say=say,
    )
    shared = {
        "run": f"{machine['date']}-{os.getpid()}-{int(time.time())}",
        "shape": options.shape,
        "dtype": options.dtype,
        "backend": options.backend,
        "threads": options.threads,
        "budget_tokens": BUDGET_TOKENS,
        "lfps_alpha": LFPS_ALPHA,
        "steps": options.steps,
        "repeats": options.repeats,
    }
    failed = []
    for part in options.only:
        say(f"== {part}")
        part_started = time.monotonic()
        run, of_part = _parts(bench, options)[part]
        try:
            rows = run()
        except Exception:  # the other parts are not lost with it
            traceback.print_exc()
            failed.append(part)
            continue
        finally:
            bench.release()
        seconds = round(time.monotonic() - part_started, 1)
        path = write_results(
            f"{options.name}-{part}",
            machine=machine,
            settings=shared | of_part | {"seconds": seconds},
            rows=rows,
            folder=options.output,
        )
        say(f"wrote {path} after {seconds} s")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _parts(
    bench: gpu_steps.GPUBench, options: argparse.Namespace
) -> dict[str, tuple[Callable[[], list[dict[str, Any]]], dict[str, Any]]]:
    """Of each part: what runs it, and its own settings."""
    cap = {"memory_cap_bytes": parse_size(options.memory_cap, name="--memory-cap")}
    of_batch = {
        "kv_len": options.batch_kv_len,
        "batch_size": options.batch_size,
        "distinct_layers": options.batch_distinct_layers,
        **cap,
    }
    of_prefill = {
        "lengths": options.prefill_lengths,
        "slice_tokens": options.prefill_slice_tokens,
        **cap,
    }
    of_handshake = {"kv_len": options.handshake_kv_len}
    of_heads = {"names": options.head_policies, "gathered": options.gathered_heads}
    of_smollm2 = {
        "model": options.smollm2,
        "context": options.smollm2_context,
        "new_tokens": options.smollm2_tokens,
        "dtype": options.smollm2_dtype,
    }
    device = {} if options.backend == "inline" else {"device": "cuda", "backend": options.backend}
    return {
        "decode": (lambda: gpu_steps.decode(bench), {"kv_lens": options.kv_lens}),
        "peers": (lambda: gpu_steps.peers(bench), {"kv_lens": options.kv_lens}),
        "prefill": (lambda: gpu_steps.prefill_rows(bench, **of_prefill), of_prefill),
        "batch": (lambda: gpu_steps.batch(bench, **of_batch), of_batch),
        "handshake": (lambda: gpu_steps.handshake(bench, **of_handshake), of_handshake),
        "heads": (
            lambda: gpu_heads.heads(bench, **of_heads),
            {"kv_lens": options.kv_lens, "budgets": gpu_heads.BUDGETS} | of_heads,
        ),
        "smollm2": (
            lambda: compare_devices(
                **of_smollm2,
                policies=options.smollm2_policies,
                num_threads=options.threads,
                device=device,
                say=bench.say,
            ),
            of_smollm2 | {"model": EMBEDDED_MODEL},
        ),
    }


PARTS = ("decode", "heads", "peers", "prefill", "batch", "handshake", "smollm2")


def _policy(name: str) -> Any:
    options: dict[str, Any] = {}
    if "budget_tokens" in type(make_policy(name)).option_names():
        options["budget_tokens"] = BUDGET_TOKENS
    if name == "lfps":
        options["alpha"] = LFPS_ALPHA
    return make_policy(name, **options)


def _gpu_machine(commit: str | None) -> dict[str, Any]:
    """What `start_machine` may not find: a lent machine has no repository, and no /proc entry."""
    found: dict[str, Any] = {}
    if commit is not None:
        found |= {"commit": commit, "uncommitted_changes": False}
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return found
    return found | {"nvidia_driver": done.stdout.splitlines()[0].strip()}


def _names(available: tuple[str, ...]) -> Callable[[str], list[str]]:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=_names(PARTS), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--backend", choices=list(BACKENDS), default=next(iter(BACKENDS)))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument(
        "--policies",
        type=_names(tuple(available_policies())),
        default=["lychee_cluster", "lfps"],
        help="that decode; prefill, batch and targets use the first",
    )
    parser.add_argument("--kv-lens", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--prefill-slice-tokens", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batch-kv-len", type=int, default=32768)
    parser.add_argument("--batch-distinct-layers", type=int, default=8)
    parser.add_argument(
        "--memory-cap", default="24GiB", help="of our prefill and of the part batch"
    )
    parser.add_argument("--handshake-kv-len", type=int, default=4096)
    parser.add_argument(
        "--head-policies", type=_names(tuple(gpu_heads.BUDGETS)), default=list(gpu_heads.BUDGETS)
    )
    parser.add_argument(
        "--gathered-heads",
        type=int,
        nargs="+",
        default=[-1, 0, 2, 4, 6, 8],
        help="of a layer, of part heads; -1: retrieving heads on the CPU, too",
    )
    parser.add_argument("--smollm2", default=EMBEDDED_MODEL, help="folder of the converted model")
    parser.add_argument(
        "--smollm2-policies",
        type=_names(tuple(available_policies())),
        default=list(available_policies()),
    )
    parser.add_argument("--smollm2-context", type=int, default=7168)
    parser.add_argument("--smollm2-tokens", type=int, default=64)
    parser.add_argument(
        "--smollm2-dtype",
        choices=list(DTYPES),
        default="float32",
        help="in bfloat16 GPU and CPU round a prompt otherwise, and near-ties part their tokens",
    )
    parser.add_argument("--name", default="gpu", help="of the results files: NAME-PART.json")
    parser.add_argument("--output", type=Path, help="their folder; default: perf/results")
    parser.add_argument("--commit", help="of this tree, where there is no repository")
    return parser


if __name__ == "__main__":
    sys.exit(main())
