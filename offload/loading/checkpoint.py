"""Checks of a checkpoint folder before any weight is read: a damaged file must not get as far as
a half-loaded model, and transformers fills missing weights with random numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from offload.loading.quantised_checkpoint import quantised_format
from offload.models import (
    ModelShape,
    family_of,
    is_generic,
    lean_model_maker,
    lean_text,
)
from offload.models.dtypes import DTYPES
from offload.models.shape import matrix_sizes
from offload.system.json_file import read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Beside config and tokenizer of a GGUF file that keeps its weights (`gguf.model_folder`).
GGUF_FILE = "gguf_weights.json"
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors format
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_TORCH_DTYPES = _FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    **{f"I{8 * size}": getattr(torch, f"int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": getattr(torch, f"uint{8 * size}") for size in (1, 2, 4, 8)},
}
# Names of a text model within a multi-modal one, and by itself.
TEXT_NAMES = {
    r"^(?:model\.)?(?:language|text)_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language|text)_model\.(?:model\.)?": "model.",
}
# What every config.json has; the largest size is far beyond any, and products stay below 2**63.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL_SIZES = ("intermediate_size", "vocab_size", "num_key_value_heads", "head_dim")
_MAX_SIZE = 2**20
# Weights of the layers; without a place in the model they are a part of another one's.
_MODEL_PREFIXES = ("model.", "lm_head.")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files are complete. Tied weights are stored, and counted, once.

    Attributes:
        stored_shapes: of the tensors in its files, by name.
        own_dtype: that its weights get in memory where none is asked for: the one that config.json
            names, or that of the first weight.
        stored_types: of the tensors of a GGUF file, such as "Q4_1", and of quantised ones elsewhere
            (`quantised_checkpoint`), by the same names.
        is_part: of a multi-modal model, whose text part has lean layers: `config` and the names are
            those of the text model by itself (`text_name`).
    """

    folder: Path
    config: dict[str, Any]
    stored_shapes: Mapping[str, tuple[int, ...]]
    own_dtype: torch.dtype
    stored_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_part: bool = False

    @property
    def shape(self) -> ModelShape:
        """As config.json has it; a size that it leaves to transformers is 0."""
        named = {"intermediate_size": 0, "vocab_size": 0} | self.config
        return ModelShape.of_config(named, named.get("max_position_embeddings", 0))

    @functools.cached_property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.stored_shapes.values()))

    @property
    def has_head(self) -> bool:
        """Whether a matrix for the logits is stored, beside the embeddings or in their place."""
        return any("lm_head" in name for name in self.stored_shapes)

    def check_sizes(self, shape: ModelShape) -> None:
        """Compare what transformers would allocate with what is stored, before it does.

        Args:
            shape: by config.json and the defaults of transformers.

        Raises:
            ValueError: a matrix is missing, or has another size.
        """
        stored, problem = self.stored_shapes, f"{self.folder} does not fit its config.json"
        family = family_of(self.config)
        for name, fields, size in matrix_sizes(shape, fuses=family is not None and family.fuses):
            # Without the prefix: files of the model without its head.
            found = stored.get(name) or stored.get(name.removeprefix("model."))
            if found is None and name == "model.embed_tokens.weight":  # maybe tied, the other way
                found = stored.get("lm_head.weight")
            if found is None:
                raise ValueError(
                    f"{problem}: missing keys, such as {name} (num_hidden_layers is "
                    f"{shape.num_layers})"
                )
            if found != size:
                raise ValueError(
                    f"{problem}: mismatched keys, such as {name}, which is {list(found)}; "
                    f"config.json says {list(size)} ({fields})"
                )

    @property
    def packs_as_generic(self) -> bool:
        """Whether its quantised matrices, if any, are packed by `generic_packing`."""
        family = family_of(self.config)
        return bool(self.stored_types) and family is not None and family.packs_as_generic

    def loaded_dtype(self, asked: torch.dtype | None) -> torch.dtype:
        """The dtype of the weights in memory; None asks for the checkpoint's own.

        Raises:
            ValueError: a model cannot have it.
        """
        dtype = asked or self.own_dtype
        if dtype not in DTYPES.values():
            raise ValueError(
                f"{self.folder / 'config.json'}: the weights would be loaded in their own dtype, "
                f"{_name_of(dtype)}, which is not supported; give one of {', '.join(DTYPES)}"
            )
        return dtype

    def weight_bytes(self, asked: torch.dtype | None) -> int:
        """Bytes of the weights in memory, in `loaded_dtype`."""
        return self.num_parameters * self.loaded_dtype(asked).itemsize


def check_checkpoint(folder: Path, *, takes_generic: bool = False) -> Checkpoint:
    """Check the files of `folder`: config, model type, every safetensors header and file size.

    Args:
        takes_generic: a model type without lean layers will do (`is_generic`).

    Raises:
        FileNotFoundError: a missing file.
        ValueError: an unsupported model type, sizes that make no sense, a truncated or damaged
            file, an index that names files outside of the folder.
        NotImplementedError: weights quantised in a way that is not supported.
    """
    config = check_config_file(folder / "config.json", takes_generic=takes_generic)
    if (folder / GGUF_FILE).is_file():
        return _of_gguf(folder, config)
    files = weight_files(folder)
    tensors = [tensor for path in files for tensor in check_safetensors(path)]
    if not any(tensor.stop for tensor in tensors):
        raise ValueError(f"{files[0]} has no weights: there is no element in its tensors")
    dtype = config_dtype(config, folder / "config.json")
    if dtype is None:  # as transformers: it takes the first that can be a model's
        stored = [tensor.dtype for tensor in tensors]
        dtype = _TORCH_DTYPES[next((x for x in stored if x in _FLOATS), stored[0])]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    text = lean_text(config)
    if any(text_name(name) != name for name in shapes):  # the text part is loaded
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if text_name(name) != name or "lm_head" in name
        }
    names = {name if text is None else text_name(name): name for name in shapes}
    shapes = {name: shapes[of_file] for name, of_file in names.items()}
    types: dict[str, str] = {}
    quantised = quantised_format(config, folder / "config.json")
    if quantised is not None:
        shapes, matrices = quantised.logical(
            shapes, folder, lambda name: _tensor(files, names[name])
        )
        types = dict.fromkeys(matrices, quantised.kind)
    return Checkpoint(folder, text or config, shapes, dtype, types, text is not None)


def text_name(name: str) -> str:
    """The name that a tensor of a multi-modal model has in its text model by itself; that of any
    other tensor stays."""
    for pattern, own in TEXT_NAMES.items():
        name = re.sub(pattern, own, name)
    return name


def _tensor(files: list[Path], name: str) -> torch.Tensor:
    """A tensor of safetensors files that have it."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                found: torch.Tensor = file.get_tensor(name)
                return found
    raise KeyError(name)


def _of_gguf(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """What `gguf.model_folder` made; its GGUF file is looked at when it is loaded."""
    path = folder / GGUF_FILE
    try:
        described = read_json_object(path)["tensors"]
        types = {name: str(type_name) for name, (type_name, _) in described.items()}
        shapes = {name: tuple(map(int, shape)) for name, (_, shape) in described.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    dtype = config_dtype(config, folder / "config.json") or torch.bfloat16
    return Checkpoint(folder, config, shapes, dtype, types)


def check_config_file(path: Path, *, takes_generic: bool = True) -> dict[str, Any]:
    """The config.json of a model, if this runtime supports it.

    Raises: as `check_checkpoint`.
    """
    config = check_model_type(path, takes_generic=takes_generic)
    part = config.get("text_config")
    text = part if isinstance(part, dict) else config
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        size = text.get(name)
        if size is None and (name in _OPTIONAL_SIZES or text is part or is_generic(config)):
            continue
        of_layers = size if isinstance(size, list) and is_generic(config) else [size]
        if not of_layers or any(type(x) is not int or not 0 < x <= _MAX_SIZE for x in of_layers):
            raise ValueError(f"{path}: {name} must be an integer in 1..{_MAX_SIZE}, got {size!r}")
    window = text.get("sliding_window")
    if isinstance(window, int) and window < 0:
        raise ValueError(f"{path}: sliding_window must be at least 1, or null, got {window}")
    config_dtype(config, path)
    if "transformers_weights" in config:  # then transformers would not read those checked here
        raise ValueError(f"{path} names other weight files, in transformers_weights")
    quantised_format(config, path)
    return config


def check_model_type(path: Path, *, takes_generic: bool = True) -> dict[str, Any]:
    """A config.json of a model type that this runtime supports.

    Args:
        takes_generic: without lean layers, too.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: no JSON object, or one that names no type, or one that is not supported.
    """
    config = read_json_object(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{path} has no model_type")
    if not (takes_generic and is_generic(config)) and lean_text(config) is None:
        lean_model_maker(model_type, config)
    return config


def config_dtype(config: dict[str, Any], path: Path) -> torch.dtype | None:
    """The dtype that a config.json at `path` names, as transformers reads it; None: it names none.

    Raises:
        ValueError: no name of a dtype.
    """
    for field in ("dtype", "torch_dtype"):  # the second is the older name
        name = config.get(field)
        if name is None:
            continue
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"{path}: {field}={name!r} is no dtype; available: {', '.join(DTYPES)}"
            )
        return dtype
    return None


@dataclass(frozen=True, order=True)
class StoredTensor:
    """A tensor of a safetensors file, as its header has it.

    Attributes:
        start, stop: its first byte in the data, and the one after its last.
        dtype: as safetensors names it.
    """

    start: int
    stop: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def check_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in their order; its size must be what they say.

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
            tensors = sorted(
                _stored_tensor(name, entry)
                for name, entry in header.items()
                if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has a damaged safetensors header: {error}") from error
    data_bytes = 0
    for tensor in tensors:
        if tensor.start != data_bytes:
            raise ValueError(
                f"{path} has a damaged safetensors header: {tensor.name!r} starts at byte "
                f"{tensor.start}, but the tensors before it end at {data_bytes}"
            )
        data_bytes = tensor.stop
    if file_bytes != 8 + header_bytes + data_bytes:
        raise ValueError(
            f"{path} has {file_bytes} bytes, but its header describes "
            f"{8 + header_bytes + data_bytes}: the file is truncated or damaged"
        )
    return tensors


def _stored_tensor(name: str, entry: dict[str, Any]) -> StoredTensor:
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name!r} has the shape {shape} and the bytes {start}..{stop}")
    if dtype not in _TORCH_DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    num_elements = math.prod(shape)
    if stop - start != num_elements * _TORCH_DTYPES[dtype].itemsize:
        raise ValueError(
            f"{name!r} has {stop - start} bytes, but its shape is {shape} and its dtype {dtype}"
        )
    return StoredTensor(start, stop, name, dtype, tuple(shape))


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


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers will read: a single one goes before an index."""
    index_path = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if index_path.is_file():
        index = read_json_object(index_path)
        for field in ("metadata", "weight_map"):  # transformers needs both
            if not isinstance(index.get(field), dict):
                raise ValueError(f"{index_path} has no {field}: it must be an object")
        shards = set(map(str, index["weight_map"].values()))
        if not shards:
            raise ValueError(f"{index_path} names no weights: its weight_map is empty")
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


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
