"""Passes over sequences that join and leave, without a cache: the same tokens as alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases.device_cases import greedy
from cases.inside import decoder_of, runtime_of
from cases.tiny_models import random_tokens

from offload import OffloadedModel
from offload.models.batch import pack
from offload.policies.registry import make_policy
from offload.runtime.runner import Pass


@pytest.mark.parametrize("name", ["full", "exact_topk", "quest"])
def test_sequences_join_and_leave(tiny_folders: dict[str, Path], name: str) -> None:
    few = {"budget_tokens": 32, "sink_tokens": 4, "recent_tokens": 8}
    policy = make_policy(name, **({} if name == "full" else few))
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], policy=policy)
    runtime, decoder = runtime_of(model), decoder_of(model)
    prompts = [random_tokens(1, 70), random_tokens(1, 41), random_tokens(1, 9)]
    alone = [greedy(model, p, 10)[0, p.shape[1] :].tolist() for p in prompts]
    texts: dict[int, list[int]] = {}

    @torch.no_grad()
    def read(prompt: torch.Tensor) -> int:
        batch = pack(tuple(prompt.shape), None, torch.arange(prompt.shape[1])[None])
        embedded = runtime.lean.embed_tokens(prompt[0])
        this = Pass(runtime.sequences, [runtime.sequences.new()], batch.num_new_tokens)
        hidden = runtime.runner.extend(
            this, lambda seqs: runtime.runner.prefill(embedded, batch, seqs), prefill=True
        )
        first = runtime.runner.logits(hidden[-1:], "prefill").argmax(-1)
        texts[this.seqs[0]] = [int(first)]
        return this.seqs[0]

    @torch.no_grad()
    def step(seqs: list[int]) -> None:
        def compute(of: list[int]) -> torch.Tensor:
            kv_lens = [runtime.store.kv_len(seq) + 1 for seq in of]
            runtime.attention.build_states(of, kv_lens)
            tokens = torch.tensor([texts[seq][-1] for seq in of])
            positions = torch.tensor(kv_lens) - 1
            return decoder.choose_tokens(of, tokens, positions)

        this = Pass(runtime.sequences, seqs, [1] * len(seqs))
        chosen = runtime.runner.extend(this, compute, prefill=False)
        for seq, token in zip(seqs, chosen, strict=True):
            texts[seq].append(int(token))

    running: list[int] = []
    order: list[int] = []
    for number in range(24):
        if number % 3 == 0 and len(order) < len(prompts):
            order.append(read(prompts[len(order)]))
            running.append(order[-1])
        step(running)
        for seq in [seq for seq in running if len(texts[seq]) == 10]:
            running.remove(seq)
            runtime.sequences.free([seq])
        if not running:
            break
    assert [texts[seq] for seq in order] == alone
    runtime.sequences.collect()
    assert runtime.store.num_sequences == 0


def test_a_pass_that_fails_leaves_all_as_they_were(tiny_folders: dict[str, Path]) -> None:
    model = OffloadedModel.from_pretrained(tiny_folders["llama"])
    runtime = runtime_of(model)
    seqs = [runtime.sequences.new() for _ in range(2)]

    def fail(of: list[int]) -> torch.Tensor:
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        runtime.runner.extend(Pass(runtime.sequences, seqs, [3, 50]), fail, prefill=True)
    assert [runtime.store.kv_len(seq) for seq in seqs] == [0, 0]
    assert runtime.store.host_bytes_used == 0


def test_ctrl_c_behind_several_tokens_takes_them_all_back(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], policy=make_policy("full"))
    decoder, cache, prompt = decoder_of(model), model.new_cache(), random_tokens(1, 9)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    count = 3

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder, "tokens_at_once", lambda seqs, most: count)
    several = torch.ones(1, count, dtype=torch.int64)
    monkeypatch.setattr(decoder, "choose_several", lambda *step: several)
    monkeypatch.setattr(decoder, "end_steps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runtime_of(model).choose_tokens(cache, prompt[:, -1], torch.tensor([9]), 8)
    assert cache.get_seq_length() == 9
    assert cache.kv_lens == [9]
