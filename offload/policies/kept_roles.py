"""Roles files that are found by their name: what lies there instead is warned of, not believed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.policies.lychee_decode.roles import BoolArray, HeadRoles

logger = logging.getLogger(__name__)


def found_roles(
    path: Callable[[], Path], is_as_made: Callable[[BoolArray], bool], **model: Any
) -> HeadRoles | None:
    """The roles of a file; None where there is none, or it is not the one that was looked for.

    Args:
        path: called here, because there may be no home, in which case there is no file.
        is_as_made: whether bool [num_layers, num_kv_heads] can be what was written.
        model: as `HeadRoles.check` takes it.
    """
    try:
        file = path()
        if not file.is_file():
            return None
        roles = HeadRoles.load(file)
        roles.check(**model)
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning("%s; heads are calibrated again", error)
        return None
    if not is_as_made(roles.array):
        logger.warning("roles file %s was changed; heads are calibrated again", roles.source)
        return None
    return roles
