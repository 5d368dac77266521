"""Python functions as native callbacks of the worker pool.

`@callback` compiles a function with Numba's `cfunc` when its address is first needed (and caches
the machine code on disk). The pool calls it from C++ threads without the GIL. The function gets a
pointer to a `PolicyContext` (cpp/policy.h); `read_context` makes it a record with the fields of
`CONTEXT_DTYPE`. Pointers in the record are plain addresses: `view_float32` and friends turn them
into arrays, `score_tokens` and `top_k` call the SIMD primitives behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils, types
from numba.extending import intrinsic

_INT_FIELDS = (
    "layer_idx",
    "unit",
    "kv_head",
    "group_size",
    "head_dim",
    "kv_len",
    "first",
    "last",
    "budget_tokens",
)
# The fields of cpp/policy.h's PolicyContext; tests/policies/test_callback.py compares the offsets.
CONTEXT_DTYPE = np.dtype(
    [(name, np.int64) for name in _INT_FIELDS]
    + [("sm_scale", np.float64), ("query", np.int64), ("importance", np.int64)]
    + [("indices", np.int64), ("num_indices", np.int64), ("weights", np.int64)]
    + [("arrays", np.int64, (8,)), ("score_tokens", np.int64), ("top_k", np.int64)]
)
# numba and llvmlite are untyped: everything they give is Any here.
_CONTEXT_POINTER: Any = types.CPointer(numba.from_dtype(CONTEXT_DTYPE))  # type: ignore[no-untyped-call]


class Callback:
    """A policy function: `address` for the worker pool, callable from Python for tests."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    @functools.cached_property
    def _compiled(self) -> Any:
        result = types.int64 if self.__name__ == "select" else types.void
        return numba.cfunc(result(_CONTEXT_POINTER), cache=True)(self.function)

    @property
    def address(self) -> int:
        """Address of the compiled C function."""
        return int(self._compiled.address)

    def __call__(self, context: np.ndarray[Any, Any]) -> Any:
        """Run the compiled function on a CONTEXT_DTYPE array of one element."""
        return self._compiled.ctypes(context.ctypes.data)


def callback(function: Callable[[Any], Any]) -> Callback:
    """Declare a policy function; nothing is compiled until its address is needed."""
    return Callback(function)


@numba.njit(inline="always")
def read_context(pointer: Any) -> Any:
    """The PolicyContext behind `pointer`, as a record."""
    return carray(pointer, 1)[0]


def _cast(numba_type: Any) -> Any:
    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        pointer: Any = types.CPointer(numba_type)  # type: ignore[no-untyped-call]
        return pointer(types.int64), codegen

    return cast


_as_float32 = _cast(types.float32)
_as_int32 = _cast(types.int32)


@numba.njit(inline="always")
def view_float32(address: Any, length: Any) -> Any:
    """float32 array [length] at an address."""
    return carray(_as_float32(address), length)


@numba.njit(inline="always")
def view_int32(address: Any, length: Any) -> Any:
    """int32 array [length] at an address."""
    return carray(_as_int32(address), length)


@numba.njit(inline="always")
def offset_floats(address: Any, count: Any) -> Any:
    """Address of the float32 element `count` further on."""
    return address + 4 * count


@intrinsic
def score_tokens(
    typingctx: Any, context: Any, function: Any, indices: Any, n: Any, scores: Any
) -> Any:
    """score_tokens(pointer, ctx.score_tokens, indices, n, scores): scaled q·k of n tokens.

    `indices` is the address of int32 [n], `scores` of float32 [group_size, n].
    """

    def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        fn_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        target = builder.inttoptr(args[1], fn_type.as_pointer())
        pointer = builder.bitcast(args[0], cgutils.voidptr_t)
        builder.call(target, [pointer, args[2], args[3], args[4]])
        return ctx.get_dummy_value()

    signature = types.void(context, types.int64, types.int64, types.int64, types.int64)
    return signature, codegen


@intrinsic
def top_k(
    typingctx: Any, context: Any, function: Any, x: Any, n: Any, k: Any, positions: Any
) -> Any:
    """top_k(pointer, ctx.top_k, x, n, k, positions) -> count: positions of the k largest of x.

    `x` is the address of float32 [n], `positions` of int32 [k]; ascending. The count is -1 if NaN
    leaves fewer than k values.
    """

    def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        fn_type = ir.FunctionType(word, [cgutils.voidptr_t, word, word, word, word])
        target = builder.inttoptr(args[1], fn_type.as_pointer())
        pointer = builder.bitcast(args[0], cgutils.voidptr_t)
        return builder.call(target, [pointer, args[2], args[3], args[4], args[5]])

    signature = types.int64(
        context, types.int64, types.int64, types.int64, types.int64, types.int64
    )
    return signature, codegen
