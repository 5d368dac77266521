"""Pool, attention and coprocessor under ThreadSanitizer, the kernels under ASan (and UBSan)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from programs import ALL_ISAS, CPP, compile_program, run

from cpu_ops import native
from cpu_ops.causal_attention import has_causal_attention

THREAD = ["-fsanitize=thread"]
ADDRESS = ["-fsanitize=address"]
# What ASan finds as well would take the compiler a third of its time. The rest of UBSan's takes it
# another third, and is left to `make test-all`.
BOTH = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,pointer-overflow,object-size,vptr",
    "-fno-sanitize-recover=all",
]
ATTENTION = [*sorted(path.stem for path in (CPP / "attention").glob("*.cpp")), "worker_pool"]
COPROCESSOR = ["coprocessor", "step_server", "hot_rows", "linear", "routed_linear"]


def run_threads(program: Path) -> None:
    """Run under ThreadSanitizer, without address randomisation where it cannot cope with it."""
    result = run([program])
    if "unexpected memory mapping" in result.stderr:
        if shutil.which("setarch") is None:
            pytest.skip("ThreadSanitizer cannot run with this kernel's address randomisation")
        result = run(["setarch", "-R", program])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "ok"


def test_worker_pool_has_no_races():
    run_threads(
        compile_program("worker_pool_stress.cpp", kernels=[], units=["worker_pool"], flags=THREAD)
    )


@pytest.mark.slow
def test_decode_attention_has_no_races():
    run_threads(
        compile_program(
            "decode_attention_stress.cpp", kernels=["scalar"], units=ATTENTION, flags=THREAD
        )
    )


@pytest.mark.slow
def test_coprocessor_has_no_races():
    run_threads(
        compile_program(
            "coprocessor_stress.cpp",
            kernels=["scalar"],
            units=[*ATTENTION, *COPROCESSOR],
            flags=THREAD,
        )
    )


def stays_in_bounds(source, *units):
    """What a program of attention prints under the address sanitizer."""
    program = compile_program(source, kernels=["scalar"], units=[*ATTENTION, *units], flags=BOTH)
    result = run([program])
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_heads_apart_stay_in_bounds_and_agree():
    """KV heads with pages of their own, each against attention to it alone."""
    assert stays_in_bounds("heads_apart_stress.cpp").strip() == "ok"


@pytest.mark.slow
def test_delta_rule_stays_in_bounds_and_rows_agree():
    program = compile_program(
        "delta_rule_stress.cpp", kernels=["scalar"], units=["worker_pool", "delta_rule"], flags=BOTH
    )
    result = run([program])
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.slow
def test_coprocessor_stays_in_bounds():
    """Also of mailboxes that are gone."""
    stays_in_bounds("coprocessor_stress.cpp", *COPROCESSOR)


@pytest.mark.slow
def test_decode_attention_stays_in_bounds():
    stays_in_bounds("decode_attention_stress.cpp")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ADDRESS, BOTH], ids=["address", "address and undefined"])
def test_kernels_stay_in_bounds_and_agree(flags):
    """Every ISA that runs here, on buffers of exactly the size a kernel may touch."""
    program = compile_program(
        "kernel_parity.cpp", kernels=ALL_ISAS, units=["dispatch", "top_k"], flags=flags
    )
    result = run([program])
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == [f"{isa}: ok" for isa in native.available_isas()]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ADDRESS, BOTH], ids=["address", "address and undefined"])
def test_causal_attention_stays_in_bounds_and_agrees(flags):
    program = compile_program(
        "causal_parity.cpp", kernels=ALL_ISAS, units=["dispatch"], flags=flags
    )
    result = run([program])
    assert result.returncode == 0, result.stderr
    isas = [
        isa for isa in native.available_isas() if has_causal_attention(torch.bfloat16, 64, isa=isa)
    ]
    assert result.stdout == "".join(f"{isa}: ok\n" for isa in isas)


@pytest.mark.slow
def test_amx_agrees_on_modelled_tiles():
    """No AMX needed; where the CPU has it, tests/cpu_ops runs the real instructions."""
    if "avx512_bf16" not in native.available_isas():
        pytest.skip("AVX512-BF16, which the AMX table builds on, is not on this CPU")
    program = compile_program(
        "amx_parity.cpp",
        kernels=["scalar", "avx512", "avx512_vnni", "avx512_bf16"],
        units=[],
        flags=BOTH,
    )
    result = run([program])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "ok"
