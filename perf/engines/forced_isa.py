"""An older CPU on this one: an instruction set for all libraries that the engines compute with."""

from __future__ import annotations

import os

from cpu_ops.native import available_isas

# By ISA: offload's own variable, and those of oneDNN, MKL and torch's kernels. llama.cpp has none:
# it is compiled for an ISA (PEERS_ISA of the Makefile).
VARIABLES = {
    "avx2": {
        "OFFLOAD_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
}


def force_isa(isa: str) -> None:
    """Set the variables for the processes that start from now on.

    Raises:
        ValueError: this CPU lacks the ISA.
    """
    if isa not in available_isas():
        raise ValueError(f"this CPU lacks {isa}; it has {', '.join(available_isas())}")
    os.environ.update(VARIABLES[isa])
