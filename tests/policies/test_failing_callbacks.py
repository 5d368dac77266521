"""Callbacks that raise, or name what cannot be, fail their step by name; the process goes on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
import pytest
import torch
from cases.attention_cases import Cache, attend, random_queries
from cases.seeded import new_rng
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from cpu_ops.worker_pool import WorkerPool
from offload import OffloadedModel
from offload.policies.base import SparsePolicy
from offload.selection.callback import callback, offset_floats, read_context, view_int32
from offload.selection.layer_state import LayerState
from offload.selection.layouts import StateLayout

GROUP_SIZE = 3
OPTIONS = {"budget_tokens": 32, "sink_tokens": 2, "recent_tokens": 4, "dense_layers": 1}
LISTS = StateLayout(candidates=np.int32)
read_lists = LISTS.read


class CustomState(LayerState):
    layout = LISTS

    def build(self, context: Any) -> Any:
        return {"candidates": np.zeros((2, 8), np.int32)}


@dataclass(frozen=True)
class Custom(SparsePolicy):
    """With room for a list of candidates."""

    name: ClassVar[str] = "custom"
    state = cached_property(CustomState)


def custom(callbacks: dict[str, Any], *, scans: bool = False) -> Custom:
    """A policy of these callbacks, by name."""

    class Made(Custom):
        scans_keys: ClassVar[bool] = scans

    for name, function in callbacks.items():
        function.__name__ = name
        setattr(Made, name, callback(function))
    return Made(**OPTIONS)


def check_failure(policy: SparsePolicy, message: str, pool: WorkerPool) -> None:
    """Steps in which the policy is asked fail, each as the first; those of few tokens do not."""
    cache = Cache.random(new_rng(), kv_len=400, dtype=torch.float32, page_tokens=16)
    queries = random_queries(new_rng(), 1, 2 * GROUP_SIZE, 64, torch.float32)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            attend(attention, [cache.seq], [400], queries)
    out, _ = attend(attention, [cache.seq], [32], queries)
    expected, _, _ = cache.reference(queries, 1, [np.arange(32)] * 2)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


def many(pointer: Any, chosen: Any) -> int:
    ctx = read_context(pointer)
    return ctx.last - ctx.first + 1


def outside(pointer: Any, chosen: Any) -> int:
    chosen[0], chosen[1], chosen[2] = 5, 9, 100_000_000
    return 3


def negative(pointer: Any, chosen: Any) -> int:
    chosen[0], chosen[1] = -100_000_000, 9
    return 2


def twice(pointer: Any, chosen: Any) -> int:
    chosen[0], chosen[1], chosen[2] = 5, 9, 9
    return 3


def unsorted(pointer: Any, chosen: Any) -> int:
    chosen[0], chosen[1], chosen[2] = 5, 3, 9
    return 3


def raises(pointer: Any, chosen: Any) -> int:
    if len(chosen) == 3:
        raise ValueError("no choice: größer")
    return 0


BOUNDS = r"they must ascend, without repeats, in \[2, 396\)"
BAD_CHOICES = {
    many: "it returned 395 tokens, of at most",
    outside: rf"index 2 of its choice is 100000000, but {BOUNDS}",
    negative: rf"index 0 of its choice is -100000000, but {BOUNDS}",
    twice: rf"index 2 of its choice is 9, but {BOUNDS}",
    unsorted: rf"index 1 of its choice is 3, but {BOUNDS}",
    raises: "ValueError: no choice: größer",
}


@pytest.mark.parametrize(
    ("asked", "choose"), combinations(["select", "select after a scan", "propose"], BAD_CHOICES)
)
def test_a_bad_choice_fails_the_step(choose: Any, asked: str, pool: WorkerPool) -> None:
    chosen_by = numba.njit(choose)

    def select(pointer: Any) -> int:
        return chosen_by(pointer, view_int32(read_context(pointer).indices, 3))

    def propose(pointer: Any) -> int:
        ctx = read_context(pointer)
        ctx.candidates = offset_floats(read_lists(ctx.arrays).candidates, 8 * ctx.unit)
        return chosen_by(pointer, view_int32(ctx.candidates, 3))

    name, _, after = asked.partition(" ")
    policy = custom({name: {"select": select, "propose": propose}[name]}, scans=bool(after))
    message = rf"the policy's {name} failed in layer 1, .*: {BAD_CHOICES[choose]}"
    check_failure(policy, message, pool)


@pytest.mark.parametrize("scans", [False, True])
def test_a_choice_below_zero_says_that_numbers_are_not_finite(
    scans: bool, pool: WorkerPool
) -> None:
    def select(pointer: Any) -> int:
        return -1

    message = "non-finite attention in layer 1, query row 0"
    check_failure(custom({"select": select}, scans=scans), message, pool)


def test_candidates_without_an_address_fail_the_step(pool: WorkerPool) -> None:
    def propose(pointer: Any) -> int:
        return 3

    message = "the policy's propose failed .*: it returned 3 candidates, but set no address of them"
    check_failure(custom({"propose": propose}), message, pool)


def failing(name: str) -> Custom:
    """A policy of which `name`, which has nothing to return, raises."""

    def choose_first(pointer: Any) -> int:
        ctx = read_context(pointer)
        view_int32(ctx.indices, 1)[0] = ctx.first
        return 1

    def fails(pointer: Any) -> None:
        ctx = read_context(pointer)
        if ctx.kv_len > 0:
            raise IndexError("not there")

    return custom({"select": choose_first, name: fails})


@pytest.mark.parametrize("name", ["prepare", "observe", "append"])
def test_a_callback_that_raises_fails_the_step(name: str, pool: WorkerPool) -> None:
    message = f"the policy's {name} failed in layer 1, .*: IndexError: not there"
    check_failure(failing(name), message, pool)


@pytest.mark.parametrize("name", ["prepare", "observe", "append"])
def test_it_fails_a_generation(name: str, tiny_folders: dict[str, Path]) -> None:
    """… of which nothing is left; the next one is as if it had not been."""
    model = OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=failing(name), num_threads=2
    )
    with pytest.raises(RuntimeError, match=f"the policy's {name} failed in layer 1, .*: IndexErr"):
        model.generate(random_tokens(1, 60), max_new_tokens=4)
    assert model.kv_store.num_sequences == 0
    assert model.generate(random_tokens(1, 20), max_new_tokens=4, do_sample=False).shape == (1, 24)
