"""Changes of a model after it was loaded: in place they are seen, all others are refused."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, NATIVE, STREAM, greedy, load
from cases.tiny_models import make_tiny_model, random_tokens
from torch import nn
from torch.nn.utils import parametrizations, prune

PROJECTION = "model.layers.1.self_attn.o_proj"


@pytest.fixture
def model(tiny_folders):
    return load(tiny_folders["llama"], "full", ("cpu", None))


def assign(model: Any) -> None:
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)


def new_parameter(model: Any) -> None:
    projection = model.get_submodule(PROJECTION)
    projection.weight = nn.Parameter(projection.weight.detach().clone())


def new_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.gate_proj.weight
    weight.data = weight.data * 2


def fewer_rows(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data[:300]


def transposed(model: Any) -> None:
    """The memory and the number of elements stay."""
    weight = model.model.layers[0].mlp.gate_proj.weight
    weight.data = weight.data.t()


def shared(model: Any) -> None:
    """As when a tensor goes to another process: its memory is replaced under it."""
    model.model.norm.weight.data.share_memory_()


def new_bias(model: Any) -> None:
    model.get_submodule(PROJECTION).bias = nn.Parameter(torch.ones(96))


def new_module(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def new_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:2]


def adapter(model: Any) -> None:
    class Adapter(nn.Linear):
        pass

    model.model.layers[1].self_attn.v_proj = Adapter(96, 64, bias=False)


def other_class(model: Any) -> None:
    class Attention(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        pass

    model.model.layers[0].self_attn.__class__ = Attention


def other_forward(model: Any) -> None:
    attention = model.model.layers[2].self_attn
    attention.forward = lambda *args, **kwargs: None


def other_values(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def other_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def other_frequencies(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / 2


def fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 2


def other_rope(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 500.0


CHANGES = [
    (assign, r"model\.embed_tokens\.weight was replaced"),
    (new_parameter, r"model\.layers\.1\.self_attn\.o_proj\.weight was replaced"),
    (new_data, r"model\.layers\.1\.mlp\.gate_proj\.weight was replaced.*copy_"),
    (fewer_rows, r"model\.embed_tokens\.weight was replaced"),  # they are tied
    (transposed, r"model\.layers\.0\.mlp\.gate_proj\.weight was replaced"),
    (shared, r"model\.norm\.weight was replaced"),
    (new_bias, r"model\.layers\.1\.self_attn\.o_proj\.bias was replaced"),
    (new_module, r"model\.layers\.1\.mlp\.act_fn was replaced"),
    (new_layers, r"model\.layers was replaced"),
    (adapter, r"model\.layers\.1\.self_attn\.v_proj was replaced"),
    (other_class, r"model\.layers\.0\.self_attn has another class"),
    (other_forward, r"model\.layers\.2\.self_attn has another forward"),
    (other_values, r"model\.layers\.1\.input_layernorm\.variance_epsilon was changed"),
    (other_scale, r"model\.layers\.1\.self_attn\.scaling was changed"),
    (other_frequencies, r"model\.rotary_emb\.inv_freq was replaced"),
    (fewer_layers, r"config\.num_hidden_layers was changed from 3 to 2"),
    (other_rope, r"config\.rope_parameters was changed"),
    (
        lambda model: prune.l1_unstructured(model.get_submodule(PROJECTION), "weight", 0.5),
        r"self_attn\.o_proj",
    ),
    (
        lambda model: parametrizations.weight_norm(model.get_submodule(PROJECTION)),
        r"self_attn\.o_proj",
    ),
    (
        lambda model: model.model.layers[1].register_forward_hook(lambda *_: None),
        r"hook on model\.layers\.1 ",
    ),
    (lambda model: model.model.register_forward_pre_hook(lambda *_: None), r"hook on model "),
    (lambda model: model.lm_head.register_forward_hook(lambda *_: None), r"hook on lm_head "),
    (
        lambda model: model.model.rotary_emb.register_forward_hook(lambda *_: None),
        r"hook on model\.rotary_emb ",
    ),
]


def check_refused(model: Any, cache: Any, message: str) -> None:
    """Every call is, whether or not there is something in a cache, and changes nothing."""
    pages, kv_lens = model.kv_store.host_bytes_used, list(cache.kv_lens)
    for call in (
        lambda: model.generate(random_tokens(1, 5), max_new_tokens=2),
        lambda: model(random_tokens(1, 5)),
        lambda: model(random_tokens(1, 1), past_key_values=cache),
        lambda: model(random_tokens(1, 5), use_cache=False),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    assert cache.kv_lens == kv_lens
    assert model.kv_store.host_bytes_used == pages


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_refused(model: Any, change: Callable[[Any], None], message: str) -> None:
    cache = model.new_cache()
    model(random_tokens(1, 20), past_key_values=cache)
    change(model)
    check_refused(model, cache, message)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("model.layers.1", "residual_multiplier"),
        ("model", "embedding_multiplier"),
        ("config", "logits_scaling"),
    ],
)
def test_multipliers_of_granite_are_refused(tiny_folders: Any, place: str, name: str) -> None:
    model = load(tiny_folders["granite"], "full", ("cpu", None))
    setattr(attrgetter(place)(model), name, 0.75)
    check_refused(model, model.new_cache(), rf"{re.escape(place)}\.{name} was changed from ")


def test_works_again_when_undone(model: Any) -> None:
    tokens = random_tokens(1, 20)
    expected = greedy(model, tokens, 6)
    hook = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *_: None)
    check_refused(model, model.new_cache(), r"hook on model\.layers\.0\.self_attn\.q_proj ")
    hook.remove()
    projection = model.get_submodule(PROJECTION)
    before = projection.weight
    new_parameter(model)
    check_refused(model, model.new_cache(), r"o_proj\.weight was replaced")
    projection.weight = before
    assert torch.equal(greedy(model, tokens, 6), expected)


def test_hooks_of_all_modules(model: Any) -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        check_refused(model, model.new_cache(), "hook on all modules")
    finally:
        hook.remove()
    greedy(model, random_tokens(1, 5), 2)


def test_forward_of_a_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    check_refused(model, model.new_cache(), "LlamaRMSNorm has another forward")


def test_replaced_forward_of_the_model_sees_every_pass(model: Any) -> None:
    """As a hook on the model itself does."""
    forward, passes = model.forward, []

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return forward(*args, **kwargs)

    expected = greedy(model, random_tokens(1, 20), 6)
    model.forward = counted
    assert torch.equal(greedy(model, random_tokens(1, 20), 6), expected)
    assert len(passes) == 6


@pytest.mark.parametrize("name", ["llama-biases-rope", "qwen3"])
@pytest.mark.parametrize("backend", [NATIVE, INLINE, FLAGS, STREAM, GRAPH])
def test_seen_in_place(
    tiny_folders: Any, stock_models: dict[str, Any], name: str, backend: Any
) -> None:
    """With one row and with several, whose kernels differ; also where a graph was captured
    before."""
    model, stock = load(tiny_folders[name], "full", backend), copy.deepcopy(stock_models[name])
    prompts = [random_tokens(1, 20), random_tokens(3, 20)]
    before = [greedy(model, tokens, 6) for tokens in prompts]
    other = make_tiny_model(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += torch.randn_like(parameter) * 0.2 * parameter.abs().mean()
    stock.load_state_dict(other.state_dict())
    model.load_state_dict(other.state_dict())
    for changed in (stock, model):
        changed.model.rotary_emb.inv_freq *= 0.5
        changed.model.layers[1].mlp.up_proj.weight.data += 0.05
        changed.lm_head.weight.data[3:9] *= 1.25
    for tokens, old in zip(prompts, before, strict=True):
        expected = greedy(stock, tokens, 6)
        assert not torch.equal(expected, old)
        assert torch.equal(greedy(model, tokens, 6), expected)


def test_what_changes_nothing_is_accepted(model: Any, tmp_path: Any) -> None:
    tokens = random_tokens(1, 20)
    expected = greedy(model, tokens, 6)
    model.eval()
    model.requires_grad_(False)
    model.tie_weights()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.save_pretrained(tmp_path)
    model.model.layers[0].to("cpu", torch.float32)
    model.model.layers[0].register_full_backward_hook(lambda *_: None)
    model.config.pad_token_id = 5
    # Transformers leaves hooks of its own behind, which do nothing in another forward pass.
    hidden = model.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    assert len(hidden) == 4
    assert torch.equal(greedy(model, tokens, 6), expected)
