"""Triton's compiler takes every kernel for an H100/H200, where there is no GPU, too.

Kernels that are compiled ahead are compiled once, and not launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_ops.launch import has_triton

pytestmark = pytest.mark.skipif(not has_triton, reason="triton is not installed")

MAX_REGISTERS = 168  # more would leave a multiprocessor fewer than three programs of four warps


def output_of(program: str, cache: Path) -> str:
    """What a program in this folder prints; triton compiles there instead of interpreting."""
    script = Path(__file__).with_name(program)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(script.parents[2])]),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_INTERPRET": "0",
    }
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_compiles_without_spills(tmp_path: Path) -> None:
    output = output_of("compile_kernels.py", tmp_path)
    kernels = [line.split() for line in output.splitlines()]
    assert {name for name, *_ in kernels} == {
        "packed_product_kernel",
        "quantise_rows_kernel",
        "unpack_kernel",
        "activate_kernel",
        "add_normed_kernel",
        "add_points_kernel",
        "add_rms_norm_kernel",
        "append_codes_kernel",
        "candidates_kernel",
        "choose_places_kernel",
        "choose_experts_kernel",
        "chunk_max_kernel",
        "chunk_boxes_kernel",
        "code_query_kernel",
        "delta_conv_kernel",
        "delta_step_kernel",
        "digit_kernel",
        "encode_codes_kernel",
        "fetch_rows_kernel",
        "few_rows_kernel",
        "fill_empty_kernel",
        "gate_heads_kernel",
        "gather_rows_kernel",
        "gathered_attention_kernel",
        "gemv_kernel",
        "grow_clusters_kernel",
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
        "rms_norm_kernel",
        "rope_publish_kernel",
        "rotate_kernel",
        "routed_down_kernel",
        "routed_up_kernel",
        "score_codes_kernel",
        "select_scored_kernel",
        "select_tokens_kernel",
        "silu_mul_kernel",
        "split_gates_kernel",
        "sum_splits_kernel",
        "window_attention_kernel",
    }
    for name, registers, stack_bytes, shared_bytes in kernels:
        assert int(stack_bytes) == 0, f"{name} spills {stack_bytes} bytes per thread"
        # With means; and where int8 rows are converted one program of a head has a multiprocessor.
        wide = ("gathered_attention_kernel", "window_attention_kernel")
        most = 184 if name in wide else MAX_REGISTERS
        assert int(registers) <= most, f"{name} takes {registers} registers"
        assert int(shared_bytes) <= 227 * 1024 // 2, f"{name} takes {shared_bytes} bytes"


def test_kernels_are_compiled_once_and_not_launched(tmp_path: Path) -> None:
    first, second = json.loads(output_of("compile_ahead_program.py", tmp_path))
    assert first["compiled"] == ["activate_kernel", "merge_state_kernel", "silu_mul_kernel"]
    assert first["launched"] == []
    assert first["progress"][-1] == [3, 3]
    assert [done for done, _ in first["progress"]] == sorted(
        {done for done, _ in first["progress"]}
    )
    assert second["compiled"] == []
    assert len(second["launched"]) == 4
    assert second["progress"] == first["progress"]
