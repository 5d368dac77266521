"""Text as it comes, choices by the numbers, and the tree of prefixes against a list."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from cases.tiny_models import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpu_ops.sampling import sample_tokens_reference
from offload.engine.prefix_tree import PrefixTree
from offload.engine.sampler import choose
from offload.engine.sampling_params import SamplingParams
from offload.engine.text import TextStream


@pytest.mark.parametrize("stop", [(), ("ab",), ("tokens", "né"), ("…",), ("xyz", "stradd")])
def test_streamed_text_is_the_text_up_to_a_stop_string(stop: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer()
    whole = "A naïve café … stop strings straddle tokens né abc 🙂 end"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, stop, [1, 2, 3])
    streamed = [stream.add(token) for token in ids]
    streamed.append("" if stream.is_stopped else stream.end())
    ends = [at for at in (whole.find(s) for s in stop) if at >= 0]
    assert "".join(streamed) == stream.text == whole[: min(ends, default=len(whole))]
    assert stream.is_stopped == bool(ends)
    assert not any("\ufffd" in piece for piece in streamed)


def test_half_a_character_is_never_sent() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("é🙂", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    for token in ids[:-1]:
        stream.add(token)
    stream.end()
    assert stream.text == "é"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"top_p": 5e-324},  # 0 in float32
        {"top_k": 20, "top_p": 0.8, "temperature": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.8, "top_k": 3},
    ],
)
def test_tokens_are_drawn_as_transformers_draws_them(options: dict[str, float]) -> None:
    logits = 3 * torch.randn(600, generator=torch.Generator().manual_seed(3))
    warpers = LogitsProcessorList()
    for name, warper in (
        ("repetition_penalty", RepetitionPenaltyLogitsProcessor),
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in options:
            warpers.append(warper(options[name]))
    wanted = warpers(torch.tensor([[5, 6, 7]]), logits[None].clone())[0].softmax(-1)
    chance, params = random.Random(0), SamplingParams(**options)
    counts = torch.zeros(600)
    for _ in range(4000):
        counts[choose(logits, params, [5, 6], [7], chance.random(), ()).token] += 1
    assert not bool(counts[wanted == 0].any())
    assert float((counts / 4000 - wanted).abs().sum()) < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_a_step_on_a_gpu(dtype: torch.dtype) -> None:
    chance = random.Random(1)
    for trial in range(200):
        n = chance.choice([7, 300])
        scale = chance.choice([0.3, 3.0])
        logits = scale * torch.randn(1, n, generator=torch.Generator().manual_seed(trial))
        logits = logits.to(dtype)
        temperature = chance.choice([0.5, 1.0, 1.7])
        top_k = chance.choice([0, 1, 5, n - 1, n, n + 5])
        top_p, uniform = chance.choice([1e-9, 0.3, 0.95, 1.0]), chance.random()
        wanted = torch.zeros(1, dtype=torch.int64)
        options = {"temperature": temperature, "top_p": top_p, "uniform": uniform}
        sample_tokens_reference(
            logits,
            top_k=torch.tensor([top_k]),
            out=wanted,
            **{name: torch.tensor([value]) for name, value in options.items()},
        )
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        assert choose(logits[0], params, [1], [], uniform, ()).token == int(wanted), trial


def test_infinite_logits() -> None:
    """The likeliest token may have one, as in a step; nothing is drawn by it."""
    logits = torch.tensor([0.0, torch.inf, 1.0])
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)
    assert choose(logits, greedy, [1], [], 0.0, ()).token == 1
    with pytest.raises(RuntimeError, match="non-finite"):
        choose(logits, sampled, [1], [], 0.0, ())

    def forces(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[2] = torch.inf
        return logits

    finite = torch.zeros(3)
    greedy = SamplingParams(temperature=0.0, logits_processors=[forces])
    assert choose(finite, greedy, [1], [], 0.0, ()).token == 2
    for options in ({}, {"top_p": 0.9}, {"min_p": 0.1}):
        sampled = SamplingParams(logits_processors=[forces], **options)
        with pytest.raises(RuntimeError, match="a logits processor left NaN, inf"):
            choose(finite, sampled, [1], [], 0.5, ())


def test_logprobs_are_of_the_models_own_logits() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias={0: 100.0})
    chosen = choose(logits, params, [1], [], 0.0, ())
    wanted = logits.log_softmax(-1)
    assert chosen.token == 0
    assert chosen.logprob == pytest.approx(float(wanted[0]))
    assert [token for token, _ in chosen.likeliest] == [1, 2]
    counted = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.4)
    assert choose(logits, counted, [], [1], 0.0, ()).token == 2
    ends = SamplingParams(temperature=0.0, min_tokens=2)
    assert choose(logits, ends, [], [3], 0.0, {1}).token == 2
    with pytest.raises(RuntimeError, match="non-finite"):
        choose(torch.full((4,), torch.nan), params, [1], [], 0.0, ())


def test_the_tree_finds_what_a_list_finds() -> None:
    chance, tree, kept = random.Random(0), PrefixTree(), dict[int, tuple[int, ...]]()
    for seq in range(400):
        base = chance.choice([*kept.values()] or [()])
        cut = chance.randrange(len(base) + 1)
        tokens = base[:cut] + tuple(chance.randrange(3) for _ in range(chance.randrange(1, 9)))
        found = tree.longest(tokens)
        best = max((common(tokens, other) for other in kept.values()), default=0)
        assert (0 if found is None else found[1]) == best
        if found is not None:
            assert common(tokens, kept[found[0]]) == best
        kept[seq] = tokens
        for surplus in tree.add(tokens, seq):
            gone = kept.pop(surplus)
            assert any(other[: len(gone)] == gone for other in kept.values())
        if chance.random() < 0.2:
            kept.pop(tree.least_recent())
        assert sorted(tree.seqs()) == sorted(kept)
        assert len(tree) == len(kept)
    while kept:
        kept.pop(tree.least_recent())
    assert tree.least_recent() is None


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def test_broken_bytes_do_not_end_the_text() -> None:
    """As of a tokenizer with byte fallback: bytes that are no character, then a letter."""
    vocabulary = {"<unk>": 0, "a": 1, "<0xE2>": 2, "<0x0A>": 3}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=backend), ("aa",), [1])
    text = "".join(stream.add(token) for token in (3, 2, 1, 2, 1)) + stream.end()
    assert text.startswith("\n")
    assert text.endswith("a")


def test_stop_strings_wait_for_min_tokens() -> None:
    stream = TextStream(byte_tokenizer(), ("b",))
    ids = byte_tokenizer()("abcb", add_special_tokens=False)["input_ids"]
    for number, token in enumerate(ids):
        stream.add(token, may_stop=number > 1)
    assert (stream.text, stream.is_stopped) == ("abc", True)
