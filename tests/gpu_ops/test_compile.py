"""Triton's compiler takes every kernel for an H100/H200, where there is no GPU, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_ops.launch import has_triton

pytestmark = pytest.mark.slow

MAX_REGISTERS = 168  # more would leave a multiprocessor fewer than three programs of four warps


@pytest.mark.skipif(not has_triton, reason="triton is not installed")
def test_compiles_without_spills(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(script.parents[2])]),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = [line.split() for line in run.stdout.splitlines()]
    assert {name for name, *_ in kernels} == {
        "activate_kernel",
        "add_points_kernel",
        "add_rms_norm_kernel",
        "append_codes_kernel",
        "candidates_kernel",
        "chunk_max_kernel",
        "chunk_boxes_kernel",
        "code_query_kernel",
        "cover_kernel",
        "digit_kernel",
        "fetch_rows_kernel",
        "fill_empty_kernel",
        "gather_rows_kernel",
        "gathered_attention_kernel",
        "gemv_kernel",
        "importance_kernel",
        "kept_mass_kernel",
        "merge_gathered_kernel",
        "merge_parts_kernel",
        "merge_splits_kernel",
        "await_flag_kernel",
        "merge_state_kernel",
        "normalize_sums_kernel",
        "raise_flag_kernel",
        "paged_attention_kernel",
        "pick_greedy_kernel",
        "pick_kernel",
        "rope_publish_kernel",
        "rotate_kernel",
        "score_codes_kernel",
        "select_scored_kernel",
        "select_tokens_kernel",
        "silu_mul_kernel",
        "window_attention_kernel",
    }
    for name, registers, stack_bytes, shared_bytes in kernels:
        assert int(stack_bytes) == 0, f"{name} spills {stack_bytes} bytes per thread"
        assert int(registers) <= MAX_REGISTERS, f"{name} takes {registers} registers"
        assert int(shared_bytes) <= 227 * 1024 // 2, f"{name} takes {shared_bytes} bytes"
