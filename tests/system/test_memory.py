"""Budgets and CPU counts, against cgroup trees written into tmp_path."""

import ctypes
import os
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

import offload.system.memory
from offload.system.cache_folder import cache_folder
from offload.system.memory import (
    available_cpus,
    check_max_memory,
    format_bytes,
    give_back_free_memory,
    host_memory,
    host_memory_limit_bytes,
    parse_size,
    worker_threads,
)

GIB = 2**30
V1_UNLIMITED = 9223372036854771712


class CgroupTree:
    """A /proc/self with mounts under tmp_path; `proc_self` is what the functions are given."""

    monkeypatch: pytest.MonkeyPatch

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path
        self.proc_self = tmp_path / "proc"
        self.proc_self.mkdir()
        self.cgroup_lines: list[str] = []
        self.mount_lines = [
            "22 1 8:1 / / rw,relatime - ext4 /dev/root rw",
            "23 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs  rw",
        ]
        self._write()

    def mount(self, name: str, fs_type: str, options: str, path: str, root: str = "/") -> Path:
        """Mount one hierarchy at <root>/<name> and put the process at `path` in it."""
        mount = self.root / name
        mount.mkdir()
        controllers = "" if fs_type == "cgroup2" else options.removeprefix("rw,")
        self.cgroup_lines.append(f"{len(self.cgroup_lines)}:{controllers}:{path}")
        fields = (
            f"30 22 0:30 {root} {str(mount).replace(' ', chr(92) + '040')} rw,relatime shared:4"
        )
        self.mount_lines.append(f"{fields} - {fs_type} cgroup {options}")
        self._write()
        return mount

    def _write(self) -> None:
        (self.proc_self / "cgroup").write_text("\n".join(self.cgroup_lines) + "\n")
        (self.proc_self / "mountinfo").write_text("\n".join(self.mount_lines) + "\n")


def write(folder: Path, **files: object) -> None:
    """memory_max=1 writes "1" to the file memory.max of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")


def hold(tree: CgroupTree, num_bytes: int) -> None:
    """As if this process held so much."""
    held = namedtuple("held", "rss shared")(num_bytes + 7, 7)
    tree.monkeypatch.setattr(psutil.Process, "memory_info", lambda process: held)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CgroupTree:
    memory = namedtuple("memory", "available total")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(64 * GIB, 128 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 19)), raising=False)
    made = CgroupTree(tmp_path)
    made.monkeypatch = monkeypatch
    return made


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (0, 0),
        (12345, 12345),
        ("12345", 12345),
        ("20GiB", 20 * GIB),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * GIB // 2),
        (" 2 KiB ", 2048),
        ("7B", 7),
        ("3TB", 3 * 10**12),
        (str(2**60 + 1), 2**60 + 1),
    ],
)
def test_parse_size(size, num_bytes):
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize("size", ["", "GiB", "20Gb", "20 gigs", "-1GiB", "1e9", 1.5, None, True])
def test_parse_size_names_the_option_and_the_value(size):
    with pytest.raises(ValueError, match=r"^max_memory\['cpu'\]: cannot read") as error:
        parse_size(size, name="max_memory['cpu']")
    assert repr(size) in str(error.value)


def test_parse_size_refuses_negative_numbers():
    with pytest.raises(ValueError, match="size must not be negative, got -1"):
        parse_size(-1)


def test_format_bytes():
    sizes = [0, 1023, 1024, 3 * GIB // 2, 5 * 2**40]
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "5.00 TiB",
    ]


class TestMemoryLimit:
    def test_without_cgroups_it_is_the_available_memory(self, tree, tmp_path):
        assert host_memory_limit_bytes(tree.proc_self) == 64 * GIB
        assert host_memory_limit_bytes(tmp_path / "no such folder") == 64 * GIB

    def test_v2_limit_less_use(self, tree):
        mount = tree.mount("cgroup", "cgroup2", "rw", "/app")
        write(mount / "app", memory_max=8 * GIB, memory_current=3 * GIB)
        assert host_memory_limit_bytes(tree.proc_self) == 5 * GIB

    def test_v2_inactive_page_cache_is_not_use(self, tree):
        mount = tree.mount("cgroup", "cgroup2", "rw", "/app")
        write(mount / "app", memory_max=8 * GIB, memory_current=3 * GIB)
        write(mount / "app", memory_stat=f"anon 5\nfile {2 * GIB}\ninactive_file {GIB}")
        assert host_memory_limit_bytes(tree.proc_self) == 6 * GIB

    def test_v2_parents_count_too(self, tree):
        mount = tree.mount("cgroup", "cgroup2", "rw", "/pod/app")
        write(mount / "pod" / "app", memory_max="max", memory_current=GIB)
        write(mount / "pod", memory_max=4 * GIB, memory_current=2 * GIB)
        write(mount, memory_max=100 * GIB, memory_current=0)
        assert host_memory_limit_bytes(tree.proc_self) == 2 * GIB

    def test_v2_memory_high_counts(self, tree):
        mount = tree.mount("cgroup", "cgroup2", "rw", "/app")
        write(mount / "app", memory_max=8 * GIB, memory_high=6 * GIB, memory_current=GIB)
        assert host_memory_limit_bytes(tree.proc_self) == 5 * GIB

    def test_unlimited_is_the_available_memory(self, tree):
        mount = tree.mount("memory", "cgroup", "rw,memory", "/app")
        write(mount / "app", memory_limit_in_bytes=V1_UNLIMITED, memory_usage_in_bytes=3 * GIB)
        assert host_memory_limit_bytes(tree.proc_self) == 64 * GIB

    def test_v1_nested_in_a_hybrid_machine(self, tree):
        tree.mount("unified", "cgroup2", "rw", "/")
        mount = tree.mount("memory", "cgroup", "rw,memory", "/pod/app")
        write(mount / "pod" / "app", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=2 * GIB)
        write(mount / "pod" / "app", memory_stat=f"total_inactive_file {GIB}")
        assert host_memory_limit_bytes(tree.proc_self) == 7 * GIB

    def test_a_container_that_sees_only_its_own_part_of_the_tree(self, tree):
        mount = tree.mount("memory", "cgroup", "rw,memory", "/docker/ab/app", root="/docker/ab")
        write(mount / "app", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=0)
        assert host_memory_limit_bytes(tree.proc_self) == 2 * GIB

    @pytest.mark.parametrize("path", ["/docker/ab", "/../other"])
    def test_a_path_of_another_namespace_reads_the_mount(self, tree, path):
        mount = tree.mount("cgroup", "cgroup2", "rw", path, root="/elsewhere")
        write(mount, memory_max=2 * GIB, memory_current=GIB)
        assert host_memory_limit_bytes(tree.proc_self) == GIB

    def test_mount_points_with_spaces(self, tree):
        mount = tree.mount("my cgroups", "cgroup2", "rw", "/app")
        write(mount / "app", memory_max=2 * GIB, memory_current=GIB)
        assert host_memory_limit_bytes(tree.proc_self) == GIB

    def test_a_cgroup_beyond_its_limit_has_nothing_left(self, tree):
        mount = tree.mount("cgroup", "cgroup2", "rw", "/app")
        write(mount / "app", memory_max=GIB, memory_current=2 * GIB)
        assert host_memory_limit_bytes(tree.proc_self) == 0

    def test_what_is_usable_leaves_a_reserve(self, tree):
        """In all, what the process holds included: so it does not change while it takes it."""
        hold(tree, 0)
        mount = tree.mount("cgroup", "cgroup2", "rw", "/app")
        write(mount / "app", memory_max=16 * GIB, memory_current=4 * GIB)
        memory = host_memory(tree.proc_self)
        assert (memory.total_bytes, memory.in_cgroup) == (16 * GIB, True)
        assert memory.reserve_bytes == memory.program_bytes == GIB
        assert memory.usable_bytes == 11 * GIB
        assert memory.model_bytes() == 10 * GIB
        assert memory.explained() == (
            "11.00 GiB usable of 16.00 GiB that its cgroup allows: others hold 4.00 GiB, 1.00 GiB "
            "stay free for the system; 1.00 GiB of the usable are for the program itself, the rest "
            "for weights and KV cache"
        )
        hold(tree, 3 * GIB)
        write(mount / "app", memory_current=7 * GIB)
        loaded = host_memory(tree.proc_self)
        assert (loaded.left_bytes, loaded.usable_bytes) == (9 * GIB, 11 * GIB)
        assert loaded.model_bytes(held_bytes=5 * GIB // 2) == 10 * GIB  # the weights are there
        assert loaded.model_bytes() == 8 * GIB  # another model's are

    def test_of_a_large_machine_no_more_is_reserved(self, tree):
        hold(tree, GIB)
        memory = host_memory(tree.proc_self)
        assert (memory.reserve_bytes, memory.usable_bytes) == (8 * GIB, 57 * GIB)
        assert "128.00 GiB that the machine has" in memory.explained()

    def test_a_small_cgroup_is_not_all_reserve(self, tree):
        hold(tree, 0)
        mount = tree.mount("cgroup", "cgroup2", "rw", "/app")
        write(mount / "app", memory_max=GIB, memory_current=0)
        memory = host_memory(tree.proc_self)
        assert memory.model_bytes() == GIB - GIB // 16 - GIB // 4
        write(mount / "app", memory_current=2 * GIB)
        assert host_memory(tree.proc_self).usable_bytes == 0

    def test_this_machine(self):
        assert 0 < host_memory_limit_bytes() <= psutil.virtual_memory().total


class TestAvailableCpus:
    def test_affinity(self, tree):
        assert available_cpus(tree.proc_self) == 16

    @pytest.mark.parametrize(
        ("cpu_max", "num_cpus"),
        [("400000 100000", 4), ("max 100000", 16), ("50000 100000", 1), ("250000 100000", 2)],
    )
    def test_v2_quota(self, tree, cpu_max, num_cpus):
        mount = tree.mount("cgroup", "cgroup2", "rw", "/app")
        write(mount / "app", cpu_max=cpu_max)
        assert available_cpus(tree.proc_self) == num_cpus

    @pytest.mark.parametrize(("quota", "num_cpus"), [(300000, 3), (-1, 16), (9900000, 16)])
    def test_v1_quota_of_a_parent(self, tree, quota, num_cpus):
        mount = tree.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct", "/pod/app")
        write(mount / "pod", cpu_cfs_quota_us=quota, cpu_cfs_period_us=100000)
        assert available_cpus(tree.proc_self) == num_cpus

    def test_without_affinity_calls_it_is_the_cpu_count(self, tree, monkeypatch):
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert available_cpus(tree.proc_self) == 1


class TestMaxMemory:
    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch):
        monkeypatch.setattr(offload.system.memory, "host_memory_limit_bytes", lambda: 10 * GIB)

    def test_sizes_become_bytes(self):
        assert check_max_memory({0: "20GiB", "cpu": "8GiB"}) == {0: 20 * GIB, "cpu": 8 * GIB}
        assert check_max_memory(None) == {}

    @pytest.mark.parametrize("key", ["disk", "gpu", -1, True, None])
    def test_unknown_keys(self, key):
        with pytest.raises(ValueError, match=f"unknown key {key!r}; available: 'cpu'"):
            check_max_memory({key: "1GiB"})

    def test_bad_sizes_name_the_key(self):
        with pytest.raises(ValueError, match=r"max_memory\[0\] must not be negative, got -5"):
            check_max_memory({0: -5})
        with pytest.raises(ValueError, match=r"max_memory\['cpu'\]: cannot read '8 gigs'"):
            check_max_memory({"cpu": "8 gigs"})

    def test_not_a_dict(self):
        with pytest.raises(ValueError, match=r"max_memory must be a dict .* got str"):
            check_max_memory("8GiB")

    def test_more_than_the_process_may_use(self):
        with pytest.raises(ValueError, match=r"max_memory\['cpu'\] is 96.00 GiB.*only 10.00 GiB"):
            check_max_memory({"cpu": "96GiB"})


@pytest.mark.skipif(os.name != "posix", reason="not glibc's allocator")
def test_free_memory_goes_back() -> None:
    """Blocks below one that is still used, which the allocator keeps otherwise."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc's allocator")
    libc.malloc.restype = ctypes.c_void_p
    blocks = [libc.malloc(100_000) for _ in range(300)]  # less than what is mapped on its own
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
    before = psutil.Process().memory_info().rss
    give_back_free_memory()
    assert before - psutil.Process().memory_info().rss > 20 * 10**6
    libc.free(ctypes.c_void_p(blocks[-1]))


def test_more_threads_than_cpus_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offload.system.memory.available_cpus", lambda: 4)
    assert worker_threads(4, with_gpu=False) == 4
    assert not caplog.records
    assert worker_threads(5, with_gpu=False) == 5
    assert "num_threads=5, but this process may use 4 CPUs" in caplog.text


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user without an entry in /etc/passwd has none."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("OFFLOAD_CACHE", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987_654_321)
    with pytest.raises(FileNotFoundError, match=r"no home folder .*; set OFFLOAD_CACHE to a fold"):
        cache_folder()
    monkeypatch.setenv("OFFLOAD_CACHE", "/some/where")
    assert cache_folder() == Path("/some/where")
