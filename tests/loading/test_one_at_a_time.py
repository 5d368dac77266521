"""One thread at a time loads, and what transformers changes meanwhile is put back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.processes import run_program

from offload import OffloadedModel


def test_two_threads_load_at_once(tiny_folders: dict[str, Path]) -> None:
    """transformers changes torch's default dtype while it loads."""
    names = ["llama", "qwen3"] * 6  # whose weights are tied

    def load(numbered: tuple[int, str]) -> torch.dtype:
        dtype = ("float32", "bfloat16")[numbered[0] % 2]
        return OffloadedModel.from_pretrained(tiny_folders[numbered[1]], dtype=dtype).dtype

    with ThreadPoolExecutor(4) as threads:
        dtypes = list(threads.map(load, enumerate(names)))
    assert dtypes == [torch.float32, torch.bfloat16] * 6
    assert torch.get_default_dtype() == torch.float32


def test_a_load_that_fails_leaves_the_default_dtype(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        torch.set_default_dtype(torch.bfloat16)
        raise MemoryError("in the middle of it")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fails)
    with pytest.raises(MemoryError, match="in the middle of it"):
        OffloadedModel.from_pretrained(tiny_folders["llama"])
    assert torch.get_default_dtype() == torch.float32


FORK = """
import os, signal, threading
from offload.loading.one_at_a_time import loading

entered, leave = threading.Event(), threading.Event()

def load():
    with loading():
        entered.set()
        leave.wait()

thread = threading.Thread(target=load)
thread.start()
entered.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # if it waits
    with loading():
        os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
leave.set()
"""


def test_a_forked_child_does_not_wait_for_a_load_of_its_parent() -> None:
    result = run_program(FORK)
    assert (result.stdout, result.returncode) == ("7\n", 0), result.stderr
