"""What policies ask for ahead of time changes no result; it reads no foreign address."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from cases.lychee_cases import GROUP, HEAD_DIM, KV_HEADS, Stream
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.policies.lychee_cluster.views import FOUND, OPENED
from offload.selection.callback import IS_ZEN_5, prefetch

POLICY = LycheeCluster(
    budget_tokens=160, sink_tokens=4, recent_tokens=16, buffer_tokens=48, dense_layers=0
)


@numba.njit
def _fetch(address: Any, num_bytes: Any) -> None:
    prefetch(address, num_bytes)


def test_prefetch_is_an_instruction_and_takes_any_address():
    """Also one that is not mapped: nobody waits for it, nobody faults."""
    room = np.zeros(1000, np.uint8)
    for offset, num_bytes in ((0, 1000), (7, 300), (63, 1), (5, 0)):
        _fetch(room.ctypes.data + offset, num_bytes)
    _fetch(64, 256)
    if platform.machine() == "x86_64":
        (code,) = _fetch.inspect_asm().values()
        assert ("prefetcht0" if IS_ZEN_5 else "prefetcht1") in code


def run(pool: WorkerPool, policy: LycheeCluster, *, prepares: bool, steps: int) -> list[Any]:
    """Selections of a growing sequence."""
    rng = new_rng()
    stream = Stream(policy, pool, rng=rng)
    stream.prefill(1500)
    results: list[Any] = []
    for _ in range(steps):
        rows = rng.standard_normal((1, KV_HEADS * GROUP * HEAD_DIM), dtype=np.float32)
        stream.step(torch.from_numpy(rows))
        if prepares:
            step = stream.attention.begin_step([stream.seq], [stream.kv_len])
            for _ in range(3):  # more often than it must be
                stream.attention.prepare(0, step)
        results.append(stream.selection())
    return results


@pytest.mark.parametrize("options", [{"ranked_chunks": 10}, {}], ids=str)
def test_preparing_changes_nothing(options, pool):
    policy = replace(POLICY, **options)
    expected = run(pool, policy, prepares=False, steps=60)
    actual = run(pool, policy, prepares=True, steps=60)
    for ours, theirs in zip(actual, expected, strict=True):
        for tokens, others in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(tokens, others)


def test_what_was_opened_is_known_in_the_next_step(pool):
    """Grafts leave the search's units alone."""
    stream = Stream(replace(POLICY, ranked_chunks=100), pool)
    stream.prefill(3000)
    for _ in range(80):
        stream.step()
        arrays, index = stream.index.arrays, stream.index
        for head in range(KV_HEADS):
            units = arrays["units"][head]
            opened, found = units[OPENED], units[FOUND]
            assert 1 < opened <= index.num_units + 1
            assert len(set(units[:opened])) == opened
            assert units[: opened - 1].max() < index.num_units  # the last is what was grafted
            assert 0 < found <= index.candidate_capacity
