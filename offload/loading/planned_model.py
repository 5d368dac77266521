"""What a plan must know of a model: its shape and its weights' bytes, from its config alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cpu_ops.packed import FORMATS
from offload.loading.checkpoint import GGUF_FILE, check_checkpoint, check_config_file
from offload.loading.embedded_package import EMBEDDED_MODEL, LONG_CONTEXT_MODEL, embedded_gguf
from offload.loading.generic_packing import (
    check_host_experts,
    check_hot_experts,
    expert_bytes,
    hot_experts_beside,
    kept_in_gguf,
    kept_of_dense,
    may_pack,
    parameter_bytes,
    skeleton,
)
from offload.loading.gguf import long_context_adapter, made_folder
from offload.loading.gguf_blocks import format_of
from offload.loading.gguf_config import empty_model, gguf_config, gguf_names
from offload.loading.gguf_generic import GenericTensors
from offload.loading.gguf_header import GgufHeader, read_gguf_header
from offload.loading.names import check_has_owner, check_not_empty, checkpoint_name
from offload.loading.packed_bytes import kept_as, packed_weight_bytes
from offload.loading.quantised_checkpoint import FP4, quantised_format
from offload.loading.stock_model import generic_skeleton, text_part
from offload.models import (
    Where,
    family_of,
    has_other_matrices,
    is_generic,
    lean_model_maker,
    lean_text,
)
from offload.models.base import check_computation, context_limit
from offload.models.dtypes import AUTO_ON_GPU, DTYPES, WEIGHTS
from offload.models.shape import (
    MODEL_SHAPES,
    SHAPE_TYPES,
    ModelShape,
    matrix_sizes,
    weight_elements,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedModel:
    """A model that is not loaded.

    Attributes:
        name: as the user wrote it.
        model_type: transformers' name of the architecture.
        dtype: of weights and KV cache.
        weight_bytes: of all weights in that dtype, or packed; tied ones count once.
        folder: where its weights are or will be on this machine; None: it has none.
        weights: as `RuntimeConfig` has them.
        expert_bytes: of the experts of each layer that has some.
        host_bytes: of experts that stay on the host, which `weight_bytes` lacks.
        copied_bytes: of these, of which a GPU has copies, beside `weight_bytes`.
        weight_share: of the bytes that all weights would have in that dtype; below 1: packed.
    """

    name: str
    model_type: str
    shape: ModelShape
    dtype: torch.dtype
    weight_bytes: int
    folder: Path | None = None
    weights: str = "auto"
    weight_share: float = 1.0
    expert_bytes: tuple[int, ...] = ()
    host_bytes: int = 0
    copied_bytes: int = 0

    def with_host_experts(
        self, asked: int | str, hot: int | None, limit: int | None, beside: Callable[[], int]
    ) -> PlannedModel:
        """The same on a GPU whose experts stay on the host as `RuntimeConfig.host_experts` and
        `hot_experts` say.

        Args:
            limit: of the GPU; None: there is none.
            beside: bytes that "auto" leaves beside the weights.

        Raises:
            ValueError: more layers than have experts, or more experts than a layer has.
        """
        sizes, num_experts = self.expert_bytes, self.shape.num_experts
        check_host_experts(asked, len(sizes), self.model_type)
        check_hot_experts(hot, num_experts)
        if not isinstance(asked, int):
            asked = 0
            if limit is not None and sizes:
                needed = self.weight_bytes + beside()
                asked, hot = hot_experts_beside(sizes, num_experts, needed, limit, hot)
        stays = sum(sizes[:asked])
        copied = stays * (hot or 0) // max(1, num_experts)
        return replace(
            self, weight_bytes=self.weight_bytes - stays, host_bytes=stays, copied_bytes=copied
        )

    @property
    def checkpoint(self) -> str:
        """Tells the weights apart, as far as they are there (`checkpoint_name`); "": unknown."""
        return "" if self.folder is None else checkpoint_name(self.folder)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def check_context(self, num_tokens: int) -> None:
        """Refuse more tokens than it has positions."""
        if num_tokens > self.shape.max_context:
            raise ValueError(
                f"a context of {num_tokens} tokens exceeds the {self.shape.max_context} tokens of "
                f"{self.name}"
            )


def planned_model(
    name_or_path: str, dtype: str = "auto", weights: str = "auto", device: str = "cpu"
) -> PlannedModel:
    """The model of that name: a name of `MODEL_SHAPES`, or what `from_pretrained` takes.

    Of a checkpoint only config.json is read, of a GGUF file its header, and from the hub only
    config.json is downloaded.

    Args:
        dtype: a name, or "auto" for the checkpoint's own.
        weights: as `RuntimeConfig` has them.
        device: where the linear layers would run.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as `from_pretrained`.
    """
    _check_dtype(dtype)
    if weights not in WEIGHTS:
        raise ValueError(f"unknown weights {weights!r}; available: {', '.join(WEIGHTS)}")
    if weights in DTYPES:
        if dtype not in ("auto", weights):
            raise ValueError(
                f"weights={weights!r} contradicts dtype={dtype!r}; leave one of the two out"
            )
        dtype = weights
    check_not_empty(name_or_path)
    wanted = DTYPES.get(dtype)
    path = Path(name_or_path).expanduser()
    if name_or_path in MODEL_SHAPES and not path.exists():
        shape, chosen = MODEL_SHAPES[name_or_path], wanted or torch.bfloat16
        num_bytes = weight_elements(shape) * chosen.itemsize
        if weights in FORMATS:
            num_bytes = packed_weight_bytes(_shapes(shape), chosen, weights)
        return PlannedModel(
            name_or_path,
            SHAPE_TYPES.get(name_or_path, "llama"),
            shape,
            chosen,
            num_bytes,
            weights=weights,
            weight_share=num_bytes / (weight_elements(shape) * chosen.itemsize),
        )
    config, stored, folder, header = _config(name_or_path, path)
    lean_model_maker(config.model_type, config.to_dict())
    check_computation(config)
    chosen = wanted or stored or _dtype_of(config, name_or_path)
    planned, shapes = _of_config(name_or_path, config, chosen)
    if _is_made_of_parts(config, folder, header):
        if weights in FORMATS:
            _check_dense(weights, config, folder, header)
        family = family_of(config.to_dict())
        if weights in FORMATS and family is not None and not family.packs_dense:
            raise NotImplementedError(
                f"weights={weights!r} with a model of type {config.model_type!r}: its experts are "
                "packed where their checkpoint has them so; give weights='auto'"
            )
        packing = "" if weights in DTYPES else weights
        if packing == "auto" and device != "cpu":
            packing = AUTO_ON_GPU
        made = _skeleton(name_or_path, config, folder, header, chosen, packing, is_lean=True)
        num_bytes = sum(parameter_bytes(*made).values())
        return replace(
            planned,
            weight_bytes=num_bytes,
            weight_share=num_bytes / planned.weight_bytes,
            folder=folder,
            weights=weights,
            expert_bytes=tuple(expert_bytes(*made).values()),
        )
    types = _types(config, folder, header, name_or_path)
    if not types and (how := quantised_format(config.to_dict(), folder / "config.json")):
        # On the hub: that its layers' matrices are, nothing but its files would tell.
        of_layers = (name for name, size in shapes.items() if ".layers." in name and len(size) == 2)
        types = dict.fromkeys(of_layers, how.kind)
    if weights in FORMATS or weights == "auto":
        packing = AUTO_ON_GPU if weights == "auto" and device != "cpu" else weights
        num_bytes = packed_weight_bytes(shapes, chosen, packing, types)
        share = num_bytes / planned.weight_bytes
        planned = replace(planned, weight_bytes=num_bytes, weight_share=share)
    return replace(planned, folder=folder, weights=weights)


def _check_dtype(dtype: str) -> None:
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; available: auto, {', '.join(DTYPES)}")


def planned_skeleton(
    name_or_path: str, dtype: str = "auto", device: str = "cpu", weights: str = "auto"
) -> tuple[Any, dict[str, str]] | None:
    """`generic_skeleton` of a model without lean layers, by any name that `planned_model` takes;
    None: it has lean layers, or is a name of `MODEL_SHAPES`.

    Raises: as `planned_model`, and `load_generic_model`.
    """
    _check_dtype(dtype)
    check_not_empty(name_or_path)
    path = Path(name_or_path).expanduser()
    if name_or_path in (*MODEL_SHAPES, EMBEDDED_MODEL, LONG_CONTEXT_MODEL) and not path.exists():
        return None
    config, stored, folder, header = _config(name_or_path, path)
    where: Where = "cpu" if device == "cpu" else "gpu"
    if not is_generic(config.to_dict(), where=where):
        return None
    if weights != "auto":
        _check_dense(weights, config, folder, header)
    packing = AUTO_ON_GPU if weights == "auto" and device != "cpu" else weights
    wanted = DTYPES.get(weights) or DTYPES.get(dtype) or stored
    return _skeleton(name_or_path, config, folder, header, wanted, packing)


def _check_dense(weights: str, config: Any, folder: Path, header: GgufHeader | None) -> None:
    if kind := _quantised(config, folder, header):
        raise NotImplementedError(
            f"weights={weights!r} with weights that are quantised already ({kind}) of type "
            f"{config.model_type!r}: they stay as they are; give weights='auto'"
        )


def _quantised(config: Any, folder: Path, header: GgufHeader | None) -> str:
    """In what way its files have weights; "": in a dtype."""
    how = quantised_format(config.to_dict(), folder / "config.json")
    return "GGUF" if header is not None else "" if how is None else how.kind


def _is_made_of_parts(config: Any, folder: Path, header: GgufHeader | None) -> bool:
    """Whether a `_skeleton` tells the bytes of a model with lean layers."""
    family = family_of(config.to_dict())
    packs = family is not None and family.packs_as_generic
    is_quantised = packs and bool(_quantised(config, folder, header))
    return has_other_matrices(config.to_dict()) or is_quantised


def _skeleton(
    name: str,
    config: Any,
    folder: Path,
    header: GgufHeader | None,
    dtype: torch.dtype | None,
    packing: str,
    *,
    is_lean: bool = False,
) -> tuple[Any, dict[str, str]]:
    """Of a folder with weights headers are read, too. Else quantised matrices are taken to be those
    of its layers."""
    if header is None and any(x.is_file() for x in (folder / GGUF_FILE, *_weights(folder))):
        checkpoint = check_checkpoint(folder, takes_generic=True)
        return generic_skeleton(checkpoint, dtype, packing, is_lean=is_lean)
    text, kind = text_part(config)
    empty = skeleton(kind, text, dtype or _dtype_of(config, name))
    if header is not None:
        return empty, kept_in_gguf(GenericTensors(header, empty), empty, packing)
    how, kept = quantised_format(config.to_dict(), folder / "config.json"), dict[str, str]()
    if how is None:
        return empty, kept_of_dense(empty, packing, is_lean=is_lean)
    for name, weight in empty.named_parameters():
        if ".layers." in name and (weight.dim() == 3 or (weight.dim() == 2 and how.kind != FP4)):
            kept[name] = kept_as(format_of(how.kind), packing)
    return empty, {name: x for name, x in kept.items() if x and may_pack(empty, name)}


def _weights(folder: Path) -> Iterator[Path]:
    return folder.glob("*.safetensors")


def _shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Sizes of a model's matrices by name, and of all the rest as one vector."""
    found: dict[str, tuple[int, ...]] = {name: size for name, _, size in matrix_sizes(shape)}
    if shape.num_experts:
        found = {name: size for name, size in found.items() if ".mlp." not in name}
        experts, inner, hidden = shape.num_experts, shape.expert_size, shape.hidden_size
        for mlp in (f"model.layers.{i}.mlp" for i in range(shape.num_layers)):
            found[f"{mlp}.gate.weight"] = (experts, hidden)
            found[f"{mlp}.experts.gate_up_proj"] = (experts, hidden, 2 * inner)  # [in, out]
            found[f"{mlp}.experts.down_proj"] = (experts, inner, hidden)
    if not shape.ties_embeddings:
        found["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    rest = weight_elements(shape) - sum(math.prod(size) for size in found.values())
    return found | {"norms": (rest,)}


def _types(config: Any, folder: Path, header: GgufHeader | None, name: str) -> Mapping[str, str]:
    """`Checkpoint.stored_types` of a model with lean layers, as far as its files are here."""
    if header is not None:
        if name == LONG_CONTEXT_MODEL and not Path(name).exists():  # which is not kept so
            return {}
        names = gguf_names(empty_model(config, torch.bfloat16))
        return {of: header.tensors[name].type_name for of, name in names.items()}
    if (folder / GGUF_FILE).is_file() or (
        any(_weights(folder)) and getattr(config, "quantization_config", None)
    ):
        return check_checkpoint(folder).stored_types
    return {}


def _config(name: str, path: Path) -> tuple[Any, torch.dtype | None, Path, GgufHeader | None]:
    """transformers' config, of a multi-modal model whose text part has lean layers that one's, the
    dtype of converted weights where there is one, their folder, and the header of a GGUF file that
    was named."""
    from transformers import CONFIG_MAPPING, AutoConfig

    changed: dict[str, Any] = {}
    embedded = None
    if name in (EMBEDDED_MODEL, LONG_CONTEXT_MODEL) and not path.exists():
        path, embedded = embedded_gguf(), name
        if name == LONG_CONTEXT_MODEL:
            changed = long_context_adapter().config
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file; give a model's folder or a .gguf file")
        # bfloat16 is what `converted_folder` stores.
        header = read_gguf_header(path)
        config = gguf_config(header)
        config.update(changed)
        return config, torch.bfloat16, made_folder(path, embedded), header
    if path.is_dir():
        check_config_file(path / "config.json")
    else:
        path = _hub_config(name).parent
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = lean_text(config.to_dict())
    if text is not None:
        may_tie = getattr(config, "tie_word_embeddings", False) and any(_weights(path))
        config = CONFIG_MAPPING[text["model_type"]].from_dict(text)
        if may_tie and not check_checkpoint(path).has_head:
            config.tie_word_embeddings = True
    return config, None, path, None


def _hub_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    shapes = ", ".join(MODEL_SHAPES)
    if name[:1] in ("", ".", "/", "~"):
        raise FileNotFoundError(f"no such model folder, GGUF file or shape: {name}")
    check_has_owner(name, MODEL_SHAPES)
    try:
        path = Path(hf_hub_download(name, filename="config.json"))
    except HFValidationError as error:
        raise FileNotFoundError(f"no such model folder, GGUF file or shape: {name}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"cannot find the model {name!r}: it is no local folder, no .gguf file, not the alias "
            f"{EMBEDDED_MODEL!r} or {LONG_CONTEXT_MODEL!r} and not one of the shapes {shapes}, "
            f"and the Hugging Face hub says: {error}"
        ) from error
    check_config_file(path)
    return path


def _dtype_of(config: Any, name: str) -> torch.dtype:
    stored = getattr(config, "dtype", None)
    if isinstance(stored, torch.dtype):
        return stored
    logger.warning("the config of %s names no dtype: planning for bfloat16; give --dtype", name)
    return torch.bfloat16


def _of_config(
    name: str, config: Any, dtype: torch.dtype
) -> tuple[PlannedModel, dict[str, tuple[int, ...]]]:
    """The model without packed weights, and the shapes of its parameters, tied ones once."""
    from transformers import AutoModelForCausalLM

    shape = ModelShape.of_config(config.to_dict(), context_limit(config)[0])
    model: Any = AutoModelForCausalLM
    with torch.device("meta"):  # shapes without memory: biases, norms and ties count as they are
        stock = model.from_config(config, dtype=dtype)
    shapes = {name: tuple(weight.shape) for name, weight in stock.named_parameters()}
    if (family := family_of(config.to_dict())) is not None:
        windows = tuple(family.window(stock, i) for i in range(shape.num_layers))
        shape = replace(shape, windows=windows if any(windows) else ())
    weight_bytes = sum(map(math.prod, shapes.values())) * dtype.itemsize
    return PlannedModel(name, config.model_type, shape, dtype, weight_bytes), shapes
