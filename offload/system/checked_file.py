"""Files of named tensors, in the format of safetensors, in which any damage is noticed.

    uint64 length of the header | header: JSON | tensors, one after the other

The last tensor is "checksums", uint8 [num_tensors, 16]: a blake2b of each of the others in their
order, then one of the length and the header. It is damage that is noticed, not malice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from offload.system.errors import SessionMiss

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

_CHECKSUMS = "checksums"
_DIGEST_BYTES = 16
_MOST_HEADER_BYTES = 64 * 2**20
_PIECE_BYTES = 32 * 2**20  # that are read or written in one step
_SYNC_BYTES = 4 * _PIECE_BYTES  # that may wait for the disk, so that the last step waits for few
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_ITEM_BYTES = {
    code: 2 if name == "bfloat16" else np.dtype(name).itemsize for name, code in _NAMES.items()
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        dtype: its name, as of torch and NumPy.
        load: its bytes, when they are written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Bytes]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[_NAMES[self.dtype]]

    @staticmethod
    def of(name: str, array: npt.NDArray[Any]) -> Entry:
        """The entry of an array that does not change until it is written."""
        return Entry(name, array.dtype.name, array.shape, lambda: bytes_of(array))


class CheckedFile:
    """What will be written.

    Args:
        metadata: kept in the header.
    """

    def __init__(self, metadata: Mapping[str, str], entries: Sequence[Entry]) -> None:
        self._entries = entries
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        sizes = [(each.name, _NAMES[each.dtype], each.shape, each.num_bytes) for each in entries]
        checksums = (len(entries) + 1, _DIGEST_BYTES)
        sizes.append((_CHECKSUMS, "U8", checksums, math.prod(checksums)))
        for name, code, shape, num_bytes in sizes:
            offsets = [end, end + num_bytes]
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
            end += num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.num_bytes = len(self._head) + end

    def write(self, path: Path) -> Iterator[None]:
        """Write it in steps, aside: it is there, whole, when the last step is done. Closing the
        iterator before gives it up.

        Raises:
            OSError: as of any writing; nothing is left then.
        """
        aside = path.with_name(f".{path.name}.{os.getpid()}-{id(self):x}.tmp")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                digests, unsynced = list[bytes](), 0
                _write_all(file, self._head)
                for entry in self._entries:
                    data, digest = entry.load(), blake2b(digest_size=_DIGEST_BYTES)
                    for piece in _pieces(len(data)):
                        digest.update(data[piece].data)
                        _write_all(file, data[piece])
                        unsynced += len(data[piece])
                        if unsynced >= _SYNC_BYTES:
                            os.fdatasync(descriptor)
                            unsynced = 0
                        yield
                    digests.append(digest.digest())
                _write_all(file, b"".join([*digests, _digest(self._head)]))
                os.fsync(descriptor)
            if path.exists() and not path.is_file():  # root could replace /dev/null
                raise OSError(errno.EINVAL, "Not a regular file")
            os.replace(aside, path)
        except BaseException as error:
            with contextlib.suppress(OSError):  # a file for a folder, which `error` says
                aside.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno:  # it names the file aside, or none
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        _sync_folder(path.parent)


class CheckedReader:
    """Reads a file that `CheckedFile` has written.

    Attributes:
        path: of the file.
        metadata: of the header.
        tensors: of each its dtype, as safetensors names it, and its shape.

    Raises:
        SessionMiss: it is not there, is not such a file, or its header or size is not as written.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Opening a pipe would wait for somebody to write to it.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SessionMiss(f"there is no {path}") from None
        except (OSError, ValueError) as error:
            raise SessionMiss(f"{path} cannot be read: {error}") from None
        self.path, self._descriptor = path, descriptor
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckedReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def check(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Refuse a tensor that is missing, or is another than expected."""
        found = self.tensors.get(name)
        if found != (_NAMES[dtype], tuple(shape)):
            raise self._miss(f"{name} is {found}, not {(_NAMES[dtype], tuple(shape))}")

    def read(self, name: str) -> Bytes:
        """The bytes of a tensor, in memory of their own.

        Raises:
            SessionMiss: they are not those that were written.
        """
        return finish(self.read_in_parts(name))

    def read_in_parts(self, name: str) -> Generator[None, None, Bytes]:
        """`read` in steps."""
        begin, end, index = self._places[name]
        data, digest = np.empty(end - begin, np.uint8), blake2b(digest_size=_DIGEST_BYTES)
        for piece in _pieces(len(data)):
            self._read_into(data[piece], begin + piece.start)
            digest.update(data[piece].data)
            yield
        if digest.digest() != self._digests[index]:
            raise self._miss(f"{name} is damaged")
        return data

    def read_array(self, name: str) -> npt.NDArray[Any]:
        """A tensor of a dtype that NumPy has."""
        code, shape = self.tensors[name]
        dtype = next(dtype for dtype, known in _NAMES.items() if known == code)
        if dtype == "bfloat16":
            raise self._miss(f"{name} is of bfloat16")
        return self.read(name).view(np.dtype(dtype)).reshape(shape)

    def entries(self) -> list[Entry]:
        """The tensors, which are read, and so checked, when they are written."""
        names = {code: name for name, code in _NAMES.items()}
        return [
            Entry(name, names[code], shape, partial(self.read, name))
            for name, (code, shape) in self.tensors.items()
        ]

    def _read_header(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._miss("it is not a file")
        self.num_bytes = size = status.st_size
        length = int.from_bytes(self._read_at(0, 8).tobytes(), "little") if size >= 8 else 0
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8 - _DIGEST_BYTES):
            raise self._miss("it is truncated, or not a session")
        head = self._read_at(0, 8 + length)
        if _digest(head) != self._read_at(size - _DIGEST_BYTES, _DIGEST_BYTES).tobytes():
            raise self._miss("its header is damaged, or it is truncated")
        try:
            self._parse(json.loads(head[8:].tobytes()), 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._miss(f"its header is wrong: {error!r}") from None

    def _parse(self, header: Any, start: int) -> None:
        self.metadata: dict[str, str] = dict(header.pop("__metadata__"))
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._places: dict[str, tuple[int, int, int]] = {}
        end = 0
        for index, (name, facts) in enumerate(header.items()):
            shape = tuple(int(n) for n in facts["shape"])
            num_bytes = math.prod(shape) * _ITEM_BYTES[facts["dtype"]]
            if min(shape, default=0) < 0 or facts["data_offsets"] != [end, end + num_bytes]:
                raise ValueError(f"{name} {facts}")
            self.tensors[name] = facts["dtype"], shape
            self._places[name] = start + end, start + end + num_bytes, index
            end += num_bytes
        if start + end != self.num_bytes:
            raise ValueError(f"{self.num_bytes} bytes, not {start + end}")
        expected = "U8", (len(self.tensors), _DIGEST_BYTES)
        if self.tensors.pop(_CHECKSUMS) != expected or [*header][-1] != _CHECKSUMS:
            raise ValueError("no checksums")
        begin, stop, _ = self._places.pop(_CHECKSUMS)
        found = self._read_at(begin, stop - begin).tobytes()
        self._digests = [found[i : i + _DIGEST_BYTES] for i in range(0, len(found), _DIGEST_BYTES)]

    def _read_at(self, begin: int, num_bytes: int) -> Bytes:
        """Not more than the file has."""
        data = np.empty(num_bytes, np.uint8)
        self._read_into(data, begin)
        return data

    def _read_into(self, data: Bytes, begin: int) -> None:
        view, done = memoryview(data.data), 0
        while done < len(data):
            try:
                read = os.preadv(self._descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise self._miss(str(error)) from None
            if not read:
                raise self._miss("it is truncated")
            done += read

    def _miss(self, reason: str) -> SessionMiss:
        return SessionMiss(f"{self.path}: {reason}")


def bytes_of(array: npt.NDArray[Any] | torch.Tensor) -> Bytes:
    """The memory of an array, or of a tensor of the host, copied where it has gaps."""
    if isinstance(array, torch.Tensor):
        flat: Bytes = array.detach().contiguous().flatten().view(torch.uint8).numpy()
        return flat
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def finish(parts: Generator[None, None, T]) -> T:
    """Take all steps, and return what they come to."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: T = end.value
            return found


def _pieces(num_bytes: int) -> list[slice]:
    return [slice(i, i + _PIECE_BYTES) for i in range(0, num_bytes, _PIECE_BYTES)]


def _digest(data: Any) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _write_all(file: Any, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system has it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
