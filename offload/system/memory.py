"""How much host memory and how many CPUs this process may really use.

A container's `/proc/meminfo` and `os.cpu_count()` describe the machine, not the share of it that
the process was given. A KV cache sized by them is killed by the kernel, and spinning workers beyond
the CPU quota are throttled, so both numbers here also honour cgroup v1 and v2, at every level from
the process's own cgroup up to the root.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC_SELF = Path("/proc/self")

_logger = logging.getLogger(__name__)

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# What is left to the system: a part of the memory, of large machines no more than so much.
_RESERVED_PART, _MAX_RESERVED_BYTES = 16, 8 * 2**30
# Beside weights and KV cache: Python, torch and a slice of a prompt in its layers. SmolLM2's server
# takes 0.6 GiB. Of little memory it is at most such a part.
_PROGRAM_BYTES, _PROGRAM_PART = 2**30, 4
_SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, *, name: str = "size") -> int:
    """Bytes in `size`: a number of bytes, or a string such as "20GiB", "500MB" or "1.5GiB".

    Units are case-sensitive (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB): "Gb" means gigabits elsewhere.

    Raises:
        ValueError: for anything else; the message starts with `name`, the option it came from.
    """
    if isinstance(size, str):
        match = _SIZE_PATTERN.fullmatch(size)
        if match and match[2] in _SIZE_UNITS:
            number, unit = match[1], _SIZE_UNITS[match[2]]
            # Only a fraction goes through a float: 2**60 + 1 bytes must stay exact.
            return int(float(number) * unit) if "." in number else int(number) * unit
    elif isinstance(size, int) and not isinstance(size, bool):
        if size >= 0:
            return size
        raise ValueError(f"{name} must not be negative, got {size}")
    raise ValueError(
        f"{name}: cannot read {size!r} as a size; give a number of bytes or a string with a unit "
        "(B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), such as '20GiB' or '500MB'"
    )


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for a message: "1.50 GiB", or "512 B" below one KiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _SIZE_UNITS[unit]:
            return f"{num_bytes / _SIZE_UNITS[unit]:.2f} {unit}"
    return f"{num_bytes} B"


def check_max_memory(max_memory: Mapping[int | str, int | str] | None) -> dict[int | str, int]:
    """`max_memory` with every size in bytes; an empty dict for None.

    Keys are "cpu" (the host KV store) and device indices (0, 1, …), as in accelerate.

    Raises:
        ValueError: for an unknown key, an unreadable or negative size, or a host budget above
            `host_memory_limit_bytes()`.
    """
    if max_memory is None:
        return {}
    if not isinstance(max_memory, Mapping):
        raise ValueError(
            "max_memory must be a dict such as {0: '20GiB', 'cpu': '96GiB'}, "
            f"got {type(max_memory).__name__}"
        )
    budgets: dict[int | str, int] = {}
    for key, size in max_memory.items():
        is_device = isinstance(key, int) and not isinstance(key, bool) and key >= 0
        if key != "cpu" and not is_device:
            raise ValueError(
                f"max_memory has an unknown key {key!r}; "
                "available: 'cpu' and device indices (0, 1, …)"
            )
        budgets[key] = parse_size(size, name=f"max_memory[{key!r}]")
    if "cpu" in budgets:
        limit = host_memory_limit_bytes()
        if budgets["cpu"] > limit:
            raise ValueError(
                f"max_memory['cpu'] is {format_bytes(budgets['cpu'])}, but this process may use "
                f"only {format_bytes(limit)} more host memory (available memory and cgroup "
                "limits); lower max_memory['cpu'] or raise the container's memory limit"
            )
    return budgets


@dataclass(frozen=True)
class HostMemory:
    """The host memory of this process, as of one moment: what defaults come from.

    Attributes:
        total_bytes: of the machine, or of the cgroup that leaves less.
        in_cgroup: whether it is a cgroup's.
        left_bytes: that this process can still allocate.
        own_bytes: that it holds already, files in memory not counted.
    """

    total_bytes: int
    in_cgroup: bool
    left_bytes: int
    own_bytes: int

    @property
    def reserve_bytes(self) -> int:
        """Left to the system."""
        return min(self.total_bytes // _RESERVED_PART, _MAX_RESERVED_BYTES)

    @property
    def program_bytes(self) -> int:
        """The part of the usable bytes that the program itself needs, without weights and
        KV cache."""
        return min(self.total_bytes // _PROGRAM_PART, _PROGRAM_BYTES)

    @property
    def usable_bytes(self) -> int:
        """What this process should take in all. It stays the same while the process takes it."""
        return max(0, self.left_bytes + self.own_bytes - self.reserve_bytes)

    def model_bytes(self, held_bytes: int = 0) -> int:
        """Usable bytes for a model's weights and KV cache: without those for the program, or those
        that the process holds without `held_bytes` of that model, whichever is more."""
        others = max(0, self.own_bytes - held_bytes)
        return max(0, self.usable_bytes - max(self.program_bytes, others))

    def explained(self) -> str:
        """The one sentence about `usable_bytes`."""
        whose = "its cgroup allows" if self.in_cgroup else "the machine has"
        taken = max(0, self.total_bytes - self.left_bytes - self.own_bytes)
        return (
            f"{format_bytes(self.usable_bytes)} usable of {format_bytes(self.total_bytes)} that "
            f"{whose}: others hold {format_bytes(taken)}, {format_bytes(self.reserve_bytes)} stay "
            f"free for the system; {format_bytes(self.program_bytes)} of the usable are for the "
            "program itself, the rest for weights and KV cache"
        )


def host_memory(proc_self: Path | None = None) -> HostMemory:
    """The memory of this process, by the bound that leaves least behind its reserve. `proc_self`
    stands in for /proc/self."""
    held = psutil.Process().memory_info()
    own = max(0, int(held.rss) - int(getattr(held, "shared", 0)))
    bounds = [
        HostMemory(total, in_cgroup, left, own) for total, in_cgroup, left in _bounds(proc_self)
    ]
    return min(bounds, key=lambda bound: bound.left_bytes - bound.reserve_bytes)


def host_memory_limit_bytes(proc_self: Path | None = None) -> int:
    """Bytes this process can still allocate before the kernel runs out or a cgroup stops it.

    The minimum of the machine's available memory and, at every cgroup level, the limit less what
    the cgroup uses now. Page cache that the kernel would drop first (inactive files, such as a
    checkpoint just read) does not count as used. `proc_self` stands in for /proc/self. Nothing is
    left for the system: defaults come from `host_memory`.
    """
    return min(left for _, _, left in _bounds(proc_self))


def _bounds(proc_self: Path | None) -> Iterator[tuple[int, bool, int]]:
    """(bytes in all, whether they are a cgroup's, bytes that are left) of the machine and of every
    cgroup level that has a limit."""
    machine = psutil.virtual_memory()
    yield int(machine.total), False, int(machine.available)
    for version, cgroup in _cgroup_dirs("memory", proc_self or PROC_SELF):
        if version == 2:
            # memory.high is as hard as memory.max for us: anonymous memory above it cannot be
            # reclaimed without swap, and the kernel puts its allocator to sleep instead.
            caps = [_read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.high")]
            used, inactive = _read_int(cgroup / "memory.current"), "inactive_file"
        else:
            caps = [_read_int(cgroup / "memory.limit_in_bytes")]
            used, inactive = _read_int(cgroup / "memory.usage_in_bytes"), "total_inactive_file"
        cap = min((cap for cap in caps if cap is not None), default=None)
        if cap is not None:
            held = (used or 0) - _read_stat(cgroup / "memory.stat", inactive)
            yield cap, True, max(0, cap - max(0, held))


def available_cpus(proc_self: Path | None = None) -> int:
    """CPUs this process may keep busy, at least 1: its affinity mask, capped by cgroup quotas.

    A fractional quota is rounded down: a worker spinning on a share of a CPU that it does not have
    gets the whole process throttled. `proc_self` stands in for /proc/self.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cpus = len(os.sched_getaffinity(0))
    else:
        num_cpus = os.cpu_count() or 1
    for version, cgroup in _cgroup_dirs("cpu", proc_self or PROC_SELF):
        if version == 2:
            quota, _, period = read_text(cgroup / "cpu.max").partition(" ")
        else:
            quota = read_text(cgroup / "cpu.cfs_quota_us")
            period = read_text(cgroup / "cpu.cfs_period_us")
        # No quota reads "max" in v2 and "-1" in v1; neither is a string of digits.
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            num_cpus = min(num_cpus, int(quota) // int(period))
    return max(1, num_cpus)


def worker_threads(num_threads: int | None, *, with_gpu: bool, num_cpus: int | None = None) -> int:
    """Threads of a worker pool: so many, or one for each of `num_cpus` (None: `available_cpus`),
    with a GPU one fewer: the driver and Python need a CPU, too. Warns of more than there are.
    """
    if num_threads is not None:
        if num_threads > (cpus := available_cpus()):
            _logger.warning(
                "num_threads=%d, but this process may use %d CPUs: threads that wait for a CPU "
                "make every step slower; lower num_threads",
                num_threads,
                cpus,
            )
        return num_threads
    return max(1, (available_cpus() if num_cpus is None else num_cpus) - with_gpu)


def _cgroup_dirs(controller: str, proc_self: Path) -> Iterator[tuple[int, Path]]:
    """(cgroup version, directory) of the process's cgroup and its visible ancestors.

    Hybrid machines mount v1 controllers beside a v2 tree, and a container may see only a part of a
    tree (the mount's root), so both are read from mountinfo instead of assuming /sys/fs/cgroup.
    """
    # Controller, or "" for the v2 tree -> the process's path in that tree.
    paths: dict[str, str] = {}
    for line in read_text(proc_self / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)

    for line in read_text(proc_self / "mountinfo").splitlines():
        # id parent device ROOT MOUNT options … - FS_TYPE source SUPER_OPTIONS (source may be empty)
        left, _, right = line.partition(" - ")
        if not right.startswith("cgroup"):
            continue
        fs_type, *_, options = right.split()
        version = 2 if fs_type == "cgroup2" else 1
        own_path = paths.get("" if version == 2 else controller)
        if own_path is None or (version == 1 and controller not in options.split(",")):
            continue
        root, mount_point = left.split()[3:5]
        mount = Path(mount_point.replace("\\040", " "))
        # A path outside the mount's root belongs to another namespace: only the mount is visible.
        inside = Path(own_path).is_relative_to(root) and ".." not in Path(own_path).parts
        cgroup = mount / Path(own_path).relative_to(root) if inside else mount
        yield version, cgroup
        yield from ((version, parent) for parent in cgroup.parents if parent.is_relative_to(mount))


def read_text(path: Path) -> str:
    """What a file of the system says; "" where there is none to read."""
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, another cgroup layout, or a controller that is not enabled
        return ""


def _read_int(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, field: str) -> int:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == field:
            return int(value)
    return 0


def give_back_free_memory() -> None:
    """Return to the system what the C library's allocator keeps of memory that was freed: glibc's
    keeps up to 64 MiB of it for good. Elsewhere nothing is done."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
