"""SnapKV and R-KV beside `condense`: their scores by the papers' definitions, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.bench.eval import evictions
from offload.bench.eval.evictions import (
    EVICTIONS,
    Eviction,
    mean_similarity,
    rkv_scores,
    snapkv_scores,
)
from offload.kv_compression.bound import SequenceBound
from offload.kv_compression.condense import Condensed, Split
from offload.kv_compression.window import SPACING

RECENT, NUM_SLOTS, GROUP, HEAD_DIM, POOLED = 60, 160, 3, 8, 3
BOUND = SequenceBound(slots=NUM_SLOTS, low=118, sinks=4, recent=RECENT, condensed=0)


def head(num_queries: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of which many are alike, values, and queries as `condense` gets them: in turn at two
    later positions and where they were asked, the newest among these."""
    generator = torch.Generator().manual_seed(1)
    topics = torch.randn(6, HEAD_DIM, generator=generator)
    noise, values = (torch.randn(NUM_SLOTS, HEAD_DIM, generator=generator) for _ in range(2))
    keys = topics[torch.randint(6, (NUM_SLOTS,), generator=generator)] + 0.4 * noise
    return keys, values, torch.randn(GROUP * num_queries, HEAD_DIM, generator=generator)


def condense_head(eviction: Eviction, *arguments: Any) -> Condensed:
    """Keys, values, queries and split of the second of two heads of a layer, whose first one is the
    same the other way round."""
    *rows, split = arguments
    found = eviction.condense_heads(GROUP)(*(torch.stack([x.flip(0), x]) for x in rows), split)
    return Condensed(found.kept[1], found.keys[1], found.values[1])


def recent_queries(queries: Tensor) -> np.ndarray:
    """[GROUP, n, HEAD_DIM] of the last RECENT tokens, where they were asked."""
    of_heads = queries.double().numpy().reshape(GROUP, -1, HEAD_DIM)
    num_queries = of_heads.shape[1]
    behind = [i for i in range(num_queries) if i % 3 == 0 and i * SPACING < RECENT]
    return of_heads[:, [num_queries - 1 - i for i in reversed(behind)]]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def pooled(weights: np.ndarray) -> np.ndarray:
    """A maximum over seven neighbours."""
    around = [weights[max(0, i - POOLED) : i + POOLED + 1] for i in range(len(weights))]
    return np.array([neighbours.max() for neighbours in around])


def snapkv_reference(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    weights = np.zeros(NUM_SLOTS)
    for of_head in queries:
        for back, query in enumerate(of_head[::-1]):
            seen = NUM_SLOTS - 3 * SPACING * back
            weights[:seen] += softmax(keys[:seen] @ query)
    return pooled(weights[: NUM_SLOTS - RECENT])


def redundancy_reference(keys: np.ndarray) -> np.ndarray:
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosines = units @ units.T
    for i, row in enumerate(cosines):
        row[i] = 0.0
        alike = np.flatnonzero(row > 0.5)
        if len(alike):
            row[alike[-1]] = 0.0
    return cosines.mean(axis=0)


def rkv_reference(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    old = NUM_SLOTS - RECENT
    largest = np.max([of_head @ keys[:old].T for of_head in queries], axis=0)
    importance = pooled(np.mean([softmax(row) for row in largest], axis=0))
    return 0.1 * importance - 0.9 * softmax(redundancy_reference(keys))[:old]


@pytest.mark.parametrize(
    ("scores", "reference"), [(snapkv_scores, snapkv_reference), (rkv_scores, rkv_reference)]
)
@pytest.mark.parametrize("num_queries", [1, 5, 16])
def test_scores(
    scores: Callable[..., Tensor], reference: Callable[..., np.ndarray], num_queries: int
) -> None:
    """Also of a window with fewer queries than there are recent tokens."""
    keys, values, queries = head(num_queries)
    split = Split.of(BOUND, NUM_SLOTS, 0)
    found = scores(keys, queries, split, group_size=GROUP)
    expected = reference(keys.double().numpy(), recent_queries(queries))
    assert found.shape == (NUM_SLOTS,)
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-4, atol=1e-7)
    name = {snapkv_scores: "snapkv", rkv_scores: "rkv"}[scores]
    kept = condense_head(EVICTIONS[name], keys, values, queries, split).kept.numpy()
    old = np.arange(4, NUM_SLOTS - RECENT)
    worst = sorted(set(old) - set(kept), key=lambda slot: -expected[slot])[0]
    best = [slot for slot in old if expected[slot] > expected[worst] * (1 + 1e-4) + 1e-6]
    assert len(best) > 10
    assert set(best) <= set(kept)
    assert set(kept) >= {0, 1, 2, 3, *range(NUM_SLOTS - RECENT, NUM_SLOTS)}
    assert len(kept) == BOUND.low


def test_the_last_of_keys_that_are_alike_is_not_redundant() -> None:
    keys = torch.eye(4).repeat(3, 1)
    similarity = mean_similarity(keys).view(3, 4)
    torch.testing.assert_close(similarity * 12, torch.tensor([[2.0], [1.0], [0.0]]).expand(3, 4))
    opposite = mean_similarity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
    torch.testing.assert_close(opposite, torch.tensor([-0.5, -0.5]))


def test_similarity_does_not_depend_on_how_many_rows_are_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, _, _ = head()
    expected = redundancy_reference(keys.double().numpy())
    for rows in (1, 7, NUM_SLOTS - 1, NUM_SLOTS):
        monkeypatch.setattr(evictions, "_ROWS_AT_A_TIME", rows)
        np.testing.assert_allclose(mean_similarity(keys), expected, rtol=1e-4, atol=1e-7)


def test_scores_choose_what_is_merged() -> None:
    """The same slots stay as without merging but for those that become condensed tokens."""
    keys, values, queries = head()
    merging = SequenceBound(NUM_SLOTS, BOUND.low, 4, RECENT, condensed=8)
    split = Split.of(merging, NUM_SLOTS, 0)
    merged = condense_head(EVICTIONS["rkv-fitted"], keys, values, queries, split)
    dropping = Split.of(BOUND, NUM_SLOTS, 0)
    kept = condense_head(EVICTIONS["rkv"], keys, values, queries, dropping).kept.tolist()
    assert set(merged.kept.tolist()) < set(kept)
    assert len(merged.kept) + len(merged.keys) == len(kept)
    own = condense_head(EVICTIONS["fitted"], keys, values, queries, split)
    assert own.kept.tolist() != merged.kept.tolist()
