"""NaN and infinity in a decode step end in an error that names the layer, wherever heads are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, NATIVE, STREAM, check_works, each_of, load
from cases.inside import decoder_of, runtime_of
from cases.slowly import slow_but
from cases.tiny_models import make_tiny_model, random_tokens

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.sampling import Sampler, SamplingOptions
from offload.policies.registry import make_policy
from offload.selection.policy import DENSE, RETRIEVE, REUSE

NUM_LAYERS, QO_HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 32
BAD = [float("nan"), float("inf"), float("-inf")]
OPTIONS = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 16}


SLOW_FLAGS = pytest.param(*FLAGS.values, id="flags", marks=pytest.mark.slow)
backend = each_of(INLINE, SLOW_FLAGS, STREAM, GRAPH)


@pytest.fixture(scope="module")
def window(backend, tiny_folders):
    """Full attention: of short rows the GPU's window is all there is."""
    return load(tiny_folders["llama"], "full", backend)


@pytest.fixture(scope="module", params=["tidal_decode", "lychee_decode"])
def placed(request, backend, tiny_folders):
    """Heads of all kinds, in every layer that can have them, and none on the CPU."""
    options = {"dense_layers": 1, "select_layers": (1,)} if request.param == "tidal_decode" else {}
    policy = make_policy(request.param, **OPTIONS, **options)
    model = load(tiny_folders["llama"], policy, backend)
    decoder = decoder_of(model)
    places, roles = np.array(decoder.placement.places), decoder.attention.roles
    places[(roles == RETRIEVE) | (roles == DENSE)] = Place.GPU
    places[roles == REUSE] = Place.GATHER
    decoder.place(HeadPlacement(places))
    return model


def spoil(side: str, bad: float, layer_idx: int) -> Callable[..., None]:
    """For `after_projection`: a number of the second KV head, or of a query head of it."""
    head = {"query": QO_HEADS - 1, "key": QO_HEADS + 1, "value": QO_HEADS + KV_HEADS + 1}[side]

    def overwrite(layer: int, first_row: int, qkv: torch.Tensor, positions: torch.Tensor) -> None:
        if layer == layer_idx:
            qkv[:, head * HEAD_DIM + 3] = bad

    return overwrite


def check_error(step: Callable[[], Any], layer_idx: int) -> None:
    """It names the layer, or the next, whose keys tell."""
    with pytest.raises(RuntimeError, match="non-finite") as caught:
        step()
    (named,) = re.findall(r"layer (\d)", str(caught.value))
    assert int(named) in (layer_idx, layer_idx + 1), caught.value


@torch.no_grad()
def check_steps(model: Any, kv_len: int, layers: range | list[int]) -> None:
    """Every operand goes bad, in a bare step and in one that chooses; the cache stays as it was."""
    runtime, token = runtime_of(model), random_tokens(1, 1)
    cache = model.new_cache()
    model(random_tokens(1, kv_len), past_key_values=cache)

    def bare() -> torch.Tensor:
        return model(token, past_key_values=cache).logits

    def chooses() -> torch.Tensor:
        return runtime.choose_tokens(cache, token[0], torch.tensor([kv_len]))

    expected = bare()
    cache.crop(-1)
    for layer_idx, side, bad in itertools.product(layers, ("query", "key", "value"), BAD):
        decoder_of(model).after_projection = spoil(side, bad, layer_idx)
        try:
            check_error(bare, layer_idx)
            check_error(chooses, layer_idx)
        finally:
            decoder_of(model).after_projection = None
        assert cache.kv_lens == [kv_len]
    torch.testing.assert_close(bare(), expected)


def test_in_the_window(window, stock_models):
    check_steps(window, 20, range(NUM_LAYERS))
    check_works(window, stock_models["llama"])


def test_beside_the_window(window, stock_models):
    """The CPU has most of the tokens, but not the new one."""
    check_steps(window, 120, [NUM_LAYERS - 1])
    check_works(window, stock_models["llama"])


@pytest.mark.parametrize("kv_len", slow_but([20, 150], 150))
def test_in_heads_that_stay_on_the_gpu(placed, stock_models, kv_len):
    check_steps(placed, kv_len, range(NUM_LAYERS))
    check_works(placed, stock_models["llama"])


@pytest.mark.parametrize("device_and_backend", [NATIVE, INLINE, FLAGS, STREAM, GRAPH])
def test_in_logits(device_and_backend, tmp_path):
    """Nothing is chosen from NaN, after the prompt or after a token, which is taken back."""
    stock = make_tiny_model("qwen2")
    with torch.no_grad():
        stock.lm_head.weight[7, 3] = torch.nan
    stock.save_pretrained(tmp_path)
    model = load(tmp_path, "full", device_and_backend)
    prompt = random_tokens(2, 20).to(model.device)
    message = "non-finite logits in row 0 of the step: .* in layer 2"
    with pytest.raises(RuntimeError, match=message):
        model.generate(prompt, max_new_tokens=3)
    cache = model.new_cache()
    assert model(prompt, past_key_values=cache).logits[..., 7].isnan().all()  # as stock does
    for temperature in (0.0, 0.8):
        options = SamplingOptions(temperature=temperature)
        if runtime_of(model).chooses_tokens(options):  # else the stock loop draws, and raises
            last = random_tokens(2, 1)[:, 0], torch.full((2,), 20)
            with torch.no_grad(), pytest.raises(RuntimeError, match=message):
                runtime_of(model).choose_tokens(cache, *last, sampler=Sampler(options, 2))
            assert cache.kv_lens == [20, 20]
    with pytest.raises(RuntimeError, match=r"non-finite|nan"):
        model.generate(prompt, max_new_tokens=3, do_sample=True)
