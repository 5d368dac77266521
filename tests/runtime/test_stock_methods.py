"""What else can be done to a stock model: it works, or is refused before anything changes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from cases.device_cases import greedy, load
from cases.tiny_models import random_tokens
from torch import nn


@pytest.fixture(scope="module")
def model(tiny_folders):
    return load(tiny_folders["llama"], "full", ("cpu", None))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: copy.deepcopy(m), "save_pretrained"),
        (lambda m: copy.copy(m), "save_pretrained"),
        (lambda m: pickle.dumps(m), "save_pretrained"),
        (lambda m: torch.save(m, io.BytesIO()), "save_pretrained"),
        (lambda m: m.share_memory(), "share_memory"),
        (lambda m: m.gradient_checkpointing_enable(), "cannot be trained"),
        (lambda m: m.activation_checkpointing_enable(), "cannot be trained"),
        (lambda m: m.enable_input_require_grads(), "cannot be trained"),
        (lambda m: m.train(), "cannot be trained"),
        (lambda m: m.set_attn_implementation("eager"), "set_attn_implementation"),
        (lambda m: m.set_input_embeddings(nn.Embedding(320, 96)), "set_input_embeddings"),
        (lambda m: m.set_output_embeddings(nn.Linear(96, 320)), "set_output_embeddings"),
        (lambda m: m.set_decoder(m.model), "set_decoder"),
        (lambda m: m.resize_token_embeddings(400), "resize_token_embeddings"),
        (lambda m: m.add_adapter(None), "adapters"),
        (
            lambda m: setattr(m, "policy", "quest"),
            r"policy of a loaded .*from_pretrained\(\.\.\., policy='quest'\)",
        ),
        (lambda m: setattr(m, "num_threads", 2), "num_threads of a loaded model stays"),
        (lambda m: accelerate.cpu_offload(m, execution_device=torch.device("cpu")), "accelerate"),
        (lambda m: accelerate.dispatch_model(m, {"": "cpu"}, force_hooks=True), "accelerate"),
        (lambda m: accelerate.dispatch_model(m, {"model": 0, "lm_head": "cpu"}), "accelerate"),
        (lambda m: accelerate.cpu_offload_with_hook(m), "accelerate"),
    ],
)
def test_refused(model: Any, call: Callable[[Any], Any], message: str) -> None:
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    attributes = set(vars(model))
    with pytest.raises(NotImplementedError, match=message):
        call(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert set(vars(model)) == attributes
    assert not any("_hf_hook" in vars(module) for module in model.modules())
    assert greedy(model, random_tokens(1, 10), 3).shape == (1, 13)


def test_copies_of_the_weights_and_caches(model: Any) -> None:
    weights = copy.deepcopy(model.state_dict())
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    cache = model.new_cache()
    model(random_tokens(1, 10), past_key_values=cache)
    assert copy.deepcopy(cache).kv_lens == [10]


def test_conversions_to_what_it_is(model: Any) -> None:
    for convert in (
        lambda: model.float(),
        lambda: model.to("cpu"),
        lambda: model.to(torch.float32),
        lambda: model.to(torch.device("cpu"), torch.float32),
        lambda: model.type(torch.float32),
        lambda: model.cpu(),
    ):
        assert convert() is model
    for convert in (model.half, model.bfloat16, model.double, lambda: model.to("meta")):
        with pytest.raises(ValueError, match=r"cannot turn a model of torch\.float32 on cpu into"):
            convert()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU")
def test_conversion_to_a_gpu_that_is_not_there(model: Any) -> None:
    for convert in (model.cuda, lambda: model.to("cuda"), lambda: model.to("cuda:1")):
        with pytest.raises(ValueError, match=r"into another: .*; give dtype and device to Offl"):
            convert()


@pytest.mark.cuda
def test_conversions_on_a_gpu(tiny_folders: Any) -> None:
    from offload import OffloadedModel

    model = OffloadedModel.from_pretrained(tiny_folders["llama"], dtype="float16", device="cuda")
    for convert in (
        model.half,
        model.cuda,
        lambda: model.cuda(0),
        lambda: model.to("cuda"),
        lambda: model.to("cuda:0", torch.float16),
    ):
        assert convert() is model
    for convert in (model.float, model.cpu, lambda: model.to("cpu")):
        with pytest.raises(ValueError, match=r"cannot turn a model of torch\.float16 on cuda:0"):
            convert()


def test_compiling_changes_nothing(tiny_folders: Any) -> None:
    """Not the first pass either, which is when torch compiles."""
    model = load(tiny_folders["llama"], "full", ("cpu", None))
    tokens = random_tokens(1, 10)
    logits, generated = model(tokens).logits, greedy(model, tokens, 3)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(tokens).logits, logits)
    assert torch.equal(greedy(compiled, tokens, 3), generated)
    model.compile(backend="eager")
    cache = model.new_cache()
    assert torch.equal(model(tokens, past_key_values=cache).logits, logits)
    model(tokens[:, :1], past_key_values=cache)
    assert cache.kv_lens == [11]
    assert torch.equal(greedy(model, tokens, 3), generated)
