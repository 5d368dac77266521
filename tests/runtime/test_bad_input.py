"""What a user can get wrong: a clear error, before anything is allocated."""

from __future__ import annotations

import gc
import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.inside import runtime_of
from cases.tiny_models import make_tiny_model, random_tokens
from transformers import DynamicCache

from offload import HostBudgetError, OffloadedModel
from offload.loading.names import HubOptions
from offload.policies.exact_topk import ExactTopK
from offload.runtime.config import RuntimeConfig, runtime_config


@pytest.fixture
def model(offloaded_models: dict[str, Any]) -> Any:
    return offloaded_models["llama"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": ExactTopK}, ValueError, "a name or a policy object, such as .* got <class"),
        ({"policy": "qest"}, ValueError, "unknown policy 'qest'; available: .*full"),
        ({"dtype": "int8"}, ValueError, "unknown dtype 'int8'; available: auto, bfloat16"),
        ({"dtype": torch.float64}, ValueError, "unknown dtype 'torch.float64'"),
        ({"device": "tpu"}, ValueError, "unknown device 'tpu'; available: cpu"),
        ({"device": "cuda:x"}, ValueError, "unknown device 'cuda:x'; available: cpu, cuda"),
        ({"backend": "graph"}, ValueError, "backend='graph' needs device='cuda', but device is"),
        ({"backend": "eager"}, ValueError, "unknown backend 'eager'; available: graph, stream"),
        ({"device": "cpu:1"}, ValueError, "unknown device 'cpu:1'; available: cpu, cuda"),
        ({"device": "cuda:"}, ValueError, "unknown device 'cuda:'; available: cpu, cuda"),
        ({"deadline_seconds": 0}, ValueError, "deadline_seconds must be a positive number, got 0"),
        ({"deadline_seconds": "5"}, ValueError, "deadline_seconds must be a positive .*, got '5'"),
        ({"deadline_seconds": None}, ValueError, "deadline_seconds must be a positive .*, got No"),
        ({"num_threads": 0}, ValueError, "num_threads must be an integer of at least 1, got 0"),
        ({"num_threads": "2"}, ValueError, "num_threads must be an integer"),
        ({"prefill_slice_tokens": 0}, ValueError, "prefill_slice_tokens must be"),
        ({"page_tokens": 100}, ValueError, "page_tokens must be a power of two, got 100"),
        ({"max_memory": {"cpu": "lots"}}, ValueError, "cannot read 'lots'"),
        ({"max_memory": {"gpu": "1GiB"}}, ValueError, "unknown key 'gpu'"),
        ({"max_memory": {0: "1GiB"}}, ValueError, "device is 'cpu'"),
        ({"max_memory": {"cpu": 1000}}, HostBudgetError, r"weights need .* max_memory\['cpu'\]"),
        ({"load_in_4bit": True}, TypeError, "'load_in_4bit'; available: policy, .* gguf_file"),
        ({"torch_dtype": "auto"}, TypeError, "unknown keyword argument 'torch_dtype'"),
    ],
)
def test_options(
    tiny_folders: dict[str, Path], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        OffloadedModel.from_pretrained(tiny_folders["llama"], **options)


def test_the_signature_has_all_options_and_their_defaults() -> None:
    parameters = inspect.signature(OffloadedModel.from_pretrained).parameters
    options = {field.name: field for kind in (RuntimeConfig, HubOptions) for field in fields(kind)}
    assert [*parameters] == ["name_or_path", *options, "unknown"]
    for name in set(options) - {"policy", "dtype", "max_memory"}:  # which may be names, or None
        assert parameters[name].default == options[name].default, name


def test_unknown_runtime_option() -> None:
    with pytest.raises(TypeError, match="unknown option 'page_size'; available: policy, "):
        runtime_config(page_size=3)


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        RuntimeConfig().device = "cuda"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\[batch_size, seq_len\].*\[3\]"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "not empty"),
        ({"input_ids": torch.zeros(1, 3)}, "torch.float32"),
        ({"inputs_embeds": torch.zeros(1, 3, 5)}, r"seq_len, 96\]"),
        ({"input_ids": torch.tensor([[1, 320]])}, r"must be in 0..319, got 1..320"),
        ({"input_ids": torch.tensor([[-1, 3]])}, r"got -1..3"),
    ],
)
def test_inputs(model: Any, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**inputs)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"attention_mask": torch.ones(2, 9)}, r"\[2, 9\], but input_ids \[2, 10\].*\[2, 10\]"),
        ({"attention_mask": torch.ones(3, 10)}, r"attention_mask is \[3, 10\]"),
        ({"position_ids": torch.arange(9)[None]}, r"position_ids are \[1, 9\]"),
        ({"labels": torch.zeros(2, 9, dtype=torch.long)}, r"labels are \[2, 9\]"),
        ({"past_key_values": "cache"}, "must be an OffloadedCache, got str"),
        ({"past_key_values": DynamicCache()}, r"got DynamicCache, .* stay empty; .*new_cache\(\)"),
    ],
)
def test_shapes_that_disagree(model: Any, others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(random_tokens(2, 10), **others)
    gc.collect()
    assert model.kv_store.num_sequences == 0


def test_batch_size_of_the_cache(model: Any) -> None:
    cache = model.new_cache()
    model(random_tokens(2, 10), past_key_values=cache)
    with pytest.raises(ValueError, match="batch size of 3, but past_key_values has 2 rows"):
        model(random_tokens(3, 1), past_key_values=cache)


def test_mask_that_hides_other_cached_tokens(model: Any) -> None:
    """As many as before, but others."""
    cache, mask = model.new_cache(), torch.ones(2, 10)
    mask[1, 0] = 0
    model(random_tokens(2, 10), attention_mask=mask, past_key_values=cache)
    later = torch.ones(2, 11)
    later[1, 3] = 0
    with pytest.raises(ValueError, match="attends to column 0 of row 1, which was padding"):
        model(random_tokens(2, 1), attention_mask=later, past_key_values=cache)
    with pytest.raises(ValueError, match="attends to column 0 of row 1"):
        model(random_tokens(2, 1), past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    swapped = torch.cat([mask[[1, 0, 1]], torch.ones(3, 1)], dim=1)
    swapped[0, 3] = 0
    with pytest.raises(ValueError, match="hides column 3 of row 0, which was attended to"):
        model(random_tokens(3, 1), attention_mask=swapped, past_key_values=cache)
    swapped[0, 3] = 1
    model(random_tokens(3, 1), attention_mask=swapped, past_key_values=cache)
    assert cache.kv_lens == [10, 11, 10]
    cache.batch_select_indices(torch.tensor([1]))
    model(random_tokens(1, 1), past_key_values=cache)  # the row without padding needs no mask
    assert cache.kv_lens == [12]


def test_cache_of_another_model(model: Any, offloaded_models: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="another model"):
        model(random_tokens(1, 5), past_key_values=offloaded_models["qwen2"].new_cache())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_implementation": "quantized"}, ValueError, "cache_implementation='quantized'"),
        ({"past_key_values": DynamicCache()}, ValueError, r"got DynamicCache, .*new_cache\(\)"),
        ({"cache_implementation": "paged"}, NotImplementedError, "call model.generate_batch"),
        ({"max_new_tokens": 600}, ValueError, "of 609 tokens exceeds the 512.*max_position_emb"),
        ({"attention_mask": torch.tensor([[1] * 9 + [0]])}, ValueError, "padding on the left"),
    ],
    ids=lambda option: "-".join(option) if isinstance(option, dict) else "",
)
def test_generate(
    model: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model.generate(random_tokens(1, 10), **{"max_new_tokens": 5, **options})
    gc.collect()
    assert model.kv_store.num_sequences == 0


def test_context_beyond_the_positions(model: Any) -> None:
    with pytest.raises(ValueError, match="513 tokens exceeds the 512"):
        model(random_tokens(1, 513))
    cache = model.new_cache()
    model(random_tokens(1, 500), past_key_values=cache)
    with pytest.raises(ValueError, match="513 tokens exceeds the 512"):
        model(random_tokens(1, 13), past_key_values=cache)
    assert cache.kv_lens == [500]


def test_a_stray_sliding_window_is_ignored(tmp_path: Path) -> None:
    """Stock Llama has none, whatever config.json says."""
    make_tiny_model("llama", sliding_window=64).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 64
    model = OffloadedModel.from_pretrained(tmp_path, num_threads=1)
    assert runtime_of(model).lean.shape.max_context == 512


def test_prompts_without_tokens(tiny_folders: dict[str, Path]) -> None:
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], num_threads=1)
    with pytest.raises(ValueError, match=r"^the prompt is empty$"):
        model.generate(torch.empty(1, 0, dtype=torch.long), max_new_tokens=2)
    for mask, message in (
        ([[0, 0, 0], [0, 0, 0]], r"hides all of the new tokens \[2, 3\]"),
        ([[1, 1, 0], [0, 0, 0]], "attention_mask ends in padding"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(random_tokens(2, 3), attention_mask=torch.tensor(mask), max_new_tokens=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden_act": "gelu"}, "hidden_act='gelu'"), ({"attn_logit_softcapping": 30.0}, "softcap")],
)
def test_computation_without_support(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_tiny_model("llama", **changes).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=message):
        OffloadedModel.from_pretrained(tmp_path)


@pytest.fixture
def small_budget_model(tiny_folders: dict[str, Path]) -> Any:
    """The KV budget holds 8 pages per layer of 16 tokens."""
    folder = tiny_folders["llama"]
    probe = OffloadedModel.from_pretrained(folder, num_threads=1, page_tokens=16)
    weight_bytes = sum(weight.nbytes for weight in probe.parameters())
    budget = weight_bytes + 8 * 3 * probe.kv_store.page_bytes
    return OffloadedModel.from_pretrained(
        folder, num_threads=1, page_tokens=16, max_memory={"cpu": budget}
    )


def test_budget_at_the_start_of_generate(small_budget_model: Any) -> None:
    model = small_budget_model
    with pytest.raises(HostBudgetError, match=r"1 sequences of up to 139 tokens.*max_new_tokens"):
        model.generate(random_tokens(1, 20), max_new_tokens=120)
    assert model.offload_stats().prefill_tokens == 0
    with pytest.raises(
        HostBudgetError, match=r"9 sequences.*, lower the batch size, lower max_new"
    ):
        model.generate(random_tokens(3, 10), max_new_tokens=10, num_beams=3)
    out = model.generate(random_tokens(1, 20), max_new_tokens=109, min_new_tokens=109)
    assert out.shape == (1, 129)


def test_budget_in_forward(small_budget_model: Any) -> None:
    model = small_budget_model
    cache = model.new_cache()
    model(random_tokens(1, 120), past_key_values=cache)
    with pytest.raises(HostBudgetError, match="max_memory"):
        model(random_tokens(1, 20), past_key_values=cache)
    assert cache.kv_lens == [120]
    model(random_tokens(1, 8), past_key_values=cache)
    with pytest.raises(HostBudgetError):
        model(random_tokens(1, 1))


def test_equal_rows_take_what_any_rows_take(small_budget_model: Any) -> None:
    """Whoever seeks the largest batch, as lm-eval does, feeds equal rows; 4 of 32 tokens fit."""
    model, row = small_budget_model, random_tokens(1, 32)
    pages = []
    for tokens in (random_tokens(4, 32), row.repeat(4, 1)):
        cache = model(tokens).past_key_values
        pages.append(cache.store.host_bytes_used)
        cache.reset()
    assert pages == [4 * 2 * 3 * model.kv_store.page_bytes] * 2
    for tokens in (random_tokens(5, 32), row.repeat(5, 1)):
        with pytest.raises(HostBudgetError, match=r"\(30 pages of"):
            model(tokens)


def test_nan_in_prefill(tmp_path: Path) -> None:
    stock = make_tiny_model("llama")
    with torch.no_grad():
        stock.model.layers[1].self_attn.k_proj.weight[3, 3] = torch.nan
    stock.save_pretrained(tmp_path)
    model = OffloadedModel.from_pretrained(tmp_path, num_threads=1)
    with pytest.raises(ValueError, match="non-finite keys in layer 1") as caught:
        model.generate(random_tokens(1, 10), max_new_tokens=5)
    assert caught.tb is not None  # the traceback is alive, and the pages are free all the same
    assert model.kv_store.host_bytes_used == 0


def test_nan_in_decoding(model: Any) -> None:
    """A cached value goes bad: the step fails, and the cache is as it was before the step."""
    cache = model.new_cache()
    model(random_tokens(1, 20), past_key_values=cache)
    (seq,) = cache.seqs
    keys = model.kv_store.gather(seq, 2)[0]
    address = int(model.kv_store.page_table(seq)[2, 0])
    poison(address, keys)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)nan|finite"):
        model(random_tokens(1, 1), past_key_values=cache)
    assert cache.kv_lens == [20]
    del cache
    gc.collect()
    assert model.kv_store.host_bytes_used == 0


def poison(address: int, keys: torch.Tensor) -> None:
    """Write a NaN over the first element of the page at `address`."""
    import ctypes

    assert ctypes.c_float.from_address(address).value == float(keys[0, 0, 0])
    ctypes.c_float.from_address(address).value = float("nan")


def test_failed_generation_frees_its_cache(model: Any) -> None:
    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 15:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt) as caught:
        model.generate(random_tokens(1, 12), max_new_tokens=10, logits_processor=[fail])
    assert caught.tb is not None
    assert model.kv_store.num_sequences == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_cuda_without_a_gpu_is_refused_before_anything_is_read():
    with pytest.raises(RuntimeError, match=r"device='cuda': .* use device='cpu'"):
        OffloadedModel.from_pretrained("no-such-model", device="cuda")
