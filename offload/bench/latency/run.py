"""A whole run of `offload bench latency`: workloads of every depth, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from offload.bench.latency.measure import Row, measure_latency, steps_needed
from offload.bench.latency.report import compared, relative_spread
from offload.bench.latency.workload import structured_workload
from offload.measuring.machine.other_load import LoadWatch, load_warnings
from offload.models.shape import MODEL_SHAPES, ModelShape
from offload.policies import Policy
from offload.system.memory import host_memory_limit_bytes

SHAPES = {
    **{name: MODEL_SHAPES[name] for name in ("llama-3.1-8b", "llama-3.2-1b")},
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 128, 18944, 152064, 32768, 1000000.0),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936, 40960, 1000000.0),
    "smollm2-135m": MODEL_SHAPES["smollm2-135m"],
}
_MEMORY_SHARE = 0.3  # of the memory left, that the cache may take


def run_latency(
    *,
    shape: str,
    depths: Sequence[int],
    threads: Sequence[int],
    policies: Mapping[str, Policy],
    batch_size: int,
    repeats: int,
    dtype: torch.dtype,
    seed: int,
    max_layers: int = 4,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[dict[str, Any], list[Row]]:
    """Measure a `shape` on structured keys.

    Args:
        depths, threads: in ascending order.
        max_layers: physical layers; 2 at least for policies that reuse selections.

    Returns:
        What was measured on, as plain values, and the rows of `compared`. By depth there are the
        physical layers; `warnings` tell of a machine that was busy.

    Raises:
        ValueError: a depth that the budget covers.
        HostBudgetError: a depth that does not fit.
        ArithmeticError: an output that differs from the reference.
    """
    selecting = [p for p in policies.values() if p.selects]
    for policy in selecting:
        if depths[0] <= policy.dense_tokens:
            of, lower = f"budget of {policy.dense_tokens} tokens", "--budget-tokens"
            if policy.dense_until is not None:
                of, lower = f"dense_until={policy.dense_tokens}", "dense_until"
            raise ValueError(
                f"a depth of {depths[0]} tokens is within the {of} of {policy.name}, where it "
                f"is full attention; raise --context or lower {lower}"
            )
    heads = SHAPES[shape]
    # Enough layers for every role, within the memory, one at least.
    most_bytes = int(_MEMORY_SHARE * host_memory_limit_bytes())
    token_bytes = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize * batch_size
    most = min(max_layers, heads.num_layers)
    layers = {depth: max(1, min(most, most_bytes // (token_bytes * depth))) for depth in depths}
    watch = LoadWatch()
    num_steps = steps_needed(repeats)
    total = batch_size * sum(layers.values()) + len(depths) * len(threads) * num_steps
    done = 0
    rows: list[Row] = []

    def advance(what: str) -> Callable[[], None]:
        def step() -> None:
            nonlocal done
            done += 1
            on_progress(what, done, total)

        on_progress(what, done, total)
        return step

    for depth in depths:
        workload = structured_workload(
            heads,
            policies,
            kv_len=depth,
            num_steps=num_steps,
            num_layers=layers[depth],
            batch_size=batch_size,
            dtype=dtype,
            seed=seed,
            on_layer=advance(f"{depth:,} tokens: keys"),
        )
        with closing(workload):
            rows += measure_latency(
                workload,
                threads=threads,
                repeats=repeats,
                on_step=advance(f"{depth:,} tokens: steps"),
            )
    spreads = [relative_spread(row) for row in rows]
    warnings = load_warnings(watch.seen(), float(np.median(spreads)) if repeats > 1 else 0.0)
    settings = {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "repeats": repeats,
        "seed": seed,
        "layers": {str(depth): count for depth, count in layers.items()},
        "warnings": warnings,
    }
    return settings, compared(rows)
