"""What matrices are kept as, and how many bytes weights take then, before any is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from cpu_ops.packed import GROUP, GROUP_BYTES, TABLE_BYTES
from offload.loading.checkpoint import Checkpoint
from offload.loading.gguf_blocks import format_of
from offload.loading.quantised_checkpoint import FP8, INT8, UINT8
from offload.models.dtypes import AUTO_ON_GPU

_HEAD, _EMBEDDING, _LAYERS = "lm_head.weight", "model.embed_tokens.weight", "model.layers."
# Types with more than four bits: their matrices are q8 among those of q4, too.
_FINER_THAN_Q4 = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", INT8, UINT8, FP8)
_ON_GPU = {"t4": "q8", "t4x16": ""}  # what its kernels multiply instead
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # one product in a step


def kept_as(format: str, packing: str) -> str:
    """What a matrix whose file has a format is kept as; "" for the dtype.

    Args:
        packing: "auto", AUTO_ON_GPU; "": nothing is packed.
    """
    if packing == AUTO_ON_GPU:
        return _ON_GPU.get(format, format)
    return format if packing else ""


def kept_formats(
    shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str], weights: str
) -> dict[str, str]:
    """What each parameter is kept as: "q8", "q4", or "" for the dtype.

    Args:
        shapes: by their names in the stock model; tied ones once, under either name.
        types: in the model's GGUF file, by the same names; without one empty.
        weights: "auto": what the file has, where a format holds that, and matrices of one product
            packed all or none; AUTO_ON_GPU: the same of what its kernels multiply. "q8" or "q4":
            all matrices of layers but routers, "q4" but for those that have more bits in the
            file; and the head as "q8". "": none.
    """
    head = _HEAD if _HEAD in shapes else _EMBEDDING
    kept = dict.fromkeys(shapes, "")
    for name, shape in shapes.items():
        in_layers, kind = name.startswith(_LAYERS) and len(shape) > 1, types.get(name, "")
        in_layers = in_layers and not name.endswith(".gate.weight")
        if weights in ("auto", AUTO_ON_GPU):  # all experts' matrices may be one parameter
            format = format_of(kind) if len(shape) > 1 and kind else ""
            kept[name] = kept_as(format, weights)
        elif not weights:
            continue
        elif name == head:
            kept[name] = "q8"
        elif in_layers:
            kept[name] = "q8" if kind in _FINER_THAN_Q4 else weights
    for name in [name for name, format in kept.items() if not format]:
        owner, _, last = name.removesuffix(".weight").rpartition(".")
        for other in next((group for group in _TOGETHER if last in group), ()):
            if f"{owner}.{other}.weight" in kept:
                kept[f"{owner}.{other}.weight"] = ""
    return kept


def packed_weight_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    weights: str,
    types: Mapping[str, str] | None = None,
) -> int:
    """Bytes of all weights of a model that is packed.

    Args:
        shapes, types, weights: as `kept_formats` takes them.
        dtype: of what is not packed.
    """
    total = 0
    for name, kept in kept_formats(shapes, types or {}, weights).items():
        shape = shapes[name]
        if kept:
            rows = math.prod(shape) // shape[1]  # of experts [num_experts, in, out]
            total += rows * -(-shape[1] // GROUP) * GROUP_BYTES[kept] + TABLE_BYTES[kept]
        else:
            total += math.prod(shape) * dtype.itemsize
    return total


def checkpoint_packed_bytes(checkpoint: Checkpoint, dtype: torch.dtype, weights: str) -> int:
    """`packed_weight_bytes` of a checkpoint, whose files may leave the prefix of names out."""

    def named(name: str) -> str:
        return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"

    shapes = {named(name): shape for name, shape in checkpoint.stored_shapes.items()}
    types = {named(name): kind for name, kind in checkpoint.stored_types.items()}
    return packed_weight_bytes(shapes, dtype, weights, types)
