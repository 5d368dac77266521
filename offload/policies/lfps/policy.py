"""LFPS: candidates from where attention went before, by position and by distance.

Source: Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding. Per unit, a
vertical table A_v[i] scores token i and a slash table A_s[j] the distance j = t - i; sink tokens
are in neither. Before the query of step t is known,

    candidates = {i: A_v[i] > theta_v} U {t - j: A_s[j] > theta_s},
    theta = mean + alpha * max / sqrt(kurtosis) of each table,

and of a candidate's neighbours {-1, 1, 2} those that are above the mean of a table (equations 7 to
9). The runtime scores the candidates exactly and attends to the best of them; what is attended
enters both tables, A <- gamma A + weight / 2 (equation 10), with weights that leave the sinks out.
The tables begin as those of the last 32 queries of the prompt (equation 4).

A highly sparse head (equations 5 and 6, appendix B.1) has s = S / (S + max(G, L)) above
`bypass_threshold`, where S is the sinks' sum of exp(q.k), L that of the last five tokens, and G a
log-normal estimate of everything but the sinks. It does not vote in the tables; a unit all of whose
heads are such is not attended: it answers s * (sinks' values) + (1 - s) * (mean value).

What a head looks at moves on by one token a step: having copied a digit, it looks for the next,
which was not read. So the vertical table names a token together with the `spread` tokens after
it, as if its scores were spread forward by their maximum. The paper's rule does not, and loses
what is to be copied.

Where that names fewer candidates than twice the budget, thresholds are lowered towards the means,
at any length of context: what a head looks up anew is not where it looked before. With 1,024 of 6K
tokens of prose SmolLM2's perplexity rises by 7 % without this, by 3 to 6 % with once or one and a
half times the budget, and by 1 % with twice.

A unit is a KV head with its group (`granularity="kv_head"`) or one query head. With SmolLM2 at 6.5K
tokens and alpha 0.2 both keep 0.955 of the attention mass that exact top-k keeps in 2 % of the
tokens, from 4.2 % of candidates, while single query heads read the keys and values of each head of
a group again: the group is the default.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np

from cpu_ops.worker_pool import WorkerPool
from offload.policies.base import SparsePolicy
from offload.policies.lfps.layout import (
    NUMBERS,
    SIZES,
    STATE,
    forget_step,
    list_all,
    make_arrays,
    take_back_step,
    unit_bytes,
    unlist_all,
)
from offload.policies.lfps.prompt import (
    check_queries,
    fill_tables,
    prompt_weights,
    tables_on_device,
)
from offload.policies.lfps.step import observe, prepare, propose
from offload.selection.calibration import Calibration
from offload.selection.callback import Callback
from offload.selection.device_build import to_host
from offload.selection.device_support import DeviceBuild, DeviceSupport
from offload.selection.layer_state import BuildContext, LayerState, State, StateShape
from offload.selection.layouts import NumberLayout
from offload.selection.revised import Revised
from offload.system import huge_pages

logger = logging.getLogger(__name__)

LARGEST_SPREAD = 62
GRANULARITIES = ("kv_head", "query_head")
_CANDIDATES_OF_CHOSEN = 3.0  # for estimates: thresholds that suffice name more than is wanted


class LFPSState(LayerState):
    """Tables of where attention went."""

    layout = STATE
    observed_queries = 32
    policy: LFPS

    def build(self, context: BuildContext) -> State:
        """Tables of the last queries, and the means and sink values that bypasses answer with.

        Raises:
            ValueError: no queries were kept (`DecodeAttention.record_queries` takes them).
        """
        policy = self.policy
        check_queries(context, self.observed_queries)
        num_kv_heads, kv_len, head_dim = context.keys.shape
        num_qo_heads = len(context.queries)
        sinks = policy.sink_tokens
        group_size = 1 if policy.per_query_head else num_qo_heads // num_kv_heads
        num_units = num_qo_heads // group_size
        tables = huge_pages.zeros((num_units, 2, context.capacity_tokens), np.float32)
        answers = np.zeros((num_units, 2 + sinks, head_dim), np.float32)
        variance_ratios = np.zeros((num_units, group_size), np.float32)
        for kv_head, (weights, shared, ratios) in enumerate(prompt_weights(context, sinks)):
            of_head = range(
                kv_head * num_units // num_kv_heads, (kv_head + 1) * num_units // num_kv_heads
            )
            for k, unit in enumerate(of_head):
                mine = slice(k * group_size, (k + 1) * group_size)
                answers[unit] = shared.numpy()
                variance_ratios[unit] = ratios[mine].numpy()
                fill_tables(tables[unit], weights[mine].mean(0).numpy(), sinks, policy.gamma)
        return make_arrays(
            tables, answers, variance_ratios, max(kv_len - sinks, 1), policy.budget_tokens
        )

    def num_bytes(self, shape: StateShape) -> int:
        policy = self.policy
        group_size = 1 if policy.per_query_head else shape.num_qo_heads // shape.num_kv_heads
        of_unit = unit_bytes(
            shape.capacity_tokens,
            group_size,
            policy.budget_tokens,
            policy.sink_tokens,
            shape.head_dim,
        )
        return shape.num_qo_heads // group_size * of_unit + 4 * len(SIZES)

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        tables, units = arrays["tables"], arrays["units"]
        grown = huge_pages.zeros((len(tables), 2, capacity_tokens), np.float32)
        grown[:, :, : tables.shape[2]] = tables
        unlist_all({**arrays, "tables": grown, "units": units.copy()})
        return make_arrays(
            grown,
            arrays["answers"].copy(),
            arrays["variance_ratios"].copy(),
            tables.shape[2] - self.policy.sink_tokens,
            self.policy.budget_tokens,
            units_of_before=units,
        )

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        forget_step(arrays)
        unlist_all(arrays)
        arrays["tables"][:, 0, kv_len:] = 0.0
        arrays["tables"][:, 1, max(kv_len - self.policy.sink_tokens, 0) :] = 0.0
        list_all(arrays, max(kv_len - self.policy.sink_tokens, 1))
        return True

    def rewind(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        take_back_step(arrays, kv_len)
        return True

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """Tables say where attention went, not to which keys."""
        forget_step(arrays)
        return True

    def read_bytes(
        self, *, kv_len: int, chosen_tokens: int, row_bytes: int, state_bytes: float
    ) -> tuple[float, bool]:
        """Keys of the candidates."""
        return min(_CANDIDATES_OF_CHOSEN * chosen_tokens, kv_len) * row_bytes, False


class LFPSCalibration(Calibration):
    """Nothing is learnt; a model that is loaded says once what to expect."""

    def learn(self, *args: Any, **of_model: Any) -> Any:
        _say_what_it_misses()
        return self.policy


@cache
def _say_what_it_misses() -> None:
    logger.warning(
        "lfps looks where earlier steps looked: of what a decoded question asks for it finds a "
        "half to a fourth (docs/policies.md); a prompt may end with the question, and policies "
        "'union' and 'per_head' find it either way"
    )


class LFPSDevice(DeviceSupport):
    """The tables are filled there."""

    builds = True
    policy: LFPS

    def build(self, context: BuildContext) -> DeviceBuild:
        """The same; sums of float32 in another order."""
        policy = self.policy
        check_queries(context, policy.state.observed_queries)
        num_kv_heads, kv_len, _ = context.keys.shape
        sinks, capacity_tokens = policy.sink_tokens, context.capacity_tokens
        group_size = 1 if policy.per_query_head else context.queries.shape[0] // num_kv_heads
        found = tables_on_device(context, sinks, policy.gamma, group_size)
        scores, answers, ratios = (to_host(x) for x in found)

        def finish() -> State:
            tables = huge_pages.zeros((len(scores), 2, capacity_tokens), np.float32)
            tables[:, 0, sinks:kv_len] = scores[:, 0].numpy()
            tables[:, 1, : kv_len - sinks] = scores[:, 1].numpy()
            bypass = answers.numpy().copy(), ratios.numpy().copy()
            return make_arrays(tables, *bypass, max(kv_len - sinks, 1), policy.budget_tokens)

        return finish


@dataclass(frozen=True)
class LFPS(SparsePolicy):
    """Exact top-k among candidates that earlier steps point to.

    Args:
        alpha: how far above the mean a score must be, in units of maximum / sqrt(kurtosis); larger
            means fewer candidates.
        gamma: decay of the scores per step.
        bypass_threshold: heads that attend to the sinks this much are answered from them, 0.85 in
            the paper; 1.0: none.
        spread: tokens after one that attention went to that are candidates, too. 0: the paper's
            rule.
        granularity: "kv_head": a KV head's group shares tables and selection; "query_head".
    """

    name: ClassVar[str] = "lfps"
    prepare: ClassVar[Callback | None] = prepare
    propose: ClassVar[Callback | None] = propose
    observe: ClassVar[Callback | None] = observe
    number_layout: ClassVar[NumberLayout | None] = NUMBERS
    # Steps between prunings of the lists. In between, neighbours that fell below the mean since
    # the last one are still added to candidates; 1 is the paper's rule to the letter.
    prune_every: ClassVar[int] = 8
    # Steps between attempts at a higher threshold than the one that named enough: in between, a few
    # more candidates than needed save finding them twice.
    raise_every: ClassVar[int] = 4
    # Where the rule names fewer candidates than this times the budget, thresholds are lowered
    # towards the means, and recent tokens fill up what is then still missing. 0: the paper's rule.
    candidates_per_budget: ClassVar[float] = 2.0
    # Ahead. Every 2nd, 4th and 8th step: KL 0.0085, 0.0086 and 0.0229 (8 x 96 tokens behind 6,400);
    # every one, 2nd and 4th: 30.5, 21.3 and 16.6 ms a step of 8 x 32K tokens (H100).
    observes_every: ClassVar[int] = 4
    state = cached_property(LFPSState)
    device = cached_property(LFPSDevice)
    calibration = cached_property(LFPSCalibration)

    alpha: float = 0.8
    gamma: float = 0.95
    bypass_threshold: float = 1.0
    spread: int = 8
    granularity: str = "kv_head"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "gamma", "bypass_threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be above 0 and finite, got {self.alpha}")
        if not 0.0 < self.gamma < 1.0:
            raise ValueError(f"gamma must be between 0 and 1, both excluded, got {self.gamma}")
        if not 0.0 < self.bypass_threshold <= 1.0:
            raise ValueError(
                "bypass_threshold must be above 0 and at most 1 (1: no head is bypassed),"
                f" got {self.bypass_threshold}"
            )
        if isinstance(self.spread, bool) or not isinstance(self.spread, int):
            raise ValueError(f"spread must be an integer, got {self.spread!r}")
        if not 0 <= self.spread <= LARGEST_SPREAD:
            raise ValueError(
                f"spread must be between 0 and {LARGEST_SPREAD} tokens, got {self.spread}"
            )
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"granularity must be one of {', '.join(GRANULARITIES)}, got {self.granularity!r}"
            )

    @property
    def per_query_head(self) -> bool:  # type: ignore[override]
        return self.granularity == "query_head"
