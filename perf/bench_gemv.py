"""One row through a model's linear layers on the GPU: our fused kernel against torch's product.

`python -m perf.bench_gemv` on a machine with a GPU. Bytes are those of the weights; every call
reads weights that no cache holds. torch's time is that of the bare product, without the norm, the
activation and the sum that ours includes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gpu_ops.gemv import gemv, launch_shape
from perf.results_file import start_machine, write_results

# name -> (outputs, inputs, norm, glu, residual) of Llama-3.1-8B
LAYERS: dict[str, tuple[int, int, bool, bool, bool]] = {
    "qkv": (6144, 4096, True, False, False),
    "o_proj": (4096, 4096, False, False, True),
    "gate_up": (14336, 4096, True, True, False),
    "down": (4096, 14336, False, False, True),
    "lm_head": (128256, 4096, True, False, False),
}
VARIANTS = [
    (2, 512, 1),
    (4, 256, 1),
    (4, 512, 1),
    (4, 512, 2),
    (1, 1024, 1),
    (2, 2048, 4),
    (8, 256, 2),
]
_COLD_BYTES = 512 * 2**20  # of weights in turns; the L2 of an H200 holds 60 MB
_ROUNDS = 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--tune", action="store_true", help="also try other launch shapes")
    parser.add_argument("--name", default="gpu-gemv")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    machine = start_machine(options.commit)
    rows = [row for name in options.only for row in measure(name, tune=options.tune)]
    write_results(
        options.name,
        machine=machine,
        settings={"rounds": _ROUNDS},
        rows=rows,
        folder=options.output,
    )
    return 0


def measure(name: str, *, tune: bool) -> list[dict[str, Any]]:
    """Rows of one layer: torch, ours, and other shapes of ours."""
    num_out, num_in, has_norm, glu, has_residual = LAYERS[name]
    weight_rows = num_out * (2 if glu else 1)
    dtype, device = torch.bfloat16, "cuda"
    num_bytes = weight_rows * num_in * dtype.itemsize
    copies = max(2, -(-_COLD_BYTES // num_bytes))
    weights = [
        torch.randn(weight_rows, num_in, dtype=dtype, device=device) * num_in**-0.5
        for _ in range(copies)
    ]
    x = torch.randn(1, num_in, dtype=dtype, device=device)
    out = torch.randn(1, num_out, dtype=dtype, device=device)
    norm = (torch.randn(num_in, dtype=dtype, device=device), 1e-5) if has_norm else None
    residual = out if has_residual else None
    results = []

    def add(engine: str, launch: tuple[int, int, int] | None, run: Callable[[Any], Any]) -> None:
        microseconds = _microseconds(run, weights)
        share = num_bytes / microseconds / 1e3
        print(f"{name:8} {engine:8} {launch or ''!s:>16} {microseconds:8.2f} us {share:7.0f} GB/s")
        results.append(
            {
                "layer": name,
                "engine": engine,
                "launch": launch,
                "microseconds": microseconds,
                "gigabytes_per_second": share,
            }
        )

    add("torch", None, lambda weight: functional.linear(x, weight))
    chosen = launch_shape(num_in, dtype.itemsize, glu=glu)
    for launch in [chosen, *(VARIANTS if tune else [])]:
        add(
            "offload",
            launch,
            lambda weight, launch=launch: gemv(
                x, weight, out, norm=norm, glu=glu, residual=residual, launch=launch
            ),
        )
    return results


def _microseconds(run: Callable[[Any], Any], weights: list[torch.Tensor]) -> float:
    """Median time of a call, of calls captured one after the other."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    sys.exit(main())
