"""Flags between kernels and the CPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gpu_ops.flags import await_flag, raise_flag

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
    rounds, n = 200, 4096
    asked, answered = flag_of(0), flag_of(0)
    question, answer = (torch.zeros(n, dtype=torch.int64).pin_memory() for _ in range(2))
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

    thread = threading.Thread(target=echo)
    thread.start()
    results = []
    for i in range(1, rounds + 1):
        question.copy_(torch.full((n,), i, device=CUDA), non_blocking=True)
        raise_flag(asked, CUDA)
        await_flag(answered, CUDA)
        results.append(answer.to(CUDA, non_blocking=True))
    torch.cuda.synchronize()
    thread.join()
    assert not wrong
    assert all(bool((x == 2 * i).all()) for i, x in enumerate(results, 1))


def test_a_flag_must_be_pinned() -> None:
    with pytest.raises(ValueError, match="flag must be on cuda:0 or in pinned host memory"):
        raise_flag(torch.zeros(1, dtype=torch.int32), CUDA)
