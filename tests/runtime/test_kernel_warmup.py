"""Nothing is compiled after a model was loaded."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import GRAPH, STREAM, greedy, load, small
from cases.inside import decoder_of, least_placement_of, runtime_of
from cases.tiny_models import random_tokens

from gpu_ops.launch import has_triton, interpreted
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.prepared_steps import PreparedSteps
from offload.decode.sampling import TokenChooser
from offload.models.batch import pack
from offload.policies import Policy
from offload.policies.lychee_cluster.index import IndexShape
from offload.policies.lychee_cluster.index_on_device import group_on_device
from offload.policies.registry import make_policy
from offload.policies.sketch.codes_on_device import encode_keys, mean_keys
from offload.prefill import layer
from offload.prefill.forward import prefill
from offload.runtime import kernel_warmup
from offload.runtime.kernel_warmup import _WarmUpSync, compiling_progress, warm_up_kernels
from offload.selection.policy import RETRIEVE, REUSE

interpreter = pytest.mark.skipif(
    not has_triton or torch.cuda.is_available(), reason="needs triton, and it not to compile here"
)


class Launches:
    """What triton would compile for the kernels that are launched: (kernel, signature)."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend

        self.seen: set[tuple[str, str]] = set()
        self._backend = CUDABackend(GPUTarget("cuda", 90, 32))
        self._binders: dict[str, Any] = {}

    def add(self, kernel: Any, *args: Any, **options: Any) -> None:
        """Instead of `InterpretedFunction.run`."""
        from triton.runtime.jit import JITFunction, create_function_from_signature

        name = kernel.fn.__name__
        if name not in self._binders:
            compiled = JITFunction(kernel.fn, **kernel.kwargs)
            self._binders[name] = create_function_from_signature(
                compiled.signature, compiled.params, self._backend
            )
        del options["grid"], options["warmup"]
        _, specialization, used = self._binders[name](*args, **options)
        self.seen.add((name, f"{specialization} {used}"))

    def take(self) -> set[tuple[str, str]]:
        taken, self.seen = self.seen, set()
        return taken


@contextmanager
def collected_launches() -> Iterator[Launches]:
    """What operators on CPU tensors launch, which has no effect meanwhile."""
    from triton.runtime.interpreter import InterpretedFunction

    launches = Launches()
    with pytest.MonkeyPatch.context() as patch, interpreted(), torch.no_grad():
        patch.setattr(InterpretedFunction, "run", launches.add)
        patch.setattr(layer, "has_kernels", lambda x: True)
        yield launches


def placed(model: Any) -> HeadPlacement:
    """Heads that retrieve on the GPU, of the others every second one fetched; all codes there."""
    decoder = decoder_of(model)
    places, roles = np.array(decoder.placement.places), decoder.attention.roles
    every_second = np.arange(places.size).reshape(places.shape) % 2 == 0
    if roles is None:  # sketch
        places[places == Place.CPU] = Place.CODES
    else:
        places[roles == RETRIEVE] = Place.GPU
        places[(roles == REUSE) & every_second] = Place.GATHER
    return HeadPlacement(places)


def policy_named(name: str) -> Policy:
    if name == "lychee_decode":
        return make_policy(name, budget_tokens=64, sink_tokens=4, recent_tokens=16)
    return make_policy(name) if name == "full" else small(name)


@interpreter
@pytest.mark.parametrize("backend", ["inline", "flags"])
@pytest.mark.parametrize("name", ["full", "lychee_cluster", "lychee_decode", "sketch", "hot"])
def test_the_rehearsal_launches_every_kernel(
    name: str, backend: str, tiny_folders: dict[str, Path]
) -> None:
    """For batches and lengths that it does not have itself."""
    policy = policy_named("lychee_cluster" if name == "hot" else name)
    model = load(tiny_folders["llama"], policy, ("cpu", backend))
    runtime = runtime_of(model)
    if name == "hot":
        decoder = decoder_of(model)
        heads = model.config.num_attention_heads
        decoder.place(decoder.placement.with_hot_rows(policy, heads))
    if name in ("lychee_decode", "sketch"):
        decoder_of(model).place(placed(model))
    with collected_launches() as launches:
        warm_up_kernels(runtime.lean, decoder_of(model), runtime.config.policy, torch.float32)
        assert decoder_of(model).slots.steps is None
        warmed_up = launches.take()
        launch_prompts(runtime.lean)
        launch_steps(decoder_of(model))
        if name == "lychee_cluster":
            keys = torch.zeros(700, runtime.store.num_kv_heads, runtime.store.head_dim)
            starts = np.arange(0, 701, 7)
            shape = IndexShape(starts, 1, 100, 64, 8)
            group_on_device(keys.transpose(0, 1), shape, 2)
        if name == "sketch":
            keys = torch.zeros(runtime.store.num_kv_heads, 700, runtime.store.head_dim)
            encode_keys(keys, mean_keys(keys), policy.bits)
        wanted = launches.take()
    kernels = {kernel for kernel, _ in wanted}
    assert {"gemv_kernel", "silu_mul_kernel", "rotate_kernel", "pick_kernel"} <= kernels
    assert ("await_flag_kernel" in kernels) == (backend == "flags")
    assert ("gather_rows_kernel" in kernels) == (name == "lychee_decode")
    assert ("fetch_rows_kernel" in kernels) == (name == "hot")
    codes = {
        "code_query_kernel",
        "score_codes_kernel",
        "append_codes_kernel",
        "encode_codes_kernel",
    }
    assert kernels & codes == (codes if name == "sketch" else set())
    assert ("chunk_boxes_kernel" in kernels) == (name == "lychee_cluster")
    assert wanted - warmed_up == set()


def launch_prompts(lean: Any) -> None:
    for num_tokens, slice_tokens in ((1, 64), (33, 8), (200, 64)):
        hidden = torch.zeros(num_tokens, lean.shape.hidden_size)
        batch = pack((1, num_tokens), None, torch.arange(num_tokens)[None])
        prefill(lean, hidden, batch, store=None, seqs=[], slice_tokens=slice_tokens)


def launch_steps(decoder: DeviceDecoder) -> None:
    vocab_size = decoder.model.lm_head.out_features
    for num_slots, kv_len in ((1, 10), (1, 5000), (4, 100), (16, 9000)):
        decoder.slots.steps_for(num_slots, kv_len)
        for num_rows in {1, num_slots // 2 or 1, num_slots}:
            for num_micro_batches in {1, min(2, num_rows)}:
                link = decoder.slots.steps.make_link(num_rows, num_micro_batches)
                link = replace(link, gpu_sync=_WarmUpSync(link, decoder))
                decoder.slots.steps.step.run_tokens(link, samples=num_slots == 4)
                link.gpu_sync.close()
        chooser = TokenChooser(num_slots, vocab_size, torch.device("cpu"))
        for positions in (None, torch.zeros(num_slots, dtype=torch.int64)):  # of the first token
            chooser.choose(torch.zeros(num_slots, vocab_size), positions)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [STREAM, GRAPH])
@pytest.mark.parametrize("name", ["full", "lychee_cluster", "lychee_decode"])
def test_nothing_is_compiled_after_loading(
    name: str, backend: Any, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled: list[str] = []

    def count(*, fn: Any, **of_kernel: Any) -> None:
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", count)
    placement = least_placement_of(load(tiny_folders["llama"], policy_named(name), backend))
    state = torch.cuda.get_rng_state()
    model = load(tiny_folders["llama"], policy_named(name), backend, placement=placement)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert model.kv_store.host_bytes_used == 0
    compiled.clear()
    for batch_size, prompt_tokens in ((1, 200), (1, 9), (3, 150), (4, 70)):
        tokens = random_tokens(batch_size, prompt_tokens)
        greedy(model, tokens, 40)
        model.generate(tokens.cuda(), do_sample=True, max_new_tokens=3, eos_token_id=None)
    assert compiled == []


@pytest.mark.cuda
def test_setting_up_is_not_decoding(tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders["llama"], "full", ("cuda", "graph"))
    greedy(model, random_tokens(1, 50), 8)
    first = model.offload_stats()
    assert first.setup_seconds > 0.0
    greedy(model, random_tokens(1, 50), 8)
    second = model.offload_stats()
    assert second.setup_seconds == 0.0
    assert first.decode_seconds < 5 * second.decode_seconds


def test_only_the_first_step_of_a_kind_is_set_up(tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders["llama"], "full", ("cpu", "flags"))
    greedy(model, random_tokens(1, 20), 4)
    assert model.offload_stats().setup_seconds > 0.0
    greedy(model, random_tokens(1, 20), 4)
    assert model.offload_stats().setup_seconds == 0.0
    greedy(model, random_tokens(2, 20), 4)
    assert model.offload_stats().setup_seconds > 0.0


def test_seconds_of_set_up_are_left_out_of_decoding(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    make = PreparedSteps._make_step

    def make_slowly(self: PreparedSteps, *args: Any) -> Any:
        time.sleep(2.0)
        return make(self, *args)

    monkeypatch.setattr(PreparedSteps, "_make_step", make_slowly)
    model = load(tiny_folders["llama"], "full", ("cpu", "inline"))
    greedy(model, random_tokens(1, 20), 4)
    stats = model.offload_stats()
    assert stats.setup_seconds >= 2.0
    assert 0.0 < stats.decode_seconds < 1.9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress_leaves_a_line_in_the_log_and_no_bar(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    progress = compiling_progress(is_shown=True)
    with caplog.at_level("INFO", kernel_warmup.__name__), progress.shown():
        for done in range(2, 6):
            progress(done, 5)
    assert caplog.messages[0] == "compiling 3 GPU kernels, once"
    assert caplog.messages[1].startswith("compiled them in ")
    written = sys.stderr.getvalue()
    assert ("compiling GPU kernels" in written) == (stream is Terminal)
    assert written.rpartition("\r")[2].strip() == ""
    assert "\n" not in written
