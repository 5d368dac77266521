"""What a compiled callback raises fails the step that asked it.

Numba's C callbacks print an exception and return as if nothing had happened. Those compiled here
write it, in words, where their context says; the native code looks there.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

from cpu_ops import _native
from offload.selection.compiled import cache_of

cgutils: Any = _cgutils  # untyped, as numba is
ERROR_BYTES = _native.ERROR_BYTES


def note_error(address: int, kind: type[BaseException], error: object = "") -> None:
    """Write what was raised to where the context at `address` says."""
    at_error = ctypes.c_int64.from_address(address + _native.policy_context_offsets()["error"])
    if isinstance(error, tuple):  # as Python has it until it is looked at
        error = kind(*error)
    text = f"{kind.__name__}: {error}".encode()[: ERROR_BYTES - 1]
    text = text.decode(errors="ignore").encode()  # no half of a character at the end
    ctypes.memmove(at_error.value, text + b"\0", len(text) + 1)


def _create_cfunc_wrapper(library: Any, fndesc: Any, env: Any, call_helper: Any) -> None:
    """As `CPUContext.create_cfunc_wrapper`, but for what is done with an exception."""
    context = cpu_target.target_context
    module = context.create_module("cfunc_wrapper")
    function_type = context.call_conv.get_function_type(fndesc.restype, fndesc.argtypes)
    callee = ir.Function(module, function_type, fndesc.llvm_func_name)
    taken = [context.get_value_type(x) for x in fndesc.argtypes]
    returned = context.get_value_type(fndesc.restype)
    wrapper_type = ir.FunctionType(returned, taken)
    wrapper = ir.Function(module, wrapper_type, fndesc.llvm_cfunc_wrapper_name)
    builder = ir.IRBuilder(wrapper.append_basic_block("entry"))
    status, value = context.call_conv.call_function(
        builder, callee, fndesc.restype, fndesc.argtypes, wrapper.args, attrs=("noinline",)
    )
    with builder.if_then(status.is_error, likely=False):
        python = context.get_python_api(builder)
        gil = python.gil_ensure()
        context.call_conv.raise_error(builder, python, status)
        slots = [cgutils.alloca_once(builder, python.pyobj) for _ in range(3)]
        python.err_fetch(*slots)
        kind, error, traceback = map(builder.load, slots)
        address = python.long_from_longlong(builder.ptrtoint(wrapper.args[0], ir.IntType(64)))
        own = python.import_module(context.insert_const_string(module, __name__))
        with builder.if_then(cgutils.is_not_null(builder, own)):  # it is, but at the very end
            note = python.object_getattr_string(own, note_error.__name__)
            noted = python.call_function_objargs(note, (address, kind, error))
            python.decref(noted)
            python.decref(note)
        for reference in (own, address, kind, error, traceback):
            python.decref(reference)
        python.gil_release(gil)
    if isinstance(returned, ir.IntType):
        value = builder.select(status.is_error, returned(-1), value)
    builder.ret(value)
    library.add_ir_module(module)


class NotingCFunc(CFunc):
    """A `numba.cfunc` of one argument, a pointer to a PolicyContext."""

    _targetdescr = SimpleNamespace(
        options=cpu_target.options,
        typing_context=cpu_target.typing_context,
        target_context=cpu_target.target_context.subtarget(
            create_cfunc_wrapper=_create_cfunc_wrapper
        ),
    )


def compile_callback(function: Any, signature: Any) -> Any:
    """`function` as C code, from Numba's cache where that has it."""
    compiled: Any = NotingCFunc(function, (signature.args, signature.return_type), {}, {})
    compiled._cache = cache_of(function)
    compiled.compile()
    return compiled
