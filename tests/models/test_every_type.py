"""docs/models.md says of each causal type of transformers what a tiny model of it does."""

from __future__ import annotations

import pytest
import torch
from cases.every_type import tiny_model_of
from compatibility.model_types import GENERIC, TYPES, judged, rows
from transformers import DynamicCache

from offload.models.missing_features import READ_AT_ONCE


def test_the_table_has_every_type() -> None:
    assert sorted(rows()) == TYPES
    assert sum(word == GENERIC for word, _ in rows().values()) >= 110


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_the_table_is_right(model_type: str) -> None:
    assert judged(model_type)[0] == rows()[model_type][0]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [x for x, row in rows().items() if row == (GENERIC, "")])
@pytest.mark.filterwarnings("ignore")
def test_prompts_that_are_read_in_parts(model_type: str) -> None:
    """Transformers' modules give the same logits, but those that are known to forget states."""
    stock, last = tiny_model_of(model_type).eval(), list[torch.Tensor]()
    ids = torch.randint(3, 250, (1, 95), generator=torch.Generator().manual_seed(1))
    for stops in ((95,), (79, 95)):
        cache, start = DynamicCache(config=stock.config), 0
        for stop in stops:
            new, mask = ids[:, start:stop], torch.ones(1, stop)
            with torch.no_grad():
                out = stock(new, attention_mask=mask, past_key_values=cache, use_cache=True)
            start = stop
        last.append(out.logits[0, -1])
    difference = float((last[0] - last[1]).abs().max() / last[0].std())
    assert (difference > 1e-3) == (model_type in READ_AT_ONCE)
