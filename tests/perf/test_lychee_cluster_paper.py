"""LycheeCluster as its paper has it, the jobs of its measurement, and the tables beside its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.lychee_cases import KV_HEADS, Stream

from cpu_ops.worker_pool import WorkerPool
from offload.policies.lychee_cluster import LycheeCluster
from perf.papers.lychee_cluster import TASKS, TEXTS, WINDOWS, jobs_of
from perf.papers.lychee_variants import AsPublished, answering, variants, with_chunk_maxima
from perf.results_file import read_results
from perf.tables.lychee_cluster_tables import (
    answers_table,
    budget_table,
    chunks_table,
    granularity_table,
    pooling_table,
    stability_table,
)

OPTIONS: dict[str, Any] = {"budget_tokens": 160, "sink_tokens": 4, "recent_tokens": 16}
OPTIONS |= {"buffer_tokens": 48, "dense_layers": 0}


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(1)
    yield pool
    pool.close()


def test_whole_clusters_are_attended(pool: WorkerPool) -> None:
    """No more candidates than the budget's 160 tokens, where ours weighs twice as many."""
    scored = {}
    ours = LycheeCluster(**OPTIONS, least_candidates=0, candidate_ratio=1.75)
    for policy in (AsPublished(**OPTIONS), ours):
        stream = Stream(policy, pool)
        stream.prefill(2000)
        stream.step()
        stream.attention.start_profile()
        stream.step()
        scored[type(policy)] = stream.attention.profile()["scored_tokens"] / KV_HEADS
    assert scored[AsPublished] == 160
    assert 220 < scored[LycheeCluster] < 330


def test_maxima_stand_for_every_key_of_a_chunk() -> None:
    keys = torch.randn(2, 40, 8, dtype=torch.bfloat16)
    pooled = with_chunk_maxima(keys, np.array([4, 12, 20, 36]))
    for first, last in ((4, 12), (12, 20), (20, 36)):
        expected = keys[:, first:last].amax(1, keepdim=True).expand(-1, last - first, -1)
        assert torch.equal(pooled[:, first:last], expected)
    for outside in (slice(0, 4), slice(36, 40)):
        assert torch.equal(pooled[:, outside], keys[:, outside])


def test_max_pooling_makes_another_index(pool: WorkerPool) -> None:
    rows = []
    for pooling in ("mean", "max"):
        stream = Stream(AsPublished(**OPTIONS, pooling=pooling), pool)
        stream.prefill(600)
        stream.step()
        rows.append(stream.index.arrays["rows"])
    assert rows[0].shape == rows[1].shape
    assert (rows[0] != rows[1]).mean() > 0.5


def test_full_attention_answers_first_and_jobs_cover_everything() -> None:
    labels = list(variants())
    assert labels[0] == "full"
    assert labels[: len(answering())] == answering()
    jobs = jobs_of([4096, 8192, 32000], samples=2, stability_steps=1024)
    assert len(set(jobs)) == len(jobs)
    assert {(j.kind, j.index) for j in jobs if j.part == "answers"} == {
        (task, index) for task in TASKS for index in range(2)
    }
    assert {j.length for j in jobs if j.part == "answers"} == {8192}
    windows = {(j.kind, j.length) for j in jobs if j.part == "recall"}
    assert windows == {(k, n) for k in TEXTS for n in (4096, 8192)} | {("prose", 32000)}
    assert sum(j.part == "recall" for j in jobs) == 1 + WINDOWS * len(TEXTS) * 2


def result() -> dict[str, Any]:
    measured = {"recall": 0.5, "mass_kept": 0.9, "kl": 0.01, "build_seconds": 1.5}
    named = {"part": "recall", "kind": "code", "length": 8192}
    rows = [
        {**named, **measured, "variant": label, "index": index}
        for label in variants()
        for index in range(2)
    ]
    rows[-1] |= {"recall": 0.25}
    for row in rows:
        if row["variant"] == "published max":
            row["recall"] = 0.4 if row["index"] == 0 else 0.6
    segment = {"jaccard": 0.7, "window_hit": 0.99, "recall": 0.5, "mass_kept": 0.9}
    named = {"part": "stability", "length": 2048, "first_step": 1024}
    rows.append({**named, **segment, "kind": "ours 1024"})
    settings = {"model": "m", "workers": 2, "threads": 3}
    measured_before = read_results("selection")
    assert measured_before is not None
    return {"machine": measured_before["machine"], "settings": settings, "rows": rows}


def test_tables() -> None:
    measured = result()
    assert "| code, 8,192 tokens | 2 | 50.0% | 50.0% | 1 | 0.900 | 0.900 | 0.010 / 0.010 |" in (
        pooling_table(measured)
    )
    assert "| code, 8,192 tokens | 2 | 50.0% / 50.0% | 0.900 / 0.900 |" in chunks_table(measured)
    assert "| ours | 2,048 | 50.0%, 0.010 |" in budget_table(measured)
    granularity = granularity_table(measured)
    assert "| published | 8 | < 40% | 37.5% | 1.50 |" in granularity
    assert "| ours | 2 |" in granularity
    assert "| ours | 8 |" not in granularity  # it has no clusters
    assert "| 1,024 |  |  |  |  | 0.700 | 0.990 | 0.500 | 0.900 |" in stability_table(measured)
    assert answers_table(measured) == "*No questions were asked.*"


def test_answers_are_held_against_full_attention() -> None:
    measured = result()
    answer = {"attended_tokens": 1000.0, "decode_seconds": 1.0, "build_seconds": 0.0}
    answer |= {"new_tokens": 5}
    for index, score in enumerate((1.0, 0.0)):
        record = {"task": "json", "length": 8192, "index": index, "prompt_tokens": 8000}
        record |= {"truncated_tokens": 0, "prefill_seconds": 0.1}
        answers = {"full": answer | {"score": 1.0}, "ours 1024": answer | {"score": score}}
        measured["rows"].append({"part": "answers", **record, "answers": answers})
    table = answers_table(measured)
    assert "| json | 8,192 | 2 | 100.0 | 50.0 |" in table
    assert "| ours 1024 | 50.0 | -50.0 |" in table
