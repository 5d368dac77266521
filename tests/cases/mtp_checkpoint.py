"""Tiny checkpoints with a head for multi-token prediction."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from cases.every_type import tiny_model_of
from cases.tiny_models import VOCAB_SIZE
from safetensors.torch import load_file, save_file

_GROUP = 32
_FOUR_BITS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "int", "num_bits": 4, "group_size": _GROUP},
        }
    },
    "ignore": ["lm_head"],
}
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


def in_four_bits(folder: Path, *, head: bool) -> None:
    """Quantise the projections of a checkpoint's layers, and with `head` those of its head."""
    weights = load_file(folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    of_head = re.compile(rf"mtp\.|model\.layers\.{config['num_hidden_layers']}\.")
    for name, weight in [*weights.items()]:
        is_matrix = re.search(r"_proj(_\w+)?\.weight$", name) and weight.dim() == 2
        if not is_matrix or weight.shape[1] % _GROUP or (of_head.match(name) and not head):
            continue
        groups = weights.pop(name).unflatten(1, (-1, _GROUP))
        scales = (groups.abs().amax(-1) / 7).half()
        codes = ((groups / scales.float()[..., None]).round() + 8).clamp(0, 15).flatten(1).long()
        words = (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
        prefix = name.removesuffix("weight")
        weights |= {
            f"{prefix}weight_packed": torch.where(words >= 2**31, words - 2**32, words).int(),
            f"{prefix}weight_scale": scales,
            f"{prefix}weight_shape": torch.tensor(weight.shape),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(config | {"quantization_config": _FOUR_BITS}))
