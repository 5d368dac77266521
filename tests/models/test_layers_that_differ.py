"""A Llama-like family whose layers differ, against transformers' layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens
from cases.top_k_reference import TOP_K, greedy_tokens

from offload import OffloadedModel
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.loading.checkpoint import check_checkpoint
from offload.models import LayerSpec, ModelFamily, families, lean_model_maker
from offload.policies import Policy, make_policy
from offload.policies.full import Full
from offload.policies.tidal_decode import TidalDecode
from offload.runtime import model_loading
from offload.runtime.auto_policy import with_resolved_policy
from offload.runtime.config import runtime_config

LOCAL_THETA = 100.0
NUM_NEW = 24


def is_local(layer_idx: int) -> bool:
    return layer_idx % 2 == 1


@dataclass(frozen=True)
class Alternating(ModelFamily):
    """Every other layer has a rope of its own and half the scale, and the heads of its modules."""

    def rotary_modules(self, stock: Any) -> tuple[Any, ...]:
        return stock.model.rotary_emb, local_rotary(stock).to(stock.device)

    def layer_spec(self, stock: Any, layer_idx: int) -> LayerSpec:
        spec = super().layer_spec(stock, layer_idx)
        attention = stock.model.layers[layer_idx].self_attn
        spec = replace(
            spec,
            num_qo_heads=attention.q_proj.out_features // spec.head_dim,
            num_kv_heads=attention.k_proj.out_features // spec.head_dim,
        )
        if not is_local(layer_idx):
            return spec
        return replace(spec, rope_idx=1, sm_scale=spec.sm_scale / 2)


def local_rotary(stock: Any) -> Any:
    config = copy.deepcopy(stock.config)
    config.head_dim = stock.model.layers[1].self_attn.head_dim
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


def with_own_heads(
    stock: Any, num_qo_heads: int = 8, num_kv_heads: int = 4, head_dim: int = 64
) -> Any:
    """The same but for local layers, which have these heads."""
    made, hidden = copy.deepcopy(stock), stock.config.hidden_size
    for layer_idx, layer in enumerate(made.model.layers):
        if is_local(layer_idx):
            attention = layer.self_attn
            attention.head_dim, attention.scaling = head_dim, head_dim**-0.5
            attention.num_key_value_groups = num_qo_heads // num_kv_heads
            attention.q_proj = random_linear(hidden, num_qo_heads * head_dim)
            attention.k_proj = random_linear(hidden, num_kv_heads * head_dim)
            attention.v_proj = random_linear(hidden, num_kv_heads * head_dim)
            attention.o_proj = random_linear(num_qo_heads * head_dim, hidden)
    return made


def random_linear(in_features: int, out_features: int) -> torch.nn.Linear:
    linear = torch.nn.Linear(in_features, out_features, bias=False)
    torch.nn.init.normal_(linear.weight, 0.0, 0.15)
    return linear


def load(stock: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """`stock` offloaded, whatever its layers' weights are."""
    make_tiny_model("llama").save_pretrained(folder)
    monkeypatch.setattr(model_loading, "load_stock_model", lambda *_: stock)
    return OffloadedModel.from_pretrained(
        folder, page_tokens=16, prefill_slice_tokens=24, **options
    )


def reference_tokens(stock: Any, policy: Policy, prompt: torch.Tensor) -> list[int]:
    return greedy_tokens(reference_model(stock), policy, prompt, NUM_NEW)


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(families.FAMILIES, "llama", Alternating("llama"))
    return make_tiny_model("llama")


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
    stock: Any, policy: Policy, where: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    expected = reference_tokens(stock, policy, prompt := random_tokens(1, 61, seed=3))
    if where["device"] == "cuda" and policy.selects:  # else the GPU attends to all it has room for
        config = stock.config
        heads = config.num_hidden_layers, config.num_key_value_heads
        where = {**where, "placement": HeadPlacement.filled(*heads, Place.CPU)}
    model = load(stock, tmp_path, monkeypatch, policy=policy, **where)
    made = model.generate(
        prompt.to(model.device), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
    )
    assert made[0, prompt.shape[1] :].tolist() == expected


@pytest.mark.parametrize("policy", [Full(), TOP_K], ids=["full", "exact_topk"])
@pytest.mark.parametrize(
    "heads",
    [{}, {"head_dim": 32}, {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 96}],
    ids=["more", "same head_dim", "fewer"],
)
@torch.inference_mode()
def test_tokens_where_heads_differ(
    stock: Any, policy: Policy, heads: dict[str, int], tmp_path: Path, monkeypatch: Any
) -> None:
    stock = with_own_heads(stock, **heads)
    prompts = random_tokens(2, 61, seed=3)
    expected = [reference_tokens(stock, policy, prompt[None]) for prompt in prompts]
    model = load(stock, tmp_path, monkeypatch, policy=policy)
    cache = model.new_cache()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
    model.generate(prompts[:, :50], **options | {"max_new_tokens": 1}, past_key_values=cache)
    copied = copy.deepcopy(cache)  # its last page is shared
    for of in (cache, copied):
        made = model.generate(prompts, **options, past_key_values=of)
        assert made[:, prompts.shape[1] :].tolist() == expected
    keys = [layer.keys.shape for layer in cache.layers]
    assert [(shape[1], shape[3]) for shape in keys[:2]] == [
        (2, 32),
        (heads.get("num_kv_heads", 4), heads.get("head_dim", 64)),
    ]


@pytest.mark.parametrize("name", ["quest", "lychee_cluster", "sketch", "lfps"])
@torch.inference_mode()
def test_tokens_of_a_policy_with_arrays(
    name: str, stock: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Those of a model whose layers are alike, by heads that add nothing."""
    config = {"num_attention_heads": 12, "num_key_value_heads": 4}
    alike, differing = make_tiny_model("llama", **config), make_tiny_model("llama", **config)
    for made in (alike, differing):
        for layer_idx, layer in enumerate(made.model.layers):
            attention = layer.self_attn
            if is_local(layer_idx):
                continue
            attention.o_proj.weight.data[:, 6 * 32 :] = 0.0
            if made is differing:
                for projection, rows in (("q_proj", 6), ("k_proj", 2), ("v_proj", 2)):
                    weight = getattr(attention, projection).weight
                    weight.data = weight.data[: rows * 32].clone()
                    getattr(attention, projection).out_features = rows * 32
                attention.o_proj.weight.data = attention.o_proj.weight.data[:, : 6 * 32].clone()
                attention.o_proj.in_features = 6 * 32
    sizes = {"budget_tokens": 48, "sink_tokens": 2, "recent_tokens": 6, "dense_layers": 0}
    policy = make_policy(name, **sizes)
    prompt, options = random_tokens(1, 200, seed=3), {"max_new_tokens": 48, "do_sample": False}
    tokens = []
    for made in (alike, differing):
        model = load(made, tmp_path, monkeypatch, policy=policy)
        tokens.append(model.generate(prompt, **options, eos_token_id=None).tolist())
    drafted = model.generate(prompt, **options, eos_token_id=None, prompt_lookup_num_tokens=3)
    assert tokens[0] == tokens[1] == drafted.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "inline"}, "backend='inline'"),
        ({"host_bytes_per_sequence": 2**20}, "host_bytes_per_sequence"),
        ({"quality_probe": 0.5}, "quality_probe"),
        ({"cache_correction_every": 8}, "cache_correction_every"),
        (
            {"policy": replace(TOP_K, estimate_clusters=4)},
            "policy='exact_topk', which estimates the rest of a selection, needs",
        ),
        ({"policy": TidalDecode(TOP_K, select_layers=(0,))}, "calibration"),
    ],
)
def test_what_needs_alike_heads_is_refused(
    options: dict[str, Any], message: str, stock: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    stock = with_own_heads(stock)
    with pytest.raises(
        NotImplementedError, match=r"layer 1 has num_qo_heads=8, layer 0 has 6"
    ) as e:
        load(stock, tmp_path, monkeypatch, **{"policy": TOP_K, **options})
    assert message in str(e.value)


@pytest.mark.parametrize("differ", [False, True])
def test_auto_is_exact_where_heads_differ(stock: Any, tmp_path: Path, differ: bool) -> None:
    """It is so before anything is loaded: the header of the file tells."""
    (with_own_heads(stock) if differ else stock).save_pretrained(tmp_path)
    checkpoint = check_checkpoint(tmp_path)
    config, reason = with_resolved_policy(checkpoint, runtime_config(policy="auto"), None)
    assert reason.startswith("exact: heads of layers differ") == differ
    assert config.policy == Full() or not differ


@torch.inference_mode()
def test_the_layers_do_differ(stock: Any) -> None:
    prompt = random_tokens(1, 61, seed=3)
    logits, plain = (model(prompt).logits for model in (reference_model(stock), stock))
    assert not torch.allclose(logits, plain, atol=0.1)


def test_parts_that_take_one_shape_refuse_other_heads(stock: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"layer 1 has head_dim=64, layer 0 has 32"):
        lean_model_maker("llama")(with_own_heads(stock, 6, 2))


def test_parts_that_take_one_scale_or_rope_refuse(stock: Any) -> None:
    lean = lean_model_maker("llama")(stock)
    assert [layer.spec.rope_idx for layer in lean.layers][:2] == [0, 1]
    with pytest.raises(NotImplementedError, match="layer 1 has sm_scale="):
        _ = lean.sm_scale
    with pytest.raises(NotImplementedError, match="layer 1 has rope_idx=1, layer 0 has 0"):
        _ = lean.rotary_emb
