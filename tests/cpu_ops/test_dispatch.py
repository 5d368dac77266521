"""Which ISA runs: the default, OFFLOAD_ISA, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases.processes import run_program
from cases.slowly import slow_but

from cpu_ops import _native, native

TESTS = Path(__file__).parents[1]
AVAILABLE = native.available_isas()
MISSING = [isa for isa in native.known_isas() if isa not in AVAILABLE]

# One attention and one linear, checked against float64, by whatever ISA the environment forces.
SCRIPT = """
import numpy as np, torch
from cases.attention_cases import TOLERANCE, Cache, attend, random_queries, relative_error
from cases.seeded import new_rng
from cpu_ops import native
from cases import kernel_references as reference
from cpu_ops.linear import Linear
from cpu_ops.worker_pool import WorkerPool

rng = new_rng()
pool = WorkerPool(2)
for dtype, tolerance in TOLERANCE.items():
    cache = Cache.random(rng, kv_len=300, dtype=dtype)
    queries = random_queries(rng, 1, 6, 64, dtype)
    out, _ = attend(cache.attention(pool, 3), [cache.seq], [300], queries)
    heads = queries.double().numpy().reshape(6, 64)
    expected, _, _ = reference.attention(heads, cache.keys, cache.values, sm_scale=0.125)
    assert relative_error(out[0], expected) < tolerance, dtype
    weight = torch.randn(70, 48).to(dtype)
    x = torch.randn(2, 48).to(dtype)
    y = Linear([weight])(pool, x).double().numpy()
    assert relative_error(y, x.double().numpy() @ weight.double().numpy().T) < tolerance, dtype
print(native.isa_name())
"""


@pytest.mark.parametrize("isa", slow_but(AVAILABLE, "avx2"))
def test_forced_isa_runs(isa):
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    result = run_program(SCRIPT, OFFLOAD_ISA=isa, PYTHONPATH=paths)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == isa


def test_the_default_is_available(monkeypatch):
    monkeypatch.delenv("OFFLOAD_ISA", raising=False)
    assert _native.default_isa() in AVAILABLE
    monkeypatch.setenv("OFFLOAD_ISA", "")
    assert _native.default_isa() in AVAILABLE


@pytest.mark.parametrize("isa", AVAILABLE)
def test_the_environment_chooses(isa, monkeypatch):
    monkeypatch.setenv("OFFLOAD_ISA", isa)
    assert _native.default_isa() == isa


@pytest.mark.parametrize("isa", MISSING)
def test_an_isa_this_machine_lacks_is_refused(isa, monkeypatch):
    monkeypatch.setenv("OFFLOAD_ISA", isa)
    expected = f"this CPU or build lacks the ISA '{isa}'; available: {', '.join(AVAILABLE)}"
    with pytest.raises(ValueError, match=expected):
        _native.default_isa()


@pytest.mark.parametrize("isa", ["AVX2", "avx2 ", "native", "avx512bf16"])
def test_an_unknown_name_is_refused(isa, monkeypatch):
    monkeypatch.setenv("OFFLOAD_ISA", isa)
    with pytest.raises(ValueError, match=f"unknown ISA '{isa}'; available: scalar"):
        _native.default_isa()


def test_available_isas_are_known_and_ordered():
    known = native.known_isas()
    assert AVAILABLE[0] == "scalar"
    assert sorted(AVAILABLE, key=known.index) == AVAILABLE
    assert {"scalar", "neon", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"} == set(known)
