"""Trained roles that come with the package, for the embedded models: `trained/NAME-COUNT.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.policies.checkpoint_names import embedded_part
from offload.policies.kept_roles import found_roles
from offload.policies.lychee_decode.roles import HeadRoles


def trained_roles(checkpoint: str, retrieval_heads: int, **model: Any) -> HeadRoles | None:
    """Of an embedded model, for so many retrieval heads after layer 0; None where there are none.

    Args:
        checkpoint: as `loading.names.checkpoint_name` has it.
        model: the rest of what `HeadRoles.check` takes.
    """
    name = embedded_part(checkpoint)
    if not name:
        return None
    return found_roles(
        lambda: trained_folder() / trained_file_name(name, retrieval_heads),
        lambda retrieval: retrieval[0].all() and retrieval[1:].sum() == retrieval_heads,
        **model,
        checkpoint=checkpoint,
    )


def trained_folder() -> Path:
    """Of the package."""
    return Path(__file__).parent / "trained"


def trained_file_name(name: str, retrieval_heads: int) -> str:
    """Of an embedded model, for so many retrieval heads after layer 0."""
    return f"{name}-{retrieval_heads}.json"
