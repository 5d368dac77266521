"""Milliseconds of a token behind real text, under the policies that were judged, beside peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from offload.bench.decode.engines import OURS, DecodePlan, measure_engines
from offload.bench.decode.models import DecodeModel, ignore
from offload.bench.decode.shared_text import SharedText
from offload.loading.names import load_tokenizer
from offload.policies import Policy
from offload.policies.base import DENSE, RETRIEVE, REUSE, SELECT
from offload.runtime.config import runtime_config
from offload.runtime.runtime import Runtime
from offload.runtime.shared_model import SharedModel
from offload.system.stdlib_text import stdlib_paragraphs

Row = dict[str, Any]
_ROLES = {"dense": DENSE, "retrieve": RETRIEVE, "select": SELECT, "reuse": REUSE}
# RULER's prompts are so much shorter than their length: where a rule follows the context, what is
# timed and what is judged are on the same side of it.
ROOM = 300
_KEPT = ("engine", "kv_len", "steps", "milliseconds", "milliseconds_p10", "milliseconds_p90")


def speed_rows(
    options: argparse.Namespace,
    policies: Sequence[Policy],
    labels: Sequence[str],
    device: str,
    baselines: Sequence[str],
    lengths: Sequence[int],
) -> Iterator[list[Row]]:
    """The rows of each length; a context ends `ROOM` tokens before it.

    Args:
        options: of `perf.bench_tradeoff`; --threads and --reads-on are for a CPU.
        labels: of the policies.
        baselines: engines of `offload bench decode`.
    """
    on_cpu = device == "cpu"
    num_threads = options.threads if on_cpu else None
    config = runtime_config(dtype=options.dtype, device=device, num_threads=num_threads)
    reads_on = options.reads_on if on_cpu else None
    shared = SharedModel(options.model, policies, config, reads_on=reads_on)
    words = "\n\n".join(stdlib_paragraphs())
    tokens = torch.tensor(load_tokenizer(options.model)(words, verbose=False)["input_ids"])
    text = SharedText(shared, policies, tokens)
    own = {"device": device, "threads": shared.runtimes[0]._decoder.pool.num_threads}
    for length in lengths:
        plan = DecodePlan(
            policies=policies,
            kv_lens=[length - ROOM - options.steps],
            engines=["offload", *baselines],
            num_steps=options.steps,
            repeats=options.repeats,
            stock_steps=options.peer_steps,
            num_threads=num_threads,
        )
        rows = []
        runtimes = iter(zip(labels, shared.runtimes, strict=True))
        for measured in measure_engines(cast(DecodeModel, text), plan, ignore):
            row = {"part": "speed", "length": length, "label": measured["engine"], **own}
            row |= {name: measured.get(name) for name in _KEPT}
            if measured["engine"] == OURS:
                label, runtime = next(runtimes)
                row |= {"label": label, "heads": heads_of(runtime)}
            rows.append(row)
        yield rows


def heads_of(runtime: Runtime) -> dict[str, int]:
    """KV heads of all layers by what they do; those that a GPU attends to, too."""
    attention, shape = runtime.attention, runtime.lean.shape
    num_layers = len(runtime.lean.layers)
    roles = attention.roles
    if roles is None:
        policy = attention.policy
        dense = policy.dense_layers if policy.selects else num_layers
        roles = np.full((num_layers, shape.num_kv_heads), SELECT)
        roles[:dense] = DENSE
    heads = {name: int((roles == role).sum()) for name, role in _ROLES.items()}
    if attention.left_to_device is not None:
        heads["on_gpu"] = int(attention.left_to_device[2].sum())
    return {name: count for name, count in heads.items() if count}
