"""Quest over chunks: the best of them up to the budget, and a state that follows the sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases.lychee_cases import GROUP, HEAD_DIM, KV_HEADS, Stream

from cpu_ops.worker_pool import WorkerPool
from offload.policies import Quest
from offload.policies.lychee_cluster.chunks import cut_chunks
from offload.policies.quest import keep_budget
from offload.policies.registry import make_policy

OPTIONS = {"budget_tokens": 96, "sink_tokens": 4, "recent_tokens": 30, "dense_layers": 0}
POLICY = Quest(**OPTIONS, chunks=True)


def starts_of(stream: Stream) -> np.ndarray:
    """Of the chunks that have bounds, and the end of the last."""
    arrays = stream.attention.states.arrays_of(stream.seq).layers[0]
    (count,) = set(arrays["runs"].tolist())
    assert (arrays["starts"][0, : count + 1] == arrays["starts"][1, : count + 1]).all()
    return arrays["starts"][0, : count + 1]


def check_selection(stream: Stream, query: torch.Tensor) -> None:
    """The chunks of largest bound, one of them cut at its end, of what the sequence has."""
    policy, kv_len = stream.policy, stream.kv_len
    starts, last = starts_of(stream), kv_len - policy.recent_tokens
    keys = stream.store.gather(stream.seq, 0)[0].double().numpy()
    heads = query.double().numpy().reshape(KV_HEADS, GROUP, HEAD_DIM)
    for head, tokens in enumerate(stream.attention.last_selection()):
        assert tokens == sorted(set(tokens))
        assert tokens[: policy.sink_tokens] == list(range(policy.sink_tokens))
        assert tokens[-policy.recent_tokens :] == list(range(last, kv_len))
        chosen = set(tokens[policy.sink_tokens : -policy.recent_tokens])
        loose = set(range(starts[-1], last))
        assert loose <= chosen
        wanted: set[int] = set()
        room = policy.budget_tokens - policy.sink_tokens - policy.recent_tokens - len(loose)
        bounds = []
        for begin, end in pairwise(starts):
            rows = keys[head, begin:end]
            extremes = np.stack([rows.max(0), rows.min(0)])[None]
            bounds.append((heads[head][:, None] * extremes).max(1).sum())
        for chunk in np.argsort(bounds)[::-1]:
            of_chunk = [t for t in range(starts[chunk], starts[chunk + 1]) if t < last]
            wanted |= set(of_chunk[: max(0, room - len(wanted))])
        assert chosen - loose == wanted


@pytest.mark.parametrize("kv_len", [100, 101, 131, 300])
@pytest.mark.parametrize("text", [True, False])
def test_the_best_chunks_are_attended(kv_len: int, text: bool, pool: WorkerPool) -> None:
    stream = Stream(POLICY, pool, text=text)
    stream.prefill(kv_len)
    for _ in range(45):
        check_selection(stream, stream.step())
    arrays = stream.attention.states.arrays_of(stream.seq).layers[0]
    lengths = np.diff(starts_of(stream))
    assert (lengths == 24).all() if not text else 8 <= lengths.min() < lengths.max() <= 24
    # Chunks that were appended are those of a new build, and so are their bounds.
    attention = stream.attention
    attention.states.truncate(stream.seq, stream.kv_len)
    keys, values = stream.store.gather(stream.seq, 0)
    context = attention.states.build_context(stream.seq, 0, keys, values, stream.kv_len)
    fresh = POLICY.state.build(replace(context, capacity_tokens=stream.kv_len))
    count = int(fresh["runs"][0])
    assert starts_of(stream).tolist() == fresh["starts"][0, : count + 1].tolist()
    np.testing.assert_array_equal(arrays["bounds"][:, :, :count], fresh["bounds"][:, :, :count])


def test_chunks_end_where_the_text_does(pool: WorkerPool) -> None:
    stream = Stream(POLICY, pool)
    stream.prefill(400)
    stream.step()
    marks = stream.attention.states.marks_of(stream.seq)[:401]
    expected = cut_chunks(marks, 4, 400, 8, 24)
    assert starts_of(stream).tolist() == expected.tolist()


def test_a_cut_sequence_cuts_its_chunks_anew(pool: WorkerPool) -> None:
    stream = Stream(POLICY, pool)
    stream.prefill(300)
    stream.step()
    stream.attention.states.truncate(stream.seq, 200)
    stream.store.truncate(stream.seq, 200)
    stream.kv_len = 200
    assert starts_of(stream)[-1] <= 200
    for _ in range(60):
        check_selection(stream, stream.step())


def test_the_state_grows(pool) -> None:
    policy = POLICY
    bounds = np.arange(2 * 2 * 3 * 8, dtype=np.float32).reshape(2, 2, 3, 8)
    starts = np.tile(np.array([4, 12, 30, 41], np.int32), (2, 1))
    small = policy.state._arrays(bounds, starts, np.full(2, 3, np.int32), 60)
    grown = policy.state.grow(0, small, 600, pool)
    assert grown["bounds"].shape[2] == (600 - 4) // 8
    np.testing.assert_array_equal(grown["bounds"][:, :, :3], bounds)
    assert grown["starts"][1, :4].tolist() == [4, 12, 30, 41]
    assert grown["runs"].tolist() == small["runs"].tolist()


def test_keep_budget() -> None:
    starts = np.array([4, 12, 30, 41, 50], np.int32)
    scores = np.array([1.0, 4.0, 2.0, 3.0], np.float32)
    indices = np.full(60, -1, np.int32)
    count = keep_budget(np.arange(4, dtype=np.int32), scores, starts, 48, 30, indices)
    assert indices[:count].tolist() == [*range(12, 30), *range(30, 35), *range(41, 48)]
    count = keep_budget(np.arange(4, dtype=np.int32), scores, starts, 50, 60, indices)
    assert indices[:count].tolist() == list(range(4, 50))


def test_options() -> None:
    assert make_policy("tidal_decode", inner=POLICY).members == POLICY.members
    with pytest.raises(ValueError, match="chunks must be true or false, got 1"):
        make_policy("quest", chunks=1)
