"""Every mode of generate() against the stock model: the same tokens, and nothing left behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases.tiny_models import EOS_TOKEN, make_tiny_model, random_tokens
from transformers import TextIteratorStreamer, TextStreamer, pipeline

Pair = tuple[Any, Any]


def both(pair: Pair, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """generate() of the stock and the offloaded model, from the same random state."""
    outputs = []
    for model in pair:
        torch.manual_seed(7)
        outputs.append(model.generate(*args, **kwargs))
    return outputs[0], outputs[1]


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left."""
    width = max(lengths)
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return {"input_ids": random_tokens(len(lengths), width), "attention_mask": mask}


@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 40},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "length_penalty": 0.5},
        {"num_beams": 3, "do_sample": True},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "prefill_chunk_size": 16},
        {"do_sample": False, "cache_implementation": "dynamic"},
    ],
    ids=lambda mode: "-".join(mode),
)
@pytest.mark.parametrize(
    "lengths", [(40,), (40, 9, 25), (40, 0, 9)], ids=["single", "padded-batch", "empty-row"]
)
def test_modes(llama_pair: Pair, lengths: tuple[int, ...], mode: dict[str, Any]) -> None:
    expected, got = both(llama_pair, **left_padded(*lengths), **mode, max_new_tokens=30)
    assert torch.equal(got, expected)


def test_more_rows_than_a_native_step(llama_pair: Pair) -> None:
    lengths = [5 + 3 * i for i in range(21)]
    expected, got = both(llama_pair, **left_padded(*lengths), max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)


def test_prompt_lookup(llama_pair: Pair) -> None:
    prompt = random_tokens(1, 12).repeat(1, 6)
    expected, got = both(
        llama_pair, prompt, prompt_lookup_num_tokens=6, max_new_tokens=40, do_sample=False
    )
    assert torch.equal(got, expected)
    plain = llama_pair[1].generate(prompt, max_new_tokens=40, do_sample=False)
    assert torch.equal(got, plain)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("assistant", ["stock", "offloaded", "itself"])
def test_assistant_model(
    llama_pair: Pair, offloaded_models: dict[str, Any], assistant: str, do_sample: bool
) -> None:
    helper = {
        "stock": make_tiny_model("llama", num_hidden_layers=1),
        "offloaded": offloaded_models["qwen2"],
        "itself": llama_pair[1],
    }[assistant]
    options = {"max_new_tokens": 30, "do_sample": do_sample, "assistant_model": helper}
    expected, got = both(llama_pair, random_tokens(1, 40), **options)
    assert torch.equal(got, expected)


def test_text_streamer(
    llama_pair: Pair, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = tokenizer("Hello", return_tensors="pt")
    texts = []
    for model in llama_pair:
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        model.generate(**inputs, max_new_tokens=20, do_sample=False, streamer=streamer)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_iterator_streamer_in_a_thread(llama_pair: Pair, tokenizer: Any) -> None:
    from threading import Thread

    inputs = tokenizer("Hello", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    options = {**inputs, "max_new_tokens": 20, "do_sample": False, "streamer": streamer}
    thread = Thread(target=llama_pair[1].generate, kwargs=options)
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    expected = llama_pair[0].generate(**inputs, max_new_tokens=20, do_sample=False)
    assert streamed == tokenizer.decode(expected[0])


def test_stop_strings(llama_pair: Pair, tokenizer: Any) -> None:
    prompt = random_tokens(1, 20)
    free = llama_pair[0].generate(prompt, max_new_tokens=30, do_sample=False)
    stop = tokenizer.decode(free[0, 30:32])
    options = {"stop_strings": [stop], "tokenizer": tokenizer, "max_new_tokens": 30}
    expected, got = both(llama_pair, prompt, do_sample=False, **options)
    assert torch.equal(got, expected)
    assert got.shape[1] < free.shape[1]


def test_eos_in_a_batch(llama_pair: Pair) -> None:
    """Rows that are done wait, padded, for the others."""
    inputs = left_padded(30, 12, 20)
    free = llama_pair[0].generate(**inputs, max_new_tokens=25, do_sample=False)
    eos = [EOS_TOKEN, int(free[0, 35]), int(free[2, 45])]
    expected, got = both(llama_pair, **inputs, max_new_tokens=25, do_sample=False, eos_token_id=eos)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_returned_dict(llama_pair: Pair, num_beams: int) -> None:
    expected, got = both(
        llama_pair,
        **left_padded(30, 18),
        num_beams=num_beams,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("logits", "scores"):
        for ours, theirs in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert got.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def test_conversation(llama_pair: Pair) -> None:
    """Each turn passes the cache of the one before and the whole history."""
    stock, offloaded = llama_pair
    history, cache = random_tokens(1, 30), offloaded.new_cache()
    for turn in range(3):
        history = torch.cat([history, random_tokens(1, 21, seed=turn)], dim=1)
        expected = stock.generate(history, max_new_tokens=10, do_sample=False)
        got = offloaded.generate(history, past_key_values=cache, max_new_tokens=10, do_sample=False)
        assert torch.equal(got, expected)
        assert cache.kv_lens == [got.shape[1] - 1]
        history = got


def test_one_prompt_continued_twice(llama_pair: Pair) -> None:
    stock, offloaded = llama_pair
    prompt, cache = random_tokens(1, 50), offloaded.new_cache()
    offloaded(prompt, past_key_values=cache)
    for seed in (1, 2):
        question = torch.cat([prompt, random_tokens(1, 8, seed=seed)], dim=1)
        expected = stock.generate(question, max_new_tokens=15, do_sample=False)
        options = {"max_new_tokens": 15, "do_sample": False}
        got = offloaded.generate(question, past_key_values=copy.deepcopy(cache), **options)
        assert torch.equal(got, expected)
    assert cache.kv_lens == [50]


def test_input_embeddings(llama_pair: Pair) -> None:
    embeds = llama_pair[0].get_input_embeddings()(random_tokens(2, 20)).detach()
    expected, got = both(llama_pair, inputs_embeds=embeds, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)


def test_inputs_that_stock_models_ignore(llama_pair: Pair) -> None:
    """What some tokenizers and older code pass."""
    tokens = random_tokens(2, 20)
    ignored = {"token_type_ids": torch.ones_like(tokens), "cache_position": torch.arange(20)}
    logits = [model(tokens, **ignored).logits for model in llama_pair]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_pipeline(llama_pair: Pair, tokenizer: Any) -> None:
    texts = []
    for model in llama_pair:
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts.append(
            generate(["Hello there", "Hi"], max_new_tokens=12, do_sample=False, batch_size=2)
        )
    assert texts[0] == texts[1]


def test_pipeline_finds_the_tokenizer(llama_pair: Pair, tokenizer: Any) -> None:
    model = llama_pair[1]
    generate = pipeline("text-generation", model=model, tokenizer=model.name_or_path)
    got = generate("Hello there", max_new_tokens=5, do_sample=False)
    generate = pipeline("text-generation", model=llama_pair[0], tokenizer=tokenizer)
    assert got == generate("Hello there", max_new_tokens=5, do_sample=False)


def test_compute_transition_scores(llama_pair: Pair) -> None:
    expected, got = both(
        llama_pair,
        random_tokens(1, 20),
        num_beams=2,
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = [
        model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
        for model, out in zip(llama_pair, (expected, got), strict=True)
    ]
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-3, atol=1e-3)


def test_beams_share_the_prompt(offloaded_models: dict[str, Any]) -> None:
    """4 beams of a long prompt take the pages of one prompt and their own last pages."""
    model = offloaded_models["llama"]
    model.generate(random_tokens(1, 320), num_beams=4, max_new_tokens=20, do_sample=False)
    most_pages = model.offload_stats().kv_host_bytes / model.kv_store.page_bytes / 3
    assert 320 / 16 < most_pages <= 320 / 16 + 4 * 3


def test_statistics(llama_pair: Pair) -> None:
    model = llama_pair[1]
    model.generate(random_tokens(1, 30), max_new_tokens=10, do_sample=False, min_new_tokens=10)
    stats = model.offload_stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (30, 9)
    assert stats.prefill_tokens_per_second > 0
    assert stats.decode_tokens_per_second > 0
    assert stats.kv_host_bytes == 3 * 3 * model.kv_store.page_bytes  # 39 tokens, 3 layers
    assert stats.kv_device_bytes == 0


def test_torch_keeps_its_threads(offloaded_models: dict[str, Any]) -> None:
    """One thread between the passes, the configured number in prefill, and then as before."""
    seen = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) == 5:
            raise RuntimeError("enough")
        return scores

    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="enough"):
            offloaded_models["llama"].generate(
                random_tokens(1, 9), max_new_tokens=9, logits_processor=[note]
            )
        assert seen == [1] * 5
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
