"""TidalDecode's claims on our model: `python -m perf.papers.tidal_decode`.

How much attention the layers have in common (its Figure 1), what a re-selection layer keeps for the
layers below it, by layer (Figure 2), and what that does to answers (Figure 5, Tables 1 and 2). The
first two need no decoding: the attention of all layers is recorded under full attention. Layers are
chosen on some prompts, answers are asked for on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.bench.eval.labels import windows_of
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.policies.tidal_decode import default_select_layers
from offload.runtime.config import RuntimeConfig, runtime_config
from offload.runtime.shared_model import SharedModel
from perf.papers.judge import judge
from perf.papers.kinds_of_text import (
    DESCRIPTIONS,
    KINDS,
    MODEL,
    items_until,
    length_of,
    load_cached_tokenizer,
)
from perf.papers.layer_attention import (
    ADJACENT,
    LayerAttention,
    Pairs,
    answer_kept,
    attention_to,
    compare_layers,
    kept_below,
)
from perf.results_file import Run, hide_loading_bars, script_options

BUDGET = 256  # of Figures 2 and 5
DENSE_LAYERS = 2  # the first selection layer is the one after them, as in the paper
JUDGED = ("needle", "keys")
# Of two selection layers, as in the paper; and of as many as our default for the model has.
_MOST_RESELECTIONS = 3
Row = dict[str, Any]


class LayerSweep:
    """Pairs of layers, summed up by kind of text and length."""

    def __init__(self) -> None:
        self._adjacent: list[npt.NDArray[np.float64]] = []
        self._found: dict[tuple[str, int], list[tuple[Pairs, Pairs, float | None]]] = {}

    def add(self, kind: str, length: int, attention: LayerAttention) -> None:
        """Recall as in the paper: each head its own tokens, none of them given. Mass as the policy
        keeps it: one selection for all heads, and windows within the budget."""
        alone = compare_layers(
            attention, budget_tokens=BUDGET, sink_tokens=0, recent_tokens=0, is_shared=False
        )
        shared = compare_layers(
            attention, budget_tokens=BUDGET, **windows_of(BUDGET), is_shared=True
        )
        self._found.setdefault((kind, length), []).append((alone, shared, attention.right))
        self._adjacent.append(attention.adjacent)

    def similarity_rows(self) -> list[Row]:
        """Of each pair of adjacent layers: of all query heads, mean over prompts."""
        return [
            {"part": "similarity", "layer": i}
            | {name: _rounded(values) for name, values in zip(ADJACENT, of_layer, strict=True)}
            for i, of_layer in enumerate(np.mean(self._adjacent, 0))
        ]

    def sweep_rows(self) -> list[Row]:
        """Of each kind and length, by re-selection layer; the first entry is of none."""
        return [
            {
                "part": "sweep",
                "kind": kind,
                "length": length,
                "prompts": len(found),
                "right": None if found[0][2] is None else float(np.mean([r for *_, r in found])),
            }
            | self._by_reselection([(alone, shared) for alone, shared, _ in found])
            for (kind, length), found in self._found.items()
        ]

    def sets_rows(self, sets: dict[tuple[int, ...], str]) -> list[Row]:
        """What sets of selection layers keep in each kind of text."""
        return [
            {"part": "sets", "layers": list(layers), "why": why, "kind": kind}
            | self._measured(self.of_kind(kind), layers)
            for layers, why in sets.items()
            for kind in self.kinds
        ]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self._found))

    def of_kind(self, *kinds: str) -> list[tuple[Pairs, Pairs]]:
        """Of their prompts."""
        return [
            (alone, shared)
            for (kind, _), found in self._found.items()
            if kind in kinds
            for alone, shared, _ in found
        ]

    def best(self, count: int, measure: str, kinds: Sequence[str]) -> tuple[int, ...]:
        """Selection layers, the first fixed and `count` more, by the mean over kinds of text."""
        means = [_Mean(self.of_kind(kind)) for kind in kinds]

        def score(layers: tuple[int, ...]) -> float:
            scores = [mean.of(layers)[measure] for mean in means]
            return float(np.mean([x for x in scores if x is not None]))

        later = range(DENSE_LAYERS + 1, means[0].num_layers)
        return max(((DENSE_LAYERS, *more) for more in combinations(later, count)), key=score)

    def _measured(self, found: list[tuple[Pairs, Pairs]], layers: tuple[int, ...]) -> Row:
        return _rounded_values(_Mean(found).of(layers))

    def _by_reselection(self, found: list[tuple[Pairs, Pairs]]) -> Row:
        mean = _Mean(found)
        reselections = [(), *((layer,) for layer in range(DENSE_LAYERS + 1, mean.num_layers))]
        rows = [_rounded_values(mean.of((DENSE_LAYERS, *more))) for more in reselections]
        return {name: [row[name] for row in rows] for name in rows[0]}


class _Mean:
    """Over prompts."""

    def __init__(self, found: list[tuple[Pairs, Pairs]]) -> None:
        self._recall = np.mean([alone.recall for alone, _ in found], 0)
        self._recall_shared = np.mean([shared.recall for _, shared in found], 0)
        self._mass = np.mean([shared.mass for _, shared in found], 0)
        self._answer = np.sum([shared.answer for _, shared in found], 0)
        self.num_layers = len(self._answer)

    def of(self, layers: tuple[int, ...]) -> Row:
        return {
            "recall": kept_below(self._recall, layers),
            "recall_shared": kept_below(self._recall_shared, layers),
            "mass": kept_below(self._mass, layers),
            "answer": answer_kept(self._answer, layers),
        }


def _rounded(values: Any) -> list[float]:
    return [round(float(x), 4) for x in values]


def _rounded_values(row: Row) -> Row:
    return {name: None if x is None else round(x, 4) for name, x in row.items()}


def sweep(config: RuntimeConfig, lengths: Sequence[int], deadline: float, run: Run) -> LayerSweep:
    """Record prompts of all kinds until `deadline`."""
    found, tokenizer = LayerSweep(), load_cached_tokenizer()
    model = SharedModel(MODEL, [make_policy("full")], config)
    run.say("the model is loaded")
    for item in items_until(deadline, KINDS, lengths, first_seed=0):
        length = length_of(item)
        found.add(item.task, length, attention_to(model, item, tokenizer, config.device))
        run.say(f"recorded {item.task}, {length} tokens, seed {item.index}")
    return found


def chosen_sets(
    found: LayerSweep, num_layers: int, num_kv_heads: int
) -> dict[tuple[int, ...], str]:
    """Sets of selection layers that are looked at, and why."""
    middle = default_select_layers(num_layers, 0, DENSE_LAYERS)
    default = default_select_layers(num_layers, num_kv_heads, DENSE_LAYERS)
    sets = {(DENSE_LAYERS,): "no re-selection", middle: "as deep as Llama-3's", default: "default"}
    for measure in ("recall", "mass", "answer"):
        for count in (1, _MOST_RESELECTIONS):
            layers = found.best(count, measure, found.kinds)
            sets[layers] = ", ".join(filter(None, [sets.get(layers), f"best {measure}"]))
    return sets


def transfer_rows(found: LayerSweep) -> list[Row]:
    """Whether one layer is best for all kinds of text: each kind's own best, and others' choice."""
    rows = []
    for kind in found.kinds:
        others = [other for other in found.kinds if other != kind]
        mean = _Mean(found.of_kind(kind))
        for measure in ("recall", "mass"):
            own = found.best(1, measure, [kind])
            chosen = found.best(1, measure, others or [kind])
            rows.append(
                {
                    "part": "transfer",
                    "kind": kind,
                    "measure": measure,
                    "own": own[-1],
                    "of_own": round(mean.of(own)[measure], 4),
                    "others": chosen[-1],
                    "of_others": round(mean.of(chosen)[measure], 4),
                }
            )
    return rows


def policies_to_ask(
    sets: Sequence[tuple[int, ...]], reselections: Sequence[int]
) -> dict[str, Policy]:
    """The methods to compare with, then TidalDecode by its layers."""
    options = {"budget_tokens": BUDGET, **windows_of(BUDGET)}
    policies = {name: make_policy(name, **options) for name in ("exact_topk", "quest")}
    for layers in [*sets, *((DENSE_LAYERS, layer) for layer in reselections)]:
        policy = make_policy("tidal_decode", select_layers=layers, **options)
        policies[",".join(map(str, layers))] = policy
    return policies


def main() -> None:
    parser = script_options(__doc__, "paper-tidal-decode")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--record-until", type=float, default=600, help="seconds after the start")
    parser.add_argument("--judge-until", type=float, default=1500, help="seconds after the start")
    parser.add_argument("--reselections", type=int, nargs="*", default=[*range(3, 30)])
    parser.add_argument("--sets", nargs="*", default=["2,17", "2,6,17,21"], metavar="LAYERS")
    options = parser.parse_args()

    hide_loading_bars()
    run = Run(options)
    config = runtime_config(device=options.device, dtype="bfloat16", num_threads=options.threads)
    found = sweep(config, options.lengths, run.started + options.record_until, run)
    if not found.kinds:
        parser.error(f"nothing was recorded: raise --record-until {options.record_until:g}")
    sets = chosen_sets(found, num_layers=30, num_kv_heads=3)
    sets = {tuple(map(int, layers.split(","))): "given" for layers in options.sets} | sets
    rows = [
        *found.similarity_rows(),
        *found.sweep_rows(),
        *found.sets_rows(sets),
        *transfer_rows(found),
    ]
    settings: Row = {"model": MODEL, "budget_tokens": BUDGET, "kinds": DESCRIPTIONS}
    settings |= run.named("lengths", "device")
    run.write(settings, rows)  # nothing of it is lost if an answer fails
    policies = policies_to_ask([*sets], options.reselections)
    deadline = run.started + options.judge_until
    rows += judge(policies, JUDGED, options.lengths, config, deadline, run)
    run.write(settings, rows)


if __name__ == "__main__":
    main()
