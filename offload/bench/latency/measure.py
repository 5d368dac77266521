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
after the first timed step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from cpu_ops.worker_pool import WorkerPool
from offload.bench.eval.labels import policy_options
from offload.bench.eval.selections import FloatArray, ReferenceBudget, selection_quality
from offload.bench.eval.summary import mean
from offload.bench.latency.plan import LayerPlan, plan_layers
from offload.bench.latency.workload import LatencyWorkload
from offload.bench.latency.yardstick import Yardstick
from offload.decode.attention import DecodeAttention
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.policies import ExactTopK, Policy
from offload.selection.policy import DENSE, RETRIEVE
from offload.system.torch_threads import torch_threads

PHASES = ("predict", "score", "select", "attend", "update")
WARMUP_STEPS = 2
JUDGED_STEPS = 1  # after the timed ones: what is chosen there is compared with the exact attention


@dataclass(frozen=True)
class SelectionQuality:
    """How a step's selections compare with the best of their size.

    Attributes:
        top_overlap: share of the chosen tokens (sinks and recent ones left out) that are among as
            many of largest weight; None if none were to choose.
        mass_kept: of the attention to all but the sinks, what the attended tokens hold.
        answered: share of units that the policy answered without attending.
    """

    top_overlap: float | None
    mass_kept: float
    answered: float


Row = dict[str, Any]  # one policy at one context length on one number of threads


def measure_latency(
    workload: LatencyWorkload,
    policies: Mapping[str, Policy],
    *,
    threads: Sequence[int],
    repeats: int,
    on_step: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Measure `policies` (by the name to show) on every number of threads.

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
        top_overlap, mass_kept, answered: see `SelectionQuality`, means over layers and units.
        dense_share: of the model's layers, that stay dense under the policy and are not measured.
        build_seconds: of the policy's state, per layer and sequence.
        state_share: bytes of that state, of the keys' and values' bytes.
        relative_error: L2, of the outputs against the reference on the same selection.

    Args:
        on_step: called after each of the `steps_needed(repeats)` steps per number of threads.

    Raises:
        ValueError: a policy that does not fit the workload, or too few steps in it.
        ArithmeticError: an output that differs from the reference.
    """
    most = workload.num_steps - steps_needed(0)
    if not 1 <= repeats <= most:
        raise ValueError(f"repeats must be in [1, {most}] for this workload, got {repeats}")
    budgets = [policy.budget_tokens for policy in policies.values() if policy.selects]
    row_tokens = min(workload.kv_len, max(budgets, default=1024))
    rows: list[Row] = []
    qualities: list[SelectionQuality] = []
    with closing(Yardstick(workload.store, tokens=row_tokens)) as yardstick:
        for num_threads in threads:
            with closing(WorkerPool(num_threads)) as pool, torch_threads(num_threads):
                yardstick.start(pool)
                try:
                    turns = [_Turns(policy, workload, pool) for policy in policies.values()]
                    _run(workload, turns, yardstick, repeats, on_step)
                    qualities = qualities or _judge(workload, turns, WARMUP_STEPS + repeats)
                    rows += [
                        turn.row(name, yardstick, quality)
                        for name, turn, quality in zip(policies, turns, qualities, strict=True)
                    ]
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
        timed = WARMUP_STEPS <= step < WARMUP_STEPS + repeats
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
        exact = _exact(workload, layer_idx, step, kv_lens[0])
        for turn in turns:
            turn.check(layer_idx, exact)


def _judge(workload: LatencyWorkload, turns: Sequence[_Turns], step: int) -> list[SelectionQuality]:
    """Quality of the last step's selections: weighted means over a few layers."""
    num_layers = workload.num_layers
    kv_len = workload.store.kv_len(workload.seqs[0]) + 1
    found: list[list[tuple[float, SelectionQuality]]] = [[] for _ in turns]
    for layer_idx in sorted({*np.linspace(0, num_layers - 1, min(num_layers, 4)).astype(int)}):
        exact = _exact(workload, layer_idx, step, kv_len)
        for turn, parts in zip(turns, found, strict=True):
            weight = float(turn.plan.weights[layer_idx])
            if weight > 0:
                parts.append((weight, turn.quality(layer_idx, exact)))
    return [_mean_quality(parts) for parts in found]


def _mean_quality(parts: list[tuple[float, SelectionQuality]]) -> SelectionQuality:
    def weighted(name: str) -> Any:
        """Weighted mean over the parts that have the value; None if none has."""
        pairs = [(w, getattr(q, name)) for w, q in parts if getattr(q, name) is not None]
        return sum(w * x for w, x in pairs) / sum(w for w, _ in pairs) if pairs else None

    return SelectionQuality(*(weighted(field.name) for field in fields(SelectionQuality)))


def judge_units(
    importances: FloatArray,
    selection: Sequence[Sequence[int]],
    attends_to_all: Sequence[bool],
    reference: ReferenceBudget,
) -> SelectionQuality:
    """The selections of all units in one layer.

    Args:
        importances: [num_units, kv_len].
        attends_to_all: of each unit; others with an empty selection were answered.
    """
    masses, overlaps = list[float](), list[float | None]()
    for importance, tokens, everything in zip(importances, selection, attends_to_all, strict=True):
        if everything:
            masses.append(1.0)
            overlaps.append(1.0)
        elif len(tokens):
            found = selection_quality(importance, np.array(tokens, np.int32), reference)
            masses.append(found.mass_kept)
            overlaps.append(found.overlap)
    kept = float(np.mean(masses)) if masses else 1.0
    return SelectionQuality(mean(overlaps), kept, 1 - len(masses) / len(selection))


def _exact(workload: LatencyWorkload, layer_idx: int, step: int, kv_len: int) -> ExactAttention:
    return ExactAttention(
        workload.store,
        workload.seqs[0],
        layer_idx,
        workload.queries(layer_idx, step)[0],
        kv_len=kv_len,
        sm_scale=workload.sm_scale,
    )


class _Turns:
    """One policy's turns: its state, and what its layers took."""

    def __init__(self, policy: Policy, workload: LatencyWorkload, pool: WorkerPool) -> None:
        self._workload = workload
        self._num_threads = pool.num_threads
        store, heads = workload.store, workload.num_qo_heads
        policy.check_model(**workload.shape.heads)
        self._num_units = heads if policy.selects and policy.per_query_head else store.num_kv_heads
        self.plan: LayerPlan = plan_layers(
            policy,
            num_model_layers=workload.shape.num_layers,
            num_layers=workload.num_layers,
            num_units=self._num_units,
        )
        self._policy, self._options = self.plan.policy, policy_options(policy)
        self._attention = DecodeAttention(
            self._policy, store, num_qo_heads=heads, pool=pool, sm_scale=workload.sm_scale
        )
        roles = self._policy.roles(workload.num_layers, self._num_units)
        if roles is None:
            roles = np.full((workload.num_layers, self._num_units), RETRIEVE + 1, np.uint8)
            dense = self._policy.dense_layers if self._policy.selects else workload.num_layers
            roles[:dense] = DENSE
        self._attends_to_all = (roles == DENSE) | (roles == RETRIEVE)
        for row, seq in enumerate(workload.seqs):
            for layer_idx in range(workload.num_layers):
                kept = workload.prompt_queries(row, layer_idx)
                self._attention.record_queries(seq, layer_idx, kept, workload.kv_len)
        self._build_seconds = self._attention.build_states(
            workload.seqs, [workload.kv_len + 1] * workload.batch_size
        )
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
        for everything, tokens in zip(*self._of_layer(layer_idx), strict=True):
            # A unit that attended to nothing was answered by the policy, not attended.
            selection.append(() if everything else tokens or None)
        error = exact.check_output(self._outputs[layer_idx], selection)
        self._error = max(self._error, error)

    def quality(self, layer_idx: int, exact: ExactAttention) -> SelectionQuality:
        """Quality of the selection in the last turn."""
        policy = self._policy if self._policy.selects else ExactTopK()
        reference = ReferenceBudget(policy.budget_tokens, policy.sink_tokens, policy.recent_tokens)
        everything, selection = self._of_layer(layer_idx)
        return judge_units(exact.importances(self._num_units), selection, everything, reference)

    def row(self, name: str, yardstick: Yardstick, quality: SelectionQuality) -> Row:
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
        kv_len, units = workload.kv_len, self._num_units
        store = workload.store
        row_bytes = 2 * store.num_kv_heads * store.head_dim * store.dtype.itemsize
        kv_bytes = workload.batch_size * row_bytes * kv_len * workload.num_layers
        dense = bool(self._attends_to_all[weights > 0].all())
        bandwidth = bytes_touched / (median * 1e-6)
        reads_all = dense or self._policy.scans_keys
        scored = min(1.0, counted("scored_tokens") / units / kv_len)
        memory = yardstick.sequential_bandwidth if reads_all else yardstick.gather_bandwidth
        return {
            "policy": name,
            "options": self._options,
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
            **asdict(quality),
            "dense_share": self.plan.dense_share,
            "build_seconds": self._build_seconds / (workload.num_layers * workload.batch_size),
            "state_share": self._attention.states.num_bytes / kv_bytes,
            "relative_error": self._error,
            "yardstick_share": bandwidth / memory,
        }

    def _of_layer(self, layer_idx: int) -> tuple[list[bool], list[list[int]]]:
        """Whether each unit of the last turn attended to everything, and to what."""
        everything = self._attends_to_all[layer_idx].copy()
        if self._policy.selects and self._workload.kv_len < self._policy.dense_tokens:
            everything[:] = True
        return everything.tolist(), self._selections[layer_idx]


def steps_needed(repeats: int) -> int:
    """Steps that a workload must have."""
    return WARMUP_STEPS + repeats + JUDGED_STEPS
