"""A `TokenChooser` draws from the distributions of transformers' logits warpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import FLAGS, SLOW_INLINE, load
from cases.inside import split_steps
from cases.slowly import slow_but
from cases.tiny_models import random_tokens
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from offload.decode.gpu.prepared_steps import BurstLength
from offload.decode.sampling import MOST_STEPS, Draws, Sampler, SamplingOptions, TokenChooser
from offload.runtime.token_loop import fast_options

STOP = StoppingCriteriaList([MaxLengthCriteria(10), EosTokenCriteria(2)])


def choose(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    chooser = TokenChooser(*logits.shape, logits.device)
    num_rows = len(logits)
    draws = Draws.of([Sampler(options) for _ in range(num_rows)])
    if draws is None:
        return chooser.choose(logits)
    chooser.use(draws, range(num_rows), range(num_rows))
    return chooser.choose(logits, torch.arange(num_rows))


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 2.0, 5.0]])
    assert choose(logits, SamplingOptions()).tolist() == [1, 0]


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.6),
        SamplingOptions(temperature=1.3, top_k=5),
        SamplingOptions(temperature=1.0, top_p=0.7),
        SamplingOptions(temperature=0.8, top_k=6, top_p=0.6),
        SamplingOptions(temperature=0.8, top_k=100, top_p=0.05),
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_stock_warpers(options):
    torch.manual_seed(7)
    logits = torch.randn(1, 12) * 2
    scores = TemperatureLogitsWarper(options.temperature)(None, logits)
    if options.top_k:
        scores = TopKLogitsWarper(options.top_k)(None, scores)
    if options.top_p < 1.0:
        scores = TopPLogitsWarper(options.top_p)(None, scores)
    expected = scores.softmax(-1)[0].double()
    num_draws = 4_000
    counts = torch.bincount(choose(logits.repeat(num_draws, 1), options), minlength=12)
    assert not bool(counts[expected == 0].any())
    # Five standard deviations of a binomial count.
    slack = 5 * (num_draws * expected * (1 - expected)).sqrt()
    assert bool(((counts - num_draws * expected).abs() <= slack).all())


def test_random_numbers_do_not_depend_on_how_many_steps_come_at_a_time() -> None:
    def tokens(sizes: list[int], seed: int) -> list[int]:
        """Tokens of steps with two rows between others, from one position on."""
        chance, logits = torch.Generator().manual_seed(seed), torch.zeros(4, 50)
        chooser, found = TokenChooser(4, 50, logits.device), list[int]()
        sampler = Sampler(SamplingOptions(1.0), 2, chance)
        for size in sizes:
            draws = Draws.of([sampler], size)
            assert draws is not None
            chooser.use(draws, [2, 0], [90 + len(found) // 2, 7 + len(found) // 2])
            for _ in range(size):
                step = len(found) // 2
                chosen = chooser.choose(logits, torch.tensor([7 + step, -1, 90 + step, -1]))
                assert chosen[1] == chosen[3] == 0
                found += chosen[[2, 0]].tolist()
            sampler.take(size)
        return found

    wanted = tokens([1] * 40 + [MOST_STEPS], 3)
    assert tokens([7, 33, MOST_STEPS], 3) == wanted
    assert len({*wanted}) > 30
    assert tokens([7, 33, MOST_STEPS], 4) != wanted


@pytest.mark.parametrize("num_steps", slow_but([1, 4, 7], 1, 4))
@pytest.mark.parametrize("backend", [SLOW_INLINE, FLAGS])
def test_a_second_text_after_one_seed(
    backend: tuple[str, str],
    num_steps: int,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not depend on how many steps came at a time when the first ended."""
    monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: num_steps))
    model, tokens = load(tiny_folders["llama"], "full", backend), random_tokens(1, 60)
    split_steps(model, 1)

    def texts(eos_token_id: int | None) -> list[list[int]]:
        torch.manual_seed(0)
        options = {"do_sample": True, "max_new_tokens": 24, "eos_token_id": eos_token_id}
        outs = [model.generate(tokens, pad_token_id=0, **options) for _ in range(2)]
        return [out[0, 60:].tolist() for out in outs]

    free = texts(None)
    end = next(i for i in range(8, 16) if free[0][i] not in free[0][:i])
    first, second = texts(free[0][end])
    assert first == free[0][: end + 1]
    assert second == free[1][: len(second)]


def options_of(processors: list[Any], stop: Any = STOP, **generation: Any) -> Any:
    config = GenerationConfig(**generation)
    return fast_options(LogitsProcessorList(processors), stop, config)


def test_what_the_step_can_choose():
    warpers = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(7), TopPLogitsWarper(0.9)]
    assert options_of([]) == SamplingOptions()
    assert options_of([], do_sample=True) == SamplingOptions(temperature=1.0)
    assert options_of(warpers, do_sample=True) == SamplingOptions(0.5, 7, 0.9)
    assert options_of(warpers[1:], do_sample=True) == SamplingOptions(1.0, 7, 0.9)


def test_what_the_stock_loop_must_choose():
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    assert options_of([penalty]) is None
    assert options_of([TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.5)], do_sample=True) is None
    assert options_of([TopPLogitsWarper(0.9, min_tokens_to_keep=2)], do_sample=True) is None
    assert options_of([], return_dict_in_generate=True) is None
    assert options_of([], output_scores=True) is None
    assert options_of([], StoppingCriteriaList([*STOP, MaxTimeCriteria(1.0)])) is None
