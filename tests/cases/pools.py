"""Worker pools of a file's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cpu_ops.worker_pool import WorkerPool


def pools(*num_threads: int, scope: Any = "module") -> Any:
    """A fixture: a pool of each number of threads in turn."""

    @pytest.fixture(scope=scope, params=num_threads, ids=lambda n: f"{n} threads")
    def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
        made = WorkerPool(request.param)
        yield made
        made.close()

    return pool
