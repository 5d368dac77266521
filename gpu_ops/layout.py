"""Buffers, said before they are there: whoever allocates them and whoever counts them beforehand
read the same declaration.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # {name: (shape, dtype)}


def allocate(
    layout: Layout, device: torch.device | str, make: Callable[..., Tensor] = torch.zeros
) -> dict[str, Tensor]:
    """A tensor of each, in the layout's order."""
    return {
        name: make(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()
    }


def layout_bytes(layout: Layout) -> int:
    """What `allocate` takes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
