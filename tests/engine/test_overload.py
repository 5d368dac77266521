"""More requests than can be served: refusals, and nothing else goes wrong."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
from cases.inside import allow_host_bytes
from cases.tiny_models import random_tokens

from offload import Engine, OffloadedModel, QueueFullError, RequestOutput, SamplingParams
from offload.policies.registry import make_policy

SECONDS = float(os.environ.get("OFFLOAD_SOAK_SECONDS", "20"))
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "lychee_cluster"])
def test_ten_times_the_load_with_too_little_memory(
    tiny_folders: dict[str, Path], name: str
) -> None:
    options = {"budget_tokens": 64, "sink_tokens": 4, "recent_tokens": 16}
    policy = make_policy(name, **({} if name == "full" else options))
    model = OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=policy, dtype="float32", page_tokens=16
    )
    store, chance = model.kv_store, random.Random(0)
    lens = [chance.randrange(1, 400) for _ in range(40)]
    prompts = [random_tokens(1, n, seed=i)[0].tolist() for i, n in enumerate(lens)]
    prompts += [prompts[i][: chance.randrange(1, lens[i])] + prompts[i + 1][:40] for i in range(9)]
    engine, wanted = Engine(model, max_num_seqs=16, max_queued=8).start(), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            eos_token_id=None,
            max_new_tokens=40,
        )
        wanted.append(text[0, len(prompt) :].tolist())
    # At most 16 of the longest would be there at a time.
    allow_host_bytes(model, int(0.6 * 16 * 440 * store.token_bytes))
    answers: dict[str, list[int]] = {}
    wrong: list[object] = []

    def note(output: RequestOutput) -> None:
        answers[output.request_id] += [chosen.token for chosen in output.tokens]
        if output.finish_reason == "length":
            number = int(output.request_id.split("-")[0])
            wrong.extend([output] if answers.pop(output.request_id) != wanted[number] else [])
        elif output.finish_reason == "cancelled":
            del answers[output.request_id]
        elif output.finish_reason is not None:
            wrong.append(output)

    until, sent, refused = time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < until:
        request_id = f"{chance.randrange(len(prompts))}-{sent}"
        answers[request_id] = []
        try:
            engine.add_request(prompts[int(request_id.split("-")[0])], PARAMS, request_id, note)
        except QueueFullError:
            refused += 1
            del answers[request_id]
            time.sleep(0.002)
        if chance.random() < 0.1 and answers:
            engine.cancel(chance.choice([*answers]))
        sent += 1
        assert store.host_bytes_used <= store.host_budget_bytes
        assert not wrong, wrong[0]
    engine.stop(finish=True, timeout=60)
    assert not wrong, wrong[0]
    assert not answers
    assert refused > engine.stats.finished
    assert engine.stats.failed == 0
    assert store.num_sequences == 0 == store.host_bytes_used
    print(f"\n{name}: {sent} sent, {refused} refused, {engine.stats}")
