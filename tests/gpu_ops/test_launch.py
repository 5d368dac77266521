"""Which code an operator runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_ops.launch import has_triton, interpreted, next_power_of_2, runs_kernel

MODULES = sorted(path.stem for path in Path(runs_kernel.__code__.co_filename).parent.glob("*.py"))

WITHOUT_TRITON = f"""
import importlib, sys
sys.modules["triton"] = None
for name in {MODULES}:
    importlib.import_module("gpu_ops" if name == "__init__" else f"gpu_ops.{{name}}")
import torch
from gpu_ops.launch import interpreted
from gpu_ops.silu_mul import silu_mul
out = torch.empty(1, 2)
silu_mul(torch.ones(1, 4), out)
print(out.tolist())
with interpreted():
    pass
"""

NOT_INTERPRETING = """
from gpu_ops.launch import interpreted
with interpreted():
    pass
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]  # first on the program's path
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)


def test_references_need_no_triton() -> None:
    result = run(WITHOUT_TRITON)
    assert result.stdout.startswith("[[0.731"), result.stderr
    assert "RuntimeError: interpreted() needs triton" in result.stderr
    assert "triton is not installed" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not has_triton, reason="triton is not installed")
def test_interpreting_needs_the_variable() -> None:
    assert "RuntimeError: interpreted() needs triton and TRITON" in run(NOT_INTERPRETING).stderr


@pytest.mark.skipif(not has_triton, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="triton compiles here")
def test_cpu_tensors_take_the_reference_unless_asked() -> None:
    x = torch.zeros(1)
    assert not runs_kernel(x)
    with interpreted():
        assert runs_kernel(x)
    assert not runs_kernel(x)


def test_block_sizes() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
