"""Policies on a condensed sequence: as where tokens have the keys and values of its slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.inside import compression_of, runtime_of, states_of
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload.policies.registry import make_policy


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["full", "exact_topk", "lychee_cluster", "lfps", "sketch", "quest", "streaming_llm"],
        "exact_topk",
        "lychee_cluster",
        "lfps",
    ),
)
def test_equal_to_a_cache_of_these_slots(bounded: Callable[..., Any], name: str) -> None:
    """For steps after it was condensed, in which policies build anew and learn."""
    policy: Any = "full" if name == "full" else make_policy(name, budget_tokens=96)
    beside = 0 if name == "full" else 10**6
    slots = bounded(400 + beside // 1536, policy)
    bound = compression_of(slots).bound
    plain = bounded(None, policy)
    tokens = random_tokens(1, bound.slots + 20, seed=4)
    condensed, copied = slots.new_cache(), plain.new_cache()
    with torch.no_grad():
        slots(tokens[:, : bound.slots], past_key_values=condensed)
        runtime_of(slots).sequences.make_room(condensed.seqs, [1])
    kv_len = condensed.kv_lens[0]
    assert kv_len == bound.low > 96
    newest = newest_queries(plain, tokens[:, : bound.slots])
    assert (name == "lfps") == bool(newest)
    seq = copy_of_slots(slots, plain, condensed.seqs[0], kv_len, newest)
    copied.take(seq)
    with torch.no_grad():
        for i in range(bound.slots, bound.slots + 20):
            token, position = tokens[:, i : i + 1], torch.tensor([[i]])
            ours, expected = (
                model(token, past_key_values=cache, position_ids=position).logits
                for model, cache in ((slots, condensed), (plain, copied))
            )
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def newest_queries(plain: Any, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """Queries [num_qo_heads, 1, head_dim] of the last of `tokens`, in each layer that
    observes any."""
    cache = plain.new_cache()
    with torch.no_grad():
        plain(tokens, past_key_values=cache)
    queries = states_of(plain)._known[cache.seqs[0]].queries or {}
    return {i: recent.in_order(tokens.shape[1])[:, -1:] for i, recent in queries.items()}


def copy_of_slots(
    slots: Any, plain: Any, seq: int, kv_len: int, newest: dict[int, torch.Tensor]
) -> int:
    """A sequence of `plain` with the keys and values of `seq`, the query of its last token alone,
    and the marks of its text."""
    store, states = runtime_of(plain).store, states_of(plain)
    copied = store.new_sequence()
    store.reserve([copied], [kv_len])
    for layer_idx in range(store.num_layers):
        keys, values = runtime_of(slots).store.gather(seq, layer_idx)
        store.append(copied, layer_idx, keys.transpose(0, 1), values.transpose(0, 1))
        if layer_idx in newest:
            states.record_queries(copied, layer_idx, newest[layer_idx], kv_len)
    store.commit([copied], [kv_len])
    marks = states_of(slots)._known[seq].marks.first(kv_len)
    if marks is not None and len(marks):
        states.append_delimiter_classes(copied, marks)
    return int(copied)


def test_marks_of_the_text_stay_with_their_tokens() -> None:
    import numpy as np

    from offload.selection.sequence_state import TextMarks

    marks = TextMarks()
    marks.append(np.arange(1, 101, dtype=np.uint8))
    marks.renumber(100, 60, 4, 10)
    kept = marks.first(60)
    assert kept is not None
    assert kept.tolist() == [1, 2, 3, 4, *[0] * 46, *range(91, 101)]
    unknown = TextMarks()
    unknown.append(np.ones(5, np.uint8))
    unknown.renumber(100, 60, 4, 10)
    assert unknown.first(60) is None
