"""Decode attention of one Llama-3.1-8B layer over 128K tokens: `python -m perf.bench_attention`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch
from tqdm import tqdm

from offload.bench.attention.measure import SHAPES, measure_attention
from offload.system.memory import available_cpus
from perf.results_file import start_machine, write_results

SHAPE = "llama-3.1-8b"
SPARSE_TOKENS = 2048
TOPK_SHARE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-len", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()

    machine = start_machine()
    with tqdm(desc="attention", unit="round") as progress:

        def on_progress(done: int, total: int) -> None:
            progress.total = total
            progress.update(done - progress.n)

        measurements = measure_attention(
            SHAPES[SHAPE],
            kv_len=arguments.kv_len,
            dtype=torch.bfloat16,
            threads=sorted({1, available_cpus()}),
            sparse_tokens=SPARSE_TOKENS,
            topk_share=TOPK_SHARE,
            repeats=arguments.repeats,
            on_progress=on_progress,
        )
    settings = {
        "shape": SHAPE,
        "kv_len": arguments.kv_len,
        "dtype": "bfloat16",
        "sparse_tokens": SPARSE_TOKENS,
        "topk_share": TOPK_SHARE,
        "repeats": arguments.repeats,
    }
    rows = [asdict(measurement) for measurement in measurements]
    print(write_results("attention", machine=machine, settings=settings, rows=rows))


if __name__ == "__main__":
    main()
