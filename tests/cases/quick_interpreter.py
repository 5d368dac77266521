"""Triton's interpreter (3.6) with less of its own work around each NumPy operation.

A kernel of a test runs hundreds of thousands of operations on a few numbers each. Most of the time
went into types and shapes, built again for every operand of every operation.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results and errors, in less than half of the time."""
    import triton.language as tl
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    np_dtype, broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
    np_dtypes: dict[str, object] = {}

    def np_dtype_once(dtype: object) -> object:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    @functools.cache
    def block_shape(lengths: tuple[int, ...]) -> tuple[object, int]:
        return tl.tuple(lengths), core.validate_block_shape(lengths)

    @functools.cache
    def tensor_shape(lengths: tuple[int, ...]) -> tuple[object, object]:
        return tl.tuple([tl.constexpr(n) for n in lengths]), tl.constexpr(math.prod(lengths))

    def init_block_type(self: object, element_ty: object, shape: object) -> None:
        lengths = tuple(core._unwrap_shape(shape))
        if not lengths:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel = block_shape(lengths)
        self.name = f"<{lengths}, {element_ty}>"

    def init_tensor(self: object, handle: object, type: object) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_shape(tuple(type.shape) if type.is_block() else ())

    def broadcast_what_differs(self: object, lhs: object, rhs: object) -> tuple[object, object]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    # Overflow is looked for, by three operations in int64, and said by an assertion that is off.
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype_once)
    monkeypatch.setattr(core.block_type, "__init__", init_block_type)
    monkeypatch.setattr(core.tensor, "__init__", init_tensor)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_what_differs)
