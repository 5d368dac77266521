"""Decode attention of every policy by context and threads: `python -m perf.bench_latency`.

Structured keys of Llama-3.1-8B shapes; see `offload bench latency`.
"""

from __future__ import annotations

import torch

from offload.bench.latency.run import run_latency
from offload.cli.bench.options import policy_grid
from offload.policies.registry import available_policies
from offload.system.memory import available_cpus
from perf.results_file import Run, progress_bar, script_options

SHAPE = "llama-3.1-8b"
BUDGET_TOKENS = 1024
DEPTHS = (4096, 8192, 16384, 32768, 65536, 131072)


def main() -> None:
    parser = script_options(__doc__, "latency")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, available_cpus()}))
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    run = Run(arguments)
    policies = policy_grid(available_policies(), [BUDGET_TOKENS], {}, option="--option")
    with progress_bar("latency", "part") as on_progress:
        found, rows = run_latency(
            shape=SHAPE,
            depths=sorted(arguments.depths),
            threads=sorted(arguments.threads),
            policies={policy.name: policy for policy in policies},
            batch_size=1,
            repeats=arguments.repeats,
            dtype=torch.bfloat16,
            seed=0,
            max_layers=2,
            on_progress=lambda _, done, total: on_progress(done, total),
        )
    for line in found["warnings"]:
        print(f"warning: {line}")
    settings = {"budget_tokens": BUDGET_TOKENS, "seconds": round(run.seconds)}
    run.write(found | settings, rows)


if __name__ == "__main__":
    main()
