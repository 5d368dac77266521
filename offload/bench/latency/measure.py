"""Decode-step latency of the policies by context length and number of threads.

Every policy runs the same decode steps over the same sequences: the new token's keys and values
enter the store, and all layers attend in one native call, predictions included, as they do in a
model but for its linear layers. Policies take turns within a step, so that a slow minute of a
shared machine slows all of them. Before every turn the worker pool reads a buffer larger than the
last level cache: in a real model a token's weights and its other layers pass through the cache
between two visits of a layer, and rows left there by the step before would time the cache. These
reads are the yardstick "sequential read"; "row gather" reads as many rows as a budget of tokens
has, at random sorted places of the same buffer. Outputs are compared with an exact reference, on
the same selection: of the first and the last layer before anything is timed, and of the last one
after the first timed step. What selections keep is judged on real text, by `offload eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from cpu_ops.worker_pool import WorkerPool
from offload.bench.latency.plan import LayerPlan
from offload.bench.latency.workload import LatencyWorkload
from offload.bench.latency.yardstick import Yardstick
from offload.decode.attention import DecodeAttention
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.selection.policy import DENSE, RETRIEVE
from offload.system.torch_threads import torch_threads

PHASES = ("predict", "score", "select", "attend", "update")
WARMUP_STEPS = 2

Row = dict[str, Any]  # one policy at one context length on one number of threads


def measure_latency(
    workload: LatencyWorkload,
    *,
    threads: Sequence[int],
    repeats: int,
    on_step: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Measure the workload's policies on every number of threads.

    Times are per token and layer. A row has

        policy, options, kv_len, num_threads, batch_size
        microseconds: median over the steps; _p10 and _p90 are percentiles, _mean the mean, which
            shows what a policy does in some steps only, and what disturbed the machine.
        phases: microseconds of each of PHASES, the mean over the workers' clocks; `other` is the
            rest of the median: starting the pool, waiting for the slowest worker.
        bytes_touched: keys, values and the policy's arrays, read or written.
        bandwidth: bytes_touched per second of the median.
        sequential_bandwidth, gather_bandwidth: bytes per second, medians of the same run.
        yardstick: the one of them that the policy is held against.
        yardstick_share: of its bandwidth; 1.0 is as fast as memory.
        candidate_share: of the context, whose keys were scored exactly.
        attended_tokens: per KV head (or query head, if the policy selects for each).
        dense_share: of the model's layers, that stay dense under the policy and are not measured.
        state_share: bytes of the policy's state, of the keys' and values' bytes.
        relative_error: L2, of the outputs against the reference on the same selection.

    Args:
        on_step: called after each of the `steps_needed(repeats)` steps per number of threads.

    Raises:
        ValueError: too few steps in the workload.
        ArithmeticError: an output that differs from the reference.
    """
    most = workload.cache.num_steps - WARMUP_STEPS
    if not 1 <= repeats <= most:
        raise ValueError(f"repeats must be in [1, {most}] for this workload, got {repeats}")
    policies = [plan.policy for plan in workload.plans.values()]
    budgets = [policy.budget_tokens for policy in policies if policy.selects]
    row_tokens = min(workload.cache.kv_len, max(budgets, default=1024))
    rows: list[Row] = []
    with closing(Yardstick(workload.store, tokens=row_tokens)) as yardstick:
        for num_threads in threads:
            with closing(WorkerPool(num_threads)) as pool, torch_threads(num_threads):
                yardstick.start(pool)
                try:
                    turns = [_Turns(name, workload, pool) for name in workload.plans]
                    _run(workload, turns, yardstick, repeats, on_step)
                    rows += [turn.row(yardstick) for turn in turns]
                finally:
                    workload.rewind()
    return rows


def _run(
    workload: LatencyWorkload,
    turns: list[_Turns],
    yardstick: Yardstick,
    repeats: int,
    on_step: Callable[[], None],
) -> None:
    num_steps = steps_needed(repeats)
    for step in range(num_steps):
        kv_lens = workload.advance(step)
        timed = step >= WARMUP_STEPS
        if timed:
            yardstick.gather()
        first = step % len(turns)
        for turn in turns[first:] + turns[:first]:
            yardstick.evict(record=timed)
            turn.take(step, kv_lens, record=timed)
        if step in (0, WARMUP_STEPS):
            _check(workload, turns, step, kv_lens)
        if step < num_steps - 1:
            workload.commit()  # the last step's rows stay writable: `rewind` drops them
        on_step()


def _check(workload: LatencyWorkload, turns: list[_Turns], step: int, kv_lens: list[int]) -> None:
    """Compare what all have just computed with the reference, in the first and the last layer.

    Of a timed step only the last layer's output is there.
    """
    last = workload.num_layers - 1
    for layer_idx in sorted({0 if step < WARMUP_STEPS else last, last}):
        exact = ExactAttention(
            workload.store,
            workload.seqs[0],
            layer_idx,
            workload.queries(layer_idx, step)[0],
            kv_len=kv_lens[0],
            sm_scale=workload.sm_scale,
        )
        for turn in turns:
            turn.check(layer_idx, exact)


class _Turns:
    """One policy's turns: its state, and what its layers took."""

    def __init__(self, name: str, workload: LatencyWorkload, pool: WorkerPool) -> None:
        self._name, self._workload = name, workload
        self._num_threads = pool.num_threads
        store, heads = workload.store, workload.shape.num_qo_heads
        self.plan: LayerPlan = workload.plans[name]
        self._policy = self.plan.policy
        per_query_head = self._policy.selects and self._policy.per_query_head
        self._num_units = heads if per_query_head else store.num_kv_heads
        self._attention = DecodeAttention(
            self._policy, store, num_qo_heads=heads, pool=pool, sm_scale=workload.sm_scale
        )
        roles = self._policy.roles(workload.num_layers, self._num_units)
        if roles is None:
            roles = np.full((workload.num_layers, self._num_units), RETRIEVE + 1, np.uint8)
            dense = self._policy.dense_layers if self._policy.selects else workload.num_layers
            roles[:dense] = DENSE
        self._attends_to_all = (roles == DENSE) | (roles == RETRIEVE)
        workload.cache.install(self._attention, workload.seqs)
        self._out = torch.empty(workload.batch_size, heads * store.head_dim, dtype=store.dtype)
        self._timed: list[list[tuple[float, dict[str, Any]]]] = []  # of each step and layer
        # Of the last turn, by layer.
        self._outputs: dict[int, torch.Tensor] = {}
        self._selections: dict[int, list[list[int]]] = {}
        self._error = 0.0

    def take(self, step: int, kv_lens: list[int], *, record: bool) -> None:
        """One decode step through all layers: timed, or to look at what is chosen."""
        workload, attention = self._workload, self._attention
        begun = attention.begin_step(workload.seqs, kv_lens)
        queries = [workload.queries(layer_idx, step) for layer_idx in range(workload.num_layers)]
        if not record:
            for layer_idx, query in enumerate(queries):
                attention.attend(layer_idx, begun, query, self._out)
                self._keep(layer_idx)
            return
        self._timed.append(attention.time_layers(begun, queries, self._out))
        self._keep(workload.num_layers - 1)

    def _keep(self, layer_idx: int) -> None:
        """The output and selection of the layer that attended last."""
        self._outputs[layer_idx] = self._out[0].clone()
        selection = self._attention.last_selection()
        self._selections[layer_idx] = selection[: self._num_units]

    def check(self, layer_idx: int, exact: ExactAttention) -> None:
        """Compare the last turn's output of the first sequence with the reference."""
        selection: list[Sequence[int] | None] = []
        everything_read = self._attends_to_all[layer_idx]
        for everything, tokens in zip(everything_read, self._selections[layer_idx], strict=True):
            # A unit that attended to nothing was answered by the policy, not attended.
            selection.append(() if everything else tokens or None)
        error = exact.check_output(self._outputs[layer_idx], selection)
        self._error = max(self._error, error)

    def row(self, yardstick: Yardstick) -> Row:
        """What the turns so far gave."""
        workload, weights = self._workload, self.plan.weights
        per_token = 1 / workload.batch_size

        def of_steps(of_turn: Callable[[float, Mapping[str, Any]], Any]) -> Any:
            """Values of each step, per token: the sum over layers, by their weights."""
            turns = np.array([[of_turn(*turn) for turn in step] for step in self._timed], float)
            layers = turns.swapaxes(0, 1)
            return sum(w * layer for w, layer in zip(weights, layers, strict=True)) * per_token

        def counted(name: str) -> float:
            """The median step's."""
            return float(np.median(of_steps(lambda _, profile: profile[name])))

        steps = of_steps(lambda seconds, _: seconds) * 1e6
        p10, median, p90 = (float(t) for t in np.percentile(steps, [10, 50, 90]))
        in_phases = np.median(
            of_steps(lambda _, profile: [profile["seconds"][phase] for phase in PHASES]), axis=0
        )
        in_phases = in_phases * 1e6 / self._num_threads
        phases = {p: float(t) for p, t in zip(PHASES, in_phases, strict=True)}
        phases["other"] = max(0.0, median - sum(phases.values()))
        bytes_touched = counted("bytes")
        kv_len, units = workload.cache.kv_len, self._num_units
        store = workload.store
        row_bytes = 2 * store.num_kv_heads * store.head_dim * store.dtype.itemsize
        kv_bytes = workload.batch_size * row_bytes * kv_len * workload.num_layers
        dense = bool(self._attends_to_all[weights > 0].all())
        bandwidth = bytes_touched / (median * 1e-6)
        reads_all = dense or self._policy.scans_keys
        scored = min(1.0, counted("scored_tokens") / units / kv_len)
        memory = yardstick.sequential_bandwidth if reads_all else yardstick.gather_bandwidth
        return {
            "policy": self._name,
            "options": workload.options[self._name],
            "kv_len": kv_len,
            "num_threads": self._num_threads,
            "batch_size": workload.batch_size,
            "microseconds": median,
            "microseconds_p10": p10,
            "microseconds_p90": p90,
            "microseconds_mean": float(np.mean(steps)),
            "phases": phases,
            "bytes_touched": bytes_touched,
            "bandwidth": bandwidth,
            "sequential_bandwidth": yardstick.sequential_bandwidth,
            "gather_bandwidth": yardstick.gather_bandwidth,
            "yardstick": "sequential read" if reads_all else "row gather",
            "candidate_share": 1.0 if dense else scored,
            "attended_tokens": counted("attended_tokens") / units,
            "dense_share": self.plan.dense_share,
            "state_share": self._attention.states.num_bytes / kv_bytes,
            "relative_error": self._error,
            "yardstick_share": bandwidth / memory,
        }


def steps_needed(repeats: int) -> int:
    """Steps that a workload must have."""
    return WARMUP_STEPS + repeats
