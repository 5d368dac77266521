"""Where converted models, profiles and plans are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$OFFLOAD_CACHE, or ~/.cache/offload.

    Raises:
        FileNotFoundError: this user has no home folder, as in some containers.
    """
    configured = os.environ.get("OFFLOAD_CACHE")
    try:
        return Path(configured or "~/.cache/offload").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(
            "there is no home folder for the cache of converted models and profiles "
            f"({configured or '~/.cache/offload'}); set OFFLOAD_CACHE to a folder that can be "
            "written to"
        ) from error
