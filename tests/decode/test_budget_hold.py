"""A mean of tokens, held by the share of the attention that selections keep."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.coprocessor_cases import SMALL, Shape, World
from cases.device_cases import greedy, load, small
from cases.seeded import new_rng
from cases.tiny_models import random_tokens

from cpu_ops.worker_pool import WorkerPool
from offload import OffloadedModel
from offload.decode.budget_hold import LEAST_SHARE, BudgetHold
from offload.decode.gpu.handshake import GraphHandshake, Step
from offload.policies import ExactTopK, HardKV, PerHead, Quest, Sketch
from offload.policies.registry import make_policy


class Text:
    """Heads that need `scale` tokens for even odds, and more for more."""

    def __init__(self, scale: float, slope: float = 0.8) -> None:
        self.scale, self.slope, self.top_p = scale, slope, 0.5

    def set_top_p(self, top_p: float) -> None:
        self.top_p = top_p

    def take_chosen(self) -> tuple[int, int]:
        return 12, round(12 * self.mean)

    @property
    def mean(self) -> float:
        return self.scale * (self.top_p / (1.0 - self.top_p)) ** self.slope


@pytest.mark.parametrize("slope", [0.4, 0.8, 1.5])
def test_it_finds_the_share_within_some_steps_and_again_when_the_text_changes(slope):
    text = Text(20.0, slope)
    hold = BudgetHold(text, 0.999, 100)
    assert text.top_p == hold.top_p == pytest.approx(0.999)
    for scale in (20.0, 35.0, 12.0):
        text.scale = scale
        for _ in range(20):
            hold.after_step()
        assert text.mean == pytest.approx(100, rel=0.05)


def test_it_stays_within_its_bounds_and_begins_anew():
    text = Text(1e6)
    hold = BudgetHold(text, 0.9, 100)
    for _ in range(50):
        hold.after_step()
    assert text.top_p == pytest.approx(LEAST_SHARE)
    text.scale = 0.5
    for _ in range(50):
        hold.after_step()
    assert text.top_p == pytest.approx(0.9)
    text.scale = 1e6
    hold.after_step()
    assert text.top_p < 0.9
    hold.restart()
    assert text.top_p == pytest.approx(0.9)
    assert BudgetHold(Text(1.0), 0.3, 100).top_p == pytest.approx(0.3)  # below the least
    assert BudgetHold(Text(1.0), 1.0, 100).top_p < 1.0  # selections are counted


def test_steps_that_select_nothing_change_nothing():
    class Dense(Text):
        def take_chosen(self) -> tuple[int, int]:
            return 0, 0

    hold = BudgetHold(Dense(1.0), 0.9, 100)
    hold.after_step()
    assert hold.top_p == pytest.approx(0.9)


@pytest.mark.parametrize("inner", ["exact_topk", "sketch", "lychee_cluster", "lfps", "union"])
def test_heads_attend_to_the_mean_of_all(inner, pool):
    """Each head to what it needs, all together to so many."""
    options = SMALL | {"budget_tokens": 120, "dense_layers": 0}
    policy = HardKV(make_policy(inner, **options), 0.99, mean_tokens=40)
    lens, shape = [400, 300], Shape(group_size=2)
    world = World.random(new_rng(), shape, policy, pool, lens)
    world.record_random_queries(new_rng(), lens)
    hold, rng, means = world.attention.hold, new_rng(), []
    assert hold is not None
    for _ in range(40):
        queries, *rows = world.random_step(rng)
        _, chosen = world.decode((2 * queries, *rows))  # that differ in what they ask for
        counts = [len(tokens) for of_layer in chosen for tokens in of_layer]
        assert max(counts) <= 120
        assert len(set(counts)) > 1
        means.append(float(np.mean(counts)))
        world.attention.count_rows(np.array(lens))
    assert len(set(counts)) > 4  # each what it needs
    assert means[0] > 44  # what the share would take
    assert statistics.mean(means[10:]) == pytest.approx(40, rel=0.1)


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
        held.attention.count_rows(np.array(lens))


def test_in_a_model_a_generation_does_not_depend_on_the_one_before(tiny_folders):
    policy = small("hard_kv")
    assert isinstance(policy, HardKV)
    policy = replace(policy, mean_tokens=policy.sink_tokens + policy.recent_tokens + 6)
    model: Any = OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=policy, dtype="float32", num_threads=2
    )
    prompts = [random_tokens(1, 220), random_tokens(1, 180)]

    def generated(tokens: torch.Tensor) -> torch.Tensor:
        return model.generate(tokens, do_sample=False, max_new_tokens=24, eos_token_id=None)

    first = [generated(tokens) for tokens in prompts]
    for tokens, expected in itertools.chain(zip(prompts, first, strict=True)):
        assert torch.equal(generated(tokens), expected)
    hold = model._offload.attention.hold
    assert hold is not None
    assert LEAST_SHARE <= hold.top_p < policy.top_p


@pytest.mark.cuda
def test_a_thousand_steps_of_changing_shares_are_captured_once(tiny_folders, monkeypatch):
    captured, shares, capture = [], set(), GraphHandshake._capture

    def counted(self: GraphHandshake, step: Step) -> torch.cuda.CUDAGraph:
        captured.append(step)
        return capture(self, step)

    monkeypatch.setattr(GraphHandshake, "_capture", counted)
    policy = small("hard_kv")
    assert isinstance(policy, HardKV)
    held = replace(policy, mean_tokens=policy.sink_tokens + policy.recent_tokens + 6)
    model = load(tiny_folders["llama"], held, ("cuda", "graph"))
    greedy(model, random_tokens(1, 200), 8)
    first = len(captured)
    assert first > 0
    hold = model._offload.attention.hold
    after_step = hold.after_step

    def noted() -> None:
        after_step()
        shares.add(hold.top_p)

    hold.after_step = noted
    for _ in range(4):
        greedy(model, random_tokens(1, 200), 260)
    assert len(shares) > 100
    assert len(captured) == first


def test_options():
    policy = make_policy("hard_kv", inner="sketch", mean_tokens=200)
    assert policy == HardKV(Sketch(), mean_tokens=200)
    assert policy.selection_mean_tokens == 200
    assert HardKV(PerHead()).selection_mean_tokens is None
    wrong: tuple[Any, ...] = (68, 513, 100.0, True)
    for mean in wrong:
        with pytest.raises(ValueError, match=r"mean_tokens must be in \[69, 512\], .* raise max_"):
            HardKV(Sketch(), max_tokens=512, mean_tokens=mean)
    with pytest.raises(ValueError, match="quest ranks blocks of them; leave mean_tokens out"):
        HardKV(Quest(), mean_tokens=300)


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()
