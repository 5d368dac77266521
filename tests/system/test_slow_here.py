"""What is said to be slow on a machine."""

import pytest
import torch

from offload.system.slow_here import CpuFacts, slow_here

ISAS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
FAST = CpuFacts("amx", ISAS, 16, has_huge_pages=True)


def said(isa: str, dtype: torch.dtype | None = None, **options: bool) -> str:
    facts = CpuFacts(isa, ISAS[: ISAS.index(isa) + 1], 16, has_huge_pages=True)
    return "\n".join(slow_here(dtype, facts=facts, **options))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_fast_machine_has_nothing_to_say(dtype: torch.dtype | None) -> None:
    assert slow_here(dtype, facts=FAST) == []


@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_vnni"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_half_precision_without_their_instructions(isa: str, dtype: str) -> None:
    line = said(isa, getattr(torch, dtype))
    assert f"prompts in {dtype}: without AVX512-BF16 or AMX" in line
    assert line.endswith(f"keep {dtype}")
    assert "bfloat16 and float16" in said(isa)
    assert said(isa, torch.bfloat16, on_cpu=False) == ""


def test_float32_reads_twice_the_bytes() -> None:
    assert "--dtype bfloat16" in said("avx2", torch.float32)


def test_an_isa_that_is_forced_or_poor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ISA", "avx2")
    (line, *_) = slow_here(facts=CpuFacts("avx2", ISAS, 16, has_huge_pages=True))
    assert line == "kernels run with OFFLOAD_ISA=avx2; this CPU has amx: unset OFFLOAD_ISA"
    monkeypatch.delenv("OFFLOAD_ISA")
    assert "without vector instructions" in said("scalar")


def test_few_cpus_and_no_huge_pages() -> None:
    facts = CpuFacts("amx", ISAS, 2, has_huge_pages=False)
    cpus, pages = slow_here(facts=facts)
    assert cpus.startswith("prompts on 2 CPUs")
    assert "--session-dir" in cpus
    assert "echo madvise" in pages
    assert len(slow_here(facts=facts, on_cpu=False)) == 1
