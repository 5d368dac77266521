"""From a model's name to a stock transformers model: local folder, GGUF file, alias or hub id."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.loading.checkpoint import GGUF_FILE, check_config_file, check_model_type
from offload.loading.checkpoint_digest import checkpoint_digest
from offload.loading.embedded_package import EMBEDDED_MODEL, LONG_CONTEXT_MODEL, embedded_gguf
from offload.loading.gguf import embedded_name, long_context_folder, model_folder
from offload.loading.stock_model import folder_tokenizer

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
    """The local folder with config, weights and tokenizer of a model.

    `name_or_path` is a folder, a .gguf file (read once, see `model_folder`), an alias
    ("smollm2-135m-instruct", "smollm2-135m-instruct-32k"), or a hub id, whose files are downloaded
    unless they are cached.

    Raises:
        FileNotFoundError: nothing there, or not on the hub.
        ValueError: see `check_checkpoint`; what can be known from config.json is checked before
            weights are downloaded.
    """
    hub = hub or HubOptions()
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ValueError(
            f"a model is a folder, a .gguf file, a hub id or {EMBEDDED_MODEL!r}, got "
            f"{name_or_path!r}"
        )
    check_not_empty(name_or_path)
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name == EMBEDDED_MODEL and not path.exists():
        return model_folder(embedded_gguf(), EMBEDDED_MODEL)
    if name == LONG_CONTEXT_MODEL and not path.exists():
        return long_context_folder()
    if path.is_dir():
        return model_folder(path / hub.gguf_file) if hub.gguf_file else path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file; give a model's folder or a .gguf file")
        return model_folder(path)
    if path.suffix == ".gguf" or name[:1] in "./~" or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"no such model folder or GGUF file: {name}")
    check_has_owner(name)
    return _download(name, hub)


def check_not_empty(name_or_path: str | Path) -> None:
    """Refuse "", which as a path would be the working directory."""
    if not str(name_or_path):
        raise ValueError("the model's name is empty; give a folder, a .gguf file or a hub id")


def check_has_owner(name: str, more_names: Iterable[str] = ()) -> None:
    """Refuse a name without the owner that a hub id has, before the hub is asked in vain.

    Args:
        more_names: of models that the caller knows, in addition to the aliases.

    Raises:
        FileNotFoundError: names the known ones, those that are spelled like `name` first.
    """
    if "/" in name:
        return
    known = [EMBEDDED_MODEL, LONG_CONTEXT_MODEL, *more_names]
    near = get_close_matches(name, known, n=len(known), cutoff=0.0)
    raise FileNotFoundError(
        f"no model {name!r}; known names: {', '.join(near)}; else give a folder, a .gguf file or a "
        "hub id with its owner, such as Qwen/Qwen3-8B"
    )


def checkpoint_name(folder: Path) -> str:
    """KEY, or NAME@KEY of an embedded model. KEY is "" where no weights are, or none can be read.

    Other weights have another key, and so have files that were written since: what the digest does
    not notice, the time of the weights tells.
    """
    try:
        newest = max((x.stat().st_mtime_ns for x in _weight_files(folder)), default=0)
        key = f"{checkpoint_digest(folder)}-{newest:x}" if newest else ""
    except OSError:
        key = ""
    name = embedded_name(folder)
    return key if name is None else f"{name}@{key}"


def _weight_files(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.safetensors")
    yield from folder.glob(GGUF_FILE)


def load_tokenizer(
    name_or_path: str | Path, hub: HubOptions | None = None, *, takes_generic: bool = True
) -> Any:
    """The tokenizer of a model, by any name that `OffloadedModel.from_pretrained` takes.

    Args:
        takes_generic: as of `check_model_type`.

    Raises: as `resolve_folder`, `check_model_type` and `folder_tokenizer`.
    """
    folder = resolve_folder(name_or_path, hub)
    # transformers would say less of another folder
    check_model_type(folder / "config.json", takes_generic=takes_generic)
    return folder_tokenizer(folder)


def _download(name: str, hub: HubOptions) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    source: dict[str, Any] = {"repo_id": name, **asdict(hub)}
    del source["gguf_file"]
    try:
        if hub.gguf_file:
            return model_folder(Path(hf_hub_download(filename=hub.gguf_file, **source)))
        check_config_file(Path(hf_hub_download(filename="config.json", **source)))
        folder = snapshot_download(
            allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_IGNORED), **source
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"cannot find the model {name!r}: it is no local folder, no .gguf file and not the "
            f"alias {EMBEDDED_MODEL!r} or {LONG_CONTEXT_MODEL!r}, and the Hugging "
            f"Face hub says: {error}"
        ) from error
    return Path(folder)
