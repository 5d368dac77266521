"""Checkpoints that other tools quantised: their layouts are written here by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_model_of
from cases.tiny_models import VOCAB_SIZE, make_tiny_model, random_tokens
from safetensors.torch import save_file
from torch import Tensor

from gpu_ops.packed_linear import GPU_FORMATS
from offload import OffloadedModel
from offload.loading.checkpoint import check_checkpoint
from offload.loading.packed_bytes import checkpoint_packed_bytes
from offload.loading.planned_model import planned_model
from offload.models import FAMILIES
from offload.models.packed_experts import PackedExperts
from offload.models.packed_linear import PackedMatrix, PackedModule
from offload.runtime.budgets import weight_bytes_of
from offload.runtime.runtime import Runtime

GROUP = 32
Parts = dict[str, Tensor]


def words(numbers: Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> Tensor:
    """int32 words of unsigned numbers, 32 / bits of neighbours along an axis in each."""
    per_word = 32 // bits
    numbers = numbers.movedim(axis, -1).unflatten(-1, (-1, per_word)).long()
    made = torch.zeros(numbers.shape[:-1], dtype=torch.int64)
    for i in range(per_word):
        made |= numbers[..., order[i] if order else i] << bits * i
    signed = torch.where(made >= 2**31, made - 2**32, made)
    return signed.to(torch.int32).movedim(-1, axis).contiguous()


def grid(weight: Tensor, bits: int, group: int, *, symmetric: bool = False) -> tuple[Tensor, ...]:
    """codes [out, in], scales and zeros [out, groups], and the numbers that they stand for."""
    groups = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    most = 2**bits - 1
    least, largest = groups.amin(-1), groups.amax(-1)
    scales = ((largest - least) / most).half()
    zeros = (-least / scales.float()).round().clamp(1, most)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
        scales = (groups.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, most)
    numbers = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1), scales, zeros, numbers.flatten(1)


def gptq(weight: Tensor, bits: int = 4, *, offset: int = 1, symmetric: bool = False) -> Any:
    codes, scales, zeros, numbers = grid(weight, bits, GROUP, symmetric=symmetric)
    parts = {
        "qweight": words(codes.T, bits, 0),
        "qzeros": words(zeros.T - offset, bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return parts, numbers


def awq(weight: Tensor) -> Any:
    codes, scales, zeros, numbers = grid(weight, 4, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(codes.T, 4, 1, order),
        "qzeros": words(zeros.T, 4, 1, order),
        "scales": scales.T.contiguous(),
    }
    return parts, numbers


def pack_quantised(weight: Tensor, *, symmetric: bool) -> Any:
    codes, scales, zeros, numbers = grid(weight, 4, GROUP, symmetric=symmetric)
    parts = {
        "weight_packed": words(codes, 4, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(zeros, 4, 0)
    return parts, numbers


def int_quantised(weight: Tensor) -> Any:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def fp8(weight: Tensor, *, block: int = 0) -> Any:
    if not block:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scales).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales
    blocks = -(-weight.shape[0] // block), -(-weight.shape[1] // block)
    scales = torch.rand(blocks) + 0.5
    whole = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
    whole = whole[: weight.shape[0], : weight.shape[1]]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * whole


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# fmt: off
NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])
# fmt: on


def nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)


def nvfp4(weight: Tensor) -> Any:
    groups = weight.unflatten(1, (-1, 16))
    of_all = 6 * 448 / weight.abs().max().view(1)
    scales = (groups.abs().amax(-1) / 6 * of_all).to(torch.float8_e4m3fn)
    units = (scales.float() / of_all).unsqueeze(-1)
    codes = nearest(groups / units, E2M1)
    pairs = codes.flatten(1).unflatten(1, (-1, 2))
    parts = {
        "weight_packed": pairs[..., 0] | pairs[..., 1] << 4,
        "weight_scale": scales,
        "weight_global_scale": of_all,
        "input_global_scale": torch.ones(1),
    }
    return parts, (E2M1[codes.int()] * units).flatten(1)


def mxfp4(weight: Tensor) -> Any:
    """weight [experts, out, in]."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    codes = nearest(groups / torch.exp2(exponents).unsqueeze(-1), E2M1)
    pairs = codes.unflatten(-1, (-1, 2))
    parts = {
        "blocks": pairs[..., 0] | pairs[..., 1] << 4,
        "scales": (exponents + 127).to(torch.uint8),
    }
    return parts, (E2M1[codes.int()] * torch.exp2(exponents).unsqueeze(-1)).flatten(-2)


def nf4(weight: Tensor, *, nested: bool, block: int = 64) -> Any:
    blocks = weight.reshape(-1, block)
    absmax = blocks.abs().amax(-1)
    state = {"quant_type": "nf4", "blocksize": block, "shape": [*weight.shape], "dtype": "float32"}
    parts = {"weight.quant_map": NF4, "weight.absmax": absmax}
    if nested:
        of_codes = torch.linspace(-1, 1, 256)
        padded = torch.nn.functional.pad(absmax - absmax.mean(), (0, -len(absmax) % 256))
        largest = padded.view(-1, 256).abs().amax(-1)
        scaled = (absmax - absmax.mean()) / largest.repeat_interleave(256)[: len(absmax)]
        codes = torch.cat([nearest(part, of_codes) for part in scaled.split(999)])
        absmax = of_codes[codes.int()] * largest.repeat_interleave(256)[: len(codes)]
        state |= {
            "nested_blocksize": 256,
            "nested_offset": (offset := float(blocks.abs().amax(-1).mean())),
        }
        absmax += offset
        parts |= {
            "weight.absmax": codes,
            "weight.nested_absmax": largest,
            "weight.nested_quant_map": of_codes,
        }
    codes = nearest(blocks / absmax.unsqueeze(-1), NF4)
    pairs = codes.flatten().unflatten(0, (-1, 2))
    parts["weight"] = (pairs[:, :1] << 4) | pairs[:, 1:]
    written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts["weight.quant_state.bitsandbytes__nf4"] = written
    return parts, (NF4[codes.int()] * absmax.unsqueeze(-1)).view(weight.shape)


def of_compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "group_size": GROUP} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
PACKED = of_compressed("pack-quantized", num_bits=4)
# What writes a matrix, the quantization_config, what a matrix is kept as, and how exactly.
METHODS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], str, float]] = {
    "gptq": (gptq, GPTQ, "q4", 1e-3),
    "gptq_v2": (lambda w: gptq(w, offset=0), GPTQ | {"checkpoint_format": "gptq_v2"}, "q4", 1e-3),
    "gptq 8": (lambda w: gptq(w, 8), GPTQ | {"bits": 8}, "q8m", 1e-3),
    "gptq 8 symmetric": (
        lambda w: gptq(w, 8, symmetric=True),
        GPTQ | {"bits": 8, "sym": True},
        "q8",
        1e-6,
    ),
    "gptq 8 around 0": (lambda w: gptq(w, 8, symmetric=True), GPTQ | {"bits": 8}, "q8m", 1e-6),
    "nvfp4": (
        nvfp4,
        of_compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        "t4x16",
        1e-3,
    ),
    "nf4": (lambda w: nf4(w, nested=False), NF4_CONFIG, "t4", 1e-2),
    "nf4 nested": (lambda w: nf4(w, nested=True), NF4_CONFIG, "t4", 1e-2),
    "awq": (awq, AWQ, "q4", 1e-3),
    "pack": (lambda w: pack_quantised(w, symmetric=True), PACKED, "q4", 1e-6),
    "pack asymmetric": (lambda w: pack_quantised(w, symmetric=False), PACKED, "q4", 1e-3),
    "int8": (
        int_quantised,
        of_compressed("int-quantized", num_bits=8, group_size=None),
        "q8",
        1e-6,
    ),
    "fp8 rows": (
        fp8,
        of_compressed("float-quantized", num_bits=8, type="float", group_size=None),
        "q8",
        1e-2,
    ),
    "fp8 blocks": (
        lambda w: fp8(w, block=32),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "q8",
        1e-2,
    ),
}


def write(folder: Path, quantised: Callable[[Tensor], Any], config: dict[str, Any]) -> Any:
    """A checkpoint of a tiny model in `folder`; returns the model with what it stands for."""
    model = make_tiny_model("llama", hidden_size=192, intermediate_size=128)
    model.save_pretrained(folder)
    tensors: Parts = {}
    for name, weight in model.state_dict().items():
        if ".layers." in name and weight.dim() == 2:
            parts, numbers = quantised(weight.float())
            prefix = name.removesuffix("weight")
            tensors |= {prefix + suffix: part.clone() for suffix, part in parts.items()}
            weight.copy_(numbers)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = weight.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return model.eval()


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("method", METHODS)
def test_matrices_are_those_of_the_file(method: str, tmp_path: Path) -> None:
    quantised, config, kept, tolerance = METHODS[method]
    expected = write(tmp_path, quantised, config)
    model = OffloadedModel.from_pretrained(tmp_path, policy="full", num_threads=1)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedModule)}
    assert len(packed) == 7 * model.config.num_hidden_layers
    for name, module in packed.items():
        assert module.packed.format == kept
        weight = expected.get_submodule(name).weight
        assert relative(module.packed.dequantise(), weight) < tolerance, name
    tokens = random_tokens(30, seed=1).unsqueeze(0)
    expected.requires_grad_(False)
    wanted = expected(tokens).logits[0, -1]
    assert relative(model(tokens).logits[0, -1], wanted) < 0.05
    assert getattr(model.config, "quantization_config", None) is None
    assert planned_model(str(tmp_path)).weight_bytes == weight_bytes_of(model)
    dense = OffloadedModel.from_pretrained(
        tmp_path, policy="full", num_threads=1, weights="float32"
    )
    assert not any(isinstance(module, PackedModule) for module in dense.modules())
    assert relative(dense(tokens).logits[0, -1], wanted) < max(4 * tolerance, 1e-5)
    assert dense.generate(tokens, max_new_tokens=2, do_sample=False).shape == (1, 32)


@pytest.mark.parametrize("method", ["gptq", "fp8 rows"])
@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_what_they_leave_dense_is_rounded_too(method: str, weights: str, tmp_path: Path) -> None:
    """The head, which is the embedding, has no format in the file."""
    expected = write(tmp_path, *METHODS[method][:2]).requires_grad_(False)
    model = OffloadedModel.from_pretrained(tmp_path, num_threads=1, weights=weights)
    packed = {n: m.packed for n, m in model.named_modules() if isinstance(m, PackedModule)}
    assert packed.pop("lm_head").format == "q8"
    wanted = weights if method == "gptq" else "q8"  # q4 is not for what has more bits
    assert {each.format for each in packed.values()} == {wanted}
    for name, each in packed.items():
        assert relative(each.dequantise(), expected.get_submodule(name).weight) < 0.1
    assert planned_model(str(tmp_path), weights=weights).weight_bytes == weight_bytes_of(model)


def test_what_is_packed_is_saved_dequantised(tmp_path: Path) -> None:
    expected = write(tmp_path / "awq", *METHODS["awq"][:2]).requires_grad_(False)
    model = OffloadedModel.from_pretrained(tmp_path / "awq", num_threads=1)
    model.save_pretrained(tmp_path / "saved")
    again = OffloadedModel.from_pretrained(tmp_path / "saved", num_threads=1)
    weight = again.model.layers[0].mlp.down_proj.weight.detach()
    assert relative(weight, expected.model.layers[0].mlp.down_proj.weight) < 1e-3


def write_experts(folder: Path, dtype: torch.dtype) -> Any:
    """A tiny gpt-oss with MXFP4 experts in `folder`; returns the model with what it stands for."""
    model = tiny_model_of("gpt_oss", vocab_size=VOCAB_SIZE).to(dtype).eval()
    model.save_pretrained(folder)
    tensors: Parts = {}
    for name, weight in model.state_dict().items():
        if name.endswith("_proj") and weight.dim() == 3:
            # Inputs of experts are rounded to 8 bits: with smaller outputs few tokens turn by that.
            parts, numbers = mxfp4(weight.float().transpose(1, 2) / 4)
            tensors |= {f"{name}_{suffix}": part for suffix, part in parts.items()}
            weight.copy_(numbers.transpose(1, 2))
        else:
            tensors[name] = weight.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_stay_packed(dtype: torch.dtype, tmp_path: Path) -> None:
    stock = write_experts(tmp_path / "made", dtype)
    stock.save_pretrained(tmp_path / "dense")
    model = OffloadedModel.from_pretrained(tmp_path / "made", num_threads=1)
    dense = OffloadedModel.from_pretrained(tmp_path / "dense", num_threads=1)
    experts = [x for x in model.modules() if isinstance(x, PackedExperts)]
    assert len(experts) == model.config.num_hidden_layers
    for name in ("gate_up_proj", "down_proj"):
        matrix = getattr(experts[0], name)
        assert matrix.packed.format == "t4"
        expected = getattr(stock.model.layers[0].mlp.experts, name)
        assert matrix.of_stock().equal(expected)
    checkpoint = check_checkpoint(tmp_path / "made", takes_generic=True)
    assert checkpoint_packed_bytes(checkpoint, dtype, "auto") == weight_bytes_of(model)
    assert weight_bytes_of(model) < weight_bytes_of(dense)
    unpacked = OffloadedModel.from_pretrained(tmp_path / "made", num_threads=1, backend="inline")
    assert weight_bytes_of(unpacked) == weight_bytes_of(dense)
    in_four = planned_model(str(tmp_path / "made")).weight_bytes
    in_eight = planned_model(str(tmp_path / "made"), device="cuda").weight_bytes
    assert in_four == weight_bytes_of(model) < in_eight < weight_bytes_of(dense)
    ids = random_tokens(30, seed=1).unsqueeze(0)
    expected, found, of_unpacked = (
        each.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        for each in (dense, model, unpacked)
    )
    assert expected.tolist() == found.tolist() == of_unpacked.tolist()
    cache, wanted = model.new_cache(), dense(found).logits[0]
    steps = [
        model(part, past_key_values=cache).logits[0] for part in found.split([30, *[1] * 24], 1)
    ]
    assert relative(torch.cat(steps), wanted) < 0.03
    model.save_pretrained(tmp_path / "saved")
    again = OffloadedModel.from_pretrained(tmp_path / "saved", num_threads=1)
    assert again.state_dict().keys() == dense.state_dict().keys()
    for name, value in dense.state_dict().items():
        assert again.state_dict()[name].equal(value), name


@pytest.mark.cuda
@torch.inference_mode()
def test_packed_experts_with_a_gpu(tmp_path: Path) -> None:
    """As q8, in the prompt and in steps of native layers."""
    stock = write_experts(tmp_path, torch.float32)
    model = OffloadedModel.from_pretrained(tmp_path, num_threads=1, device="cuda")
    lean = model._offload.lean
    assert all(layer.routed.on_gpu().up.format == "q8" for layer in lean.layers)
    ids, cache = random_tokens(54, seed=1).unsqueeze(0), model.new_cache()
    parts = ids.to(model.device).split([30, *[1] * 24], 1)
    found = [model(part, past_key_values=cache).logits[0].cpu() for part in parts]
    assert relative(torch.cat(found), stock(ids).logits[0]) < 0.03


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (GPTQ | {"desc_act": True}, NotImplementedError, "g_idx"),
        (GPTQ | {"bits": 3}, NotImplementedError, "'gptq' and 3 bits"),
        (GPTQ | {"bits": "4"}, ValueError, "bits must be an integer, got '4'"),
        (AWQ | {"version": "gemv"}, NotImplementedError, "version='gemv'"),
        (of_compressed("marlin-24", num_bits=4), NotImplementedError, "format='marlin-24'"),
        ({"quant_method": "compressed-tensors"}, ValueError, "config_groups"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, NotImplementedError, "64, 128"),
        (NF4_CONFIG | {"load_in_4bit": False}, NotImplementedError, "8 bits .load_in_8bit"),
        ({"quant_method": "hqq"}, NotImplementedError, "'hqq', which are not"),
        (5, ValueError, "quantization_config must be an object"),
        # A config that lies about the file.
        (GPTQ | {"bits": 8}, ValueError, "is no matrix of gptq with 8 bits"),
        (GPTQ | {"group_size": 64}, ValueError, "with 4 bits and groups of 64"),
        (AWQ, ValueError, "is no matrix of awq"),
    ],
)
def test_refusals(config: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    write(tmp_path, gptq, config)
    with pytest.raises(error, match=message):
        check_checkpoint(tmp_path)
    with pytest.raises(error, match=message):
        OffloadedModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("state", [None, b"{", b'{"shape": [192, 192], "blocksize": 0}'])
def test_a_state_of_bitsandbytes_that_is_none(state: bytes | None, tmp_path: Path) -> None:
    def damaged(weight: Tensor) -> Any:
        parts, numbers = nf4(weight, nested=False)
        del parts["weight.quant_state.bitsandbytes__nf4"]
        if state is not None:
            parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*state]).byte()
        return parts, numbers

    write(tmp_path, damaged, NF4_CONFIG)
    with pytest.raises(ValueError, match=r"proj is no matrix of bitsandbytes with 4 bits"):
        check_checkpoint(tmp_path)


def test_what_only_the_numbers_tell(tmp_path: Path) -> None:
    def shuffled(weight: Tensor) -> Any:
        parts, numbers = gptq(weight)
        return parts | {"g_idx": parts["g_idx"].flip(0)}, numbers

    write(tmp_path, shuffled, GPTQ)
    with pytest.raises(NotImplementedError, match=r"proj\.weight: its g_idx has inputs in another"):
        OffloadedModel.from_pretrained(tmp_path)

    def infinite(weight: Tensor) -> Any:
        parts, numbers = gptq(weight)
        parts["scales"][0, 0] = torch.inf
        return parts, numbers

    write(tmp_path, infinite, GPTQ)
    with pytest.raises(ValueError, match=r"proj\.weight has numbers that are not finite"):
        OffloadedModel.from_pretrained(tmp_path)


def write_generic(folder: Path, model_type: str, method: str, prefix: str = "") -> Any:
    """As `write`, of a type without lean layers, with the experts of a checkpoint on the hub."""
    quantised, config, _, _ = METHODS[method]
    model = tiny_model_of(model_type, vocab_size=VOCAB_SIZE).eval()
    model.save_pretrained(folder)
    linears = {f"{n}.weight" for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    tensors: Parts = {}
    for name, weight in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        matrices = {}
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(weight):
                parts = zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
                matrices |= {f"{owner}.{e}.{part}.": part_weight for part, part_weight in parts}
        elif name.endswith("experts.down_proj"):
            matrices = {f"{owner}.{e}.{kind}.": each for e, each in enumerate(weight)}
        elif ".layers." in name and name in linears:
            matrices = {name.removesuffix("weight"): weight}
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = weight.clone()
        for path, matrix in matrices.items():
            # With small outputs of experts few tokens turn by the rounding of their inputs.
            made, numbers = quantised(matrix.float() / (4 if "experts" in path else 1))
            tensors |= {path + suffix: part.clone() for suffix, part in made.items()}
            matrix.copy_(numbers)
    if prefix:  # of a model with images beside the text
        tensors = {re.sub(r"^model\.", prefix, name): value for name, value in tensors.items()}
        tensors["vision_tower.patch.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    own = json.loads(path.read_text())
    if prefix:
        own = {"model_type": "gemma3", "text_config": own, "vision_config": {"hidden_size": 32}}
    path.write_text(json.dumps(own | {"quantization_config": config}))
    return model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("model_type", "method", "prefix"),
    [
        ("qwen3_moe", "gptq", ""),
        ("qwen3_moe", "awq", ""),
        ("qwen3_moe", "pack", ""),
        ("qwen3_moe", "fp8 blocks", ""),
        ("gemma3_text", "pack asymmetric", ""),
        ("gemma3_text", "gptq", "language_model.model."),
        ("qwen3_5_text", "nvfp4", ""),
        ("phi3", "nf4", ""),
        ("phi3", "fp8 rows", ""),
        ("smollm3", "gptq", ""),  # of families that have some
        ("olmo2", "fp8 rows", ""),
        ("ministral3", "fp8 rows", ""),
    ],
)
def test_types_without_lean_layers(
    model_type: str, method: str, prefix: str, device: str, tmp_path: Path
) -> None:
    stock = write_generic(tmp_path / "made", model_type, method, prefix)
    kept, tolerance = METHODS[method][2:]
    if device == "cuda" and kept not in GPU_FORMATS:
        pytest.skip("kept as another format on a GPU")
    model = OffloadedModel.from_pretrained(tmp_path / "made", num_threads=1, device=device)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedMatrix)}
    assert isinstance(model._offload, Runtime) == (model_type in FAMILIES)
    linears = [n for n, m in stock.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]
    experts = [n for n, _ in stock.named_parameters() if n.endswith("_proj")]
    assert packed.keys() == {*linears, *experts}
    for name, module in packed.items():
        assert module.packed.format == kept
        weight = stock.get_parameter(module.stock_name(name))
        assert relative(module.of_stock().cpu(), weight) < tolerance, name
    for name, weight in model.named_parameters():
        assert weight.untyped_storage().nbytes() >= weight.nbytes, name
    checkpoint = check_checkpoint(tmp_path / "made", takes_generic=True)
    assert checkpoint_packed_bytes(checkpoint, torch.float32, "auto") <= weight_bytes_of(model)
    ids = random_tokens(30, seed=1).unsqueeze(0)
    wanted = stock.requires_grad_(False)(ids).logits[0]
    cache = model.new_cache()
    steps = [
        model(part, past_key_values=cache).logits[0] for part in ids.split([26, 1, 1, 1, 1], 1)
    ]
    assert relative(torch.cat(steps).cpu(), wanted) < 0.05
    model.save_pretrained(tmp_path / "saved")
    again = OffloadedModel.from_pretrained(tmp_path / "saved", num_threads=1)
    assert again.state_dict().keys() == stock.state_dict().keys()
    assert relative(again(ids).logits[0], wanted) < max(10 * tolerance, 1e-5)


def test_types_without_lean_layers_are_checked(tmp_path: Path) -> None:
    write_generic(tmp_path, "qwen3_moe", "gptq")
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text().replace('"moe_intermediate_size": 32', '"moe_intermediate_size": 64')
    )
    with pytest.raises(ValueError, match=r"mismatched keys.*experts\.0\.(down|gate)_proj"):
        OffloadedModel.from_pretrained(tmp_path)
