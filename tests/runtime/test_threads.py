"""Several threads on one model: each gets what it would get alone, and nothing stays behind."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import FLAGS, INLINE, NATIVE, greedy, load, small
from cases.inside import states_of
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

POLICIES = ("full", "streaming_llm", "exact_topk", "lfps", "lychee_cluster", "tidal_decode")
Task = Callable[[Any, int], list[torch.Tensor]]


class StopEarlyError(Exception):
    """What a failing generation fails with."""


def policy_of(name: str) -> Any:
    return "full" if name == "full" else small(name, 48)


def generates(model: Any, seed: int) -> list[torch.Tensor]:
    """The fast loop."""
    return [greedy(model, random_tokens(1 + seed % 2, 70 + seed, seed=seed), 6)]


def beams(model: Any, seed: int) -> list[torch.Tensor]:
    """The stock loop, which reorders the cache."""
    return [greedy(model, random_tokens(1, 66, seed=seed), 8, num_beams=3)]


def talks(model: Any, seed: int) -> list[torch.Tensor]:
    """Two caches in alternating calls: cropped, copied, with rows chosen; one is only dropped."""
    caches, results = [model.new_cache(), model.new_cache()], []
    for turn, num_tokens in enumerate((60, 30, 1)):
        for row, cache in enumerate(caches):
            tokens = random_tokens(2, num_tokens, seed=10 * seed + 2 * turn + row)
            results.append(model(tokens, past_key_values=cache, logits_to_keep=1).logits)
    first, second = caches
    first.crop(-7)
    second.reorder_cache(torch.tensor([1, 1]))
    copied = copy.deepcopy(first)
    first.batch_select_indices(torch.tensor([1]))
    for cache, batch_size in ((first, 1), (second, 2), (copied, 2), (second, 2), (first, 1)):
        token = random_tokens(batch_size, 1, seed=seed)
        results.append(model(token, past_key_values=cache).logits)
    second.reset()
    return results


def fails(model: Any, seed: int) -> list[torch.Tensor]:
    """A generation that ends with an error after some steps."""
    steps_left = 3 + seed % 3

    def stop(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal steps_left
        steps_left -= 1
        if steps_left == 0:
            raise StopEarlyError
        return scores

    with pytest.raises(StopEarlyError):
        greedy(model, random_tokens(1, 65, seed=seed), 12, logits_processor=[stop])
    return []


def run_in_threads(model: Any, tasks: list[Task], num_threads: int, rounds: int) -> None:
    """Every thread does all tasks in an order of its own, and gets what one thread gets."""
    work = [(task, seed) for task in tasks for seed in range(rounds)]
    expected = {(task, seed): task(model, seed) for task, seed in work}
    errors: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def run(order: random.Random) -> None:
        try:
            start.wait()
            for task, seed in order.sample(work, len(work)):
                got = task(model, seed)
                torch.testing.assert_close(got, expected[task, seed], rtol=1e-4, atol=1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(random.Random(i),), daemon=True)
        for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    gc.collect()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0
    assert states_of(model).num_bytes == 0


@pytest.mark.parametrize("name", slow_but(POLICIES, POLICIES[0], POLICIES[-1]))
def test_threads(name: str, tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders["llama"], policy_of(name), ("cpu", None))
    run_in_threads(model, [generates, talks, fails], num_threads=3, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [NATIVE, INLINE, FLAGS])
@pytest.mark.parametrize("name", POLICIES)
def test_threads_for_long(name: str, backend: Any, tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders["llama"], policy_of(name), backend)
    run_in_threads(model, [generates, beams, talks, fails], num_threads=4, rounds=6)
