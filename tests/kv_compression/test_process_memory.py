"""What the process has, not what the KV store counts, while a sequence is at its bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.kv_compression.window import NUM_QUERIES

PER_SEQUENCE, NUM_NEW = 16 * 2**20, 50_000
TOKEN_BYTES = 3 * 2 * 2 * 32 * 4  # layers, K|V, KV heads, head_dim, float32
SLOTS = PER_SEQUENCE // (64 * TOKEN_BYTES) * 64


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("condense_by", ["attention", "reconstruction"])
def test_resident_memory_stays_within_the_bound(long_folder: Path, condense_by: str) -> None:
    """Resident bytes of a process of its own after each 50 of 50,000 tokens, less what it had when
    the model was loaded and everything had run once: `host_bytes_per_sequence` is what they may
    come to, and 2 % more for the interpreter's and the allocator's own changes. They have to come
    to it, too, or it would not be the sequence that is measured; and once it is full, nothing may
    grow. The peak has what is there beside the bound while tokens are condensed.
    """
    arguments = [str(long_folder), condense_by, str(PER_SEQUENCE), str(NUM_NEW)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "cases.bounded_process", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kept"] <= found["slots"] <= SLOTS
    assert found["condensed_tokens"] == NUM_NEW - found["kept"] > NUM_NEW / 2
    grown = {seen: rss - found["before"] for seen, rss in found["samples"]}
    full = [num_bytes for seen, num_bytes in grown.items() if seen > SLOTS]
    assert max(grown.values()) <= 1.02 * PER_SEQUENCE
    assert min(full) >= 0.98 * found["page_bytes"] >= 0.95 * PER_SEQUENCE
    half = len(full) // 2
    assert max(full[half:]) - max(full[:half]) <= 0.02 * PER_SEQUENCE
    assert found["peak"] - found["before"] <= 1.02 * PER_SEQUENCE + beside_bytes(condense_by)


def beside_bytes(condense_by: str) -> int:
    """While tokens are condensed. By reconstruction a layer's rows twice, where a head has no
    more than all tokens. By attention a layer's rows before and after, those of its KV heads in
    the type of the model, which is float32 here; their logits; and of all heads and layers an
    int32 for each slot, and indices of a layer as int64."""
    if condense_by == "reconstruction":
        return 2 * NUM_NEW * TOKEN_BYTES // 3
    rows = SLOTS * TOKEN_BYTES // 3 * 7 // 4
    queries = 6 * NUM_QUERIES  # of all heads of a layer
    logits = SLOTS * queries * 4
    indices = SLOTS * 2 * (3 * 4 + 3 * 8)
    return rows + logits + indices
