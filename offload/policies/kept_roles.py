"""Calibrated heads that are kept: for the embedded models in the package, else in the user's cache.

A calibration takes seconds, and always finds the same heads.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from offload.policies.checkpoint_names import embedded_part, key_part
from offload.policies.head_roles import HeadRoles
from offload.system.cache_folder import cache_folder

_CALIBRATION = "1"  # change it when other heads are found than by older versions

logger = logging.getLogger(__name__)


def kept_roles(
    policy: str,
    checkpoint: str,
    retrieval_heads: int,
    first_layers: int,
    *,
    first_retrieve: bool = False,
    **shape: Any,
) -> HeadRoles | None:
    """What a calibration has found before; None where none is kept, or what lies there is not it.

    Args:
        policy: the name of the one that calibrated.
        checkpoint: tells weights apart, as `loading.names.checkpoint_name` does; "": unknown.
        retrieval_heads: of the calibration, after the `first_layers`.
        first_retrieve: what the roles say of all heads of the first layers.
        shape: as `HeadRoles.check` takes it.
    """
    places = ((_of_package, embedded_part(checkpoint)), (_cached, key_part(checkpoint)))
    for folder, of_weights in places:
        if not of_weights:
            continue
        try:
            path = folder(policy) / _file_name(of_weights, retrieval_heads, first_layers)
            if not path.is_file():
                continue
            roles = HeadRoles.load(path)
            roles.check(**shape, checkpoint=checkpoint)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("%s; heads are calibrated again", error)
            continue
        first, later = roles.array[:first_layers], roles.array[first_layers:]
        if (first != first_retrieve).any() or later.sum() != retrieval_heads:
            logger.warning("roles file %s was changed; heads are calibrated again", roles.source)
            continue
        return roles
    return None


def keep_roles(policy: str, roles: HeadRoles, retrieval_heads: int, first_layers: int) -> None:
    """Have `kept_roles` find them for their checkpoint. Where the cache cannot be written to, they
    are not kept."""
    key = key_part(roles.checkpoint)
    if not key:
        return
    try:
        target = _cached(policy) / _file_name(key, retrieval_heads, first_layers)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Another process may do the same: a file is there as a whole or not at all.
        with tempfile.TemporaryDirectory(prefix=".roles-", dir=target.parent) as temporary:
            whole = Path(temporary) / target.name
            roles.save(whole)
            whole.replace(target)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.info(
            "calibrated heads are not kept (%s); set OFFLOAD_CACHE to a folder that can be written "
            "to",
            error,
        )


def _of_package(policy: str) -> Path:
    return Path(__file__).parent / "packaged_roles" / policy


def _cached(policy: str) -> Path:
    return cache_folder() / "roles" / f"{policy}-{_CALIBRATION}"


def _file_name(checkpoint: str, retrieval_heads: int, first_layers: int) -> str:
    return f"{checkpoint}-{retrieval_heads}-after-{first_layers}.json"
