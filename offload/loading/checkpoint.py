"""Checks of a checkpoint folder before any weight is read: a damaged file must not get as far as
a half-loaded model, and transformers fills missing weights with random numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from offload.models import ModelShape, lean_model_maker

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors format
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1} | {
    f"{sign}{8 * size}": size for sign in "IU" for size in (1, 2, 4, 8)
}
# What every config.json has; the largest size is far beyond any, and products stay below 2**63.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL_SIZES = ("intermediate_size", "vocab_size", "num_key_value_heads", "head_dim")
_MAX_SIZE = 2**20
# Weights of the layers; without a place in the model they are a part of another one's.
_MODEL_PREFIXES = ("model.", "lm_head.")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files are complete. Tied weights are stored, and counted, once."""

    folder: Path
    config: dict[str, Any]
    num_parameters: int
    stored_bytes: int

    @property
    def shape(self) -> ModelShape:
        """As config.json has it; a size that it leaves to transformers is 0."""
        named = {"intermediate_size": 0, "vocab_size": 0} | self.config
        return ModelShape.of_config(named, named.get("max_position_embeddings", 0))

    def weight_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of the weights in memory; None is the dtype they are stored in."""
        return self.num_parameters * dtype.itemsize if dtype else self.stored_bytes


def check_checkpoint(folder: Path) -> Checkpoint:
    """Check the files of `folder`: config, model type, every safetensors header and file size.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: an unsupported model type, sizes that make no sense, a truncated or damaged
            file, an index that names files outside of the folder.
        NotImplementedError: quantised weights.
    """
    config = check_config_file(folder / "config.json")
    sizes = [check_safetensors(path) for path in _weight_files(folder)]
    return Checkpoint(folder, config, *(sum(numbers) for numbers in zip(*sizes, strict=True)))


def check_config_file(path: Path) -> dict[str, Any]:
    """The config.json of a model, if this runtime supports it.

    Raises: as `check_checkpoint`.
    """
    config = _read_json(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{path} has no model_type")
    lean_model_maker(model_type)
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        size = config.get(name)
        if size is None and name in _OPTIONAL_SIZES:
            continue
        if type(size) is not int or not 0 < size <= _MAX_SIZE:
            raise ValueError(f"{path}: {name} must be an integer in 1..{_MAX_SIZE}, got {size!r}")
    if "transformers_weights" in config:  # then transformers would not read those checked here
        raise ValueError(f"{path} names other weight files, in transformers_weights")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise NotImplementedError(
            f"{path.parent} holds weights quantised with {method!r}; available: plain safetensors "
            "in bfloat16, float16 or float32, and GGUF files, which are dequantised"
        )
    return config


def check_safetensors(path: Path) -> tuple[int, int]:
    """(elements, bytes) of the tensors of a safetensors file, whose size must be what it says.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated, not a safetensors file, or tensors whose bytes are not those of their
            shape and dtype, overlap, or leave gaps.
    """
    if not path.is_file():
        raise FileNotFoundError(f"missing weight file {path}")
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError(f"{path} is truncated or not a safetensors file ({file_bytes} bytes)")
        try:
            header = json.loads(file.read(header_bytes))
            spans = sorted(
                _tensor_span(name, entry)
                for name, entry in header.items()
                if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has a damaged safetensors header: {error}") from error
    num_elements, data_bytes = 0, 0
    for start, stop, elements, name in spans:
        if start != data_bytes:
            raise ValueError(
                f"{path} has a damaged safetensors header: {name!r} starts at byte {start}, but "
                f"the tensors before it end at {data_bytes}"
            )
        num_elements, data_bytes = num_elements + elements, stop
    if file_bytes != 8 + header_bytes + data_bytes:
        raise ValueError(
            f"{path} has {file_bytes} bytes, but its header describes "
            f"{8 + header_bytes + data_bytes}: the file is truncated or damaged"
        )
    return num_elements, data_bytes


def _tensor_span(name: str, entry: dict[str, Any]) -> tuple[int, int, int, str]:
    """(first byte, byte after the last, elements, name) of a tensor, as its header has it."""
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name!r} has the shape {shape} and the bytes {start}..{stop}")
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    num_elements = math.prod(shape)
    if stop - start != num_elements * _ITEM_BYTES[dtype]:
        raise ValueError(
            f"{name!r} has {stop - start} bytes, but its shape is {shape} and its dtype {dtype}"
        )
    return start, stop, num_elements, name


def check_loaded(info: dict[str, Any], source: Path, description: str) -> None:
    """Refuse what transformers found wrong in loading, and went on: it fills missing weights with
    random numbers, and drops those that the model has no place for.

    Args:
        info: the loading info of `from_pretrained`.
        source: where the weights are.
        description: what they must fit, as a message says it.

    Raises:
        ValueError: names the weights.
    """
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, info[problem]))
        if problem == "unexpected_keys":  # heads beside the language model's change nothing in it
            names = [name for name in names if name.startswith(_MODEL_PREFIXES)]
        if names:
            raise ValueError(
                f"{source} does not fit {description}: {len(names)} "
                f"{problem.replace('_', ' ')}, such as {', '.join(names[:3])}"
            )


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers will read: a single one goes before an index."""
    index_path = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if index_path.is_file():
        shard_of_tensor = _read_json(index_path).get("weight_map")
        if not isinstance(shard_of_tensor, dict) or not shard_of_tensor:
            raise ValueError(f"{index_path} has no weight_map")
        shards = set(map(str, shard_of_tensor.values()))
        for shard in sorted(shards):
            inside = not PurePath(shard).is_absolute() and ".." not in PurePath(shard).parts
            if not inside or not shard.endswith(".safetensors"):
                raise ValueError(
                    f"{index_path} names {shard!r}, which is no .safetensors file in its folder"
                )
        return [folder / shard for shard in sorted(shards)]
    raise FileNotFoundError(
        f"{folder} has no weights: expected {SINGLE_FILE}, {INDEX_FILE} with its shards, "
        "or the path of a .gguf file instead of a folder"
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"missing {path.name} in {path.parent}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
