"""What becomes of one KV head: which slots stay, and what those that do not weigh afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.kv_compression.bound import SequenceBound
from offload.kv_compression.condense import Condensed, Split, condense

BOUND = SequenceBound(slots=256, low=192, sinks=4, recent=64, condensed=16)
HEAD_DIM = 16


def random_head(num_slots: int, seed: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries that ask for some more than for others, and never for one alone."""
    generator = torch.Generator().manual_seed(seed)
    keys, values, queries = (
        torch.randn(n, HEAD_DIM, generator=generator) for n in (num_slots, num_slots, 96)
    )
    return keys, values, 0.4 * queries + 0.5


def condense_head(
    keys: Tensor, values: Tensor, queries: Tensor, split: Split, **options: bool
) -> Condensed:
    """As if there were one head in the layer."""
    found = condense(keys[None], values[None], queries[None], split, **options)
    return Condensed(found.kept[0], found.keys[0], found.values[0])


def runs_of(kept: Tensor, num_slots: int, num_runs: int) -> list[np.ndarray]:
    """Slots that did not stay, cut into runs of neighbours."""
    others = np.setdiff1d(np.arange(num_slots), kept.numpy())
    run = np.arange(len(others)) * num_runs // len(others)
    return [others[run == i] for i in range(num_runs)]


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    most = logits.max(axis=1, keepdims=True)
    return np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]


@pytest.mark.parametrize("condensed", [0, 8, 16])
def test_what_stays(condensed: int) -> None:
    keys, values, queries = random_head(256)
    keys[100] += 4.0  # asked for by all
    split = Split.of(BOUND, 256, condensed)
    result = condense_head(keys, values, queries, split)
    kept = result.kept.tolist()
    assert kept == sorted(set(kept))
    assert len(kept) + len(result.keys) == split.num_left == BOUND.low
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-64:] == list(range(192, 256))
    assert 100 in kept
    of_condensed = [slot for slot in kept if 4 <= slot < 4 + condensed]
    assert len(of_condensed) == split.stay == min(condensed, 12)
    assert len(result.keys) == 4
    assert kept[: split.before_new] == [0, 1, 2, 3, *of_condensed]


def test_the_heaviest_stay() -> None:
    """By attention, times what the value brings."""
    keys, values, queries = (x.double().numpy() for x in random_head(256))
    logits = queries @ keys.T
    weights = np.exp(logits - log_sum_exp(logits)[:, None]).mean(axis=0)
    scores = weights * np.linalg.norm(values, axis=1)
    split = Split.of(BOUND, 256, 0)
    kept = condense_head(*random_head(256), split).kept.numpy()
    expected = 4 + np.argsort(-scores[4:192])[: split.exact]
    assert set(kept[4:-64]) == set(expected)


def test_the_log_sum_exp_of_the_window_is_kept() -> None:
    """It is kept for every run and for all slots; means of keys and dropping lose some of it."""
    keys, values, queries = random_head(256)
    split = Split.of(BOUND, 256, 0)
    before = log_sum_exp((queries.double() @ keys.double().T).numpy())
    result = condense_head(keys, values, queries, split)
    means = torch.stack([keys[run].mean(0) for run in runs_of(result.kept, 256, split.new)])
    errors, lost = [], []
    for stand in (result.keys, means):
        logits = (queries.double() @ stand.double().T).numpy()
        of_runs = np.stack(
            [
                log_sum_exp((queries.double() @ keys[run].double().T).numpy())
                for run in runs_of(result.kept, 256, split.new)
            ],
            axis=1,
        )
        errors.append(np.abs(logits - of_runs).mean())
        left = np.concatenate([(queries @ keys[result.kept].T).double().numpy(), logits], axis=1)
        lost.append(np.abs(log_sum_exp(left) - before).mean())
    dropped = np.abs(log_sum_exp((queries @ keys[result.kept].T).double().numpy()) - before).mean()
    assert errors[0] < 0.6 * errors[1]
    assert lost[0] < 0.95 * min(lost[1], dropped)
    assert lost[0] < 0.01


def test_values_are_the_attention_of_their_run() -> None:
    keys, values, queries = random_head(256)
    result = condense_head(keys, values, queries, Split.of(BOUND, 256, 0))
    logits = (queries.double() @ keys.double().T).numpy()
    weights = np.exp(logits - log_sum_exp(logits)[:, None]).mean(axis=0)
    for run, value in zip(runs_of(result.kept, 256, 4), result.values.numpy(), strict=True):
        expected = np.average(values[run].numpy(), axis=0, weights=weights[run])
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-5)


def test_runs_that_nobody_asks_for() -> None:
    """Their logits are far below what float32 can tell from nothing."""
    keys, values, queries = random_head(256)
    keys[4:150] = -200.0
    result = condense_head(keys, values, queries.abs(), Split.of(BOUND, 256, 0))
    for rows in (result.keys, result.values):
        assert torch.isfinite(rows).all()
    assert (queries.abs() @ result.keys.T).max() < -50
    nothing = ((result.keys + 200).abs() < 0.1).all(dim=1)  # means, uncorrected
    assert nothing.any()


@pytest.mark.parametrize("condensed", [0, 16])
def test_heads_of_a_call_are_as_alone(condensed: int) -> None:
    split, heads = Split.of(BOUND, 256, condensed), [random_head(256, seed) for seed in range(3)]
    together = condense(*(torch.stack(rows) for rows in zip(*heads, strict=True)), split)
    for i, head in enumerate(heads):
        alone = condense_head(*head, split)
        assert torch.equal(together.kept[i], alone.kept)
        torch.testing.assert_close(together.keys[i], alone.keys)
        torch.testing.assert_close(together.values[i], alone.values)


def test_nothing_is_quadratic_in_slots() -> None:
    """No tensor is larger than the logits, with many runs of few tokens."""
    bound = SequenceBound(slots=8192, low=6144, sinks=4, recent=64, condensed=4096)
    head = (rows[None] for rows in random_head(bound.slots))
    with LargestTensor() as largest:
        found = condense(*head, Split.of(bound, bound.slots, 0))
    assert found.keys.shape == (1, 1024, HEAD_DIM)
    assert largest.num_bytes == 96 * bound.slots * 4


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, tuple) else (results,):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return results


def test_without_condensed_slots_tokens_are_dropped() -> None:
    bound = SequenceBound(slots=256, low=192, sinks=4, recent=64, condensed=0)
    result = condense_head(*random_head(256), Split.of(bound, 256, 0))
    assert len(result.kept) == 192
    assert len(result.keys) == len(result.values) == 0
