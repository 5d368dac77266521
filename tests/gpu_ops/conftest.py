"""Every operator runs its torch reference, its kernel by Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cases.quick_interpreter import quicken

from gpu_ops.launch import has_triton, interpreted

COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the test's tensors go; on the CPU either the reference or the kernel runs."""
    if request.param != "interpreter":
        yield "cuda" if request.param == "cuda" else "cpu"
        return
    if not has_triton:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here")
    correct_interpreter(monkeypatch)
    # What overflows to infinity on a GPU in silence is a warning of NumPy, and so an error here.
    with interpreted(), np.errstate(over="ignore"):
        yield "cpu"


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Runs kernels instead of references inside; for tests that need both."""
    if not has_triton or torch.cuda.is_available():
        pytest.skip("triton does not interpret kernels here")
    correct_interpreter(monkeypatch)

    @contextmanager
    def running() -> Iterator[None]:
        with interpreted(), np.errstate(over="ignore"):
            yield

    return running


def correct_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter (triton 3.6) does otherwise than a GPU.

    It cuts off float32 to bf16 instead of rounding, multiplies matrices of bf16 by their bits,
    turns comparisons of floats into floats, which `&` refuses, gives NaN as the larger of NaN and a
    number (a GPU gives the number), and with NumPy 2.4 cannot take a loop's bounds from device
    values. Every call of a device function also patches triton.language again, on top of the
    patches of the kernel's launch, and for good: slower with each call.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    builder, find_extreme = interpreter.InterpreterBuilder, interpreter.ReduceOps.min_max
    convert, create_dot, binary_op = (
        interpreter._convert_float,
        builder.create_dot,
        builder.binary_op,
    )

    def convert_float(
        x: npt.NDArray, from_type: object, to_type: object, rounding: object
    ) -> object:
        if from_type == tl.float32 and to_type == tl.bfloat16:
            bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
        if from_type == tl.bfloat16 and to_type == tl.float32:
            return np.ascontiguousarray(x, np.uint16).astype(np.uint32) << 16
        return convert(x, from_type, to_type, rounding)

    def dot(self: object, a: object, b: object, *args: object) -> object:
        if a.dtype == tl.bfloat16:
            a, b = (interpreter.interpreter_builder.cast_impl(x, tl.float32) for x in (a, b))
        return create_dot(self, a, b, *args)

    def elementwise(self: object, a: object, b: object, operator: object) -> object:
        if operator in COMPARISONS:
            return interpreter.TensorHandle(operator(a.data, b.data), tl.int1)
        return binary_op(self, a, b, operator)

    def numbers_win(self: object, a: object, b: object) -> object:
        return self.binary_op(a, b, np.fmax)

    def min_max(self: object, x: object, val_reduce_op: object, idx_reduce_op: object = None):
        # np.nanmax says the same, with a warning where there is nothing but NaN.
        quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
        return find_extreme(self, x, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    def patch_lang_tensor(tensor: object, scope: object) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_lang_once(function: object) -> object:
        scopes = [
            patch_lang(function),
            patch_lang(tl.standard.sum.fn),
        ]  # tl, and its own view of it
        return SimpleNamespace(restore=lambda: [scope.restore() for scope in reversed(scopes)])

    def call(self: object, *args: object, **options: object) -> object:
        return self.rewrite()(*args, **options)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang_once)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(builder, "create_maxnumf", numbers_win)
    monkeypatch.setattr(interpreter.ReduceOps, "min_max", min_max)
    monkeypatch.setattr(builder, "binary_op", elementwise)
    quicken(monkeypatch)
