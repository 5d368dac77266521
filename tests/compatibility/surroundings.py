"""What a model is loaded from, and what it is used with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from cases.tiny_models import TINY_MODELS, make_tiny_model, random_tokens, write_gguf
from compatibility.table import SINGLE, Feature, Side, padded
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    TextIteratorStreamer,
    pipeline,
)


def generates(name: str, **changes: Any) -> Callable[[Side], None]:
    """A tiny model with another config, a prompt and a padded batch."""

    def run(side: Side) -> None:
        model = side.load_changed(name, **changes)
        side.generate(random_tokens(1, 70), model=model)
        side.generate(**padded(30, 12), model=model)

    return run


def rope(rope_type: str, max_positions: int = 512, **options: Any) -> Callable[[Side], None]:
    """70 + 8 tokens: past the 64 positions of a first training, where the type knows of one."""
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **options}
    return generates("llama", rope_parameters=parameters, max_position_embeddings=max_positions)


def yarn_as_qwen_documents(side: Side) -> None:
    """A factor in the config, and max_position_embeddings left at what was trained."""
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = side.load_changed("qwen2", rope_parameters=parameters, max_position_embeddings=64)
    side.generate(random_tokens(1, 150), model=model)


def from_gguf(side: Side) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tiny.gguf"
        write_gguf(path, make_tiny_model("llama"), side.tokenizer)
        if side.is_ours:
            model = side.load(path, cache_dir=name)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, gguf_file=path.name).eval()
        side.generate(**SINGLE, model=model)


def from_shards(side: Side) -> None:
    with tempfile.TemporaryDirectory() as name:
        make_tiny_model("llama").save_pretrained(name, max_shard_size="100KB")
        side.generate(**SINGLE, model=side.load(Path(name)))


def in_dtype(dtype: str) -> Callable[[Side], torch.Tensor]:
    def run(side: Side) -> torch.Tensor:
        logits = side.logits(**SINGLE, model=side.load(dtype=dtype)).float()
        return logits / logits.abs().max()

    return run


def unsupported(side: Side) -> None:
    with tempfile.TemporaryDirectory() as name:
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=64)).save_pretrained(name)
        side.generate(**SINGLE, model=side.load(Path(name)))


def beyond_the_window(side: Side) -> None:
    model = side.load_changed("mistral", sliding_window=32)
    side.generate(random_tokens(1, 40), model=model)


def beyond_the_positions(side: Side) -> None:
    side.generate(random_tokens(1, 510))


def option(**options: Any) -> Callable[[Side], None]:
    """A case with options of from_pretrained."""

    def run(side: Side) -> None:
        side.generate(**SINGLE, model=side.load(**options))

    return run


def quantised(side: Side) -> None:
    """A checkpoint that says its weights are."""
    with tempfile.TemporaryDirectory() as name:
        make_tiny_model("llama").save_pretrained(name)
        path = Path(name) / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] = {"quant_method": "hqq"}
        path.write_text(json.dumps(config))
        side.load(Path(name))


def saved_again(side: Side) -> torch.Tensor:
    """`save_pretrained`, and the stock model from it."""
    with tempfile.TemporaryDirectory() as name:
        side.model.save_pretrained(name)
        return side.generate(
            **SINGLE, model=AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
        )


def weights(side: Side) -> Any:
    names = sorted(side.model.state_dict())
    return [names, side.model.num_parameters(), side.model.get_memory_footprint()]


def text_pipeline(**options: Any) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        make = pipeline("text-generation", model=side.model, tokenizer=side.tokenizer)
        texts = ["Hello there", "Hi", "and a third, longer one"]
        return make(texts, max_new_tokens=8, do_sample=False, **options)

    return run


def chat_pipeline(side: Side) -> Any:
    side.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    make = pipeline("text-generation", model=side.model, tokenizer=side.tokenizer)
    return make([{"role": "user", "content": "Hello"}], max_new_tokens=8, do_sample=False)


def harness(kind: str, arguments: list[Any]) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        model = HFLM(pretrained=side.model, tokenizer=side.tokenizer, batch_size=3, max_length=256)
        return getattr(model, kind)([Instance(kind, {}, a, i) for i, a in enumerate(arguments)])

    return run


def iterated(side: Side) -> str:
    """`generate` in one thread, its text in another."""
    streamer = TextIteratorStreamer(side.tokenizer, timeout=60)
    thread = Thread(
        target=side.model.generate,
        kwargs={**SINGLE, "max_new_tokens": 8, "do_sample": False, "streamer": streamer},
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


def in_threads(side: Side) -> list[list[int]]:
    """Six threads on one model, each with its own prompt."""
    prompts = [random_tokens(1, 20 + 9 * seed, seed=seed) for seed in range(6)]
    found: list[list[int]] = [[] for _ in prompts]

    def run(i: int) -> None:
        found[i] = side.model.generate(prompts[i], max_new_tokens=20, do_sample=False)[0].tolist()

    threads = [Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def in_turns(side: Side) -> list[torch.Tensor]:
    """Two caches of one model, a token each at a time."""
    caches = [side.new_cache(), side.new_cache()]
    pieces = [random_tokens(1, 30, seed=seed).split([20, *[1] * 10], dim=1) for seed in (1, 2)]
    return [
        side.logits(piece, past_key_values=cache)
        for both in zip(*pieces, strict=True)
        for cache, piece in zip(caches, both, strict=True)
    ]


_UNTIL = {"until": ["e"], "max_gen_toks": 8, "do_sample": False}
_FACTORS = [1.0 + i / 16 for i in range(16)]
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

LOADING = [
    *(Feature(f"`{name}`", generates(name)) for name in TINY_MODELS),
    Feature(
        "another model type (gpt2)",
        unsupported,
        "on a CPU, by the modules of transformers (docs/models.md)",
    ),
    Feature("rope type `linear`", rope("linear", factor=4.0)),
    Feature("rope type `dynamic`", rope("dynamic", max_positions=64, factor=4.0)),
    Feature("rope type `yarn`", rope("yarn", **_YARN)),
    Feature(
        "rope type `yarn`, beyond `max_position_embeddings`, as Qwen2.5 documents it",
        yarn_as_qwen_documents,
    ),
    Feature(
        "rope type `longrope`",
        rope("longrope", **_YARN, short_factor=_FACTORS, long_factor=[2 * x for x in _FACTORS]),
    ),
    Feature("a sliding window, within", generates("mistral", sliding_window=128)),
    Feature(
        "a sliding window, beyond", beyond_the_window, "its layers would need another attention"
    ),
    Feature(
        "more tokens than the model's positions", beyond_the_positions, "what comes is no language"
    ),
    Feature("safetensors in shards", from_shards),
    Feature(
        "GGUF",
        from_gguf,
        "in one process, and on GPUs, packed matrices stay as they are; else all is dequantised "
        "once into bfloat16, and once more for `dtype` float16 or float32: the file's weights, "
        "rounded once",
    ),
    Feature('`dtype="bfloat16"`: logits within 5 %', in_dtype("bfloat16"), tolerance=0.5),
    Feature('`dtype="float16"`: logits within 1 %', in_dtype("float16"), tolerance=0.1),
    Feature('`dtype="float64"`', in_dtype("float64"), "the kernels have no such rows"),
    Feature("`device_map`", option(device_map="cpu"), "`device` says where the model runs"),
    Feature(
        "`attn_implementation`", option(attn_implementation="eager"), "attention is this package's"
    ),
    Feature(
        "a quantised checkpoint",
        quantised,
        "GGUF is taken",
        reference=lambda side: None,  # the stock model needs another package
    ),
    Feature(
        "`quantization_config`",
        option(quantization_config={"load_in_4bit": True}),
        "quantised weights are not supported",
        reference=lambda side: None,
    ),
    Feature("`save_pretrained`, and the stock model from it", saved_again),
    Feature("`state_dict`, `num_parameters`, `get_memory_footprint`", weights),
]

USERS = [
    Feature("`pipeline`", text_pipeline()),
    Feature("`pipeline` in batches", text_pipeline(batch_size=2, return_full_text=False)),
    Feature("`pipeline` of chat messages", chat_pipeline),
    Feature(
        "lm-eval's `HFLM`: `loglikelihood`",
        harness("loglikelihood", [("Hello the", "re"), ("", "x y z"), ("a", "b")]),
    ),
    Feature(
        "lm-eval's `HFLM`: `loglikelihood_rolling`",
        harness("loglikelihood_rolling", [("A text, longer than the window. " * 20,)]),
    ),
    Feature(
        "lm-eval's `HFLM`: `generate_until`",
        harness("generate_until", [("Hello", _UNTIL), ("hi there", _UNTIL)]),
    ),
    Feature("`TextIteratorStreamer`, `generate` in a thread", iterated),
    Feature(
        "several threads on one model",
        in_threads,
        "they take turns; a logits processor, stopping criterion or streamer must not wait for "
        "another thread's call of the same model, which waits for this one",
    ),
    Feature("several caches in alternating calls", in_turns),
]
