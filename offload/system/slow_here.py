"""What makes a model slow on this machine, and which option helps: the facts, in one place.

`offload env`, `offload plan` and the line about a loaded model say them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.system.memory import available_cpus, read_text

if TYPE_CHECKING:  # commands that only print help import this, and not torch
    import torch

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FEW_CPUS = 4
_VECTORLESS = "scalar"
# Instruction sets whose products of many rows take bfloat16 as it is.
_BFLOAT16_PRODUCTS = ("avx512_bf16", "amx")
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class CpuFacts:
    """What decides speed on a CPU.

    Attributes:
        isa: that the kernels run with.
        isas: that this CPU has, each better than those before it.
        cpus: that this process may keep busy.
        has_huge_pages: whether the system gives them to a process that asks.
    """

    isa: str
    isas: Sequence[str]
    cpus: int
    has_huge_pages: bool

    @classmethod
    def here(cls) -> CpuFacts:
        """The facts of this machine and process."""
        from cpu_ops.native import available_isas, isa_name

        return cls(
            isa=isa_name(),
            isas=tuple(available_isas()),
            cpus=available_cpus(),
            has_huge_pages="[never]" not in read_text(_HUGE_PAGES),
        )


def slow_here(
    dtype: torch.dtype | None = None, *, on_cpu: bool = True, facts: CpuFacts | None = None
) -> list[str]:
    """A sentence for each thing that is slow, with what helps.

    Args:
        dtype: of the weights; None: what is known without one.
        on_cpu: whether the linear layers are computed there.
        facts: None: of this machine.
    """
    facts = CpuFacts.here() if facts is None else facts
    said = [_of_isa(facts), *(_of_dtypes(facts, dtype) if on_cpu else ()), _of_cpus(facts, on_cpu)]
    if not facts.has_huge_pages:
        said.append(
            "transparent huge pages are off, so that reading weights and KV cache misses the TLB; "
            f"as root: echo madvise > {_HUGE_PAGES}"
        )
    return [what for what in said if what]


def _of_isa(facts: CpuFacts) -> str:
    forced = f"OFFLOAD_ISA={facts.isa}" if os.environ.get("OFFLOAD_ISA") == facts.isa else ""
    if forced and facts.isa != facts.isas[-1]:
        return f"kernels run with {forced}; this CPU has {facts.isas[-1]}: unset OFFLOAD_ISA"
    if facts.isa == _VECTORLESS:
        return (
            "kernels run without vector instructions, since this CPU has none that they know; a "
            "CPU with AVX2 or NEON helps, no option does"
        )
    return ""


def _of_dtypes(facts: CpuFacts, dtype: torch.dtype | None) -> list[str]:
    said, name = [], "" if dtype is None else str(dtype).removeprefix("torch.")
    if facts.isa not in _BFLOAT16_PRODUCTS and name in ("", *_HALVES):
        said.append(
            f"prompts in {name or 'bfloat16 and float16'}: without AVX512-BF16 or AMX their "
            "products are made in float32, so a prompt is read about as fast as with --dtype "
            f"float32, not faster; decoding is faster, so keep {name or 'bfloat16'}"
        )
    if name == "float32":
        said.append(
            "decoding in float32: each token reads twice the bytes of bfloat16; "
            "--dtype bfloat16 is faster"
        )
    return said


def _of_cpus(facts: CpuFacts, on_cpu: bool) -> str:
    if facts.cpus >= _FEW_CPUS or not on_cpu:
        return ""
    cpus = f"{facts.cpus} CPU{'s' if facts.cpus > 1 else ''}"
    return (
        f"prompts on {cpus}: reading them is bound by computing; more CPUs (affinity or cgroup "
        "quota of this process) or a smaller model help, and what is read once stays: "
        "`offload serve` caches prefixes, with --session-dir also across restarts"
    )
