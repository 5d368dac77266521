"""The collector stays away from what a command imports."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from offload.system.garbage import importing_torch


def test_a_process_with_torch_is_left_alone() -> None:
    assert torch.__name__ in sys.modules
    frozen = gc.get_freeze_count()
    with importing_torch():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen  # another thread may free one of them


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
