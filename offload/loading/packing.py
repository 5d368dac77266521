"""The layers and the head of a model get packed weights, one matrix after the other.

What each is kept as, `packed_bytes.kept_formats` says. Of a GGUF file's matrices, those of types
with the same groups are taken as the file has them (`gguf_blocks`), and so are those that other
tools have quantised (`quantised_checkpoint`); others go to the nearest points of the grid
(`cpu_ops.packed.quantise`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cpu_ops.packed import PackedWeight, quantise
from offload.loading.checkpoint import (
    GGUF_FILE,
    Checkpoint,
    check_loaded,
    check_safetensors,
    text_name,
    weight_files,
)
from offload.loading.gguf import dequantised, in_halves, kept_source
from offload.loading.gguf_blocks import is_exact, read_packed
from offload.loading.gguf_config import empty_model, gguf_names
from offload.loading.gguf_header import PLAIN_TYPES, read_gguf_header
from offload.loading.one_at_a_time import loading
from offload.loading.packed_bytes import kept_formats
from offload.loading.quantised_checkpoint import quantised_format
from offload.models.packed_embedding import PackedEmbedding, embedding_scale
from offload.models.packed_experts import pack_experts
from offload.models.packed_linear import PackedModule

logger = logging.getLogger(__name__)


@loading()
def pack_weights(stock: Any, weights: str) -> None:
    """Replace the head of a stock model and the linear layers inside its decoder layers by
    `PackedModule`s, experts there by `PackedExperts`, and an embedding that the head is tied to by
    a `PackedEmbedding`.

    Each matrix is freed when its packed one is there, so that memory holds one model and a matrix.

    Args:
        weights: "q8" or "q4".
    """
    formats = kept_formats(_shapes(stock), {}, weights)

    def packed(name: str, kept: str) -> PackedWeight:
        weight = stock.get_parameter(name).detach()
        return quantise(weight.flatten(0, -2), kept)  # of experts one after the other

    _replace(stock, formats, packed)
    log_formats(weights, Counter(f"{kept} rounded" for kept in formats.values() if kept))


class Source(Protocol):
    """What a model's parameters are read of, by their names in the stock model."""

    @property
    def types(self) -> Mapping[str, str]:
        """How each is stored, as `Checkpoint.stored_types` has it."""

    def plain(self, name: str) -> Tensor:
        """A parameter in the model's dtype, dequantised."""

    def packed(self, name: str, kept: str) -> PackedWeight:
        """A matrix in a format; rounded to nearest unless `is_exact`."""


@loading()
def model_from_parts(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, weights: str) -> Any:
    """The stock model of a checkpoint whose matrices are quantised, packed as `pack_weights` does
    it. Memory holds what is packed and one matrix.

    Args:
        config: transformers', of the checkpoint.
        dtype: of what is not packed, and of what packed weights are multiplied with.
        weights: "auto", AUTO_ON_GPU, "q8", "q4"; "": nothing is packed.

    Raises:
        FileNotFoundError: the GGUF file is not there as it was.
        ValueError: numbers that are not finite.
        NotImplementedError: a matrix in a layout that only its numbers tell.
    """
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # of the file, not of this model
    stock = empty_model(config, dtype)
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config)
    source: Source
    if (checkpoint.folder / GGUF_FILE).is_file():
        source = _GgufSource(kept_source(checkpoint.folder), stock, dtype)
    else:
        source = SafetensorsSource(checkpoint, dtype)
        source.check(stock)
    formats = kept_formats(_shapes(stock), source.types, weights)
    kinds: Counter[str] = Counter()

    def packed(name: str, kept: str) -> PackedWeight:
        kind = source.types.get(name, "dense")  # such as a head beside quantised layers
        kinds[f"{kind} to {kept} ({'as in the file' if is_exact(kind, kept) else 'rounded'})"] += 1
        return source.packed(name, kept)

    others = {name: source.plain(name) for name, kept in formats.items() if not kept}
    stock.load_state_dict(others, strict=False, assign=True)
    stock.tie_weights()  # a head that is not packed
    _replace(stock, formats, packed)
    kinds.update(
        f"{kind} dequantised"
        for name in others
        if (kind := source.types.get(name, "")) and kind not in PLAIN_TYPES
    )
    log_formats(weights or "auto", kinds)
    return stock


class _GgufSource:
    def __init__(self, path: Path, stock: Any, dtype: torch.dtype) -> None:
        self._header, self._config, self._dtype = read_gguf_header(path), stock.config, dtype
        self._names = gguf_names(stock)
        tensors = self._header.tensors
        self.types = {name: tensors[of_file].type_name for name, of_file in self._names.items()}

    def plain(self, name: str) -> Tensor:
        return dequantised(self._header, self._config, name, self._names[name], self._dtype)

    def packed(self, name: str, kept: str) -> PackedWeight:
        weight = read_packed(self._header, self._names[name], kept)
        minimums = weight.minimums
        return PackedWeight(
            in_halves(weight.codes, self._config, name).contiguous(),
            in_halves(weight.scales, self._config, name).contiguous(),
            None if minimums is None else in_halves(minimums, self._config, name).contiguous(),
            weight.in_features,
            weight.table,
        )


class SafetensorsSource:
    """Matrices that other tools have quantised, and what is beside them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        config_path = checkpoint.folder / "config.json"
        self._format = quantised_format(checkpoint.config, config_path)
        self._checkpoint, self._dtype, self.types = checkpoint, dtype, checkpoint.stored_types
        of_text = text_name if checkpoint.is_part else str
        self._files = {
            of_text(tensor.name): (path, tensor.name)
            for path in weight_files(checkpoint.folder)
            for tensor in check_safetensors(path)
        }

    def check(self, stock: Any) -> None:
        """ValueError unless the stock model's parameters are those of the files."""
        wanted, stored = _shapes(stock), self._checkpoint.stored_shapes
        tied = stock.state_dict().keys()
        info = {
            "missing_keys": wanted.keys() - stored.keys(),
            "mismatched_keys": [n for n, shape in wanted.items() if stored.get(n, shape) != shape],
            "unexpected_keys": stored.keys() - tied,
        }
        check_loaded(info, self._checkpoint.folder, "its config.json")

    def plain(self, name: str) -> Tensor:
        if name not in self.types:
            return self._tensor(name).to(self._dtype)
        made = self._matrix(name)
        return (made.dequantise() if isinstance(made, PackedWeight) else made).to(self._dtype)

    def packed(self, name: str, kept: str) -> PackedWeight:
        if name not in self.types:
            return quantise(self._tensor(name), kept)
        made = self._matrix(name)
        if isinstance(made, PackedWeight):
            if kept == "q8m" and made.minimums is None:  # another matrix has zero points
                made = dataclasses.replace(made, minimums=torch.zeros_like(made.scales))
            return made if made.format == kept else quantise(made.dequantise(), kept)
        return quantise(made, kept)

    def _matrix(self, name: str) -> PackedWeight | Tensor:
        assert self._format is not None
        prefix = self._format.prefix(name)
        suffixes = (self._format.marks, *self._format.others)
        where = f"{self._files[prefix + suffixes[0]][0]}: {name}"
        parts = {s: self._tensor(prefix + s) for s in suffixes if prefix + s in self._files}
        try:
            made = self._format.read(parts)
        except NotImplementedError as error:
            raise NotImplementedError(f"{where}: {error}") from None
        numbers = [made] if isinstance(made, Tensor) else [made.scales, made.minimums]
        if not all(each is None or each.isfinite().all() for each in numbers):
            raise ValueError(f"{where} has numbers that are not finite in float16")
        return made

    def _tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

        path, of_file = self._files[name]
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(of_file)
        return found


def _shapes(stock: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in stock.named_parameters()}


def _replace(
    stock: Any, formats: Mapping[str, str], packed: Callable[[str, str], PackedWeight]
) -> None:
    """The matrices that have a format become `packed(name, format)`."""
    embedding = stock.model.embed_tokens
    is_tied = stock.lm_head.weight is embedding.weight
    for name, kept in formats.items():
        if not kept:
            continue
        path = name.removesuffix(".weight")
        if path == "model.embed_tokens":
            weight, dtype = packed(name, kept), embedding.weight.dtype
            scale = embedding_scale(embedding) or 1.0
            stock.model.embed_tokens = PackedEmbedding(weight, dtype, scale)
            if is_tied:
                stock.lm_head = PackedModule(weight, None, dtype)
                stock.model.embed_tokens.tie(stock.lm_head)
            continue
        if path == name:
            pack_experts(stock, name, packed(name, kept), stock.dtype)
            continue
        module = stock.get_submodule(path)
        bias = None if module.bias is None else module.bias.detach()
        made = PackedModule(packed(name, kept), bias, module.weight.dtype)
        stock.set_submodule(path, made)


def log_formats(weights: str, kinds: Counter[str]) -> None:
    """Tell how many matrices are kept in which way."""
    described = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    logger.info("weights=%s: %s", weights, described)
