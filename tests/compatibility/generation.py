"""Calls of generate(), in the manner of transformers' own tests of generation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from cases.tiny_models import make_tiny_model, random_tokens
from compatibility.table import REPETITIVE, SINGLE, Feature, Side, padded
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
    WatermarkingConfig,
)

_DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
_SAMPLE = {"do_sample": True}


def calls(*several: dict[str, Any]) -> Callable[[Side], None]:
    """Each with one prompt and with a left-padded batch."""

    def run(side: Side) -> None:
        for options in several:
            for inputs in (SINGLE, padded(30, 12, 21)):
                side.generate(**inputs, **options)

    return run


def batch(*several: dict[str, Any]) -> Callable[[Side], None]:
    """Each with a left-padded batch."""

    def run(side: Side) -> None:
        for options in several:
            side.generate(**padded(30, 12, 21), **options)

    return run


def call(inputs: dict[str, Any], **options: Any) -> Callable[[Side], None]:
    """One call."""

    def run(side: Side) -> None:
        side.generate(**inputs, **options)

    return run


def transition_scores(side: Side) -> list[torch.Tensor]:
    scores = []
    for beams in (1, 2):
        out = side.generate(**SINGLE, **_DICT, num_beams=beams)
        indices = out.beam_indices if beams > 1 else None
        scores.append(side.model.compute_transition_scores(out.sequences, out.scores, indices))
    return scores


def assisted(**options: Any) -> Callable[[Side], None]:
    """By a stock model, by one of the side's own kind, and by the model itself."""

    def run(side: Side) -> None:
        small = make_tiny_model("llama", num_hidden_layers=1)
        for assistant in (small, side.load_changed("llama", num_hidden_layers=1), side.model):
            side.generate(**SINGLE, **options, assistant_model=assistant)

    return run


def embeddings(side: Side) -> torch.Tensor:
    embeds: torch.Tensor = side.model.get_input_embeddings()(SINGLE["input_ids"])
    return embeds.detach()


def by_embeddings(side: Side) -> None:
    side.generate(inputs_embeds=embeddings(side))
    side.generate(inputs_embeds=embeddings(side), num_beams=3)
    side.generate(**SINGLE, inputs_embeds=embeddings(side))


def own_processors(side: Side) -> None:
    def forbid_odd(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 1::2] = -float("inf")
        return scores

    for options in ({}, _SAMPLE, {"num_beams": 3}):
        processors = LogitsProcessorList([forbid_odd])
        side.generate(**padded(20, 9), **options, logits_processor=processors)


def own_criteria(side: Side) -> None:
    def stop(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= 44
        return torch.full((len(input_ids),), done, dtype=torch.bool)

    for options in ({}, {"num_beams": 3}):
        side.generate(**SINGLE, **options, stopping_criteria=StoppingCriteriaList([stop]))


def stop_strings(side: Side) -> None:
    free = side.generate(**SINGLE)
    stop = side.tokenizer.decode(free[0, 43:45])
    side.generate(**SINGLE, stop_strings=[stop], tokenizer=side.tokenizer)


def several_eos(side: Side) -> None:
    inputs = padded(30, 12, 20)
    free = side.generate(**inputs)
    side.generate(**inputs, eos_token_id=[257, int(free[0, 33]), int(free[2, 35])])


def healed(side: Side) -> None:
    inputs = side.tokenizer("Hello h", return_tensors="pt")
    side.generate(inputs["input_ids"], token_healing=True, tokenizer=side.tokenizer)


def streamed(side: Side) -> list[torch.Tensor]:
    class Kept(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            pieces.append(value.flatten())

    pieces: list[torch.Tensor] = []
    for options in ({}, _SAMPLE):
        side.generate(**SINGLE, **options, streamer=Kept(side.tokenizer))
    return pieces


def continued(side: Side) -> list[int]:
    """The returned cache goes into the next call, as it is and cropped."""
    first = side.generate(**SINGLE, return_dict_in_generate=True)
    lengths = [first.past_key_values.get_seq_length()]
    second = side.generate(
        first.sequences, past_key_values=first.past_key_values, return_dict_in_generate=True
    )
    cache = second.past_key_values
    lengths.append(cache.get_seq_length())
    cache.crop(45 - cache.get_seq_length())
    side.generate(second.sequences[:, :50], past_key_values=cache)
    return [*lengths, cache.get_seq_length()]


def shared_prefix(side: Side) -> None:
    """Prompts that start alike continue copies of one cache."""
    cache = side.new_cache()
    with torch.no_grad():
        side.model(**SINGLE, past_key_values=cache)
    for seed in (1, 2, 3):
        tokens = torch.cat([SINGLE["input_ids"], random_tokens(1, 9, seed=seed)], dim=1)
        side.generate(tokens, past_key_values=copy.deepcopy(cache))


def conversation(side: Side) -> None:
    """Turns of a padded batch over one cache."""
    cache, history = side.new_cache(), padded(25, 14)
    tokens, mask = history["input_ids"], history["attention_mask"]
    for turn in range(3):
        out = side.generate(tokens, attention_mask=mask, past_key_values=cache, eos_token_id=[])
        tokens = torch.cat([out, random_tokens(2, 3 + 8 * turn, seed=turn)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)


def custom_loop(side: Side) -> None:
    """A decoding loop of the caller's."""

    def loop(
        model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any
    ) -> torch.Tensor:
        cache = kwargs["past_key_values"]
        for _ in range(generation_config.max_new_tokens):
            out = model(input_ids[:, cache.get_seq_length() :], past_key_values=cache)
            input_ids = torch.cat([input_ids, out.logits[:, -1:].argmin(-1)], dim=1)
        return input_ids

    side.generate(**SINGLE, custom_generate=loop)


def synced(side: Side) -> None:
    """As FSDP and DeepSpeed ask for it: all processes go on until the last is done."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for options in ({}, {"num_beams": 3}):
            side.generate(**SINGLE, **options, synced_gpus=True)
    finally:
        distributed.destroy_process_group()


def own_config(side: Side) -> None:
    config = GenerationConfig(max_new_tokens=9, do_sample=True, top_k=20, eos_token_id=257)
    side.generate(**SINGLE, generation_config=config, do_sample=True)
    side.generate(**SINGLE, generation_config=config, do_sample=True, num_beams=2)


def guided(side: Side) -> None:
    side.generate(**SINGLE, guidance_scale=1.5)
    negative = random_tokens(1, 10, seed=5)
    side.generate(**SINGLE, guidance_scale=2.0, negative_prompt_ids=negative)


def allowed_tokens(side: Side) -> None:
    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return list(range(50 + row, 90))

    for options in ({}, {"num_beams": 3}):
        side.generate(**padded(20, 9), **options, prefix_allowed_tokens_fn=allowed)


_WARPERS = [
    {"temperature": 0.7},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"typical_p": 0.8},
    {"epsilon_cutoff": 0.001},
    {"eta_cutoff": 0.001},
    {"top_h": 0.5},
]
_PROCESSORS = [
    {"repetition_penalty": 1.3},
    {"encoder_repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[40], [50, 60]]},
    {"suppress_tokens": [7, 8, 9]},
    {"begin_suppress_tokens": [7, 8, 9]},
    {"sequence_bias": [[[65], 9.0]]},
    {"exponential_decay_length_penalty": (2, 1.3)},
    {"forced_eos_token_id": 257},
    {"forced_bos_token_id": 256},
    {"min_new_tokens": 12, "eos_token_id": list(range(0, 320, 3))},
    {"min_length": 36, "eos_token_id": list(range(0, 320, 3))},
    {"renormalize_logits": True},
    {"remove_invalid_values": True},
]

CALLS = [
    Feature("greedy", calls({}, {"max_length": 48}, {"use_cache": False})),
    Feature("greedy, with scores and logits", calls(_DICT, {**_DICT, "use_cache": False})),
    Feature("a batch of 21 rows", call(padded(*range(5, 47, 2)))),
    Feature("without a prompt", lambda side: [side.generate()]),
    Feature("sampling with a seed", batch(_SAMPLE, *({**_SAMPLE, **x} for x in _WARPERS))),
    Feature("sampling, with scores and logits", calls({**_SAMPLE, **_DICT})),
    Feature("`num_return_sequences`", calls({**_SAMPLE, "num_return_sequences": 3})),
    Feature(
        "beam search",
        calls(
            {"num_beams": 4},
            {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5},
            {"num_beams": 3, "early_stopping": True, "use_cache": False},
        ),
    ),
    Feature("beam search, with scores, logits and beams", calls({"num_beams": 3, **_DICT})),
    Feature("beam search that samples", calls({"num_beams": 3, **_SAMPLE, **_DICT})),
    Feature("`compute_transition_scores`", transition_scores),
    Feature("assistant model, greedy", assisted()),
    Feature("assistant model, with scores and logits", assisted(**_DICT)),
    Feature("assistant model, sampling", assisted(**_SAMPLE)),
    Feature(
        "assistant model with a constant number of tokens",
        assisted(num_assistant_tokens=5, num_assistant_tokens_schedule="constant"),
    ),
    Feature("prompt lookup, greedy", call(REPETITIVE, prompt_lookup_num_tokens=6)),
    Feature(
        "prompt lookup, with scores and logits",
        call(REPETITIVE, prompt_lookup_num_tokens=6, **_DICT),
    ),
    Feature("prompt lookup, sampling", call(REPETITIVE, prompt_lookup_num_tokens=6, **_SAMPLE)),
    Feature("penalties, forced, biased and forbidden tokens", batch(*_PROCESSORS)),
    Feature("processors with beams", batch(*({"num_beams": 2, **x} for x in _PROCESSORS[:6]))),
    Feature("a `logits_processor` of the caller's", own_processors),
    Feature("`prefix_allowed_tokens_fn`", allowed_tokens),
    Feature("`guidance_scale`, with and without a negative prompt", guided),
    Feature("`watermarking_config`", calls({"watermarking_config": WatermarkingConfig()})),
    Feature("a `stopping_criteria` of the caller's", own_criteria),
    Feature("`stop_strings`", stop_strings),
    Feature("several `eos_token_id` in a batch", several_eos),
    Feature("`max_time`", call(SINGLE, max_time=60.0, max_length=50)),
    Feature("a streamer", streamed),
    Feature("a `GenerationConfig` of the caller's", own_config),
    Feature("`inputs_embeds`, with and without ids, with beams", by_embeddings),
    Feature("continuing a returned cache, cropped and not", continued),
    Feature("continuing deep copies of one prefix", shared_prefix),
    Feature("turns of a batch over one cache", conversation),
    Feature("`prefill_chunk_size`", calls({"prefill_chunk_size": 16})),
    Feature("`synced_gpus`", synced),
    Feature("`token_healing`", healed),
    Feature("`custom_generate`, a callable", custom_loop),
]


OPTIONS = [
    Feature("right-padded prompts", call(padded(30, 12, side="right"))),
    Feature('`cache_implementation="dynamic"`', call(SINGLE, cache_implementation="dynamic")),
    Feature('`cache_implementation="static"`', call(SINGLE, cache_implementation="static")),
    Feature(
        '`cache_implementation="offloaded"`',
        call(SINGLE, cache_implementation="offloaded"),
        reference=lambda side: None,  # the stock model wants a GPU
    ),
    Feature("`output_attentions` of a generation", call(SINGLE, **_DICT, output_attentions=True)),
    Feature(
        "`output_hidden_states` of a generation", call(SINGLE, **_DICT, output_hidden_states=True)
    ),
    Feature("group beams", call(SINGLE, num_beams=4, num_beam_groups=2), stock_refuses=True),
    Feature("contrastive search", call(SINGLE, penalty_alpha=0.6, top_k=4), stock_refuses=True),
    Feature("DoLa", call(SINGLE, dola_layers="low"), stock_refuses=True),
    Feature(
        "constrained beams", call(SINGLE, num_beams=3, force_words_ids=[[5, 6]]), stock_refuses=True
    ),
    Feature(
        "`assistant_early_exit`",
        call(SINGLE, assistant_early_exit=2),
        "the lean layers run all or none",
    ),
    Feature("an unknown option", call(SINGLE, max_lenght=5), stock_refuses=True),
    Feature(
        "continuous batching (`generate_batch`)",
        lambda side: len(side.model.generate_batch([[1, 2, 3]], max_new_tokens=3)),
        reference=lambda side: 1,  # the stock model takes a minute
    ),
]
