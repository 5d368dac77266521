"""Who waits for whom when threads share a model, and what torch's own threads do meanwhile."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import INLINE, NATIVE, greedy, load, small
from cases.processes import run_program
from cases.tiny_models import make_tiny_model, random_tokens

from offload.system.torch_threads import torch_threads

FP32 = torch.ones(512, 512)
IMAGE, FILTERS = torch.ones(1, 64, 64, 64), torch.ones(64, 64, 3, 3)  # oneDNN's on every CPU


class Calls:
    """A streamer that calls something with the number of each piece of text."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self._call, self._num_pieces = call, 0

    def put(self, value: torch.Tensor) -> None:
        self._call(self._num_pieces)
        self._num_pieces += 1

    def end(self) -> None:
        pass


@contextlib.contextmanager
def generating(model: Any) -> Iterator[Callable[[], torch.Tensor]]:
    """Another thread is in the middle of a generation until what this gives is called; that
    returns its tokens."""
    started, goes_on = threading.Event(), threading.Event()
    tokens: queue.Queue[torch.Tensor] = queue.Queue()

    def wait(piece: int) -> None:
        if piece == 3:
            started.set()
            assert goes_on.wait(60)

    def run() -> None:
        tokens.put(greedy(model, random_tokens(1, 50), 8, streamer=Calls(wait)))

    def finish() -> torch.Tensor:
        goes_on.set()
        return tokens.get(timeout=60)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield finish
    finally:
        goes_on.set()
        thread.join(60)


@pytest.mark.parametrize("waits", ["generate", "forward", "crop", "copy"])
def test_ctrl_c_ends_the_waiting(llama_pair: tuple[Any, Any], waits: str) -> None:
    model, prompt = llama_pair[1], random_tokens(1, 50)
    expected = greedy(model, prompt, 8)
    cache = model.new_cache()
    model(prompt, past_key_values=cache)
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: greedy(model, prompt, 8),
        "forward": lambda: model(prompt[:, :1], past_key_values=cache),
        "crop": lambda: cache.crop(-3),
        "copy": lambda: cache.__deepcopy__({}),
    }
    main = threading.main_thread().ident
    assert main is not None
    with generating(model) as finish:
        timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            calls[waits]()
        timer.join()
        assert cache.kv_lens == [50]
        assert torch.equal(finish(), expected)
    calls[waits]()  # it is nobody's turn now
    cache.reset()


def test_looking_does_not_wait(llama_pair: tuple[Any, Any]) -> None:
    model = llama_pair[1]
    cache, dropped = model.new_cache(), model.new_cache()
    for each in (cache, dropped):
        model(random_tokens(1, 50), past_key_values=each)
    with generating(model) as finish:
        del each, dropped  # freed when the other thread takes its next step
        assert model.kv_store.num_sequences == 3
        assert (cache.kv_lens, cache.get_seq_length(), len(cache)) == ([50], 50, 3)
        assert model.offload_stats().prefill_tokens == 50
        assert repr(cache) == "OffloadedCache(kv_lens=[50])"
        finish()
    assert model.kv_store.num_sequences == 1
    cache.reset()


@pytest.mark.parametrize("fails", [False, True])
def test_a_generation_within_another(llama_pair: tuple[Any, Any], fails: bool) -> None:
    """A streamer may use the model, and fail in doing so: each has its own cache and numbers."""
    stock, model = llama_pair
    prompts = random_tokens(1, 50), random_tokens(1, 30, seed=1)
    expected = [greedy(stock, prompt, 8) for prompt in prompts]
    inner, threads = [], []

    def note(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        if fails:
            raise RuntimeError("within")
        return scores

    def generate(piece: int) -> None:
        if piece == 3:
            with pytest.raises(RuntimeError, match="within") if fails else contextlib.nullcontext():
                inner.append(greedy(model, prompts[1], 8, logits_processor=[note]))

    torch.set_num_threads(2)
    try:
        outer = greedy(model, prompts[0], 8, streamer=Calls(generate))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(outer, expected[0])
    assert fails or torch.equal(inner[0], expected[1])
    assert set(threads) == {1}
    stats = model.offload_stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (50, 7)


FORK = """
import os, sys, threading
sys.path[:0] = ["tests"]
from pathlib import Path
from cases.device_cases import greedy, load
from test_run_lock import Calls, generating
from cases.tiny_models import random_tokens

model = load(Path(sys.argv[1]), "full", ("cpu", None))
tokens = random_tokens(1, 50)

def fork(piece=0):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            print(greedy(model, tokens, 8)[0].tolist(), flush=True)
        except RuntimeError as error:
            print("error", error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)

with generating(model) as finish:
    fork()
    print(finish()[0].tolist())
fork()
greedy(model, tokens, 2, streamer=Calls(lambda piece: piece == 1 and fork()))
"""


@pytest.mark.slow
def test_fork(llama_pair: tuple[Any, Any], tiny_folders: dict[str, Path]) -> None:
    """A child of a process whose other thread runs the model is told so, and does not wait for a
    thread that it does not have; other children go on, one of the thread that runs it too."""
    found_in = f"{Path(__file__).parent}:."
    result = run_program(FORK, tiny_folders["llama"], PYTHONPATH=found_in)
    assert result.returncode == 0, result.stderr
    refused, *rest = result.stdout.splitlines()
    assert refused.startswith("error this process was forked while another thread was running")
    assert rest == [str(greedy(llama_pair[0], random_tokens(1, 50), 8)[0].tolist())] * 3


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns in a thread that has not used torch before."""
    results: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=lambda: results.put(call()))
    thread.start()
    thread.join()
    return results.get_nowait()


def test_other_threads_keep_torch_threads(offloaded_models: dict[str, Any]) -> None:
    """A thread whose first operator of torch falls into a generation has the process's number."""
    seen = []

    def note(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((torch.get_num_threads(), in_a_thread(torch.get_num_threads)))
        if len(seen) == 3:
            raise RuntimeError("enough")
        return scores

    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="enough"):
            greedy(offloaded_models["llama"], random_tokens(1, 9), 9, logits_processor=[note])
        assert seen == [(1, 2)] * 3
        assert (torch.get_num_threads(), in_a_thread(torch.get_num_threads)) == (2, 2)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "operator",
    [
        pytest.param(lambda: FP32 @ FP32, id="mkl"),
        pytest.param(lambda: torch.conv2d(IMAGE, FILTERS), id="onednn"),
        pytest.param(lambda: torch.ones(1_000_000).exp(), id="aten"),
    ],
)
def test_threads_that_run(operator: Callable[[], torch.Tensor]) -> None:
    """OpenMP starts its threads when they are first wanted, for each thread that asks: count."""

    def started(num_threads: int) -> int:
        before = set(os.listdir("/proc/self/task"))
        with torch_threads(num_threads):
            operator()
            return len(set(os.listdir("/proc/self/task")) - before)

    assert in_a_thread(lambda: started(3)) == 2
    counts = in_a_thread(lambda: (started(1), started(2), started(1), started(3)))
    assert counts == (0, 1, 0, 1)


def test_ctrl_c_leaves_as_many_threads_as_before() -> None:
    """At whatever line it comes."""
    code = torch_threads.__wrapped__.__code__  # type: ignore[attr-defined]

    def interrupted(at: int) -> bool:
        """Whether there was such a line."""
        lines = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal lines
            if frame.f_code is not code:
                return None
            lines += event == "line"
            if event == "line" and lines == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            with torch_threads(torch.get_num_threads() + 1):
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    before = torch.get_num_threads()
    at = 1
    while interrupted(at):
        assert torch.get_num_threads() == before, at
        at += 1
    assert at > 8


@pytest.mark.parametrize("backend", [NATIVE, INLINE])
def test_default_dtype(backend: Any, tiny_folders: dict[str, Path]) -> None:
    """transformers changes the process's dtype while another thread loads a model."""
    prompt, samples = random_tokens(1, 70), {"do_sample": True, "temperature": 0.5}
    tokens = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(tiny_folders["llama"], small("exact_topk", 48), backend, num_threads=1)
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(0)
            tokens.append([greedy(model, prompt, 6), greedy(model, prompt, 6, **samples)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(*tokens, strict=True))


def test_two_models_that_assist_each_other(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """In two threads: whose turn it is, is asked of both in one order."""
    make_tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    models = [
        load(folder, "full", NATIVE.values[0]) for folder in (tiny_folders["llama"], tmp_path)
    ]
    prompt = random_tokens(1, 30)
    plain = [greedy(model, prompt, 6) for model in models]
    found: list[list[torch.Tensor]] = [[], []]

    def generate(number: int) -> None:
        for _ in range(8):
            other = models[1 - number]
            found[number].append(greedy(models[number], prompt, 6, assistant_model=other))

    threads = [threading.Thread(target=generate, args=(i,), daemon=True) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "they wait for each other"
    for outs, expected in zip(found, plain, strict=True):
        assert len(outs) == 8
        assert all(torch.equal(out, expected) for out in outs)
