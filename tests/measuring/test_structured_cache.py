"""Keys and queries that are made: their structure, and the statistics that measure it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cases.attention_statistics import (
    attention_statistics,
    mean_statistics,
    statistics_outside_range,
)

from offload.measuring.synthetic.structured_cache import StructuredLayer, structured_layer
from offload.models.shape import ModelShape

HEADS = ("num_qo_heads", "num_kv_heads", "head_dim")


def make(**changes: object) -> StructuredLayer:
    heads = {name: changes.pop(name) for name in HEADS if name in changes}
    shape = dataclasses.replace(ModelShape(2, 128, 8, 2, 64, 256, 512, 8192), **heads)
    options: dict[str, object] = {"kv_len": 1000, "num_steps": 8, "dtype": torch.float32, "seed": 0}
    return structured_layer(shape, **(options | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_statistics_are_those_of_real_attention(head_dim: int) -> None:
    layers = [
        make(num_qo_heads=32, num_kv_heads=8, head_dim=head_dim, kv_len=4096, layer_idx=layer_idx)
        for layer_idx in range(2)
    ]
    found = mean_statistics([attention_statistics(layer.queries, layer.keys) for layer in layers])
    assert statistics_outside_range(found, 4096) == []


def test_noise_is_told_from_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(8, 40, 64, generator=generator)
    keys = torch.randn(2, 2048, 64, generator=generator)
    outside = statistics_outside_range(attention_statistics(queries, keys), 2048)
    assert "near_share" in outside
    assert len(outside) >= 6


def test_statistics_against_plain_loops() -> None:
    layer = make(kv_len=600)
    keys, queries = layer.keys.double().numpy(), layer.queries.double().numpy()
    kv_len, n = keys.shape[1], queries.shape[1]
    k = round(0.02 * kv_len)
    sinks, tops, nears, overlaps, gaps = [], [], [], [], []
    for kv_head in range(2):
        chosen = []
        for i in range(n):
            seen = kv_len - n + i + 1
            group = np.zeros(seen)
            for q in queries[4 * kv_head : 4 * kv_head + 4, i]:
                scores = keys[kv_head, :seen] @ q / 8
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                sinks.append(weights[:4].sum())
                weights[:4] = 0
                group += weights
                tops.append(np.sort(weights)[-k:].sum() / weights.sum())
                nears.append(weights[-64:].sum() / weights.sum())
            chosen.append(set(np.argsort(group)[-k:].tolist()))
            gaps.append(np.mean(np.diff(sorted(chosen[-1])) <= 2))
        overlaps += [len(a & b) / k for a, b in zip(chosen[8:], chosen[:-8], strict=True)]
    found = attention_statistics(layer.queries, layer.keys)
    assert found.sink_share == pytest.approx(np.mean(sinks), abs=1e-5)
    assert found.top_mass == pytest.approx(np.mean(tops), abs=1e-5)
    assert found.near_share == pytest.approx(np.mean(nears), abs=1e-5)
    assert found.overlap_8 == pytest.approx(np.mean(overlaps), abs=2e-3)
    assert found.clustering == pytest.approx(np.mean(gaps), abs=2e-3)


def test_equal_arguments_give_equal_tensors() -> None:
    first, second = make(), make()
    for name in ("keys", "values", "queries"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    for changed in (make(seed=1), make(layer_idx=1)):
        assert not torch.equal(first.keys, changed.keys)
        assert not torch.equal(first.queries, changed.queries)


def test_shapes_and_dtype() -> None:
    layer = make(dtype=torch.bfloat16, prompt_queries=20)
    assert layer.keys.shape == layer.values.shape == (2, 1008, 64)
    assert layer.queries.shape == (8, 28, 64)
    assert {layer.keys.dtype, layer.values.dtype, layer.queries.dtype} == {torch.bfloat16}
    for x in (layer.keys, layer.values, layer.queries):
        assert bool(torch.isfinite(x).all())


def top_tokens(layer: StructuredLayer, step: int) -> list[set[int]]:
    """The 5 % of most weight of each KV head, without sinks and the last 64 tokens."""
    found = []
    for kv_head, keys in enumerate(layer.keys):
        query = layer.queries[4 * kv_head : 4 * kv_head + 4, step]
        weights = (query @ keys.T / 8).softmax(-1).sum(0)[4:-64]
        found.append(set(weights.topk(len(weights) // 20).indices.tolist()))
    return found


def test_selections_change_from_step_to_step_and_layers_share_some() -> None:
    layer, below, other = make(), make(layer_idx=1), make(seed=1)

    def common(a: list[set[int]], b: list[set[int]]) -> float:
        return float(np.mean([len(x & y) / len(x) for x, y in zip(a, b, strict=True)]))

    last = top_tokens(layer, -1)
    next_step = common(last, top_tokens(layer, -2))
    later = common(last, top_tokens(layer, -30))
    assert 0.25 < later < next_step < 0.95
    assert common(last, top_tokens(below, -1)) > common(last, top_tokens(other, -1)) + 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 30}, "head_dim must be a multiple of 8 and at least 32, got 30"),
        ({"num_qo_heads": 7}, "num_qo_heads must be a multiple of num_kv_heads=2, got 7"),
        ({"kv_len": 200}, "kv_len must be at least 256"),
        ({"num_steps": 700}, "hold twice the 732 queries, got 1000"),
    ],
)
def test_bad_numbers_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_statistics_where_the_sinks_have_everything() -> None:
    keys, queries = torch.zeros(1, 600, 64), torch.ones(2, 33, 64)
    keys[:, 0] = 10
    found = attention_statistics(queries, keys)
    assert found.sink_share == 1
    assert 0 <= found.near_share <= 1


def test_a_seed_of_any_size() -> None:
    assert not torch.equal(make(seed=2**64).keys, make(seed=0).keys)


@pytest.mark.cuda
def test_statistics_of_keys_made_on_a_gpu() -> None:
    device = torch.device("cuda")
    layers = [
        make(
            num_qo_heads=32,
            num_kv_heads=8,
            head_dim=128,
            kv_len=4096,
            layer_idx=layer_idx,
            device=device,
        )
        for layer_idx in range(2)
    ]
    assert layers[0].keys.is_cuda
    found = mean_statistics(
        [attention_statistics(layer.queries.cpu(), layer.keys.cpu()) for layer in layers]
    )
    assert statistics_outside_range(found, 4096) == []
