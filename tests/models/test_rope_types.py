"""Every rope_type of transformers: its context, and stock's tokens on both sides of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import GRAPH, INLINE, STREAM, greedy, load
from cases.tiny_models import make_tiny_model, random_tokens
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offload import OffloadedModel
from offload.models.base import context_limit

POSITIONS = 64
HALF = 16  # frequencies of a head
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": POSITIONS},
    "longrope": {
        "factor": 3.0,
        "original_max_position_embeddings": POSITIONS,
        "short_factor": [1.0 + 0.01 * i for i in range(HALF)],
        "long_factor": [1.0 + 0.5 * i for i in range(HALF)],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": POSITIONS // 2,
    },
    "proportional": {"factor": 3.0, "partial_rotary_factor": 0.5},
}
EXTENDED = {"linear", "dynamic", "yarn", "longrope", "proportional"}


def stock_with(rope_type: str, **changes: Any) -> Any:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPES.get(rope_type, {}), **changes}
    return make_tiny_model("llama", max_position_embeddings=POSITIONS, rope_parameters=rope)


@pytest.fixture(params=sorted(ROPES))
def rope_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(rope_type: str, tmp_path: Path) -> tuple[Any, Any]:
    stock = stock_with(rope_type)
    stock.save_pretrained(tmp_path)
    options: dict[str, Any] = {"num_threads": 1, "page_tokens": 16, "prefill_slice_tokens": 24}
    return stock, OffloadedModel.from_pretrained(tmp_path, **options)


def test_all_types_are_here() -> None:
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}


def test_context(rope_type: str) -> None:
    tokens, reason = context_limit(stock_with(rope_type).config)
    assert tokens == (3 * POSITIONS if rope_type in EXTENDED else POSITIONS)
    assert f"max_position_embeddings={POSITIONS}" in reason
    assert (f"times the {rope_type} rope factor 3.0" in reason) == (rope_type in EXTENDED)


def test_tokens_are_those_of_stock(pair: tuple[Any, Any], rope_type: str) -> None:
    """A prompt below the old positions, one that decoding takes past them, one beyond them."""
    stock, model = pair
    lengths = [30, 50, 90] if rope_type in EXTENDED else [30, 40]
    for length in lengths:
        tokens = random_tokens(1, length, seed=length)
        assert torch.equal(greedy(model, tokens, 24), greedy(stock, tokens, 24)), length
    if rope_type not in EXTENDED:
        with pytest.raises(ValueError, match=r"65 tokens exceeds the 64.*max_position_embeddings"):
            model(random_tokens(1, 65))
        return
    with pytest.raises(ValueError, match=rf"193 tokens exceeds the 192.*{rope_type} rope factor"):
        model(random_tokens(1, 193))


def test_ragged_rows_and_a_second_turn(pair: tuple[Any, Any], rope_type: str) -> None:
    stock, model = pair
    length = 70 if rope_type in EXTENDED else 36
    tokens, mask = random_tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :20] = 0
    ours, expected = (greedy(m, tokens, 24, attention_mask=mask) for m in (model, stock))
    assert torch.equal(ours, expected)
    cache = model.new_cache()
    with torch.no_grad():
        expected_past = stock(tokens[:1, :30], use_cache=True).past_key_values
        model(tokens[:1, :30], past_key_values=cache)
        ours_logits = model(tokens[:1, 30:], past_key_values=cache).logits
        expected_logits = stock(tokens[:1, 30:], past_key_values=expected_past).logits
    torch.testing.assert_close(ours_logits, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [INLINE, STREAM, GRAPH])
@pytest.mark.parametrize("name", ["yarn", "dynamic", "longrope"])
def test_backends(name: str, backend: tuple[str, str | None], tmp_path: Path) -> None:
    """Decoding crosses the threshold, and the same captured step is below it again afterwards."""
    if name != "yarn" and backend[1] == "graph":
        pytest.skip("frequencies that follow the length are not captured: test_decode_backend.py")
    stock = stock_with(name)
    stock.save_pretrained(tmp_path)
    model = load(tmp_path, "full", backend)
    for length in (56, 30):
        tokens = random_tokens(1, length)
        assert torch.equal(greedy(model, tokens, 24), greedy(stock, tokens, 24)), length


def test_positions_that_are_extended_already() -> None:
    """Checkpoints with a new max_position_embeddings, and factors that say no more than it."""
    for name in ("yarn", "longrope"):
        config = stock_with(name, original_max_position_embeddings=POSITIONS // 3).config
        assert context_limit(config) == (POSITIONS, f"max_position_embeddings={POSITIONS}")


def test_another_conversation_does_not_decide(tmp_path: Path) -> None:
    """transformers' dynamic frequencies stay those of the longest sequence so far."""
    stock_with("dynamic").save_pretrained(tmp_path)
    model = OffloadedModel.from_pretrained(tmp_path, num_threads=1)
    model(random_tokens(1, 180))
    for length in (POSITIONS, 90):
        tokens = random_tokens(1, length)
        with torch.no_grad():
            expected = stock_with("dynamic")(tokens).logits
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_computed(tmp_path: Path) -> None:
    config = stock_with("linear").config
    config.rope_parameters["rope_type"] = "axial"
    with pytest.raises(NotImplementedError, match=r"rope_type='axial' is not.*available: default"):
        context_limit(config)
    config.rope_parameters |= {"rope_type": "linear", "factor": "3"}
    with pytest.raises(ValueError, match="factor of rope_type='linear' must be positive, got '3'"):
        context_limit(config)
    stock_with("linear", partial_rotary_factor=0.5).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="rotates 16 of head_dim=32 elements"):
        OffloadedModel.from_pretrained(tmp_path)
