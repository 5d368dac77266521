"""What can go wrong around the GPU's decode step, ctrl-C at any moment included, and what still
works afterwards.

Without a GPU: `inline`, and `flags`, which is the graph backend with a thread in the GPU's place.
"""

from __future__ import annotations

import gc
import logging
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import (
    FLAGS,
    GRAPH,
    INLINE,
    NATIVE,
    STREAM,
    check_works,
    each_of,
    greedy,
    load,
    small,
)
from cases.inside import allow_device_bytes, decoder_of
from cases.processes import run_program
from cases.tiny_models import random_tokens

import offload
from cpu_ops.coprocessor import CoprocessorError
from offload import HostBudgetError
from offload.decode.gpu import prepared_steps
from offload.prefill.forward import _attend as attend_of_prefill
from offload.runtime import backends
from offload.system.errors import DeviceMemoryError

pytestmark = pytest.mark.slow  # deadlines, forks and recoveries: minutes in all
backend = each_of(INLINE, FLAGS, STREAM, GRAPH)
driven_backend = each_of(FLAGS, GRAPH)


@pytest.fixture(scope="module")
def model(backend, tiny_folders):
    """Full attention; for tests that leave it as it was."""
    return load(tiny_folders["llama"], "full", backend)


# The GPU.


def test_a_gpu_whose_kernels_cannot_wait(monkeypatch, caplog):
    """The backend is `stream`, and the log says so once."""
    backends._say_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with caplog.at_level(logging.WARNING, logger="offload.runtime.backends"):
        for backend in (None, "graph", None):
            assert backends.choose_backend(backend, torch.device("cuda:0")) == "stream"
    (message,) = caplog.messages
    assert message.startswith("this GPU has compute capability 6.1, and flags")
    assert message.endswith("using backend='stream', which is slower")
    backends._say_once.cache_clear()


# The memory of the GPU.


def test_out_of_device_memory_in_prefill(model, stock, monkeypatch):
    """In the second layer: what the first one wrote is dropped, the option is named."""
    calls = []

    def fail_once(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return attend_of_prefill(*args)

    monkeypatch.setattr("offload.prefill.forward._attend", fail_once)
    with pytest.raises(DeviceMemoryError, match=r"lower prefill_slice_tokens.*1\.00 GiB") as caught:
        greedy(model, random_tokens(1, 150), 5)
    assert caught.tb is not None
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0
    check_works(model, stock)


def test_out_of_device_memory_in_prefill_of_a_conversation(model, stock, monkeypatch):
    """The cache is as before, and goes on."""
    cache = model.new_cache()
    text = greedy(model, random_tokens(1, 30), 4, past_key_values=cache)
    longer = torch.cat([text, random_tokens(1, 100)], dim=1)

    def fail(*args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr("offload.prefill.forward._attend", fail)
        with pytest.raises(DeviceMemoryError):
            greedy(model, longer, 4, past_key_values=cache)
    assert cache.kv_lens == [text.shape[1] - 1]
    assert torch.equal(greedy(model, longer, 9, past_key_values=cache), greedy(stock, longer, 9))


def test_out_of_device_memory_for_the_buffers_of_a_batch(backend, tiny_folders, stock, monkeypatch):
    model = load(tiny_folders["llama"], "full", backend)
    check_works(model, stock)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    tokens = random_tokens(3, 20)
    with monkeypatch.context() as patched:
        patched.setattr("offload.decode.gpu.prepared_steps.ResidentKV", fail)
        with pytest.raises(DeviceMemoryError, match=r"4 sequences \(.*2\.00 GiB.*batch size"):
            greedy(model, tokens, 5)
    check_works(model, stock)
    assert torch.equal(greedy(model, tokens, 5), greedy(stock, tokens, 5))


def resident_pages(model: Any, num_pages: int) -> None:
    """Let the model's one resident layer have so many pages; before its first step."""
    allow_device_bytes(model, num_pages * model.kv_store.page_bytes)


def test_resident_layers_beyond_their_budget(backend, tiny_folders, stock):
    """7 pages of 16 tokens: a generation that comes to more is refused before its prompt is
    computed, a forward pass fails at the step that does not fit; both say what to do."""
    budget = small("exact_topk", 400)  # all tokens: exact
    model = load(tiny_folders["llama"], budget, backend)
    resident_pages(model, 7)
    message = "raise max_memory of the device, lower the policy's dense_layers, place fewer"
    for prompt_tokens, new_tokens in ((150, 5), (100, 30)):
        with pytest.raises(DeviceMemoryError, match=message):
            greedy(model, random_tokens(1, prompt_tokens), new_tokens)
        assert model.offload_stats().prefill_tokens == 0
        assert model.kv_store.num_sequences == 0
        check_works(model, stock, 90)
    cache = model.new_cache()
    text = greedy(model, random_tokens(1, 100), 10, past_key_values=cache)
    with pytest.raises(DeviceMemoryError, match=message):
        greedy(model, text, 10, past_key_values=cache)
    assert cache.kv_lens[0] == 109
    for token in text[:, -1:].expand(4, 1):
        if cache.kv_lens[0] < 112:
            model(token[None], past_key_values=cache)
    with pytest.raises(DeviceMemoryError, match=message):
        model(text[:, -1:], past_key_values=cache)
    assert cache.kv_lens[0] == 112
    assert torch.equal(text, greedy(stock, random_tokens(1, 100), 10))
    del cache
    check_works(model, stock, 90)


def test_idle_conversations_make_room_on_the_device(backend, tiny_folders, stock):
    """A batch of two made slots for two; one conversation takes what an idle one had."""
    model = load(tiny_folders["llama"], small("exact_topk", 400), backend)
    resident_pages(model, 8)
    greedy(model, random_tokens(2, 10), 2)
    prompts = [random_tokens(1, n, seed=n) for n in (60, 100)]
    caches = [model.new_cache() for _ in prompts]
    texts = list(prompts)
    for _ in range(2):
        for i, cache in enumerate(caches):
            texts[i] = greedy(model, texts[i], 5, past_key_values=cache)
    for prompt, text in zip(prompts, texts, strict=True):
        assert torch.equal(text, greedy(stock, prompt, 10))


# Host pages.


@pytest.fixture
def eight_pages(backend, tiny_folders):
    """A model with host pages for 128 tokens."""
    folder = tiny_folders["llama"]
    probe = load(folder, "full", ("cpu", None))
    page_bytes = 3 * probe.kv_store.page_bytes
    weights = sum(weight.nbytes for weight in probe.parameters()) if backend[0] == "cpu" else 0
    return load(folder, "full", backend, max_memory={"cpu": weights + 8 * page_bytes})


def forward(model: Any, tokens: torch.Tensor, cache: Any) -> int:
    """The greedy next token of one sequence."""
    logits = model(tokens.to(model.device), past_key_values=cache).logits
    return int(logits[0, -1].argmax())


def test_a_conversation_without_pages_fails_and_others_go_on(eight_pages, stock):
    """By forward: three conversations until no page is left, one token each in turn."""
    model = eight_pages
    prompts = [random_tokens(1, n, seed=n) for n in (20, 40, 30)]
    expected = [greedy(stock, prompt, 60)[0].tolist() for prompt in prompts]
    caches: list[Any] = [model.new_cache() for _ in prompts]
    texts = [prompt[0].tolist() for prompt in prompts]
    for text, cache in zip(texts, caches, strict=True):
        text.append(forward(model, torch.tensor([text]), cache))
    failed: dict[int, str] = {}
    while not failed:
        for i, cache in enumerate(caches):
            try:
                texts[i].append(forward(model, torch.tensor([texts[i][-1:]]), cache))
            except HostBudgetError as error:
                failed[i] = str(error)
    (lost,), others = failed, [i for i in range(3) if i not in failed]
    assert "raise max_memory={'cpu': ...} or shorten the context" in failed[lost]
    assert caches[lost].kv_lens == [len(texts[lost]) - 1]
    for i in others:  # those whose page has room go on before anything is freed …
        texts[i].append(forward(model, torch.tensor([texts[i][-1:]]), caches[i]))
    caches[lost] = None
    for _ in range(20):  # … and may grow when the one that failed is gone
        for i in others:
            texts[i].append(forward(model, torch.tensor([texts[i][-1:]]), caches[i]))
    for i in range(3):
        assert texts[i] == expected[i][: len(texts[i])]


def shrink(model: Any, monkeypatch: pytest.MonkeyPatch, num_pages: int) -> None:
    """From now on the machine has memory for so many more pages of all layers."""
    pool = model.kv_store._pool
    allocate, left = type(pool).allocate, [3 * num_pages]

    def limited(self: Any, n: int) -> Any:
        if self is pool:
            if n > left[0]:
                raise pool._budget_error(n, ", but only 1 B of host memory are left")
            left[0] -= n
        return allocate(self, n)

    monkeypatch.setattr(type(pool), "allocate", limited)


def test_host_memory_that_goes_in_the_middle_of_a_generation(model, stock, monkeypatch):
    """The budget promised more: the generation ends with an error, a conversation keeps what it
    had, and rows that are given up make room for the others."""
    tokens = random_tokens(3, 30)
    other = model.new_cache()
    text = greedy(model, random_tokens(1, 20, seed=9), 4, past_key_values=other)
    with monkeypatch.context() as patched:
        shrink(model, patched, 3 * 3)
        with pytest.raises(HostBudgetError, match="only 1 B of host memory are left"):
            greedy(model, tokens, 40)
        text = greedy(model, text, 4, past_key_values=other)
    assert torch.equal(text, greedy(stock, random_tokens(1, 20, seed=9), 8))
    del other
    gc.collect()
    assert model.kv_store.num_sequences == 0

    cache, expected = model.new_cache(), greedy(stock, tokens, 40)
    with monkeypatch.context() as patched:
        shrink(model, patched, 3 * 3)
        with pytest.raises(HostBudgetError):
            greedy(model, tokens, 40, past_key_values=cache)
    assert cache.kv_lens == [48, 48, 48]
    cache.batch_select_indices(torch.tensor([0, 2]))
    out = greedy(model, expected[[0, 2], :49], 20, past_key_values=cache)
    assert torch.equal(out, expected[[0, 2], :69])


# The worker.


@pytest.mark.parametrize("fault", ["stall", "die"])
def test_a_worker_that_does_not_come_back(driven_backend, fault, tiny_folders, stock):
    """An error in time that names the layer; the same model goes on, with the same cache."""
    model = load(tiny_folders["llama"], "full", driven_backend, deadline_seconds=0.4)
    prompt = random_tokens(1, 50)
    expected = greedy(stock, prompt, 30)
    for own_cache in (True, False):
        check_works(model, stock)
        cache = None if own_cache else model.new_cache()
        text = greedy(model, prompt, 10, past_key_values=cache)
        coprocessor = decoder_of(model).coprocessors[0]
        if fault == "stall":
            coprocessor.stall(1, seconds=1.5)
        else:
            coprocessor.die(1)
        begin = time.monotonic()
        with pytest.raises(
            CoprocessorError,
            match=r"the CPU side made no progress within 0.4 s: layer 1 \(request 2 of 3\)",
        ):
            greedy(model, text if cache else prompt, 10, past_key_values=cache)
        assert time.monotonic() - begin < 2.0
        if cache is not None:  # the whole text is there: its last token has been prefilled
            cache.crop(-1)
            out = greedy(model, text, 20, past_key_values=cache)
            assert torch.equal(out, expected)
            del cache
        check_works(model, stock)


STUCK = """
import sys, time, numpy as np, torch
sys.path[:0] = ["tests", "tests/cpu_ops"]
from pathlib import Path
from cases.device_cases import greedy, load
from cases.inside import decoder_of
from offload.decode.gpu.placement import HeadPlacement, Place
from test_coprocessor_faults import SMALL, Stuck
from cases.tiny_models import random_tokens
from cpu_ops.coprocessor import CoprocessorError

folder, device, backend, hot = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
tokens = random_tokens(1, 100)
model = load(folder, Stuck(**SMALL), (device, backend), deadline_seconds=0.5)
if hot:
    places = np.array(decoder_of(model).placement.places)
    places[1:] = Place.HOT
    decoder_of(model).place(HeadPlacement(places))
for attempt in range(2):
    begin = time.monotonic()
    try:
        greedy(model, tokens, 5)
    except CoprocessorError as error:
        print(f"{time.monotonic() - begin < 5}:{error}")
other = load(folder, "full", (device, backend))
print(greedy(other, tokens, 20)[0].tolist())
del model
print("end", flush=True)
"""


def in_a_process(program: str, *arguments: object) -> list[str]:
    result = run_program(program, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("hot", [0, 1])
def test_a_worker_that_is_stuck_for_good(driven_backend, tiny_folders, stock, hot):
    """The error says what to do, doing it works in the same process, and the process can end."""
    lines = in_a_process(STUCK, tiny_folders["llama"], *driven_backend, hot)
    assert re.match(r"True:.*layer 1 \(request 1 of 2\), attending; .* stuck.*load it", lines[0])
    assert re.match(r"True:.*its thread is stuck in an earlier step; load the model", lines[1])
    tokens = random_tokens(1, 100)
    assert lines[2:] == [str(greedy(stock, tokens, 20)[0].tolist()), "end"]


# Several processes.


FORK = """
import os, sys
sys.path[:0] = ["tests"]
from pathlib import Path
from cases.device_cases import greedy, load
from cases.tiny_models import random_tokens

folder, device, backend = Path(sys.argv[1]), *sys.argv[2:]
model = load(folder, "full", (device, backend))
tokens = random_tokens(1, 60)
print(greedy(model, tokens, 20)[0].tolist(), flush=True)
child = os.fork()
if child == 0:
    try:
        print(greedy(model, tokens, 20)[0].tolist(), flush=True)
    except RuntimeError as error:
        print("error", error, flush=True)
    own = load(folder, "full", ("cpu", None))
    print(greedy(own, tokens, 20)[0].tolist(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(greedy(model, tokens, 20)[0].tolist(), flush=True)
"""


def test_fork_after_start(backend, tiny_folders, stock):
    """The child works where all is on its CPU, or is told to load the model again (on the CPU:
    CUDA does not survive a fork); the parent goes on."""
    lines = in_a_process(FORK, tiny_folders["llama"], *backend)
    expected = str(greedy(stock, random_tokens(1, 60), 20)[0].tolist())
    assert lines[:1] + lines[-2:] == [expected] * 3
    (of_child,) = lines[1:-2]
    if backend[1] == "inline":
        assert of_child == expected
    else:
        assert re.match("error .*(load the model again after the fork|CUDA in forked)", of_child)


# Ctrl-C: the cache has whole steps, the model goes on. The CPU's own step, too.


EVERY_BACKEND = pytest.mark.parametrize(
    "backend", [NATIVE, INLINE, FLAGS, STREAM, GRAPH], scope="module", indirect=True
)


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["full", "exact_topk"])
def test_ctrl_c_from_outside(backend, name, tiny_folders, stock):
    """Again and again, at any moment of a generation; a conversation keeps whole steps."""
    policy = "full" if name == "full" else small(name, 500)
    model = load(tiny_folders["llama"], policy, backend)
    prompt = random_tokens(1, 60)
    expected = greedy(stock, prompt, 400)[0]
    check_works(model, stock)
    interrupted = 0
    for delay in (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15):
        cache = model.new_cache()
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        timer.start()
        try:
            greedy(model, prompt, 400, past_key_values=cache)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        (kv_len,) = cache.kv_lens or [0]
        text = expected[None, : max(kv_len + 1, 60)]
        options = {"attention_mask": torch.ones_like(text)}  # the text has the padding's token
        more = greedy(model, text, 5, past_key_values=cache, **options)[0]
        assert torch.equal(more, expected[: len(more)])
        del cache
        check_works(model, stock)
    assert interrupted


def lines_of_offload(action: Any) -> None:
    """Call `action` before every line of the package that this thread runs."""
    package = str(Path(offload.__file__).parent)

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            action(frame)
        return trace

    sys.settrace(trace)


# Where a step that is launched ahead changes hands.
_IN_TURN = ("_run", "_key", "run", "_run_step")


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("own_cache", "functions"),
    [(True, ()), (False, ()), (False, _IN_TURN)],
    ids=["own-cache", "conversation", "between-steps"],
)
def test_ctrl_c_at_every_line(model, backend, stock, own_cache, functions, monkeypatch):
    """… of a generation, or 40 of them: a step that is not whole leaves no trace.

    Args:
        functions: of `decode/gpu`, every line of which is tried; none: 40 lines of all.
    """
    if functions and backend[1] not in ("flags", "graph"):
        pytest.skip("no step of this backend is launched ahead")
    if functions:  # steps follow each other, however slow they are
        monkeypatch.setattr(prepared_steps, "_BURST_SECONDS", 1e6)
    prompt = random_tokens(1, 47)  # the second step needs a page
    expected = greedy(stock, prompt, 12)
    counter = [0, -1]

    def count(frame: Any) -> None:
        code = frame.f_code
        if functions and not (code.co_name in functions and "gpu" in Path(code.co_filename).parts):
            return
        counter[0] += 1
        if counter[0] == counter[1]:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    def run(cache: Any) -> None:
        counter[0] = 0
        lines_of_offload(count)
        try:
            greedy(model, prompt, 4, past_key_values=cache)
        finally:
            sys.settrace(None)

    check_works(model, stock)  # the lines that only run once
    run(None)
    num_lines = counter[0]
    assert num_lines > (60 if functions else 300)
    stride = 1 if functions else max(1, num_lines // 40) | 1
    for line in range(2, num_lines - (0 if functions else 20), stride):
        counter[1] = line
        cache = None if own_cache else model.new_cache()
        try:
            run(cache)
        except KeyboardInterrupt:
            pass
        else:  # waiting for others takes as many lines as it takes
            assert counter[0] < line, f"the interrupt before line {line} was lost"
        counter[1] = -1
        if cache is not None and cache.kv_lens:
            kv_len = cache.kv_lens[0]
            text = greedy(model, expected[:, : kv_len + 1], 3, past_key_values=cache)
            assert torch.equal(text, expected[:, : kv_len + 4]), line
            del text
        del cache
        gc.collect()
        assert model.kv_store.num_sequences == 0, line
        assert model.kv_store.host_bytes_used == 0, line
    assert torch.get_num_threads() == 1
    check_works(model, stock)
