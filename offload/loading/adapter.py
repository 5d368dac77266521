"""Adapters in peft's LoRA format, merged once into a model's weights in the user's cache."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.loading.checkpoint import SINGLE_FILE, check_safetensors
from offload.system.json_file import read_json_object

_CONFIG, _WEIGHTS, _SETTINGS = "adapter_config.json", "adapter_model.safetensors", "settings.json"
_FILES = (_CONFIG, _WEIGHTS, _SETTINGS)
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OF_CONFIG = ("max_position_embeddings", "rope_parameters")  # what settings.json may change
# Options of peft's LoRA that change what merging computes -> the values that this merging knows.
_KNOWN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_rslora": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    # The others, such as pissa, change the stock weights before they train.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Those that say where it came from, or how it was trained; where it applies, its weights say.
_HARMLESS = {"r", "lora_alpha", "task_type", "base_model_name_or_path", "lora_dropout"}
_HARMLESS |= {"inference_mode", "target_modules", "exclude_modules", "layers_pattern", "revision"}
_HARMLESS |= {"auto_mapping", "peft_version", "megatron_core", "qalora_group_size", "eva_config"}
_HARMLESS |= {"runtime_config", "ensure_weight_tying"}


@dataclass(frozen=True)
class Adapter:
    """A folder with an adapter of peft, and what else changes in the model.

    Attributes:
        rank: of the matrices A [rank, in] and B [out, rank].
        scale: of their product; alpha / rank.
        config: entries of config.json that it replaces: positions and rotary embedding.
        gguf_sha256: of the GGUF file it was trained on, or None if any will do.
    """

    folder: Path
    rank: int
    scale: float
    config: dict[str, Any]
    gguf_sha256: str | None

    @property
    def digest(self) -> str:
        """Changes with every byte of its files."""
        states = ((self.folder / name).stat() for name in _FILES)
        known = tuple((of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns) for of in states)
        return _digest(self.folder.resolve(), known)


@functools.lru_cache(maxsize=8)
def _digest(folder: Path, _states: tuple[tuple[int, ...], ...]) -> str:
    """Every model that is loaded is asked whether it is this one: once while the files are so."""
    digest = hashlib.sha256()
    for name in _FILES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def read_adapter(folder: Path) -> Adapter:
    """Check the files of an adapter, but for its weights' shapes, which are the model's.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: a damaged file, or an option that merging does not know: names it.
    """
    described, settings = read_json_object(folder / _CONFIG), read_json_object(folder / _SETTINGS)
    for option, known in _KNOWN.items():
        value = described.get(option, known[0] if option != "peft_type" else None)
        if value not in known:
            raise ValueError(
                f"{folder / _CONFIG}: {option}={value!r} is not supported; available: {known[0]!r}"
            )
    for option in sorted(described.keys() - _KNOWN.keys() - _HARMLESS):
        if described[option]:  # such as lora_bias; what is unset is empty
            raise ValueError(
                f"{folder / _CONFIG}: {option}={described[option]!r} is not supported; leave it out"
            )
    rank: Any = described.get("r")
    alpha: Any = described.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{folder / _CONFIG}: r must be a positive integer, got {rank!r}")
    if type(alpha) not in (int, float) or not 0 < alpha < 1e6:
        raise ValueError(f"{folder / _CONFIG}: lora_alpha must be positive, got {alpha!r}")
    check_safetensors(folder / _WEIGHTS)
    config = {name: settings[name] for name in _OF_CONFIG if name in settings}
    return Adapter(folder, rank, alpha / rank, config, settings.get("gguf_sha256"))


def merge_adapter(adapter: Adapter, stock: Path, folder: Path) -> None:
    """Write the model in `stock` (one file of safetensors) with the adapter merged to `folder`.

    A weight becomes weight + scale * B @ A, computed in float32 and rounded once to its dtype.

    Raises:
        ValueError: an adapter of another model, or numbers that are not finite; nothing is written.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(stock / SINGLE_FILE)
    pairs = _pairs(adapter, weights)
    for name, (a, b) in pairs.items():
        merged = weights[name].float() + adapter.scale * (b.float() @ a.float())
        if not bool(merged.isfinite().all()):
            raise ValueError(f"{adapter.folder / _WEIGHTS} makes {name} not finite: it is damaged")
        weights[name] = merged.to(weights[name].dtype)
    for file in stock.iterdir():
        if file.name != SINGLE_FILE:
            shutil.copy(file, folder)
    _change(folder / "config.json", lambda of: of | adapter.config)
    if positions := adapter.config.get("max_position_embeddings"):
        _change(folder / "tokenizer_config.json", lambda of: of | {"model_max_length": positions})
    save_file(weights, folder / SINGLE_FILE, {"format": "pt"})


def _pairs(
    adapter: Adapter, weights: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the name of the weight that they change."""
    from safetensors.torch import load_file

    path = adapter.folder / _WEIGHTS
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, matrix in load_file(path).items():
        match = _NAME.fullmatch(name)
        if not match:
            raise ValueError(f"{path}: {name!r} is no matrix of a LoRA adapter")
        found.setdefault(f"{match[1]}.weight", {})[match[2]] = matrix
    pairs = {}
    for name, of in sorted(found.items()):
        if of.keys() != {"A", "B"}:
            raise ValueError(f"{path} has no lora_{'B' if 'A' in of else 'A'} of {name}")
        if name not in weights:
            raise ValueError(f"{path} is of another model: it changes {name}, which is not there")
        num_out, num_in = weights[name].shape
        shapes = tuple(of["A"].shape), tuple(of["B"].shape)
        fitting = (adapter.rank, num_in), (num_out, adapter.rank)
        if shapes != fitting:
            raise ValueError(
                f"{path} is of another model: A and B of {name} are {shapes[0]} and {shapes[1]}, "
                f"and {fitting[0]} and {fitting[1]} fit"
            )
        pairs[name] = of["A"], of["B"]
    if not pairs:
        raise ValueError(f"{path} holds no matrices")
    return pairs


def _change(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    content = change(read_json_object(path))
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
