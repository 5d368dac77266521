"""A model type without lean layers gets packed weights where its checkpoint has quantised ones, or
where they are asked for.

Of a quantised checkpoint its class loads what is not packed, by transformers' own rules for names.
In the place of each packed matrix it gets a tensor of that shape whose elements are all the same
one, so that memory never holds the dense model; then modules with packed weights replace those that
have such tensors.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpu_ops.packed import FORMATS, GROUP, GROUP_BYTES, TABLE_BYTES, PackedWeight, quantise
from offload.loading.bars import passing_bars
from offload.loading.checkpoint import Checkpoint
from offload.loading.gguf_blocks import format_of, is_exact
from offload.loading.gguf_generic import GenericTensors
from offload.loading.gguf_header import PLAIN_TYPES, read_gguf_header
from offload.loading.one_at_a_time import loading
from offload.loading.packed_bytes import kept_as, kept_formats
from offload.loading.packing import SafetensorsSource, log_formats
from offload.models.packed_embedding import PackedEmbedding, embedding_scale
from offload.models.packed_experts import pack_experts
from offload.models.packed_linear import PackedModule

_EXPERTS = ("has_gate", "has_bias", "is_transposed", "num_experts")
# Routers, and what steps with latents multiply as it is.
_DENSE = re.compile(r"router|\.(gate|shared_expert_gate|kv_b_proj)\.weight$")
_FEW_OUTPUTS = 16  # as many inputs to an output: such as decays of heads, which decide for many
_OF_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.")


@dataclass(frozen=True)
class GenericParts:
    """What a stock model's weights are made of.

    Attributes:
        plain: tensors by name, as the class's `from_pretrained` takes them.
        packed: what makes a matrix, by the stock model's name of the parameter.
        kinds: what is told of them.
    """

    plain: Mapping[str, Tensor]
    packed: Mapping[str, Callable[[], PackedWeight]]
    kinds: Counter[str]


def skeleton(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """The stock model of a class, without memory for its weights."""
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype)


def built_already(empty: Any) -> Any:
    """The class of a `skeleton`, whose `from_pretrained` fills that one: building takes seconds."""
    kind = type(empty)
    # Python calls no __init__ of what is no instance of this class.
    namespace = {"__module__": kind.__module__, "__new__": lambda *_, **__: empty}
    return type(kind.__name__, (kind,), namespace)


@loading()
def generic_from_parts(
    dtype: torch.dtype, empty: Any, parts: GenericParts, names: Any
) -> tuple[Any, dict[str, Any]]:
    """The stock model, and the loading info of `from_pretrained`.

    Args:
        empty: its `skeleton`, which becomes the model.
        names: `key_mapping` of `from_pretrained`, or None.
    """
    shapes = {name: weight.shape for name, weight in empty.named_parameters()}
    stubs = {name: torch.zeros(1, dtype=dtype).expand(shapes[name]) for name in parts.packed}
    with passing_bars():
        model, info = built_already(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict={**parts.plain, **stubs},
            dtype=dtype,
            trust_remote_code=False,
            key_mapping=names,
            ignore_mismatched_sizes=True,  # or transformers raises without naming the file
            output_loading_info=True,
        )
    if not info["missing_keys"] and not info["mismatched_keys"]:
        places = _places(model)
        for name, make in parts.packed.items():
            _replace(model, name, make(), places)
        log_formats("auto", parts.kinds)
    return model, info


def may_pack(empty: Any, name: str) -> bool:
    """Whether a module with packed weights can stand for the one that has the parameter `name`."""
    path = name.removesuffix(".weight")
    if path == name:  # of experts, all in one
        owner = empty.get_submodule(name.rpartition(".")[0])
        return all(hasattr(owner, field) for field in _EXPERTS) and name.endswith("_proj")
    module = empty.get_submodule(path)
    is_linear = type(module) is nn.Linear or type(module).__name__ == "FalconLinear"  # the same
    return is_linear or isinstance(module, nn.Embedding)


def _places(model: Any) -> dict[int, list[str]]:
    """Where linear layers are, by the id of their weight, which several may share."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            found.setdefault(id(module.weight), []).append(path)
    return found


def _replace(
    model: Any, name: str, weight: PackedWeight, places: Mapping[int, Sequence[str]]
) -> None:
    path, dtype = name.removesuffix(".weight"), model.dtype
    if path == name:
        pack_experts(model, name, weight, dtype)
        return
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear):
        bias = None if module.bias is None else module.bias.detach()
        made = PackedModule(weight, bias, dtype)
        for place in places[id(module.weight)]:
            model.set_submodule(place, made)
        return
    head = model.get_output_embeddings()
    is_tied = head is not None and getattr(head, "weight", None) is module.weight
    scale = embedding_scale(module)
    if scale is None:
        module.weight.data = weight.dequantise(dtype)
        return
    embedding = PackedEmbedding(weight, dtype, scale)
    model.set_submodule(path, embedding)
    if is_tied:
        made = PackedModule(weight, None, dtype)
        model.set_output_embeddings(made)
        embedding.tie(made)


@dataclass(frozen=True)
class _Quantised:
    """A parameter that is quantised in a checkpoint: names of its parts in their order, the shape
    that these make, and what it is kept as; "": the dtype."""

    parts: list[str]
    shape: tuple[int, ...]
    kept: str


def _quantised(
    checkpoint: Checkpoint, empty: Any, names: Any, packing: str
) -> dict[str, _Quantised]:
    """By the stock model's names; arguments as of `safetensors_parts`."""
    renamed, found = _Renamed(empty, names), dict[str, _Quantised]()
    types, shapes = checkpoint.stored_types, checkpoint.stored_shapes
    together: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in (name for name in shapes if name in types):
        target, order = renamed(name)
        if target in renamed.shapes and order is not None:
            together.setdefault(target, []).append((order, name))
    for target, ordered in together.items():
        parts, wanted = [name for _, name in sorted(ordered)], renamed.shapes[target]
        shape = shapes[parts[0]]
        if ordered[0][0]:  # of experts, whose matrices have the same inputs
            rows = sum(shapes[part][0] for part in parts)
            shape = (wanted[0], rows // wanted[0], shape[1])
        kept = kept_as(format_of(types[parts[0]]), packing)
        found[target] = _Quantised(parts, shape, kept if may_pack(empty, target) else "")
    return found


def kept_in_safetensors(
    checkpoint: Checkpoint, empty: Any, names: Any, packing: str
) -> dict[str, str]:
    """The formats of parameters that will be packed; arguments as of `safetensors_parts`."""
    found = _quantised(checkpoint, empty, names, packing)
    return {target: one.kept for target, one in found.items() if one.kept}


def kept_in_gguf(tensors: GenericTensors, empty: Any, packing: str) -> dict[str, str]:
    """The same of a GGUF file."""
    kept = {name: kept_as(tensors.format(name), packing) for name in tensors.types}
    return {name: format for name, format in kept.items() if format and may_pack(empty, name)}


def kept_of_dense(empty: Any, packing: str, *, is_lean: bool = False) -> dict[str, str]:
    """The formats of parameters of a dense checkpoint, which "q8" and "q4" pack.

    Linear layers and experts, but routers and what has few outputs, have that one. The head, and
    the embedding that it is tied to, and embeddings of each layer, have q8.

    Args:
        is_lean: as `pack_weights` has it instead.

    Raises:
        NotImplementedError: there is nothing to pack in its layers.
    """
    if packing not in FORMATS:
        return {}
    if is_lean:
        shapes = {name: tuple(weight.shape) for name, weight in empty.named_parameters()}
        return {of: format for of, format in kept_formats(shapes, {}, packing).items() if format}
    head, kept = empty.get_output_embeddings(), dict[str, str]()
    for name, weight in empty.named_parameters():
        if weight.dim() < 2 or not may_pack(empty, name):
            continue
        outputs, inputs = weight.shape[-2:]
        if head is not None and head.weight is weight:
            kept[name] = "q8"
        elif isinstance(empty.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            if "per_layer" in name:
                kept[name] = "q8"
        elif not _DENSE.search(name) and outputs * _FEW_OUTPUTS >= inputs >= GROUP:
            kept[name] = packing
    if not any(".0." in name for name in kept):
        raise NotImplementedError(
            f"weights={packing!r} with a model of type {empty.config.model_type!r}, whose layers "
            "have matrices that are not packed; give weights='auto'"
        )
    return kept


def stays_packed(weights: str, model_type: str) -> str:
    """Why `weights` is refused of a checkpoint that is packed."""
    return (
        f"weights={weights!r} with a GGUF file or a quantised checkpoint of type {model_type!r}: "
        "it stays as it is; give weights='auto'"
    )


def pack_dense(model: Any, kept: Mapping[str, str], weights: str) -> None:
    """Pack the parameters of a stock model that is loaded, one after the other.

    Args:
        kept: as `kept_of_dense` gives it.
    """
    places = _places(model)
    for name, format in kept.items():
        weight = model.get_parameter(name).detach()
        owner = model.get_submodule(name.rpartition(".")[0])
        if weight.dim() == 3 and owner.is_transposed:
            weight = weight.transpose(1, 2)
        _replace(model, name, quantise(weight.flatten(0, -2), format), places)
    log_formats(weights, Counter(f"{format} rounded" for format in kept.values()))


def parameter_bytes(empty: Any, kept: Mapping[str, str]) -> dict[str, int]:
    """Bytes of each parameter of a `skeleton` once it is loaded, tied ones once.

    Args:
        kept: the formats of packed ones.
    """
    named = dict(empty.named_parameters())
    sizes = {name: weight.nbytes for name, weight in named.items()}
    for name, format in kept.items():
        weight = empty.get_parameter(name)
        (name,) = (of for of, one in named.items() if one is weight)
        owner = empty.get_submodule(name.rpartition(".")[0])
        is_transposed = weight.dim() == 3 and getattr(owner, "is_transposed", False)
        columns = weight.shape[-2 if is_transposed else -1]
        rows = weight.numel() // columns
        sizes[name] = rows * -(-columns // GROUP) * GROUP_BYTES[format] + TABLE_BYTES[format]
    return sizes


def expert_bytes(empty: Any, kept: Mapping[str, str]) -> dict[int, int]:
    """Of these, bytes of the experts of each layer that has some, by layer."""
    sizes: dict[int, int] = {}
    for name, num_bytes in parameter_bytes(empty, kept).items():
        if (match := _OF_EXPERTS.match(name)) is not None:
            sizes[int(match[1])] = sizes.get(int(match[1]), 0) + num_bytes
    return dict(sorted(sizes.items()))


def experts_beyond(sizes: Sequence[int], needed_bytes: int, limit: int) -> int:
    """Of how many layers the experts have to go for `needed_bytes` to become at most `limit`."""
    for count, num_bytes in enumerate(sizes):
        if needed_bytes <= limit:
            return count
        needed_bytes -= num_bytes
    return len(sizes)


def hot_experts_beside(
    sizes: Sequence[int], num_experts: int, needed_bytes: int, limit: int, asked: int | None
) -> tuple[int, int]:
    """Of how many layers the experts go to the host, and how many of each of these the GPU has as
    well, so that `needed_bytes` become at most `limit`.

    Args:
        asked: so many, of `num_experts`; None: half, or fewer where all layers go.
    """
    hot = num_experts // 2 if asked is None else asked
    gains = [size * (num_experts - hot) // num_experts for size in sizes]
    count = experts_beyond(gains, needed_bytes, limit)
    if asked is None and count == len(sizes):
        room = limit - (needed_bytes - sum(sizes))
        hot = max(0, min(hot, num_experts * room // sum(sizes)))
    return count, hot if count else 0


def check_hot_experts(asked: int | None, num_experts: int) -> None:
    """ValueError for more than a layer has; any number is fine where none has some."""
    if 0 < num_experts < (asked or 0):
        raise ValueError(
            f"hot_experts={asked}, but a layer has {num_experts} experts; give at most as many"
        )


def check_host_experts(asked: int | str, num_layers: int, model_type: str) -> None:
    """ValueError unless so many layers have experts; "auto" is fine with any."""
    if asked in (0, "auto"):
        return
    if not num_layers:
        raise ValueError(
            f"host_experts={asked} with a model of type {model_type!r}, of which no layer has "
            "experts that can stay on the host; leave it out"
        )
    if isinstance(asked, int) and asked > num_layers:
        raise ValueError(
            f"host_experts={asked}, but only {num_layers} layers have experts; give at most "
            f'{num_layers}, or "auto"'
        )


@loading()
def safetensors_parts(
    checkpoint: Checkpoint, empty: Any, dtype: torch.dtype, names: Any, packing: str
) -> GenericParts:
    """The parts of a checkpoint of quantised safetensors.

    Args:
        empty: the `skeleton` of the stock model.
        names: `key_mapping` of `from_pretrained`, or None.
        packing: see `kept_as`.

    Raises:
        ValueError: a matrix of another shape, or with numbers that are not finite.
        NotImplementedError: a matrix in a layout that only its numbers tell.
    """
    source = SafetensorsSource(checkpoint, dtype)
    quantised = _quantised(checkpoint, empty, names, packing)
    of_matrices = {part for one in quantised.values() for part in one.parts}
    plain = {
        name: source.plain(name) for name in checkpoint.stored_shapes if name not in of_matrices
    }
    packed: dict[str, Callable[[], PackedWeight]] = {}
    kinds: Counter[str] = Counter()
    wanted = {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}
    for target, one in quantised.items():
        parts, kept = one.parts, one.kept
        if not kept:
            whole = wanted[target] if len(parts) == 1 else ()
            plain |= {part: _of_experts(source.plain(part), whole) for part in parts}
            continue
        if one.shape != wanted[target]:
            raise ValueError(
                f"{checkpoint.folder} does not fit its config.json: mismatched keys, such as "
                f"{parts[0]}: {target} would be {list(one.shape)} instead of "
                f"{list(wanted[target])}"
            )

        def make(parts: list[str] = parts, kept: str = kept) -> PackedWeight:
            return joined([source.packed(part, kept) for part in parts], parts[0])

        packed[target] = make
        kinds[_told(source.types[parts[0]], kept)] += 1
    return GenericParts(plain, packed, kinds)


@loading()
def gguf_parts(path: Path, empty: Any, dtype: torch.dtype, packing: str) -> GenericParts:
    """The parts of a GGUF file.

    Args:
        empty: the `skeleton` of the stock model.
        packing: see `kept_as`.

    Raises:
        ValueError: tensors that do not fit the model, or numbers that are not finite.
    """
    tensors = GenericTensors(read_gguf_header(path), empty)
    formats = kept_in_gguf(tensors, empty, packing)
    kinds: Counter[str] = Counter()
    plain: dict[str, Tensor] = {}
    packed: dict[str, Callable[[], PackedWeight]] = {}
    for name, stored in tensors.types.items():
        if kept := formats.get(name, ""):
            packed[name] = partial(tensors.packed, name, kept)
            kinds[_told(stored, kept)] += 1
        else:
            plain[name] = tensors.plain(name, dtype)
            if stored not in PLAIN_TYPES:
                kinds[f"{stored} dequantised"] += 1
    return GenericParts(plain, packed, kinds)


def _told(stored: str, kept: str) -> str:
    return f"{stored} to {kept} ({'as in the file' if is_exact(stored, kept) else 'rounded'})"


class _Renamed:
    """From a checkpoint's names to those of a stock model, by transformers' tables."""

    def __init__(self, empty: Any, names: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._meta, self._prefix = empty.state_dict(), empty.base_model_prefix
        self.shapes = {name: tuple(weight.shape) for name, weight in self._meta.items()}
        mapping = get_model_conversion_mapping(empty, names, None)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]

    def __call__(self, name: str) -> tuple[str, tuple[int, ...] | None]:
        """The parameter that a tensor is, or is a part of, and its place among its parts: () if it
        is the whole, (expert, place in the expert) of experts; None: something else is done."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, rename_source_key

        target, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._meta
        )
        if target not in self._meta and name in self._meta:
            return name, ()
        if pattern is None:
            return target, ()
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        done = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
        merges = done[:1] == [(MergeModulelist, 0)] and done[1:] in ([], [(Concatenate, 1)])
        expert = re.findall(r"\.(\d+)\.", name)
        if not merges or not expert or ".experts." not in name:
            return target, None
        return target, (int(expert[-1]), converter.source_patterns.index(pattern))


def _of_experts(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """Matrices [num_experts * out, in] of a file as `shape` [num_experts, in, out] of transformers;
    any other weight as it is."""
    if len(shape) != 3 or weight.dim() != 2:
        return weight
    return weight.view(shape[0], -1, weight.shape[1]).transpose(1, 2).contiguous()


def joined(parts: list[PackedWeight], name: str) -> PackedWeight:
    """The rows of matrices of one format, one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(part.format != first.format for part in parts) or not all(
        part.table is None or (first.table is not None and part.table.equal(first.table))
        for part in parts
    ):
        raise NotImplementedError(f"{name}: its experts have numbers of different tables")
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return dataclasses.replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        minimums=torch.cat(minimums) if minimums else None,
    )
