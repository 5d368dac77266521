"""Streams of steps: each model's own; and what is captured there."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from cases.device_cases import NO_GPU

from offload.decode.gpu import gpu_sync
from offload.decode.gpu.gpu_sync import StepStreams, capture_graph

DEVICE = torch.device("cuda", 0)


def handles_of(streams: StepStreams) -> list[int]:
    lanes = [lane._stream for lane in streams.lanes]
    return [stream.cuda_stream for stream in (streams.main, *lanes)]


def zeros() -> torch.Tensor:
    """Which are there: streams of steps wait for no others."""
    x = torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize()
    return x


def check_own() -> None:
    models = [StepStreams(DEVICE) for _ in range(40)]
    handles = [handle for streams in models for handle in handles_of(streams)]
    assert len({*handles}) == len(handles) == 120
    gone = handles_of(models.pop())
    assert {*handles_of(StepStreams(DEVICE))} == {*gone}


def test_models_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    new = itertools.count(1)
    monkeypatch.setattr(gpu_sync, "_spare_streams", {})
    monkeypatch.setattr(gpu_sync, "_new_stream", lambda device, priority: next(new))
    of = lambda handle, device: SimpleNamespace(cuda_stream=handle)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "ExternalStream", of)
    check_own()


@pytest.mark.cuda
@NO_GPU
def test_on_a_gpu() -> None:
    check_own()
    streams = StepStreams(DEVICE)
    assert streams.main.priority > streams.lanes[0]._stream.priority
    x = zeros()
    graph = capture_graph(streams.main, lambda: x.add_(1))
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 4  # once to load what it needs


@pytest.mark.cuda
@NO_GPU
def test_graphs_that_only_a_collection_finds() -> None:
    """CUDA gives a capture up whose thread destroys another graph."""
    stream, x = StepStreams(DEVICE).main, zeros()
    graphs = [capture_graph(stream, lambda: x.add_(1))]

    def step() -> None:
        if torch.cuda.is_current_stream_capturing():
            young: list[object] = [graphs.pop()]  # the oldest are seldom collected
            young.append(young)
            del young
        x.add_(1)
        [[] for _ in range(1000)]

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        capture_graph(stream, step).replay()
    finally:
        gc.set_threshold(*threshold)
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 4  # twice to load what a step needs
