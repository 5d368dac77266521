"""Kernels that stand in for stock modules give what the modules give."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from cases.device_cases import NO_GPU
from cases.every_type import tiny_model_of
from torch import nn

from offload.runtime.stand_ins import EXPERTS, StandIns, _gate_of

NORMS = {
    "llama.LlamaRMSNorm": {},
    "gemma3.Gemma3RMSNorm": {},
    "gemma4.Gemma4RMSNorm": {"with_scale": False},
    "gpt_oss.GptOssRMSNorm": {},
    "olmo2.Olmo2RMSNorm": {},
    "qwen3_next.Qwen3NextRMSNorm": {},
}


def norm_of(name: str, **options: Any) -> nn.Module:
    model_type, kind = name.split(".")
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    made: nn.Module = getattr(module, kind)(96, eps=1e-5, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_known_by_their_numbers(name: str, dtype: torch.dtype, device: str) -> None:
    norm = norm_of(name, **NORMS[name]).to(device, dtype)
    x = torch.randn(2, 1, 3, 96, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    stand_ins, expected = StandIns(norm), norm(x)
    with torch.no_grad(), stand_ins.of_rows(2):
        assert "forward" in vars(norm)
        found = norm(x)
    assert "forward" not in vars(norm)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_other_norms_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    norm: Any = norm_of("llama.LlamaRMSNorm")
    stock = type(norm).forward
    for wrong in (lambda self, x: stock(self, x) + 0.01, lambda self, x, gate=None: stock(self, x)):
        monkeypatch.setattr(type(norm), "forward", wrong)
        with StandIns(norm).of_rows(1):
            assert "forward" not in vars(norm)


def test_norms_of_other_inputs_stay() -> None:
    """With a weight that makes their outputs float32, or of rows of another length."""
    model = nn.Sequential(norm_of("llama.LlamaRMSNorm"), nn.Linear(4, 4, dtype=torch.bfloat16))
    model.append(nn.RMSNorm((2, 32), eps=1e-5, elementwise_affine=False))
    model.dtype = torch.bfloat16
    with StandIns(model).of_rows(1):
        assert not any("forward" in vars(module) for module in model)


@pytest.mark.parametrize(
    ("model_type", "gate"),
    [
        ("glm4_moe_lite", "silu"),
        ("nemotron_h", "relu2"),
        ("gemma4_text", "gelu_tanh"),
        ("gpt_oss", None),
    ],
)
def test_experts_of_few_tokens(model_type: str, gate: str | None) -> None:
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    changes = sizes | {"enable_moe_block": True} if gate == "gelu_tanh" else {}
    stock = tiny_model_of(model_type, **changes)
    experts = [module for module in stock.modules() if hasattr(module, "has_gate")]
    assert experts
    assert {_gate_of(module) for module in experts} == {gate}
    ids, stand_ins = torch.arange(3, 23)[None], StandIns(stock)
    config = stock.config.get_text_config()
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        with stand_ins.of_rows(20):
            assert config._experts_implementation == EXPERTS
            found = stock(input_ids=ids).logits
        stand_ins._sorts_by_experts = True
        for rows, is_kernel in ((16, True), (17, False)):
            with stand_ins.of_rows(rows):
                assert (config._experts_implementation == EXPERTS) == is_kernel
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
