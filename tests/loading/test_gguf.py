"""GGUF files of every model type: what they hold is what is computed, or they are refused. So are
damaged ones, of safetensors, too: read, or refused with the file's name; no third way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cases.tiny_models import (
    TINY_MODELS,
    byte_tokenizer,
    make_tiny_model,
    random_tokens,
    write_gguf,
)

from offload import OffloadedModel
from offload.loading import gguf_header
from offload.loading.checkpoint import check_checkpoint, check_loaded
from offload.loading.gguf import converted_folder, weights_folder
from offload.loading.gguf_config import gguf_config
from offload.loading.gguf_header import read_gguf_header
from offload.loading.gguf_tokenizer import gguf_tokenizer
from offload.loading.planned_model import planned_model

pytestmark = pytest.mark.usefixtures("cache")
Writer = Callable[..., Path]


@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_model_type(name: str, dtype: str, written: Writer, cache: Path) -> None:
    """In each dtype weights are the file's, rounded once."""
    stock = make_tiny_model(name)
    model = OffloadedModel.from_pretrained(written(stock), num_threads=1, dtype=dtype)
    assert len([*cache.iterdir()]) == (1 if dtype == "auto" else 2)
    expected = stock.to(torch.bfloat16 if dtype == "auto" else model.dtype).state_dict()
    weights = model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert model.config.rope_parameters == stock.config.rope_parameters
    for option in ("max_position_embeddings", "head_dim", "num_key_value_heads", "eos_token_id"):
        assert getattr(model.config, option) == getattr(stock.config, option)
    assert model.config.rms_norm_eps == pytest.approx(stock.config.rms_norm_eps)


def test_a_conversion_whose_file_is_gone_is_what_there_is(written: Writer) -> None:
    path = written()
    folder = converted_folder(path)
    assert weights_folder(folder, torch.float32) not in (folder, path.parent)
    os.utime(path, (0, 0))  # another file in its place
    assert weights_folder(folder, torch.float32) == folder
    path.unlink()
    assert weights_folder(folder, torch.float32) == folder


@pytest.mark.parametrize("name", ["llama-biases-rope", "mistral", "qwen3"])
def test_kv_heads_that_are_left_out(name: str, written: Writer) -> None:
    """Then there are as many as query heads, for llama.cpp too."""
    stock = make_tiny_model(name, num_key_value_heads=6)
    key = f"{'qwen3' if name == 'qwen3' else 'llama'}.attention.head_count_kv"
    assert_same_answers(written(stock, metadata={key: None}), stock)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.25,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn of attention": {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.25,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 100,
    },
}
OTHER_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 256,
}


def assert_same_answers(path: Path, stock: Any) -> Any:
    """As stock computes; 300 tokens."""
    model = OffloadedModel.from_pretrained(path, num_threads=1, dtype=torch.float32)
    rotary, expected = model.model.rotary_emb, stock.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, expected.inv_freq, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(expected.attention_scaling)
    tokens = random_tokens(1, 300)
    with torch.no_grad():
        probabilities = [m(tokens).logits.softmax(-1) for m in (model, stock)]
    assert (probabilities[0] - probabilities[1]).abs().sum(-1).max() / 2 < 1e-3
    return model


@pytest.mark.parametrize(
    ("rope", "model_type"),
    [
        ("linear", "llama"),
        ("linear", "qwen3"),
        ("yarn", "mistral"),
        ("yarn", "qwen2"),
        ("yarn with all", "qwen3"),
        ("yarn of attention", "llama"),
        ("llama3", "llama"),
        ("llama3", "qwen2"),
    ],
)
def test_rope_scaling(rope: str, model_type: str, written: Writer) -> None:
    parameters = {"rope_theta": 50000.0, **ROPES[rope]}
    stock = make_tiny_model(model_type, rope_parameters=parameters)
    model = assert_same_answers(written(stock), stock)
    assert model.config.rope_parameters == parameters


def test_llama3_with_other_parameters(written: Writer) -> None:
    """Only the divisors are in the file; where they do not tell the parameters, they are kept."""
    stock = make_tiny_model("llama", rope_parameters={"rope_theta": 10000.0, **OTHER_LLAMA3})
    model = assert_same_answers(written(stock), stock)
    assert model.config.rope_parameters["rope_type"] == "longrope"


@pytest.mark.parametrize("dimension", [64, 128])
def test_published_llamas(dimension: int, written: Writer) -> None:
    """Llama 3.1 (8B) and 3.2 (1B): their parameters come back from the divisors."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0 if dimension == 128 else 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    stock = make_tiny_model(
        "llama", head_dim=dimension, max_position_embeddings=131072, rope_parameters=parameters
    )
    assert gguf_config(read_gguf_header(written(stock))).rope_parameters == parameters


def test_divisors_that_divide_nothing(written: Writer) -> None:
    path = written(edit=lambda t: t.update({"rope_freqs.weight": np.ones(16, np.float32)}))
    assert gguf_config(read_gguf_header(path)).rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.0}, {}),
        ({"rope.freq_base": None}, {"rope_theta": 10000.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
            {"factor": 2.0, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_scaling_as_llama_cpp_reads_it(
    metadata: dict[str, Any], expected: dict[str, Any], written: Writer
) -> None:
    path = written(metadata={f"llama.{key}": value for key, value in metadata.items()})
    parameters = gguf_config(read_gguf_header(path)).rope_parameters
    assert parameters.items() >= expected.items()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other scaling": ({"rope.scaling.type": "longrope"}, "type 'longrope'; available: linear, no"),
    "extrapolation": ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5 is not supp"),
    "unknown scaling": ({"rope.scaling.warp": 2.0}, "llama.rope.scaling.warp=2.0 is not supp"),
    "factor": ({"rope.scaling.factor": -2.0}, "scaling.factor must be a positive number, got -2"),
    "original": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 2.0,
            "rope.scaling.original_context_length": 0,
        },
        r"original_context_length must be in 1\.\.512, got 0",
    ),
    "theta": ({"rope.freq_base": 1.0}, "freq_base must be above 1"),
    "partial": ({"rope.dimension_count": 16}, "dimension_count=16 is not supported.* 32 elements"),
    "values": ({"attention.value_length": 16}, "value_length=16 is not supported"),
    "window": ({"attention.sliding_window": 64}, "sliding_window=64 is not supported"),
    "scale": ({"attention.scale": 0.5}, "llama.attention.scale=0.5 is not supported"),
    "experts": ({"expert_count": 8}, "llama.expert_count=8 is not supported"),
    "no heads": ({"attention.head_count": 0}, r"head_count must be an integer in 1\.\..*, got 0"),
    "heads": ({"attention.head_count_kv": 4}, "6 query heads, 4 KV heads and head_dim=32 make no"),
    "no width": ({"embedding_length": None}, "embedding_length must be .* got nothing"),
    "layers": ({"block_count": 100}, "block_count=100, but the file holds 29 tensors"),
    "vocabulary": ({"vocab_size": 300}, "320 tokens do not fit llama.vocab_size=300"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_is_refused(case: str, written: Writer, cache: Path) -> None:
    metadata, message = REFUSED[case]
    path = written(metadata={f"llama.{key}": value for key, value in metadata.items()})
    with pytest.raises(ValueError, match=rf"{path}: .*{message}"):
        converted_folder(path)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "unsupported model type 'gpt2'; available: llama, qw"),
        ({"split.count": 3}, "one part of several; merge them"),
        ({"split.count": 3, "general.architecture": "none"}, "one part of several; merge them"),
        ({"tokenizer.ggml.eos_token_id": 320}, r"eos_token_id must be a token of 0\.\.319, got 3"),
        (
            {"tokenizer.ggml.eot_token_id": 999},
            r"eot_token_id must be a token of 0\.\.319, got 999",
        ),
        (
            {"tokenizer.ggml.eom_token_id": "x"},
            r"eom_token_id must be a token of 0\.\.319, got 'x'",
        ),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be a string, got 5"),
        (
            {"tokenizer.chat_template.../x": "a"},
            "'tokenizer.chat_template.../x' names a chat templ",
        ),
        ({"tokenizer.ggml.tokens": None}, "tokens must be a list of strings, got nothing"),
        ({"tokenizer.ggml.model": "bert"}, "damaged or unknown tokenizer: .*'bert'"),
    ],
)
def test_other_metadata_that_is_refused(
    metadata: dict[str, Any], message: str, written: Writer
) -> None:
    path = written(metadata=metadata)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        converted_folder(path)


def rename(tensors: dict[str, Any], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda t: t.pop("blk.1.attn_q.weight"), r"1 missing \(blk.1.attn_q.weight\)$"),
    "missing layer": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("blk.2.")],
        r"9 missing \(blk.2.attn_k.weight, blk.2.attn_norm.weight, blk.2.attn_output.weight, …\)",
    ),
    "unexpected": (
        lambda t: t.update({"blk.0.attn_sinks.weight": np.zeros(6, np.float32)}),
        r"1 unexpected \(blk.0.attn_sinks.weight\)$",
    ),
    "biases of some": (
        lambda t: t.update({"blk.1.ffn_up.bias": np.zeros(96, np.float32)}),
        r"1 unexpected \(blk.1.ffn_up.bias\)$",
    ),
    "shape": (
        lambda t: t.update({"blk.0.ffn_up.weight": np.zeros((64, 96), np.float32)}),
        r"1 of another shape \(blk.0.ffn_up.weight \[64, 96\] instead of \[96, 96\]\)$",
    ),
    "renamed": (
        lambda t: rename(t, "output_norm.weight", "norm.weight"),
        r"1 missing \(output_norm.weight\); 1 unexpected \(norm.weight\)$",
    ),
    "type": (
        lambda t: t.update({"output_norm.weight": np.ones(96, np.int32)}),
        "'output_norm.weight' has the type I32, which the package gguf cannot dequantise",
    ),
    "not finite": (
        lambda t: t.update({"output_norm.weight": np.full(96, np.nan, np.float32)}),
        "numbers that are not finite, in model.norm.weight",
    ),
    "divisors": (
        lambda t: t.update({"rope_freqs.weight": np.ones(8, np.float32)}),
        r"rope_freqs.weight must be F32 \[16\], got F32 \[8\]",
    ),
    "no divisors": (
        lambda t: t.update({"rope_freqs.weight": np.zeros(16, np.float32)}),
        "rope_freqs.weight must hold positive numbers",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_tensors_that_are_refused(case: str, written: Writer, cache: Path) -> None:
    edit, message = EDITS[case]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        converted_folder(written(edit=edit))
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [("token_embd.weight", "starts at byte"), ("output_norm.weight", "bytes follow")],
)
def test_tensors_with_other_types(name: str, message: str, written: Writer) -> None:
    """F16 in place of F32: then half of the bytes belong to nobody."""
    path = written()
    content = path.read_bytes()
    at = content.index(name.encode()) + len(name)
    at += 4 + 8 * content[at]  # behind the dimensions
    path.write_bytes(content[:at] + (1).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ValueError, match=rf"{path} is truncated or damaged .*{message}"):
        converted_folder(path)


def test_two_scalings(written: Writer) -> None:
    path = written(
        edit=lambda t: t.update({"rope_freqs.weight": np.full(16, 2.0, np.float32)}),
        metadata={"llama.rope.scaling.factor": 2.0},
    )
    with pytest.raises(ValueError, match=r"rope_freqs.weight beside llama.rope.scaling"):
        converted_folder(path)


def test_names_are_made_for_the_model_not_for_each_module(
    written: Writer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of all layers: made for each module, they took more time than the weights."""
    make, made = gguf.get_tensor_name_map, []
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *of: made.append(of) or make(*of))
    converted_folder(written())
    assert len(made) == 2  # to check the tensors, and to read them


def test_heads_beside_the_language_model(tmp_path: Path) -> None:
    info: dict[str, Any] = {"missing_keys": [], "mismatched_keys": []}
    check_loaded({**info, "unexpected_keys": ["v_head.weight"]}, tmp_path, "its config.json")
    with pytest.raises(ValueError, match=r"1 unexpected keys, such as model.norm.bias"):
        check_loaded({**info, "unexpected_keys": ["model.norm.bias"]}, tmp_path, "its config.json")


def test_a_plan_reads_the_same_config(written: Writer) -> None:
    parameters = {"rope_theta": 10000.0, **ROPES["yarn"]}
    stock = make_tiny_model("qwen3", rope_parameters={**parameters, "factor": 8.0})
    planned = planned_model(str(written(stock)))
    assert planned.shape.head_dim == 32
    assert planned.shape.max_context == 1024


def zero_the_second_half(path: Path) -> None:
    with path.open("r+b") as file:
        half = path.stat().st_size // 2
        file.seek(half)
        file.write(b"\0" * (path.stat().st_size - half))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_conversion_is_made_again(name: str, written: Writer) -> None:
    """A machine that lost power may leave files of the right size with zeros in them."""
    path = written()
    folder = converted_folder(path)
    good = {file.name: file.read_bytes() for file in folder.iterdir()}
    zero_the_second_half(folder / name)
    assert converted_folder(path) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == good


def test_folders_have_the_permissions_of_any(written: Writer) -> None:
    before = os.umask(0o027)
    try:
        assert converted_folder(written()).stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def test_what_a_killed_conversion_left_goes(written: Writer, cache: Path) -> None:
    left, others = cache / ".converting-left", cache / ".converting-others"
    for folder in (left, others):
        folder.mkdir(parents=True)
        (folder / ".lock").touch()
    with (others / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its process lives
        converted_folder(written())
        assert (left.exists(), others.exists()) == (False, True)


@pytest.mark.parametrize("lacks", ["rename", "lock", "rename of what is damaged"])
def test_a_file_system_that_lacks_something(
    written: Writer, cache: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    path, left = written(), []
    if "damaged" in lacks:
        left = [converted_folder(path)]
        (left[0] / "tokenizer.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock" if lacks == "lock" else "pathlib.Path.rename", refuses)
        message = rf"cannot write the converted model to {cache} \(Operation not supported\)"
        with pytest.raises(OSError, match=message):
            converted_folder(path)
    assert list(cache.iterdir()) == left
    OffloadedModel.from_pretrained(path, num_threads=1)


def test_a_full_disk(written: Writer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(OSError, match=rf"the disk is full: {cache} has \d+ bytes left after"):
        converted_folder(written())
    assert list(cache.iterdir()) == []


# Random damage. What is made of a damaged file's header is checked; to weights it is not noticed.

_NUMBERS = [0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


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
