"""What heads share with the layer above: against float64 attention of the stock model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_models import TINY_MODELS, make_tiny_model, random_tokens

from offload.models import lean_model_maker
from offload.models.shape import MODEL_SHAPES
from offload.policies.lychee_decode.overlap import NUM_QUERIES, check_overlap, head_overlap

NUM_TOKENS, BUDGET = 150, 24


def model_with_a_head_alike(name: str) -> Any:
    """All layers are the same but for the keys of head 1, and change what they see but little."""
    stock = make_tiny_model(name, attn_implementation="eager")
    layers = stock.model.layers
    with torch.no_grad():
        for layer in layers:
            keys = layer.self_attn.k_proj.weight[32:].clone()
            layer.load_state_dict(layers[0].state_dict())
            layer.self_attn.k_proj.weight[32:] = keys
        for layer in layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                for parameter in last.parameters():
                    parameter.mul_(0.01)
    return stock


def reference(stock: Any, tokens: torch.Tensor, budget: int) -> np.ndarray:
    """[num_layers - 1, num_kv_heads], of eager attention in float64 and sets of tokens."""
    with torch.no_grad():
        attentions = stock.double()(tokens[None], output_attentions=True).attentions
    layers = [a[0].numpy().reshape(2, 3, len(tokens), -1).sum(1) for a in attentions]
    shares = np.zeros((len(layers) - 1, 2))
    for row, head in np.ndindex(shares.shape):
        for position in range(len(tokens) - 32, len(tokens)):
            above, below = (
                set(np.argsort(-layers[layer][head, position, : position + 1])[:budget])
                for layer in (row, row + 1)
            )
            shares[row, head] += len(above & below) / budget / 32
    return shares


@pytest.mark.parametrize("name", list(TINY_MODELS))
def test_shares_are_those_of_the_stock_model(name: str) -> None:
    tokens, calls = random_tokens(NUM_TOKENS), []
    stock = model_with_a_head_alike(name)
    lean = lean_model_maker(TINY_MODELS[name][0])(stock)
    found = head_overlap(lean, tokens, BUDGET, on_progress=lambda: calls.append(1))
    expected = reference(stock, tokens, BUDGET)
    assert (expected[:, 0] > expected[:, 1] + 0.2).all()
    # A few tokens are so nearly as heavy as others that float32 may take these instead.
    np.testing.assert_allclose(found.shares, expected, rtol=0, atol=2.5 / BUDGET / 32)
    assert (found.num_tokens, found.budget_tokens) == (NUM_TOKENS, BUDGET)
    assert len(calls) == 2 * 3


def test_layers_that_are_alike_share_everything_and_others_what_chance_gives() -> None:
    """Layers that add nothing see the same states: with the same weights they find the same."""
    for same in (True, False):
        stock = make_tiny_model("llama", num_hidden_layers=4)
        layers = stock.model.layers
        with torch.no_grad():
            for layer in layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
                layer.input_layernorm.weight.fill_(1.0)
                if same:
                    layer.load_state_dict(layers[0].state_dict())
        lean = lean_model_maker("llama")(stock)
        found = head_overlap(lean, random_tokens(1, 480), 60)
        chance = np.mean([60 / n for n in range(449, 481)])
        assert found.by_chance == pytest.approx(chance)
        if same:
            np.testing.assert_array_equal(found.shares, 1.0)
        else:
            assert found.shares.mean() == pytest.approx(chance, rel=0.5)


def test_the_least_text() -> None:
    """Its first query sees one token more than are compared; one fewer is refused."""
    lean = lean_model_maker("llama")(make_tiny_model("llama"))
    found = head_overlap(lean, random_tokens(40), 40 - NUM_QUERIES)
    assert (found.shares >= 0).all()
    assert (found.shares <= 1).all()
    message = (
        "--budget-tokens 9 needs a text of at least 41 tokens, got 40: .* lower it, or raise --con"
    )
    with pytest.raises(ValueError, match=message):
        head_overlap(lean, random_tokens(40), 9)


@pytest.mark.parametrize(
    ("num_tokens", "budget_tokens", "message"),
    [
        (131073, 1024, "a text of 131073 tokens exceeds the 131072 tokens that this model reads"),
        (4096, 0, "--budget-tokens 0 must be at least 1"),
        (1000, 1024, "--budget-tokens 1024 needs a text of at least 1056 tokens, got 1000"),
    ],
)
def test_what_cannot_be_measured(num_tokens: int, budget_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_overlap(MODEL_SHAPES["llama-3.1-8b"], num_tokens, budget_tokens)


def test_a_model_of_one_layer() -> None:
    lean = lean_model_maker("llama")(make_tiny_model("llama", num_hidden_layers=1))
    with pytest.raises(ValueError, match="this model has one layer"):
        head_overlap(lean, random_tokens(100), 10)
