"""The engines that the GPU pipeline is compared with, at tiny shapes on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.tiny_shapes import TINY_WINDOWED
from transformers import DynamicCache

from offload.bench.decode.baselines import all_on_gpu_graph, transformers_compiled
from offload.bench.decode.baselines.transformers_compiled import CannotCompileError, decode_compiled
from offload.bench.decode.baselines.transformers_decode import (
    cache_bytes,
    decode_seconds,
    filled_cache,
    prefill_seconds,
)
from offload.bench.decode.engines import describe, seconds_row
from offload.bench.decode.models import lean_model
from offload.measuring.synthetic.random_model import random_model
from offload.models import lean_model_maker
from offload.models.shape import MODEL_SHAPES, SHAPE_TYPES

pytestmark = pytest.mark.slow

KV_LEN = 50


@pytest.fixture(scope="module")
def stock() -> Any:
    model = random_model(MODEL_SHAPES["tiny"], device=torch.device("cpu"), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(5)  # attention and logits peaked enough to show mistakes
    return model


def test_caches_are_filled_in_every_layer(stock: Any) -> None:
    cache = filled_cache(stock, kv_len=KV_LEN, batch_size=2)
    assert cache.get_seq_length() == KV_LEN
    for layer in cache.layers:
        assert layer.keys is not None
        assert list(layer.keys.shape) == [2, 2, KV_LEN, 32]
        assert float(layer.keys.std()) == pytest.approx(1, abs=0.1)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))  # type: ignore[union-attr]
    assert cache_bytes(stock, kv_len=KV_LEN, batch_size=2) == held


def test_decoding_appends(stock: Any) -> None:
    cache = filled_cache(stock, kv_len=KV_LEN)
    seconds = decode_seconds(stock, cache, num_steps=3)
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert cache.get_seq_length() == KV_LEN + 5  # two to warm up
    assert prefill_seconds(stock, num_tokens=40) > 0


def tokens_one_by_one(model: Any, steps: int) -> list[int]:
    """What the stock model chooses after `filled_cache`, uncompiled."""
    cache, token, chosen = filled_cache(model, kv_len=KV_LEN), 0, []
    for position in range(KV_LEN, KV_LEN + steps):
        at = {"device": model.device}
        logits = model(
            input_ids=torch.tensor([[token]], **at),
            past_key_values=cache,
            position_ids=torch.tensor([[position]], **at),
        ).logits
        chosen.append(token := int(logits[0, -1].argmax()))
    return chosen


def test_the_compiled_step_is_one_graph_of_the_stock_model_s(
    stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inductor takes half a minute; what it is given is the same.
    monkeypatch.setattr(transformers_compiled, "OPTIONS", {"backend": "eager", "fullgraph": True})
    monkeypatch.setattr(transformers_compiled, "ATTENTION", "eager")
    found = decode_compiled(stock, kv_len=KV_LEN, num_steps=3)
    assert len(found.seconds) == 3
    assert found.compile_seconds > sum(found.seconds)
    assert [token for (token,) in found.tokens] == tokens_one_by_one(stock, 7)  # four to warm up
    assert stock.config._attn_implementation == "sdpa"  # as it was

    def breaks(*args: Any, **options: Any) -> None:
        torch._dynamo.graph_break()

    monkeypatch.setattr(stock, "forward", breaks)
    with pytest.raises(CannotCompileError, match=r"torch\.compile failed: "):
        decode_compiled(stock, kv_len=KV_LEN, num_steps=3)


def test_what_compiling_took_is_told() -> None:
    row = seconds_row("compiled", 300, 1, [0.004, 0.005, 0.006]) | {"compile_seconds": 41.3}
    assert describe(row).endswith("5.000 ± 0.800 ms, after 41 s of compiling")


@pytest.mark.parametrize("groups", [False, True])
def test_attention_of_a_step(groups: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4 * 32, generator=generator)
    cache = torch.randn(2, 2, 2, KV_LEN, 32, generator=generator)
    out = all_on_gpu_graph._sdpa(query, cache, sm_scale=0.2, groups=groups)
    q = query.view(2, 2, 2, 32).double()  # [n, num_kv_heads, group_size, head_dim]
    keys, values = cache.double().unbind(1)
    expected = (0.2 * q @ keys.transpose(-1, -2)).softmax(-1) @ values
    torch.testing.assert_close(out.double(), expected.reshape(2, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("name", ["default", "flash_attention, then sinks", "ours"])
def test_attentions_of_a_step(name: str, sinks: torch.Tensor | None) -> None:
    """Our kernel takes a power of two of tokens as one page."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4 * 32, generator=generator)
    cache = torch.randn(2, 2, 2, 64, 32, generator=generator)
    found = all_on_gpu_graph.attentions_over(query, cache, 0.2, sinks)
    if name not in found:
        assert (name == "default") == (sinks is not None)
        return
    q = query.view(2, 2, 2, 32).double()
    keys, values = cache.double().unbind(1)
    scores = 0.2 * q @ keys.transpose(-1, -2)
    total = scores.exp().sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp().view(2, 2, 1)
    expected = (scores.exp() / total) @ values
    torch.testing.assert_close(
        found[name]().double(), expected.reshape(2, -1), rtol=1e-4, atol=1e-5
    )


def windowed(name: str) -> Any:
    """A tiny model of a shape's type, with a window smaller and one larger than the context."""
    shape = replace(TINY_WINDOWED[name], windows=(24, 0, 24, 0))
    made = random_model(
        shape, device=torch.device("cpu"), dtype=torch.float32, model_type=SHAPE_TYPES[name]
    )
    for parameter_name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(5)
        elif parameter_name.endswith("sinks"):
            parameter.normal_(0.0, 1.0)
    return made


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", ["llama", *SHAPE_TYPES])
def test_all_on_gpu_computes_what_the_stock_model_does(
    stock: Any, name: str, batch_size: int
) -> None:
    model = stock if name == "llama" else windowed(name)
    engine = all_on_gpu_graph.AllOnGPU(lean_model(model), kv_len=KV_LEN, batch_size=batch_size)
    cache = DynamicCache(config=model.config)
    rings = [keys_values.shape[3] for keys_values in engine.caches]
    assert rings == [KV_LEN] * 4 if name == "llama" else [24, KV_LEN] * 2
    for layer_idx, (ring, keys_values) in enumerate(zip(rings, engine.caches, strict=True)):
        before = torch.arange(KV_LEN - 1) % ring  # what is before the window, nobody reads
        keys, values = keys_values[:, :, :, before].unbind(1)
        cache.update(keys, values, layer_idx)
    engine.tokens.copy_(torch.arange(7, 7 + batch_size))
    tokens = engine.tokens[:, None].clone()
    logits = engine.step()
    expected = model(
        input_ids=tokens, past_key_values=cache, position_ids=torch.full_like(tokens, KV_LEN - 1)
    ).logits[:, -1]
    error = (logits - expected).double().norm() / expected.double().norm()
    assert float(error) < 1e-5
    assert torch.equal(engine.tokens, expected.argmax(-1))
    for ring, layer, keys_values in zip(rings, cache.layers, engine.caches, strict=True):
        for made, kept in zip((layer.keys, layer.values), keys_values.unbind(1), strict=True):
            assert made is not None
            last = kept[:, :, (KV_LEN - 1) % ring]
            torch.testing.assert_close(made[:, :, -1], last, rtol=1e-4, atol=1e-5)
    assert len(engine.decode_seconds(2)) == 2
    assert engine.kv_bytes == batch_size * sum(rings) * 2 * 2 * 32 * 4


@pytest.mark.cuda
def test_the_captured_step_is_the_stock_model_s() -> None:
    device = torch.device("cuda")
    model = random_model(MODEL_SHAPES["tiny"], device=device, dtype=torch.bfloat16)
    engine = all_on_gpu_graph.AllOnGPU(lean_model_maker("llama")(model), kv_len=2000)
    cache = DynamicCache(config=model.config)
    for layer_idx, keys_values in enumerate(engine.caches):
        keys, values = keys_values[:, :, :, :1999].clone().unbind(1)
        cache.update(keys, values, layer_idx)
    tokens = engine.tokens.fill_(7)[:, None].clone()
    assert len(engine.decode_seconds(1)) == 1  # and some to warm up, of other tokens
    engine.tokens.fill_(7)
    logits = engine.step()
    expected = model(
        input_ids=tokens, past_key_values=cache, position_ids=torch.full_like(tokens, 1999)
    ).logits[:, -1]
    error = (logits - expected).double().norm() / expected.double().norm()
    assert float(error) < 2e-2


# torch's inductor uses what torch deprecates when it is first imported, and warns of float32 and of
# a first capture that has nothing in it.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:TensorFloat32", "ignore:The CUDA Graph is empty"
)
@pytest.mark.cuda
def test_the_compiled_step_is_captured() -> None:
    model = random_model(MODEL_SHAPES["tiny"], device=torch.device("cuda"), dtype=torch.float32)
    found = decode_compiled(model, kv_len=KV_LEN, num_steps=3)
    assert [token for (token,) in found.tokens] == tokens_one_by_one(model, 7)


@pytest.mark.cuda
def test_transformers_offloads() -> None:
    device = torch.device("cuda")
    model = random_model(MODEL_SHAPES["tiny"], device=device, dtype=torch.bfloat16)
    cache = filled_cache(model, kv_len=300, offloaded=True)
    assert len(decode_seconds(model, cache, num_steps=2)) == 2
    devices = {layer.keys.device.type for layer in cache.layers if layer.keys is not None}
    assert "cpu" in devices
