"""The layers and the head of a loaded model get packed weights, one matrix after the other.

Of a GGUF file that is still there, matrices of types with these groups are taken as the file has
them: Q4_0 and Q4_1 for q4, Q8_0 for both. What has more than four bits there stays above four.
Other matrices go to the nearest points of the grid (`cpu_ops.packed.quantise`). The head is q8 with
either format; an embedding that it is tied to reads its rows, another one stays as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cpu_ops.packed import GROUP, PackedWeight, quantise
from offload.loading.gguf import split_halves, unchanged_source
from offload.loading.gguf_config import gguf_names
from offload.loading.gguf_header import GgufHeader, read_gguf_header
from offload.loading.one_at_a_time import loading
from offload.loading.packed_bytes import kept_format
from offload.models.packed_embedding import PackedEmbedding
from offload.models.packed_linear import PackedModule

logger = logging.getLogger(__name__)

# Bytes of a group of 32 in the file: of the numbers before its codes, and all.
_BLOCKS = {"Q4_0": (2, 18), "Q4_1": (4, 20), "Q8_0": (2, 34)}
_EXACT = {"q4": ("Q4_0", "Q4_1", "Q8_0"), "q8": ("Q8_0",)}


@loading()
def pack_weights(stock: Any, folder: Path | None, format: str) -> None:
    """Replace the head of `stock` and the linear layers inside its decoder layers by
    `PackedModule`s, and an embedding that the head is tied to by a `PackedEmbedding`.

    Each matrix is freed when its packed one is there, so that memory holds one model and a matrix.

    Args:
        stock: as `load_stock_model` made it of `folder`; None: its weights are of no file.
        format: "q8" or "q4".
    """
    source = None if folder is None else unchanged_source(folder)
    header = None if source is None else read_gguf_header(source)
    of_file = {} if header is None else gguf_names(stock)
    kinds: Counter[str] = Counter()
    head_kind = _pack_head(stock, header, of_file)
    for layer_idx, layer in enumerate(stock.model.layers):
        for owner_name, owner in list(layer.named_modules()):
            for name, module in list(owner.named_children()):
                if type(module) is not nn.Linear:
                    continue
                path = ".".join(filter(None, (f"model.layers.{layer_idx}", owner_name, name)))
                packed, kind = _packed(
                    module.weight.detach(),
                    format,
                    header,
                    of_file.get(f"{path}.weight", ""),
                    _heads(stock.config, name),
                )
                bias = None if module.bias is None else module.bias.detach()
                setattr(owner, name, PackedModule(packed, bias, module.weight.dtype))
                kinds[kind] += 1
    described = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    logger.info("weights=%s: matrices of the layers: %s; head: %s", format, described, head_kind)


def _pack_head(stock: Any, header: GgufHeader | None, of_file: Mapping[str, str]) -> str:
    """Pack it, and say of what kind it is now."""
    weight, embedding = stock.lm_head.weight, stock.model.embed_tokens
    is_tied = weight is embedding.weight
    name = of_file.get("model.embed_tokens.weight" if is_tied else "lm_head.weight", "")
    packed, kind = _packed(weight.detach(), "q8", header, name, 0)
    bias = None if stock.lm_head.bias is None else stock.lm_head.bias.detach()
    stock.lm_head = PackedModule(packed, bias, weight.dtype)
    if is_tied:
        stock.model.embed_tokens = PackedEmbedding(stock.lm_head)
    return kind + (", read by the embedding, too" if is_tied else "")


def _heads(config: Any, name: str) -> int:
    """Heads whose rows a GGUF file has in another order (`split_halves`), or 0."""
    if config.model_type != "llama":
        return 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return int(heads.get(name, 0))


def _packed(
    weight: Tensor, format: str, header: GgufHeader | None, name: str, num_heads: int
) -> tuple[PackedWeight, str]:
    """A matrix, and what is said of its kind."""
    type_name = ""
    if header is not None and name in header.tensors:
        type_name = header.tensors[name].type_name
        if type_name in _EXACT[format] and weight.shape[1] % GROUP == 0:
            packed = file_blocks(header, name)
            if packed.codes.shape[0] == weight.shape[0] and packed.in_features == weight.shape[1]:
                packed = packed if not num_heads else _reordered(packed, num_heads)
                return packed, f"{packed.format} as in the file"
    rounded = kept_format(type_name, format)
    return quantise(weight, rounded), f"{rounded} rounded"


def file_blocks(header: GgufHeader, name: str) -> PackedWeight:
    """A matrix of type Q4_0, Q4_1 or Q8_0 as the file has it: no number is rounded.

    But for Q4_0's minimum, -8 scales: float16 holds it exactly, unless it is beyond 65,504.
    """
    tensor = header.tensors[name]
    before, block_bytes = _BLOCKS[tensor.type_name]
    data = np.fromfile(
        header.path, np.uint8, count=tensor.stop - tensor.start, offset=tensor.start
    ).reshape(tensor.shape[0], -1, block_bytes)
    numbers = torch.from_numpy(np.ascontiguousarray(data[..., :before]).view(np.float16))
    codes = torch.from_numpy(np.ascontiguousarray(data[..., before:]))
    scales = numbers[..., 0].contiguous()
    if tensor.type_name == "Q8_0":
        return PackedWeight(codes.view(torch.int8), scales, None, tensor.shape[1])
    minimums = scales * -8 if tensor.type_name == "Q4_0" else numbers[..., 1].contiguous()
    return PackedWeight(codes, scales, minimums, tensor.shape[1])


def _reordered(packed: PackedWeight, num_heads: int) -> PackedWeight:
    minimums = packed.minimums
    return PackedWeight(
        split_halves(packed.codes, num_heads).contiguous(),
        split_halves(packed.scales, num_heads).contiguous(),
        None if minimums is None else split_halves(minimums, num_heads).contiguous(),
        packed.in_features,
    )
