"""Requests that join and leave get the tokens that they would get alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.inside import runtime_of
from cases.tiny_models import random_tokens

from offload import OffloadedModel
from offload.engine.engine import Engine, QueueFullError
from offload.engine.request import RequestOutput
from offload.engine.sampling_params import SamplingParams
from offload.policies.registry import available_policies, make_policy

FEW = {"budget_tokens": 32, "sink_tokens": 4, "recent_tokens": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def alone(model: Any, prompt: list[int], num_tokens: int = 10) -> list[int]:
    """The answer of `generate()`."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    text = model.generate(ids, max_new_tokens=num_tokens, **options)
    return text[0, len(prompt) :].tolist()


def prompts_of(*lens: int) -> list[list[int]]:
    return [random_tokens(1, n)[0].tolist() for n in lens]


def answers(engine: Engine, outputs: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Of all requests that are there, by id."""
    found: dict[str, list[int]] = {} if outputs is None else outputs
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output
            found.setdefault(output.request_id, []).extend(c.token for c in output.tokens)
    return found


def load(folder: Path, name: str = "full", **options: Any) -> Any:
    policy = make_policy(name)
    names = policy.option_names()
    few = {"budget_tokens": 12} if name == "streaming_llm" else FEW
    policy = make_policy(name, **{key: few for key, few in few.items() if key in names})
    return OffloadedModel.from_pretrained(folder, policy=policy, dtype="float32", **options)


@pytest.mark.parametrize("name", [name for name in available_policies() if name != "auto"])
def test_a_mix_gets_the_tokens_of_each_alone(tiny_folders: dict[str, Path], name: str) -> None:
    model = load(tiny_folders["llama"], name)
    prompts = prompts_of(1, 70, 41, 9, 150, 33, 200)
    prompts.append(prompts[4][:120] + prompts[0])  # shares a beginning
    prompts.append(prompts[4])
    wanted = {str(i): alone(model, prompt) for i, prompt in enumerate(prompts)}
    engine = Engine(model, max_num_seqs=4, slice_seconds=1e-4)
    order, chance, found = list(wanted), random.Random(0), dict[str, list[int]]()
    chance.shuffle(order)
    for request_id in order:
        engine.add_request(prompts[int(request_id)], GREEDY, request_id)
        for _ in range(chance.randrange(4)):
            for output in engine.step():
                assert output.error is None, output
                new = [chosen.token for chosen in output.tokens]
                found.setdefault(output.request_id, []).extend(new)
    assert answers(engine, found) == wanted
    assert engine.stats.cached_tokens > 0
    engine.stop()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0
