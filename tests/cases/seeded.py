"""Random numbers of a test: the same in each run, other ones under OFFLOAD_TEST_SEED."""

from __future__ import annotations

import os
import zlib

import numpy as np


def new_rng() -> np.random.Generator:
    """A generator seeded by the running test's name and OFFLOAD_TEST_SEED (default 0).

    CI must not fail on a draw that nobody can repeat; `OFFLOAD_TEST_SEED=n make test` looks for
    tolerances that hold for most draws only.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return np.random.default_rng(
        [int(os.environ.get("OFFLOAD_TEST_SEED", "0")), zlib.crc32(test.encode())]
    )
