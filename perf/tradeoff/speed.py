"""Milliseconds of a token behind real text, under the policies that were judged, and of peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from offload.bench.decode.engines import OURS, DecodePlan, measure_engines
from offload.bench.decode.models import (
    DecodeModel,
    OnDone,
    Opener,
    check_length,
    ignore,
    release,
)
from offload.loading.names import load_tokenizer
from offload.measuring.steps.session import DecodeSession
from offload.policies import Policy
from offload.runtime.budgets import weight_bytes_of
from offload.runtime.cache import OffloadedCache
from offload.runtime.config import runtime_config
from offload.runtime.runtime import Runtime
from offload.runtime.shared_model import SharedModel
from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT
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
    own = {"device": device, "threads": shared.runtimes[0].decoder.pool.num_threads}
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


class SharedText:
    """`TextModel` over a model that is open already, and reads each prompt once for all policies.

    Args:
        policies: of the runtimes of `shared`, in order: the very objects.
        tokens: int64, the text.
    """

    def __init__(self, shared: SharedModel, policies: Sequence[Policy], tokens: Tensor) -> None:
        self._shared, self._policies, self._tokens = shared, list(policies), tokens
        self.stock, self.device, self.batch_size = shared.stock, shared.device, 1

    @contextmanager
    def sessions(
        self, kv_len: int, policies: Sequence[Policy], *, num_steps: int, on_done: OnDone = ignore
    ) -> Iterator[Opener]:
        """As `RandomModel.sessions`.

        Raises:
            ValueError: more tokens than the model has positions, or the text has.
        """
        check_length(kv_len, num_steps, self._shared.max_context, len(self._tokens))
        try:
            with self._shared.read(self._tokens[:kv_len].tolist()) as prompt:

                def opened(policy: Policy) -> DecodeSession:
                    index = next(i for i, x in enumerate(self._policies) if x is policy)
                    runtime, (parent,) = self._shared.runtimes[index], prompt.cache.seqs
                    own = OffloadedCache(runtime.sequences)
                    own.take(runtime.sequences.fork(parent))
                    # Where no GPU has built it: once, and not in every repeat.
                    runtime.attention.build_states(own.seqs, [kv_len + 1])
                    weight_bytes = weight_bytes_of(self.stock)
                    return DecodeSession(
                        runtime, own, self._tokens, num_steps, weight_bytes=weight_bytes
                    )

                yield opened
        finally:
            release(self.device)


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
