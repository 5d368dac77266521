"""Decode steps of ours beside other engines on the same weights, as rows of plain values.

All engines of one run are in one process on one model, so that their figures may be set against
each other. Peers attend to all tokens, which takes as long whatever the tokens are: their caches
are filled with random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from offload.bench.decode.models import DecodeModel, OnDone, lean_model, release
from offload.bench.decode.peers.transformers_compiled import CannotCompileError, decode_compiled
from offload.bench.decode.peers.transformers_decode import (
    cache_bytes,
    decode_seconds,
    filled_cache,
)
from offload.bench.eval.labels import policy_label, policy_options
from offload.measuring.steps.measure import measure_pipeline
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
    """

    policies: Sequence[Policy]
    kv_lens: Sequence[int]
    engines: Sequence[str]
    num_steps: int
    repeats: int
    stock_steps: int
    num_threads: int | None


def measure_engines(model: DecodeModel, plan: DecodePlan, on_done: OnDone) -> Iterator[Row]:
    """Every engine at every context; those that do not fit the memory give a row that says so.

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
                    with closing(opened(policy)) as session:
                        measurement, _ = measure_pipeline(
                            session,
                            repeats=plan.repeats,
                            traced_steps=0,
                            on_progress=lambda done, total: on_done("repeats", done, total),
                        )
                    release(model.device)
                    yield {
                        "engine": OURS,
                        "policy": policy.name,
                        "label": policy_label(policy),
                        "policy_options": policy_options(policy),
                        "kv_len": kv_len,
                        **asdict(measurement),
                    }
        for engine in plan.engines:
            if engine != "offload":
                yield _peer_row(model, plan, engine, kv_len)


def graph_row(model: DecodeModel, kv_len: int, *, num_steps: int, batch_size: int = 1) -> Row:
    """The all-on-GPU graph.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    from offload.bench.decode.peers.all_on_gpu_graph import AllOnGPU

    try:
        engine = AllOnGPU(lean_model(model.stock), kv_len=kv_len, batch_size=batch_size)
        row = seconds_row(GRAPH, kv_len, batch_size, engine.decode_seconds(num_steps))
        row |= {"attention": engine.attention_name, "memory": {"kv_device": engine.kv_bytes}}
        del engine
    finally:
        release(model.device)
    return row


def stock_row(
    model: DecodeModel,
    kv_len: int,
    *,
    offloaded: bool,
    num_steps: int,
    batch_size: int = 1,
) -> Row:
    """transformers.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    num_bytes = cache_bytes(model.stock, kv_len=kv_len, batch_size=batch_size)
    try:
        cache = filled_cache(model.stock, kv_len=kv_len, batch_size=batch_size, offloaded=offloaded)
        seconds = decode_seconds(model.stock, cache, num_steps=num_steps)
        del cache
    finally:
        release(model.device)
    row = seconds_row(STOCK_OFFLOADED if offloaded else STOCK, kv_len, batch_size, seconds)
    on_host = offloaded or model.device.type == "cpu"
    return row | {"memory": {"kv_host" if on_host else "kv_device": num_bytes}}


def compiled_row(model: DecodeModel, kv_len: int, *, num_steps: int, batch_size: int = 1) -> Row:
    """transformers with a static cache and a compiled step.

    Raises:
        CannotCompileError: it cannot be compiled here.
        torch.OutOfMemoryError: it does not fit.
    """
    num_bytes = cache_bytes(model.stock, kv_len=kv_len, batch_size=batch_size)
    try:
        found = decode_compiled(
            model.stock, kv_len=kv_len, num_steps=num_steps, batch_size=batch_size
        )
    finally:
        release(model.device)
    row = seconds_row(STOCK_COMPILED, kv_len, batch_size, found.seconds)
    return row | {
        "compile_seconds": found.compile_seconds,
        "memory": {"kv_device": num_bytes},
    }


def seconds_row(engine: str, kv_len: int, batch_size: int, seconds: Sequence[float]) -> Row:
    """Of steps that took so long."""
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


def _peer_row(model: DecodeModel, plan: DecodePlan, engine: str, kv_len: int) -> Row:
    """Of one peer, or why there is none: many have no GPU that holds all of the KV."""
    on_cpu = model.device.type == "cpu"
    name = STOCK_ON_CPU if on_cpu else ENGINES[engine]
    missing = {
        "engine": name,
        "policy": None,
        "kv_len": kv_len,
        "batch_size": 1,
        "milliseconds": None,
        "tokens_per_second": None,
    }
    num_bytes = cache_bytes(model.stock, kv_len=kv_len)
    if (on_cpu or engine == "transformers-offloaded") and num_bytes > host_memory_limit_bytes():
        return missing | {"missing": f"needs {format_bytes(num_bytes)} of host memory for KV"}
    try:
        if engine == "graph":
            return graph_row(model, kv_len, num_steps=plan.num_steps)
        if engine == "transformers-compiled":
            return compiled_row(model, kv_len, num_steps=plan.num_steps)
        is_offloaded = engine == "transformers-offloaded"
        with torch_threads(plan.num_threads):
            row = stock_row(model, kv_len, offloaded=is_offloaded, num_steps=plan.stock_steps)
        return row | {"engine": name}
    except torch.OutOfMemoryError:
        pass
    except CannotCompileError as error:
        return missing | {"missing": str(error)}
    release(model.device)  # now that no traceback keeps its tensors
    return missing | {"missing": f"{format_bytes(num_bytes)} of KV do not fit the GPU"}
