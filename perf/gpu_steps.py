"""What `perf.bench_gpu` measures, a function for each part; each gives rows of plain values
as they are measured.

Everything runs in one process on one model with random weights, so that figures of one call may be
set against each other. With `--backend inline --shape tiny` all of it runs on a CPU, for tests.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from cpu_ops.worker_pool import WorkerPool
from offload import OffloadedModel, load_tokenizer
from offload.bench.decode.engines import (
    OURS,
    STOCK,
    compiled_row,
    graph_row,
    seconds_row,
    stock_row,
)
from offload.bench.decode.models import RandomModel, release, synchronize
from offload.bench.decode.peers.transformers_compiled import CannotCompileError
from offload.bench.decode.peers.transformers_decode import prefill_seconds
from offload.bench.pipeline.session import BACKENDS, check_settings, open_session
from offload.bench.pipeline.settings import PipelineSettings
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.loading.planned_model import planned_model
from offload.measuring.machine.measure import measure_profile
from offload.measuring.steps.measure import measure_pipeline
from offload.measuring.synthetic.model_cache import ModelCache
from offload.models.batch import RaggedBatch, pack
from offload.models.dtypes import DTYPES
from offload.models.shape import MODEL_SHAPES
from offload.planning.plan import PlanRequest
from offload.planning.profile import MachineProfile
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.prefill.forward import prefill
from offload.runtime.budgets import weight_bytes_of
from offload.system.stdlib_text import stdlib_paragraphs

Row = dict[str, Any]
STOCK_STEPS = 4  # of transformers, which is slow
NO_OFFLOAD, STREAMED, INDEXED = "without offload", "streamed out", "streamed out, with index"
NULL_WORK, NO_HANDSHAKE = "null work on the CPU", "no handshake"
# The CPU attends to nothing: all of the budget is in the GPU's window.
NULL_POLICY = {"budget_tokens": 68, "sink_tokens": 4}


def model_options(parser: argparse.ArgumentParser) -> None:
    """Options of the model that a script decodes with."""
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--backend", choices=list(BACKENDS), default=next(iter(BACKENDS)))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")


def model_settings(
    parser: argparse.ArgumentParser, options: argparse.Namespace, **more: Any
) -> PipelineSettings:
    """What `model_options` and `more` say; ends the script in one line where there is no GPU."""
    settings = PipelineSettings(
        shape=options.shape, backend=options.backend, dtype=DTYPES[options.dtype], **more
    )
    try:
        check_settings(settings)
    except NotImplementedError as error:
        parser.error(str(error))
    return settings


def plan_request(settings: PipelineSettings, policy: Policy, context: int) -> PlanRequest:
    """A plan for so many tokens of made keys, whose context no rotation limits."""
    model = replace(planned_model(settings.shape), dtype=settings.dtype)
    longest = max(model.shape.max_context, context)
    return PlanRequest(
        model=replace(model, shape=replace(model.shape, max_context=longest)),
        policy=policy,
        context=context,
        batch_size=1,
        device=str(settings.device),
        max_memory={},
        on_this_machine=False,
    )


@dataclass
class GPUBench:
    """Settings of all parts, and the model they share.

    Attributes:
        settings: shape, backend, dtype, threads and seed of everything; the rest is replaced.
        policies: that decode; some parts use the first.
        say: gets a line about each thing measured.
    """

    settings: PipelineSettings
    policies: Sequence[Policy]
    num_steps: int
    repeats: int
    say: Callable[[str], None]

    @cached_property
    def model(self) -> RandomModel:
        """The model of random weights."""
        return RandomModel(self.settings)

    @cached_property
    def profile(self) -> MachineProfile:
        """What this machine is measured to do, with the threads of `settings`."""
        made, shape = self.settings, MODEL_SHAPES[self.settings.shape]
        profile = measure_profile(made.device, made.worker_threads, shape=shape, dtype=made.dtype)
        self.release()
        return profile

    @property
    def is_cuda(self) -> bool:
        return self.settings.device.type == "cuda"

    def release(self) -> None:
        """Give back what is no longer used: the next thing may need all of it."""
        release(self.settings.device)

    @contextmanager
    def caches(
        self, kv_len: int, policies: Sequence[Policy], *, batch_size: int = 1, **options: Any
    ) -> Iterator[tuple[PipelineSettings, ModelCache]]:
        """`RandomModel.caches`, and a line about it."""
        start = time.monotonic()
        with self.model.caches(
            kv_len, policies, num_steps=self.num_steps, batch_size=batch_size, **options
        ) as made:
            seconds = time.monotonic() - start
            self.say(f"caches of {batch_size} x {kv_len:,} tokens: {seconds:.1f} s")
            yield made


def decode(bench: GPUBench, *, kv_lens: Sequence[int]) -> Iterator[Row]:
    """Our decode step under each policy, and the all-on-GPU graph, at each context."""
    for kv_len in kv_lens:
        with bench.caches(kv_len, bench.policies) as (settings, cache):
            for policy in bench.policies:
                yield measure_ours(bench, replace(settings, policy=policy), cache)
        yield graph_row(bench.model, kv_len, num_steps=bench.num_steps)


def peers(bench: GPUBench, *, kv_lens: Sequence[int]) -> Iterator[Row]:
    """transformers at each context: as it comes, with KV on the GPU and offloaded, and compiled."""
    for kv_len in kv_lens:
        for offloaded in (False, True) if bench.is_cuda else (False,):
            yield stock_row(bench.model, kv_len, offloaded=offloaded, num_steps=STOCK_STEPS)
        if bench.is_cuda:
            try:
                yield compiled_row(bench.model, kv_len, num_steps=bench.num_steps)
            except (CannotCompileError, torch.OutOfMemoryError) as error:  # keeps the others' rows
                bench.say(f"transformers, compiled, {kv_len:,} tokens: {error}")


def batch(
    bench: GPUBench,
    *,
    kv_len: int,
    batch_size: int,
    memory_cap_bytes: int,
    distinct_layers: int | None,
) -> Iterator[Row]:
    """Tokens/s of a batch with the GPU's memory capped, and the largest batch without offload."""
    sizes: dict[str, Any] = {"batch_size": batch_size, "distinct_layers": distinct_layers}
    with _memory_cap(bench, memory_cap_bytes):
        with bench.caches(kv_len, bench.policies[:1], **sizes) as (settings, cache):
            yield measure_ours(bench, settings, cache)
        if bench.is_cuda:  # transformers offloads from CUDA devices only
            yield stock_row(
                bench.model,
                kv_len,
                offloaded=True,
                num_steps=STOCK_STEPS,
                batch_size=batch_size,
            )
        largest = None
        for size in range(1, batch_size + 1):
            try:
                largest = graph_row(bench.model, kv_len, num_steps=bench.num_steps, batch_size=size)
            except torch.OutOfMemoryError:
                break
            finally:
                bench.release()
    if largest is not None:
        yield largest


def handshake(bench: GPUBench, *, kv_len: int) -> Iterator[Row]:
    """A step whose CPU side has nothing to attend to, and one without the CPU side."""
    policy = make_policy("streaming_llm", **NULL_POLICY)
    num_layers = MODEL_SHAPES[bench.settings.shape].num_layers - policy.dense_layers
    with bench.caches(kv_len, [policy], distinct_layers=1) as (settings, cache):
        for engine, host_work in ((NULL_WORK, "attend"), (NO_HANDSHAKE, "none")):
            of_engine = replace(settings, host_work=host_work)
            row = measure_ours(bench, of_engine, cache, traced_steps=0)
            yield row | {"engine": engine, "host_layers": num_layers}


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


def smollm2(
    bench: GPUBench,
    *,
    model: str,
    policies: Sequence[str],
    context: int,
    new_tokens: int,
    dtype: str,
) -> Iterator[Row]:
    """Whether the embedded model says the same on the GPU and on the CPU, under every policy.

    Args:
        model: a folder, or the embedded model's name.
        context: tokens of real text that are read.
    """
    words = "\n\n".join(stdlib_paragraphs())
    prompt = load_tokenizer(model)(words, verbose=False)["input_ids"][:context]
    on_gpu: dict[str, Any] = {"device": "cuda", "backend": bench.settings.backend}
    for name in policies:
        said = []
        for device in ({}, on_gpu if bench.is_cuda else {}):
            loaded = OffloadedModel.from_pretrained(
                model,
                policy=make_policy(name),
                dtype=dtype,
                num_threads=bench.settings.num_threads,
                **device,
            )
            said.append(_greedy(loaded, prompt, new_tokens))
            del loaded
        ours, theirs = said
        pairs = enumerate(zip(ours, theirs, strict=True))
        yield {
            "policy": name,
            "context": len(prompt),
            "tokens": len(ours),
            "same_tokens": next((i for i, (a, b) in pairs if a != b), len(ours)),
            "same": ours == theirs,
        }


def _greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def measure_ours(
    bench: GPUBench, settings: PipelineSettings, cache: ModelCache, traced_steps: int = 8
) -> Row:
    """A row about our steps with `settings` over `cache`."""
    session = open_session(settings, bench.model.stock, cache)
    try:
        measurement, _ = measure_pipeline(session, repeats=bench.repeats, traced_steps=traced_steps)
    finally:
        session.close()
        bench.release()
    ours = {"engine": OURS, "policy": settings.policy.name, "kv_len": settings.kv_len}
    return ours | asdict(measurement)


@contextmanager
def _prefill_attention(
    bench: GPUBench, num_tokens: int, policy: Policy
) -> Iterator[DecodeAttention]:
    """`policy` over a store whose memory is there before any clock starts."""
    shape = MODEL_SHAPES[bench.settings.shape]
    store = KVStore(**shape.kv_heads, dtype=bench.settings.dtype, pinned=bench.is_cuda)
    with closing(store), closing(WorkerPool(bench.settings.worker_threads)) as pool:
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
    device, store = bench.settings.device, attention.store
    tokens = torch.randint(bench.model.stock.config.vocab_size, (num_tokens,), device=device)
    hidden = bench.model.lean.embed_tokens(tokens)
    seq = store.new_sequence()
    store.reserve([seq], [num_tokens])
    build = attention.prefill_build([seq], [num_tokens]) if engine == INDEXED else None
    synchronize(bench.settings.device)
    start = time.perf_counter()
    prefill(
        bench.model.lean,
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
    synchronize(bench.settings.device)
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
    total = torch.cuda.get_device_properties(bench.settings.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
