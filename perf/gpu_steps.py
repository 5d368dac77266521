"""What `perf.bench_gpu` measures, a function for each part; each gives rows of plain values
as they are measured.

Everything runs in one process on one model with random weights, so that figures of one call may be
set against each other. With `--backend inline --shape tiny` all of it runs on a CPU, for tests.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpu_ops.worker_pool import WorkerPool
from offload.bench.decode.baselines.transformers_decode import prefill_seconds
from offload.bench.decode.engines import STOCK, DecodePlan, measure_engines, seconds_row
from offload.bench.decode.models import RandomModel, lean_model, release, synchronize
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.models.batch import RaggedBatch, pack
from offload.models.dtypes import DTYPES
from offload.models.shape import MODEL_SHAPES
from offload.policies import Policy
from offload.prefill.forward import prefill
from offload.runtime.budgets import pool_threads, weight_bytes_of
from offload.runtime.config import runtime_config
from offload.system.errors import NoGPUError

Row = dict[str, Any]
STOCK_STEPS = 4  # of transformers, which is slow
BACKENDS = ("graph", "stream", "inline")  # of RuntimeConfig; inline: without a GPU
NO_OFFLOAD, STREAMED, INDEXED = "without offload", "streamed out", "streamed out, with index"


def model_options(parser: argparse.ArgumentParser) -> None:
    """Options of the model that a script decodes with."""
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")


def random_model(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    *,
    longest: int,
    seed: int = 0,
    **config: Any,
) -> RandomModel:
    """What `model_options` and `config` say; ends the script in one line where there is no GPU."""
    where: Row = {"device": "cuda", "backend": options.backend}
    if options.backend == "inline":
        where = {"device": "cpu"}
    try:
        made = runtime_config(dtype=options.dtype, **where, **config)
    except NoGPUError as error:
        parser.error(str(error))
    return RandomModel(options.shape, made, longest=longest, seed=seed)


@dataclass
class GPUBench:
    """What all parts share.

    Attributes:
        policies: that decode; prefill uses the first.
    """

    model: RandomModel
    policies: Sequence[Policy]
    num_steps: int
    repeats: int

    @property
    def is_cuda(self) -> bool:
        return self.model.device.type == "cuda"

    @property
    def num_threads(self) -> int:
        """Threads of the worker pool."""
        return pool_threads(self.model.config)

    def release(self) -> None:
        """Give back what is no longer used: the next thing may need all of it."""
        release(self.model.device)

    def plan(self, kv_lens: Sequence[int], *engines: str, traced_steps: int = 0) -> DecodePlan:
        """For `measure_engines`."""
        return DecodePlan(
            policies=self.policies,
            kv_lens=kv_lens,
            engines=engines,
            num_steps=self.num_steps,
            repeats=self.repeats,
            stock_steps=STOCK_STEPS,
            num_threads=self.model.config.num_threads,
            traced_steps=traced_steps,
        )


def decode(bench: GPUBench, *, kv_lens: Sequence[int]) -> Iterator[Row]:
    """Our decode step under each policy, and the all-on-GPU graph, at each context."""
    return measure_engines(bench.model, bench.plan(kv_lens, "offload", "graph", traced_steps=8))


def baselines(bench: GPUBench, *, kv_lens: Sequence[int]) -> Iterator[Row]:
    """transformers at each context: as it comes, with KV on the GPU and offloaded, and compiled."""
    more = ("transformers-offloaded", "transformers-compiled") if bench.is_cuda else ()
    return measure_engines(bench.model, bench.plan(kv_lens, "transformers", *more))


@torch.inference_mode()
def prefill_rows(
    bench: GPUBench, *, lengths: Sequence[int], slice_tokens: int, memory_cap_bytes: int
) -> Iterator[Row]:
    """Seconds of a prompt: our prefill without a store, with one, with the policy's index.

    Ours run with the GPU's memory capped; each row has what torch's allocator gave out at most,
    weights included, and what it held.
    """
    policy = bench.policies[0]
    weight_bytes = weight_bytes_of(bench.model.stock)
    for num_tokens in lengths:
        with (
            _memory_cap(bench, memory_cap_bytes),
            _prefill_attention(bench, num_tokens, policy) as attention,
        ):
            for engine in (NO_OFFLOAD, STREAMED, INDEXED):
                if bench.is_cuda:
                    torch.cuda.reset_peak_memory_stats()
                first, *seconds = (
                    _prefill_seconds(
                        bench, attention, num_tokens, slice_tokens, engine, memory_cap_bytes
                    )
                    for _ in range(1 + bench.repeats)
                )
                cuda = torch.cuda if bench.is_cuda else None
                yield seconds_row(engine, num_tokens, 1, seconds) | {
                    "policy": policy.name if engine == INDEXED else None,
                    "first_milliseconds": 1e3 * first,
                    "weight_bytes": weight_bytes,
                    "device_peak_bytes": cuda and cuda.max_memory_allocated(),
                    "device_reserved_bytes": cuda and cuda.max_memory_reserved(),
                }
        bench.release()
        if num_tokens == min(lengths):
            _, second = (
                prefill_seconds(bench.model.stock, num_tokens=num_tokens) for _ in range(2)
            )
            yield seconds_row(STOCK, num_tokens, 1, [second])
            bench.release()


@contextmanager
def _prefill_attention(
    bench: GPUBench, num_tokens: int, policy: Policy
) -> Iterator[DecodeAttention]:
    """`policy` over a store whose memory is there before any clock starts."""
    shape = MODEL_SHAPES[bench.model.shape]
    store = KVStore(**shape.kv_heads, dtype=bench.model.stock.dtype, pinned=bench.is_cuda)
    with closing(store), closing(WorkerPool(bench.num_threads)) as pool:
        seq = store.new_sequence()
        store.reserve([seq], [num_tokens])
        store.free(seq)
        yield DecodeAttention(policy, store, num_qo_heads=shape.num_qo_heads, pool=pool)


def _prefill_seconds(
    bench: GPUBench,
    attention: DecodeAttention,
    num_tokens: int,
    slice_tokens: int,
    engine: str,
    memory_cap_bytes: int,
) -> float:
    """One prompt, until all of it is where it belongs."""
    device, store = bench.model.device, attention.store
    lean = lean_model(bench.model.stock)
    tokens = torch.randint(bench.model.stock.config.vocab_size, (num_tokens,), device=device)
    hidden = lean.embed_tokens(tokens)
    seq = store.new_sequence()
    store.reserve([seq], [num_tokens])
    build = attention.prefill_build([seq], [num_tokens]) if engine == INDEXED else None
    synchronize(bench.model.device)
    start = time.perf_counter()
    prefill(
        lean,
        hidden,
        one_prompt(num_tokens, device),
        store=None if engine == NO_OFFLOAD else store,
        seqs=[seq],
        slice_tokens=slice_tokens,
        on_queries=None if build is None else attention.on_prefill_queries,
        on_layer=None if build is None else build.on_layer,
        copied_heads=0 if build is None else build.copied_heads,
        device_budget_bytes=memory_cap_bytes,
    )
    store.commit([seq], [num_tokens])
    if build is not None:
        build.finish()
        attention.build_states([seq], [num_tokens + 1])  # what could not be built alongside
    synchronize(bench.model.device)
    seconds = time.perf_counter() - start
    attention.states.forget(seq)
    store.free(seq)
    return seconds


def one_prompt(num_tokens: int, device: torch.device) -> RaggedBatch:
    """A batch of one sequence of so many tokens, whose positions are on the device."""
    batch = pack((1, num_tokens), None, torch.arange(num_tokens)[None])
    return replace(batch, position_ids=batch.position_ids.to(device))


@contextmanager
def _memory_cap(bench: GPUBench, num_bytes: int) -> Iterator[None]:
    """As if the GPU had so much memory, as far as torch's allocator goes."""
    if not bench.is_cuda:
        yield
        return
    _ = bench.model.stock  # made before, as a user's weights are
    bench.release()
    total = torch.cuda.get_device_properties(bench.model.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
