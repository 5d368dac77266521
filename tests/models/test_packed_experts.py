"""Experts of transformers whose matrices are packed against their own in float64."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from cases.linear_cases import packed, random
from cases.seeded import new_rng
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from offload.models.packed_experts import PackedExperts

_SIZES = {"hidden_size": 64, "num_experts_per_tok": 2}
KINDS = {
    "gpt_oss": lambda: GptOssExperts(
        GptOssConfig(**_SIZES, intermediate_size=96, num_local_experts=3)
    ),
    "qwen3_moe": lambda: Qwen3MoeExperts(
        Qwen3MoeConfig(**_SIZES, moe_intermediate_size=96, num_experts=3)
    ),
    "gelu": lambda: Qwen3MoeExperts(
        Qwen3MoeConfig(**_SIZES, moe_intermediate_size=96, num_experts=3, hidden_act="gelu")
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["q4", "t4", "q8"])
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_as_the_stock_ones(kind, format, num_tokens, device, pool):
    if device == "cuda" and format == "t4":
        pytest.skip("loaded as q8 for a GPU")
    rng, stock = new_rng(), KINDS[kind]().requires_grad_(False)
    stock.config._experts_implementation = "eager"
    made, names = PackedExperts(deepcopy(stock)), ("gate_up_proj", "down_proj")
    for name, width in zip(names, (64, 96), strict=True):
        weight = packed(rng, format, stock.get_parameter(name).numel() // width, width)
        made.pack(name, weight, torch.float32)
        stock.get_parameter(name).data = made.get_submodule(name).of_stock()
    for name, bias in made.named_parameters(recurse=False):
        bias.data = random(rng, torch.float32, *bias.shape)
        stock.get_parameter(name).data = bias.data.clone()
    x = random(rng, torch.float32, num_tokens, 64)
    chosen = torch.from_numpy(rng.random((num_tokens, 3)).argsort(1)[:, :2].copy())
    weights = random(rng, torch.float32, num_tokens, 2)
    wanted = stock.double()(x.double(), chosen, weights.double())
    if device == "cuda":
        is_exact = num_tokens > 32 or kind == "gelu"
        there = made.cuda()(x.cuda(), chosen.cuda(), weights.cuda()).cpu()
        every = [(there, 1e-4 if is_exact else 0.03)]
    else:
        every = [(made(x, chosen, weights), 1e-5), (made.run(pool, x, chosen, weights), 0.03)]
    for found, limit in every:
        assert (found - wanted).norm() / wanted.norm() < limit
