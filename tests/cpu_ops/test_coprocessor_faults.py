"""The coprocessor when something goes wrong: a GPU, a thread, numbers, ctrl-C, a fork."""

from __future__ import annotations

import dataclasses
import gc
import signal
import threading
import time
import weakref
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest
from cases.coprocessor_cases import (
    SMALL,
    Shape,
    World,
    check_last,
    decode_synchronously,
    full_world,
    launch,
    started,
)
from cases.pools import pools
from cases.processes import run_program
from cases.seeded import new_rng

from cpu_ops.coprocessor import CoprocessorError
from cpu_ops.worker_pool import WorkerPool
from offload.policies.base import SparsePolicy
from offload.selection.callback import (
    Callback,
    callback,
    offset_floats,
    read_context,
    score_tokens,
    view_int32,
)
from offload.selection.layer_state import LayerState
from offload.selection.layouts import StateLayout

pool = pools(1, 3, scope="function")


def test_a_gpu_that_does_not_come(pool):
    world = full_world(pool)
    with started(world, deadline_seconds=0.3) as (coprocessor, gpu):
        begin = time.monotonic()
        coprocessor.begin_step(world.open(world.random_step(new_rng())), [0, 1])
        message = r"the GPU did not come to layer 0 \(request 1 of 3\) within 0.3 s"
        with pytest.raises(CoprocessorError, match=message):
            coprocessor.wait()
        assert time.monotonic() - begin < 1.0
        coprocessor.abort()
        coprocessor.reset()
        coprocessor.start()
        check_last(world, gpu, coprocessor)


def test_a_gpu_that_does_not_end_the_step(pool):
    world = full_world(pool)
    with started(world, deadline_seconds=0.3) as (coprocessor, gpu):
        gpu._end = lambda: None
        launch(world, coprocessor, gpu, new_rng())
        with pytest.raises(CoprocessorError, match="the GPU did not come to the end of the step"):
            coprocessor.wait()


@pytest.mark.parametrize("fault", ["stall", "die"])
def test_a_thread_that_does_not_come_back(fault, pool):
    """The host names the layer in time, the GPU runs to its end, and serving can start again."""
    rng = new_rng()
    world = full_world(pool)
    with started(world, deadline_seconds=0.4) as (coprocessor, gpu):
        launch(world, coprocessor, gpu, rng)
        coprocessor.wait()
        if fault == "stall":
            coprocessor.stall(1, seconds=2.0)
        else:
            coprocessor.die(1)
        for _ in range(3):
            launch(world, coprocessor, gpu, rng)
        begin = time.monotonic()
        with pytest.raises(
            CoprocessorError,
            match=r"the CPU side made no progress within 0.4 s: layer 1 \(request 2 of 3\)",
        ):
            coprocessor.wait()
        assert time.monotonic() - begin < 0.8
        coprocessor.abort()
        gpu.synchronize()
        with pytest.raises(CoprocessorError, match="it was aborted; reset"):
            coprocessor.wait()
        coprocessor.reset()
        assert not coprocessor.mailbox.requests.any()
        assert not coprocessor.mailbox.replies.any()
        coprocessor.start()
        check_last(world, gpu, coprocessor)
        if fault == "stall":  # the one that was left behind wakes up, and does no harm
            time.sleep(max(0.0, begin + 2.2 - time.monotonic()))
            check_last(world, gpu, coprocessor)


def test_a_short_stall_only_costs_time(pool):
    rng = new_rng()
    world = full_world(pool)
    with started(world) as (coprocessor, gpu):
        coprocessor.stall(2, seconds=0.2)
        begin = time.monotonic()
        launch(world, coprocessor, gpu, rng)
        with pytest.raises(CoprocessorError, match=r"was not done within 0.05 s: layer 2"):
            coprocessor.wait(0.05)
        coprocessor.wait()
        assert time.monotonic() - begin >= 0.2
        check_last(world, gpu, coprocessor)


def test_non_finite_numbers_fail_the_step(pool):
    world = full_world(pool)
    with started(world) as (coprocessor, gpu):
        given = world.random_step(new_rng())
        given[0][1, 1, 5] = float("nan")
        step = world.open(given)
        coprocessor.begin_step(step, [0, 1])
        gpu.launch(given, step, [0, 1])
        with pytest.raises(CoprocessorError, match="non-finite attention in layer 1, query row 1"):
            coprocessor.wait()
        gpu.synchronize()  # not hung, even before abort()
        coprocessor.abort()
        coprocessor.reset()
        coprocessor.start()
        check_last(world, gpu, coprocessor)
    world = full_world(pool)
    coprocessor = world.coprocessor(sink_tokens=4, recent_tokens=8)
    with pytest.raises(RuntimeError, match="non-finite attention in layer 1, query row 1"):
        decode_synchronously(world, coprocessor, given)
    coprocessor.abort()
    coprocessor.reset()
    given = world.random_step(new_rng())
    out = decode_synchronously(world, coprocessor, given)
    assert np.isfinite(out).all()


def test_abort_in_the_middle_of_good_steps(pool):
    rng = new_rng()
    world = full_world(pool)
    with started(world) as (coprocessor, gpu):
        for round_ in range(20):
            for _ in range(3):
                launch(world, coprocessor, gpu, rng)
            time.sleep(0.0005 * round_)
            coprocessor.abort()
            gpu.synchronize()
            coprocessor.reset()
            world.truncate([60, 30])
            coprocessor.start()
        check_last(world, gpu, coprocessor)


STATE = StateLayout(flag=np.int32, scores=np.float32)
read_state = STATE.read


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    while view_int32(state.flag, 2)[0] == 0:  # the call below may change it, for all LLVM knows
        score_tokens(pointer, ctx.score_tokens, offset_floats(state.flag, 1), 1, state.scores)
    return 0


class StuckState(LayerState):
    layout = STATE

    def build(self, context):
        return {"flag": np.zeros(2, np.int32), "scores": np.zeros(64, np.float32)}


@dataclasses.dataclass(frozen=True)
class Stuck(SparsePolicy):
    """Its select() does not return before its array says so."""

    name: ClassVar[str] = "stuck"
    select: ClassVar[Callback | None] = select
    state = cached_property(StuckState)


def test_a_callback_that_hangs():
    """Python and the GPU get away; what hangs keeps its memory, and cannot be used any more."""
    pool = WorkerPool(2)
    world = World.random(new_rng(), Shape(), Stuck(**SMALL), pool, [100])
    with started(world, deadline_seconds=0.4) as (coprocessor, gpu):
        launch(world, coprocessor, gpu, new_rng())
        with pytest.raises(CoprocessorError, match=r"layer 1 \(request 2 of 3\), attending"):
            coprocessor.wait()
        coprocessor.abort()
        gpu.synchronize()
        for call in (coprocessor.reset, coprocessor.start, coprocessor.wait):
            with pytest.raises(CoprocessorError, match="its thread is stuck"):
                call()
        arrays = world.attention.states.arrays_of(world.seqs[0])
        assert arrays is not None
        flags = [of_layer["flag"] for of_layer in arrays.layers if of_layer]
        mailbox = weakref.ref(coprocessor.mailbox)
    del coprocessor, gpu
    gc.collect()
    assert mailbox() is not None
    for flag in flags:
        flag[0] = 1
    time.sleep(0.05)
    pool.close()


def test_ctrl_c_ends_the_wait(pool):
    world = full_world(pool)
    with started(world) as (coprocessor, gpu):
        coprocessor.begin_step(world.open(world.random_step(new_rng())), [0, 1])
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        begin = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            coprocessor.wait()
        assert time.monotonic() - begin < 2.0
        coprocessor.abort()
        coprocessor.reset()
        coprocessor.start()
        check_last(world, gpu, coprocessor)


FORK = """
import os, sys
sys.path[:0] = ["tests"]
import numpy as np, torch
torch.set_num_threads(1)
from cases.coprocessor_cases import FlagGpu, Shape, World, decode_synchronously
from cpu_ops.coprocessor import CoprocessorError
from cpu_ops.worker_pool import WorkerPool
from offload.policies import Full

rng = np.random.default_rng(0)
pool = WorkerPool(3)
world = World.random(rng, Shape(), Full(), pool, [50])
driven = world.coprocessor(sink_tokens=2, recent_tokens=3)
called = world.coprocessor(sink_tokens=2, recent_tokens=3)
driven.start()
gpu = FlagGpu(world, driven)
def run():
    given = world.random_step(rng)
    step = world.open(given)
    driven.begin_step(step, [0])
    gpu.launch(given, step, [0])
    driven.wait()
    gpu.synchronize()
    world.commit(step)
run()
child = os.fork()
if child == 0:
    refused = 0
    for call in (driven.wait, driven.abort, lambda: driven.begin_step(None, [])):
        try:
            call()
        except CoprocessorError as error:
            refused += "belongs to the parent process" in str(error)
        except AttributeError:
            pass
    serves = np.isfinite(decode_synchronously(world, called, world.random_step(rng))).all()
    driven.close()
    del driven, gpu
    os._exit(0 if refused == 2 and serves else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
run()
print(status, np.isfinite(gpu.outputs[-1]).all())
"""


@pytest.mark.slow
def test_a_forked_child_is_refused_and_the_parent_goes_on():
    """The thread stays in the parent; serving synchronously works in both."""
    result = run_program(FORK)
    assert result.stdout.split() == ["0", "True"], result.stderr
