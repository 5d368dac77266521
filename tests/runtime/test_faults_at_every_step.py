"""Whatever is done with a cache, and wherever it fails: the cache is as it was, or as it should be.

Faults: ctrl-C before any line of the package, no memory at any place that asks for it, NaN in any
layer. What follows must be what follows where nothing has failed, bit for bit.
"""

from __future__ import annotations

import copy
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import load, small, steps
from cases.drafts import verifying
from cases.inside import states_of
from cases.tiny_models import random_tokens

import offload
from offload.kv.page_pool import PagePool
from offload.policies.registry import available_policies
from offload.selection.sequence_state import LayerArrays, RecentQueries

STATEFUL = ["lfps", "lychee_cluster", "quest", "sketch", "union"]
PACKAGE = str(Path(offload.__file__).parent)
Action = Callable[[Any, Any], None]


def feed(num_tokens: int, model: Any, cache: Any) -> None:
    model(random_tokens(1, num_tokens, seed=num_tokens), past_key_values=cache)


def draft(model: Any, cache: Any) -> None:
    """A draft, half of which is rejected."""
    with verifying(model, cache):
        feed(6, model, cache)
    cache.crop(-3)


def crop(num_tokens: int, model: Any, cache: Any) -> None:
    cache.crop(-num_tokens)


def fork(model: Any, cache: Any) -> None:
    copy.deepcopy(cache)


def repeat(model: Any, cache: Any) -> None:
    """Beams come and go."""
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([1]))


ACTIONS: dict[str, Action] = {
    "prefill": partial(feed, 40),
    "step": partial(feed, 1),
    "draft": draft,
    "crop": partial(crop, 5),
    "fork": fork,
    "repeat": repeat,
}


@contextmanager
def ctrl_c_at(line: int) -> Iterator[list[int]]:
    """Before the line of that number, of those of the package that run; counts them."""
    count = [0]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


@contextmanager
def no_memory_at(call: int) -> Iterator[list[int]]:
    """In the call of that number, of those that take memory; counts them."""
    count = [0]

    def take(this: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == call:
            raise MemoryError("no memory, on purpose")
        return original(this, *args, **kwargs)

    places = [(PagePool, "allocate"), (LayerArrays, "copy"), (RecentQueries, "copy")]
    places.append((LayerArrays, "__init__"))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, partialmethod(take, getattr(owner, name)))
        yield count


def base_of(model: Any) -> Any:
    """A cache in the middle of decoding."""
    cache = model.new_cache()
    feed(150, model, cache)
    steps(model, cache, random_tokens(1, 9, seed=3))
    return cache


def check_fault(model: Any, base: Any, action: Action, fault: Any, error: Any) -> int:
    """Run `action` on a copy of `base` under a fault; places that `fault` counted meanwhile."""
    cache, unharmed, done = (copy.deepcopy(base) for _ in range(3))
    action(model, done)
    failed = False
    try:
        with fault as count:
            action(model, cache)
    except error:
        failed = True
    if action is draft and cache.kv_lens[0] == base.kv_lens[0] + 6:  # between its two calls
        cache.crop(-3)
    if action is repeat and len(cache.kv_lens) == 3:
        cache.batch_select_indices(torch.tensor([1]))
    # A crop or a selection that has begun is done before ctrl-C has its effect.
    expected = unharmed if failed and cache.kv_lens == base.kv_lens else done
    assert cache.kv_lens == expected.kv_lens
    tokens = random_tokens(1, 4, seed=8)
    assert torch.equal(*(steps(model, c, tokens) for c in (cache, expected)))
    return int(count[0])


def check_all(model: Any, action: Action, most: int) -> None:
    """At most so many lines, and places that take memory."""
    base = base_of(model)
    pages = model.kv_store.host_bytes_used
    check = partial(check_fault, model, base, action)
    for fault_at, error in ((ctrl_c_at, KeyboardInterrupt), (no_memory_at, MemoryError)):
        num_places = check(fault_at(-1), ())
        for place in range(1, num_places + 1, max(1, num_places // most) | 1):
            check(fault_at(place), error)
    assert model.kv_store.host_bytes_used == pages
    del base, check
    gc.collect()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0
    assert states_of(model).held_bytes == 0


@pytest.mark.parametrize("action", ["prefill", "step", "draft"])
def test_some_faults(action, tiny_folders):
    model = load(tiny_folders["llama"], small("lfps"), ("cpu", None), num_threads=1)
    check_all(model, ACTIONS[action], 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "inline"])
@pytest.mark.parametrize("name", available_policies())
@pytest.mark.parametrize("action", ACTIONS)
def test_faults_everywhere(action, name, backend, tiny_folders):
    policy = small(name) if name != "full" else name
    model = load(tiny_folders["llama"], policy, ("cpu", backend), num_threads=1)
    check_all(model, ACTIONS[action], 40 if name in STATEFUL else 8)
