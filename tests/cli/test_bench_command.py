"""`offload bench attention` and the measurement behind it, on small caches."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from offload.bench.attention.measure import SHAPES, measure_attention
from offload.cli import app
from offload.measuring.synthetic.attention_cache import AttentionCache
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.models.shape import MODEL_SHAPES

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
SMALL = ["bench", "attention", "--shape", "smollm2-135m", "--context", "1000", "-r", "2"]
SMALL += ["--sparse-tokens", "100", "--threads", "1"]


@pytest.fixture(autouse=True)
def _small_last_level_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's cache outgrows that of the CPU; a test need not."""
    monkeypatch.setattr(
        "offload.measuring.synthetic.attention_cache.last_level_cache_bytes", lambda: 2**18
    )


def test_json() -> None:
    result = runner.invoke(app, [*SMALL, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["shape"] == "smollm2-135m"
    assert document["machine"]["isa"]
    measured = {row["kernel"]: row for row in document["measurements"]}
    assert list(measured) == ["dense", "sparse", "topk"]
    row_bytes = 64 * 2
    assert measured["dense"]["bytes_read"] == 3 * 2 * 1000 * row_bytes
    assert measured["sparse"]["bytes_read"] == 3 * 2 * 100 * row_bytes
    assert measured["topk"]["bytes_read"] == 3 * (1000 + 128) * row_bytes
    for row in measured.values():
        assert 0 < row["relative_error"] < 0.02
        assert row["microseconds_p10"] <= row["microseconds"] <= row["microseconds_p90"]
        assert row["yardstick_share"] > 0


def test_table() -> None:
    result = runner.invoke(app, [*SMALL, "--kernel", "dense", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "smollm2-135m, 1,000 tokens, float32" in result.stdout
    assert "dense" in result.stdout
    assert "sparse  " not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--shape", "gpt-2"], 2, "unknown 'gpt-2'; available: llama-3.1-8b"),
        (["--dtype", "int8"], 2, "unknown 'int8'; available: bfloat16"),
        (["--kernel", "dens"], 2, "unknown 'dens'; available: dense, sparse, topk"),
        (["--threads", "0"], 2, "integers of at least 1"),
        (["--context", "0"], 2, "Invalid value for '--context'"),
        (["--context", "90", "--kernel", "topk"], 1, "kv_len=90 is too short"),
        (["--sparse-tokens", "2000"], 1, "sparse_tokens must be in [1, kv_len=1000]"),
    ],
)
def test_bad_options(arguments: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, [*SMALL, *arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture
def cache() -> AttentionCache:
    shape = dataclasses.replace(MODEL_SHAPES["tiny"], num_kv_heads=2, head_dim=64)
    return AttentionCache(shape, kv_len=600, dtype=torch.float32, max_layers=3)


def test_row_numbers_are_where_the_store_says_the_rows_are(cache: AttentionCache) -> None:
    assert cache.num_layers == 3
    indices = cache.random_selection(5, seed=1)
    rows = cache.row_numbers(2, indices).reshape(2, 2, 5)
    memory = cache.memory.view(torch.float32).view(-1, 64)
    keys, values = cache.store.gather(cache.seq, 2)
    for kv_head in range(2):
        chosen = torch.from_numpy(indices[kv_head]).long()
        assert torch.equal(memory[torch.from_numpy(rows[kv_head, 0]).long()], keys[kv_head, chosen])
        assert torch.equal(
            memory[torch.from_numpy(rows[kv_head, 1]).long()], values[kv_head, chosen]
        )
    cache.close()


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
    reference = ExactAttention(
        cache.store, cache.seq, 0, query, kv_len=600, sm_scale=64**-0.5, dtype=torch.float64
    )
    keys, values = cache.store.gather(cache.seq, 0)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.view(4, 1, 64), keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
    ).flatten()
    assert reference.check_output(out, [[], []]) < 1e-5
    with pytest.raises(ArithmeticError, match="differs from the float64 reference"):
        reference.check_output(out * 1.01, [[], []])
    with pytest.raises(ArithmeticError, match="differs from the float64 reference"):
        reference.check_output(out, cache.random_selection(300, seed=3).tolist())
    options = {"budget_tokens": 100, "sink_tokens": 4, "recent_tokens": 64}
    with pytest.raises(ArithmeticError, match="the selection holds"):
        reference.check_topk([list(range(100))] * 2, **options)
    with pytest.raises(ArithmeticError, match="99 tokens selected, not 100"):
        reference.check_topk([list(range(99))] * 2, **options)
    cache.close()


def test_unknown_kernels_and_repeats_are_refused() -> None:
    options = {"kv_len": 500, "dtype": torch.float32, "threads": [1]}
    with pytest.raises(ValueError, match="unknown kernel 'tokp'; available: dense, sparse, topk"):
        measure_attention(SHAPES["smollm2-135m"], kernels=["tokp"], **options)
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        measure_attention(SHAPES["smollm2-135m"], kernels=["dense"], repeats=0, **options)
