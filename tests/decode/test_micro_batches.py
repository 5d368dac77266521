"""Steps are timed in each way, and the faster way is kept."""

from __future__ import annotations

import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, greedy, load, small
from cases.inside import decoder_of
from cases.tiny_models import random_tokens

from offload.decode.gpu.buffers import micro_batch_rows
from offload.decode.gpu.micro_batches import MicroBatchChoice


def run(choice: MicroBatchChoice, seconds: dict[int, float], num_steps: int) -> list[int]:
    """The parts of each step, if steps take so long; the first of a kind takes a capture longer."""
    used, seen = [], set()
    for _ in range(num_steps):
        parts = choice.num_micro_batches
        used.append(parts)
        choice.record(parts, seconds[parts] + (0.0 if parts in seen else 1.0))
        seen.add(parts)
    return used


@pytest.mark.parametrize("fastest", [1, 2])
def test_the_faster_way_is_kept(fastest):
    seconds = {1: 0.010, 2: 0.012} if fastest == 1 else {1: 0.010, 2: 0.007}
    used = run(MicroBatchChoice((1, 2)), seconds, 200)
    assert used[:16] == [1] * 16  # a short answer is not worth a trial
    assert used.count(2) >= 5
    assert used[40:] == [fastest] * 160


def test_it_is_tried_again_when_contexts_have_grown():
    choice = MicroBatchChoice((1, 2))
    assert run(choice, {1: 0.010, 2: 0.012}, 500)[-1] == 1
    assert run(choice, {1: 0.030, 2: 0.020}, 1200)[-1] == 2


def test_one_way_needs_no_trial():
    assert set(run(MicroBatchChoice((1,)), {1: 0.01}, 2000)) == {1}


@pytest.mark.parametrize("backend", [FLAGS, GRAPH])
def test_a_long_generation_captures_all_ways_before_its_first_step(backend, tiny_folders):
    """None when it tries them; a short one only the first way, until then."""
    wanted = None
    for new_tokens, first in ((66, {(2, 1), (2, 2)}), (40, {(2, 1)})):
        model = load(tiny_folders["llama"], small("exact_topk"), backend)
        decoder, links = decoder_of(model), []
        decoder.captured.num_micro_batches = None
        run = decoder.captured._run

        def run_and_look(bound, link, *args, run=run, links=links, **options):
            links.append((set(bound.steps.links), link.num_micro_batches))
            return run(bound, link, *args, **options)

        decoder.captured._run = run_and_look
        tokens = greedy(model, random_tokens(2, 100), new_tokens)
        assert links[0] == (first, 1)
        assert {count for _, count in links} == {1, 2}  # tried
        assert links[-1][0] == {(2, 1), (2, 2)}
        wanted = tokens if wanted is None else wanted
        assert torch.equal(tokens, wanted[:, : tokens.shape[1]])


def test_parts_cover_the_rows():
    assert micro_batch_rows(4, 2) == [slice(0, 2), slice(2, 4)]
    assert micro_batch_rows(5, 2) == [slice(0, 2), slice(2, 5)]
    assert micro_batch_rows(3, 1) == [slice(0, 3)]
