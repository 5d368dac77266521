"""Random damage to GGUF and safetensors files: read, or refused with the file's name; no third way.

What is made of a damaged file's header is checked here; damage to weights is not noticed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model, write_gguf

from offload import OffloadedModel
from offload.loading import gguf_header
from offload.loading.checkpoint import check_checkpoint
from offload.loading.gguf import converted_folder
from offload.loading.gguf_config import gguf_config
from offload.loading.gguf_header import read_gguf_header
from offload.loading.gguf_tokenizer import gguf_tokenizer

_NUMBERS = [0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def stock() -> Any:
    return make_tiny_model("llama", num_hidden_layers=1, hidden_size=48, head_dim=16)


@pytest.fixture(scope="module")
def good_gguf(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.gguf"
    write_gguf(path, stock, byte_tokenizer())
    return path.read_bytes()


@pytest.fixture(scope="module")
def places(good_gguf: bytes, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int]]:
    """(byte, width) of the header's numbers: counts, lengths, types, values, dimensions, offsets.
    Those of the tokens are left out: there are many of them.
    """
    found = []

    class Recording(gguf_header._Reader):
        def take(self, num_bytes: int) -> bytes:
            found.append((self.at, num_bytes))
            return super().take(num_bytes)

    path = tmp_path_factory.mktemp("good") / "good.gguf"
    path.write_bytes(good_gguf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_header, "_Reader", Recording)
        assert len(read_gguf_header(path).tensors) == 11
    tokens = range(
        good_gguf.index(b"tokenizer.ggml.tokens") + 50,
        good_gguf.index(b"tokenizer.ggml.token_type") - 8,
    )
    return [(at, width) for at, width in found if width in (4, 8, 12, 20) and at not in tokens]


def damaged_gguf(good: bytes, places: list[tuple[int, int]], seed: int) -> bytes:
    """One to three of: other numbers where numbers are, other bits, a part cut out or doubled."""
    generator = random.Random(seed)
    data = bytearray(good)
    header_bytes = places[-1][0] + 12
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        kind = generator.choices(("number", "bit", "cut", "copy", "truncate"), (12, 6, 1, 1, 1))[0]
        at = generator.randrange(4, header_bytes)
        if kind == "number":
            at, width = generator.choice(places)
            number = generator.choice((*_NUMBERS, generator.getrandbits(64)))
            width = min(width, generator.choice((4, 8)))
            data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == "bit" and at < len(data):
            data[at] ^= 1 << generator.randrange(8)
        elif kind == "cut":
            del data[at : at + generator.randrange(1, 40)]
        elif kind == "copy":
            data[at:at] = data[at : at + generator.randrange(1, 40)]
        elif kind == "truncate":
            del data[generator.randrange(4, len(data)) :]
    return bytes(data)


def is_refused(read: Callable[[Path], Any], path: Path) -> bool:
    """Whether `read` refuses the file by name, or takes it; other errors are the test's."""
    try:
        read(path)
    except ValueError as error:
        message = str(error)
    else:
        return False
    assert str(path) in message
    return True


def read_all_but_weights(path: Path) -> None:
    header = read_gguf_header(path)
    gguf_config(header)
    gguf_tokenizer(header)


def test_damaged_gguf_headers(
    good_gguf: bytes, places: list[tuple[int, int]], tmp_path: Path
) -> None:
    path, refused = tmp_path / "damaged.gguf", 0
    for seed in range(300):
        path.write_bytes(damaged_gguf(good_gguf, places, seed))
        refused += is_refused(read_all_but_weights, path)
    assert 150 < refused < 300


@pytest.mark.parametrize("number", [0, 9, 2**16, 2**32 - 1, 2**63])
def test_every_number_of_a_gguf(
    good_gguf: bytes, places: list[tuple[int, int]], tmp_path: Path, number: int
) -> None:
    """Counts and lengths far beyond the file must not be followed."""
    path = tmp_path / "damaged.gguf"
    for at, _ in places:
        path.write_bytes(good_gguf[:at] + number.to_bytes(8, "little") + good_gguf[at + 8 :])
        is_refused(lambda path: gguf_config(read_gguf_header(path)), path)


def check_conversion(data: bytes, path: Path, cache: Path) -> None:
    path.write_bytes(data)
    if is_refused(converted_folder, path):
        assert not list(cache.iterdir())
        return
    (folder,) = cache.iterdir()
    check_checkpoint(folder)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_conversions_leave_nothing_behind(
    good_gguf: bytes, places: list[tuple[int, int]], tmp_path: Path, cache: Path
) -> None:
    for seed in range(300, 315):
        data = damaged_gguf(good_gguf, places, seed)
        check_conversion(data, tmp_path / "damaged.gguf", cache)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 4000, 500))
def test_many_conversions(
    good_gguf: bytes, places: list[tuple[int, int]], tmp_path: Path, cache: Path, first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 500):
        data = damaged_gguf(good_gguf, places, seed)
        check_conversion(data, tmp_path / "damaged.gguf", cache)


_WRONG = [-1, 0, 1, 3, 2**31, 2**63, 10**30, 1.5, None, True, "4", [], {}, [1], "BF16", "I64", "F0"]


def damaged_safetensors(good: bytes, seed: int) -> bytes:
    """Wrong values in the header's entries, entries gone or swapped, other bytes, truncation."""
    generator = random.Random(seed)
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name, other = generator.sample(names, 2)
    kind = generator.choice(("field", "item", "gone", "swap", "same", "bytes", "truncate"))
    if kind == "field":
        header[name][generator.choice(("dtype", "shape", "data_offsets"))] = generator.choice(
            _WRONG
        )
    elif kind == "item":
        items = header[name][generator.choice(("shape", "data_offsets"))]
        items[generator.randrange(len(items))] = generator.choice(_WRONG)
    elif kind == "gone":
        del header[name]
    elif kind == "swap":
        header[name], header[other] = header[other], header[name]
    elif kind == "same":
        header[name]["data_offsets"] = header[other]["data_offsets"]
    written = json.dumps(header).encode()
    result = bytearray(len(written).to_bytes(8, "little") + written + data)
    if kind == "bytes":
        result[generator.randrange(8 + length)] ^= 1 << generator.randrange(8)
    elif kind == "truncate":
        del result[generator.randrange(len(result)) :]
    return bytes(result)


def check_safetensors_seeds(stock: Any, folder: Path, seeds: range, loads: bool) -> int:
    """Refused files among them. What is taken must load, unless a weight's name was damaged."""
    stock.save_pretrained(folder)
    path, refused = folder / "model.safetensors", 0
    good = path.read_bytes()
    for seed in seeds:
        path.unlink()  # not overwritten: a model may have mapped the file
        path.write_bytes(damaged_safetensors(good, seed))
        if is_refused(lambda _: check_checkpoint(folder), folder):
            refused += 1
        elif loads:
            is_refused(lambda _: OffloadedModel.from_pretrained(folder, num_threads=1), folder)
    return refused


def test_damaged_safetensors(stock: Any, tmp_path: Path) -> None:
    assert 200 < check_safetensors_seeds(stock, tmp_path, range(300), loads=False) < 300
    check_safetensors_seeds(stock, tmp_path, range(300, 330), loads=True)


@pytest.mark.slow
def test_much_damaged_safetensors(stock: Any, tmp_path: Path) -> None:
    assert check_safetensors_seeds(stock, tmp_path, range(1000, 4000), loads=True) > 2000
