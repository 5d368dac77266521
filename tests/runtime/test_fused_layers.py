"""Decode steps of generic layers with the gated delta rule, by fused kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_model_of
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from offload import OffloadedModel
from offload.runtime.fused_layers import TYPES

IDS = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :11] = 0


def both(folder: Path, model_type: str, **options: Any) -> tuple[Any, Any]:
    """The stock model, and this one, of random weights: norms and rates, too."""
    made = tiny_model_of(model_type)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    made.save_pretrained(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=options.get("dtype")).eval()
    return stock, OffloadedModel.from_pretrained(folder, num_threads=2, page_tokens=16, **options)


def tokens(model: Any, first: int = 0) -> list[list[int]]:
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    told = model.generate(input_ids=IDS[first:], attention_mask=MASK[first:], **settings)
    return told.tolist()


@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_are_those_of_the_stock_model(tmp_path: Path, model_type: str) -> None:
    stock, model = both(tmp_path, model_type)
    for first in (0, 1):  # a padded batch, and a row alone
        assert tokens(model, first) == tokens(stock, first)
    for layer in model.model.layers:  # nothing went to the stock modules
        assert layer.forward._mixer is not None
        assert layer.forward._mlp is not None
    batch = {"input_ids": IDS[:1].expand(20, -1)}  # more rows than the kernels take
    assert model.generate(**batch, max_new_tokens=4).shape == (20, 44)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_of_steps_are_close_in_half(tmp_path: Path, model_type: str, dtype: str) -> None:
    """Of steps, to those in float32, they are as close as the stock model's."""
    stock, model = both(tmp_path, model_type, dtype=dtype)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()

    def logits(each: Any) -> torch.Tensor:
        cache = model.new_cache() if each is model else DynamicCache(config=stock.config)
        with torch.no_grad():
            each(input_ids=IDS[:, :32], past_key_values=cache)
            steps = [each(input_ids=IDS[:, [i]], past_key_values=cache) for i in range(32, 40)]
        return torch.cat([step.logits for step in steps], 1).float()

    expected = logits(exact)
    off, off_stock = ((logits(x) - expected).norm() / expected.norm() for x in (model, stock))
    assert off < 1.5 * off_stock + 1e-3


def test_changes_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place or of a parameter; and a hook is called, by the modules."""
    stock, model = both(tmp_path, "qwen3_5_text")
    passes, forward = list[int](), Qwen3_5GatedDeltaNet.forward

    def count(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        passes.append(hidden_states.shape[1])
        return forward(module, hidden_states, *args, **kwargs)

    monkeypatch.setattr(Qwen3_5GatedDeltaNet, "forward", count)
    before = tokens(model)
    assert set(passes) == {40}  # none of a step
    for each in (stock, model):
        layer = each.model.layers[0]
        with torch.no_grad():
            layer.input_layernorm.weight.add_(0.5)
            layer.linear_attn.A_log.sub_(2.0)
        layer.mlp.down_proj.weight = torch.nn.Parameter(-2.0 * layer.mlp.down_proj.weight.detach())
    after = tokens(model)
    assert after == tokens(stock) != before
    seen, passes[:] = list[int](), []
    hook = model.model.layers[0].linear_attn.out_proj.register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].shape[1])
    )
    assert tokens(model) == after
    assert seen.count(1) == 15
    assert passes.count(1) == 15  # of this layer alone
    hook.remove()
