"""Decode attention of one Llama-3.1-8B layer over 128K tokens: `python -m perf.bench_attention`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from offload.bench.attention.measure import SHAPES, measure_attention
from offload.system.memory import available_cpus
from perf.results_file import Run, progress_bar, script_options

SHAPE = "llama-3.1-8b"
SPARSE_TOKENS = 2048
TOPK_SHARE = 0.02


def main() -> None:
    parser = script_options(__doc__, "attention")
    parser.add_argument("--kv-len", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=30)
    run = Run(parser.parse_args())
    measured: dict[str, Any] = {"sparse_tokens": SPARSE_TOKENS, "topk_share": TOPK_SHARE}
    measured |= run.named("kv_len", "repeats")
    with progress_bar("attention", "round") as on_progress:
        measurements = measure_attention(
            SHAPES[SHAPE],
            dtype=torch.bfloat16,
            threads=sorted({1, available_cpus()}),
            on_progress=on_progress,
            **measured,
        )
    settings = {"shape": SHAPE, "dtype": "bfloat16", **measured}
    run.write(settings, [asdict(measurement) for measurement in measurements])


if __name__ == "__main__":
    main()
