"""All of a policy's heads on the GPU, or whole layers: exact there, and nobody is asked."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, SLOW_INLINE, STREAM, each_of, greedy, load, small
from cases.inside import (
    allow_device_bytes,
    decoder_of,
    keep_placement,
    least_placement_of,
    states_of,
    steps_of,
)
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.prepared_steps import PreparedSteps
from offload.policies import Policy
from offload.policies.registry import available_policies, make_policy
from offload.prefill.forward import _find_room
from offload.prefill.memory import PrefillMemory
from offload.selection.policy import DENSE, RETRIEVE, SELECT
from offload.system.errors import DeviceMemoryError

NAMES = [name for name in available_policies() if name not in ("auto", "full")]
backend = each_of(SLOW_INLINE, FLAGS, STREAM, GRAPH)


@pytest.fixture(scope="module")
def full(tiny_folders: dict[str, Path]) -> Any:
    """Full attention, on the CPU alone."""
    return load(tiny_folders["llama"], "full", ("cpu", None))


def whole(last_layers: int) -> HeadPlacement:
    """A placement of three layers of two heads."""
    places = np.full((3, 2), Place.CPU, np.uint8)
    places[3 - last_layers :] = Place.GPU
    return HeadPlacement(places)


@pytest.mark.parametrize(
    "name", slow_but(NAMES, "lfps", "lychee_cluster", "tidal_decode", "sketch")
)
def test_all_on_the_gpu_is_exact(
    backend: tuple[str, str], name: str, tiny_folders: dict[str, Path], full: Any
) -> None:
    """Full attention's tokens; the CPU is asked nothing, and the policy keeps nothing."""
    model = load(tiny_folders["llama"], small(name), backend)
    decoder = decoder_of(model)
    decoder.place(whole(3))
    for prompt_tokens in (200, 30):
        tokens = random_tokens(2, prompt_tokens)
        assert torch.equal(greedy(model, tokens, 20), greedy(full, tokens, 20))
    assert not any(link.request_of for link in steps_of(model).links.values())
    assert model.offload_stats().policy_host_bytes == 0
    assert decoder.attention.states.num_bytes == 0


class Dense:
    """`roles` of a policy whose last layers attend to everything."""

    last_layers: int

    def roles(self, num_layers: int, num_units: int) -> np.ndarray:
        roles = super().roles(num_layers, num_units)  # type: ignore[misc]
        if roles is None:
            roles = np.full((num_layers, num_units), SELECT, np.uint8)
            roles[: self.dense_layers] = DENSE  # type: ignore[attr-defined]
        roles = np.array(roles)
        roles[num_layers - self.last_layers :] = DENSE
        return roles


def with_dense_end(policy: Policy, last_layers: int) -> Policy:
    cls: Any = type(policy)
    made: Any = type(cls.__name__, (Dense, cls), {"last_layers": last_layers})
    copied = object.__new__(made)
    copied.__dict__.update(policy.__dict__)
    return copied


@pytest.mark.parametrize("last_layers", slow_but([1, 2], 2))
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["exact_topk", "lychee_decode", "tidal_decode", "lfps", "lychee_cluster", "quest"],
        "lychee_decode",
        "lychee_cluster",
    ),
)
def test_whole_layers_are_dense_there(
    backend: tuple[str, str], name: str, last_layers: int, tiny_folders: dict[str, Path]
) -> None:
    """As by a policy that attends to everything in these layers, on the CPU alone."""
    policy = small(name)
    if name == "tidal_decode":
        policy = make_policy(
            name, budget_tokens=64, recent_tokens=16, dense_layers=0, select_layers=(0,)
        )
    like = load(tiny_folders["llama"], with_dense_end(policy, last_layers), ("cpu", None))
    model = load(tiny_folders["llama"], policy, backend)
    decoder = decoder_of(model)
    places = np.array(least_placement_of(model).places)
    places[3 - last_layers :] = Place.GPU
    decoder.place(HeadPlacement(places))
    for prompt_tokens in (200, 30):
        tokens = random_tokens(1, prompt_tokens)
        assert torch.equal(greedy(model, tokens, 20), greedy(like, tokens, 20))


@pytest.mark.parametrize("name", ["lfps", "lychee_cluster", "sketch", "per_head", "hard_kv"])
def test_layers_that_come_back_to_the_cpu(
    backend: tuple[str, str], name: str, tiny_folders: dict[str, Path]
) -> None:
    """What the policy keeps is built then, of the layers that it has to, from all tokens."""
    model = load(tiny_folders["llama"], small(name), backend)
    decoder, states = decoder_of(model), states_of(model)
    cache = model.new_cache()

    def go_on(tokens: torch.Tensor) -> Any:
        with torch.no_grad():
            for _ in range(3):
                logits = model(tokens.to(model.device), past_key_values=cache).logits
                tokens = logits[:, -1:].argmax(-1)
        return states.arrays_of(cache.seqs[0])

    decoder.place(whole(3))
    assert go_on(random_tokens(1, 200)).built == frozenset()
    places = np.array(least_placement_of(model).places)
    places[2] = Place.GPU
    decoder.place(HeadPlacement(places))
    arrays = go_on(random_tokens(1, 1))
    assert arrays.built == {1}
    first = arrays.layers[1]
    decoder.place(least_placement_of(model))
    arrays = go_on(random_tokens(1, 1))
    assert arrays.built == {1, 2}
    assert all(arrays.layers[1][key] is first[key] for key in first)  # went on, as it was
    decoder.place(whole(3))
    assert go_on(random_tokens(1, 1)).built == frozenset()


def test_room_decides_when_a_generation_begins(
    tiny_folders: dict[str, Path], full: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The chooser is asked with lengths and room; where its choice does not fit, it is asked again
    for less, in the middle of a generation, and full attention's tokens stay."""
    model = load(tiny_folders["llama"], "full", ("cpu", "inline"))
    decoder, asked = decoder_of(model), []
    layer_bytes = model.kv_store.page_bytes  # of a page of each head

    def choose(
        now: HeadPlacement, num_sequences: int, kv_len: int, room: int, read_tokens: int | None
    ) -> HeadPlacement:
        asked.append((num_sequences, kv_len, room))
        pages = num_sequences * -(-kv_len // 16)
        return whole(min(3, room // (pages * layer_bytes)))

    decoder.placed.choose = choose
    allow_device_bytes(model, 3 * layer_bytes * 15)
    tokens = random_tokens(1, 200)
    out = greedy(model, tokens, 40)
    assert torch.equal(out, greedy(full, tokens, 40))
    assert asked == [(1, 239, 3 * layer_bytes * 15)]  # the last token is not kept
    assert decoder.placement == whole(3)
    two = random_tokens(2, 200)
    assert torch.equal(greedy(model, two, 40), greedy(full, two, 40))
    assert decoder.placement == whole(1)
    assert not caplog.records
    # A loop of its own says nothing of lengths: it comes to its pages' end, and goes on.
    cache = model.new_cache()
    decoder.place(whole(3))
    wanted = greedy(full, tokens, 60)
    with (
        torch.no_grad(),
        caplog.at_level(logging.WARNING, logger="offload.decode.gpu.placed_heads"),
    ):
        token, said = tokens, []
        for _ in range(60):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            said.append(token)
    assert torch.equal(torch.cat([tokens, *said], dim=1), wanted)
    assert decoder.placement == whole(2)
    assert [record.getMessage().endswith("4 KV heads stay there") for record in caplog.records] == [
        True
    ]


def test_a_prefill_without_room_takes_it_from_the_heads(
    tiny_folders: dict[str, Path],
    full: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Head by head until it fits, or until nobody could give more; what is decoded stays exact."""
    model = load(tiny_folders["llama"], "full", ("cpu", "inline"))
    decoder, taken = decoder_of(model), []
    shape = decoder.model.shape
    memory = PrefillMemory.of(shape, item_bytes=4, num_tokens=8, slice_tokens=8)
    needed = memory.total_bytes - memory.hidden_bytes

    def choose(*of_sequences: Any) -> HeadPlacement:
        return whole(max(0, 3 - len(taken)))

    def available(*_: Any) -> int:
        layers = int((decoder.placement.places == Place.GPU).sum()) // 2
        return needed + 50 * (1 - layers)

    def find_room() -> None:
        def give_back(why: DeviceMemoryError) -> bool:
            taken.append(why)
            return bool(decoder.give_heads_back(why))

        _find_room(memory, torch.device("cpu"), None, give_back)

    monkeypatch.setattr("offload.prefill.forward.available_bytes", available)
    decoder.placed.choose = choose
    tokens = random_tokens(1, 100)
    wanted = greedy(full, tokens, 20)
    assert torch.equal(greedy(model, tokens, 20), wanted)
    assert decoder.placement == whole(3)
    with caplog.at_level(logging.WARNING, logger="offload.decode.gpu.placed_heads"):
        find_room()
    assert decoder.placement == whole(1)
    assert len(caplog.records) == 2
    assert "prefill needs" in caplog.records[0].getMessage()
    memory = replace(memory, kv_bytes=memory.kv_bytes + 1000)
    with pytest.raises(DeviceMemoryError, match="prefill needs"):
        find_room()
    assert torch.equal(greedy(model, tokens, 20), wanted)
    keep_placement(model, keeps=True)
    assert not decoder.give_heads_back(DeviceMemoryError("none"))


def by_room(model: Any) -> Any:
    """As many layers as there is room for, and all that it was asked."""
    layer_bytes, asked = model.kv_store.page_bytes, []

    def choose(
        now: HeadPlacement, num_sequences: int, kv_len: int, room: int, read_tokens: int | None
    ) -> HeadPlacement:
        asked.append((num_sequences, kv_len))
        return whole(min(3, room // (num_sequences * -(-kv_len // 16) * layer_bytes)))

    decoder_of(model).placed.choose = choose
    return asked


def test_heads_that_were_given_back_do_not_return(tiny_folders: dict[str, Path]) -> None:
    """A prefill that needs more than there is asks until there are none."""
    model = load(tiny_folders["llama"], "full", ("cpu", "inline"))
    decoder, why = decoder_of(model), DeviceMemoryError("prefill needs more")
    by_room(model)
    allow_device_bytes(model, 3 * model.kv_store.page_bytes * 10)
    decoder.begin_generation(1, 128)
    placed = [decoder.placement]
    while len(placed) < 10 and decoder.give_heads_back(why):
        placed.append(decoder.placement)
    assert placed == [whole(3), whole(2), least_placement_of(model)]
    # In the end it was refused: that says nothing of what comes next.
    decoder.begin_generation(1, 128)
    assert decoder.placement == whole(3)
    # No more come, although there is more room than when they were placed.
    decoder.begin_generation(1, 128)
    allow_device_bytes(model, 30 * model.kv_store.page_bytes * 10)
    decoder.place(whole(1))
    assert decoder.give_heads_back(why)
    assert decoder.placement == least_placement_of(model)


def test_a_generation_that_is_refused_changes_nothing(tiny_folders: dict[str, Path]) -> None:
    """Those that run keep their steps and their heads."""
    policy = make_policy(
        "lychee_cluster", budget_tokens=64, sink_tokens=4, recent_tokens=16, dense_layers=1
    )
    model = load(tiny_folders["llama"], policy, ("cpu", "inline"))
    decoder = decoder_of(model)
    asked = by_room(model)
    allow_device_bytes(model, 3 * model.kv_store.page_bytes * 16)
    cache, least = model.new_cache(), least_placement_of(model)
    decoder.placed.choose = lambda *of_sequences: asked.append(of_sequences) or least
    decoder.begin_generation(1, 128)
    with torch.no_grad():
        model(random_tokens(1, 100), past_key_values=cache)
        model(random_tokens(1, 1), past_key_values=cache)
        steps = steps_of(model)
        asked.clear()
        with pytest.raises(DeviceMemoryError):
            decoder.begin_generation(64, 4096)
        model(random_tokens(1, 1), past_key_values=cache)
    assert steps_of(model) is steps
    assert not asked


def test_less_is_chosen_for_all_that_are_expected(tiny_folders: dict[str, Path]) -> None:
    """Steps have rows for those that have yet to join."""
    model = load(tiny_folders["llama"], "full", ("cpu", "inline"))
    decoder, tokens = decoder_of(model), random_tokens(1, 100)
    asked = by_room(model)
    decoder.begin_generation = lambda *_: None  # of `greedy`: an engine has said more
    allow_device_bytes(model, model.kv_store.page_bytes * 10)
    type(decoder).begin_generation(decoder, 4, 300)
    decoder.place(whole(3))
    greedy(model, tokens, 20)
    assert asked == [(4, 300), (4, 300)]


def test_a_generation_is_prepared_for_its_end(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are made once, although scores have room for a power of two of tokens."""
    monkeypatch.setattr("offload.decode.gpu.buffers._MIN_SCORE_TOKENS", 16)
    policy = make_policy("lychee_decode", budget_tokens=64, sink_tokens=4, recent_tokens=16)
    model = load(tiny_folders["llama"], policy, ("cpu", "inline"))
    decoder, made = decoder_of(model), []

    def make(*args: Any, **options: Any) -> PreparedSteps:
        made.append(options["max_tokens"])
        return PreparedSteps(*args, **options)

    monkeypatch.setattr("offload.decode.gpu.captured_steps.PreparedSteps", make)
    places = np.array(decoder.placement.places)
    places[decoder.attention.roles == RETRIEVE] = Place.GPU
    decoder.place(HeadPlacement(places))
    greedy(model, random_tokens(1, 100), 60)
    assert made == [256]


@pytest.mark.parametrize("seed", range(4))
def test_placements_that_change_while_it_generates(
    backend: tuple[str, str], seed: int, tiny_folders: dict[str, Path], full: Any
) -> None:
    """Full attention's tokens, wherever heads are between any two steps of a batch."""
    rng = np.random.default_rng(seed)
    model = load(tiny_folders["llama"], "full", backend)
    decoder = decoder_of(model)
    tokens = random_tokens(3, int(rng.integers(20, 120)))
    wanted = greedy(full, tokens, 24)
    cache, token, said = model.new_cache(), tokens.to(model.device), []
    with torch.no_grad():
        for step in itertools.count():
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            said.append(token.cpu())
            if step == 23:
                break
            if rng.random() < 0.4:
                places = rng.choice([Place.CPU, Place.GPU], (3, 2)).astype(np.uint8)
                decoder.place(HeadPlacement(places))
    assert torch.equal(torch.cat([tokens, *said], dim=1), wanted)
