"""How many bytes weights take once they are packed, before any is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cpu_ops.packed import GROUP, GROUP_BYTES
from offload.loading.checkpoint import Checkpoint
from offload.loading.gguf import unchanged_source
from offload.loading.gguf_config import gguf_naming
from offload.loading.gguf_header import read_gguf_header

_HEAD, _EMBEDDING, _LAYERS = "lm_head.weight", "model.embed_tokens.weight", "model.layers."
# Types of GGUF files with more than four bits: their matrices are q8 among those of q4, too.
FINER_THAN_Q4 = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "Q8_1", "Q8_K")


def kept_format(type_name: str, format: str) -> str:
    """What a matrix of a layer is kept as.

    Args:
        type_name: its type in the model's GGUF file; "": there is none.
        format: "q8" or "q4", as it was asked for.
    """
    return "q8" if type_name in FINER_THAN_Q4 else format


def packed_weight_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    format: str,
    type_of: Callable[[str], str] = lambda name: "",
) -> int:
    """Bytes of all weights of a model after `pack_weights`.

    Args:
        shapes: of its parameters, by their names in the stock model; tied ones once, under either
            name.
        dtype: of what is not packed.
        type_of: from such a name to a type in the GGUF file, or to "".
    """
    head = _HEAD if _HEAD in shapes else _EMBEDDING
    total = 0
    for name, shape in shapes.items():
        if name != head and (len(shape) != 2 or not name.startswith(_LAYERS)):
            total += math.prod(shape) * dtype.itemsize
            continue
        kept = "q8" if name == head else kept_format(type_of(name), format)
        rows, columns = shape
        total += rows * -(-columns // GROUP) * GROUP_BYTES[kept]
    return total


def checkpoint_packed_bytes(checkpoint: Checkpoint, dtype: torch.dtype, format: str) -> int:
    """`packed_weight_bytes` of a checkpoint, whose files may leave the prefix of names out."""
    shapes = {
        name if name.startswith(("model.", "lm_head.")) else f"model.{name}": shape
        for name, shape in checkpoint.stored_shapes.items()
    }
    types = file_types(
        unchanged_source(checkpoint.folder) if format == "q4" else None,
        checkpoint.config["model_type"],
        checkpoint.shape.num_layers,
    )
    return packed_weight_bytes(shapes, dtype, format, types)


def file_types(source: Path | None, model_type: str, num_layers: int) -> Callable[[str], str]:
    """From the name of a parameter to its type in the GGUF file `source`, or to "" without one."""
    if source is None:
        return lambda name: ""
    types, name_of = _types(source, source.stat().st_mtime_ns), gguf_naming(model_type, num_layers)
    return lambda name: types.get(name_of(name), "")


@functools.lru_cache(maxsize=1)  # a model that is loaded asks several times
def _types(source: Path, changed_ns: int) -> dict[str, str]:
    header = read_gguf_header(source)
    return {name: tensor.type_name for name, tensor in header.tensors.items()}
