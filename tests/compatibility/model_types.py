"""Write docs/models.md, a row for each causal model type of transformers, from what a tiny random
model of it does: `python -m compatibility.model_types --write`, with tests/ in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import functools
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases.every_type import tiny_model_of
from transformers import CONFIG_MAPPING, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offload import OffloadedModel
from offload.models import FAMILIES, is_generic, lean_text
from offload.models.missing_features import NEVER_GENERIC, missing_features
from offload.runtime.config import runtime_config
from offload.runtime.generic_loading import generic_runtime
from offload.runtime.generic_model import generic_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LEAN, GENERIC, REFUSED, NOT_TRIED = "lean", "generic", "refused", "not tried"
_SECONDS = 60  # of one type
_HEAD = """\
# Model types

*lean*: native layers, on a CPU and with a GPU, with every feature. What a lean type's layers do not
compute, such as windows smaller than the context, is refused for llama, mistral, qwen2 and qwen3,
and makes a model of another type generic, as do gemma4_text's inputs of each layer, shared keys and
values, and experts (layers of phi3, gemma3_text, gemma4_text, olmo3 and gpt_oss attend through
windows and keep 64 tokens more: what goes back further is read again, as prompts are that share
only the front of an earlier one; padding between a sequence's tokens is no part of a window, where
transformers counts it; they refuse policies that tell layers or heads apart); so do several ranks,
or a GPU, where the table says so, and of phi3 `rope_type: longrope`, which reads a text anew where
it outgrows its short factors. *generic*: transformers' own modules, on a CPU or, with
`device="cuda"`, on a GPU. Attention of the layers that attend to all tokens is ours, their keys and
values are in the host store; layers with a window or a recurrent state keep transformers' cache,
whose bytes count in `max_memory`, too. The store, and pages on a GPU, keep the latents of latent
attention (deepseek_v2, deepseek_v3, glm4_moe_lite, kimi_linear, longcat_flash, minicpm3 and
others), one row a token and layer in the place of the keys and values of all heads: a value is the
first part of its key, and steps absorb their queries.
The modules of bloom, falcon and mpt compute attention themselves, which is replaced by ours. ALiBi
(bloom, mpt, and falcon with `alibi`) is a part of keys and queries: a key has 9 more dimensions for
its position, up to the next multiple of 16 (heads of 64 take 80 in the store, of 128 144).
Positions go to 2,097,152 where the config has no number of them. int8 rows and `sketch`, which
would round positions, are refused, and `auto` is `full`. Biases are exact; transformers rounds them
to the model's dtype, and falcon's always to bfloat16, so that a falcon with ALiBi and many heads is
refused in float32: it runs in bfloat16, in which its checkpoints are.
A generic model does `generate()`, greedy, sampled or with beams, with left padding
and several turns, and `forward()`, under [`auto`](policies.md#auto), `full`, `exact_topk`, `quest`,
`lychee_cluster`, `lfps`, `sketch` and `streaming_llm`. The engine and `offload serve` run it, with
shared prompts and sessions on disk: each sequence has its own windows and recurrent states ([which
prompts go on from them](how-to/many-requests.md#models-without-native-layers)). They refuse
`bamba`, `jamba` and `zamba`, whose modules forget their states where a prompt is read in parts:
these read a prompt at once, in a new cache, by `generate()`. [`offload
plan`](placement.md#offload-plan) counts the bytes of a model, and `offload eval` compares policies
on a CPU, a prompt at a time. Drafts but those of the next paragraph, scores of prompts, ranks and
`host_bytes_per_sequence` are refused, and so is `crop` of a cache with windows or recurrent
states. Before it is used,
each model must give the logits of the stock path for a padded prompt and three steps; it is refused
if it does not.
`generate(use_mtp=True)` and `offload generate --mtp N` draft on a CPU, one sequence at a time, with
the head for multi-token prediction of safetensors that have one (Qwen3.5, Qwen3-Next, DeepSeek-V3,
GLM-4.x); `num_assistant_tokens` says how many (1). Matrices of the head's layer stay as the files
have them: packed, or dense beside packed ones. A shape of Qwen3.5 with 200M parameters takes 65 ms
a token in bfloat16 on a thread without drafts, 44 with 1 draft and 28 with 3 where all are right,
101 and 130 where all are wrong; with layers in four bits 37, 24, 20, 61 and 112 (random weights,
the faster of two runs, a CPU that others used, its thread's own time). So 1 draft pays where more
than half are right.
Decode steps of qwen3_5, qwen3_5_moe and qwen3_next on a CPU go through fused kernels, with dense or
packed weights: the gated delta rule with its convolution, attention with its norms and gate, dense
MLPs, and experts with their router; a layer that was hooked runs its modules. With a GPU a step is
one CUDA graph as of lean layers; keys and values are placed as theirs, in int8, too. Modules may
not be changed or hooked then.
Of a multi-modal checkpoint the text part is loaded, if transformers has a causal class for it, and
images and sound are not read. It is lean where the type of its `text_config` is lean and the lean
layers compute all that `text_config` says, as in `gemma3` and in dense `gemma4` checkpoints; else
it is generic. That is so for types that are not in this table, too, such as `mistral3` (Ministral
3), `llava`, `internvl` and `smolvlm`.

Quantised safetensors of a generic type (GPTQ, AWQ, compressed-tensors, FP8, NVFP4, bitsandbytes
NF4, gpt-oss's MXFP4) and GGUF files of gemma2, gemma3, gemma4, gpt-oss, lfm2, nemotron, phi3,
qwen2moe, qwen3moe, qwen35, qwen35moe, stablelm and starcoder2 stay packed: linear layers,
embeddings and experts. What has a layout of its own is dequantised by itself; memory never holds
the dense model, and `weights="q8"`, `"q4"` or a dtype is refused. Of a dense checkpoint of a
generic type `weights="q8"` and `"q4"` pack linear layers and experts, but routers and matrices with
less than a 16th as many outputs as inputs; the head and embeddings of each layer become q8 (not of
gpt2 and others whose layers have no linear modules). phi3, gemma3_text, gemma4_text,
gpt_oss, qwen3_moe and mixtral pack what their files have so, too, and take a dtype; their dense
checkpoints, except gpt_oss's, take q8 and q4. GGUF files of other generic types, such as falcon and
glm4moe, are refused by name, and so is metadata that may change what is computed.

With `device="cuda"` modules, windows and recurrent states are on the GPU, in `max_memory` of that
GPU, and weights must fit it whole. Prompts are read by the modules, in slices. A decode step is one
CUDA graph: the modules as they are, over states that stay at their addresses, and our attention,
with keys and values placed as those of lean types, in int8, too. It has to give the stock path's
logits when the model is loaded. Where it cannot be captured or does not (modules that wait for the
GPU, chunked windows, layers whose heads differ, or layers that share keys beyond a window where not
all of these are attended to on the GPU), loading says so, and steps run module by module: the new
query, key and value of each layer in the store go to the CPU, which attends; a generation under
`auto` or `full` whose keys and values fit the GPU has them there.

Of the {total} types of transformers {version} whose class is a causal language model, {lean} are
lean, {generic} generic, {refused} refused, and {not_tried} were not tried. *generic* in the table
says that a tiny random model of the type in float32 gives the stock model's 24 greedy tokens behind
40, alone and in a padded batch. A slow test repeats it, and `make report` writes this file.

| type | | why |
| --- | --- | --- |
"""
Row = tuple[str, str]  # one of the four words, and why


@functools.cache
def judged(model_type: str) -> Row:
    """What becomes of a model type."""
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        return LEAN, "generic of several ranks" if family.peculiar else ""
    try:
        config = CONFIG_MAPPING[model_type]().to_dict()
        is_lean = lean_text(config) is not None
        if not (is_lean or is_generic(config)):
            return REFUSED, _early_reason(model_type, config)
        stock = _in_time(lambda: tiny_model_of(model_type))
        expected = _in_time(lambda: _tokens(stock))
    except Exception as error:  # of any kind
        return NOT_TRIED, f"no tiny model of it runs: {_short(error)}"
    options = {"num_threads": 1, "page_tokens": 16, "max_memory": {"cpu": "1GiB"}}
    is_text = stock.config is stock.config.get_text_config(decoder=True)
    try:
        if is_text:
            runtime = _in_time(lambda: generic_runtime(stock, runtime_config(**options), None))
            model = generic_model(runtime)
        else:
            model = _in_time(lambda: _loaded_text_part(stock, options))
    except ValueError as error:
        return REFUSED, _short(error)
    found = _in_time(lambda: _tokens(model))
    model._offload.close()
    if found != expected:
        return REFUSED, "other tokens than the stock model's"
    word = LEAN if is_lean else GENERIC
    return word, "" if is_text else f"its text part, {type(model).__name__}"


def _loaded_text_part(whole: Any, options: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        return OffloadedModel.from_pretrained(folder, **options)


def _early_reason(model_type: str, config: dict[str, Any]) -> str:
    parts = [x for x in missing_features(config) if "beside" in x or "state-space" in x]
    if model_type in NEVER_GENERIC:
        parts += ["its class has no attention, or does not use transformers' AttentionInterface"]
    return [*parts, "a model of text beside other models"][0]


def _tokens(model: Any) -> list[Any]:
    """Of one prompt, and of two in a padded batch."""
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :11] = ids[0, :11] = 0
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [
        model.generate(input_ids=ids[rows], attention_mask=mask[rows], **settings).tolist()
        for rows in (slice(1, 2), slice(0, 2))
    ]


def _in_time(compute: Callable[[], Any]) -> Any:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _short(error: Exception) -> str:
    words = " ".join(f"{error}".split()) or type(error).__name__
    words = re.sub(r"^unsupported model type '[^']*': ", "", words)
    words = words.partition("; docs/models.md")[0].replace("|", "/")
    return words if len(words) <= 120 else f"{words[:117]}..."


def rows() -> dict[str, Row]:
    """What docs/models.md says of each type."""
    found = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]*) \|$", DOCUMENT.read_text(), re.M)
    return {name: (word, why.strip()) for name, word, why in found}


def render() -> str:
    """The whole document."""
    import transformers

    judgements = {name: judged(name) for name in TYPES}
    counts = [word for word, _ in judgements.values()]
    head = _HEAD.format(
        total=len(TYPES),
        version=transformers.__version__,
        lean=counts.count(LEAN),
        generic=counts.count(GENERIC),
        refused=counts.count(REFUSED),
        not_tried=counts.count(NOT_TRIED),
    )
    return head + "".join(f"| `{name}` | {x} | {why} |\n" for name, (x, why) in judgements.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    logging.set_verbosity_error()
    document = render() if parser.parse_args().write else ""
    if document:
        DOCUMENT.write_text(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
