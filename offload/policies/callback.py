"""Python functions as native callbacks of the worker pool.

`@callback` compiles a function with Numba's `cfunc` when its address is first needed (and caches
the machine code on disk). The pool calls it from C++ threads without the GIL. The function gets a
pointer to a `PolicyContext` (cpp/attention/policy.h); `read_context` makes it a record with the
fields of `CONTEXT_DTYPE`, which is the context itself: what is assigned to a field is seen by the
runtime. Pointers in the record are plain addresses: `view_float32` and friends turn them into
arrays, and what is at `arrays` and `parameters` is read by name (`offload.policies.layouts`);
`score_tokens`, `top_k` and the other primitives at the end call the SIMD code behind them;
`prefetch` needs none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils, types
from numba.extending import intrinsic

# The fields of cpp/attention/policy.h's PolicyContext; a test compares the offsets.
CONTEXT_DTYPE = np.dtype(
    [
        ("layer_idx", np.int64),
        ("unit", np.int64),
        ("kv_head", np.int64),
        ("group_size", np.int64),
        ("head_dim", np.int64),
        ("kv_len", np.int64),
        ("first", np.int64),
        ("last", np.int64),
        ("budget_tokens", np.int64),
        ("num_candidates", np.int64),
        ("sm_scale", np.float64),
        ("parameters", np.int64),
        ("query", np.int64),
        ("importance", np.int64),
        ("indices", np.int64),
        ("num_indices", np.int64),
        ("weights", np.int64),
        ("candidates", np.int64),
        ("output", np.int64),
        ("lse", np.int64),
        ("text_marks", np.int64),
        ("bytes_touched", np.int64),
        ("arrays", np.int64),
        ("score_tokens", np.int64),
        ("top_k", np.int64),
        ("score_rows", np.int64),
        ("score_int8", np.int64),
        ("load_keys", np.int64),
        ("store_rows", np.int64),
        ("filter_at_least", np.int64),
    ]
)
CACHE_LINE = 64
ANSWERED = -2  # what `propose` returns when it has written the unit's output itself
# numba and llvmlite are untyped: everything they give is Any here.
_CONTEXT_POINTER: Any = types.CPointer(numba.from_dtype(CONTEXT_DTYPE))  # type: ignore[no-untyped-call]


_compiling = threading.Lock()


class Callback:
    """A policy function: `address` for the worker pool, callable from Python for tests."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self._made: Any = None
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    @property
    def _compiled(self) -> Any:
        # Made once, whichever threads load models: code goes with its object, and kernels have the
        # address. (Python's cached_property has no lock since 3.12.)
        with _compiling:
            if self._made is None:
                result = types.int64 if self.__name__ in ("propose", "select") else types.void
                compiled = numba.cfunc(result(_CONTEXT_POINTER), cache=True)
                self._made = compiled(self.function)
            return self._made

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
_as_uint8 = _cast(types.uint8)
_as_float64 = _cast(types.float64)
_as_uint64 = _cast(types.uint64)


@numba.njit(inline="always")
def view_float32(address: Any, length: Any, row: Any = 0) -> Any:
    """float32 array [length] at an address; or a row of that length, of an array [rows, length]."""
    return carray(_as_float32(address + 4 * row * length), length)


@numba.njit(inline="always")
def view_int32(address: Any, length: Any, row: Any = 0) -> Any:
    """int32 array [length] at an address; or a row of that length, of an array [rows, length]."""
    return carray(_as_int32(address + 4 * row * length), length)


@numba.njit(inline="always")
def view_uint8(address: Any, length: Any, row: Any = 0) -> Any:
    """uint8 array [length] at an address; or a row of that length, of an array [rows, length]."""
    return carray(_as_uint8(address + row * length), length)


@numba.njit(inline="always")
def view_float64(address: Any, length: Any, row: Any = 0) -> Any:
    """float64 array [length] at an address; or a row of that length, of an array [rows, length]."""
    return carray(_as_float64(address + 8 * row * length), length)


@numba.njit(inline="always")
def view_uint64(address: Any, length: Any, row: Any = 0) -> Any:
    """uint64 array [length] at an address; or a row of that length, of an array [rows, length]."""
    return carray(_as_uint64(address + 8 * row * length), length)


@numba.njit(inline="always")
def offset_floats(address: Any, count: Any) -> Any:
    """Address of the float32 element `count` further on."""
    return address + 4 * count


@intrinsic
def prefetch_line(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line of an address, into L2; nobody waits for it."""

    def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] + [number] * 3)
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function_type, "llvm.prefetch.p0i8"
        )
        line = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [line, number(0), number(2), number(1)])  # to read, into L2, data
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


@numba.njit(inline="always")
def prefetch(address: Any, num_bytes: Any) -> None:
    """Ask for all cache lines of [address, address + num_bytes)."""
    for line in range(address - (address & (CACHE_LINE - 1)), address + num_bytes, CACHE_LINE):
        prefetch_line(line)  # type: ignore[call-arg]  # mypy sees the intrinsic's typing context


def _call_primitive(result: Any, num_words: int) -> Any:
    """Code generator of a call fn(context pointer, word, …) -> word or nothing."""

    def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        returns = ir.VoidType() if result == types.void else word
        fn_type = ir.FunctionType(returns, [cgutils.voidptr_t, *[word] * num_words])
        target = builder.inttoptr(args[1], fn_type.as_pointer())
        pointer = builder.bitcast(args[0], cgutils.voidptr_t)
        value = builder.call(target, [pointer, *args[2:]])
        return ctx.get_dummy_value() if result == types.void else value

    return codegen


@intrinsic
def score_tokens(
    typingctx: Any, context: Any, function: Any, indices: Any, n: Any, scores: Any
) -> Any:
    """score_tokens(pointer, ctx.score_tokens, indices, n, scores): scaled q·k of n tokens.

    `indices` is the address of int32 [n], `scores` of float32 [group_size, n].
    """
    return types.void(context, *[types.int64] * 4), _call_primitive(types.void, 3)


@intrinsic
def top_k(
    typingctx: Any, context: Any, function: Any, x: Any, n: Any, k: Any, positions: Any
) -> Any:
    """top_k(pointer, ctx.top_k, x, n, k, positions) -> count: positions of the k largest of x.

    `x` is the address of float32 [n], `positions` of int32 [k]; ascending. The count is -1 if NaN
    leaves fewer than k values.
    """
    return types.int64(context, *[types.int64] * 5), _call_primitive(types.int64, 4)


@intrinsic
def score_rows(
    typingctx: Any,
    context: Any,
    function: Any,
    query: Any,
    rows: Any,
    n: Any,
    width: Any,
    scores: Any,
) -> Any:
    """score_rows(pointer, ctx.score_rows, query, rows, n, width, scores): sm_scale * query · rows.

    `query` is the address of float32 [group_size, width], `rows` of the cache's dtype [n, width],
    contiguous, `scores` of float32 [group_size, n]. width is a multiple of 16 and at most 256.
    """
    return types.void(context, *[types.int64] * 6), _call_primitive(types.void, 5)


@intrinsic
def score_int8(
    typingctx: Any,
    context: Any,
    function: Any,
    query: Any,
    num_queries: Any,
    rows: Any,
    n: Any,
    scores: Any,
) -> Any:
    """score_int8(pointer, ctx.score_int8, query, num_queries, rows, n, scores): raw query · rows.

    `query` is the address of float32 [num_queries, head_dim], `rows` of int8 [n, head_dim],
    contiguous, `scores` of float32 [num_queries, n]; the caller multiplies by the rows' scales.
    Queries are rounded to 1/32767 of their largest value; one that is not finite scores NaN.
    """
    return types.void(context, *[types.int64] * 6), _call_primitive(types.void, 5)


@intrinsic
def load_keys(typingctx: Any, context: Any, function: Any, first: Any, n: Any, out: Any) -> Any:
    """load_keys(pointer, ctx.load_keys, first, n, out): keys of tokens first … first + n - 1.

    `out` is the address of float32 [n, head_dim].
    """
    return types.void(context, *[types.int64] * 4), _call_primitive(types.void, 3)


@intrinsic
def store_rows(typingctx: Any, context: Any, function: Any, x: Any, n: Any, out: Any) -> Any:
    """store_rows(pointer, ctx.store_rows, x, n, out): n floats at `x` in the cache's dtype."""
    return types.void(context, *[types.int64] * 4), _call_primitive(types.void, 3)


@intrinsic
def filter_at_least(
    typingctx: Any, context: Any, function: Any, x: Any, n: Any, threshold: Any, positions: Any
) -> Any:
    """filter_at_least(pointer, ctx.filter_at_least, x, n, threshold, positions) -> count.

    Ascending positions of the values >= threshold, a float32. `x` is the address of float32 [n],
    `positions` of int32 [n].
    """

    def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        fn_type = ir.FunctionType(word, [cgutils.voidptr_t, word, word, ir.FloatType(), word])
        target = builder.inttoptr(args[1], fn_type.as_pointer())
        return builder.call(target, [builder.bitcast(args[0], cgutils.voidptr_t), *args[2:]])

    words = types.int64, types.int64, types.int64, types.float32, types.int64
    return types.int64(context, *words), codegen
