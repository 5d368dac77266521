"""Tiny checkpoints with a head for multi-token prediction."""

from __future__ import annotations

from pathlib import Path

import torch
from cases.every_type import tiny_model_of
from cases.tiny_models import VOCAB_SIZE
from safetensors.torch import load_file, save_file

QWEN = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]


def save_with_head(folder: Path, model_type: str) -> Path:
    """A tiny checkpoint, and a head of random weights, its layer that of one of its own."""
    model = tiny_model_of(model_type, vocab_size=VOCAB_SIZE)
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(folder)
    num_layers, size = model.config.num_hidden_layers, model.config.hidden_size
    weights = load_file(folder / "model.safetensors")
    attention = "self_attn.o_proj.weight"
    of_layer = max(x for x in weights if x.endswith(attention)).removesuffix(attention)
    layer = model_layer = f"model.layers.{num_layers}."
    names = "enorm", "hnorm", "eh_proj", "shared_head.norm"
    if model_type in QWEN:
        model_layer, layer = "mtp.", "mtp.layers.0."
        names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    made = torch.Generator().manual_seed(2)
    for name in names:
        shape = (size, 2 * size) if name in ("fc", "eh_proj") else (size,)
        drawn = torch.randn(shape, generator=made) * 0.2
        weights[f"{model_layer}{name}.weight"] = drawn
    for name in [x for x in weights if x.startswith(of_layer)]:
        weights[layer + name.removeprefix(of_layer)] = weights[name].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
