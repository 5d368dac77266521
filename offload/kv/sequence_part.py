"""What an owner of state does when a sequence changes, and what it writes of it into a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload.system.checked_file import CheckedReader, Entry, bytes_of


@dataclass
class RowToSave:
    """What a file will have of one sequence: names are those of its row.

    Attributes:
        numbers: for JSON.
    """

    row: int
    numbers: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def add(self, name: str, array: npt.NDArray[Any] | torch.Tensor) -> None:
        """Save an array that does not change until it is written."""
        name = f"{self.row}.{name}"
        if isinstance(array, np.ndarray):
            self.entries.append(Entry.of(name, array))
        else:
            dtype = str(array.dtype).removeprefix("torch.")
            self.entries.append(Entry(name, dtype, tuple(array.shape), partial(bytes_of, array)))


@dataclass(frozen=True)
class RowToLoad:
    """What a file has of one sequence, as `RowToSave` was given it.

    Every method raises SessionMiss or another Exception where the file has something else.
    """

    reader: CheckedReader
    row: int
    numbers: dict[str, Any]

    def names(self, prefix: str = "") -> Iterator[str]:
        """Names of arrays that begin with `prefix`."""
        of_row = f"{self.row}."
        for name in self.reader.tensors:
            if name.startswith(of_row + prefix):
                yield name.removeprefix(of_row)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.tensors[f"{self.row}.{name}"][1]

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """As `CheckedReader.check`."""
        self.reader.check(f"{self.row}.{name}", str(dtype).removeprefix("torch."), shape)

    def read_array(self, name: str) -> npt.NDArray[Any]:
        """As `CheckedReader.read_array`."""
        return self.reader.read_array(f"{self.row}.{name}")

    def read_tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        data, shape = self.reader.read(f"{self.row}.{name}"), self.shape(name)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(data).view(dtype).view(shape)


class SequencePart(Protocol):
    """State that belongs to sequences of one `KVStore`, under their handles.

    `Sequences` calls these methods between forward passes. One that a part does not define does
    nothing: such a change does not touch its state.
    """

    # Bodies are not empty: mypy would take the methods for abstract ones.

    @property
    def unsaved_option(self) -> str | None:
        """The option of the model with which sequences have state here that no file holds."""
        return None

    def fork(self, seq: int, child: int) -> None:
        """`child`, which is new, is as `seq` is; after an error all parts forget `child`."""
        return

    def fork_text(self, seq: int, child: int) -> None:
        """`child`, which is new, has the text of `seq`, but nothing that was learnt from it."""
        return

    def rebase(self, seq: int, kv_len: int, to: int) -> None:
        """`to` goes on from the first `kv_len` tokens of `seq`, which may be itself, outside of
        decode steps; if it is another, `seq` is not decoded meanwhile."""
        return

    def truncate(self, seq: int, kv_len: int) -> Callable[[], None] | None:
        """`seq` keeps its first `kv_len` tokens; the store still has the others.

        Returns:
            what is left to do when the store has only these.
        """
        return None

    def roll_back(self, seq: int, kv_len: int) -> None:
        """A forward pass has failed: `seq` is as it was before, with `kv_len` tokens."""
        return

    def forget(self, seq: int) -> None:
        """`seq` is gone, or was changed in a way that no other method tells of."""
        return

    @property
    def is_cut_at_marks(self) -> bool:
        """Whether `truncate` takes only lengths at which a sequence was marked, and its own."""
        return False

    def mark(self, seq: int) -> None:
        """Let `truncate` go back to where `seq` is now, as long as there is room for that."""
        return

    def longest_cut(self, seq: int, kv_len: int) -> int:
        """The most of its first `kv_len` tokens that `truncate` can leave."""
        return kv_len

    def bytes_at(self, kv_len: int) -> int:
        """Host bytes of a sequence with so many tokens, beside what its policy remembers."""
        return 0

    def device_bytes_at(self, kv_len: int) -> int:
        """The same on the device of the model's modules, where the engine has to count it."""
        return 0

    def device_left_bytes(self) -> int:
        """Room for more of that."""
        return sys.maxsize

    def kept_bytes(self, seq: int) -> int:
        """Host bytes of what there is of a sequence now, with all that `truncate` goes back to."""
        return 0

    def save(self, seq: int, row: RowToSave) -> None:
        """Add what `load` needs. Arrays may be the part's own: `seq` stays as it is until they are
        written."""
        return

    def load(self, row: RowToLoad) -> Callable[[int], None]:
        """Read and check what `save` has added, before the sequence takes any page.

        Returns:
            what gives it to the new sequence, when its tokens are in the store.

        Raises:
            Exception: it does not fit, or there is no room for it.
        """
        return lambda seq: None
