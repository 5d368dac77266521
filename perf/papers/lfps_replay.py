"""LFPS's candidates as its paper has them, replayed over queries of a real text, with variations.

`offload.policies.lfps` is what runs; it has one expansion and both tables. Here every step of every
head is computed by whole tables (torch, on a CPU or GPU), so that parts of the rule can be left out
or changed: which tables name candidates, which neighbours are added, heads alone or in groups.
Queries are those of exact attention, whatever was chosen before: all rules are asked the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from offload.bench.selection.shared_prefill import prefill_keeping_queries
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.batch import pack
from offload.policies.lfps.policy import LFPS

SINKS = 4
PROMPT_QUERIES = 32  # L_r: of the last steps, equation 4
GAMMA = 0.95
LOCAL_TOKENS = 5  # of L, equation 5
NEAR_TOKENS = 64  # tokens that are not far: what a recent window would have
DENSE_LAYERS = 2  # that our policies leave dense; left out
THRESHOLDS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of Table 3; and 1, which bypasses none
PAPER_OFFSETS = (-1, 1, 2)


@dataclass(frozen=True)
class AsInThePaper(LFPS):
    """The policy without what it adds to the rule: nothing is spread, no threshold is lowered."""

    candidates_per_budget: ClassVar[float] = 0.0
    alpha: float = 0.2
    bypass_threshold: float = 0.85
    spread: int = 0


@dataclass(frozen=True)
class Rule:
    """Which tokens are candidates before the query is known.

    Attributes:
        budget_share: of the context, that is chosen of them (k).
        offsets: of the neighbours that an expansion adds to a candidate.
        above_mean: of these, only those above the mean of a table (equation 9).
        bypass_threshold: heads above it choose nothing and do not vote (equation 6).
        per_query_head: each query head for itself, as in the paper; else KV heads' groups.
    """

    name: str
    budget_share: float = 0.02
    vertical: bool = True
    slash: bool = True
    offsets: tuple[int, ...] = PAPER_OFFSETS
    above_mean: bool = True
    alpha: float = 0.2
    bypass_threshold: float = 0.85
    per_query_head: bool = True

    @property
    def asked(self) -> tuple[float, bool]:
        """What exact top-k it is compared with: rules with the same share it."""
        return self.budget_share, self.per_query_head


@dataclass(frozen=True)
class ReadText:
    """What exact attention has of a text: the layers from DENSE_LAYERS on.

    Attributes:
        keys: float32 [num_layers, num_kv_heads, num_tokens, head_dim].
        queries: float32 [num_layers, num_kv_heads, group, n, head_dim] of the last n tokens.
        steps: of these, that are decoded; the others are the prompt's.
    """

    keys: Tensor
    queries: Tensor
    steps: int
    sm_scale: float

    @property
    def context(self) -> int:
        """Tokens before the first step."""
        return self.keys.shape[2] - self.steps

    def query(self, kv_len: int) -> Tensor:
        """Of token kv_len - 1: [num_layers, num_kv_heads, group, head_dim]."""
        return self.queries[:, :, :, kv_len - 1 - self.keys.shape[2]]

    def scores(self, kv_len: int, tokens: slice) -> Tensor:
        """Scaled q.k of some tokens for token kv_len - 1: [num_layers, num_kv_heads, group, n]."""
        return self.query(kv_len) @ self.keys[:, :, tokens].transpose(2, 3) * self.sm_scale

    def weights(self, kv_len: int) -> Tensor:
        """Softmax weights of token kv_len - 1: [num_layers, num_kv_heads, group, kv_len]."""
        return torch.softmax(self.scores(kv_len, slice(0, kv_len)), -1)


@torch.no_grad()
def read_text(lean: LeanModel, tokens: Sequence[int], steps: int, device: str) -> ReadText:
    """Exact prefill of a text, on the device of the model; the last `steps` tokens are decoded."""
    shape, ids = lean.shape, torch.tensor(tokens)
    embedded = lean.embed_tokens(ids.to(device))
    store = KVStore(**shape.kv_heads, dtype=embedded.dtype, pinned=embedded.is_cuda)
    try:
        seq = store.new_sequence()
        store.reserve([seq], [len(ids)])
        queries = prefill_keeping_queries(
            lean,
            embedded,
            pack((1, len(ids)), None, torch.arange(len(ids))[None], None),
            store,
            seq,
            slice_tokens=2048,
            num_queries=PROMPT_QUERIES + steps,
        )
        store.commit([seq], [len(ids)])
        layers = range(DENSE_LAYERS, store.num_layers)
        keys = torch.stack([store.gather(seq, layer)[0] for layer in layers]).to(device).float()
    finally:
        store.close()
    last = torch.stack(queries[DENSE_LAYERS:]).float()
    return ReadText(
        keys, last.view(len(last), shape.num_kv_heads, -1, *last.shape[2:]), steps, lean.sm_scale
    )


def threshold(table: Tensor, alpha: float) -> Tensor:
    """theta = mean + alpha * max / sqrt(kurtosis) of each row [units, n], as [units, 1]."""
    mean = table.mean(1, keepdim=True)
    squares = (table - mean).square_()
    variance = squares.mean(1, keepdim=True)
    fourth = squares.square_().mean(1, keepdim=True)
    peak = table.amax(1, keepdim=True)
    return mean + alpha * peak * variance / fourth.clamp_min(1e-38).sqrt()


class Tables:
    """The two tables of all units under a rule, float32 [units, num_tokens] (equations 4 to 10)."""

    def __init__(self, rule: Rule, first_scores: tuple[Tensor, Tensor]) -> None:
        self._rule = rule
        self.vertical, self.slash = (of_units(rule, scores).clone() for scores in first_scores)

    def candidates(self, kv_len: int) -> Tensor:
        """bool [units, kv_len - SINKS], before the query of token kv_len - 1."""
        rule, newest = self._rule, kv_len - 1
        vertical, slash = self.vertical[:, SINKS:newest], self.slash[:, : newest - SINKS]

        def above(of_vertical: Tensor, of_slash: Tensor) -> Tensor:
            found = vertical.new_zeros(len(vertical), kv_len - SINKS, dtype=torch.bool)
            if rule.vertical:
                found[:, :-1] |= vertical > of_vertical
            if rule.slash:
                found[:, 1:] |= (slash > of_slash).flip(1)
            return found

        initial = above(threshold(vertical, rule.alpha), threshold(slash, rule.alpha))
        if not rule.offsets:
            return initial
        near = torch.zeros_like(initial)
        for offset in rule.offsets:
            if offset > 0:
                near[:, offset:] |= initial[:, :-offset]
            else:
                near[:, :offset] |= initial[:, -offset:]
        if rule.above_mean:
            near &= above(vertical.mean(1, keepdim=True), slash.mean(1, keepdim=True))
        return initial | near

    def observe(self, tokens: Tensor, weights: Tensor, votes: Tensor, kv_len: int) -> None:
        """Learn from a step.

        Args:
            tokens: int64 [units, k], counted from SINKS; weights: of them, 0 where none is.
            votes: bool [units], whose tables change.
        """
        weights = 0.5 * weights * votes[:, None]
        decay = torch.where(votes, GAMMA, 1.0)[:, None]
        for table, places in (
            (self.vertical, tokens + SINKS),
            (self.slash, kv_len - 1 - SINKS - tokens),
        ):
            table[:, :kv_len] *= decay
            table.scatter_add_(1, places, weights)


def first_scores(text: ReadText) -> tuple[Tensor, Tensor]:
    """Equation 4: by position and by distance, [num_layers, num_kv_heads, group, num_tokens]."""
    shape = *text.queries.shape[:3], text.keys.shape[2]
    vertical, slash = text.keys.new_zeros(2, *shape)
    scale = 0.5 / ((1 - GAMMA) * PROMPT_QUERIES)
    for kv_len in range(text.context - PROMPT_QUERIES + 1, text.context + 1):
        weights = without_sinks(text.weights(kv_len)) * scale
        vertical[..., SINKS:kv_len] += weights
        slash[..., : kv_len - SINKS] += weights.flip(-1)
    return vertical, slash


def without_sinks(weights: Tensor) -> Tensor:
    """Weights [..., kv_len] of the tokens that are no sinks, normalised."""
    rest = weights[..., SINKS:]
    return rest / rest.sum(-1, keepdim=True).clamp_min(1e-30)


def of_units(rule: Rule, weights: Tensor) -> Tensor:
    """[num_layers, num_kv_heads, group, n] -> [units, n]: query heads, or means of groups."""
    return weights.flatten(0, 2) if rule.per_query_head else weights.mean(2).flatten(0, 1)


class Sparsity:
    """How much of a head's attention its sinks have, estimated without scoring all keys."""

    def __init__(self, text: ReadText) -> None:
        self._text = text
        scores = text.scores(text.context, slice(SINKS, text.context))
        self._mean_keys = text.keys[:, :, None, SINKS : text.context].mean(3)
        self._ratios = scores.var(-1, correction=0) / _square(text.query(text.context))

    def shares(self, kv_len: int) -> Tensor:
        """[num_layers, num_kv_heads, group]: s of equation 6 for token kv_len - 1."""
        query, scores = self._text.query(kv_len), self._text.scores
        of_sinks = scores(kv_len, slice(0, SINKS)).logsumexp(-1)
        local = scores(kv_len, slice(kv_len - LOCAL_TOKENS, kv_len)).logsumexp(-1)
        mean = (query * self._mean_keys).sum(-1) * self._text.sm_scale
        everything = mean + 0.5 * self._ratios * _square(query) + math.log(kv_len - SINKS)
        return torch.sigmoid(of_sinks - torch.maximum(everything, local))


def _square(x: Tensor) -> Tensor:
    return x.square().sum(-1).clamp_min(1e-30)


def replay(
    text: ReadText,
    rules: Sequence[Rule],
    *,
    parts: int = 4,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Decode the text's last steps under every rule.

    Returns:
        of each rule, means over steps, layers and units that are not bypassed:
        overlap: with exact top-k, equation 2; overlap_far: of those of its tokens that are not
            among the last NEAR_TOKENS; overlap_1 ...: overlap in each of `parts` of the steps.
        candidates: share of the context that is scored.
        mass: attention of what was chosen, over that of exact top-k.
        bypassed: share of the query heads.
        And of the text: near_mass, the share of attention beside the sinks that the last
        NEAR_TOKENS have; clustered: of the top 2 %, the share whose next is at most 2 further on;
        quest, quest_mass: overlap and mass of as many tokens in Quest's pages of 16;
        bypassed_0.95 ...: share of the query heads above each of THRESHOLDS.
    """
    scores = first_scores(text)
    tables = [Tables(rule, scores) for rule in rules]
    del scores
    sparsity, pages = Sparsity(text), _QuestPages(text)
    sums: list[dict[str, list[Tensor]]] = [defaultdict(list) for _ in rules]
    of_text: dict[str, list[Tensor]] = defaultdict(list)
    for step in range(text.steps):
        kv_len = text.context + step + 1
        weights, shares = text.weights(kv_len), sparsity.shares(kv_len)
        for limit in THRESHOLDS:
            of_text[f"bypassed_{limit}"].append((shares > limit).float().mean())
        beside = without_sinks(weights)
        of_text["near_mass"].append(beside[..., -NEAR_TOKENS:].sum(-1).mean())
        _look_at_top(beside.flatten(0, 2), pages, of_text)
        best = {rule.asked: _best(rule, weights) for rule in rules}
        for rule, table, seen in zip(rules, tables, sums, strict=True):
            bypassed = shares > rule.bypass_threshold
            _step(rule, table, seen, weights, bypassed, best[rule.asked])
        on_step()
    return [_means(seen, parts) for seen in sums], {
        name: float(torch.stack(values).mean()) for name, values in of_text.items()
    }


def _best(rule: Rule, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Importance [units, n] of the tokens from SINKS on, and exact top-k: values and tokens."""
    importance = of_units(rule, weights[..., SINKS:])
    k = max(1, round(rule.budget_share * weights.shape[-1]))
    return importance, *importance.topk(k, 1)


def _step(
    rule: Rule,
    table: Tables,
    seen: dict[str, list[Tensor]],
    weights: Tensor,
    bypassed: Tensor,
    of_exact: tuple[Tensor, Tensor, Tensor],
) -> None:
    kv_len = weights.shape[-1]
    importance, best, best_tokens = of_exact
    candidates = table.candidates(kv_len)
    chosen, tokens = importance.masked_fill(~candidates, -1.0).topk(best.shape[1], 1)
    is_chosen = chosen >= 0
    attends = ~(bypassed.flatten() if rule.per_query_head else bypassed.all(2).flatten())
    hit = is_chosen & (chosen >= best[:, -1:])
    far = kv_len - NEAR_TOKENS - SINKS
    # Zero where a unit is bypassed: means are over those that are not.
    for name, values in {
        "overlap": hit.float().mean(1),
        "far_hits": (hit & (tokens < far)).float().sum(1),
        "far_best": (best_tokens < far).float().sum(1),
        "candidates": candidates.float().mean(1),
        "mass": (chosen * is_chosen).sum(1) / best.sum(1),
        "units": torch.ones_like(best[:, 0]),
    }.items():
        seen[name].append((values * attends).sum())
    seen["bypassed"].append(bypassed.float().mean())
    # [units, heads, k]: of each head, its weights of what its unit chose.
    heads = weights[..., SINKS:].reshape(len(tokens), -1, weights.shape[-1] - SINKS)
    of_chosen = heads.gather(2, tokens[:, None].expand(-1, heads.shape[1], -1)) * is_chosen[:, None]
    of_chosen = of_chosen / of_chosen.sum(-1, keepdim=True).clamp_min(1e-30)
    votes = ~bypassed.reshape(len(tokens), -1)
    mean = (of_chosen * votes[:, :, None]).sum(1) / votes.sum(1, keepdim=True).clamp_min(1)
    table.observe(tokens, mean, attends, kv_len)


def _means(seen: dict[str, list[Tensor]], parts: int) -> dict[str, float]:
    stacked = {name: torch.stack(values).double().cpu() for name, values in seen.items()}
    units = stacked["units"]
    means = {
        name: float(stacked[name].sum() / units.sum()) for name in ("overlap", "candidates", "mass")
    }
    means["overlap_far"] = float(stacked["far_hits"].sum() / stacked["far_best"].sum())
    means["bypassed"] = float(stacked["bypassed"].mean())
    for i, (hits, of_part) in enumerate(
        zip(stacked["overlap"].tensor_split(parts), units.tensor_split(parts), strict=True), 1
    ):
        means[f"overlap_{i}"] = float(hits.sum() / of_part.sum())
    return means


class _QuestPages:
    """Quest's bounds of pages of PAGE_TOKENS tokens, from SINKS on."""

    PAGE_TOKENS = 16

    def __init__(self, text: ReadText) -> None:
        self._text = text
        full = (text.keys.shape[2] - SINKS) // self.PAGE_TOKENS * self.PAGE_TOKENS
        keys = text.keys[:, :, SINKS : SINKS + full]
        paged = keys.reshape(*keys.shape[:2], -1, self.PAGE_TOKENS, keys.shape[3])
        self._lowest, self._highest = paged.amin(3), paged.amax(3)

    def chosen(self, kv_len: int, budget_tokens: int) -> Tensor:
        """bool [query heads of all layers, kv_len - SINKS]: the best pages of a budget.

        The page that is not full yet is one of them.
        """
        query, size = self._text.query(kv_len), self.PAGE_TOKENS
        pages, rest = divmod(kv_len - SINKS, size)
        lowest, highest = (x[:, :, :pages].transpose(2, 3) for x in (self._lowest, self._highest))
        bounds = query.clamp(min=0) @ highest + query.clamp(max=0) @ lowest
        wanted = min(max(round(budget_tokens / size) - (rest > 0), 0), pages)
        best = bounds.flatten(0, 2).topk(wanted, 1).indices
        in_page = torch.zeros_like(bounds.flatten(0, 2), dtype=torch.bool).scatter_(1, best, True)
        return functional.pad(in_page.repeat_interleave(size, 1), (0, rest), value=True)


def _look_at_top(
    beside: Tensor, pages: _QuestPages, of_text: dict[str, list[Tensor]], share: float = 0.02
) -> None:
    """What exact top-k of a share of the tokens is like, and what Quest has of it."""
    num_tokens = beside.shape[1]
    k = max(2, round(share * num_tokens))
    best, tokens = beside.topk(k, 1)
    gaps = tokens.sort(1).values.diff(dim=1)
    of_text["clustered"].append((gaps <= 2).float().mean())
    chosen = pages.chosen(num_tokens + SINKS, k)
    of_text["quest"].append((chosen.gather(1, tokens)).float().mean())
    of_text["quest_mass"].append(((beside * chosen).sum(1) / best.sum(1)).mean())
