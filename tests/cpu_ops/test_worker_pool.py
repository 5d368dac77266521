"""The worker pool from Python: threads, closing, forking, and the bandwidth it measures."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.processes import run_program
from cases.seeded import new_rng

from cpu_ops import native
from cpu_ops.bandwidth import measure_gather_bandwidth, measure_read_bandwidth
from cpu_ops.linear import Linear
from cpu_ops.worker_pool import WorkerPool

ISAS = native.available_isas()


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return Linear([torch.randn(300, 64)])


def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ linear._kept[0][0].T


def test_num_threads():
    assert WorkerPool(3).num_threads == 3
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        WorkerPool(0)
    with pytest.raises(ValueError, match="num_threads must be at most 65536, got 1099511627776"):
        WorkerPool(2**40)
    with pytest.raises(ValueError, match="spin_us must not be negative, got -1"):
        WorkerPool(1, spin_us=-1)


def test_threads_start_with_the_pool_and_end_with_it():
    before = len(os.listdir("/proc/self/task"))
    pool = WorkerPool(4)
    assert len(os.listdir("/proc/self/task")) == before + 3
    pool.close()
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("spin_us", [0, 500])
def test_results_do_not_depend_on_threads(linear, threads, spin_us):
    x = torch.randn(3, 64)
    pool = WorkerPool(threads, spin_us)
    for _ in range(20):
        torch.testing.assert_close(linear(pool, x), product(linear, x))


def test_a_closed_pool_works_on_the_caller(linear):
    x = torch.randn(3, 64)
    pool = WorkerPool(3)
    expected = linear(pool, x)
    pool.close()
    pool.close()
    assert torch.equal(linear(pool, x), expected)


def test_two_pools(linear):
    x = torch.randn(2, 64)
    first, second = WorkerPool(2), WorkerPool(3)
    expected = linear(first, x)
    assert torch.equal(linear(second, x), expected)
    first.close()
    assert torch.equal(linear(second, x), expected)


def switches_of(threads: set[str]) -> int:
    """How often these threads of this process went to sleep."""
    lines = [
        line
        for thread in threads
        for line in Path(f"/proc/self/task/{thread}/status").read_text("utf-8").splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))


def test_jobs_leave_the_sleeping_workers_of_other_pools_alone(linear):
    """A model that is loaded and not used costs the others nothing."""
    before = set(os.listdir("/proc/self/task"))
    sleeping = WorkerPool(6, spin_us=0)
    workers = set(os.listdir("/proc/self/task")) - before
    busy, x = WorkerPool(2, spin_us=0), torch.randn(2, 64)
    expected = linear(busy, x)
    asleep_since = -1
    while (switches := switches_of(workers)) != asleep_since:  # until all of them sleep
        asleep_since = switches
        time.sleep(0.05)
    for _ in range(200):
        linear(busy, x)
    assert switches_of(workers) - asleep_since < 10
    assert torch.equal(linear(sleeping, x), expected)


def test_calls_from_several_python_threads(linear):
    """Callers take turns; each gets its own result."""
    pool = WorkerPool(2)
    failures = []

    def call(seed: int) -> None:
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 64), np.float32))
        expected = product(linear, x)
        for _ in range(100):
            if not torch.allclose(linear(pool, x), expected, atol=1e-4):
                failures.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


FORK = """
import os, threading, torch
from cpu_ops.linear import Linear
from cpu_ops.worker_pool import WorkerPool
torch.set_num_threads(1)
pool = WorkerPool(3)
linear = Linear([torch.randn(300, 64)])
x = torch.randn(2, 64)
expected = linear(pool, x)
child = os.fork()
if child == 0:
    same = torch.equal(linear(pool, x), expected)
    for _ in range(3):  # which reuse what the parent's threads had
        threads = [threading.Thread(target=sum, args=([],)) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    pool.close()
    again = torch.equal(linear(pool, x), expected)
    own = WorkerPool(2)
    os._exit(0 if same and again and torch.equal(linear(own, x), expected) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, torch.equal(linear(pool, x), expected))
"""


def test_a_forked_child_works_on_its_own():
    """The child has no worker threads: it runs alone, may close, may start a pool of its own."""
    result = run_program(FORK)
    assert result.stdout.split() == ["0", "True"], result.stderr


LIMITED = """
import os, resource
from cpu_ops.worker_pool import WorkerPool
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before = len(os.listdir("/proc/self/task"))
try:
    WorkerPool(5000)
except RuntimeError as error:
    print(error, len(os.listdir("/proc/self/task")) - before)
"""


def test_a_limit_of_threads_is_an_error() -> None:
    """… and those that were started have ended."""
    result = run_program(LIMITED)
    assert result.stdout.startswith("num_threads is 5000, but only "), result.stderr
    assert result.stdout.endswith("give fewer, or raise the limit of threads or of memory 0\n")


@pytest.mark.parametrize("isa", ISAS)
def test_bandwidth_is_of_this_world(isa):
    pool = WorkerPool(2)
    buffer = torch.ones(1 << 20, dtype=torch.int64)
    rows = np.sort(new_rng().choice(1 << 15, 4000, replace=False)).astype(np.int32)
    sequential = measure_read_bandwidth(pool, buffer, isa=isa)
    gathered = measure_gather_bandwidth(pool, buffer, rows, isa=isa)
    assert 1e7 < sequential < 1e13
    assert 1e7 < gathered < 1e13


def test_rows_outside_the_buffer_are_refused():
    pool = WorkerPool(1)
    buffer = torch.zeros(1024, dtype=torch.uint8)
    for rows in ([], [4], [-1]):
        with pytest.raises(ValueError, match=r"rows must lie in \[0, 4\)"):
            measure_gather_bandwidth(pool, buffer, np.array(rows, np.int32))
