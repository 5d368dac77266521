"""GGUF files of types without lean layers: config, and which tensors are which parameters.

Both come from transformers' own tables, as far as these say all; what a table leaves out that
changes what is computed is here, and metadata that neither knows is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_ops.packed import GROUP, PackedWeight
from offload.loading.gguf_blocks import format_of, read_packed
from offload.loading.gguf_gemma4 import GEMMA4_KEYS, GEMMA4_KNOWN, gemma4_fields, gemma4_names
from offload.loading.gguf_header import GgufHeader
from offload.loading.gguf_rope import rope_parameters

# llama.cpp's name -> transformers', of those whose keys are in `GGUF_CONFIG_MAPPING`.
_BY_KEYS = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "nemotron": "nemotron",
    "phi3": "phi3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
# Those that have a function of their own in transformers.
_BY_FUNCTION = ("lfm2", "qwen35", "qwen35moe")
GENERIC_ARCHITECTURES = (*_BY_KEYS, *_BY_FUNCTION)
# Keys that transformers' table leaves out.
_MORE_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.layer_norm_epsilon": "norm_eps",
}
# Looked at elsewhere, or of no effect on what is computed.
_KNOWN = re.compile(
    r"attention\.value_length|rope\.(dimension_count|freq_base|scaling\..*)|vocab_size"
    r"|use_parallel_residual|attention\.causal"
)
_IGNORED = re.compile(r"mtp\.|.*\.rotary_emb\.")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_OSS_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def generic_config(
    header: GgufHeader, architecture: str, vocab_size: int, tokens: dict[str, int | None]
) -> Any:
    """transformers' config of the model in a GGUF file.

    Args:
        architecture: one of `GENERIC_ARCHITECTURES`.
        tokens: the ids of special tokens, by their names in a config.

    Raises:
        ValueError: metadata that is missing, or that nothing here knows.
    """
    from transformers import AutoConfig

    metadata = {key: x.tolist() if isinstance(x, np.ndarray) else x
                for key, x in header.metadata.items()}  # fmt: skip
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()
           if key.startswith(f"{architecture}.")}  # fmt: skip
    if architecture in _BY_FUNCTION:
        fields, known = _by_function(header, architecture, metadata)
    else:
        fields, known = _by_keys(header, architecture, own)
    for key in sorted(own):
        if key not in known and not _KNOWN.fullmatch(key):
            raise ValueError(
                f"{architecture}.{key}={own[key]!r:.60} is not known here, and may change what is "
                "computed; take a file without it"
            )
    fields |= {"vocab_size": vocab_size, **tokens}
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _by_function(
    header: GgufHeader, architecture: str, metadata: dict[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    from transformers.integrations.gguf.gguf_config_mapping import get_gguf_config

    read = _Read(metadata)
    read["tokenizer.ggml.tokens"] = len(metadata["tokenizer.ggml.tokens"])
    try:
        fields = get_gguf_config(read, tuple(header.tensors))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"the metadata does not tell {error} of a {architecture}") from error
    return fields, {key.removeprefix(f"{architecture}.") for key in read.keys_read}


class _Read(dict[str, Any]):
    """Remembers which keys were read."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


def _by_keys(
    header: GgufHeader, architecture: str, own: dict[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    from transformers.integrations import ggml

    model_type = _BY_KEYS[architecture]
    of_table = model_type.removesuffix("_text")
    all_keys: Any = ggml.GGUF_CONFIG_MAPPING
    if of_table not in all_keys:
        raise ValueError(f"this transformers does not know {architecture}; install the newest")
    table = {key: name for key, name in all_keys[of_table].items() if name}
    names = _MORE_KEYS | table
    if model_type == "gpt_oss":  # whose experts have the one size
        names |= {"expert_feed_forward_length": "intermediate_size"}
    if model_type == "gemma4_text":
        names = GEMMA4_KEYS | table
    fields: dict[str, Any] = dict(ggml.GGUF_CONFIG_DEFAULTS_MAPPING.get(of_table, {}))
    for key in ("context_length", "block_count", "embedding_length", "attention.head_count"):
        if type(own.get(key)) is not int or not 0 < own[key] < 2**24:
            raise ValueError(
                f"{architecture}.{key} must be an integer in 1..{2**24}, got {own.get(key)!r:.60}"
            )
    fields |= {name: own[key] for key, name in names.items() if key in own and name != "rope_theta"}
    if model_type == "gemma4_text":
        fields |= gemma4_fields(header, own, own["block_count"])
        return fields | {"model_type": model_type}, names.keys() | GEMMA4_KNOWN
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    head_dim = fields.setdefault("head_dim", hidden // heads)
    if own.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"{architecture}.attention.value_length={own['attention.value_length']} is not "
            f"supported: the heads have {head_dim} elements"
        )
    rope = rope_parameters(header, architecture, head_dim, own["context_length"])
    rotated = own.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if model_type == "gpt_oss":
        rope |= {"truncate": False} if rope["rope_type"] == "yarn" else {}
    fields |= {"model_type": model_type, "rope_parameters": rope}
    if model_type in ("gemma2", "gemma3_text"):
        # The largest divides scores by another number, which llama.cpp knows by the layers, too.
        largest = own["block_count"] == {"gemma2": 46, "gemma3_text": 62}[model_type]
        fields["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
    if model_type == "gemma3_text":
        theta = own.get("rope.freq_base_swa", 10000.0)
        local = {"rope_type": "default", "rope_theta": theta}
        names |= {"rope.freq_base_swa": "", "attention.sliding_window_pattern": ""}
        pattern = own.get("attention.sliding_window_pattern", 6)
        if isinstance(pattern, list):
            fields["layer_types"] = [_LAYER_TYPES[bool(is_sliding)] for is_sliding in pattern]
        else:
            fields["sliding_window_pattern"] = pattern
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    if model_type == "stablelm":
        fields["use_qkv_bias"] = "blk.0.attn_q.bias" in header.tensors
        fields["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.tensors
        fields["qk_layernorm"] = "blk.0.attn_q_norm.weight" in header.tensors
    return fields, set(names)


@dataclass(frozen=True)
class _Parameter:
    """How a parameter is made of tensors of the file.

    Attributes:
        sources: their names; of experts' gate_up_proj two.
        plain: makes it of their numbers, which come as float32.
        rows: which row of the file each of its rows is; None: as they are. Of experts all rows, of
            one after the other, where a row of `gate` comes before one of `up`.
        columns: the same of columns.
        may_pack: whether it has the numbers of the file, in another order.
    """

    sources: tuple[str, ...]
    plain: Callable[[list[Tensor]], Tensor]
    rows: Tensor | None = None
    columns: Tensor | None = None
    may_pack: bool = True


class GenericTensors:
    """The parameters of a stock model in a GGUF file.

    Args:
        empty: the model without weights.

    Raises:
        ValueError: tensors that are missing or have no place in it; names them.
    """

    def __init__(self, header: GgufHeader, empty: Any) -> None:
        self._header = header
        architecture = header.metadata["general.architecture"]
        if architecture == "gpt-oss":
            self._parameters = _of_gpt_oss(header)
        elif architecture in _BY_FUNCTION:
            self._parameters = _of_mapping(header, architecture, empty.config)
        else:
            self._parameters = _of_processor(header, architecture, empty)
        self._parameters = {
            name: one for name, one in self._parameters.items() if not _IGNORED.match(name)
        }
        found, wanted = self._parameters.keys(), dict(empty.named_parameters())
        kept = empty.state_dict().keys()
        wanted |= {name: x for name, x in empty.named_buffers() if name in kept}
        for what, names in (("missing", wanted.keys() - found), ("unexpected", found - wanted)):
            if names:
                some = ", ".join(sorted(names)[:3])
                raise ValueError(
                    f"the tensors do not fit its metadata: {len(names)} {what}, {some}"
                )
        self.shapes = {name: tuple(x.shape) for name, x in wanted.items()}
        for name, one in self._parameters.items():
            if sum(int(np.prod(header.tensors[of].shape)) for of in one.sources) != int(
                np.prod(self.shapes[name])
            ):
                shapes = [list(header.tensors[of].shape) for of in one.sources]
                raise ValueError(
                    f"{' and '.join(one.sources)} of {shapes} instead of {list(self.shapes[name])}"
                )

    @property
    def types(self) -> dict[str, str]:
        """How each parameter is stored; of two tensors the first."""
        tensors = self._header.tensors
        return {name: tensors[one.sources[0]].type_name for name, one in self._parameters.items()}

    def format(self, name: str) -> str:
        """What it may be packed as; "": not at all."""
        one = self._parameters[name]
        kinds = [self._header.tensors[of].type_name for of in one.sources]
        formats = {format_of(kind) for kind in kinds}
        if not one.may_pack or "" in formats:
            return ""
        if one.columns is not None and self._moved_groups(one.columns) is None:
            return ""
        return formats.pop() if len(formats) == 1 else "q8"

    def plain(self, name: str, dtype: torch.dtype) -> Tensor:
        """It in a dtype, dequantised.

        Raises:
            ValueError: numbers that are not finite.
        """
        one = self._parameters[name]
        with np.errstate(all="ignore"):  # refused below
            read = [torch.from_numpy(self._header.float32(of)) for of in one.sources]
        made = one.plain(read).reshape(self.shapes[name]).to(dtype).contiguous()
        if not bool(made.isfinite().all()):
            raise ValueError(
                f"{self._header.path} holds numbers that are not finite, in {one.sources[0]}"
            )
        return made

    def packed(self, name: str, kept: str) -> PackedWeight:
        """A matrix, or the matrices of all experts [num_experts * out, in], in a format."""
        one = self._parameters[name]
        parts = [read_packed(self._header, of, kept) for of in one.sources]

        def of(values: list[Tensor | None]) -> Tensor | None:
            if values[0] is None:
                return None
            made = torch.cat([x for x in values if x is not None])
            made = made if one.rows is None else made.index_select(0, one.rows)
            if one.columns is None:
                return made
            groups = self._moved_groups(one.columns)
            assert groups is not None
            split = made.view(len(made), len(groups), -1)
            return split.index_select(1, groups).view(made.shape)

        codes, scales = of([x.codes for x in parts]), of([x.scales for x in parts])
        assert codes is not None
        assert scales is not None
        minimums = of([x.minimums for x in parts])
        return PackedWeight(codes, scales, minimums, parts[0].in_features, parts[0].table)

    @staticmethod
    def _moved_groups(columns: Tensor) -> Tensor | None:
        """Which groups an order of columns moves; None: it does not move whole ones."""
        if len(columns) % GROUP:
            return None
        groups = columns.view(-1, GROUP)
        in_order = groups[:, :1] + torch.arange(GROUP)
        is_whole = groups.equal(in_order) and not bool((groups[:, 0] % GROUP).any())
        return groups[:, 0] // GROUP if is_whole else None


def _of_gpt_oss(header: GgufHeader) -> dict[str, _Parameter]:
    """transformers' table has other names than llama.cpp's files."""
    made: dict[str, _Parameter] = {}
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for name, tensor in header.tensors.items():
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        owner, _, kind = name.rpartition(".")
        if block is None:
            made[f"{whole.get(owner, owner)}.{kind}"] = _Parameter((name,), lambda x: x[0])
            continue
        layer, of_layer = f"model.layers.{block[1]}", block[2]
        suffix = "" if kind == "weight" else "_bias"
        if of_layer == "attn_sinks":
            made[f"{layer}.self_attn.sinks"] = _Parameter((name,), lambda x: x[0])
        elif of_layer == "ffn_down_exps":
            made[f"{layer}.mlp.experts.down_proj{suffix}"] = _Parameter((name,), _transposed)
        elif of_layer == "ffn_gate_exps":
            up = name.replace("gate", "up")
            if up not in header.tensors or header.tensors[up].shape != tensor.shape:
                raise ValueError(f"{name} is there without {up} of the same shape")
            num_rows = int(np.prod(tensor.shape[:2]))
            rows = torch.arange(2 * num_rows).view(2, -1).T.flatten()
            made[f"{layer}.mlp.experts.gate_up_proj{suffix}"] = _Parameter(
                (name, up), _interleaved, rows
            )
        elif of_layer != "ffn_up_exps":
            made[f"{layer}.{_OSS_NAMES.get(of_layer, of_layer)}.{kind}"] = _Parameter(
                (name,), lambda x: x[0]
            )
    return made


def _transposed(values: list[Tensor]) -> Tensor:
    return values[0].transpose(1, 2) if values[0].dim() == 3 else values[0]


def _interleaved(values: list[Tensor]) -> Tensor:
    """[num_experts, out, in] twice -> [num_experts, in, 2 * out]; of biases [num_experts, out]."""
    both = torch.stack(values, 2).flatten(1, 2)
    return both.transpose(1, 2) if both.dim() == 3 else both


def _of_mapping(header: GgufHeader, architecture: str, config: Any) -> dict[str, _Parameter]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf import gguf_conversion_mapping as known
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

    mapping = copy.deepcopy(get_gguf_conversion_mapping(architecture, config))
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found: dict[str, dict[str | None, str]] = {}
    for name in header.tensors:
        target, pattern = rename_source_key(name, renamings, converters)
        found.setdefault(target, {})[pattern] = name
    made: dict[str, _Parameter] = {}
    for target, by_pattern in found.items():
        pattern = next(iter(by_pattern))
        converter = next((x for x in converters if pattern in x.source_patterns), None)
        if converter is None:
            made[target] = _Parameter(tuple(by_pattern.values()), lambda x: x[0])
            continue
        ordered = [p for p in converter.source_patterns if p in by_pattern]
        sources = tuple(by_pattern[p] for p in ordered)
        rows = columns = None
        may_pack = True
        for op in converter.operations:
            if isinstance(op, known.PermuteRows):
                order = torch.arange(header.tensors[sources[0]].shape[0]).view(-1, 1)
                order = _converted([op], ["x"], [order]).flatten()
                rows = order if rows is None else rows[order]
            elif isinstance(op, known.PermuteInputFeatures):
                columns = op.permutation
            elif isinstance(op, known.ConcatenateRows) and op.dim == 1:
                rows = _one_expert_after_the_other(header, sources)
            elif not isinstance(op, known.Unsqueeze):
                may_pack = False

        def plain(x: list[Tensor], of: Any = converter, patterns: list[str] = ordered) -> Tensor:
            return _converted(of.operations, patterns, x)

        made[target] = _Parameter(sources, plain, rows, columns, may_pack)
    return made


def _converted(operations: list[Any], patterns: list[str], values: list[Tensor]) -> Tensor:
    """What transformers' operations make of tensors."""
    found: dict[str, Any] = dict(zip(patterns, values, strict=True))
    for op in operations:
        found = op.convert(found, source_patterns=patterns, target_patterns=["made"])
        patterns = ["made"]
    made: Tensor = found["made"]
    return made


def _one_expert_after_the_other(header: GgufHeader, sources: tuple[str, ...]) -> Tensor | None:
    """The order of rows that brings gate and up of one expert together."""
    if len(sources) == 1:
        return None
    num_experts = header.tensors[sources[0]].shape[0]
    count = sum(int(np.prod(header.tensors[of].shape[:-1])) for of in sources)
    return torch.arange(count).view(2, num_experts, -1).transpose(0, 1).flatten()


@contextlib.contextmanager
def _names_once() -> Iterator[None]:
    """transformers makes the names of an architecture anew for each module of a model: seconds."""
    import gguf

    made = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(made)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = made


def _of_processor(header: GgufHeader, architecture: str, empty: Any) -> dict[str, _Parameter]:
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = kind(config=empty.config.to_dict())
    with _names_once():
        names = get_gguf_hf_weights_map(empty, processor)
    if architecture == "gemma4":
        names |= gemma4_names(empty.config)
    sources: dict[str, list[str]] = {}
    for name in header.tensors:
        # Experts, whose parameter's name has no suffix.
        target = names.get(name, names.get(name.removesuffix(".weight"), name))
        if target:
            sources.setdefault(target, []).append(name)

    def process(of_file: list[str], values: list[Any]) -> Tensor:
        parsed: dict[str, dict[str, Any]] = {"tensors": {}}
        for name, value in zip(of_file, values, strict=True):
            result = processor.process(
                weights=value, name=name, tensor_key_mapping=names, parsed_parameters=parsed
            )
            if result.name is not None:
                parsed["tensors"][name] = torch.from_numpy(np.array(result.weights))
        made = [torch.as_tensor(value) for value in parsed["tensors"].values()]
        return made[0] if len(made) == 1 else torch.cat(made, 1)

    made: dict[str, _Parameter] = {}
    for target, of_file in sources.items():
        of_file = sorted(of_file)  # gate before up

        def plain(x: list[Tensor], of_file: list[str] = of_file) -> Tensor:
            return process(of_file, [value.numpy() for value in x])

        shape = header.tensors[of_file[0]].shape
        if len(shape) == 3:
            rows = _one_expert_after_the_other(header, tuple(of_file))
            made[target] = _Parameter(tuple(of_file), plain, rows, may_pack=True)
            continue
        rows, may_pack = None, False
        if len(shape) == 2 and len(of_file) == 1:
            # Two columns by which it shows whether rows are moved, and nothing else is.
            probe = np.arange(2.0 * shape[0], dtype=np.float64).reshape(-1, 2)
            try:
                found = process(of_file, [probe]).numpy()
            except Exception:  # of any kind: it wants all columns
                found = np.empty(0)
            if found.shape == probe.shape:
                order = (found[:, 0] // 2).astype(np.int64)
                may_pack = bool(np.array_equal(found, probe[order % shape[0]]))
                is_same = np.array_equal(order, np.arange(shape[0]))
                rows = None if is_same or not may_pack else torch.from_numpy(order)
        made[target] = _Parameter(tuple(of_file), plain, rows, may_pack=may_pack)
    return made
