"""GGUF files become a folder with config and tokenizer once, in the user's cache. Weights that are
quantised stay in the file; dequantised ones become safetensors, where they are asked for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.loading.adapter import Adapter, merge_adapter, read_adapter
from offload.loading.bars import passing_bars
from offload.loading.checkpoint import GGUF_FILE, check_checkpoint
from offload.loading.checkpoint_digest import checkpoint_digest, file_digest
from offload.loading.embedded_package import (
    EMBEDDED_MODEL,
    EMBEDDED_MODELS,
    LONG_CONTEXT_MODEL,
    download_command,
    embedded_gguf,
)
from offload.loading.gguf_config import ARCHITECTURES, empty_model, gguf_config, gguf_names
from offload.loading.gguf_generic import GenericTensors
from offload.loading.gguf_header import GgufHeader, check_gguf_magic, read_gguf_header
from offload.loading.gguf_tokenizer import end_tokens, gguf_tokenizer
from offload.system.cache_folder import cache_folder
from offload.system.permissions import default_mode, share_by_umask

_CONVERSION = "5"  # change it when converted folders of older versions must be made again
LONG_CONTEXT_ADAPTER = Path(__file__).parent / "adapters" / LONG_CONTEXT_MODEL
_TEMPORARY_PREFIX = ".converting-"
_STALE_SECONDS = 60.0  # of a folder that was never locked
_LOCK = ".lock"
CONVERTED_MARK, _MARK_FORMAT = "converted.json", "offload-converted-1"

_logger = logging.getLogger(__name__)


def model_folder(gguf_path: Path, name: str | None = None) -> Path:
    """The folder with config and tokenizer of `gguf_path`, made if need be: of a file without
    quantised matrices also with its weights, in bfloat16.

    Processes may race: each makes a folder of its own, and the first to finish renames it into
    place. An incomplete or damaged folder is made again.

    Raises: as `converted_folder`.
    """
    return _made_once(
        _converted_name(gguf_path, name),
        lambda folder: _convert(gguf_path, folder, None),
        check=lambda: check_gguf_magic(gguf_path),
        source=gguf_path if name is None else None,
    )


def converted_folder(
    gguf_path: Path, name: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """The folder with `gguf_path` as safetensors of `dtype` and its tokenizer; made if need be.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not GGUF, truncated or damaged, an unsupported model, tensors that are missing,
            unexpected or of another shape: names the file. Nothing is left in the cache folder.
        PermissionError: if the cache folder cannot be written to, or what is there not read.
    """
    folder = model_folder(gguf_path, name)
    if dtype == torch.bfloat16 and not (folder / GGUF_FILE).is_file():
        return folder
    return _made_once(
        _converted_name(gguf_path, name, dtype),
        lambda folder: _convert(gguf_path, folder, dtype),
        check=lambda: check_gguf_magic(gguf_path),
        source=gguf_path if name is None else None,
    )


def weights_folder(folder: Path, dtype: torch.dtype) -> Path:
    """Where the weights of a checkpoint's folder are to be read for `dtype`.

    It is another folder for a GGUF file that keeps its weights, or whose conversion is in bfloat16
    if `dtype` would show what that has rounded, and the file is still there as it was. Embedded
    models are converted to bfloat16 whatever the `dtype`.

    Raises: as `converted_folder`, and FileNotFoundError without the file that keeps them.
    """
    has_own = not (folder / GGUF_FILE).is_file()
    source = _marked_source(folder) if has_own else kept_source(folder)
    if source is None or (has_own and dtype == torch.bfloat16):
        return folder
    name = embedded_name(folder)
    return converted_folder(source, name, torch.bfloat16 if name else dtype)


def unchanged_source(folder: Path) -> Path | None:
    """The GGUF file whose weights a checkpoint's folder has, if it is still as it was, else None.

    The embedded model with a long context is no file's: an adapter has changed it.
    """
    if embedded_name(folder) == EMBEDDED_MODEL:
        return embedded_gguf()
    return _marked_source(folder)


def kept_source(folder: Path) -> Path:
    """The GGUF file that keeps the weights of a checkpoint's folder (`Checkpoint.stored_types`).

    Raises:
        FileNotFoundError: it is not there, or not as it was.
    """
    source = unchanged_source(folder)
    if source is None:
        raise FileNotFoundError(
            f"{folder} was made of a GGUF file that is gone, or another one now; give the .gguf "
            "file instead of this folder"
        )
    return source


def _marked_source(folder: Path) -> Path | None:
    try:
        source = Path(json.loads((folder / CONVERTED_MARK).read_bytes())["source"])
        # The rest of the name is that of a link to it, as the hub's cache has it, or its own.
        is_its = folder.name.rpartition("-")[2] == _key(source)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return source if is_its else None


def long_context_folder() -> Path:
    """The folder with the embedded model of 32,768 positions; merged once, as `converted_folder`.

    Raises:
        FileNotFoundError: the package with its weights, or its adapter, is not installed.
        ValueError: an adapter that is damaged, or of other weights than those installed.
    """
    gguf_path, adapter = embedded_gguf(), long_context_adapter()
    return _made_once(
        _merged_name(gguf_path, adapter),
        lambda folder: merge_adapter(adapter, converted_folder(gguf_path, EMBEDDED_MODEL), folder),
        check=lambda: _check_base(adapter, gguf_path),
    )


def long_context_adapter() -> Adapter:
    """The adapter of the embedded model that came with this package.

    Raises: as `read_adapter`, and FileNotFoundError where the package has none.
    """
    if not (LONG_CONTEXT_ADAPTER / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"the model {LONG_CONTEXT_MODEL!r} needs its adapter in {LONG_CONTEXT_ADAPTER}, "
            "which is not there; install offload again, from a version that has it, or take "
            f"{EMBEDDED_MODEL!r}"
        )
    return read_adapter(LONG_CONTEXT_ADAPTER)


def made_folder(gguf_path: Path, name: str | None = None) -> Path:
    """Where `model_folder` or `long_context_folder` makes it, whether it is there or not.

    Args:
        name: of an embedded model.

    Raises: as they do.
    """
    if name == LONG_CONTEXT_MODEL:
        made_name = _merged_name(gguf_path, long_context_adapter())
    else:
        made_name = _converted_name(gguf_path, name)
    return cache_folder() / "models" / made_name


def embedded_name(folder: Path) -> str | None:
    """The name of the embedded model that was made into this folder; None: it holds another one."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # what is not there, or damaged
        gguf_path = embedded_gguf()
        if folder.name == _converted_name(gguf_path, EMBEDDED_MODEL, torch.bfloat16):
            return EMBEDDED_MODEL if folder.parent == cache_folder() / "models" else None
        for name in EMBEDDED_MODELS:
            if folder == made_folder(gguf_path, name):
                return name
    return None


def _check_base(adapter: Adapter, gguf_path: Path) -> None:
    check_gguf_magic(gguf_path)
    digest = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    if adapter.gguf_sha256 not in (None, digest):
        raise ValueError(
            f"the adapter in {adapter.folder} is for weights with the sha256 "
            f"{adapter.gguf_sha256}, but those in {gguf_path} have {digest}; run: "
            f"{download_command()}"
        )


def _made_once(
    name: str,
    make: Callable[[Path], None],
    *,
    check: Callable[[], None],
    source: Path | None = None,
) -> Path:
    """The folder of that name among the user's models, made by `make` if it is not complete.

    `check` raises before anything is written. The folder remembers its `source`.
    """
    models = cache_folder() / "models"
    target = models / name
    _check_readable(target)
    if _is_complete(target):
        return target
    check()
    with _writing_to(models):
        models.mkdir(parents=True, exist_ok=True)
        _remove_stale(models)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=models))
    try:
        with _being_made(temporary):
            _make(make, temporary, source)
            with _writing_to(models):
                _move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _check_readable(target: Path) -> None:
    """What another user made is not for us to make again, where we may not read it."""
    try:
        files = list(target.iterdir())
        closed = [path for path in files if not os.access(path, os.R_OK)]
    except FileNotFoundError:
        return
    except PermissionError:
        closed = [target]
    except OSError:  # no folder: it is made again
        return
    if closed:
        raise PermissionError(
            f"cannot read the converted model: this user may not read {closed[0]}; have its owner "
            f"run `chmod -R a+rX {target}`, or set OFFLOAD_CACHE to a folder of your own"
        )


@contextlib.contextmanager
def _writing_to(models: Path) -> Iterator[None]:
    """Whoever gets an error of the system in here is told which folder it is about."""
    try:
        yield
    except OSError as error:
        raise PermissionError(
            f"cannot write the converted model to {models} ({error.strerror}); "
            "set OFFLOAD_CACHE to a folder that can be written to"
        ) from error


def _make(make: Callable[[Path], None], temporary: Path, source: Path | None) -> None:
    """`make` in the folder: all is on disk when this returns, with permissions by the umask."""
    try:
        make(temporary)
        mark = {"format": _MARK_FORMAT, "digest": checkpoint_digest(temporary)}
        if source is not None:
            mark["source"] = str(source.resolve())
        (temporary / CONVERTED_MARK).write_text(json.dumps(mark))
        share_by_umask(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _disk_full(temporary) from error
    except Exception as error:  # safetensors has an own class for what the system says
        if "os error 28" not in str(error).lower():
            raise
        raise _disk_full(temporary) from error
    files = default_mode(temporary)
    temporary.chmod(files | (files & 0o444) >> 2)  # a folder is entered by whoever reads it


def _disk_full(temporary: Path) -> OSError:
    written = sum(path.stat().st_size for path in temporary.iterdir())
    free = shutil.disk_usage(temporary).free
    return OSError(
        errno.ENOSPC,
        f"the disk is full: {temporary.parent} has {free} bytes left after {written} of a "
        "converted model; make room, or set OFFLOAD_CACHE to another folder",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _being_made(temporary: Path) -> Iterator[None]:
    """While this process lives no other takes the folder for one that was left behind."""
    with (temporary / _LOCK).open("w") as lock:
        with _writing_to(temporary.parent):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(gguf_path: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Of dtype None, quantised weights stay in the file, and others become bfloat16."""
    header = read_gguf_header(gguf_path)
    config, tokenizer = gguf_config(header), gguf_tokenizer(header)
    ends = end_tokens(header, tokenizer)
    if len(ends) > 1:
        config.eos_token_id = ends
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    is_lean = header.metadata["general.architecture"] in ARCHITECTURES
    if not is_lean or (dtype is None and any(of.is_quantised for of in header.tensors.values())):
        _save_without_weights(header, config, folder)
        return
    dtype = dtype or torch.bfloat16
    in_dtype = "" if dtype == torch.bfloat16 else f" in {str(dtype).removeprefix('torch.')}"
    _logger.info("converting %s to safetensors%s, once", gguf_path.name, in_dtype)
    with passing_bars():
        model = _read_model(header, config, dtype)
        model.save_pretrained(folder)


def _save_without_weights(header: GgufHeader, config: Any, folder: Path) -> None:
    model = empty_model(config, torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if header.metadata["general.architecture"] in ARCHITECTURES:
        tensors = {name: header.tensors[of_file] for name, of_file in gguf_names(model).items()}
        described = {name: [of.type_name, list(of.shape)] for name, of in tensors.items()}
    else:
        found = GenericTensors(header, model)
        described = {name: [kind, list(found.shapes[name])] for name, kind in found.types.items()}
    digest = file_digest(header.path)
    content = {"file_digest": digest, "tensors": described}
    (folder / GGUF_FILE).write_text(json.dumps(content))


def _read_model(header: GgufHeader, config: Any, dtype: torch.dtype) -> Any:
    """The model of a config that fits the header.

    transformers' own loader gives the same, and takes more time for names than for weights.
    """
    from transformers.utils.logging import tqdm

    model = empty_model(config, dtype)
    weights = {}
    for name, of_file in tqdm(gguf_names(model).items(), desc="Converting"):
        weights[name] = dequantised(header, config, name, of_file, dtype)
    model.load_state_dict(weights, strict=False, assign=True)  # tied weights are there once
    model.tie_weights()
    return model


def dequantised(
    header: GgufHeader, config: Any, name: str, of_file: str, dtype: torch.dtype
) -> torch.Tensor:
    """The parameter `name` of a stock model, its rows as transformers has them.

    Raises:
        ValueError: numbers that are not finite.
    """
    with np.errstate(all="ignore"):  # numbers that are not finite are refused below
        weight = torch.from_numpy(header.float32(of_file)).to(dtype)
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{header.path} holds numbers that are not finite, in {name}")
    return in_halves(weight, config, name)


def in_halves(rows: torch.Tensor, config: Any, name: str) -> torch.Tensor:
    """Rows of the parameter `name`, or what belongs to each row, as transformers orders them."""
    if config.model_type == "llama" and ".q_proj." in name:
        return _split_halves(rows, config.num_attention_heads)
    if config.model_type == "llama" and ".k_proj." in name:
        return _split_halves(rows, config.num_key_value_heads)
    return rows


def _split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring elements of a head, transformers its two halves."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _converted_name(
    gguf_path: Path, name: str | None = None, dtype: torch.dtype | None = None
) -> str:
    more = "" if dtype is None else f" {dtype}"
    return f"{name or gguf_path.stem}-{_key(gguf_path, more)}"


def _merged_name(gguf_path: Path, adapter: Adapter) -> str:
    return f"{LONG_CONTEXT_MODEL}-{_key(gguf_path, adapter.digest)}"


def _key(path: Path, more: str = "") -> str:
    """Changes with the file: its place, size and modification time; and with `more`."""
    if not path.is_file():
        raise FileNotFoundError(f"no such GGUF file: {path}")
    status = path.stat()
    described = f"{_CONVERSION} {path.resolve()} {status.st_size} {status.st_mtime_ns}{more}"
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _is_complete(folder: Path) -> bool:
    """It has all that its mark says, tokenizer included, as far as `checkpoint_digest` tells."""
    try:
        mark = json.loads((folder / CONVERTED_MARK).read_bytes())
        check_checkpoint(folder, takes_generic=True)
        digest = checkpoint_digest(folder)
        return bool(mark["format"] == _MARK_FORMAT and mark["digest"] == digest)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _move_into_place(temporary: Path, target: Path) -> None:
    if target.is_dir() and not _is_complete(target):
        damaged = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=target.parent))
        try:
            target.rename(damaged / target.name)
        finally:
            shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(target)
    except OSError:
        if not _is_complete(target):  # otherwise another process was faster
            raise
    (target / _LOCK).unlink(missing_ok=True)
    _sync(target.parent)


def _remove_stale(models: Path) -> None:
    """What killed conversions left behind: their lock is free."""
    for folder in models.glob(f"{_TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not (folder / _LOCK).exists():  # just being made, or by an older version
                if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
