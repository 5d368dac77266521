"""Decode attention of every policy by context and threads: `python -m perf.bench_latency`.

Structured keys of Llama-3.1-8B shapes; see `offload bench latency`. LFPS also runs with larger
alphas, which leave about as many candidates at 128K as 0.2 does at 8K, for the row that compares
its bookkeeping at equal candidate counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from tqdm import tqdm

from offload.benchmarks.latency_run import LatencyRun, run_latency
from offload.memory import available_cpus
from offload.policies import Policy, available_policies, make_policy
from perf.results_file import start_machine, write_results

SHAPE = "llama-3.1-8b"
BUDGET_TOKENS = 1024
DEPTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# LFPS's candidates at 128K for alpha 0.2 are several times those at 8K: larger alphas leave fewer.
SELECTIVE_ALPHAS = (0.6, 1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, available_cpus()}))
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()

    machine = start_machine()
    policies: dict[str, Policy] = {}
    options: dict[str, dict[str, Any]] = {}
    for name in available_policies():
        options[name] = {"budget_tokens": BUDGET_TOKENS}
        if name == "full":
            options[name] = {}
        if name == "lfps":
            options[name]["alpha"] = 0.2
        policies[name] = make_policy(name, **options[name])
    if "lfps" in policies:
        for alpha in SELECTIVE_ALPHAS:
            name = f"lfps, alpha {alpha}"
            options[name] = {"budget_tokens": BUDGET_TOKENS, "alpha": alpha}
            policies[name] = make_policy("lfps", **options[name])
    start = time.monotonic()
    with tqdm(desc="latency", unit="step") as progress:

        def on_progress(what: str, done: int, total: int) -> None:
            progress.total = total
            progress.set_postfix_str(what, refresh=False)
            progress.update(done - progress.n)

        result = run_latency(
            LatencyRun(
                shape=SHAPE,
                model=None,
                depths=tuple(sorted(arguments.depths)),
                threads=tuple(sorted(arguments.threads)),
                policies=policies,
                options=options,
                batch_size=1,
                repeats=arguments.repeats,
                dtype=torch.bfloat16,
                seed=0,
            ),
            on_progress=on_progress,
        )
    for line in result.warnings:
        print(f"warning: {line}")
    settings = result.settings() | {
        "budget_tokens": BUDGET_TOKENS,
        "seconds": round(time.monotonic() - start),
    }
    print(write_results("latency", machine=machine, settings=settings, rows=result.rows()))


if __name__ == "__main__":
    main()
