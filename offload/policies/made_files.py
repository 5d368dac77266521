"""Files that say what was found out about a model, and which model and weights that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from offload.policies.checkpoint_names import same_checkpoint
from offload.system.json_file import read_json

SHAPE_KEYS = ("num_layers", "num_kv_heads", "head_dim")


class Made(Protocol):
    """What such a file holds.

    Attributes:
        model_type: transformers' name of the architecture; "" fits any.
        checkpoint: name of the weights (`loading.names.checkpoint_name`); "" fits any.
    """

    @property
    def model_type(self) -> str: ...
    @property
    def checkpoint(self) -> str: ...


def check_shape_keys(made: Made, name: str) -> None:
    """Refuse a shape that none is.

    Args:
        name: of what was made, for messages.
    """
    for key in SHAPE_KEYS:
        value = getattr(made, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {key} must be an integer of at least 1, got {value!r}")


def check_made_for(
    made: Made,
    name: str,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    model_type: str | None,
    checkpoint: str,
    remedy: str,
) -> None:
    """Refuse a model that it was not made for, or weights of its shape that it was not.

    Args:
        name: of what was made, for messages.
        model_type: None leaves it unchecked.
        remedy: what to do instead.

    Raises:
        ValueError: names the file, what it is for, and what the model has.
    """
    wanted: dict[str, int | str] = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    if model_type is not None and made.model_type:
        wanted = {"model_type": model_type, **wanted}
    if all(getattr(made, key) == value for key, value in wanted.items()):
        if not same_checkpoint(made.checkpoint, checkpoint):
            raise ValueError(
                f"{name} was made for other weights of this shape: those of checkpoint "
                f"{made.checkpoint}, but this model is checkpoint {checkpoint}; {remedy}"
            )
        return
    ours = ", ".join(f"{key}={getattr(made, key)}" for key in wanted)
    theirs = ", ".join(f"{key}={value}" for key, value in wanted.items())
    raise ValueError(
        f"{name} was made for another model: it says {ours}, this model has {theirs}; {remedy}"
    )


def read_made_file(
    path: str | Path, kind: str, formats: Mapping[str, Sequence[str]], *, hint: str
) -> dict[str, Any]:
    """What is in a file, without its format.

    Args:
        kind: what errors call it, before its path.
        formats: the keys of each, the newest first.
        hint: behind the path of a missing file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: not JSON, another format, keys missing or unknown.
    """
    document = read_json(path, kind, hint=hint)
    if not isinstance(document, dict):
        raise ValueError(f"{kind} {path} must hold a JSON object, got a {type(document).__name__}")
    newest = next(iter(formats))
    keys = ("format", *formats.get(str(document.get("format")), formats[newest]))
    missing = [key for key in keys if key not in document]
    unknown = sorted(set(document) - set(keys))
    if missing or unknown:
        raise ValueError(
            f"{kind} {path} has "
            + " and ".join(
                f"{what} keys {wrong}"
                for what, wrong in (("missing", missing), ("unknown", unknown))
                if wrong
            )
            + f"; its keys: {', '.join(keys)}"
        )
    if document.pop("format") not in formats:
        raise ValueError(f"{kind} {path} has another format than {newest!r}")
    return document
