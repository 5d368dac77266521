"""Heads on the GPU, heads whose rows it fetches, heads of the CPU: the same tokens, wherever."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.correcting import padded
from cases.device_cases import FLAGS, GRAPH, INLINE, SLOW_INLINE, STREAM, each_of, greedy, load
from cases.inside import (
    allow_device_bytes,
    decoder_of,
    keep_placement,
    least_placement_of,
    split_steps,
    steps_of,
)
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload.decode.gpu.gpu_sync import InlineSync, SideWork
from offload.decode.gpu.heads import DeviceHeads
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles
from offload.selection.policy import DENSE, RETRIEVE, REUSE
from offload.system.errors import DeviceMemoryError

WINDOW = {"budget_tokens": 64, "sink_tokens": 4, "recent_tokens": 16}
NEW_TOKENS = {200: 20, 30: 40}  # the second prompt grows beyond the budget


def policies() -> dict[str, Policy]:
    return {
        "lychee_decode": make_policy("lychee_decode", **WINDOW),
        "lychee_decode_ratio": make_policy("lychee_decode", rule="ratio", ratio=0.2, **WINDOW),
        "lychee_decode_top_p": make_policy("lychee_decode", rule="top_p", top_p=0.5, **WINDOW),
        "lychee_decode_threshold": make_policy(
            "lychee_decode", rule="threshold", threshold=0.006, **WINDOW
        ),
        "tidal_decode": make_policy("tidal_decode", dense_layers=1, select_layers=(1,), **WINDOW),
        "full": make_policy("full"),
    }


def placement_of(model: Any, kind: str) -> HeadPlacement:
    """retrieval: heads that retrieve, or nobody; gathered: and the rows of all that reuse;
    mixed: the rows of every second one. Roles are the model's own, by its calibration."""
    decoder = decoder_of(model)
    places, roles = np.array(decoder.placement.places), decoder.attention.roles
    if roles is None:  # full attention
        places[:, 0] = Place.GPU
        return HeadPlacement(places)
    places[(roles == RETRIEVE) | (roles == DENSE)] = Place.GPU
    if kind == "gathered":
        places[roles == REUSE] = Place.GATHER
    if kind == "mixed":
        every_second = np.arange(places.size).reshape(places.shape) % 2 == 0
        places[(roles == REUSE) & every_second] = Place.GATHER
    return HeadPlacement(places)


backend = each_of(SLOW_INLINE, FLAGS, STREAM, GRAPH)


@pytest.fixture(scope="module")
def expected(tiny_folders: dict[str, Path]):
    """Tokens of the CPU's own step, which has nothing on a GPU."""

    @functools.cache
    def tokens_of(name: str, prompt_tokens: int) -> torch.Tensor:
        model = load(tiny_folders["llama"], policies()[name], ("cpu", None))
        return greedy(model, random_tokens(1, prompt_tokens), NEW_TOKENS[prompt_tokens])

    return tokens_of


@pytest.mark.parametrize("kind", slow_but(["retrieval", "gathered", "mixed"], "mixed"))
@pytest.mark.parametrize("name", slow_but(policies(), "tidal_decode", "lychee_decode_threshold"))
def test_the_tokens_do_not_depend_on_the_place(backend, name, kind, tiny_folders, expected):
    policy = policies()[name]
    if name == "full" and kind != "retrieval":
        pytest.skip("full attention has no heads that reuse a selection")
    model = load(tiny_folders["llama"], policy, backend)
    decoder_of(model).place(placement_of(model, kind))
    for prompt_tokens in NEW_TOKENS:
        out = greedy(model, random_tokens(1, prompt_tokens), NEW_TOKENS[prompt_tokens])
        assert torch.equal(out, expected(name, prompt_tokens))
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [("full", "retrieval"), ("full", "all"), ("lychee_decode", "mixed"), ("tidal_decode", "mixed")],
)
def test_int8_tokens_do_not_depend_on_the_place(backend, name, kind, tiny_folders):
    policy, tokens = policies()[name], random_tokens(1, 200)
    cpu = load(tiny_folders["llama"], policy, ("cpu", None), kv_dtype="int8")
    model = load(tiny_folders["llama"], policy, backend, kv_dtype="int8")
    decoder = decoder_of(model)
    if kind == "all":
        decoder.place(HeadPlacement(np.full_like(decoder.placement.places, Place.GPU)))
    else:
        decoder.place(placement_of(model, kind))
    cache, host = model.new_cache(), cpu.new_cache()
    out = greedy(model, tokens, 20, past_key_values=cache)
    assert torch.equal(out, greedy(cpu, tokens, 20, past_key_values=host))
    for layer_idx in range(model.kv_store.num_layers):
        for side in range(2):  # rounded in one way wherever they were made, but for the last bit
            rows, expected = (
                x.kv_store.gather(x_cache.seqs[0], layer_idx)[side]
                for x, x_cache in ((model, cache), (cpu, host))
            )
            assert float((rows - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("rest", slow_but(["lfps", "lychee_cluster"], "lychee_cluster"))
def test_retrieval_heads_attend_to_everything(backend, rest, tiny_folders):
    """On a GPU, whatever selects for them on the CPU; beside heads that the CPU selects for."""
    retrieves = np.array([[1, 1], [0, 1], [1, 0]], bool)
    options = {"rest": rest, "dense_layers": 1, **WINDOW}

    def policy(retrieval: str) -> Policy:
        made: Any = make_policy("per_head", retrieval=retrieval, **options)
        return replace(made, head_roles=HeadRoles.of(retrieves, head_dim=32), is_part=True)

    tokens = random_tokens(1, 200)
    cpu = load(tiny_folders["llama"], policy("full"), ("cpu", None))
    expected = greedy(cpu, tokens, 20)
    for retrieval in ("full", "exact_topk"):
        model = load(tiny_folders["llama"], policy(retrieval), backend)
        decoder_of(model).place(HeadPlacement(np.where(retrieves, Place.GPU, Place.CPU)))
        assert torch.equal(greedy(model, tokens, 20), expected)


@pytest.mark.parametrize("kind", slow_but(["retrieval", "mixed"], "mixed"))
def test_rows_of_a_batch_in_two_parts(backend, kind, tiny_folders, expected):
    policy = policies()["lychee_decode"]
    model = load(tiny_folders["llama"], policy, backend)
    decoder_of(model).place(placement_of(model, kind))
    split_steps(model, 2)
    prompts = [200, 30, 200]
    tokens, mask = padded([random_tokens(1, n) for n in prompts])
    out = greedy(model, tokens, 40, attention_mask=mask)
    for i, n in enumerate(prompts):
        wanted = expected("lychee_decode", n)[0, n:]
        assert torch.equal(out[i, 200 : 200 + len(wanted)], wanted)


def test_a_context_beyond_the_room_for_scores_gets_more(
    backend, tiny_folders, expected, monkeypatch
):
    """The step is made anew, and the sequence goes on."""
    monkeypatch.setattr("offload.decode.gpu.buffers._MIN_SCORE_TOKENS", 16)
    policy = policies()["lychee_decode"]
    model = load(tiny_folders["llama"], policy, backend)
    decoder = decoder_of(model)
    decoder.place(placement_of(model, "mixed"))
    assert torch.equal(
        greedy(model, random_tokens(1, 200), 20), expected("lychee_decode", 200)
    )  # 200 + 20 tokens are within 256
    assert steps_of(model).max_tokens == 256
    assert torch.equal(greedy(model, random_tokens(1, 30), 40), expected("lychee_decode", 30))
    decoder.place(decoder.placement)
    assert torch.equal(greedy(model, random_tokens(1, 30), 40), expected("lychee_decode", 30))
    assert steps_of(model).max_tokens == 128


def test_a_batch_without_room_goes_on_with_fewer_heads_on_the_gpu(
    backend, tiny_folders, expected, caplog, monkeypatch
):
    """A placement that was chosen for one sequence: its heads go back to the CPU, with a warning.
    One that somebody asked for is an error, and one sequence goes on."""
    model = load(tiny_folders["llama"], policies()["lychee_decode"], backend)
    decoder = decoder_of(model)
    placement, least = placement_of(model, "mixed"), least_placement_of(model)
    heads = int((placement.places == Place.GPU).sum())
    pages = -(-221 // model.kv_store.page_tokens)
    allow_device_bytes(model, heads * pages * (model.kv_store.page_bytes // 2))  # of 2 heads
    decoder.place(placement)
    tokens = random_tokens(1, 200)
    batch = tokens.repeat(3, 1)
    assert torch.equal(greedy(model, tokens, 20), expected("lychee_decode", 200))
    assert not decoder.placed.keeps  # the model chose by itself
    keep_placement(model, keeps=True)
    with pytest.raises(DeviceMemoryError, match="place fewer heads there"):
        greedy(model, batch, 20)
    assert torch.equal(greedy(model, tokens, 20), expected("lychee_decode", 200))
    keep_placement(model, keeps=False)
    slots, placed, full_pages, are_gone = decoder.slots, decoder.placed, [], []
    bind_lens, use = slots._bind_lens, placed.use

    def bind_and_remember(*of_step):
        try:
            return bind_lens(*of_step)
        except DeviceMemoryError:
            full_pages.append(weakref.ref(decoder.slots.steps.step.resident))
            raise

    def use_and_look(placement):
        use(placement)
        gc.collect()
        are_gone.extend(pages() is None for pages in full_pages)

    monkeypatch.setattr(slots, "_bind_lens", bind_and_remember)
    monkeypatch.setattr(placed, "use", use_and_look)
    with caplog.at_level(logging.WARNING, logger="offload.decode.gpu.placed_heads"):
        out = greedy(model, batch, 20)
    assert are_gone == [True]  # before the new steps need room
    for row in out:
        assert torch.equal(row, expected("lychee_decode", 200)[0])
    assert decoder.placement == least
    assert len(caplog.messages) == 1
    assert "only dense layers stay there" in caplog.messages[0]
    assert torch.equal(greedy(model, batch, 20), out)


def test_heads_come_back_when_a_generation_fits_again(tiny_folders, expected, monkeypatch):
    """And not before: each time they come and go, steps are captured anew."""
    model = load(tiny_folders["llama"], policies()["lychee_decode"], INLINE.values[0])
    decoder = decoder_of(model)
    placement, least = placement_of(model, "mixed"), least_placement_of(model)
    heads, page_tokens = int((placement.places == Place.GPU).sum()), model.kv_store.page_tokens
    pages = 2 * -(-220 // page_tokens) - 1  # of one sequence; two of them have room at first
    allow_device_bytes(model, heads * pages * (model.kv_store.page_bytes // 2))
    decoder.place(placement)
    places, use = [], decoder.placed.use
    monkeypatch.setattr(decoder.placed, "use", lambda to: places.append(to) or use(to))
    tokens = random_tokens(1, 200)

    def generate(num_sequences: int) -> None:
        for row in greedy(model, tokens.repeat(num_sequences, 1), 20):
            assert torch.equal(row, expected("lychee_decode", 200)[0])

    generate(2)
    assert places == [least]
    generate(2)  # begins with fewer pages than did not fit, and would come to as many
    assert places == [least]
    generate(1)
    generate(1)
    assert places == [least, placement]
    generate(2)
    assert places == [least, placement, least]


class LateHandshake(InlineSync):
    """What runs beside the step runs as late as a stream of its own may: when it is joined."""

    def __init__(self, coprocessor: Any) -> None:
        super().__init__(coprocessor)
        self.late: list[tuple[int, SideWork, list[Callable[[], None]]]] = []

    @contextmanager
    def side_stream(self, lane: int = 0) -> Iterator[SideWork]:
        self.late.append((lane, SideWork(), []))
        yield self.late[-1][1]

    def join(self, work: SideWork) -> None:
        """With all that was launched before it in its lane, and nothing of another."""
        lanes = [lane for lane, other, _ in self.late if other is work]
        while any(other is work for _, other, _ in self.late):
            first = next(i for i, (lane, _, _) in enumerate(self.late) if lane == lanes[0])
            for launch in self.late.pop(first)[2]:
                launch()

    def run(self, *args: Any, **options: Any) -> None:
        super().run(*args, **options)
        assert not self.late, "not joined in its step"


@pytest.mark.parametrize("num_micro_batches", slow_but([1, 2], 2))
@pytest.mark.parametrize("kind", slow_but(["retrieval", "gathered", "mixed"], "gathered", "mixed"))
def test_nothing_overwrites_what_is_read_beside(
    kind, num_micro_batches, tiny_folders, expected, monkeypatch
):
    """Scores and lse of a layer are read until its selection is published; on a GPU that may last
    into the layers below."""
    model = load(tiny_folders["llama"], policies()["lychee_decode"], INLINE.values[0])
    decoder = decoder_of(model)
    decoder.place(placement_of(model, kind))
    split_steps(model, num_micro_batches)
    handshakes: list[LateHandshake] = []

    def make_gpu_sync(backend: str, coprocessor: Any, *args: Any, **options: Any) -> LateHandshake:
        handshakes.append(LateHandshake(coprocessor))
        return handshakes[-1]

    def later(work: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            handshakes[-1].late[-1][2].append(functools.partial(work, *args, **options))

        return launch

    decoder.captured.make_gpu_sync = make_gpu_sync
    monkeypatch.setattr(DeviceHeads, "send_selection", later(DeviceHeads.send_selection))
    monkeypatch.setattr(DeviceHeads, "gather", later(DeviceHeads.gather))
    tokens = random_tokens(1, 200).repeat(2, 1)
    out = greedy(model, tokens, 20)
    assert len(handshakes) == 1
    for row in out:
        assert torch.equal(row, expected("lychee_decode", 200)[0])


def test_a_fork_writes_to_pages_of_its_own(backend, tiny_folders):
    """Beams share pages until one writes: addresses that the GPU fetches from change."""
    policy = policies()["lychee_decode"]
    plain = load(tiny_folders["llama"], policy, ("cpu", None))
    model = load(tiny_folders["llama"], policy, backend)
    decoder_of(model).place(placement_of(model, "gathered"))
    tokens = random_tokens(1, 150)
    options = {"num_beams": 3, "num_return_sequences": 3}
    assert torch.equal(greedy(model, tokens, 30, **options), greedy(plain, tokens, 30, **options))
