"""The model of 32,768 positions as a GGUF file of 16 bits, for engines that read nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from offload.loading.embedded_package import embedded_gguf


def long_gguf(folder: Path, path: Path) -> Path:
    """Write what a merged folder of the embedded model has as GGUF, unless it is there.

    Matrices stay bfloat16, bit by bit; norms become float32, which llama.cpp computes them in.
    Tokenizer and shapes are those of the embedded GGUF file, positions (YaRN) the folder's.

    Args:
        folder: as `offload.loading.gguf.long_context_folder` makes it: llama, YaRN.
        path: the file to write.
    """
    if path.is_file():
        return path
    config = json.loads((folder / "config.json").read_text("utf-8"))
    rope, of_file = config["rope_parameters"], gguf.GGUFReader(embedded_gguf())
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(part, "llama")
    changed = ("general.architecture", "general.file_type", "general.name", "llama.context_length")
    for field in of_file.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in changed:
            kind, *of_items = field.types
            writer.add_key_value(
                field.name, field.contents(), kind, of_items[0] if of_items else None
            )
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        of_name = names.get_name(name, (".weight",))
        if of_name is None:
            raise ValueError(f"{folder} has a tensor {name!r} that a llama GGUF has not")
        rows = _neighbours(weight, heads[x]) if (x := name.split(".")[-2]) in heads else weight
        if rows.dim() == 1:
            writer.add_tensor(of_name, rows.float().numpy())
        else:
            bits = np.ascontiguousarray(rows.contiguous().view(torch.int16).numpy())
            writer.add_tensor(
                of_name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
    return path


def _neighbours(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """transformers rotates the two halves of a head, llama.cpp neighbouring elements."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
