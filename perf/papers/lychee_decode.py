"""LycheeDecode's claims on our model: `python -m perf.papers.lychee_decode --ablate rules`.

`rules`: which tokens a retrieval head hands down (top-k, top-p, threshold, ratio), all at the same
mean number of tokens over all lengths and kinds of text. `roles`: which heads retrieve, how many of
them, and whether heads or whole layers share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload import OffloadedModel
from offload.bench.eval.labels import windows_of
from offload.policies import Policy
from offload.policies.lychee_decode.calibration import (
    CALIBRATION_TOKENS,
    Calibration,
    calibration_tokens,
    observe_heads,
    roles_from,
)
from offload.policies.lychee_decode.choice import choose_retrieval_heads
from offload.policies.lychee_decode.policy import RULES
from offload.policies.lychee_decode.roles import BoolArray, HeadRoles, evenly_spaced_heads
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
    FloatArray,
    LayerAttention,
    always_attended,
    attention_to,
    compare_layers,
    selecting_above,
)
from perf.results_file import Run, hide_loading_bars, script_options

LEVELS = (128, 512)  # mean tokens that a rule hands down, over all lengths
WINDOWS = {"sink_tokens": 4, "recent_tokens": 16}
# That any rule may hand down: a context that fits into the policy's budget is attended whole.
MOST_TOKENS = 2048
ROLES_BUDGET = 256
JUDGED = ("needle", "keys", "json", "prose", "source")
_BISECTIONS = 30
_DENSE_LAYERS = 2  # of TidalDecode
Row = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """Attention to a prompt, and what it was."""

    kind: str
    length: int
    attention: LayerAttention


class Published:
    """What retrieval heads hand down of one prompt, by rule.

    Args:
        roles: bool [num_layers, num_kv_heads].
        most_tokens: that any rule may hand down.
    """

    def __init__(
        self, recorded: Recorded, roles: BoolArray, most_tokens: int = MOST_TOKENS
    ) -> None:
        self.recorded, self._roles, self._most_tokens = recorded, roles, most_tokens
        weights = recorded.attention.weights
        self._always, free = always_attended(weights, **WINDOWS)
        own = weights[torch.from_numpy(roles).to(weights.device)]
        # [retrieval heads, num_queries, kv_len], heaviest first; what may not be chosen is last.
        self._sorted, self._order = own.masked_fill(~free, -1.0).sort(-1, descending=True)
        self._near = (own * self._always).sum(-1, keepdim=True)
        kv_len, num_queries = weights.shape[-1], weights.shape[-2]
        self._kv_lens = torch.arange(kv_len - num_queries + 1, kv_len + 1, device=own.device)

    def _chosen(self, rule: str, number: float) -> Tensor:
        """bool, in the order of `_sorted`: besides sinks and recent window."""
        most = torch.full_like(self._kv_lens, self._most_tokens)
        if rule == "top_k":
            most = most.clamp(max=round(number))
        elif rule == "ratio":
            most = most.minimum(torch.ceil(number * self._kv_lens).long())
        rank = torch.arange(self._sorted.shape[-1], device=self._sorted.device)
        room = most - self._always.sum(-1)
        chosen = (rank < room[:, None]) & (self._sorted >= 0)
        if rule == "top_p":
            before = self._sorted.clamp(min=0).cumsum(-1) - self._sorted
            chosen &= self._near + before < number
        elif rule == "threshold":
            chosen &= self._sorted > number
        return chosen

    def tokens(self, rule: str, number: float) -> float:
        """Handed down, sinks and recent window included: mean over heads and queries."""
        return float(np.mean(self._tokens_of_heads(rule, number)))

    def attended(self, rule: str, number: float) -> float:
        """The same, but mean over the heads that reuse: a long list counts as often as it is."""
        return float(np.average(self._tokens_of_heads(rule, number), weights=self._times_reused()))

    def mass_kept(self, rule: str, number: float) -> float:
        """Attention mass of the heads that reuse, without sinks."""
        chosen = torch.zeros_like(self._order, dtype=torch.bool)
        chosen.scatter_(-1, self._order, self._chosen(rule, number))
        chosen |= self._always
        weights, sinks, kept = self.recorded.attention.weights, WINDOWS["sink_tokens"], []
        for layer_idx, head, source in self._reusing():
            own = weights[layer_idx, head]
            total = own[:, sinks:].sum(-1).clamp(min=1e-20)
            kept.append((own * chosen[source])[:, sinks:].sum(-1) / total)
        return float(torch.stack(kept).double().mean())

    def _tokens_of_heads(self, rule: str, number: float) -> FloatArray:
        """[retrieval heads], mean over queries."""
        handed_down = self._chosen(rule, number).sum(-1) + self._always.sum(-1)
        found: FloatArray = handed_down.double().mean(-1).cpu().numpy()
        return found

    def _reusing(self) -> Iterator[tuple[int, int, int]]:
        """Layer and KV head of each that reuses, and which of the retrieval heads hands down."""
        place = {tuple(at): i for i, at in enumerate(np.argwhere(self._roles).tolist())}
        for head, retrieves in enumerate(self._roles.T):
            above = selecting_above(len(retrieves), np.flatnonzero(retrieves).tolist())
            for layer_idx in np.flatnonzero(~retrieves).tolist():
                yield layer_idx, head, place[int(above[layer_idx]), head]

    def _times_reused(self) -> FloatArray:
        """[retrieval heads], by how many heads."""
        times = np.zeros(int(self._roles.sum()))
        for _, _, source in self._reusing():
            times[source] += 1
        return times


def number_for(
    rule: str,
    tokens: int,
    published: Sequence[Published],
    count: Callable[[Published, str, float], float] = Published.tokens,
) -> float:
    """The rule's number with which it hands down so many tokens on average, as `count` has it."""
    if rule == "top_k":
        return tokens

    def handed_down(number: float) -> float:
        return float(np.mean([count(one, rule, number) for one in published]))

    low, high = 1e-8, 1.0
    grows = -1 if rule == "threshold" else 1
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5 if rule == "threshold" else (low + high) / 2
        if grows * (handed_down(middle) - tokens) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def record(
    config: RuntimeConfig,
    lengths: Sequence[int],
    deadline: float,
    run: Run,
    kinds: Sequence[str] = KINDS,
    rounds: int = 2,
) -> list[Recorded]:
    """Attention to prompts of these kinds, at most `rounds` of each length, until `deadline`."""
    model, found = SharedModel(MODEL, [make_policy("full")], config), []
    for item in items_until(deadline, kinds, lengths, first_seed=0, most_rounds=rounds):
        attention = attention_to(model, item, load_cached_tokenizer(), config.device)
        found.append(Recorded(item.task, length_of(item), attention))
    run.say(f"recorded {len(found)} prompts")
    return found


def ablate_rules(recorded: Sequence[Recorded], calibration: Calibration) -> tuple[list[Row], Row]:
    """Rows of what rules hand down at each level, and policies by label."""
    head_roles = _calibrated(calibration, None)
    published = [Published(one, head_roles.array) for one in recorded]
    rows, policies = [], {}
    for level in LEVELS:
        for rule in RULES:
            number = number_for(rule, level, published)
            label = f"{rule} {level}"
            option = {} if rule == "top_k" else {rule: number}
            budget = level if rule == "top_k" else MOST_TOKENS
            policies[label] = make_policy(
                "lychee_decode",
                rule=rule,
                head_roles=head_roles,
                budget_tokens=budget,
                **option,
                **WINDOWS,
            )
            for kind in _kinds_of(recorded):
                of_kind = [one for one in published if kind in ("all", one.recorded.kind)]
                tokens = {
                    length: np.mean(
                        [
                            one.tokens(rule, number)
                            for one in of_kind
                            if one.recorded.length == length
                        ]
                    )
                    for length in dict.fromkeys(one.recorded.length for one in of_kind)
                }
                mass = np.mean([one.mass_kept(rule, number) for one in of_kind])
                rows.append(
                    {"part": "rules", "policy": label, "rule": rule, "level": level}
                    | {"number": number, "kind": kind, "prompts": len(of_kind)}
                    | {"tokens": {str(n): round(float(x), 1) for n, x in tokens.items()}}
                    | {"mass": round(float(mass), 4)}
                )
    return rows, policies


def ablate_roles(recorded: Sequence[Recorded], calibration: Calibration) -> tuple[list[Row], Row]:
    """Rows of what heads keep under each choice of roles, and policies by label."""
    options = {"budget_tokens": ROLES_BUDGET, **windows_of(ROLES_BUDGET)}
    num_kv_heads, num_layers, _ = calibration.mass_kept.shape
    default = _calibrated(calibration, None)
    count = default.num_retrieval_heads
    select_layers = default_select_layers(num_layers, num_kv_heads, _DENSE_LAYERS)
    by_layer = np.zeros((num_layers, num_kv_heads), np.bool_)
    by_layer[[*range(_DENSE_LAYERS), *select_layers]] = True
    choices = {f"calibrated, {n}": _calibrated(calibration, n).array for n in _counts(calibration)}
    choices |= {
        f"by mass alone, {count}": choose_retrieval_heads(calibration.mass_kept, count),
        f"evenly spaced, {count}": evenly_spaced_heads(num_layers, num_kv_heads, count),
        "TidalDecode's layers, a selection of each head": by_layer,
    }
    pairs = [(one, compare_layers(one.attention, is_shared=False, **options)) for one in recorded]
    rows = []
    for label, roles in choices.items():
        for kind in _kinds_of(recorded):
            of_kind = [p.mass for one, p in pairs if kind in ("all", one.kind)]
            rows.append(
                {"part": "roles", "policy": label, "kind": kind, "prompts": len(of_kind)}
                | {"retrieving": int(roles.sum()), "heads": roles.size}
                | {"mass": round(_kept_by_roles(np.mean(of_kind, 0), roles), 4)}
            )
    policies: dict[str, Policy] = {
        label: make_policy(
            "lychee_decode",
            head_roles=HeadRoles.of(roles, head_dim=default.head_dim),
            **options,
        )
        for label, roles in choices.items()
    }
    policies["TidalDecode, one selection of all heads"] = make_policy("tidal_decode", **options)
    policies["exact_topk"] = make_policy("exact_topk", **options)
    return rows, policies


def _kinds_of(recorded: Sequence[Recorded]) -> list[str]:
    """All together, and those that were recorded."""
    return ["all", *dict.fromkeys(one.kind for one in recorded)]


def _counts(calibration: Calibration) -> list[int]:
    """Of retrieval heads after the first layer: none, the paper's eighth, our sixth, and more."""
    num_kv_heads, num_layers, _ = calibration.mass_kept.shape
    heads = num_kv_heads * num_layers
    default = _calibrated(calibration, None).num_retrieval_heads
    return [0, heads // 16, heads // 8, default, heads // 3, 2 * heads // 3]


def _kept_by_roles(mass: Any, roles: BoolArray) -> float:
    """Mean mass [num_kv_heads, num_layers, num_layers] of the heads that reuse."""
    kept = []
    for head, retrieves in enumerate(roles.T):
        above = selecting_above(len(retrieves), np.flatnonzero(retrieves).tolist())
        reusing = np.flatnonzero(~retrieves)
        kept += mass[head, above[reusing], reusing].tolist()
    return float(np.mean(kept))


def _calibrated(calibration: Calibration, count: int | None) -> HeadRoles:
    return roles_from(calibration, model_type="", head_dim=64, retrieval_heads=count)


ABLATIONS: dict[
    str, Callable[[Sequence[Recorded], Calibration], tuple[list[Row], dict[str, Policy]]]
] = {"rules": ablate_rules, "roles": ablate_roles}


def main() -> None:
    parser = script_options(__doc__, "paper-lychee-decode")
    parser.add_argument("--ablate", choices=[*ABLATIONS], required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--record-until", type=float, default=600, help="seconds after the start")
    parser.add_argument("--judge-until", type=float, default=1500, help="seconds after the start")
    options = parser.parse_args()
    if min(options.lengths) <= MOST_TOKENS + max(LEVELS):
        parser.error(f"--lengths must exceed {MOST_TOKENS + max(LEVELS)}, got {options.lengths}")

    hide_loading_bars()
    run = Run(options)
    config = runtime_config(device=options.device, dtype="bfloat16", num_threads=options.threads)
    model = OffloadedModel.from_pretrained(MODEL, policy="full", num_threads=options.threads)
    tokens = calibration_tokens(load_cached_tokenizer(), CALIBRATION_TOKENS)
    calibration = observe_heads(model._offload.lean, tokens)
    del model
    recorded = record(config, options.lengths, run.started + options.record_until, run)
    if not recorded:
        parser.error(f"nothing was recorded: raise --record-until {options.record_until:g}")
    rows, policies = ABLATIONS[options.ablate](recorded, calibration)
    del recorded
    settings: Row = {"model": MODEL, "kinds": DESCRIPTIONS, "roles_budget": ROLES_BUDGET}
    settings |= run.named("lengths", "device", "ablate")
    run.write(settings, rows, part=options.ablate)  # nothing of it is lost if an answer fails
    deadline = run.started + options.judge_until
    rows += judge(policies, JUDGED, options.lengths, config, deadline, run)
    run.write(settings, rows, part=options.ablate)


if __name__ == "__main__":
    main()
