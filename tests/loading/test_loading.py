"""Names, folders, shards and GGUF files; what is damaged is refused before weights are read."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import byte_tokenizer, make_tiny_model, random_tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from offload import HostBudgetError, OffloadedModel, load_tokenizer
from offload.loading.gguf import converted_folder
from offload.loading.planned_model import planned_model
from offload.system.memory import HostMemory

TOKENS = random_tokens(1, 20)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def load(folder: Path, **options: Any) -> Any:
    return OffloadedModel.from_pretrained(folder, num_threads=1, **options)


def test_is_an_instance_of_the_stock_class(offloaded_models: dict[str, Any]) -> None:
    model = offloaded_models["llama"]
    assert isinstance(model, LlamaForCausalLM)
    assert isinstance(model, OffloadedModel)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model) is type(offloaded_models["llama-biases-rope"])
    assert model.can_generate()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_save_and_load(offloaded_models: dict[str, Any], tmp_path: Path, name: str) -> None:
    """Tied and untied weights come back the same, in a checkpoint without a trace of us."""
    model = offloaded_models[name]
    model.save_pretrained(tmp_path)
    assert "offload" not in (tmp_path / "config.json").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock).__module__.startswith("transformers.")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        type(stock).__name__
    ]
    saved, kept = stock.state_dict(), model.state_dict()
    assert saved.keys() == kept.keys()
    assert all(torch.equal(saved[key], kept[key]) for key in kept)


def test_dtypes(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    assert load(tiny_folders["llama"]).dtype == torch.float32
    assert load(tiny_folders["llama"], dtype=torch.bfloat16).dtype == torch.bfloat16
    make_tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.bfloat16
    assert load(tmp_path, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "no such model folder or GGUF file: ./no/such/folder"),
        ("weights.gguf", "no such model folder or GGUF file"),
        ("some-user/some-model", "'some-user/some-model'.*'smollm2-135m-instruct'"),
        ("smollm2", "no model 'smollm2'; known names: smollm2-135m-instruct, .*hub id"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        OffloadedModel.from_pretrained(name)


def test_no_name_at_all() -> None:
    with pytest.raises(ValueError, match=r"a folder, a \.gguf file, a hub id or .*, got None"):
        OffloadedModel.from_pretrained(None)
    for find in (OffloadedModel.from_pretrained, load_tokenizer, planned_model):
        with pytest.raises(ValueError, match="the model's name is empty; give a folder"):
            find("")


def test_hub_id_in_the_hub_cache(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """As a download leaves it; the tests are offline."""
    repository = tmp_path / "models--some-user--some-model"
    shutil.copytree(tiny_folders["qwen3"], repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    model = load(Path("some-user/some-model"), cache_dir=str(tmp_path))
    assert type(model).__name__ == "Qwen3ForCausalLM"


def test_unsupported_hub_model_is_not_downloaded(tmp_path: Path) -> None:
    """Only its config.json is there: asking for more would fail in another way."""
    snapshot = tmp_path / "models--some-user--some-model" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "mamba"}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc123")
    with pytest.raises(ValueError, match="unsupported model type 'mamba'"):
        OffloadedModel.from_pretrained("some-user/some-model", cache_dir=str(tmp_path))


def test_a_file_that_is_no_model(tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="is a file"):
        load(tiny_folders["llama"] / "config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint that a test may damage."""
    make_tiny_model("qwen2").save_pretrained(tmp_path / "model", max_shard_size="200KB")
    return tmp_path / "model"


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the header of the first shard; the data stays as it is."""
    content = first_shard(folder).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change({name: entry for name, entry in header.items() if name != "__metadata__"})
    written = json.dumps(header).encode()
    first_shard(folder).write_bytes(
        len(written).to_bytes(8, "little") + written + content[8 + length :]
    )


def change_tensor(folder: Path, **changes: Any) -> None:
    """Change the header of the first tensor in the data."""
    change_header(
        folder, lambda h: min(h.values(), key=lambda t: t["data_offsets"][0]).update(changes)
    )


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def change_shard(folder: Path, shard: str) -> None:
    change_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": shard}))


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "missing config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), ValueError, "not valid JSON"),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), ValueError, "no model_type"),
    "other model type": (
        lambda f: change_config(f, model_type="gptj"),
        ValueError,
        "unsupported model type 'gptj': .*; available: exaone4, gemma3_text, gemma4_text, gpt_oss",
    ),
    "quantised": (
        lambda f: change_config(f, quantization_config={"quant_method": "bitsandbytes"}),
        NotImplementedError,
        "quantised with 'bitsandbytes'",
    ),
    "odd quantisation": (
        lambda f: change_config(f, quantization_config=5),
        ValueError,
        "config.json: quantization_config must be an object with quant_method, got 5",
    ),
    "other shapes": (
        lambda f: change_config(f, vocab_size=400),
        ValueError,
        "does not fit its config.json: mismatched keys, such as model.embed_tokens",
    ),
    "more layers": (
        lambda f: change_config(f, num_hidden_layers=4, layer_types=["full_attention"] * 4),
        ValueError,
        "does not fit its config.json: missing keys, such as model.layers.3",
    ),
    "no dtype": (
        lambda f: change_config(f, dtype=5),
        ValueError,
        "config.json: dtype=5 is no dtype; available: bfloat16, float16, float32",
    ),
    "no tensors": (
        lambda f: (f / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}"),
        ValueError,
        "model.safetensors has no weights",
    ),
    "no shard": (lambda f: first_shard(f).unlink(), FileNotFoundError, "missing weight file"),
    "no weights": (
        lambda f: [path.unlink() for path in f.glob("*.safetensors*")],
        FileNotFoundError,
        "has no weights: expected model.safetensors",
    ),
    "truncated": (
        lambda f: os.truncate(first_shard(f), first_shard(f).stat().st_size - 10),
        ValueError,
        "truncated or damaged",
    ),
    "truncated header": (
        lambda f: os.truncate(first_shard(f), 40),
        ValueError,
        "truncated or not a safetensors file",
    ),
    "empty": (lambda f: os.truncate(first_shard(f), 0), ValueError, r"\(0 bytes\)"),
    "text": (lambda f: first_shard(f).write_text("hello " * 99), ValueError, "not a safetensors"),
    "nested header": (
        lambda f: first_shard(f).write_bytes((9000).to_bytes(8, "little") + b"[" * 9000),
        ValueError,
        "damaged safetensors header",
    ),
    "overlap": (
        lambda f: change_header(
            f, lambda h: [t.update(data_offsets=[0, 122880], shape=[320, 96]) for t in h.values()]
        ),
        ValueError,
        "starts at byte 0, but the tensors before it end at 122880",
    ),
    "gap": (
        lambda f: change_tensor(f, shape=[1, 96], data_offsets=[122496, 122880]),
        ValueError,
        "starts at byte 122496, but the tensors before it end at 0",
    ),
    "other dtype": (
        lambda f: change_tensor(f, dtype="BF16"),
        ValueError,
        r"has 122880 bytes, but its shape is \[320, 96\] and its dtype BF16",
    ),
    "unknown dtype": (lambda f: change_tensor(f, dtype="F9"), ValueError, "unknown dtype 'F9'"),
    "negative shape": (
        lambda f: change_tensor(f, shape=[-320, -96]),
        ValueError,
        r"has the shape \[-320, -96\]",
    ),
    "huge shape": (lambda f: change_tensor(f, shape=[2**62, 96]), ValueError, "its shape is"),
    "shape of floats": (lambda f: change_tensor(f, shape=[320.0, 96]), ValueError, "the shape"),
    "shard above": (
        lambda f: change_shard(f, "../other.safetensors"),
        ValueError,
        "names '../other.safetensors', which is no .safetensors file in its folder",
    ),
    "shard elsewhere": (
        lambda f: change_shard(f, "/other.safetensors"),
        ValueError,
        "names '/other.safetensors', which is no",
    ),
    "pickled shard": (lambda f: change_shard(f, "other.bin"), ValueError, "names 'other.bin'"),
    "no index metadata": (
        lambda f: change_index(f, lambda index: index.pop("metadata")),
        ValueError,
        "model.safetensors.index.json has no metadata",
    ),
    "no weight map": (
        lambda f: change_index(f, lambda index: index.update(weight_map=[])),
        ValueError,
        "model.safetensors.index.json has no weight_map",
    ),
    "empty weight map": (
        lambda f: change_index(f, lambda index: index["weight_map"].clear()),
        ValueError,
        "model.safetensors.index.json names no weights",
    ),
    "nested index": (
        lambda f: (f / "model.safetensors.index.json").write_text("[" * 10**6),
        ValueError,
        "model.safetensors.index.json is not valid JSON",
    ),
    "other weight files": (
        lambda f: change_config(f, transformers_weights="other.safetensors"),
        ValueError,
        "names other weight files, in transformers_weights",
    ),
    "fewer layers": (
        lambda f: change_config(f, num_hidden_layers=2, layer_types=["full_attention"] * 2),
        ValueError,
        "does not fit its config.json: 12 unexpected keys, such as model.layers.2.input_layernorm",
    ),
    "too many layers": (
        lambda f: change_config(f, num_hidden_layers=2**40),
        ValueError,
        r"config.json: num_hidden_layers must be an integer in 1\.\.1048576, got 1099511627776",
    ),
    "no KV heads": (
        lambda f: change_config(f, num_key_value_heads=0),
        ValueError,
        "num_key_value_heads must be an integer",
    ),
    "negative window": (
        lambda f: change_config(f, sliding_window=-5),
        ValueError,
        "config.json: sliding_window must be at least 1, or null, got -5",
    ),
    "no width": (lambda f: change_config(f, hidden_size=None), ValueError, "hidden_size must be"),
    "odd option": (
        lambda f: change_config(f, rms_norm_eps="small"),
        ValueError,
        "config.json: .*rms_norm_eps",
    ),
    "damaged single file": (
        lambda f: (f / "model.safetensors").write_bytes(b"beside an index"),
        ValueError,
        "model.safetensors is truncated or not a safetensors file",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder(folder: Path, damage: str) -> None:
    do_damage, error, message = DAMAGES[damage]
    do_damage(folder)
    with pytest.raises(error, match=message):
        load(folder)


@pytest.fixture
def gguf_file(written: Callable[[], Path]) -> Path:
    return written()


def test_gguf(gguf_file: Path, tmp_path: Path) -> None:
    model = load(gguf_file)
    assert model.dtype == torch.bfloat16
    expected = make_tiny_model("llama").to(torch.bfloat16).state_dict()
    assert all(torch.equal(weight, expected[key]) for key, weight in model.state_dict().items())
    assert load_tokenizer(gguf_file)("Hello")["input_ids"] == byte_tokenizer()("Hello")["input_ids"]
    assert "quantization_config" not in model.config.to_dict()

    (folder,) = (tmp_path / "cache" / "models").iterdir()  # nothing temporary is left
    written = (folder / "model.safetensors").stat().st_mtime_ns
    load(gguf_file)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written

    expected_logits = logits(model)
    (folder / "model.safetensors").unlink()  # not truncated: `model` has mapped the file
    (folder / "model.safetensors").write_bytes(bytes(1000))
    assert torch.equal(logits(load(gguf_file)), expected_logits)
    assert list((tmp_path / "cache" / "models").iterdir()) == [folder]


def test_gguf_in_a_folder(gguf_file: Path) -> None:
    assert load(gguf_file.parent, gguf_file="tiny.gguf").name_or_path.endswith(
        converted_folder(gguf_file).name
    )


def test_changed_gguf_is_converted_again(gguf_file: Path) -> None:
    before = converted_folder(gguf_file)
    os.utime(gguf_file, ns=(0, 0))
    assert converted_folder(gguf_file) != before


def test_damaged_gguf(gguf_file: Path, tmp_path: Path) -> None:
    os.truncate(gguf_file, gguf_file.stat().st_size // 2)
    with pytest.raises(ValueError, match="truncated or damaged"):
        load(gguf_file)
    gguf_file.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match="starts with b'GGML' instead of b'GGUF'"):
        load(gguf_file)
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_conversions_race(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes first: its folder is taken, ours goes."""
    from offload.loading import gguf as gguf_conversion

    done = converted_folder(gguf_file)
    content = shutil.copytree(done, gguf_file.parent / "copy")
    shutil.rmtree(done)
    convert = gguf_conversion._convert

    def convert_slowly(path: Path, folder: Path, dtype: torch.dtype) -> None:
        convert(path, folder, dtype)
        content.rename(done)

    monkeypatch.setattr(gguf_conversion, "_convert", convert_slowly)
    assert converted_folder(gguf_file) == done
    assert [path.name for path in done.parent.iterdir()] == [done.name]


def test_cache_folder_that_cannot_be_written(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(gguf_file))  # a file
    with pytest.raises(PermissionError, match="set OFFLOAD_CACHE"):
        load(gguf_file)


def test_missing_embedded_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.loading import embedded_package

    monkeypatch.setattr(embedded_package, "_MODULE", "no_such_package")
    with pytest.raises(FileNotFoundError, match=f"run: {sys.executable} -m offload download"):
        OffloadedModel.from_pretrained("smollm2-135m-instruct")


def test_not_enough_memory(tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.runtime import budgets

    few = HostMemory(4000, in_cgroup=True, left_bytes=2250, own_bytes=0)
    monkeypatch.setattr(budgets, "host_memory", lambda: few)
    with pytest.raises(HostBudgetError, match=r"weights need .* this process may use is 1000 B"):
        load(tiny_folders["llama"])


def test_weights_are_moved(offloaded_models: dict[str, Any], tmp_path: Path) -> None:
    """Into memory of our own, with ties kept, and still in a form that others can save."""
    from safetensors.torch import load_file, save_model

    model = offloaded_models["llama"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(weight.data_ptr() % 64 == 0 for weight in model.parameters())
    save_model(model, str(tmp_path / "saved.safetensors"))
    saved, weights = load_file(tmp_path / "saved.safetensors"), model.state_dict()
    assert len(saved) == len(weights) - 1  # the tied one
    assert all(torch.equal(weight, weights[name]) for name, weight in saved.items())
