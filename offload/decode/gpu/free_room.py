"""What a placement of KV heads may take of a GPU, as it is now."""

from __future__ import annotations

import torch

# For cuBLAS, kernels and fragments, where no limit was given.
SPARE_BYTES = 2**29
# A room that proved too small is taken for so much of itself, until there is clearly more.
_AFTER_FAILURE, _CLEARLY_MORE = 0.9, 1.1


class FreeRoom:
    """Bytes for a placement; less than it seems where that has proved too few.

    Args:
        limit_bytes: of all that torch has on the device; None: as much as there is.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device, self._limit_bytes = device, limit_bytes
        self._seen_bytes: int | None = None  # by the last `num_bytes`, whatever has failed
        self._failed: tuple[int, int] | None = None  # what proved too few, and was seen then

    def num_bytes(self, budget_bytes: int | None, held_bytes: int) -> int | None:
        """None: as much as is asked for.

        Args:
            budget_bytes: at most so many, the `held_bytes` among them; None: what is free.
            held_bytes: what the placement now has taken, which goes when there is another.
        """
        room = budget_bytes
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            free = torch.cuda.mem_get_info(self._device)[0] + held_bytes
            free += torch.cuda.memory_reserved(self._device) - allocated
            if self._limit_bytes is not None:  # weights, workspaces, other models
                free = max(0, min(free, self._limit_bytes - allocated + held_bytes))
            room = max(0, free - SPARE_BYTES) if room is None else min(room, free)
        self._seen_bytes = room
        if room is None or self._failed is None:
            return room
        failed_bytes, seen_bytes = self._failed
        if room > _CLEARLY_MORE * seen_bytes:
            self._failed = None
            return room
        return min(room, int(_AFTER_FAILURE * failed_bytes))

    def failed(self, room: int | None) -> None:
        """A placement chosen for so much, of what `num_bytes` saw last, did not fit."""
        seen = self._seen_bytes
        self._failed = None if room is None or seen is None else (room, seen)

    def forget(self) -> None:
        """What has failed would not fit beside any placement."""
        self._failed = None
