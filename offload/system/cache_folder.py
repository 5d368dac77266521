"""Where converted models, profiles and plans are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$OFFLOAD_CACHE, or ~/.cache/offload."""
    configured = os.environ.get("OFFLOAD_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "offload"
