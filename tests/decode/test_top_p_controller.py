"""A mean of tokens, held by the share of the attention that selections keep."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.coprocessor_cases import SMALL, Shape, World
from cases.device_cases import greedy, load, small
from cases.inside import runtime_of
from cases.seeded import new_rng
from cases.tiny_models import random_tokens

from cpu_ops.worker_pool import WorkerPool
from offload.decode.gpu.gpu_sync import GraphSync, Step
from offload.decode.top_p_controller import LEAST_SHARE, TopPController
from offload.policies import ExactTopK, HardKV, PerHead, Quest, Sketch
from offload.policies.registry import make_policy


class Text:
    """Heads that need `scale` tokens for even odds, and more for more."""

    def __init__(self, scale: float, slope: float = 0.8) -> None:
        self.scale, self.slope, self.top_p = scale, slope, 0.5

    def hold_top_p(self, top_p: float) -> None:
        self.top_p = top_p

    def take_chosen(self) -> tuple[int, int]:
        return 12, round(12 * self.mean)

    @property
    def mean(self) -> float:
        return self.scale * (self.top_p / (1.0 - self.top_p)) ** self.slope


@pytest.mark.parametrize("slope", [0.4, 0.8, 1.5])
def test_it_finds_the_share_within_some_steps_and_again_when_the_text_changes(slope):
    text = Text(20.0, slope)
    top_p_controller = TopPController(text, 0.999, 100)
    assert text.top_p == top_p_controller.top_p == pytest.approx(0.999)
    for scale in (20.0, 35.0, 12.0):
        text.scale = scale
        for _ in range(20):
            top_p_controller.after_step()
        assert text.mean == pytest.approx(100, rel=0.05)


def test_it_stays_within_its_bounds_and_begins_anew():
    text = Text(1e6)
    top_p_controller = TopPController(text, 0.9, 100)
    for _ in range(50):
        top_p_controller.after_step()
    assert text.top_p == pytest.approx(LEAST_SHARE)
    text.scale = 0.5
    for _ in range(50):
        top_p_controller.after_step()
    assert text.top_p == pytest.approx(0.9)
    text.scale = 1e6
    top_p_controller.after_step()
    assert text.top_p < 0.9
    top_p_controller.restart()
    assert text.top_p == pytest.approx(0.9)
    assert TopPController(Text(1.0), 0.8, 100, 4).top_p == pytest.approx(0.875)  # half of each head
    assert TopPController(Text(1.0), 1.0, 100).top_p < 1.0  # selections are counted


def test_steps_that_select_nothing_change_nothing():
    class Dense(Text):
        def take_chosen(self) -> tuple[int, int]:
            return 0, 0

    top_p_controller = TopPController(Dense(1.0), 0.9, 100)
    top_p_controller.after_step()
    assert top_p_controller.top_p == pytest.approx(0.9)


def held_means(policy: HardKV, pool: WorkerPool, shape: Shape, scale: float) -> list[float]:
    """Means after the steps of two sequences whose queries differ in what they ask for."""
    lens = [400, 300]
    world = World.random(new_rng(), shape, policy, pool, lens)
    world.record_random_queries(new_rng(), lens)
    top_p_controller, rng, means = world.attention.top_p_controller, new_rng(), []
    assert top_p_controller is not None
    for _ in range(40):
        queries, *rows = world.random_step(rng)
        _, chosen = world.decode((scale * queries, *rows))
        counts = [len(tokens) for of_layer in chosen for tokens in of_layer]
        assert max(counts) <= policy.budget_tokens
        means.append(float(np.mean(counts)))
        top_p_controller.after_step()
    assert len(set(counts)) > 4  # each what it needs
    return means


@pytest.mark.parametrize("inner", ["exact_topk", "sketch", "lychee_cluster", "lfps", "union"])
def test_heads_attend_to_the_mean_of_all(inner, pool):
    """Each head to what it needs, all together to so many."""
    options = SMALL | {"budget_tokens": 120, "dense_layers": 0}
    policy = HardKV(make_policy(inner, **options), 0.99, mean_tokens=40)
    means = held_means(policy, pool, Shape(group_size=2), 2.0)
    assert means[0] > 44  # what the share would take
    assert statistics.mean(means[10:]) == pytest.approx(40, rel=0.1)


@pytest.mark.parametrize(("group_size", "mean"), [(1, 40), (4, 70), (8, 125)])
def test_groups_of_any_size_are_held(group_size, mean, pool):
    """Also where half of each query head's attention would take more."""
    options = SMALL | {"budget_tokens": 200, "dense_layers": 0}
    policy = HardKV(ExactTopK(**options), 0.95, mean_tokens=mean)
    means = held_means(policy, pool, Shape(group_size=group_size), 1.5)
    assert statistics.mean(means[10:]) == pytest.approx(mean, rel=0.1)


def test_a_mean_that_is_never_reached_is_the_share_alone(pool):
    inner = ExactTopK(**SMALL | {"budget_tokens": 120})
    shape, lens = Shape(group_size=2), [300, 150]
    held, alone = (
        World.random(new_rng(), shape, policy, pool, lens)
        for policy in (HardKV(inner, 0.6, mean_tokens=120), HardKV(inner, 0.6))
    )
    rng = new_rng()
    for _ in range(4):
        given = held.random_step(rng)
        (out, chosen), (expected, selected) = held.decode(given), alone.decode(given)
        assert torch.equal(out, expected)
        assert chosen == selected
        assert held.attention.top_p_controller is not None
        held.attention.top_p_controller.after_step()


def reachable() -> HardKV:
    """A mean that random weights do not need all of the share for, nor more than all of it."""
    policy = small("hard_kv", 96)
    assert isinstance(policy, HardKV)
    return replace(policy, mean_tokens=60)


def test_in_a_model_the_mean_is_held_and_each_prompt_begins_anew(tiny_folders):
    model = load(tiny_folders["llama"], reachable(), ("cpu", None))
    prompts = [random_tokens(1, 220), random_tokens(1, 180)]
    top_p_controller, means = runtime_of(model).attention.top_p_controller, []
    take = top_p_controller._cuts.take_chosen

    class Counted:
        hold_top_p = top_p_controller._cuts.hold_top_p

        def take_chosen(self) -> tuple[int, int]:
            num_units, num_tokens = take()
            if num_units:
                means.append(num_tokens / num_units)
            return num_units, num_tokens

    top_p_controller._cuts = Counted()
    first = [greedy(model, tokens, 60) for tokens in prompts]
    assert statistics.mean(means[10:60]) == pytest.approx(60, rel=0.1)
    assert max(means) - min(means) > 2  # the share moves
    for tokens, expected in zip(prompts, first, strict=True):
        assert torch.equal(greedy(model, tokens, 60), expected)


@pytest.mark.parametrize("lookup", [2, 5])
def test_drafts_do_not_count_twice(tiny_folders, lookup):
    """What a policy learns again is as the step had it, and no tokens of its own."""
    model = load(tiny_folders["llama"], reachable(), ("cpu", None))
    top_p_controller = runtime_of(model).attention.top_p_controller
    units, after_step, take = [], top_p_controller.after_step, top_p_controller._cuts.take_chosen

    class Counted:
        hold_top_p = top_p_controller._cuts.hold_top_p

        def take_chosen(self) -> tuple[int, int]:
            taken = take()
            units.append(taken[0])
            return taken

    counted = Counted()

    def noted() -> None:
        top_p_controller._cuts = counted
        after_step()
        top_p_controller._cuts = hold_cuts

    hold_cuts, top_p_controller.after_step = top_p_controller._cuts, noted
    tokens = random_tokens(1, 40).repeat(1, 5)
    greedy(model, tokens, 40, prompt_lookup_num_tokens=lookup)
    of_row = int(runtime_of(model).attention.selecting_heads.sum())
    assert units
    assert all(num % of_row == 0 and num <= (lookup + 1) * of_row for num in units)


@pytest.mark.cuda
def test_a_thousand_steps_of_changing_shares_are_captured_once(tiny_folders, monkeypatch):
    captured, shares, capture = [], set(), GraphSync._capture

    def counted(self: GraphSync, step: Step, **options: Any) -> torch.cuda.CUDAGraph:
        captured.append(step)
        return capture(self, step, **options)

    monkeypatch.setattr(GraphSync, "_capture", counted)
    model = load(tiny_folders["llama"], reachable(), ("cuda", "graph"))
    top_p_controller = runtime_of(model).attention.top_p_controller
    after_step = top_p_controller.after_step

    def noted() -> None:
        after_step()
        shares.add(top_p_controller.top_p)

    top_p_controller.after_step = noted
    for index in range(4):
        greedy(model, random_tokens(1, 200 + index), 260)
        if index == 0:
            first = len(captured)
    assert len(shares) > 500
    assert len(captured) == first > 0


def test_options():
    policy = make_policy("hard_kv", inner="sketch", mean_tokens=200)
    assert policy == HardKV(Sketch(), mean_tokens=200)
    assert policy.selection_mean_tokens == 200
    assert HardKV(PerHead()).selection_mean_tokens is None
    wrong: tuple[Any, ...] = (68, 513, 100.0, True)
    for mean in wrong:
        with pytest.raises(ValueError, match=r"mean_tokens must be in \[69, 512\], .* raise max_"):
            HardKV(Sketch(), max_tokens=512, mean_tokens=mean)
    for top_p in (0.95, 1.0):
        with pytest.raises(ValueError, match="quest ranks blocks of them; leave mean_tokens out"):
            HardKV(Quest(), top_p, mean_tokens=300)
    with pytest.raises(ValueError, match=r"shares from 0\.5 to top_p, which is 0\.4; raise top_p"):
        HardKV(Sketch(), 0.4, mean_tokens=300)
    with pytest.raises(NotImplementedError, match="mean_tokens=200 needs all heads in one process"):
        policy.of_heads(range(1), num_layers=2, num_kv_heads=2, head_dim=64)
