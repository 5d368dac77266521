"""The layers and the head of a model get packed weights, one matrix after the other.

What each is kept as, `packed_bytes.kept_formats` says. Of a GGUF file's matrices, those of types
with the same groups are taken as the file has them (`gguf_blocks`); others go to the nearest points
of the grid (`cpu_ops.packed.quantise`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cpu_ops.packed import PackedWeight, quantise
from offload.loading.checkpoint import Checkpoint
from offload.loading.gguf import dequantised, in_halves, kept_source
from offload.loading.gguf_blocks import is_exact, read_packed
from offload.loading.gguf_config import empty_model, gguf_names
from offload.loading.gguf_header import PLAIN_TYPES, read_gguf_header
from offload.loading.one_at_a_time import loading
from offload.loading.packed_bytes import kept_formats
from offload.models.packed_embedding import PackedEmbedding
from offload.models.packed_linear import PackedModule

logger = logging.getLogger(__name__)


@loading()
def pack_weights(stock: Any, weights: str) -> None:
    """Replace the head of a stock model and the linear layers inside its decoder layers by
    `PackedModule`s, and an embedding that the head is tied to by a `PackedEmbedding`.

    Each matrix is freed when its packed one is there, so that memory holds one model and a matrix.

    Args:
        weights: "q8" or "q4".
    """
    formats = kept_formats(_shapes(stock), {}, weights)
    _replace(stock, formats, lambda name, kept: quantise(stock.get_parameter(name).detach(), kept))
    _log(weights, Counter(f"{kept} rounded" for kept in formats.values() if kept))


@loading()
def packed_from_gguf(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, weights: str) -> Any:
    """The stock model of a checkpoint whose weights a GGUF file keeps, packed as `pack_weights`
    does it. Memory holds what is packed and one matrix.

    Args:
        config: transformers', of the checkpoint.
        dtype: of what is not packed, and of what packed weights are multiplied with.
        weights: "auto", "q8" or "q4".

    Raises:
        FileNotFoundError: the file is not there as it was.
        ValueError: numbers in it that are not finite.
    """
    header = read_gguf_header(kept_source(checkpoint.folder))
    stock = empty_model(config, dtype)
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config)
    config, names = stock.config, gguf_names(stock)
    types = {name: header.tensors[of_file].type_name for name, of_file in names.items()}
    formats = kept_formats(_shapes(stock), types, weights)
    kinds: Counter[str] = Counter()

    def plain(name: str) -> Tensor:
        return dequantised(header, config, name, names[name], dtype)

    def packed(name: str, kept: str) -> PackedWeight:
        how = "as in the file" if is_exact(types[name], kept) else "rounded"
        kinds[f"{types[name]} to {kept} ({how})"] += 1
        weight = read_packed(header, names[name], kept)
        minimums = weight.minimums
        return PackedWeight(
            in_halves(weight.codes, config, name).contiguous(),
            in_halves(weight.scales, config, name).contiguous(),
            None if minimums is None else in_halves(minimums, config, name).contiguous(),
            weight.in_features,
        )

    others = {name: plain(name) for name, kept in formats.items() if not kept}
    stock.load_state_dict(others, strict=False, assign=True)
    stock.tie_weights()  # a head that is not packed
    _replace(stock, formats, packed)
    kinds.update(f"{types[name]} dequantised" for name in others if types[name] not in PLAIN_TYPES)
    _log(weights, kinds)
    return stock


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
            stock.model.embed_tokens = PackedEmbedding(weight, dtype)
            if is_tied:
                stock.lm_head = PackedModule(weight, None, dtype)
                stock.model.embed_tokens.tie(stock.lm_head)
            continue
        module = stock.get_submodule(path)
        bias = None if module.bias is None else module.bias.detach()
        made = PackedModule(packed(name, kept), bias, module.weight.dtype)
        stock.set_submodule(path, made)


def _log(weights: str, kinds: Counter[str]) -> None:
    described = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    logger.info("weights=%s: %s", weights, described)
