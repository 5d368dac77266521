"""Kernels are compiled before they are launched, and once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_ops.launch import has_triton

KERNELS = ["activate_kernel", "merge_state_kernel", "silu_mul_kernel"]


@pytest.mark.skipif(not has_triton, reason="triton is not installed")
def test_kernels_are_compiled_once_and_not_launched(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_ahead_program.py")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(script.parents[2])]),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, second = json.loads(run.stdout)
    assert first["compiled"] == KERNELS
    assert first["launched"] == []
    assert first["progress"][-1] == [3, 3]
    assert [done for done, _ in first["progress"]] == sorted(
        {done for done, _ in first["progress"]}
    )
    assert second["compiled"] == []
    assert len(second["launched"]) == 4
    assert second["progress"] == first["progress"]
