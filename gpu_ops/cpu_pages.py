"""Pages in CPU memory as tensors: how the references read and write them."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor


def page_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The page of host memory at `address` as a tensor, which does not keep it alive."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def gather_pages(
    page_table: Tensor, kv_len: int, page_shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    """[K|V, heads, kv_len, head_dim]: a row's tokens, copied from its pages in CPU memory.

    Args:
        page_table: int64 [max_pages], addresses.
        page_shape: (2, heads, page_tokens, head_dim), or 1 where pages have keys alone.
    """
    addresses = page_table[: -(-kv_len // page_shape[2])].tolist()
    pages = [page_at(address, page_shape, dtype) for address in addresses]
    return torch.cat(pages, dim=2)[:, :, :kv_len]
