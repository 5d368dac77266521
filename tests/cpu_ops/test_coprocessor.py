"""The coprocessor driven by flags: results, running ahead, and calls that do not fit."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import relative_error
from cases.coprocessor_cases import (
    FLOAT32,
    SMALL,
    Shape,
    World,
    check_dense,
    check_last,
    decode_synchronously,
    full_world,
    launch,
    started,
)
from cases.pools import pools
from cases.seeded import new_rng

from cpu_ops.coprocessor import Coprocessor, CoprocessorError
from cpu_ops.mailbox import Mailbox
from offload.policies import Full, Policy
from offload.policies.registry import make_policy

pool = pools(1, 3, scope="function")


@pytest.mark.parametrize("name", ["full", "quest", "lychee_cluster", "lfps"])
def test_steps_queued_ahead_are_those_of_the_cpu_alone(name, pool):
    """The GPU is several steps behind the host; short rows grow past the budget meanwhile."""
    rng = new_rng()
    policy: Policy = Full() if name == "full" else make_policy(name, **SMALL)
    seed = int(rng.integers(1 << 30))
    alone, beside = (
        World.random(np.random.default_rng(seed), Shape(), policy, pool, [200, 1, 45, 46])
        for _ in range(2)
    )
    steps = [alone.random_step(rng) for _ in range(9)]
    with started(beside) as (coprocessor, gpu):
        for given in steps:
            kv_lens = [beside.store.kv_len(seq) + 1 for seq in beside.seqs]
            if not all(map(beside.attention.states.serves, beside.seqs, kv_lens)):
                coprocessor.wait()
            step = beside.open(given)
            coprocessor.begin_step(step, range(4))
            gpu.launch(given, step, range(4))
            beside.commit(step)
        coprocessor.wait()
        gpu.synchronize()
    for given, out in zip(steps, gpu.outputs, strict=True):
        expected = alone.decode(given)[0].double().numpy()
        for layer_idx in range(alone.shape.num_layers):
            assert relative_error(out[layer_idx], expected[layer_idx]) < 2 * FLOAT32


def test_sub_batches_holes_and_layers_on_the_gpu(pool):
    """Requests of two halves in turn, for layers 1 and 3 of 5; slots in any order, some unused."""
    rng = new_rng()
    world = full_world(pool, kv_lens=(40, 3, 77), num_layers=5)
    requests = [(1, 0, 3), (1, 3, 4), (3, 0, 3), (3, 3, 4)]
    slots = [6, 0, 4]
    with started(world, requests=requests, max_rows=7) as (coprocessor, gpu):
        for _ in range(3):
            given = world.random_step(rng)
            step = world.open(given)
            coprocessor.begin_step(step, slots)
            gpu.launch(given, step, slots)
            coprocessor.wait()
            gpu.synchronize()
            world.commit(step)
            for layer_idx in (1, 3):
                for row, kv_len in enumerate(step.kv_lens.tolist()):
                    q = given[0][layer_idx, row]
                    expected, _ = world.window_part(q, layer_idx, row, kv_len, kv_len, 0)
                    out = gpu.outputs[-1][layer_idx, row]
                    assert relative_error(out, expected.reshape(-1)) < FLOAT32
        for row, seq in enumerate(world.seqs):  # every layer is in the store
            for layer_idx in range(5):
                keys, values = world.store.gather(seq, layer_idx)
                assert torch.equal(keys, world.keys[row][layer_idx].transpose(0, 1))
                assert torch.equal(values, world.values[row][layer_idx].transpose(0, 1))


def test_many_rows_are_stored_by_the_pool(pool):
    world = full_world(pool, kv_lens=range(1, 20), num_layers=2)
    coprocessor = world.coprocessor(sink_tokens=2, recent_tokens=3)
    given = world.random_step(new_rng())
    out = decode_synchronously(world, coprocessor, given)
    check_dense(world, out, given[0], np.arange(2, 21))


def test_steps_keep_their_memory_until_they_are_done(pool):
    rng = new_rng()
    world = full_world(pool)
    with started(world) as (coprocessor, gpu):
        given = world.random_step(rng)
        step = world.open(given)
        coprocessor.begin_step(step, [0, 1])
        held = weakref.ref(step)
        gpu.launch(given, step, [0, 1])
        coprocessor.wait()
        gpu.synchronize()
        step = world.open(given)
        coprocessor.begin_step(step, [0, 1])
        gc.collect()
        assert held() is None
        held = weakref.ref(step)
        del step
        gc.collect()
        assert held() is not None
        coprocessor.abort()
        gc.collect()
        assert held() is None


def test_events(pool):
    rng = new_rng()
    policy = make_policy("lfps", **SMALL)
    world = World.random(rng, Shape(), policy, pool, [100, 90])
    with started(world) as (coprocessor, gpu):
        launch(world, coprocessor, gpu, rng)
        coprocessor.wait()
        assert world.attention.trace_events() == ([], 0)
        world.attention.trace(True)
        start = time.monotonic_ns()
        launch(world, coprocessor, gpu, rng)
        coprocessor.wait()
        recorded, _ = world.attention.trace_events()
        end = time.monotonic_ns()
        events = [event for event in recorded if event.worker < 0]
        check_tasks(events, [event for event in recorded if event.worker >= 0], pool.num_threads)
        # Whether it reads ahead depends on how far the GPU is.
        assert all(event.layer_idx > 0 for event in events if event.kind == "warm")
        kinds = [(e.kind, e.layer_idx, e.request) for e in events if e.kind != "warm"]
        sparse = ["wait", "store", "attend", "update"]
        expected = [(kind, 0, 0) for kind in ["wait", "store", "attend"]]
        # Layer 2 is prepared while layer 1 is updated.
        expected += [(kind, 1, 1) for kind in ["prepare", *sparse]]
        expected += [(kind, 2, 2) for kind in sparse]
        expected += [("wait", -1, -1), ("store", -1, -1)]
        assert kinds == expected
        assert all(start <= event.start_ns <= event.end_ns <= end for event in events)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(events))
        world.attention.trace(False)
        launch(world, coprocessor, gpu, rng)
        coprocessor.wait()
        assert world.attention.trace_events() == ([], 0)


def check_tasks(events, tasks, num_workers):
    """Check one step of two rows under a policy that proposes: what workers did lies within what
    the thread that leads them did, with the right layers, rows and units."""
    within = dict.fromkeys(("ask", "score", "choose", "attend", "merge"), "attend")
    within["remember"] = "warm"
    for task in tasks:
        led = [(within.get(task.kind, task.kind), task.layer_idx)]
        if task.kind == "prepare":
            led.append(("update", task.layer_idx - 1))
        spans = [e for e in events if (e.kind, e.layer_idx) in led]
        assert any(e.start_ns <= task.start_ns <= task.end_ns <= e.end_ns for e in spans), task
        assert task.worker < num_workers, task
        assert task.request == -1, task
    for worker in range(num_workers):
        own = [task for task in tasks if task.worker == worker]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(own))
    done = {
        kind: sorted((t.layer_idx, t.row, t.unit) for t in tasks if t.kind == kind)
        for kind in (*within, "update", "prepare")
    }
    units = [(layer, row, unit) for layer in (1, 2) for row in (0, 1) for unit in (0, 1)]
    assert done["ask"] == done["choose"] == done["update"] == done["prepare"] == units
    assert sorted(set(done["score"])) == units
    assert [place for place in done["merge"] if place[0] > 0] == units
    assert {layer_idx for layer_idx, _, _ in done["attend"]} == {0, 1, 2}


def test_two_models_in_one_process(pool):
    rng = new_rng()
    first, second = full_world(pool), full_world(pool, kv_lens=(100,))
    with started(first) as (one, gpu_one), started(second) as (two, gpu_two):
        for _ in range(10):
            launch(first, one, gpu_one, rng)
            launch(second, two, gpu_two, rng)
        one.wait()
        two.wait()
        check_last(first, gpu_one, one)
        check_last(second, gpu_two, two)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def check_threads(expected: int) -> None:
    """The system lists a thread a moment longer than it runs."""
    end = time.monotonic() + 5.0
    while num_threads() != expected and time.monotonic() < end:
        time.sleep(0.01)
    assert num_threads() == expected


def test_threads_end(pool):
    before = num_threads()
    world = full_world(pool)
    coprocessor = world.coprocessor(sink_tokens=4, recent_tokens=8)
    check_threads(before)
    coprocessor.start()
    coprocessor.start()
    assert num_threads() == before + 1
    coprocessor.close()
    coprocessor.close()
    check_threads(before)
    with pytest.raises(CoprocessorError, match="it was closed"):
        coprocessor.start()
    coprocessor = world.coprocessor(sink_tokens=4, recent_tokens=8)
    coprocessor.start()
    coprocessor.begin_step(world.open(world.random_step(new_rng())), [0, 1])
    coprocessor.abort()
    del coprocessor
    gc.collect()
    check_threads(before)


def test_calls_out_of_order(pool):
    world = full_world(pool)
    coprocessor = world.coprocessor(sink_tokens=4, recent_tokens=8)
    with pytest.raises(ValueError, match=r"request 0 comes before begin_step\(\)"):
        coprocessor.serve(0)
    with pytest.raises(ValueError, match=r"end_step\(\) comes before begin_step\(\)"):
        coprocessor.end_step()
    with pytest.raises(ValueError, match=r"reset\(\) comes after abort\(\)"):
        coprocessor.reset()
    step = world.open(world.random_step(new_rng()))
    coprocessor.begin_step(step, [0, 1])
    for call in (lambda: coprocessor.begin_step(step, [0, 1]), coprocessor.start):
        with pytest.raises(ValueError, match="a step is open"):
            call()
    with pytest.raises(ValueError, match="expected request 0 of 3, got 1"):
        coprocessor.serve(1)
    with pytest.raises(ValueError, match="after 0 of 3 requests"):
        coprocessor.end_step()


def test_steps_that_do_not_fit(pool):
    world = full_world(pool)
    coprocessor = world.coprocessor(sink_tokens=4, recent_tokens=8)
    step = world.open(world.random_step(new_rng()))
    for slots, message in (
        ([0], "one slot per row, got 1 for 2"),
        ([1, 1], r"slots must be distinct, got \[1, 1\]"),
        ([0, 2], r"slots must lie in \[0, 2\), got \[0, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            coprocessor.begin_step(step, slots)
    twice = world.attention.begin_step([world.seqs[0]] * 2, [61, 61])
    with pytest.raises(ValueError, match="one row per sequence"):
        coprocessor.begin_step(twice, [0, 1])


def test_requests_and_windows_that_do_not_fit(pool):
    world = full_world(pool)
    windows = {"sink_tokens": 4, "recent_tokens": 8}
    for requests, message in (
        ([(3, 0, 2)], "request 0 names layer 3, but there are 3 layers"),
        ([(0, 0, 3)], "request 0 names rows 0 to 3, but the mailbox has 2"),
        ([(0, 0, 0)], "request 0 names rows 0 to 0"),
        ([(1, 0, 2), (0, 1, 1)], "request 1 asks for layer 0 after layer 1"),
        ([(1, 0, 2), (1, 1, 1)], "request 1 asks for layer 1 after layer 1"),
    ):
        with pytest.raises(ValueError, match=message):
            world.coprocessor(requests, **windows)
    with pytest.raises(ValueError, match="recent_tokens must not be negative, got -1"):
        world.coprocessor(sink_tokens=4, recent_tokens=-1)
    with pytest.raises(ValueError, match="deadline_seconds must be above 0"):
        world.coprocessor(**windows, deadline_seconds=0.0)
    sparse = World.random(new_rng(), Shape(), make_policy("quest", **SMALL), pool, [60])
    with pytest.raises(ValueError, match="recent_tokens must be the policy's, 8, got 16"):
        sparse.coprocessor(recent_tokens=16)
    assert sparse.coprocessor(recent_tokens=8).sink_tokens == 4


def test_mailboxes_that_do_not_fit(pool):
    world = full_world(pool)
    sizes: dict[str, Any] = {
        "num_requests": 1,
        "max_rows": 2,
        "num_layers": 3,
        "num_qo_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "dtype": torch.float32,
        "pinned": False,
    }
    windows = {"sink_tokens": 4, "recent_tokens": 8}
    good = Mailbox.allocate(**sizes)
    num_bytes = sum(x.nbytes for x in good.tensors)
    assert num_bytes == 4 * (2 * 192 * 2 + 3 * 2 * 2 * 64 + 2 * 6 + 5 * 16)
    Coprocessor(world.attention, good, [(0, 0, 2)], **windows)
    for name, value, message in (
        ("num_layers", 2, r"mailbox.kv must be torch.float32 \[3, 2, 2, 2, 32\]"),
        ("num_qo_heads", 4, r"mailbox.query must be torch.float32 \[2, 192\]"),
        ("dtype", torch.bfloat16, r"mailbox.query must be torch.float32"),
        ("num_requests", 2, "flags for 2 requests, got 1"),
    ):
        mailbox = Mailbox.allocate(**{**sizes, name: value})
        with pytest.raises(ValueError, match=message):
            Coprocessor(world.attention, mailbox, [(0, 0, 2)], **windows)
    close_flags = dataclasses.replace(
        good, requests=good.requests[:, :1].clone(), replies=good.replies[:, :1].clone()
    )
    with pytest.raises(ValueError, match="flags must be 16 int32 apart, got 1"):
        Coprocessor(world.attention, close_flags, [(0, 0, 2)], **windows)
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        Mailbox.allocate(**{**sizes, "max_rows": 0})
