"""A whole run of `offload bench latency`: workloads of every depth, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch

from offload.bench.latency.measure import LatencyMeasurement, measure_latency, steps_needed
from offload.bench.latency.report import latency_rows
from offload.bench.latency.workload import TextReader, structured_workload
from offload.measuring.synthetic.attention_statistics import (
    AttentionStatistics,
    statistics_outside_range,
)
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


@dataclass(frozen=True)
class LatencyRun:
    """What to measure: a `shape` on structured keys, or a `model` on real text.

    Attributes:
        options: of each policy, as they were given.
        dtype: of a shape's cache; a model has its own.
        max_layers: physical layers of a shape; 2 at least for policies that reuse selections.
    """

    shape: str | None
    model: str | None
    depths: tuple[int, ...]
    threads: tuple[int, ...]
    policies: Mapping[str, Policy]
    options: Mapping[str, Mapping[str, Any]]
    batch_size: int
    repeats: int
    dtype: torch.dtype
    seed: int
    max_layers: int = 4


@dataclass(frozen=True)
class LatencyResult:
    """Measurements; by depth the statistics of what they were made on and the physical layers;
    and `warnings` about statistics that are not like a real model's."""

    run: LatencyRun
    dtype: str
    measurements: list[LatencyMeasurement]
    statistics: dict[int, AttentionStatistics]
    layers: dict[int, int]
    warnings: list[str]

    def rows(self) -> list[dict[str, Any]]:
        """See `latency_rows`."""
        return latency_rows(self.measurements)

    def settings(self) -> dict[str, Any]:
        """What was measured on, as plain values."""
        run = self.run
        return {
            "shape": run.shape,
            "model": run.model,
            "dtype": self.dtype,
            "batch_size": run.batch_size,
            "repeats": run.repeats,
            "seed": run.seed,
            "layers": {str(depth): count for depth, count in self.layers.items()},
            "statistics": {str(depth): asdict(s) for depth, s in self.statistics.items()},
            "warnings": self.warnings,
        }

    def describe_statistics(self) -> str:
        """A line per depth."""
        return "\n".join(
            f"keys and queries at {depth:,}: sink {s.sink_share:.0%}, top 2 % hold "
            f"{s.group_top_mass:.0%}, last 64 {s.near_share:.0%}, top tokens kept after "
            f"1/8/32 steps {s.overlap_1:.0%}/{s.overlap_8:.0%}/{s.overlap_32:.0%}, clustered "
            f"{s.clustering:.0%}, LFPS candidates {s.lfps_candidates:.1%}"
            for depth, s in self.statistics.items()
        )


def run_latency(
    run: LatencyRun, *, on_progress: Callable[[str, int, int], None] = lambda *_: None
) -> LatencyResult:
    """Measure everything.

    Raises:
        ValueError: a depth that the budget covers, or that the model does not have.
        HostBudgetError: a depth that does not fit.
        ArithmeticError: an output that differs from the reference.
    """
    selecting = [p for p in run.policies.values() if p.selects]
    for policy in selecting:
        if run.depths[0] <= policy.dense_tokens:
            of, lower = f"budget of {policy.dense_tokens} tokens", "--budget-tokens"
            if policy.dense_until is not None:
                of, lower = f"dense_until={policy.dense_tokens}", "dense_until"
            raise ValueError(
                f"a depth of {run.depths[0]} tokens is within the {of} of {policy.name}, where it "
                f"is full attention; raise --context or lower {lower}"
            )
    reader = None if run.model is None else TextReader(run.model)
    shape = reader.shape if reader else SHAPES[run.shape or ""]
    layers = {
        depth: shape.num_layers if reader else _layers(shape, run, depth) for depth in run.depths
    }
    num_steps = steps_needed(run.repeats)
    made = sum(1 if reader else run.batch_size * layers[depth] for depth in run.depths)
    total = made + len(run.depths) * len(run.threads) * num_steps
    done = 0
    measurements: list[LatencyMeasurement] = []
    statistics: dict[int, AttentionStatistics] = {}
    warnings: list[str] = []

    def advance(what: str) -> Callable[[], None]:
        def step() -> None:
            nonlocal done
            done += 1
            on_progress(what, done, total)

        on_progress(what, done, total)
        return step

    for depth in run.depths:
        making = advance(f"{depth:,} tokens: keys")
        if reader is not None:
            workload = reader.workload(kv_len=depth, num_steps=num_steps, batch_size=run.batch_size)
            making()
        else:
            workload = structured_workload(
                shape,
                kv_len=depth,
                num_steps=num_steps,
                num_layers=layers[depth],
                batch_size=run.batch_size,
                dtype=run.dtype,
                seed=run.seed,
                on_layer=making,
            )
        with closing(workload.store):
            statistics[depth] = workload.statistics
            if reader is None:
                outside = statistics_outside_range(workload.statistics, depth)
                warnings += [f"at {depth:,} tokens {line}; times may mislead" for line in outside]
            measurements += measure_latency(
                workload,
                run.policies,
                options=run.options,
                threads=run.threads,
                repeats=run.repeats,
                on_step=advance(f"{depth:,} tokens: steps"),
            )
    dtype = str(reader.dtype if reader else run.dtype).removeprefix("torch.")
    return LatencyResult(run, dtype, measurements, statistics, layers, warnings)


def _layers(shape: ModelShape, run: LatencyRun, depth: int) -> int:
    """Physical layers: enough for every role, within the memory, one at least."""
    layer_bytes = 2 * shape.num_kv_heads * depth * shape.head_dim * run.dtype.itemsize
    fit = int(_MEMORY_SHARE * host_memory_limit_bytes()) // (layer_bytes * run.batch_size)
    return max(1, min(run.max_layers, shape.num_layers, fit))
