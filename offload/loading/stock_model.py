"""A checked checkpoint becomes a stock transformers model."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpu_ops.packed import FORMATS
from offload.loading.bars import passing_bars
from offload.loading.checkpoint import GGUF_FILE, TEXT_NAMES, Checkpoint, check_loaded
from offload.loading.generic_packing import (
    built_already,
    generic_from_parts,
    gguf_parts,
    kept_in_gguf,
    kept_in_safetensors,
    kept_of_dense,
    pack_dense,
    safetensors_parts,
    skeleton,
)
from offload.loading.gguf import CONVERTED_MARK, kept_source, weights_folder
from offload.loading.gguf_generic import GenericTensors
from offload.loading.gguf_header import read_gguf_header
from offload.loading.one_at_a_time import loading
from offload.loading.packing import model_from_parts, pack_weights
from offload.models import ModelShape, has_other_matrices
from offload.models.base import check_computation, context_limit
from offload.models.missing_features import OWN_ATTENTION, unsupported_generic
from offload.system.json_file import read_json_object
from offload.system.memory import give_back_free_memory

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
# One of them has the vocabulary, of all but tokenizers that need none.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "tekken.json")
logger = logging.getLogger(__name__)

# What files may ask an offloaded model for, first what it does. Its KV cache is the host store, it
# keeps no attention weights or hidden states, and its layers run all or none.
_OUTPUTS: dict[str, tuple[Any, ...]] = {
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "output_router_logits": (False, None),
}
_GENERATION = _OUTPUTS | {
    "use_cache": (True, None),
    "cache_implementation": (None, "dynamic", "hybrid"),  # transformers takes hybrid as not given
    "assistant_early_exit": (None, 0),
    "use_mtp": (None, False),
}


@loading()
def load_stock_model(checkpoint: Checkpoint, dtype: torch.dtype | None, packing: str = "") -> Any:
    """The stock model of a checked checkpoint, of a multi-modal one its text part; `dtype` None
    keeps the checkpoint's own.

    What its files ask of every generation, and an offloaded model does not do, is overridden.

    Args:
        packing: `RuntimeConfig.packing`; "": nothing is packed.

    Raises:
        ValueError: if weights are missing, unexpected, or have other shapes than config.json says;
            a file of settings that transformers refuses.
    """
    path = checkpoint.folder / "config.json"
    config, kind, is_part = _text_config(checkpoint, path)
    _tell_part(path, kind, is_part=is_part)
    # Kernels of the stock layers, which compute nothing here: there is none to look for.
    config._attn_implementation = config._experts_implementation = None
    try:
        check_computation(config)
        context_limit(config)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{path}: {error}") from error
    _override(config, _OUTPUTS, path)
    if checkpoint.packs_as_generic:
        empty = skeleton(kind, config, checkpoint.loaded_dtype(dtype))
        _override(empty.config, _OUTPUTS, path)
        return _generic_packed(checkpoint, empty, path, packing, is_part=is_part)
    if not has_other_matrices(checkpoint.config):
        checkpoint.check_sizes(ModelShape.of_config(config.to_dict(), 0))
    return _loaded(checkpoint, config, dtype, path, packing, is_part=is_part)


@loading()
def load_generic_model(
    checkpoint: Checkpoint, dtype: torch.dtype | None, packing: str = "auto", empty: Any = None
) -> Any:
    """As `load_stock_model`, of a type without lean layers, whose own modules will compute; of a
    multi-modal checkpoint the text part alone.

    Args:
        empty: its `generic_skeleton`, which becomes the model; None: one is made.

    Raises:
        ValueError: as there; before weights are read, for a class whose attention cannot be
            replaced, or a text part without a class of its own.
    """
    path = checkpoint.folder / "config.json"
    config, kind, is_part = _text_config(checkpoint, path)
    _tell_part(path, kind, is_part=is_part)
    if empty is None:
        empty = skeleton(kind, config, checkpoint.loaded_dtype(dtype))
    empty.config.name_or_path = str(checkpoint.folder)
    _override(empty.config, {"output_attentions": (False, None)}, path)
    if checkpoint.stored_types:
        return _generic_packed(checkpoint, empty, path, packing, is_part=is_part)
    kept = kept_of_dense(empty, packing)
    model = _loaded(checkpoint, empty.config, dtype, path, empty=empty, is_part=is_part)
    if kept:
        pack_dense(model, kept, packing)
    return model


def _text_config(checkpoint: Checkpoint, path: Path) -> tuple[Any, Any, bool]:
    """Config and class of the text model, and whether it is a part of another one."""
    whole = _config(checkpoint, path)
    config, kind = text_part(whole)
    if checkpoint.stored_types:
        config._attn_implementation = config._experts_implementation = None
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # of the file, not of this model
    is_part = config is not whole
    if is_part and not checkpoint.has_head and getattr(whole, "tie_word_embeddings", False):
        config.tie_word_embeddings = True
    return config, kind, is_part


def generic_skeleton(
    checkpoint: Checkpoint, dtype: torch.dtype | None, packing: str, *, is_lean: bool = False
) -> tuple[Any, dict[str, str]]:
    """What `load_generic_model` would load, without memory for weights, and the formats of the
    parameters that will be packed; if it `is_lean`, of what `load_stock_model` would.

    Raises: as `load_generic_model`.
    """
    config, kind, is_part = _text_config(checkpoint, checkpoint.folder / "config.json")
    empty = skeleton(kind, config, checkpoint.loaded_dtype(dtype))
    if not checkpoint.stored_types:
        return empty, kept_of_dense(empty, packing, is_lean=is_lean)
    if (checkpoint.folder / GGUF_FILE).is_file():
        tensors = GenericTensors(read_gguf_header(kept_source(checkpoint.folder)), empty)
        return empty, kept_in_gguf(tensors, empty, packing)
    names = TEXT_NAMES if is_part else None
    return empty, kept_in_safetensors(checkpoint, empty, names, packing)


def _generic_packed(
    checkpoint: Checkpoint, empty: Any, path: Path, packing: str, *, is_part: bool
) -> Any:
    """The model of a class whose checkpoint has quantised weights."""
    generation, source = _generation_config(checkpoint, path, is_part=is_part)
    loaded_dtype, names = empty.dtype, TEXT_NAMES if is_part else None
    if (checkpoint.folder / GGUF_FILE).is_file():
        parts = gguf_parts(kept_source(checkpoint.folder), empty, loaded_dtype, packing)
    else:
        parts = safetensors_parts(checkpoint, empty, loaded_dtype, names, packing)
    model, info = generic_from_parts(loaded_dtype, empty, parts, names)
    _check_loaded(model, info, checkpoint, is_part=is_part)
    model.generation_config = generation
    _override(model.generation_config, _GENERATION, source)
    return model


def text_part(config: Any) -> tuple[Any, Any]:
    """The config of the text model of `config`, which may be itself, and its causal class.

    Raises:
        ValueError: transformers has no such class, or its attention cannot be replaced.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    for key in (text, config):
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(key), None)
        if kind is not None and issubclass(type(text), kind.config_class):
            if text.model_type in OWN_ATTENTION or kind._can_set_attn_implementation():
                return text, kind
            reason = "its class does not use transformers' AttentionInterface"
            raise ValueError(unsupported_generic(text.model_type, reason))
    reason = "transformers has no causal class for its text part alone"
    raise ValueError(unsupported_generic(config.model_type, reason))


def _config(checkpoint: Checkpoint, path: Path) -> Any:
    """transformers' config at `path`; ValueError where it refuses that."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except OSError:
        raise
    except Exception as error:  # of any kind: they have no class in common
        raise ValueError(f"{path}: {error}") from error


def _loaded(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype | None,
    path: Path,
    packing: str = "",
    *,
    empty: Any = None,
    is_part: bool = False,
) -> Any:
    """The model of a config, with the checkpoint's weights.

    Args:
        empty: its `skeleton`, which gets the weights; None: one is made.
        is_part: of a text model, where the checkpoint has others beside it.
    """
    from transformers import AutoModelForCausalLM

    generation, source = _generation_config(checkpoint, path, is_part=is_part)
    loaded_dtype = checkpoint.loaded_dtype(dtype)  # what budgets were checked with
    is_gguf = (checkpoint.folder / GGUF_FILE).is_file()
    if checkpoint.stored_types and (packing or not is_gguf):
        model = model_from_parts(checkpoint, config, loaded_dtype, packing)
        model.generation_config = generation
        _override(model.generation_config, _GENERATION, source)
        return model
    folder = weights_folder(checkpoint.folder, loaded_dtype)
    with passing_bars():
        maker: Any = AutoModelForCausalLM if empty is None else built_already(empty)
        loaded: Any = maker.from_pretrained(
            folder,
            config=config,
            dtype=loaded_dtype,
            trust_remote_code=False,
            key_mapping=TEXT_NAMES if is_part else None,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # or transformers raises without naming the file
            output_loading_info=True,
        )
    model, info = loaded
    _check_loaded(model, info, checkpoint, is_part=is_part)
    if is_part:
        model.generation_config = generation
    _override(model.generation_config, _GENERATION, source)
    if packing in FORMATS:
        pack_weights(model, packing)
    return model


def _generation_config(checkpoint: Checkpoint, path: Path, *, is_part: bool) -> tuple[Any, Path]:
    """The settings of generations, those of the whole model, and the file that has them."""
    from transformers import GenerationConfig

    own = checkpoint.folder / "generation_config.json"
    source = own if own.exists() else path
    try:
        if is_part and source is path:  # where some may be in text_config
            made = GenerationConfig.from_model_config(_config(checkpoint, path))
            made._from_model_config = False  # or it would be made anew of the text model's config
            return made, source
        return GenerationConfig.from_pretrained(checkpoint.folder, source.name), source
    except Exception as error:  # or transformers raises without naming the file
        raise ValueError(f"{source}: {error}") from error


def _tell_part(path: Path, kind: Any, *, is_part: bool) -> None:
    if is_part:
        logger.info(
            "%s: only the text part is loaded, a %s: images and sound are not read",
            path,
            kind.__name__,
        )


def _check_loaded(
    model: Any, info: dict[str, Any], checkpoint: Checkpoint, *, is_part: bool
) -> None:
    if is_part:  # what is left of the other models
        model._weight_conversions = None  # or it would be saved by their names
        of_layers = [name for name in info["unexpected_keys"] if ".layers." in str(name)]
        info["unexpected_keys"] = [x for x in of_layers if str(x).startswith("model.layers.")]
    # A head for multi-token prediction, of which transformers knows the usual numbers.
    head = f"model.layers.{getattr(model.config, 'num_hidden_layers', 0)}."
    if f"{head}eh_proj.weight" in checkpoint.stored_shapes:
        unexpected = info["unexpected_keys"]
        info["unexpected_keys"] = [x for x in unexpected if not str(x).startswith(head)]
    check_loaded(info, checkpoint.folder, "its config.json")


def _override(settings: Any, available: dict[str, tuple[Any, ...]], path: Path) -> None:
    """Replace what `settings`, read from `path`, ask for and is not available, with a warning."""
    changes = []
    for name, values in available.items():
        asked = getattr(settings, name, None)
        if asked not in values:
            setattr(settings, name, values[0])
            changes.append(f"{name}={asked!r} (now {values[0]!r})")
    if changes:
        _warn_once(path, ", ".join(changes))


@functools.cache
def _warn_once(path: Path, changes: str) -> None:
    logger.warning("%s asks for what an offloaded model does not do: %s", path, changes)


def folder_tokenizer(folder: Path) -> Any:
    """The tokenizer in a checkpoint's folder. Code that comes with a checkpoint is never run.

    Raises:
        OSError: there is none.
        ValueError: the tokenizer is such code, or its files are damaged; names what is.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # transformers would take Qwen2's own tokenizer for any model of its type, whatever the files
    # say; those that were made of a GGUF file say all.
    is_converted = (folder / CONVERTED_MARK).is_file()
    loader: Any = PreTrainedTokenizerFast if is_converted else AutoTokenizer
    try:
        loaded = loader.from_pretrained(folder, trust_remote_code=False)
        give_back_free_memory()  # of its files, which are read as JSON twice
        return loaded
    except Exception as error:  # of any kind, where files are damaged
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{folder}: auto_map names Python code of the checkpoint as its tokenizer, and "
                "offload runs no such code; available: tokenizers that transformers has"
            ) from error
        for name in _TOKENIZER_FILES:
            if (folder / name).is_file():
                read_json_object(folder / name)
        if not any(any(folder.glob(name)) for name in _VOCABULARIES):
            raise FileNotFoundError(
                f"{folder} has no tokenizer: no {' or '.join(_VOCABULARIES[:2])}"
            ) from error
        if isinstance(error, OSError):
            raise
        reason = " ".join(str(error).split())  # transformers' has many lines
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {reason})"
        ) from error


@functools.lru_cache(maxsize=1)  # runtimes that share a model ask for the same
def load_delimiter_classes(folder: Path, vocab_size: int) -> npt.NDArray[np.uint8] | None:
    """uint8 [vocab_size]: `text_marks` of a checkpoint's tokenizer; None without one."""
    from offload.selection.text_marks import delimiter_classes

    try:
        known = delimiter_classes(folder_tokenizer(folder))
    except (OSError, ValueError) as error:
        known = None
        logger.debug("%s", error)
    if known is None:
        logger.warning(
            "%s has no tokenizer whose text can be read: the policy cuts chunks of fixed size",
            folder,
        )
        return None
    marks = np.zeros(vocab_size, np.uint8)
    marks[: min(vocab_size, len(known))] = known[:vocab_size]
    marks.flags.writeable = False
    return marks
