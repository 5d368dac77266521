"""How keys and values lie in pages: what a row takes, and how numbers become rows and rows numbers.

A row of the model's dtype is its numbers; an int8 row is codes and their scales
(`gpu_ops.row_format`). A row so has all that it needs, and moves as one piece; head_dim 64 takes 66
bytes, 0.516 of bfloat16, 96 0.52, and 80 0.625.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.row_format import num_codes, read_int8, row_items, write_int8

_LEAST_MULTIPLE = 16  # of head_dim
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8")
_LARGEST = 127 * torch.finfo(torch.float16).max  # that a scale can stand for


@dataclass(frozen=True)
class KVFormat:
    """The format of rows in pages.

    Attributes:
        dtype: of the numbers that are written and read: the model's.
        is_int8: whether rows are int8 with scales.
        keys_only: values are the first elements of keys, as of latent attention: pages have keys
            alone, and a value is read as its whole key. (Of int8 it has the key's scales: those of
            its last elements are its own where it ends with a group of 64, as of all known models.)
    """

    dtype: torch.dtype
    is_int8: bool = False
    keys_only: bool = False

    @classmethod
    def of(
        cls,
        kv_dtype: str,
        dtype: torch.dtype,
        head_dims: Iterable[int] = (),
        *,
        keys_only: bool = False,
    ) -> KVFormat:
        """The format that `kv_dtype` names for a model of `dtype`.

        Raises:
            ValueError: an unknown kv_dtype.
            NotImplementedError: another one than the model's dtype or int8, or a head_dim that is
                no multiple of 16.
        """
        if kv_dtype not in KV_DTYPES:
            available = ", ".join(KV_DTYPES)
            raise ValueError(f"unknown kv_dtype {kv_dtype!r}; available: {available}")
        name = str(dtype).removeprefix("torch.")
        if kv_dtype not in ("auto", "int8", name):
            raise NotImplementedError(
                f"kv_dtype={kv_dtype!r} needs a model in {kv_dtype}, but its dtype is {name}; "
                "give kv_dtype='auto' or 'int8'"
            )
        if kv_dtype != "int8":
            return cls(dtype, keys_only=keys_only)
        for head_dim in head_dims:
            if head_dim % _LEAST_MULTIPLE:
                raise NotImplementedError(
                    f"kv_dtype='int8' needs a head_dim that is a multiple of {_LEAST_MULTIPLE}, "
                    f"got {head_dim}; give kv_dtype='auto'"
                )
        return cls(dtype, is_int8=True, keys_only=keys_only)

    @property
    def num_parts(self) -> int:
        """Of a page: keys and values, or keys alone."""
        return 1 if self.keys_only else 2

    @property
    def page_dtype(self) -> torch.dtype:
        """Type of the elements of pages."""
        return torch.int8 if self.is_int8 else self.dtype

    def row_items(self, head_dim: int) -> int:
        """Elements of a row in a page."""
        return row_items(head_dim, self.page_dtype)

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a key or a value of one KV head."""
        return self.row_items(head_dim) * self.page_dtype.itemsize

    def token_bytes(self, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of a token's keys and values in all layers."""
        return num_layers * self.num_parts * num_kv_heads * self.row_bytes(head_dim)

    @property
    def largest(self) -> float:
        """The largest number that is written, and read as `dtype`, as a finite one."""
        most = torch.finfo(self.dtype).max
        return min(most, _LARGEST) if self.is_int8 else most

    @property
    def kept(self) -> KVFormat:
        """That of rows as pages have them: they are copied."""
        return KVFormat(self.page_dtype, keys_only=self.keys_only)

    def check_kept(self, name: str, rows: Tensor, head_dim: int) -> None:
        """ValueError for rows [.., row_items] that `write` does not make of finite numbers."""
        numbers, width = rows, num_codes(head_dim)
        if self.is_int8:
            numbers = rows[..., width:].contiguous().view(torch.float16)
        if not bool(torch.isfinite(numbers).all()):
            raise ValueError(f"non-finite {name}")
        if not self.is_int8:
            return
        if bool((rows[..., :width] == -128).any()):
            raise ValueError(f"{name} have a code of -128, but int8 rows have -127 to 127")
        if bool(rows[..., head_dim:width].any()):
            raise ValueError(f"{name} have codes behind their {head_dim} dimensions")

    def check(self, name: str, rows: Tensor) -> None:
        """ValueError for finite rows that have numbers beyond the format's."""
        if self.is_int8 and rows.numel():
            least, largest = (float(x) for x in torch.aminmax(rows))
            if max(-least, largest) > _LARGEST:
                raise ValueError(
                    f"{name} of up to {max(-least, largest):.3g} are beyond what kv_dtype='int8' "
                    f"holds, {_LARGEST:.3g}"
                )

    def write(self, rows: Tensor, pages: Tensor) -> None:
        """`rows` [n, .., head_dim] of `dtype`, any strides, into [n, .., row_items] of pages."""
        if self.is_int8:
            write_int8(rows, pages)
        else:
            pages.copy_(rows)

    def read(self, pages: Tensor, rows: Tensor) -> None:
        """The reverse of `write`, rounded to the dtype of `rows`."""
        if self.is_int8:
            read_int8(pages, rows)
        else:
            rows.copy_(pages)
