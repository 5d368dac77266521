"""Families that transformers' modules run, too: the lean layers give transformers' tokens, and what
they do not compute goes to the modules."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import GRAPH, INLINE, STREAM, greedy, load, small
from cases.tiny_models import LEAN_MODELS, TINY_MODELS, make_tiny_model, random_tokens
from cases.top_k_reference import TOP_K, greedy_tokens

from cpu_ops.packed import quantise
from offload import OffloadedModel
from offload.decode.gpu.placement import Place
from offload.loading.checkpoint import check_checkpoint
from offload.models import is_generic, lean_model_maker
from offload.models.packed_experts import PackedExperts, pack_experts
from offload.policies import Policy
from offload.policies.full import Full
from offload.prefill.attention import attend, attend_in_window, takes_all_keys
from offload.runtime.budgets import weight_bytes_before_loading, weight_bytes_of
from offload.runtime.config import runtime_config
from offload.runtime.generic_loading import GenericRuntime
from offload.runtime.modules_device import token_bytes

NEW = sorted(set(LEAN_MODELS) - set(TINY_MODELS))
NUM_NEW = 12
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
OLMO3_DYNAMIC = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("policy", [Full(), TOP_K], ids=["full", "exact_topk"])
@pytest.mark.parametrize("name", NEW)
@torch.inference_mode()
def test_tokens_are_those_of_transformers(
    name: str, policy: Policy, stock_models: dict[str, Any], tiny_folders: dict[str, Path]
) -> None:
    prompt = random_tokens(1, 61, seed=3)
    expected = greedy_tokens(copy.deepcopy(stock_models[name]), policy, prompt, NUM_NEW)
    model = OffloadedModel.from_pretrained(
        tiny_folders[name], policy=policy, num_threads=2, page_tokens=16, prefill_slice_tokens=24
    )
    assert not isinstance(model._offload, GenericRuntime)
    made = model.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    assert made[0, prompt.shape[1] :].tolist() == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phi3", {"sliding_window": 40}),
        ("gemma3_text", {}),
        ("gemma4_text", {}),
        ("gemma4_text", {"attention_k_eq_v": False, "attention_bias": True}),
        ("phi3", {}),
        ("gpt_oss", {}),
        ("olmo3", {}),
    ],
)
@torch.inference_mode()
def test_windows_of_layers(
    name: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Prompts and steps on both sides of a window; in bfloat16 by torch's attention or ours."""
    stock = make_tiny_model(name, **changes).to(dtype)
    stock.save_pretrained(tmp_path)
    model = OffloadedModel.from_pretrained(
        tmp_path, policy="full", num_threads=2, page_tokens=16, prefill_slice_tokens=48
    )
    tokens, cache = random_tokens(1, 300, seed=3), model.new_cache()
    parts = tokens.split([30, 1, 9, 1, 1, 60, 190, 4, 4], 1)
    found = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1).double()
    error = float((found - stock(tokens).logits).norm() / found.norm())
    assert error < (1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("name", NEW)
@torch.inference_mode()
def test_embeddings_that_are_given(
    name: str, stock_models: dict[str, Any], offloaded_models: dict[str, Any]
) -> None:
    stock = stock_models[name]
    embeddings = stock.model.embed_tokens(random_tokens(1, 30))
    expected = stock(inputs_embeds=embeddings).logits
    found = offloaded_models[name](inputs_embeds=embeddings).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "native"),
    [
        ("exaone4", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3}, True),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}, True),
        ("granite", {"hidden_act": "gelu"}, True),
        ("phi3", {"rope_parameters": LONGROPE, "head_dim": 16}, True),
        ("gemma3_text", {"hidden_activation": "silu"}, True),
        ("gemma3_text", {"final_logit_softcapping": 3.0}, True),
        ("gemma4_text", {"hidden_size_per_layer_input": 16}, True),
        ("gemma4_text", GEMMA4_EXPERTS, True),
        ("gemma4_text", {}, False),
        ("mixtral", {"hidden_act": "gelu"}, True),
        ("ministral3", {"sliding_window": 64}, True),
        ("olmo3", {"rope_parameters": OLMO3_DYNAMIC}, True),
    ],
)
@torch.inference_mode()
def test_what_the_lean_layers_lack_is_generic(
    name: str, changes: dict[str, Any], native: bool, tmp_path: Path
) -> None:
    stock = make_tiny_model(name, **changes)
    stock.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert is_generic(config, where="cpu" if native else "gpu")
    assert is_generic(config, where="ranks")
    assert not is_generic(make_tiny_model(name).config.to_dict())
    model = OffloadedModel.from_pretrained(
        tmp_path, num_threads=1, page_tokens=16, backend=None if native else "inline"
    )
    assert isinstance(model._offload, GenericRuntime)
    prompt = random_tokens(1, 90, seed=3)
    made = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert made[0, 90:].tolist() == greedy_tokens(stock, Full(), prompt, 8)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("exaone4", {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3}),
        ("exaone4", {"sliding_window": 512, "layer_types": MIXED}),
        ("exaone4", {"sliding_window": 64, "layer_types": ["full_attention"] * 3}),
        ("smollm3", {"no_rope_layers": [0] * 3}),
        ("smollm3", {"no_rope_layers": [1] * 3}),
    ],
)
@torch.inference_mode()
def test_which_layers_rotate(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A window as wide as the context, or of no layer, is none, but may say which layers rotate."""
    stock = make_tiny_model(name, **changes)
    assert not is_generic(stock.config.to_dict())
    stock.save_pretrained(tmp_path)
    model = OffloadedModel.from_pretrained(tmp_path, policy="full", num_threads=1, page_tokens=16)
    tokens = random_tokens(1, 64, seed=3)
    cache, expected = model.new_cache(), stock(tokens).logits
    found = [model(part, past_key_values=cache).logits for part in tokens.split([62, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "olmo2",
        "olmo3",
        "exaone4",
        "ministral3",
        "mixtral",
        "phi3",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
    ],
)
def test_parts_that_know_neither_normed_sums_nor_experts_refuse(
    name: str, stock_models: dict[str, Any]
) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} is not for calibration"):
        lean_model_maker(name)(stock_models[name])


@pytest.mark.parametrize("policy", ["tidal_decode", "per_head"])
def test_policies_that_learn_from_others_are_named(
    policy: str, tiny_folders: dict[str, Path]
) -> None:
    with pytest.raises(NotImplementedError, match=f"policy='{policy}', .* gemma4_text .*'sketch'"):
        load(tiny_folders["gemma4_text"], small(policy), ("cpu", None))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
@pytest.mark.parametrize("where", [{}, {"backend": "inline"}], ids=["cpu", "inline"])
def test_experts_may_be_packed(
    name: str, weights: str, where: dict[str, Any], tiny_folders: dict[str, Path]
) -> None:
    folder = tiny_folders[name]
    options: dict[str, Any] = {"num_threads": 1, "weights": weights, **where}
    checkpoint, config = check_checkpoint(folder), runtime_config(**options)
    loaded = OffloadedModel.from_pretrained(folder, policy="full", **options)
    assert weight_bytes_before_loading(checkpoint, config) == weight_bytes_of(loaded)
    experts = [x for x in loaded.modules() if isinstance(x, PackedExperts)]
    assert bool(experts) == (weights != "auto")
    dense = OffloadedModel.from_pretrained(folder, policy="full", num_threads=1)
    assert token_bytes(loaded) == token_bytes(dense)  # of the matrices' sizes, however they lie
    for mine, theirs in zip(loaded.model.layers, dense.model.layers, strict=True):
        if not hasattr(mine.mlp, "experts"):
            continue
        assert torch.equal(mine.mlp.gate.weight, theirs.mlp.gate.weight)  # routers stay
        if experts:
            matrices = mine.mlp.experts.down_proj.of_stock(), theirs.mlp.experts.down_proj
            assert torch.dist(*matrices) < {"q8": 0.01, "q4": 0.1}[weights] * matrices[1].norm()
    tokens, cache = random_tokens(1, 40), loaded.new_cache()
    found = [loaded(part, past_key_values=cache).logits for part in tokens.split([37, 1, 2], 1)]
    assert torch.cat(found, 1).isfinite().all()


@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_transposed_experts_are_not_rounded(weights: str, tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(NotImplementedError, match=f"{weights}' with a model of type 'gpt_oss'"):
        OffloadedModel.from_pretrained(tiny_folders["gpt_oss"], weights=weights)


def test_a_router_that_changes_is_refused(tiny_folders: dict[str, Path]) -> None:
    model = OffloadedModel.from_pretrained(tiny_folders["qwen3_moe"], num_threads=1)
    model.model.layers[0].mlp.gate.top_k = 1
    with pytest.raises(NotImplementedError, match=r"gate\.top_k was changed from 3 to 1"):
        model(random_tokens(1, 8))


@pytest.mark.parametrize("backend", [INLINE, STREAM, GRAPH])
@pytest.mark.parametrize("policy", [Full(), TOP_K], ids=["full", "exact_topk"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(
            (name, {})
            for name in (
                "phi3",
                "gemma3_text",
                "qwen3_moe",
                "mixtral",
                "olmo2",
                "olmo3",
                "exaone4",
                "ministral3",
                "gpt_oss",
            )
        ),
        ("phi3", {"sliding_window": 40}),
    ],
)
@torch.inference_mode()
def test_on_a_gpu(
    name: str,
    changes: dict[str, Any],
    policy: Policy,
    backend: tuple[str, str | None],
    tmp_path: Path,
) -> None:
    """Alone, in a batch, and where a cache was cut to before a window's tokens."""
    stock = make_tiny_model(name, **changes)
    stock.save_pretrained(tmp_path)
    model = load(tmp_path, policy, backend)
    assert not isinstance(model._offload, GenericRuntime)
    windows = model._offload.lean.each("window")
    places = model._offload.decoder.placement.places
    assert all((of == Place.GPU).all() for of, n in zip(places, windows, strict=True) if n)
    prompts, reference = random_tokens(2, 61, seed=4), load(tmp_path, policy, ("cpu", None))
    expected = greedy(reference, prompts, NUM_NEW)
    if not (policy.selects or changes):
        assert torch.equal(expected, greedy(stock, prompts, NUM_NEW))
    assert torch.equal(greedy(model, prompts, NUM_NEW), expected)
    cache = model.new_cache()
    assert torch.equal(greedy(model, prompts[:1], NUM_NEW, past_key_values=cache), expected[:1])
    if policy.selects:  # what is read again attends to all
        return
    cache.crop(-12)
    again = greedy(model, expected[:1, :66], NUM_NEW - 5, past_key_values=cache)
    assert torch.equal(again, expected[:1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packs", [False, True])
@torch.inference_mode()
def test_transposed_experts_on_a_gpu(packs: bool, dtype: torch.dtype, device: str) -> None:
    """Biases of the router, too; packed ones in the place of what they stand for."""
    stock = make_tiny_model("gpt_oss").to(dtype)
    dense = copy.deepcopy(stock).double()
    dense.config._experts_implementation = "eager"
    if packs:
        for name, matrix in [*stock.named_parameters()]:
            if matrix.dim() == 3:
                packed = quantise(matrix.transpose(1, 2).flatten(0, 1).float(), "q8")
                pack_experts(stock, name, packed, dtype)
                numbers = packed.dequantise(torch.float64).view_as(matrix.transpose(1, 2))
                dense.get_parameter(name).data = numbers.transpose(1, 2).contiguous()
    stock.to(device)
    lean = lean_model_maker("gpt_oss", heads_may_differ=True)(stock)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    for layer, of_stock in zip(lean.layers, dense.model.layers, strict=True):
        assert layer.routed is not None
        mlp, (expected, _) = layer.routed.on_gpu(), of_stock.mlp(x[None].double())
        assert (mlp.up.format, mlp.down.format) == (("q8",) * 2 if packs else ("dense",) * 2)
        for rows in (slice(1), slice(3)):
            found, wanted = mlp(x[rows].to(device)).cpu(), expected[0, rows]
            limit = 0.03 if packs or dtype != torch.float32 else 1e-5
            assert torch.dist(found.double(), wanted) < limit * wanted.norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "kv_len"), [(1, 50), (600, 700), (513, 513)])
def test_prompts_with_sinks(n: int, kv_len: int, dtype: torch.dtype, device: str) -> None:
    """By torch, of all tokens and through a window."""
    generator = torch.Generator().manual_seed(n)
    q, keys, values, sinks = (
        torch.randn(*shape, generator=generator)
        for shape in ((6, n, 32), (2, kv_len, 32), (2, kv_len, 32), (6,))
    )
    q, kv, sinks = q.to(dtype) * 3, (keys.to(dtype), values.to(dtype)), 4 * sinks.to(dtype).float()
    k, v = (x.double().repeat_interleave(3, 0) for x in kv)
    before = torch.arange(kv_len - n, kv_len)[:, None] - torch.arange(kv_len)
    for window in (kv_len, 40):
        scores = (q.double() @ k.mT * 0.2).masked_fill(
            (before < 0) | (before >= window), -torch.inf
        )
        joined = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], 2).softmax(-1)
        expected = (joined[..., :-1] @ v).transpose(0, 1)
        there = q.to(device), tuple(x.to(device) for x in kv), sinks.to(device)
        if window < kv_len:
            found = attend_in_window(*there[:2], window, 0.2, sinks=there[2])
        else:
            halves = slice(kv_len - n), slice(kv_len - n, None)
            past, new = (tuple(x[:, half] for x in there[1]) for half in halves)
            of_all = takes_all_keys(there[0], None) or not past[0].shape[1]
            parts = (None, there[1]) if of_all else (past, new)
            found = attend(there[0], *parts, 0.2, sinks=there[2])
        limit = 1e-5 if dtype == torch.float32 else 0.02
        assert torch.dist(found.double().cpu(), expected) < limit * expected.norm()
