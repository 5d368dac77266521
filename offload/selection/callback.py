"""Python functions as native callbacks of the worker pool.

`@callback` compiles a function with Numba's `cfunc` when its address is first needed (and caches
the machine code on disk). The pool calls it from C++ threads without the GIL. The function gets a
pointer to a `PolicyContext` (cpp/attention/policy.h); `read_context` makes it a record with the
fields of `CONTEXT_DTYPE`, which is the context itself: what is assigned to a field is seen by the
runtime. Pointers in the record are plain addresses: `view_float32` and friends turn them into
arrays, and what is at `arrays` and `parameters` is read by name (`offload.selection.layouts`);
`score_tokens`, `top_k` and the other primitives at the end call the SIMD code behind them;
`prefetch` needs none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils, types
from numba.extending import intrinsic

from cpu_ops import _native
from offload.selection.callback_errors import ERROR_BYTES, compile_callback

# The fields of cpp/attention/policy.h's PolicyContext, in its order.
_OFFSETS = _native.policy_context_offsets()
CONTEXT_DTYPE = np.dtype(
    [
        (name, np.float64 if name == "sm_scale" else np.int64)
        for name in sorted(_OFFSETS, key=_OFFSETS.__getitem__)
    ]
)
CACHE_LINE = 64
# Of llvm.prefetch: L1 on a Zen 5, else L2; see gathers_into_l1 of cpp/kernels/kernels.h.
# By what it has, as there: older LLVMs do not know its name. SSE4a is AMD's.
_FEATURES = binding.get_host_cpu_features()
IS_ZEN_5 = all(_FEATURES.get(name) for name in ("sse4a", "avx512vp2intersect"))
_LOCALITY = 3 if IS_ZEN_5 else 2
ANSWERED = -2  # what `propose` returns when it has written the unit's output itself
DEFERRED = -3  # or when it has left something to the workers together
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
                self._made = compile_callback(self.function, result(_CONTEXT_POINTER))
            return self._made

    @property
    def address(self) -> int:
        """Address of the compiled C function."""
        return int(self._compiled.address)

    def __call__(self, context: np.ndarray[Any, Any]) -> Any:
        """Run the compiled function on a CONTEXT_DTYPE array of one element.

        Raises:
            RuntimeError: the function has raised something.
        """
        raised = np.zeros(ERROR_BYTES, np.uint8)
        context["error"] = raised.ctypes.data
        result = self._compiled.ctypes(context.ctypes.data)
        if raised[0]:
            raise RuntimeError(raised.tobytes().partition(b"\0")[0].decode())
        return result


callback = Callback  # declares one: nothing is compiled until its address is needed


@numba.njit(inline="always")
def read_context(pointer: Any) -> Any:
    """The PolicyContext behind `pointer`, as a record."""
    return carray(pointer, 1)[0]


def pointer_to(numba_type: Any) -> Any:
    """For compiled code: f(address) is a pointer to values of that type."""

    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        pointer: Any = types.CPointer(numba_type)  # type: ignore[no-untyped-call]
        return pointer(types.int64), codegen

    return cast


def _view_of(numba_type: Any) -> Any:
    """For compiled code: view(address, length) is an array [length] of that type;
    view(address, length, row) a row of that length, of an array [rows, length].
    """
    pointer, item_bytes = pointer_to(numba_type), numba_type.bitwidth // 8

    @numba.njit(inline="always")
    def view(address: Any, length: Any, row: Any = 0) -> Any:
        return carray(pointer(address + item_bytes * row * length), length)

    return view


view_uint8, view_uint16, view_uint64 = map(_view_of, (types.uint8, types.uint16, types.uint64))
view_int64 = _view_of(types.int64)
view_int32, view_float32, view_float64 = map(_view_of, (types.int32, types.float32, types.float64))


@numba.njit(inline="always")
def offset_floats(address: Any, count: Any) -> Any:
    """Address of the float32 element `count` further on."""
    return address + 4 * count


def _prefetch_line(to_write: bool) -> Any:
    """For compiled code: f(address) asks for its cache line; it returns at once."""

    @intrinsic
    def ask(typingctx: Any, address: Any) -> Any:
        def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
            number = ir.IntType(32)
            function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] + [number] * 3)
            function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                builder.module, function_type, "llvm.prefetch.p0i8"
            )
            line = builder.inttoptr(args[0], cgutils.voidptr_t)
            builder.call(function, [line, number(int(to_write)), number(_LOCALITY), number(1)])
            return ctx.get_dummy_value()

        return types.void(types.int64), codegen

    return ask


prefetch_line, prefetch_line_to_write = _prefetch_line(False), _prefetch_line(True)


@numba.njit(inline="always")
def prefetch(address: Any, num_bytes: Any) -> None:
    """Ask for all cache lines of [address, address + num_bytes)."""
    for line in range(address - (address & (CACHE_LINE - 1)), address + num_bytes, CACHE_LINE):
        prefetch_line(line)


def _caller(result: Any) -> Any:
    """For compiled code: call(pointer, function, arguments) calls a primitive of the context.

    Arguments are float32 where they are floats, int64 otherwise.
    """

    @intrinsic
    def call(typingctx: Any, context: Any, function: Any, arguments: Any) -> Any:
        given = [types.float32 if isinstance(x, types.Float) else types.int64 for x in arguments]

        def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
            taken = [cgutils.voidptr_t, *(ctx.get_value_type(x) for x in given)]
            returns = ir.VoidType() if result == types.void else ctx.get_value_type(result)
            target = builder.inttoptr(args[1], ir.FunctionType(returns, taken).as_pointer())
            unpacked: Any = cgutils.unpack_tuple(builder, args[2])  # type: ignore[no-untyped-call]
            value = builder.call(target, [builder.bitcast(args[0], taken[0]), *unpacked])
            return ctx.get_dummy_value() if result == types.void else value

        return result(context, types.int64, types.Tuple(given)), codegen  # type: ignore[no-untyped-call]

    return call


_run, _count = _caller(types.void), _caller(types.int64)


@numba.njit(inline="always")
def run_callback(pointer: Any, function: Any) -> None:
    """Another policy's prepare, observe or append, by its address."""
    _run(pointer, function, ())


@numba.njit(inline="always")
def ask_callback(pointer: Any, function: Any) -> Any:
    """What another policy's propose or select returns, by its address."""
    return _count(pointer, function, ())


@numba.njit(inline="always")
def score_tokens(pointer: Any, function: Any, indices: Any, n: Any, scores: Any) -> None:
    """score_tokens(pointer, ctx.score_tokens, indices, n, scores): scaled q·k of n tokens.

    `indices` is the address of int32 [n], `scores` of float32 [group_size, n].
    """
    _run(pointer, function, (indices, n, scores))


@numba.njit(inline="always")
def top_k(pointer: Any, function: Any, x: Any, n: Any, k: Any, positions: Any) -> Any:
    """top_k(pointer, ctx.top_k, x, n, k, positions) -> count: positions of the k largest of x.

    `x` is the address of float32 [n], `positions` of int32 [k]; ascending. The count is -1 if NaN
    leaves fewer than k values.
    """
    return _count(pointer, function, (x, n, k, positions))


@numba.njit(inline="always")
def heaviest(pointer: Any, ctx: Any, count: Any) -> Any:
    """`top_k` of the importance of [ctx.first, ctx.last), as positions in it, to ctx.indices."""
    importance = offset_floats(ctx.importance, ctx.first)
    return top_k(pointer, ctx.top_k, importance, ctx.last - ctx.first, count, ctx.indices)


@numba.njit(inline="always")
def score_rows(
    pointer: Any, function: Any, query: Any, rows: Any, n: Any, width: Any, scores: Any
) -> None:
    """score_rows(pointer, ctx.score_rows, query, rows, n, width, scores): sm_scale * query · rows.

    `query` is the address of float32 [group_size, width], `rows` of the cache's dtype [n, width],
    contiguous, `scores` of float32 [group_size, n]. width is a multiple of 16 and at most 256.
    """
    _run(pointer, function, (query, rows, n, width, scores))


@numba.njit(inline="always")
def rank_rows(pointer: Any, function: Any, arguments: Any) -> Any:
    """rank_rows(pointer, ctx.rank_rows, (query, num_queries, rows, scales, spreads,
    spread_weight, ranges, num_ranges, ranks)): of each row in some ranges, a box, the rank for the
    best of all queries, as `cpu_ops.clustering.rank_rows` says.

    Addresses: `query` of float32 [num_queries, head_dim], `rows` of int8 [num_rows, head_dim],
    `scales` of bfloat16 [num_rows], `spreads` the same, `ranges` of int32
    [num_ranges, 2] (first row and end), `ranks` of float32, for one range after the other.
    spread_weight is a float. Queries are rounded; where one is
    not finite all ranks are NaN, and a row that gives no number ranks -inf.

    Returns 0, or DEFERRED where ctx.may_defer is 2: the workers will rank the rows together, and
    `propose` must return that as it is; it is called again afterwards, with ctx.resumes.
    """
    return _count(pointer, function, arguments)


@numba.njit(inline="always")
def top_codes(pointer: Any, function: Any, arguments: Any) -> Any:
    """top_codes(pointer, ctx.top_codes, (query, offsets, codes, scales, levels, bits, k, tokens)):
    the k tokens of [ctx.first, ctx.last) whose codes score most, ascending -> count.

    A token's score is the largest over the group of scale * query · levels[code] + offset.
    Addresses: `query` of float32 [group_size, head_dim], `offsets` of [group_size], `codes` of
    uint8 [blocks of CODE_BLOCK tokens, head_dim * bits / 8, CODE_BLOCK], `scales` of float32 [whole
    blocks], `levels` of [1 << bits], `tokens` of int32 [k]; all stay until the step is over. The
    least a query's few dimensions may add is rounded to 1/127 of their range; what scores no number
    comes first. Where ctx.may_defer is not 0, the count may be negative although nothing is wrong:
    the workers will score the codes together, and `propose` must return it as it is.
    """
    return _count(pointer, function, arguments)


@numba.njit(inline="always")
def load_keys(pointer: Any, function: Any, first: Any, n: Any, out: Any) -> None:
    """load_keys(pointer, ctx.load_keys, first, n, out): keys of tokens first … first + n - 1.

    `out` is the address of float32 [n, head_dim].
    """
    _run(pointer, function, (first, n, out))


@numba.njit(inline="always")
def store_rows(pointer: Any, function: Any, x: Any, n: Any, out: Any) -> None:
    """store_rows(pointer, ctx.store_rows, x, n, out): n floats at `x` in the cache's dtype."""
    _run(pointer, function, (x, n, out))


@numba.njit(inline="always")
def filter_at_least(
    pointer: Any, function: Any, x: Any, n: Any, threshold: Any, positions: Any
) -> Any:
    """filter_at_least(pointer, ctx.filter_at_least, x, n, threshold, positions) -> count.

    Ascending positions of the values >= threshold, a float32. `x` is the address of float32 [n],
    `positions` of int32 [n].
    """
    return _count(pointer, function, (x, n, threshold, positions))
