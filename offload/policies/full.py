"""Full attention: every token, every layer. The reference for all other policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offload.selection.policy import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Dense attention over the whole cache."""

    name: ClassVar[str] = "full"
    selects: ClassVar[bool] = False
