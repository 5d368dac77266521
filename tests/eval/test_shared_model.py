"""Policies that share a model say what each says alone, and `full` what transformers says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import small
from cases.tiny_models import EOS_TOKEN, VOCAB_SIZE, make_tiny_model, random_tokens

from offload import OffloadedModel
from offload.bench.eval.answers import Answer, greedy_answers
from offload.bench.eval.answers import greedy_answer as answer_of
from offload.bench.eval.forced import teacher_forced
from offload.bench.eval.perplexity import measure_window, windows_of
from offload.bench.eval.reply import Reply
from offload.decode.attention import DecodeAttention
from offload.decode.gpu.placement import Place
from offload.kv_compression.bound import CONDENSED_SHARE
from offload.policies import Policy
from offload.policies.registry import available_policies, make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel
from offload.selection.policy import DENSE, RETRIEVE, SELECT

PROMPT, NEW_TOKENS = 180, 24


def ends(said: list[int]) -> bool:
    return said[-1] == EOS_TOKEN


def greedy_answer(model: Any, index: int, read: Any, unread: list[int] | None = None) -> Answer:
    return answer_of(model, index, read, Reply(unread or [], ends, NEW_TOKENS))


def policies() -> list[Policy]:
    """All of them, full attention first."""
    made = [make_policy("full")]
    for name in available_policies():
        if name not in ("full", "lychee_decode"):  # which would calibrate itself
            options = {"budget_tokens": 48, "dense_layers": 1}
            if name != "streaming_llm":
                options["recent_tokens"] = 8
            made.append(make_policy(name, **options))
    return made


@pytest.fixture(scope="module")
def shared(tiny_folders: dict[str, Path]) -> SharedModel:
    return SharedModel(tiny_folders["llama"], policies(), runtime_config(num_threads=1))


def answers(shared: SharedModel, prompt: list[int]) -> list[Any]:
    with shared.read(prompt) as read:
        return [greedy_answer(shared, index, read) for index in range(len(shared.runtimes))]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return said[0, len(prompt) :].tolist()


def test_each_says_what_it_says_alone(
    shared: SharedModel, tiny_folders: dict[str, Path], stock_models: dict[str, Any]
) -> None:
    prompts = [random_tokens(PROMPT + 7 * seed, seed=seed).tolist() for seed in range(2)]
    together = [answers(shared, prompt) for prompt in prompts]
    for of_prompt, prompt in zip(together, prompts, strict=True):
        assert of_prompt[0].tokens == greedy(stock_models["llama"], prompt)
    assert len({tuple(answer.tokens) for answer in together[0]}) > 2
    for index, policy in enumerate(policies()):
        alone = OffloadedModel.from_pretrained(tiny_folders["llama"], policy=policy, num_threads=1)
        for of_prompt, prompt in zip(together, prompts, strict=True):
            assert of_prompt[index].tokens == greedy(alone, prompt), policy.name
    store = shared.runtimes[0].store
    assert store.num_sequences == 0
    assert store.host_bytes_used == 0


def test_the_end_of_a_prompt_can_be_decoded(
    shared: SharedModel, tiny_folders: dict[str, Path], stock_models: dict[str, Any]
) -> None:
    """Under the policy: full attention says the same, exact top-k what it says to such a chat."""
    prompt = random_tokens(PROMPT, seed=3).tolist()
    index = [runtime.attention.policy.name for runtime in shared.runtimes].index("exact_topk")
    said = []
    with shared.read(prompt[:-30]) as read:
        for i in (0, index):
            answer = greedy_answer(shared, i, read, prompt[-30:])
            said.append(answer.tokens)
    assert said[0] == greedy(stock_models["llama"], prompt)
    alone = OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=policies()[index], num_threads=1
    )
    ids = torch.tensor([prompt[:-30]])
    forced = alone.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30 + NEW_TOKENS,
        do_sample=False,
        # Until the prompt has ended.
        prefix_allowed_tokens_fn=lambda _, ids: prompt[len(ids) :][:1] or list(range(VOCAB_SIZE)),
    )
    assert said[1] == forced[0, PROMPT:].tolist()
    assert said[1] != answers(shared, prompt)[index].tokens


def test_prompts_are_answered_in_the_same_steps(shared: SharedModel) -> None:
    """Each as alone: of other lengths, with an end that is decoded, with a question in the answer,
    and with an answer that ends before the others."""
    prompts = [random_tokens(PROMPT + 9 * seed, seed=seed).tolist() for seed in range(4)]

    def replies() -> list[Reply]:
        short = Reply([], ends, 5)
        late = Reply(prompts[1][-30:], ends, NEW_TOKENS)
        asks = Reply(
            [],
            ends,
            NEW_TOKENS,
            questions=[lambda said: [len(said), 7, 8], lambda said: [9]],
            ends_part=lambda token: token % 3 == 0,
        )
        return [short, late, asks, Reply([], ends, NEW_TOKENS)]

    with contextlib.ExitStack() as reading:
        read = [prompts[0], prompts[1][:-30], *prompts[2:]]
        all_read = [reading.enter_context(shared.read(prompt)) for prompt in read]
        for index, policy in enumerate(policies()):
            pairs = zip(all_read, replies(), strict=True)
            alone = [answer_of(shared, index, *pair) for pair in pairs]
            together = greedy_answers(shared, index, all_read, replies())
            assert [x.tokens for x in together] == [x.tokens for x in alone], policy.name
            means = np.mean([[x.attended_tokens, x.scored_tokens] for x in alone], axis=0)
            assert together[0].attended_tokens == pytest.approx(means[0], rel=0.05)
            assert together[0].scored_tokens == pytest.approx(means[1], rel=0.05)
    assert shared.runtimes[0].store.num_sequences == 0


def test_attended_tokens_are_counted(shared: SharedModel) -> None:
    by_name = dict(
        zip(
            [policy.name for policy in policies()],
            answers(shared, random_tokens(PROMPT).tolist()),
            strict=True,
        )
    )
    num_layers = len(shared.runtimes[0].lean.layers)

    def attended(name: str, of_sparse: float, dense_layers: int = 1) -> float:
        """The mean over all layers, of which the dense ones attend to everything."""
        everything = PROMPT + len(by_name[name].tokens) / 2
        return (dense_layers * everything + (num_layers - dense_layers) * of_sparse) / num_layers

    assert by_name["full"].attended_tokens == pytest.approx(attended("full", 0, num_layers))
    for name in ("exact_topk", "quest", "streaming_llm"):
        assert by_name[name].attended_tokens == pytest.approx(attended(name, 48))
    assert attended("lfps", 8) < by_name["lfps"].attended_tokens <= attended("lfps", 48)


def test_decode_steps_judge_the_policy(shared: SharedModel, stock_models: dict[str, Any]) -> None:
    text = random_tokens(PROMPT + 40).tolist()
    labels = [policy.name for policy in policies()]
    (window,) = windows_of(text, PROMPT, 20, 1, 1)
    measured = measure_window(shared, labels, window)["answers"]
    ids = torch.tensor([text[: PROMPT + 20]])
    with torch.no_grad():
        logits = stock_models["llama"](ids).logits[0, PROMPT:-1].double()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, PROMPT + 1 :], reduction="sum")
    assert measured["full"]["nll"] == pytest.approx(float(expected), rel=1e-4)
    assert measured["full"]["tokens"] == 19
    probable = logits.log_softmax(-1)
    with shared.read(text[:PROMPT]) as prompt, teacher_forced(shared, 1, prompt) as decode:
        others = [decode(token).double().log_softmax(-1) for token in text[PROMPT:][:19]]
    expected = (probable.exp() * (probable - torch.stack(others))).sum()
    assert measured[labels[1]]["kl"] == pytest.approx(float(expected), rel=1e-2, abs=1e-5)
    assert measured["streaming_llm"]["nll"] != pytest.approx(float(expected), rel=1e-3)


def test_windows_slide() -> None:
    windows = windows_of(range(100), 40, 10, 20, 3)
    assert [window.tokens[0] for window in windows] == [0, 20, 40]
    assert {len(window.tokens) for window in windows} == {50}
    with pytest.raises(ValueError, match=r"has 100 tokens, but 4 windows of 40 .* need 110"):
        windows_of(range(100), 40, 10, 20, 4)


def test_a_prompt_that_is_too_long(shared: SharedModel) -> None:
    too_long = random_tokens(513).tolist()
    with pytest.raises(ValueError, match="513 tokens exceeds the 512"), shared.read(too_long):
        pass
    assert shared.runtimes[0].store.num_sequences == 0


@pytest.mark.parametrize(
    "options",
    [{"backend": "inline"}, pytest.param({"device": "cuda"}, marks=pytest.mark.cuda)],
    ids=["inline", "cuda"],
)
def test_the_device_pipeline_shares_a_model_too(
    tiny_folders: dict[str, Path], options: dict[str, str]
) -> None:
    config = runtime_config(num_threads=1, **options)
    some = [policies()[0], make_policy("exact_topk", budget_tokens=48, recent_tokens=8)]
    together = SharedModel(tiny_folders["llama"], some, config)
    prompt = random_tokens(PROMPT).tolist()
    said = answers(together, prompt)
    for policy, answer, runtime in zip(some, said, together.runtimes, strict=True):
        alone = OffloadedModel.from_pretrained(
            tiny_folders["llama"],
            policy=policy,
            num_threads=1,
            placement=runtime.decoder.placement,  # by role: alone, all would be on the GPU
            **options,
        )
        assert answer.tokens == greedy(alone, prompt)
        assert (answer.attended_tokens is None) == ("device" in options)


@pytest.mark.parametrize("reads_on", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_another_device_reads_and_builds(
    shared: SharedModel,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    reads_on: str,
) -> None:
    """As on a GPU, policies build from what the prefill leaves there, not from the host's copy."""
    prompt = random_tokens(PROMPT).tolist()
    expected = answers(shared, prompt)
    config = runtime_config(num_threads=1)
    apart = SharedModel(tiny_folders["llama"], policies(), config, reads_on=reads_on)
    monkeypatch.setattr(
        DecodeAttention, "builds_in_prefill", lambda x, _: x.states.builds_on_device
    )
    built: list[str] = []
    for runtime in apart.runtimes:
        states, name = runtime.attention.states, runtime.config.policy.name
        if runtime.config.policy.device.builds:
            monkeypatch.setattr(states, "_build", lambda *_, name=name: pytest.fail(name))
        install = states.install
        monkeypatch.setattr(
            states, "install", lambda *x, name=name, f=install: (built.append(name), f(*x))
        )
    said = answers(apart, prompt)
    assert sorted(built) == [
        *("hard_kv", "lfps", "lychee_cluster", "per_head", "quest", "sketch", "union")
    ]
    for policy, one, other in zip(policies(), said, expected, strict=True):
        assert one.tokens == other.tokens, policy.name
        assert one.attended_tokens == pytest.approx(other.attended_tokens, rel=0.02)
    store = apart.runtimes[0].store
    assert store.num_sequences == 0
    assert not any(runtime.attention.states._known for runtime in apart.runtimes)


@pytest.mark.parametrize("share", [0.0, CONDENSED_SHARE])
def test_within_a_bound_each_says_what_it_says_alone(
    tiny_folders: dict[str, Path], share: float
) -> None:
    prompt = random_tokens(2 * PROMPT, seed=5).tolist()
    config = runtime_config(num_threads=1, page_tokens=16)
    some = [x for x in policies() if x.name in ("full", "exact_topk", "streaming_llm")]
    shared = SharedModel(tiny_folders["llama"], some, config)
    said = set()
    for index, policy in enumerate(some):
        how = {"condensed_share": share, "condense_by": "attention"}
        options = {"host_bytes_per_sequence": "384KiB", **how}
        bounded = shared.bounded(index, 384 * 2**10, **how)
        with bounded.read(prompt) as read:
            answer = greedy_answer(bounded, 0, read)
            (row,) = read.cache.tokens
        assert row.seen == 2 * PROMPT + len(answer.tokens) - 1
        assert row.kept < row.seen
        assert (row.condensed > 0) == (share > 0)
        assert bounded.runtimes[0].store.num_sequences == 0
        alone = OffloadedModel.from_pretrained(
            tiny_folders["llama"], policy=policy, num_threads=1, page_tokens=16, **options
        )
        assert answer.tokens == greedy(alone, prompt), policy.name
        said.add(tuple(answer.tokens))
    assert len(said) > 2
    assert shared.runtimes[0].store.host_bytes_used == 0


def test_a_bound_that_is_too_little(shared: SharedModel) -> None:
    with pytest.raises(ValueError, match="a page of 64 tokens need"):
        shared.bounded(0, 64 * 2**10)


def test_a_gpu_leaves_the_choice_to_the_policy(tiny_folders: dict[str, Path]) -> None:
    """Heads that select are the CPU's; those that retrieve, or are dense, the GPU's."""
    chosen = [small("lychee_decode"), small("quest"), small("tidal_decode")]
    config = runtime_config(num_threads=1, backend="inline")
    model = SharedModel(tiny_folders["llama"], chosen, config)
    for runtime in model.runtimes:
        decoder = runtime.decoder
        roles, places = decoder.attention.roles, decoder.placement.places
        if roles is None:
            roles = np.repeat([[DENSE], [SELECT], [SELECT]], 2, axis=1)
        assert ((places == Place.GPU) == np.isin(roles, (DENSE, RETRIEVE))).all()
        assert (places != Place.GPU).any()


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("hot_rows", [False, True])
def test_windows_stay_on_a_gpu(hot_rows: bool, name: str, tmp_path: Path) -> None:
    make_tiny_model(name, sliding_window=32).save_pretrained(tmp_path)
    config = runtime_config(num_threads=1, backend="inline")
    model = SharedModel(tmp_path, [small("exact_topk")], config, hot_rows=hot_rows)
    on_gpu = model.runtimes[0].decoder.placement.places == Place.GPU
    windows = np.array(model.runtimes[0].lean.each("window"))
    assert (on_gpu.all(axis=1) >= (windows > 0)).all()
    assert windows.any()


def test_hot_rows_are_where_they_may_be(tiny_folders: dict[str, Path]) -> None:
    config = runtime_config(num_threads=1, backend="inline")
    chosen = [make_policy("full"), small("quest"), small("streaming_llm")]
    model = SharedModel(tiny_folders["llama"], chosen, config, hot_rows=True)
    full, quest, _ = (runtime.decoder.placement.places for runtime in model.runtimes)
    assert not (full == Place.HOT).any()
    assert (quest[1:] == Place.HOT).all()
    assert len(answers(model, random_tokens(1, 150, seed=9)[0].tolist())) == 3
