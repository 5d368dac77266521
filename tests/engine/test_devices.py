"""The engine beside a GPU, and the code of that on a CPU: rows join and leave there, too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, SLOW_INLINE, STREAM, load, small
from cases.inside import steps_of
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload.engine.engine import Engine
from offload.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("backend", [SLOW_INLINE, FLAGS, STREAM, GRAPH])
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["full", "lychee_cluster", "lfps", "tidal_decode", "lychee_decode"],
        "lychee_cluster",
        "lychee_decode",
    ),
)
def test_rows_join_and_leave(
    tiny_folders: dict[str, Path], name: str, backend: tuple[str, str]
) -> None:
    policy = name if name == "full" else small(name)
    model = load(tiny_folders["llama"], policy, backend)
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (5, 100, 41, 230, 70, 150)]
    prompts.append(prompts[3][:150] + prompts[0])
    wanted = {}
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=model.device)
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        wanted[str(number)] = text[0, len(prompt) :].tolist()
    engine, chance = Engine(model, max_num_seqs=4, slice_seconds=1e-3), random.Random(2)
    found: dict[str, list[int]] = {request_id: [] for request_id in wanted}
    waiting = [*wanted]
    while waiting or engine.has_work:
        if waiting:
            request_id = waiting.pop(chance.randrange(len(waiting)))
            engine.add_request(prompts[int(request_id)], GREEDY, request_id)
        for _ in range(chance.randrange(5)):
            for output in engine.step():
                assert output.error is None, output
                found[output.request_id] += [chosen.token for chosen in output.tokens]
    assert found == wanted
    links = steps_of(model).links
    engine.stop()
    assert {rows for rows, _ in links} <= {1, 2, 4}
    assert model.kv_store.num_sequences == 0
