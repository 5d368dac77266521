"""What a policy's callbacks find of the policy: its arrays and its numbers, by name.

    STATE = StateLayout(pages=np.int32, bounds=None)
    NUMBERS = NumberLayout("page_tokens")
    read_state, read_numbers = STATE.read, NUMBERS.read

    @callback
    def append(pointer):
        ctx = read_context(pointer)
        state, numbers = read_state(ctx.arrays), read_numbers(ctx.parameters)
        pages = view_int32(state.pages, 2)

The policy has them as `state.layout` and `number_layout`. What is read is the memory itself, as a
record: reading costs nothing, and a field is one load.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt


class StateLayout:
    """The arrays that a policy keeps of one layer of one sequence: names and dtypes (None: any).

    Attributes:
        read: of compiled code: read(ctx.arrays).NAME is the address of an array.
    """

    def __init__(self, **dtypes: npt.DTypeLike | None) -> None:
        self._dtypes = {name: None if d is None else np.dtype(d) for name, d in dtypes.items()}

    @cached_property
    def read(self) -> Any:
        return reader(tuple(self._dtypes), np.int64)

    def __len__(self) -> int:
        return len(self._dtypes)

    def addresses(self, state: Mapping[str, npt.NDArray[Any]]) -> list[int]:
        """Addresses of all arrays, as `read` finds them.

        Raises:
            ValueError: other arrays than those declared, or of another dtype.
        """
        made = {name: array.dtype for name, array in state.items()}
        declared = {name: dtype or made.get(name) for name, dtype in self._dtypes.items()}
        if made != declared:
            raise ValueError(f"a policy declares the arrays {declared}, but has built {made}")
        return [state[name].ctypes.data for name in self._dtypes]


class NumberLayout:
    """Numbers of a policy: names of its options or other attributes.

    Attributes:
        read: of compiled code: read(ctx.parameters).NAME is a float64.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    @cached_property
    def read(self) -> Any:
        return reader(self._names, np.float64)

    def values(self, policy: Any) -> list[float]:
        """A policy's numbers, as `read` finds them."""
        return [float(getattr(policy, name)) for name in self._names]


def reader(names: tuple[str, ...], dtype: npt.DTypeLike) -> Any:
    """For compiled code: read(address) has the numbers of an array by these names."""
    return record_reader(np.dtype([(name, dtype) for name in names], align=True))


def record_reader(dtype: npt.DTypeLike) -> Any:
    """For compiled code: read(address) is the record there; its fields may be written, too."""
    import numba  # 50 MiB, for those whose policy has such code
    from numba.core import types
    from numba.extending import intrinsic

    record: Any = numba.from_dtype(np.dtype(dtype))

    @intrinsic
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.int64), codegen

    return read
