"""Work for several threads is done where no thread can be started any more."""

from __future__ import annotations

import pytest
from cases.processes import run_program

from offload.system.map_in_threads import map_in_threads

LATE = """
import threading
from offload.system.huge_pages import map_slab

def late():
    threading.main_thread().join()
    slab = map_slab(200 << 20)
    print(slab.numel(), int(slab[::4096].sum()))

threading.Thread(target=late).start()
"""


def test_after_the_main_thread_has_ended() -> None:
    result = run_program(LATE)
    assert (result.stdout, result.stderr) == (f"{200 << 20} 0\n", "")


def test_errors_are_those_of_the_function() -> None:
    with pytest.raises(RuntimeError, match="of 1"):
        map_in_threads(lambda item: (_ for _ in ()).throw(RuntimeError(f"of {item}")), [1], 2)
