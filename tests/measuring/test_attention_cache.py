"""Random keys in a host store, and the reference that outputs over them are compared with."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from offload.measuring.synthetic.attention_cache import AttentionCache
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.models.shape import MODEL_SHAPES


@pytest.fixture
def cache() -> AttentionCache:
    shape = dataclasses.replace(MODEL_SHAPES["tiny"], num_kv_heads=2, head_dim=64)
    return AttentionCache(shape, kv_len=600, dtype=torch.float32, max_layers=3)


def test_selections_are_sorted_unique_and_differ(cache: AttentionCache) -> None:
    first, second = (cache.random_selection(50, seed=seed) for seed in (1, 2))
    assert (np.diff(first, axis=1) > 0).all()
    assert first.min() >= 0
    assert first.max() < 600
    assert not np.array_equal(first, second)
    assert np.array_equal(first, cache.random_selection(50, seed=1))
    cache.close()


def test_the_reference_notices_wrong_outputs(cache: AttentionCache) -> None:
    query = cache.random_query(4)[0]
    reference = ExactAttention(cache.store, cache.seq, 0, query, kv_len=600, sm_scale=64**-0.5)
    keys, values = cache.store.gather(cache.seq, 0)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.view(4, 1, 64), keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
    ).flatten()
    assert reference.check_output(out, [[], []]) < 1e-5
    assert reference.relative_error(out * 1.2, [[], []]) == pytest.approx(0.2)
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        reference.check_output(out * 1.01, [[], []])
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        reference.check_output(out, cache.random_selection(300, seed=3).tolist())
    cache.close()
