"""Streams of steps: each model's own, while torch has some."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.decode.gpu import gpu_sync
from offload.decode.gpu.gpu_sync import StepStreams

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch has them: 32 streams of each of four priorities, which come round again."""
    numbers = [itertools.cycle(range(100 * pool, 100 * pool + 32)) for pool in range(4)]

    def stream(device: torch.device, priority: int) -> Any:
        return SimpleNamespace(cuda_stream=next(numbers[min(-priority, 3)]), priority=priority)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(gpu_sync, "_taken_streams", set())


def numbers_of(streams: StepStreams) -> list[int]:
    lanes = [lane._stream for lane in streams.lanes]
    return [stream.cuda_stream for stream in (streams.main, *lanes)]


def test_models_share_none_while_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sync.gc, "collect", lambda: None)  # all are there
    taken, models = set[int](), []
    while (streams := StepStreams(DEVICE)).are_own:
        assert not taken & set(numbers_of(streams))
        taken.update(numbers_of(streams))
        models.append(streams)
    assert len(models) >= 32
    del models[3]
    assert StepStreams(DEVICE).are_own


def test_streams_of_models_that_are_gone_come_again() -> None:
    """Also where only a collection finds them."""
    for _ in range(200):
        streams = StepStreams(DEVICE)
        assert streams.are_own
        assert max(numbers_of(streams)) < 200  # of the priority that they should have
        streams.itself = streams  # type: ignore[attr-defined]
