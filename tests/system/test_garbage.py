"""The collector stays away from what a command imports."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.system.garbage import importing_torch


def test_a_process_with_torch_is_left_alone() -> None:
    assert torch.__name__ in sys.modules
    frozen = gc.get_freeze_count()
    with importing_torch():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_collector_that_is_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with importing_torch():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_freeze_count() == frozen


def test_generate_imports_without_collections(tiny_folders: dict[str, Path]) -> None:
    """Modules are out of the collector's sight, and what the model makes is not."""
    script = (
        "import gc, sys\n"
        "from offload.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 200_000, gc.get_freeze_count()\n"
        "assert len(gc.get_objects()) < 200_000, len(gc.get_objects())\n"
    )
    model = str(tiny_folders["llama"])
    command = ["generate", model, "--threads", "1", "-p", "the quick", "-n", "1", "--no-chat"]
    subprocess.run([sys.executable, "-c", script, *command], check=True, timeout=120)
