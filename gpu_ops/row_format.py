"""Rows of int8 with scales, by torch: what a row takes, and how numbers become rows and back.

A row is [head_dim] codes, zeros to a multiple of `INT8_MULTIPLE`, then a float16 scale of each
`INT8_GROUP` of them, the last group perhaps of fewer: number d is scale[d // INT8_GROUP] * code[d],
code -127 .. 127. `load_rows` has the same for a GPU's kernels, cpp/kernels/tile_ops_int8-inl.h for
those of CPUs; all make the same rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

INT8_GROUP, INT8_MULTIPLE = 64, 32
_BLOCK_ITEMS = 2**20  # numbers that are converted at one time


def num_codes(head_dim: int) -> int:
    """Codes of a row, zeros included."""
    return -(-head_dim // INT8_MULTIPLE) * INT8_MULTIPLE


def row_items(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row of `dtype`: head_dim, or what an int8 row takes."""
    if dtype != torch.int8:
        return head_dim
    return num_codes(head_dim) + -(-head_dim // INT8_GROUP) * 2


def write_int8(rows: Tensor, out: Tensor) -> None:
    """Numbers [n, .., head_dim], any strides, into int8 rows [n, .., row_items].

    A number that is not finite, or beyond 127 times what float16 holds, makes a scale that is not
    finite: its group is read as such.
    """
    head_dim, size = rows.shape[-1], _block_size(rows)
    width = num_codes(head_dim)
    # A number on the CPU would be multiplied with as its reciprocal on a GPU, which rounds twice.
    largest = torch.full((), 127.0, device=rows.device)
    for x, to in zip(torch.split(rows, size), torch.split(out, size), strict=True):
        groups = _groups(x)
        scales = (groups.abs().amax(-1, keepdim=True) / largest).half()
        inverse = scales.float().reciprocal_().masked_fill_(scales == 0, 0.0)
        codes = (groups * inverse).round_().clamp_(-127, 127)
        to[..., :width].copy_(codes.flatten(-2)[..., :width])
        to[..., width:].view(torch.float16).copy_(scales.squeeze(-1))


def read_int8(rows: Tensor, out: Tensor) -> None:
    """The reverse of `write_int8`, rounded to the dtype of `out`."""
    head_dim, size = out.shape[-1], _block_size(out)
    width = num_codes(head_dim)
    for x, to in zip(torch.split(rows, size), torch.split(out, size), strict=True):
        scales = x[..., width:].view(torch.float16).float()
        numbers = _groups(x[..., :head_dim]) * scales[..., None]
        to.copy_(numbers.flatten(-2)[..., :head_dim])


def as_numbers(rows: Tensor, head_dim: int) -> Tensor:
    """float32 [.., head_dim] of rows as they are kept, int8 or not."""
    if rows.dtype != torch.int8:
        return rows.float()
    out = rows.new_empty(*rows.shape[:-1], head_dim, dtype=torch.float32)
    read_int8(rows, out)
    return out


def as_rows(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [.., head_dim] as rows of `dtype`, which is theirs, or int8."""
    if dtype != torch.int8:
        return numbers
    shape = (*numbers.shape[:-1], row_items(numbers.shape[-1], dtype))
    out = torch.empty(shape, dtype=dtype, device=numbers.device)
    write_int8(numbers, out)
    return out


def _groups(rows: Tensor) -> Tensor:
    """float32 [.., groups, INT8_GROUP] of [.., head_dim], with zeros behind them."""
    *others, head_dim = rows.shape
    padded = pad(rows.float(), (0, -head_dim % INT8_GROUP))
    return padded.reshape(*others, -1, INT8_GROUP)


def _block_size(rows: Tensor) -> int:
    return max(1, _BLOCK_ITEMS * len(rows) // max(1, rows.numel()))
