"""Ctrl-C at any moment of a generation: the cache has whole steps, the model goes on.

Without a GPU: the CPU's own step, `inline`, and `flags`, which is the graph backend with a thread
in the GPU's place.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
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
    greedy,
    load,
    small,
)
from cases.tiny_models import random_tokens

import offload
from offload.decode.gpu import prepared_steps

pytestmark = pytest.mark.slow  # deadlines, forks and recoveries: minutes in all


@pytest.fixture(scope="module", params=[NATIVE, INLINE, FLAGS, STREAM, GRAPH])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def model(backend, tiny_folders):
    return load(tiny_folders["llama"], "full", backend)


@pytest.fixture(scope="module")
def stock(stock_models):
    return stock_models["llama"]


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
