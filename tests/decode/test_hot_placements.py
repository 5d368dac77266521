"""Which heads may have hot rows, and heads that reuse a selection among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, SLOW_INLINE, STREAM, each_of, greedy, load, small
from cases.inside import decoder_of
from cases.tiny_models import make_tiny_model, random_tokens

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.policies.registry import make_policy


def tidal(**options: Any) -> Any:
    window = {"budget_tokens": 64, "sink_tokens": 4, "recent_tokens": 16}
    return make_policy("tidal_decode", dense_layers=1, select_layers=(1,), **window | options)


def text_of(policy: Any, text: str) -> str:
    return HeadPlacement.from_text(text).with_hot_rows(policy, 6).text().replace("\n", " ")


def test_where_they_may_be() -> None:
    """The layer below one of the GPU that selects has its rows fetched: its tokens come late."""
    assert text_of(tidal(), "GG GG gg gg ..") == "GG GG gg hh hh"
    assert text_of(small("quest"), "GG .. .. G. ..") == "GG hh hh Gh hh"
    assert text_of(small("streaming_llm"), "GG ..") == "GG .."
    assert text_of(make_policy("full"), "G. ..") == "G. .."


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (make_policy("quest", dense_layers=0), "hh hh hh"),  # layer 0
        (small("quest"), "GG h. hh"),  # beside a head of the CPU
        (tidal(), "GG GG hh"),  # right below heads that select
        (tidal(budget_tokens=20), "GG GG .. hh"),  # nothing beyond the window
    ],
)
def test_where_they_may_not_be(policy: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be placed HOT: hot rows are of heads that"):
        HeadPlacement.from_text(text).check_policy(policy, 6)


backend = each_of(SLOW_INLINE, FLAGS, STREAM, GRAPH)


def test_heads_that_reuse(backend, tmp_path) -> None:
    """They attend to what was handed down to them, and to more: nearer to full attention."""
    stock = make_tiny_model("llama", num_hidden_layers=6)
    stock.save_pretrained(tmp_path)
    model = load(tmp_path, tidal(), backend)
    decoder, tokens = decoder_of(model), random_tokens(1, 200, seed=8)
    places = HeadPlacement.from_text("GG GG gg gg gg gg")
    decoder.place(places)
    greedy(model, tokens, 24)
    decoder.place(places.with_hot_rows(decoder.attention.policy, 6))
    assert (decoder.placement.places == Place.HOT).sum() == 6
    greedy(model, tokens, 24)
    hot = decoder.slots.steps.step.resident.hot
    hits, misses = hot.map.take_counts()
    assert hits > misses > 0
    model = load(tmp_path, tidal(budget_tokens=256), backend)
    decoder = decoder_of(model)
    decoder.place(places.with_hot_rows(decoder.attention.policy, 6))
    assert torch.equal(greedy(model, tokens, 24), greedy(stock, tokens, 24))
    assert np.isin(decoder.placement.places, (Place.GPU, Place.GATHER, Place.HOT)).all()
