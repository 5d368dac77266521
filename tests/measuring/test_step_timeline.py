"""What overlaps in a step, the two clocks, and the trace of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.seeded import new_rng

from cpu_ops.trace import TraceEvent
from offload.cli.bench.traced import TASK_MEANINGS, reply_lines
from offload.measuring.steps.chrome_trace import chrome_trace, write_chrome_trace
from offload.measuring.steps.gpu_marks import START, GpuMarks
from offload.measuring.steps.step_timeline import (
    SHARES,
    TASKS,
    Interval,
    StepShares,
    StepTimeline,
    Task,
    clock_offset_ns,
    intersection,
    length,
    median_microseconds,
    shifted,
    step_shares,
    summed,
    union,
)
from offload.measuring.steps.traced_steps import timeline_of
from offload.measuring.steps.worker_tasks import layer_replies, workers_row

# Linear layers, a request, host attention beside the window's, then the GPU waits and merges.
STEP = StepTimeline(
    1000,
    2000,
    cpu=(
        Interval("wait", 0, 1000, 1310),
        Interval("store", 0, 1310, 1330),
        Interval("attend", 0, 1330, 1600),
        Interval("update", 0, 1610, 1700),
    ),
    gpu=(
        Interval("linear", 0, 1000, 1300),
        Interval("window", 0, 1300, 1400),
        Interval("wait", 0, 1400, 1620),
        Interval("merge", 0, 1620, 1650),
        Interval("linear", 0, 1650, 1990),
    ),
    tasks=(
        Task("ask", 0, 1340, 1400, 0, 0, 2),
        Task("attend", 0, 1400, 1600, 0, 0, 2),
        Task("warm", 0, 1640, 1690, 1, -1, -1),
        Task("attend", 0, 1450, 1550, 1, 0, 2),
    ),
    num_workers=3,
)


def test_shares_of_a_step() -> None:
    shares = step_shares(STEP)
    assert shares.total_ns == 1000
    assert shares.overlapped_ns == (1400 - 1310) + (1700 - 1620)
    assert shares.waiting_ns == 310 + 290
    assert shares.exposed_ns == (1600 - 1400) + (1620 - 1610)
    assert shares.handshake_ns == (1610 - 1600) + (2000 - 1990)
    assert sum(shares.share(name) for name in SHARES) == pytest.approx(1)
    assert shares.share("exposed") == pytest.approx(0.21)


def test_work_beyond_the_step_does_not_count() -> None:
    step = StepTimeline(
        100,
        200,
        cpu=(
            Interval("prepare", 1, 50, 120),
            Interval("warm", 1, 120, 190),  # fills a wait
            Interval("update", 1, 190, 300),
        ),
        gpu=(Interval("linear", 0, 0, 150),),
    )
    assert step_shares(step) == StepShares(100, 20, 30, 10, 40)


def test_shares_against_a_sampled_clock() -> None:
    rng = new_rng()

    def intervals(kinds: tuple[str, ...]) -> tuple[Interval, ...]:
        found = []
        for _ in range(30):
            start = int(rng.integers(0, 900))
            kind = str(rng.choice(kinds))
            found.append(Interval(kind, 0, start, start + int(rng.integers(0, 60))))
        return tuple(found)

    step = StepTimeline(100, 800, intervals(("attend", "wait")), intervals(("linear", "wait")))
    busy = {}
    for side, own in (("cpu", step.cpu), ("gpu", step.gpu)):
        busy[side] = np.zeros(1000, bool)
        for interval in own:
            if interval.kind != "wait":
                busy[side][interval.start_ns : interval.end_ns] = True
    cpu, gpu = busy["cpu"][100:800], busy["gpu"][100:800]
    assert step_shares(step) == StepShares(
        700,
        int((cpu & gpu).sum()),
        int((gpu & ~cpu).sum()),
        int((cpu & ~gpu).sum()),
        int((~cpu & ~gpu).sum()),
    )


def test_sums_and_medians() -> None:
    longer = StepTimeline(0, 500, cpu=(Interval("attend", 0, 0, 500),), gpu=())
    both = summed([step_shares(STEP), step_shares(longer)])
    assert both.total_ns == 1500
    assert both.exposed_ns == 210 + 500
    table = median_microseconds([STEP, longer, longer])
    assert table["cpu"] == {"store": 0.0, "attend": 0.5, "update": 0.0, "wait": 0.0}
    assert median_microseconds([STEP])["gpu"]["linear"] == pytest.approx(0.64)
    with pytest.raises(ValueError, match="no steps to sum up"):
        summed([])


def test_what_workers_share_of_a_reply() -> None:
    (reply,) = layer_replies([STEP])
    assert reply.layer == 0
    assert reply.microseconds == pytest.approx(0.29)  # from the request seen
    assert reply.before_tasks_microseconds == pytest.approx(0.03)
    assert reply.after_tasks_microseconds == 0
    assert reply.busy_workers == pytest.approx((60 + 200 + 100) / 290)
    assert reply.idle_share == pytest.approx(1 - (60 + 200 + 100) / (3 * 270))
    workers = workers_row([STEP, STEP])
    assert workers is not None
    assert workers["task_microseconds"] == {"warm": 0.05, "ask": 0.06, "attend": 0.3}
    assert [*workers["task_microseconds"]] == ["warm", "ask", "attend"]
    assert {*TASK_MEANINGS} == {*TASKS}
    assert [line[4] for line in reply_lines(workers)] == ["1.2 of 3", "1.2 of 3"]


def test_clocks_are_aligned_by_what_the_leading_thread_did() -> None:
    """Workers' tasks have some of its kinds; they end before it does."""
    events = [
        TraceEvent("wait", 0, 0, 1000, 1310),
        TraceEvent("attend", 0, 0, 1330, 1600),
        TraceEvent("attend", 0, -1, 1400, 1500, worker=1, row=0, unit=3),
    ]
    marks = [Interval("linear", 0, 0, 300), Interval("wait", 0, 400, 620)]
    step = timeline_of(1000, 2000, marks, events)
    assert step.cpu == (Interval("wait", 0, 1000, 1310), Interval("attend", 0, 1330, 1600))
    assert step.tasks == (Task("attend", 0, 1400, 1500, 1, 0, 3),)
    assert step.gpu[1] == Interval("wait", 0, 400 + 995, 620 + 995)


def test_clocks_are_aligned_where_a_layer_is_asked_for_ahead() -> None:
    """Its request is seen before its own projection, which raises none."""
    events = [
        TraceEvent("wait", 0, 0, 1000, 1310),
        TraceEvent("attend", 0, 0, 1330, 1600),
        TraceEvent("wait", 1, 1, 1605, 1610),
        TraceEvent("attend", 1, 1, 1615, 1700),
    ]
    marks = [
        Interval("linear", 0, 0, 300),
        Interval("predicted", 1, 300, 320),
        Interval("wait", 0, 400, 620),
        Interval("linear", 1, 620, 900),
        Interval("hot", 1, 900, 950),
    ]
    step = timeline_of(1000, 2000, marks, events)
    assert step.gpu[1] == Interval("predicted", 1, 300 + 995, 320 + 995)


def test_clocks_are_aligned_by_each_micro_batch() -> None:
    """Two requests of a layer: the first is answered while the second waits."""
    events = [
        TraceEvent("wait", 0, 0, 1000, 1310),
        TraceEvent("attend", 0, 0, 1330, 1600),
        TraceEvent("wait", 0, 1, 1600, 1605),
        TraceEvent("attend", 0, 1, 1605, 1900),
    ]
    marks = [
        Interval("linear", 0, 0, 300),
        Interval("linear", 0, 300, 500),
        Interval("wait", 0, 500, 620),
        Interval("wait", 0, 700, 920),
    ]
    step = timeline_of(1000, 2000, marks, events)
    assert step.gpu[0] == Interval("linear", 0, 995, 1295)


def test_replies_of_several_layers() -> None:
    """Each has its own wait; where there is none, a request is seen when its layer is attended."""
    cpu, tasks = [], []
    for layer, microseconds in ((0, 10), (1, 30), (2, 20)):
        start = 100_000 * layer
        if layer > 0:
            cpu.append(Interval("wait", layer, start, start + 5000))
        cpu.append(Interval("attend", layer, start + 7000, start + microseconds * 1000))
        tasks.append(Task("attend", layer, start + 8000, start + 9000, 0, 0, 0))
    replies = layer_replies([StepTimeline(0, 300_000, (*cpu,), (), (*tasks,), 1)])
    assert [reply.microseconds for reply in replies] == [3, 25, 15]
    assert [reply.before_tasks_microseconds for reply in replies] == [1, 3, 3]
    assert [reply.after_tasks_microseconds for reply in replies] == [1, 21, 11]


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        ((Interval("atend", 3, 0, 1),), "unknown cpu kind 'atend'; available: store, attend"),
        ((Interval("attend", 3, 5, 4),), "cpu attend of layer 3 ends at 4 ns, before"),
    ],
)
def test_bad_intervals(intervals: tuple[Interval, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepTimeline(0, 10, intervals, ())
    with pytest.raises(ValueError, match="unknown worker kind 'wait'; available: prepare, warm"):
        StepTimeline(0, 10, (), (), (Task("wait", 0, 1, 2, 0, 0, 0),))
    with pytest.raises(ValueError, match="a step cannot end at 0 ns"):
        StepTimeline(0, 0, (), ())


def test_spans() -> None:
    assert union([(5, 7), (1, 3), (3, 4), (6, 6), (2, 2)]) == [(1, 4), (5, 7)]
    assert intersection([(1, 4), (5, 9)], [(0, 2), (3, 6), (8, 20)]) == [
        (1, 2),
        (3, 4),
        (5, 6),
        (8, 9),
    ]
    assert length([(1, 4), (5, 7)]) == 5


def test_clocks_are_aligned_by_flags() -> None:
    rng = new_rng()
    offset = 123_456_789_000
    raised, answered = [], []
    for i in range(32):
        gpu = 10_000 * i
        raised.append((gpu, gpu + offset + 700 + int(rng.integers(0, 3000))))
        answered.append((gpu + offset + 5000, gpu + 5000 + 900 + int(rng.integers(0, 3000))))
    found, error = clock_offset_ns(raised, answered)
    assert abs(found - offset) <= error < 1000
    assert shifted([Interval("linear", 2, 10, 20)], 5) == (Interval("linear", 2, 15, 25),)


def test_clocks_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="contradict each other by 20 ns"):
        clock_offset_ns([(100, 90)], [(110, 100)])
    with pytest.raises(ValueError, match="one of the lists is empty"):
        clock_offset_ns([(1, 2)], [])


def test_trace(tmp_path: Path) -> None:
    copies = StepTimeline(2000, 2100, (), (Interval("copy", -1, 2000, 2050),))
    path = tmp_path / "trace.json"
    write_chrome_trace(path, [STEP, copies], metadata={"shape": "tiny"})
    document = json.loads(path.read_text())
    assert document["otherData"] == {"shape": "tiny"}
    events = document["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    work = [e for e in events if e["ph"] == "X"]
    steps = [e for e in work if names[e["pid"]] == "steps"]
    assert [(e["name"], e["ts"], e["dur"]) for e in steps] == [
        ("step 0", 0.0, 1.0),
        ("step 1", 1.0, 0.1),
    ]
    attend = next(e for e in work if e["name"] == "attend")
    assert (names[attend["pid"]], attend["ts"], attend["dur"]) == ("CPU workers", 0.33, 0.27)
    assert attend["args"] == {"layer": 0}
    copy = next(e for e in work if e["name"] == "copy")
    window = next(e for e in work if e["name"] == "window")
    assert copy["pid"] == window["pid"]
    assert copy["tid"] != window["tid"]
    assert copy["args"] == {}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert threads == ["kernels", "copies", "requests", "worker 0", "worker 1", "worker 2"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tasks = [(rows[e["tid"]], e["name"], e["ts"], e["args"]) for e in work if e["tid"] > 2]
    one = {"layer": 0, "row": 0, "unit": 2}
    assert tasks == [("worker 1", "warm", 0.64, {"layer": 0}), ("worker 1", "attend", 0.45, one)]
    with pytest.raises(ValueError, match="no steps to write a trace of"):
        chrome_trace([])


def test_marks_on_the_cpu() -> None:
    marks = GpuMarks(torch.device("cpu"), capacity=4)
    for _ in range(2):
        marks.clear()
        marks.mark(START)
        marks.mark("linear", 0)
        marks.mark("window", 0)
        linear, window = marks.read()
    assert (linear.kind, window.kind, window.layer) == ("linear", "window", 0)
    assert linear.start_ns <= linear.end_ns == window.start_ns <= window.end_ns
    marks.mark("merge", 0)
    with pytest.raises(ValueError, match="at most 4 marks; raise capacity"):
        marks.mark("linear", 1)


@pytest.mark.cuda
def test_marks_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device = torch.device("cuda")
    marks = GpuMarks(device)
    x = torch.randn(2048, 2048, device=device)
    marks.mark(START)
    y = x @ x
    marks.mark("linear", 0)
    marks.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        marks.mark(START)
        y = x @ x
        marks.mark("linear", 0)
    graph.replay()
    (first,) = marks.read()
    graph.replay()
    (second,) = marks.read()
    assert 0 < second.end_ns - second.start_ns < 10**8
    assert second.start_ns >= first.end_ns
    assert bool(torch.isfinite(y).all())
