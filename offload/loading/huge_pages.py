"""Weights move to huge pages of host memory once they are loaded.

Decoding reads every weight once per token, so it runs at the speed of memory, and with 4 KiB pages
that is the speed of address translation: one thread of a 2-core EPYC reads 30 GB/s from huge pages,
24 from a mapped file and 20 from ordinary memory. transformers leaves weights in mapped files, or
in ordinary memory where it has converted them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.system.huge_pages import map_slab
from offload.system.memory import give_back_free_memory

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_SLAB_BYTES = 256 * 2**20
# The old and the new copy of at most this much exist at one time, or of this part of the model:
# what was copied goes back to the system so often.
_LEAST_TWICE_BYTES, _TWICE = 16 * 2**20, 1 / 16


def move_to_huge_pages(model: Any) -> None:
    """Give each parameter of `model` a new place, its values unchanged; tied ones stay tied."""
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    most_twice, twice = max(_LEAST_TWICE_BYTES, int(model_bytes * _TWICE)), 0
    for parameters in _groups(model):
        offsets, num_bytes = [], 0
        for parameter in parameters:
            offsets.append(num_bytes)
            num_bytes += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        slab = map_slab(num_bytes, resident=False).numpy()
        for parameter, offset in zip(parameters, offsets, strict=True):
            # A storage of its own, unlike a view of the slab: savers look for shared storages.
            place = torch.frombuffer(
                slab, dtype=parameter.dtype, count=parameter.numel(), offset=offset
            )
            # NumPy copies on this thread; torch would wake a team of threads for each weight.
            values = parameter.data.contiguous().view(-1)
            slab[offset : offset + parameter.nbytes] = values.view(torch.uint8).numpy()
            parameter.data = place.view(parameter.shape)
            del values
            if (twice := twice + parameter.nbytes) >= most_twice:
                give_back_free_memory()
                twice = 0
    give_back_free_memory()


def _groups(model: Any) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, as many together as fit a slab."""
    group: list[nn.Parameter] = []
    group_bytes = 0
    for parameter in model.parameters():
        if group and group_bytes + parameter.nbytes > _SLAB_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(parameter)
        group_bytes += parameter.nbytes
    if group:
        yield group
