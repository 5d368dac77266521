"""From a model's name to a stock transformers model: local folder, GGUF file, alias or hub id."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.budgets import device_kv_budget_bytes, kv_budget_bytes
from offload.checkpoint import Checkpoint, check_config_file, check_loaded
from offload.config import RuntimeConfig
from offload.gguf_conversion import EMBEDDED_MODEL, converted_folder, embedded_gguf
from offload.models import lean_model_maker
from offload.rank_weights import rank_policy
from offload.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Weights in other formats, and the original checkpoints that some repositories carry in folders.
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_HUB_IGNORED = ("*/*", "consolidated*")


@dataclass(frozen=True)
class HubOptions:
    """The standard keyword arguments of `from_pretrained` that say where files come from."""

    cache_dir: str | None = None
    force_download: bool = False
    local_files_only: bool = False
    token: str | bool | None = None
    revision: str | None = None
    gguf_file: str | None = None


def resolve_folder(name_or_path: str | Path, hub: HubOptions | None = None) -> Path:
    """The local folder with config, safetensors and tokenizer of a model.

    `name_or_path` is a folder, a .gguf file (converted once, see `gguf_conversion`), the alias
    "smollm2-135m-instruct", or a hub id, whose files are downloaded unless they are cached.

    Raises:
        FileNotFoundError: nothing there, or not on the hub.
        ValueError: see `check_checkpoint`; what can be known from config.json is checked before
            weights are downloaded.
    """
    hub = hub or HubOptions()
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name == EMBEDDED_MODEL and not path.exists():
        return converted_folder(embedded_gguf(), EMBEDDED_MODEL)
    if path.is_dir():
        return converted_folder(path / hub.gguf_file) if hub.gguf_file else path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file; give a model's folder or a .gguf file")
        return converted_folder(path)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"no such model folder or GGUF file: {name}")
    return _download(name, hub)


def resolve_folder_once(
    name_or_path: str | Path, hub: HubOptions, ranks: TensorParallel | None
) -> Path:
    """`resolve_folder`; with ranks by one of them, which may have to download or to convert."""
    if ranks is None:
        return resolve_folder(name_or_path, hub)
    folder: Path = ranks.once(lambda: resolve_folder(name_or_path, hub))
    return folder


def check_before_loading(
    checkpoint: Checkpoint, config: RuntimeConfig, ranks: TensorParallel | None
) -> None:
    """Refuse, before any weight is read, what would not fit.

    Raises:
        HostBudgetError, DeviceMemoryError: weights beyond max_memory. What one rank's GPU will hold
            is known when it has its part (`keep_own_part`).
        ValueError, NotImplementedError: a policy that is not for this model, or not for ranks; more
            ranks than KV heads.
    """
    weight_bytes = checkpoint.weight_bytes(config.dtype)
    kv_budget_bytes(config, weight_bytes, loaded=False)
    shape = checkpoint.attention_shape
    config.policy.check_model(**shape)
    if config.placement is not None:
        config.placement.check_model(
            num_layers=shape["num_layers"], num_kv_heads=shape["num_kv_heads"]
        )
    if ranks is None:
        device_kv_budget_bytes(config, weight_bytes)
        return
    del shape["num_qo_heads"]
    rank_policy(config.policy, ranks, **shape)


def load_stock_model(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Any:
    """The stock model of a checked checkpoint; `dtype` None keeps the checkpoint's own.

    Raises:
        ValueError: if weights are missing, unexpected, or have other shapes than config.json says.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except OSError:
        raise
    except Exception as error:  # of any kind: they have no class in common
        raise ValueError(f"{checkpoint.folder / 'config.json'}: {error}") from error
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=dtype or "auto",
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # or transformers raises without naming the file
        output_loading_info=True,
    )
    model, info = loaded
    check_loaded(info, checkpoint.folder, "its config.json")
    return model


def load_tokenizer(name_or_path: str | Path, hub: HubOptions | None = None) -> Any:
    """The tokenizer of a model, by any name that `OffloadedModel.from_pretrained` takes."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_folder(name_or_path, hub))


def with_calibrated_policy(
    stock: Any, config: RuntimeConfig, folder: Path, ranks: TensorParallel | None = None
) -> RuntimeConfig:
    """The config, its policy with what it needs to learn from the model's attention first.

    With ranks one of them learns; the model is still whole.
    """
    if ranks is not None:
        return replace(
            config,
            policy=ranks.once(lambda: with_calibrated_policy(stock, config, folder).policy),
        )
    from transformers import AutoTokenizer

    if config.policy.name != "lychee_decode":
        return config
    from offload.head_calibration import with_calibrated_roles

    policy = with_calibrated_roles(
        config.policy,
        lean_model_maker(stock.config.model_type)(stock),
        model_type=stock.config.model_type,
        load_tokenizer=lambda: AutoTokenizer.from_pretrained(folder),
    )
    return replace(config, policy=policy)


def load_vocabulary_marks(folder: Path, vocab_size: int) -> npt.NDArray[np.uint8] | None:
    """uint8 [vocab_size]: `offload.text_marks` of a checkpoint's tokenizer; None without one."""
    from transformers import AutoTokenizer

    from offload.text_marks import vocabulary_marks

    try:
        known = vocabulary_marks(AutoTokenizer.from_pretrained(folder))
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
    return marks


def _download(name: str, hub: HubOptions) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    source: dict[str, Any] = {
        "repo_id": name,
        "revision": hub.revision,
        "cache_dir": hub.cache_dir,
        "force_download": hub.force_download,
        "local_files_only": hub.local_files_only,
        "token": hub.token,
    }
    try:
        if hub.gguf_file:
            return converted_folder(Path(hf_hub_download(filename=hub.gguf_file, **source)))
        check_config_file(Path(hf_hub_download(filename="config.json", **source)))
        folder = snapshot_download(
            allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_IGNORED), **source
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"cannot find the model {name!r}: it is no local folder, no .gguf file and not the "
            f"alias {EMBEDDED_MODEL!r}, and the Hugging Face hub says: {error}"
        ) from error
    return Path(folder)
