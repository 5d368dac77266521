"""LoRA beside frozen linear layers, YaRN beside the stock rotary embedding, peft's file format."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
YARN_FACTOR = 4.0


class LoraLinear(nn.Module):
    """y = x @ weight.T + scale * (x @ A.T) @ B.T; A [rank, in] and B [out, rank] are float32.

    The weight is frozen, so that autograd keeps x for A alone.
    """

    weight: Tensor
    scale: float
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    enabled: bool

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        if base.bias is not None:
            raise ValueError("linear layers with a bias are not supported")
        self.weight = base.weight.requires_grad_(False)
        self.scale = alpha / rank
        device, (num_out, num_in) = base.weight.device, base.weight.shape
        self.lora_A = nn.Parameter(torch.empty(rank, num_in, device=device))
        self.lora_B = nn.Parameter(torch.zeros(num_out, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight)
        if not self.enabled:
            return y
        low = functional.linear(x, self.lora_A.to(x.dtype))
        return y + functional.linear(low, (self.lora_B * self.scale).to(x.dtype))


class _FusedNorm(nn.Module):
    """RMSNorm that keeps its input alone for the way back, not four float32 copies."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.weight, self.eps = stock.weight.requires_grad_(False), stock.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class AdaptedModel:
    """The stock model, frozen, with YaRN and an adapter that can be switched off together."""

    def __init__(self, stock: Any, rank: int, alpha: float) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        stock.requires_grad_(False)
        self.model, self.config = stock, stock.config
        self.rank, self.alpha = rank, alpha
        self.long_config = long_config(stock.config)
        self._stock_rotary = stock.model.rotary_emb
        self._long_rotary = type(self._stock_rotary)(self.long_config).to(stock.device)
        self.linears: dict[str, LoraLinear] = {}
        for name, module in list(stock.named_modules()):
            parent, _, child = name.rpartition(".")
            if isinstance(module, LlamaRMSNorm):
                setattr(stock.get_submodule(parent), child, _FusedNorm(module))
            elif child in TARGETS:
                self.linears[name] = LoraLinear(module, rank, alpha)
                setattr(stock.get_submodule(parent), child, self.linears[name])
        if len(self.linears) != stock.config.num_hidden_layers * len(TARGETS):
            raise ValueError(f"found {len(self.linears)} linear layers to adapt")
        stock.model.rotary_emb = self._long_rotary

    @contextlib.contextmanager
    def as_stock(self) -> Iterator[None]:
        """Without YaRN and without the adapter."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, adapted: bool) -> None:
        self.model.model.rotary_emb = self._long_rotary if adapted else self._stock_rotary
        for linear in self.linears.values():
            linear.enabled = adapted

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states [batch, length, hidden_size] of tokens [batch, length]."""
        states: Tensor = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def parameters(self) -> list[nn.Parameter]:
        return [weight for linear in self.linears.values() for weight in linear.parameters()
                if weight.requires_grad]  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The adapter's weights by peft's names, float32."""
        return {
            f"base_model.model.{name}.{kind}.weight": getattr(linear, kind).detach()
            for name, linear in self.linears.items()
            for kind in ("lora_A", "lora_B")
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        own = self.state()
        if own.keys() != state.keys():
            raise ValueError("the checkpoint's adapter is of another model")
        for name, weight in own.items():
            weight.copy_(state[name])

    def save(self, folder: Path, base_name: str) -> None:
        """adapter_config.json and adapter_model.safetensors, bfloat16, as peft reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: weight.bfloat16().cpu() for name, weight in self.state().items()}
        save_file(
            {name: weight.contiguous() for name, weight in weights.items()},
            folder / "adapter_model.safetensors",
            {"format": "pt"},
        )
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": sorted(TARGETS),
            "use_dora": False,
            "use_rslora": False,
        }
        (folder / "adapter_config.json").write_text(json.dumps(described, indent=1) + "\n")


def long_config(stock: Any) -> Any:
    """The stock model's config with YaRN over four times its positions."""
    config = copy.deepcopy(stock)
    original = stock.max_position_embeddings
    config.max_position_embeddings = int(original * YARN_FACTOR)
    config.rope_parameters = rope_parameters(stock.rope_parameters["rope_theta"], original)
    return config


def rope_parameters(theta: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": original,
    }
