"""A Llama-like family whose layers differ in sm_scale and rope, against transformers' layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens

from offload import OffloadedModel
from offload.models import LayerSpec, ModelFamily, families, lean_model_maker
from offload.policies import Policy
from offload.policies.exact_topk import ExactTopK
from offload.policies.full import Full

LOCAL_THETA = 100.0
NUM_NEW = 24
TOP_K = ExactTopK(budget_tokens=24, sink_tokens=2, recent_tokens=6, dense_layers=0)


def is_local(layer_idx: int) -> bool:
    return layer_idx % 2 == 1


@dataclass(frozen=True)
class Alternating(ModelFamily):
    """Every other layer has a rope of its own and half the scale."""

    changes: tuple[tuple[str, Any], ...] = ()  # of the last layer's spec

    def rotary_modules(self, stock: Any) -> tuple[Any, ...]:
        return stock.model.rotary_emb, local_rotary(stock)

    def layer_spec(self, stock: Any, layer_idx: int) -> LayerSpec:
        spec = super().layer_spec(stock, layer_idx)
        if layer_idx == len(stock.model.layers) - 1:
            spec = replace(spec, **dict(self.changes))
        if not is_local(layer_idx):
            return spec
        return replace(spec, rope_idx=1, sm_scale=spec.sm_scale / 2)


def local_rotary(stock: Any) -> Any:
    config = copy.deepcopy(stock.config)
    config.rope_parameters["rope_theta"] = LOCAL_THETA
    return type(stock.model.rotary_emb)(config)


def reference_model(stock: Any) -> Any:
    """transformers' own layers, each with its scale and its tables."""
    reference = copy.deepcopy(stock)
    rotary = local_rotary(stock)

    def with_own_tables(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, positions = args[0], kwargs["position_ids"]
        return args, kwargs | {"position_embeddings": rotary(x, positions)}

    for layer_idx, layer in enumerate(reference.model.layers):
        if is_local(layer_idx):
            layer.self_attn.scaling /= 2
            layer.register_forward_pre_hook(with_own_tables, with_kwargs=True)
    return reference


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(families.FAMILIES, "llama", Alternating("llama"))
    return make_tiny_model("llama")


def attend_to_top_k(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention; a single token attends to what ExactTopK selects of each KV head."""
    del mask
    _, num_heads, num_new, _ = query.shape
    kv_len, num_kv_heads = key.shape[2], key.shape[1]
    keys, values = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in (key, value))
    scores = scaling * (query @ keys.mT)
    later = torch.ones(num_new, kv_len, dtype=torch.bool).triu(kv_len - num_new + 1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    if num_new == 1 and kv_len > TOP_K.budget_tokens:
        first, last = TOP_K.sink_tokens, kv_len - TOP_K.recent_tokens
        mass = weights[0, :, 0].view(num_kv_heads, -1, kv_len).sum(1)
        count = TOP_K.budget_tokens - TOP_K.sink_tokens - TOP_K.recent_tokens
        chosen = mass[:, first:last].topk(count).indices + first
        keeps = torch.zeros(num_kv_heads, kv_len)
        keeps[:, :first] = keeps[:, last:] = 1.0
        keeps.scatter_(1, chosen, 1.0)
        weights = weights * keeps.repeat_interleave(num_heads // num_kv_heads, 0)[None, :, None]
        weights /= weights.sum(-1, keepdim=True)
    return (weights @ values).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("policy", [Full(), TOP_K], ids=["full", "exact_topk"])
@pytest.mark.parametrize(
    "where",
    [
        {"device": "cpu"},
        {"device": "cpu", "backend": "inline"},
        pytest.param({"device": "cuda", "dtype": "float32"}, marks=pytest.mark.cuda),
    ],
    ids=["cpu", "inline", "cuda"],
)
@torch.inference_mode()
def test_tokens_are_those_of_a_sequential_reference(
    stock: Any, policy: Policy, where: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AttentionInterface

    stock.save_pretrained(tmp_path)
    model = OffloadedModel.from_pretrained(
        tmp_path, policy=policy, page_tokens=16, prefill_slice_tokens=24, **where
    )
    reference = reference_model(stock)
    if policy.selects:
        AttentionInterface.register("top_k_reference", attend_to_top_k)
        reference.config._attn_implementation = "top_k_reference"
    prompt = random_tokens(1, 61, seed=3)
    made = model.generate(
        prompt.to(model.device), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
    )
    found, cache = [], None
    tokens = prompt
    for _ in range(NUM_NEW):
        out = reference(tokens, past_key_values=cache, use_cache=True)
        tokens, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        found.append(int(tokens))
    assert made[0, prompt.shape[1] :].tolist() == found


@torch.inference_mode()
def test_the_layers_do_differ(stock: Any) -> None:
    prompt = random_tokens(1, 61, seed=3)
    logits, plain = (model(prompt).logits for model in (reference_model(stock), stock))
    assert not torch.allclose(logits, plain, atol=0.1)


@pytest.mark.parametrize("name", ["num_qo_heads", "num_kv_heads", "head_dim"])
def test_layers_whose_heads_differ_are_refused(
    name: str, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.FAMILIES, "llama", Alternating("llama", changes=((name, 64),)))
    with pytest.raises(NotImplementedError, match=rf"layer \d has {name}=64, layer 0 has .*KV st"):
        lean_model_maker("llama")(stock)


def test_parts_that_take_one_scale_or_rope_refuse(stock: Any) -> None:
    lean = lean_model_maker("llama")(stock)
    assert [layer.spec.rope_idx for layer in lean.layers][:2] == [0, 1]
    with pytest.raises(NotImplementedError, match="layer 1 has sm_scale="):
        _ = lean.sm_scale
    with pytest.raises(NotImplementedError, match="layer 1 has rope_idx=1, layer 0 has 0"):
        _ = lean.rotary_emb
