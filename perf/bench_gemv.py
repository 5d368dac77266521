"""One row through a model's linear layers on the GPU: our fused kernel against torch's product.

`python -m perf.bench_gemv` on a machine with a GPU. Bytes are those of the weights; every call
reads weights that no cache holds. torch's time is that of the bare product, without the norm, the
activation and the sum that ours includes. `--tune` also tries other launch shapes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gpu_ops.gemv import gemv, launch_shape
from perf.gpu_timing import COLD_BYTES, DTYPE, graph_microseconds, require_gpu
from perf.results_file import Run, script_options

# name -> (outputs, inputs, norm, glu, residual) of Llama-3.1-8B
LAYERS: dict[str, tuple[int, int, bool, bool, bool]] = {
    "qkv": (6144, 4096, True, False, False),
    "o_proj": (4096, 4096, False, False, True),
    "gate_up": (14336, 4096, True, True, False),
    "down": (4096, 14336, False, False, True),
    "lm_head": (128256, 4096, True, False, False),
}
VARIANTS = ((2, 512, 1), (4, 256, 1), (4, 512, 1), (4, 512, 2), (1, 1024, 1), (2, 2048, 4))
VARIANTS += ((8, 256, 2),)
_ROUNDS = 5


def main(arguments: list[str] | None = None) -> int:
    parser = script_options(__doc__, "gpu-gemv")
    parser.add_argument("--only", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args(arguments)
    require_gpu()
    run = Run(options)
    rows = [row for name in options.only for row in measure(name, tune=options.tune)]
    run.write({"rounds": _ROUNDS}, rows)
    return 0


def measure(name: str, *, tune: bool) -> list[dict[str, Any]]:
    """Rows of one layer: torch, ours, and other shapes of ours."""
    num_out, num_in, has_norm, glu, has_residual = LAYERS[name]
    weight_rows = num_out * (2 if glu else 1)
    num_bytes = weight_rows * num_in * DTYPE.itemsize

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device="cuda")

    copies = max(2, -(-COLD_BYTES // num_bytes))
    weights = [random(weight_rows, num_in) * num_in**-0.5 for _ in range(copies)]
    x, out = random(1, num_in), random(1, num_out)
    norm = (random(num_in), 1e-5) if has_norm else None
    residual = out if has_residual else None
    results = []

    def add(engine: str, launch: tuple[int, int, int] | None, run: Callable[[Any], Any]) -> None:
        calls = [functools.partial(run, weight) for weight in weights]
        microseconds = graph_microseconds(calls, rounds=_ROUNDS)
        speed = num_bytes / microseconds / 1e3
        print(f"{name:8} {engine:8} {launch or ''!s:>16} {microseconds:8.2f} us {speed:7.0f} GB/s")
        results.append(
            {
                "layer": name,
                "engine": engine,
                "launch": launch,
                "microseconds": microseconds,
                "gigabytes_per_second": speed,
            }
        )

    add("torch", None, lambda weight: functional.linear(x, weight))
    for launch in (launch_shape(num_in, DTYPE.itemsize, glu=glu), *(VARIANTS if tune else ())):
        ours = functools.partial(gemv, norm=norm, glu=glu, residual=residual, launch=launch)
        add("offload", launch, lambda weight, ours=ours: ours(x, weight, out))
    return results


if __name__ == "__main__":
    sys.exit(main())
