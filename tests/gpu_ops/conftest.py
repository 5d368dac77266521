"""Every operator runs its torch reference, its kernel by Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_ops.launch import has_triton, interpreted


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
    correct_bfloat16(monkeypatch)
    # What overflows to infinity on a GPU in silence is a warning of NumPy, and so an error here.
    with interpreted(), np.errstate(over="ignore"):
        yield "cpu"


def correct_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter (3.6) cuts off float32 to bf16 and multiplies matrices of bf16 by their bits.

    A GPU does neither; with this, the interpreter rounds to nearest even and multiplies values.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

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

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
