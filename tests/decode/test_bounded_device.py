"""`host_bytes_per_sequence` where a GPU decodes: as on the CPU, and never more than the bound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.bounded_cases import rows_of
from cases.device_cases import GRAPH, INLINE, STREAM, greedy, load, small, steps
from cases.inside import compression_of, states_of, steps_of
from cases.slowly import slow_but
from cases.tiny_models import random_tokens
from torch.nn.functional import normalize

from offload.decode.gpu.placement import HeadPlacement, Place

POLICIES = ["full", "lfps", "lychee_cluster", "per_head", "hard_kv"]
BYTES = 3 * 2**19


@pytest.fixture
def bounded(long_folder: Path) -> Callable[..., Any]:
    def load_bounded(policy: str, device_and_backend: Any, **more: Any) -> Any:
        chosen = "full" if policy == "full" else small(policy)
        # By reconstruction there is no GPU.
        options = {"host_bytes_per_sequence": BYTES, "condense_by": "attention", "num_threads": 1}
        return load(long_folder, chosen, device_and_backend, **options, **more)

    return load_bounded


@pytest.mark.parametrize("policy", slow_but(POLICIES, "per_head"))
@pytest.mark.parametrize("device_and_backend", [INLINE, STREAM, GRAPH])
def test_as_on_the_cpu(bounded: Callable[..., Any], policy: str, device_and_backend: Any) -> None:
    """A prompt that is condensed while it is read, and a generation that is, too."""
    native, device = bounded(policy, ("cpu", None)), bounded(policy, device_and_backend)
    bound = native.new_cache().bound
    tokens = random_tokens(1, bound.slots + 40, seed=3)
    num_new, caches = bound.freed + 60, [native.new_cache(), device.new_cache()]
    expected = greedy(native, tokens, num_new, past_key_values=caches[0])
    assert torch.equal(greedy(device, tokens, num_new, past_key_values=caches[1]), expected)
    assert caches[0].tokens == caches[1].tokens
    condensed = [model.offload_stats().condensed_tokens for model in (native, device)]
    assert condensed[0] == condensed[1] >= 2 * bound.freed
    for on_cpu, on_device in zip(*map(rows_of, caches), strict=True):
        # Of two tokens that are asked for as much, rounding says which stays.
        differs = ~torch.isclose(on_device, on_cpu, rtol=1e-3, atol=1e-3).all(dim=-1)
        assert differs.float().mean() < 0.005


@pytest.mark.parametrize("policy", ["full", "lfps"])
@pytest.mark.parametrize("device_and_backend", [INLINE, STREAM, GRAPH])
def test_int8_rows(bounded: Callable[..., Any], policy: str, device_and_backend: Any) -> None:
    """As on the CPU, where a bound has room for more slots; what differs is a code's rounding, and
    which of two tokens stays that are asked for as much."""
    wide = bounded(policy, device_and_backend).new_cache().bound
    native = bounded(policy, ("cpu", None), kv_dtype="int8")
    device = bounded(policy, device_and_backend, kv_dtype="int8")
    bound, caches = native.new_cache().bound, [native.new_cache(), device.new_cache()]
    assert device.new_cache().bound == bound
    assert bound.slots > 2 * wide.slots
    first = bound.slots + bound.freed - 20  # condensed while it is read, and then in a step
    tokens = random_tokens(1, first + 40, seed=3)
    for model, cache in zip((native, device), caches, strict=True):
        given = tokens.to(model.device)
        with torch.no_grad():
            model(given[:, :first], past_key_values=cache)
            steps(model, cache, given[:, first:])
        assert cache.store.host_bytes_used <= BYTES
        assert cache.tokens[0].condensed == 2 * bound.new_condensed
    assert caches[0].tokens == caches[1].tokens
    for on_cpu, on_device in zip(*map(rows_of, caches), strict=True):
        ours, theirs = (normalize(rows.float(), dim=-1) for rows in (on_device, on_cpu))
        near = (ours @ theirs.mT).amax(-1)  # another one that stays moves those behind it
        assert (near < 0.999).float().mean() < 0.02


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device_and_backend", [INLINE, STREAM, GRAPH])
def test_the_bound_does_not_depend_on_the_place(
    bounded: Callable[..., Any], policy: str, device_and_backend: Any
) -> None:
    """What the policy keeps of heads that come back to the CPU has room in it."""
    native = bounded(policy, ("cpu", None))
    heads = native.kv_store.num_layers, native.kv_store.num_kv_heads
    everything = HeadPlacement.filled(*heads, Place.GPU)
    device = bounded(policy, device_and_backend, placement=everything)
    assert device.new_cache().bound == native.new_cache().bound


@pytest.mark.parametrize("policy", slow_but(POLICIES, "lychee_cluster"))
@pytest.mark.parametrize("device_and_backend", [INLINE, STREAM, GRAPH])
def test_never_more_than_the_bound(
    bounded: Callable[..., Any],
    policy: str,
    device_and_backend: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages, the window of queries and what the policy keeps, after each of many steps."""
    model = bounded(policy, device_and_backend)
    compression, states = compression_of(model), states_of(model)
    prompt_tokens, steps = compression.bound.slots - 60, compression.bound.freed + 200
    cache, used, on_device = model.new_cache(), [], []
    commit = type(states).commit

    def watched(self: Any, seqs: Any) -> None:
        commit(self, seqs)
        used.append(cache.store.host_bytes_used + self.held_bytes + compression.held_bytes)
        slots = steps_of(model)
        on_device.append(0 if slots is None else max(x.kv_len for x in slots.step.resident.slots))

    monkeypatch.setattr(type(states), "commit", watched)
    greedy(model, random_tokens(1, prompt_tokens), steps, past_key_values=cache)
    assert len(used) == steps
    assert max(used) <= BYTES
    assert max(on_device) <= compression.bound.slots
    (row,) = cache.tokens
    assert row.seen == prompt_tokens - 1 + steps
    assert row.condensed > 0
    assert row.kept + row.condensed <= compression.bound.slots


@pytest.mark.slow
@pytest.mark.parametrize("device_and_backend", [INLINE, STREAM, GRAPH])
def test_forks_and_truncation(bounded: Callable[..., Any], device_and_backend: Any) -> None:
    """As on the CPU: a fork goes its own way, and what was condensed is not cut into."""
    found = []

    def go_on(model: Any, text: torch.Tensor, num_new: int, cache: Any) -> torch.Tensor:
        mask = torch.ones_like(text)  # the tokens may look like padding
        return greedy(model, text, num_new, past_key_values=cache, attention_mask=mask)

    for on in (("cpu", None), device_and_backend):
        model = bounded("lfps", on)
        cache = model.new_cache()
        bound = cache.bound
        first = go_on(model, random_tokens(1, bound.slots - 20, seed=1), 60, cache)
        fork = copy.deepcopy(cache)
        longer = go_on(model, first, bound.freed + 20, cache)
        assert torch.equal(go_on(model, first, bound.freed + 20, fork), longer)
        with pytest.raises(ValueError, match="condensed to stay within host_bytes_per_sequence"):
            cache.crop(-bound.slots)
        before = cache.kv_lens[0]
        cache.crop(-8)
        assert cache.kv_lens[0] == before - 8
        found.append(go_on(model, longer[:, :-8], 8, cache))
    assert torch.equal(*found)
