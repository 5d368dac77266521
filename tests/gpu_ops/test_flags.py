"""Flags between kernels and the CPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gpu_ops.flags import await_flag, raise_flag
from gpu_ops.merge_state import merge_state
from gpu_ops.rope_publish import rope_publish

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


def flag_of(value: int) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int32).pin_memory()


def test_raise() -> None:
    flag = flag_of(0)
    raise_flag(flag, CUDA)
    torch.cuda.synchronize()
    assert flag.tolist() == [1]


def test_await_lowers() -> None:
    flag = flag_of(1)
    await_flag(flag, CUDA)
    torch.cuda.synchronize()
    assert flag.tolist() == [0]


def test_the_flag_comes_after_the_data() -> None:
    """What a kernel writes before it raises, the CPU finds; and the other way round."""
    rounds, heads = 200, 32
    asked, answered = flag_of(0), flag_of(0)
    answer = torch.zeros(1, heads * 128).pin_memory()
    lse = torch.zeros(1, heads).pin_memory()
    question = torch.zeros(1, heads * 128).pin_memory()
    wrong = []

    def echo() -> None:
        asks, answers = asked.numpy(), answered.numpy()
        for i in range(1, rounds + 1):
            while not asks[0]:
                time.sleep(0)
            asks[0] = 0
            if not bool((question == i).all()):
                wrong.append(i)
            answer.fill_(2 * i)
            answers[0] = 1

    def answer_always() -> None:
        try:
            echo()
        finally:  # or the GPU waits for ever
            answered.numpy()[0] = 1

    thread = threading.Thread(target=answer_always, daemon=True)
    thread.start()
    silent = torch.full((1, heads), float("-inf"), device=CUDA)
    positions = torch.zeros(1, dtype=torch.int64, device=CUDA)
    results = []
    for i in range(1, rounds + 1):
        # Kernels of a step write the question and read the answer, in host memory.
        qkv = torch.full((1, (heads + 2) * 128), float(i), device=CUDA)
        cos, sin = torch.ones(1, 128, device=CUDA), torch.zeros(1, 128, device=CUDA)
        query = torch.empty(1, heads * 128, device=CUDA)
        rope_publish(qkv, cos, sin, positions, num_kv_heads=1, query=query, host_query=question)
        raise_flag(asked, CUDA)
        await_flag(answered, CUDA)
        out = torch.empty(1, heads * 128, device=CUDA)
        merge_state(query, silent, answer, lse, out)
        results.append(out)
    torch.cuda.synchronize()
    thread.join(timeout=60)
    assert not wrong
    assert all(bool((x == 2 * i).all()) for i, x in enumerate(results, 1))


def test_two_requests_in_flight() -> None:
    """In a graph, as in the run before its capture: the second reply is waited for after the first
    was lowered."""
    flags = torch.zeros(2, 16, dtype=torch.int32).pin_memory()[:, :1]

    def step() -> None:
        for flag in flags:
            raise_flag(flag, CUDA)
        for flag in flags:
            await_flag(flag, CUDA)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    assert flags.flatten().tolist() == [0, 0]


def test_a_flag_must_be_pinned() -> None:
    with pytest.raises(ValueError, match="flag must be on cuda:0 or in pinned host memory"):
        raise_flag(torch.zeros(1, dtype=torch.int32), CUDA)
