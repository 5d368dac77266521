"""Work for several threads is done where no thread can be started any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offload.system.map_in_threads import map_in_threads

LATE = """
import threading
from offload.system.huge_pages import map_slab

def late():
    threading.main_thread().join()
    slab = map_slab(200 << 20)
    print(slab.numel(), int(slab.sum()))

threading.Thread(target=late).start()
"""


def test_after_the_main_thread_has_ended() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LATE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.stdout, result.stderr) == (f"{200 << 20} 0\n", "")


def test_errors_are_those_of_the_function() -> None:
    with pytest.raises(RuntimeError, match="of 1"):
        map_in_threads(lambda item: (_ for _ in ()).throw(RuntimeError(f"of {item}")), [1], 2)
