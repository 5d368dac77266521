"""Our decode steps and other engines' on the same weights, as rows of plain values.

All engines of one run are in one process on one model, so that their figures may be set against
each other. Peers attend to all tokens, which takes as long whatever the tokens are: their caches
are filled with random numbers of the weights' dtype, also where our keys and values are int8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from offload.bench.decode.baselines.transformers_compiled import CannotCompileError, decode_compiled
from offload.bench.decode.baselines.transformers_decode import (
    cache_bytes,
    decode_seconds,
    filled_cache,
)
from offload.bench.decode.models import DecodeModel, OnDone, ignore, lean_model, release
from offload.bench.eval.labels import policy_label, policy_options
from offload.decode.gpu.placement import Place
from offload.measuring.steps.measure import measure_steps
from offload.measuring.steps.session import DecodeSession
from offload.measuring.steps.step_timeline import StepTimeline
from offload.policies import Policy
from offload.system.memory import format_bytes, host_memory_limit_bytes
from offload.system.torch_threads import torch_threads

Row = dict[str, Any]
OURS, GRAPH = "offload", "all on the GPU, one graph"
STOCK, STOCK_OFFLOADED = "transformers, KV on the GPU", "transformers, KV offloaded"
STOCK_COMPILED = "transformers, static cache, compiled"
STOCK_ON_CPU = "transformers"
# As `offload bench decode` calls them.
ENGINES = {
    "offload": OURS,
    "graph": GRAPH,
    "transformers": STOCK,
    "transformers-compiled": STOCK_COMPILED,
    "transformers-offloaded": STOCK_OFFLOADED,
}


@dataclass(frozen=True)
class DecodePlan:
    """What to measure.

    Attributes:
        engines: names of `ENGINES`; on a CPU "offload" and "transformers".
        num_steps: of ours, the graph and the compiled step, `repeats` times of ours.
        stock_steps: of transformers as it comes, which is slow.
        num_threads: of torch on a CPU; None: as torch has it.
        traced_steps: of each of ours, once more, with marks: see `measure_steps`.
    """

    policies: Sequence[Policy]
    kv_lens: Sequence[int]
    engines: Sequence[str]
    num_steps: int
    repeats: int
    stock_steps: int
    num_threads: int | None
    traced_steps: int = 0


def measure_engines(
    model: DecodeModel,
    plan: DecodePlan,
    on_done: OnDone = ignore,
    on_traced: Callable[[Row, Sequence[StepTimeline]], None] = lambda row, steps: None,
) -> Iterator[Row]:
    """Every engine at every context; those that do not fit the memory give a row that says so.

    Args:
        on_traced: gets the traced steps of each row of ours.

    Raises:
        ValueError: numbers out of range.
        HostBudgetError, DeviceMemoryError: our own caches do not fit.
    """
    for kv_len in plan.kv_lens:
        if "offload" in plan.engines:
            with model.sessions(
                kv_len, plan.policies, num_steps=plan.num_steps, on_done=on_done
            ) as opened:
                for policy in plan.policies:
                    row, steps = our_row(opened(policy), kv_len, plan, on_done)
                    release(model.device)
                    on_traced(row, steps)
                    yield row
        for engine in plan.engines:
            if engine != "offload":
                yield peer_row(model, plan, engine, kv_len)


def our_row(
    session: DecodeSession, kv_len: int, plan: DecodePlan, on_done: OnDone = ignore
) -> tuple[Row, list[StepTimeline]]:
    """A session, which is closed, and its traced steps."""
    policy = session.runtime.config.policy
    with closing(session):
        measurement, steps = measure_steps(
            session,
            repeats=plan.repeats,
            traced_steps=plan.traced_steps,
            on_progress=lambda done, total: on_done("repeats", done, total),
        )
        placement = getattr(session.runtime.decoder, "placement", None)  # for its sequences by now
    places = {} if placement is None else {p.name: sum(placement.counts(p)) for p in Place}
    row = {
        "engine": OURS,
        "policy": policy.name,
        "label": policy_label(policy),
        "policy_options": policy_options(policy),
        "kv_len": kv_len,
        "kv_dtype": str(session.runtime.store.format.page_dtype).removeprefix("torch."),
        "places": places,
        **asdict(measurement),
    }
    return row, steps


def seconds_row(engine: str, kv_len: int, batch_size: int, seconds: Sequence[float]) -> Row:
    """The row of an engine whose steps took so long."""
    p10, median, p90 = (float(t) * 1e3 for t in np.percentile(seconds, [10, 50, 90]))
    return {
        "engine": engine,
        "policy": None,
        "kv_len": kv_len,
        "batch_size": batch_size,
        "steps": len(seconds),
        "milliseconds": median,
        "milliseconds_p10": p10,
        "milliseconds_p90": p90,
        "tokens_per_second": 1e3 * batch_size / median,
    }


def describe(row: Row) -> str:
    """A line for the log."""
    name = f"{row['engine']} {row.get('policy') or ''}".strip()
    start = f"{name:42} {row['batch_size']} x {row['kv_len']:7,}: "
    if row["milliseconds"] is None:
        return start + str(row["missing"])
    spread = (row["milliseconds_p90"] - row["milliseconds_p10"]) / 2
    line = f"{start}{row['milliseconds']:10.3f} ± {spread:.3f} ms"
    compiled = row.get("compile_seconds")
    return line if compiled is None else f"{line}, after {compiled:.0f} s of compiling"


def peer_row(model: DecodeModel, plan: DecodePlan, engine: str, kv_len: int) -> Row:
    """The row of one peer, or why there is none: many have no GPU that holds all of the KV."""
    on_cpu, sizes = model.device.type == "cpu", {"kv_len": kv_len, "batch_size": model.batch_size}
    name = STOCK_ON_CPU if on_cpu and engine == "transformers" else ENGINES[engine]
    num_bytes = cache_bytes(model.stock, **sizes)
    on_host = on_cpu or engine == "transformers-offloaded"
    kept_as = {"kv_dtype": str(model.stock.dtype).removeprefix("torch.")}
    found, why = None, f"needs {format_bytes(num_bytes)} of host memory for KV"
    if not on_host or num_bytes <= host_memory_limit_bytes():
        try:
            found = _peer_seconds(model, plan, engine, sizes)
        except torch.OutOfMemoryError:
            why = f"{format_bytes(num_bytes)} of KV do not fit the GPU"
        except CannotCompileError as error:
            why = str(error)
        release(model.device)  # now that no traceback keeps its tensors
    if found is None:
        row = {"engine": name, "policy": None, **sizes, **kept_as, "milliseconds": None}
        return row | {"tokens_per_second": None, "missing": why}
    seconds, more = found
    memory = {"kv_host" if on_host else "kv_device": num_bytes}
    row = seconds_row(name, kv_len, model.batch_size, seconds)
    return row | kept_as | {"memory": memory} | more


def _peer_seconds(
    model: DecodeModel, plan: DecodePlan, engine: str, sizes: dict[str, int]
) -> tuple[Sequence[float], Row]:
    """Seconds of each step, and what else the row says.

    Raises:
        CannotCompileError: it cannot be compiled here.
        torch.OutOfMemoryError: it does not fit.
    """
    if engine == "graph":
        from offload.bench.decode.baselines.all_on_gpu_graph import AllOnGPU

        graph = AllOnGPU(lean_model(model.stock), **sizes)
        memory = {"kv_device": graph.kv_bytes}
        more = {"attention": graph.attention_name, "memory": memory}
        return graph.decode_seconds(plan.num_steps), more
    if engine == "transformers-compiled":
        compiled = decode_compiled(model.stock, num_steps=plan.num_steps, **sizes)
        return compiled.seconds, {"compile_seconds": compiled.compile_seconds}
    with torch_threads(plan.num_threads):
        offloaded = engine == "transformers-offloaded"
        cache = filled_cache(model.stock, offloaded=offloaded, **sizes)
        return decode_seconds(model.stock, cache, num_steps=plan.stock_steps), {}
