"""Generic models whose modules are on a GPU, and inline: the stock model's tokens."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases.device_cases import NO_GPU
from cases.every_type import tiny_model_of
from cases.flag_handshake import make_flag_handshake
from cases.slowly import combinations, slow_but
from cases.tiny_models import VOCAB_SIZE, byte_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.cli import app
from offload.decode.attention import DecodeAttention
from offload.decode.gpu.captured_steps import CapturedSteps
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.engine.engine import Engine
from offload.engine.sampling_params import SamplingParams
from offload.models.packed_linear import PackedMatrix
from offload.policies.registry import make_policy
from offload.runtime import generic_loading, generic_steps
from offload.runtime.module_steps import ModuleSteps
from offload.runtime.modules_device import ModulesDevice
from offload.system.errors import DeviceMemoryError

OTHERS = ["lfm2", "afmoe", "nemotron_h", "flint", "gemma2"]  # with sinks, with caps
TYPES = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", *OTHERS]
LATENTS = ["glm4_moe_lite", "deepseek_v3"]
IN_ONE_STEP = (*OTHERS, *LATENTS)  # by the stock modules
CUDA = pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])
IDS = torch.randint(3, 250, (2, 90), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :37] = 0
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
POLICIES = [
    make_policy("full"),
    make_policy("exact_topk", budget_tokens=4096, sink_tokens=2, recent_tokens=4, dense_layers=0),
]


@pytest.fixture(
    scope="module", params=slow_but([*TYPES, *LATENTS], *TYPES[:2], *TYPES[3:], LATENTS[0])
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such type")
    path = tmp_path_factory.mktemp(request.param)
    tiny_model_of(request.param, vocab_size=VOCAB_SIZE).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def load(folder: Path, device: str, **options: Any) -> Any:
    backend = "inline" if device == "cpu" else None
    given = {"num_threads": 1, "page_tokens": 16, "device": device, "backend": backend}
    return OffloadedModel.from_pretrained(folder, **given | options)


def tokens(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> list[list[int]]:
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | options
    found = model.generate(input_ids=ids, attention_mask=mask, **settings)
    assert isinstance(found, torch.Tensor)
    return found.tolist()


def stock_tokens(folder: Path, device: str) -> list[list[list[int]]]:
    """Of the second row alone, and of both."""
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    stock = stock.eval().to(device)
    rows = (slice(1, 2), slice(0, 2))
    return [tokens(stock, IDS[row].to(device), MASK[row].to(device)) for row in rows]


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
def test_tokens_are_those_of_the_stock_model(folder: Path, device: str) -> None:
    """Alone and in a padded batch, also where a prompt is read in slices, some of padding alone."""
    expected = stock_tokens(folder, device)
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    slices = {"prefill_slice_tokens": 32}
    for policy, options in ((POLICIES[0], {}), (POLICIES[0], slices), (POLICIES[1], slices)):
        model = load(folder, device, policy=policy, **options)
        assert model.device.type == device
        assert model._offload.steps.has_modules == (model_type in IN_ONE_STEP)
        for row, of_rows in zip((slice(1, 2), slice(0, 2)), expected, strict=True):
            assert tokens(model, IDS[row], MASK[row]) == of_rows, (policy.name, options)
        assert model.offload_stats().prefill_tokens == 180
        if model_type in LATENTS:  # of 32 + 8 elements, not 4 heads of 24, twice
            assert model.kv_store.token_bytes == len(model._offload.hosted.specs) * 48 * 4
        assert model.offload_stats().kv_host_bytes > 0
        assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("folder", ["qwen3_5_moe_text", "gemma2", "glm4_moe_lite"], indirect=True)
@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
def test_beams_and_weights_packed_when_asked(folder: Path, device: str) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    stock, ids, mask = stock.to(device), IDS.to(device), MASK.to(device)
    expected = tokens(stock, ids, mask, num_beams=3)
    assert tokens(load(folder, device), IDS, MASK, num_beams=3) == expected
    model = load(folder, device, weights="q8")
    packed = {of: x for of, x in model.named_modules() if isinstance(x, PackedMatrix)}
    assert len(packed) >= 20
    for path, module in packed.items():
        stock.get_parameter(module.stock_name(path)).data = module.of_stock()
    with torch.no_grad():
        logits = stock(input_ids=ids).logits
        found = model(input_ids=ids).logits
    assert (found - logits).abs().mean() <= 0.02 * logits.std()


@pytest.mark.parametrize(
    "folder", slow_but(["qwen3_5_moe_text", "qwen3_next"], "qwen3_5_moe_text"), indirect=True
)
@pytest.mark.parametrize(
    ("where", "count"), combinations([CUDA, "inline", "flags"], [4, 1, "auto"])
)
def test_experts_on_the_host(folder: Path, where: str, count: int | str) -> None:
    """Of layers of both kinds; prompts in slices, heads of the CPU and copies of some beside."""
    device, options = "cuda" if where == "cuda" else "cpu", dict[str, Any]()
    if count == 4:
        options = {"hot_experts": 2}
    if count == "auto" and device == "cuda":
        options = {"max_memory": {0: "768MiB"}}  # less than it leaves beside the weights
    kept = 0 if count == "auto" and device == "cpu" else 4 if count == "auto" else int(count)
    expected = stock_tokens(folder, device)
    for policy, parts in zip(POLICIES, (None, 2), strict=True):
        model = load(
            folder, device, policy=policy, host_experts=count, prefill_slice_tokens=32, **options
        )
        assert model._offload.config.host_experts == kept
        for i, layer in enumerate(model.model.layers):
            of_experts = {x.device.type for x in layer.mlp.experts.parameters()}
            assert of_experts == {"cpu" if i < kept else device}
            assert layer.mlp.shared_expert.down_proj.weight.device.type == device
        decoder = model._offload.steps.decoder
        decoder.slots.drop()  # those of the check of its logits
        decoder.captured.num_micro_batches = parts
        if where == "flags":
            decoder.captured.make_gpu_sync = make_flag_handshake
        if parts is not None:
            decoder.placed.choose = None
            decoder.place(decoder.placed.least)
        for row, of_rows in zip((slice(1, 2), slice(0, 2)), expected, strict=True):
            assert tokens(model, IDS[row], MASK[row]) == of_rows, (policy.name, parts)
        links = decoder.slots.steps.links.values()
        requests = [x for link in links for x in link.coprocessor.requests]
        assert {x.layer_idx for x in requests if x.of_experts} == {*range(kept)}
        assert parts is None or not all(x.of_experts for x in requests)
    with torch.no_grad():  # by the stock modules
        ids, cache = IDS[1:, :4].to(model.device), model.new_cache()
        model(ids[:, :3], past_key_values=cache)
        found = model(ids[:, 3:], past_key_values=cache, output_hidden_states=True).logits
        torch.testing.assert_close(found, model(ids).logits[:, 3:], **CLOSE)


@pytest.mark.parametrize(
    ("folder", "count", "error"),
    [
        ("qwen3_5_text", 1, r"type 'qwen3_5_text', of which no layer has experts"),
        ("qwen3_5_moe_text", 5, r"host_experts=5, but only 4 layers have experts"),
        ("lfm2", 1, r"host_experts=1 with a model of type 'lfm2', which has no lean layers"),
    ],
    indirect=["folder"],
)
def test_experts_that_cannot_stay_on_the_host(folder: Path, count: int, error: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=error):
        load(folder, "cpu", host_experts=count)


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
def test_steps_by_kernels(tmp_path: Path, device: str) -> None:
    """Steps are those of `GenericSteps`, but where more is asked for; changes are refused."""
    tiny_model_of("qwen3_5_text", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    model = load(tmp_path, device, policy="full")
    ids = IDS[1:].to(device)
    with torch.no_grad():
        expected = model(input_ids=ids, past_key_values=model.new_cache()).logits[:, 88:]
        cache = model.new_cache()
        model(input_ids=ids[:, :88], past_key_values=cache)
        steps = [
            model(input_ids=ids[:, i : i + 1], past_key_values=cache, output_hidden_states=asks)
            for i, asks in ((88, True), (89, False))
        ]
    torch.testing.assert_close(torch.cat([x.logits for x in steps], 1), expected, **CLOSE)
    assert steps[0].hidden_states is not None
    assert steps[1].hidden_states is None
    model.config.output_hidden_states = True
    assert model(input_ids=ids[:, :1], past_key_values=cache).hidden_states is not None
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)  # which steps see
        tokens(model, IDS, MASK)
        model.model.layers[0].linear_attn.A_log.add_(1.0)
    with pytest.raises(NotImplementedError, match=r"layers\.0\.linear_attn\.A_log was written to"):
        tokens(model, IDS, MASK)
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match="down_proj was replaced"):
        tokens(model, IDS, MASK)


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
@pytest.mark.parametrize("folder", ["flint", "gemma2"], indirect=True)
def test_what_steps_of_modules_attend_with(folder: Path, device: str) -> None:
    """Logits of a row of the CPU's heads beside windows of the GPU, and of the CPU alone, where a
    step of the modules is asked for more."""
    model = load(folder, device, policy=POLICIES[1])
    decoder, ids = model._offload.steps.decoder, IDS[1:].to(device)
    decoder.placed.choose = None
    decoder.place(decoder.placed.least)
    with torch.no_grad():
        expected = model(input_ids=ids, past_key_values=model.new_cache()).logits[:, 80:]
        cache = model.new_cache()
        model(input_ids=ids[:, :80], past_key_values=cache)
        steps = [
            model(ids[:, [i]], past_key_values=cache, output_hidden_states=i % 2 > 0).logits
            for i in range(80, 90)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), expected, **CLOSE)
    links = decoder.slots.steps.links.values()
    assert any(link.coprocessor.requests for link in links)


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys(
    tmp_path: Path, model_type: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window's, and those of a layer whose heads are all on the GPU; else module by module, where
    a prompt's queries are fewer than its keys."""
    sizes = {} if model_type == "gemma3n_text" else {"num_kv_shared_layers": 2}
    stock = tiny_model_of(model_type, **sizes)
    stock.save_pretrained(tmp_path)
    expected = stock_tokens(tmp_path, device)
    whole = HeadPlacement(np.full((1, stock.config.num_key_value_heads), Place.GPU))
    for policy, placement, is_step, slices in (
        (POLICIES[0], whole, True, {"prefill_slice_tokens": 32}),
        (POLICIES[1], None, model_type == "gemma3n_text", {}),  # of which windows alone are shared
    ):
        if device == "cpu":
            monkeypatch.setattr(generic_steps, "placement_for", lambda *_, _x=placement, **__: _x)
        model = load(tmp_path, device, policy=policy, **slices)
        if device == "cpu" or (policy is POLICIES[0] and model_type != "gemma3n_text"):
            assert (model._offload.steps is not None) == is_step  # its modules copy from the host
        for row, of_rows in zip((slice(1, 2), slice(0, 2)), expected, strict=True):
            assert tokens(model, IDS[row], MASK[row]) == of_rows, policy.name


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
def test_sequences_take_turns_in_steps_of_modules(tmp_path: Path, device: str) -> None:
    """One's windows and states are where the next one's come, in other rows, or in more; and where
    steps are captured."""
    tiny_model_of("nemotron_h", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "a")
    tiny_model_of("afmoe", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "b")
    for name in "ab":
        model = load(tmp_path / name, device, policy="full")
        modules, ids = model._offload.steps._modules, torch.cat([IDS, IDS.flip(0)]).to(device)
        rows = [ids[:1], ids[1:2], ids[:2], ids[:3]]
        with torch.no_grad():
            expected = [model(x, past_key_values=model.new_cache()).logits for x in rows]
            caches = [model.new_cache() for _ in rows]
            for x, cache in zip(rows, caches, strict=True):
                model(x[:, :80], past_key_values=cache)
            for i in (*range(80, 84), slice(84, 87), *range(87, 90)):
                for x, cache, wanted in zip(rows, caches, expected, strict=True):
                    part = x[:, i] if isinstance(i, slice) else x[:, i : i + 1]
                    last = (i.stop if isinstance(i, slice) else i + 1) - 1
                    found = model(part, past_key_values=cache).logits[:, -1]
                    torch.testing.assert_close(found, wanted[:, last], rtol=1e-3, atol=1e-3)
                    if len(x) in modules._by_rows:
                        zeros = torch.zeros(len(x), dtype=torch.int64, device=device)
                        modules._run(zeros, zeros, lambda _, qkv: qkv[:, : 4 * 16])
            caches[2].reset()
        assert model._offload.steps.has_modules


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
def test_windows_begin_without_those_before(tmp_path: Path, device: str) -> None:
    """NaN of a row that failed, which steps of other rows move on, is not in a new short one."""
    tiny_model_of("afmoe", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    model, ids = load(tmp_path, device, policy="full"), torch.cat([IDS, IDS.flip(1)]).to(device)

    def step(rows: int, columns: int) -> torch.Tensor:
        cache = model.new_cache()
        model(input_ids=ids[:rows, :columns], past_key_values=cache)
        each = [model(input_ids=ids[:rows, [i]], past_key_values=cache) for i in range(columns, 12)]
        return each[-1].logits

    with torch.no_grad():
        expected, ids[3, 11] = step(4, 4), 251
        model.model.embed_tokens.weight[251] = torch.inf
        with pytest.raises(RuntimeError, match="non-finite"):
            step(4, 11)
        ids[3, 11] = IDS[1, 78]
        step(3, 4)
        assert torch.equal(step(4, 4), expected)


def test_a_policy_of_a_cpu_alone_takes_no_steps(tmp_path: Path) -> None:
    tiny_model_of("lfm2", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    sizes = {"budget_tokens": 24, "sink_tokens": 2, "recent_tokens": 4, "dense_until": 48}
    model = load(tmp_path, "cpu", policy=make_policy("exact_topk", **sizes))
    assert model._offload.steps is None
    assert len(tokens(model, IDS, MASK)[0]) == 100
    model = load(tmp_path, "cpu")
    model._offload.close()
    model._offload.close_store()
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize("model_type", ["lfm2", "glm4_moe_lite"])
def test_modules_that_are_no_step(
    tmp_path: Path,
    model_type: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What cannot be captured, or gives other logits, runs module by module, and says so; with keys
    and values on the device, and with those on the host."""
    tiny_model_of(model_type, vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    expected, stock = tokens(load(tmp_path, "cpu", policy="full"), IDS, MASK), ModuleSteps._run
    wrong = lambda self, *args: stock(self, *args) * 2.0 + 1.0  # noqa: E731
    waits = Mock(side_effect=RuntimeError("it waits"))
    for run, message in ((waits, "RuntimeError: it waits"), (wrong, "its logits differ")):
        monkeypatch.setattr(ModuleSteps, "_run", run)
        with caplog.at_level("INFO"):
            model = load(tmp_path, "cpu", policy="full")
        assert re.search(f"module by module, as one step fails: .*{message}", caplog.text)
        assert model._offload.steps is None
        for has_room in (True, False):
            monkeypatch.setattr(ModulesDevice, "has_room", lambda *_, has=has_room: has)
            assert tokens(model, IDS, MASK) == expected


def test_a_step_of_more_rows_that_cannot_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It, and all that follow, run module by module."""
    tiny_model_of("afmoe", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    ids, mask = torch.cat([IDS, IDS.flip(0)]), torch.cat([MASK, MASK.flip(0)])
    prepare = CapturedSteps._prepare

    def fails_of_many(self: CapturedSteps, bound: Any, *others: Any) -> None:
        if len(bound.seqs) > 2:
            raise RuntimeError("it waits")
        prepare(self, bound, *others)

    expected = tokens(load(tmp_path, "cpu"), ids, mask)
    monkeypatch.setattr(CapturedSteps, "_prepare", fails_of_many)
    model = load(tmp_path, "cpu")
    assert tokens(model, ids[:2], mask[:2]) == expected[:2]
    assert not caplog.messages
    assert tokens(model, ids, mask) == expected
    assert "one of 4 sequences cannot be captured: RuntimeError: it waits" in caplog.text
    assert tokens(model, ids[:2], mask[:2]) == expected[:2]


def test_rounding_is_what_the_model_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as much as two of transformers' attention functions differ ours may, but not by any."""
    tiny_model_of("glm4_moe_lite", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    logits = generic_loading._logits

    def rounded(stock: Any, *args: Any) -> torch.Tensor:
        found, by_eager = logits(stock, *args), stock.config._attn_implementation == "eager"
        return found + 0.2 * found.std() * by_eager

    monkeypatch.setattr(generic_loading, "_logits", rounded)
    monkeypatch.setattr(generic_loading, "_MOST_ROUNDED_DIFFERENCE", 1e-6)
    assert load(tmp_path, "cpu", dtype="bfloat16")._offload.steps.has_modules
    monkeypatch.setattr(generic_loading, "_MOST_OF_ANY", 1e-6)
    with pytest.raises(ValueError, match=r"differ from the stock path's by 0\.0"):
        load(tmp_path, "cpu", dtype="bfloat16")


def test_a_prompt_gets_the_room_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model_of("qwen3_5_text", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    model = load(tmp_path, "cpu", policy="full")
    slots, expected = model._offload.steps.decoder.slots, tokens(model, IDS, MASK)
    assert slots.steps is not None
    left = lambda _: 2**40 if slots.steps is None else 0  # noqa: E731
    monkeypatch.setattr(ModulesDevice, "left_bytes", left)
    cache = model.new_cache()
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=MASK, past_key_values=cache).logits
    assert logits[:, -1].argmax(-1).tolist() == [row[90] for row in expected]


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "afmoe", "minicpm3"])
def test_int8_rows(tmp_path: Path, model_type: str, device: str) -> None:
    tiny_model_of(model_type, vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)

    def logits(**options: Any) -> torch.Tensor:
        model = load(tmp_path, device, **options)
        assert model.kv_store.format.is_int8 == bool(options)
        assert model._offload.steps is not None
        cache, ids = model.new_cache(), IDS[1:].to(device)
        with torch.no_grad():
            model(input_ids=ids[:, :80], past_key_values=cache)
            each = [model(input_ids=ids[:, [i]], past_key_values=cache) for i in range(80, 90)]
        return torch.cat([x.logits for x in each], 1)

    expected = logits()
    assert 0.0 < (logits(kv_dtype="int8") - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_int8_rows_need_steps_of_one_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Mock(side_effect=NotImplementedError)
    monkeypatch.setattr(generic_loading, "check_one_step", fails)
    with pytest.raises(NotImplementedError, match=r"which needs decode steps that are one graph"):
        load(folder, "cpu", kv_dtype="int8")


@pytest.mark.parametrize("device", [CUDA, pytest.param("cpu", id="inline")])
def test_what_a_policy_keeps_is_built_on_the_device(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model_of("qwen3_5_text", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    sizes = {"budget_tokens": 24, "sink_tokens": 2, "recent_tokens": 4}
    made, build = list[Any](), DecodeAttention.prefill_build
    monkeypatch.setattr(
        DecodeAttention, "prefill_build", lambda *args: made.append(build(*args)) or made[-1]
    )
    found = tokens(load(tmp_path, device, policy=make_policy("sketch", **sizes)), IDS, MASK)
    assert sum(x is not None for x in made) == 1
    monkeypatch.setattr(DecodeAttention, "prefill_build", lambda *_: None)
    assert found == tokens(load(tmp_path, device, policy=make_policy("sketch", **sizes)), IDS, MASK)


def test_a_step_that_is_interrupted_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Between two layers, where a sum waits to be added."""
    tiny_model_of("qwen3_5_text", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    model = load(tmp_path, "cpu", policy="full")
    decoder, found = model._offload.steps.decoder, []

    def interrupt(kind: str, layer_idx: int) -> None:
        raise KeyboardInterrupt

    for on_mark in (None, interrupt, None):
        cache, decoder.on_mark = model.new_cache(), on_mark
        model(input_ids=IDS[:, :60], past_key_values=cache)
        with pytest.raises(KeyboardInterrupt) if on_mark else nullcontext():
            found.append(model(input_ids=IDS[:, 60:61], past_key_values=cache).logits)
    assert torch.equal(*found)


@pytest.mark.cuda
@NO_GPU
def test_an_engine_and_the_command_line_on_a_gpu(folder: Path) -> None:
    alone = stock_tokens(folder, "cuda")[0][0][90:]
    model = load(folder, "cuda")
    engine, found = Engine(model), list[int]()
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    first = engine.add_request(IDS[1].tolist(), params)
    engine.add_request(IDS[0].tolist(), params)
    while engine.has_work:
        for output in engine.step():
            if output.request_id == first:
                found += [chosen.token for chosen in output.tokens]
    assert found == alone
    options = ["--prompt", "hello", "--no-chat", "--ignore-eos", "--json", "-n", "4"]
    result = CliRunner().invoke(app, ["generate", str(folder), *options, "--device", "cuda"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["runs"][0]["new_tokens"] == 4
    half = load(folder, "cuda", dtype="bfloat16")
    assert len(tokens(half, IDS, MASK)[0]) == 100
    with pytest.raises(DeviceMemoryError, match=r"raise max_memory=\{0: \.\.\.\}"):
        load(folder, "cuda", max_memory={0: "64MiB"})


def test_a_prompt_without_room_on_the_device_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices get shorter before; what is refused names sizes and options."""
    model = load(folder, "cpu")
    modules = model._offload.hosted.others.modules
    room = modules.bytes.of_slice(2, 300, 4000) + 2**28 + 2 * model._offload.hosted.others.at(4000)
    monkeypatch.setattr(ModulesDevice, "left_bytes", lambda self: room)
    assert modules.slice_tokens(2, 4000, 2 * model._offload.hosted.others.at(4000)) == 256
    monkeypatch.setattr(ModulesDevice, "left_bytes", lambda self: 1000)
    with pytest.raises(DeviceMemoryError, match=r"90 new columns of 2 sequences .*1000 B are left"):
        tokens(model, IDS, MASK)
    assert model.kv_store.num_sequences == 0
