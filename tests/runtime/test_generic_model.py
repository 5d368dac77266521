"""Model types without lean layers, on transformers' own modules, against the stock model."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_model_of
from cases.slowly import combinations, slow_but
from cases.tiny_models import VOCAB_SIZE, byte_tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.cli import app
from offload.decode.stock_attention import AttentionSpec
from offload.models.packed_linear import PackedMatrix
from offload.planning.workload import Workload
from offload.policies.auto import Auto
from offload.policies.exact_topk import ExactTopK
from offload.policies.registry import make_policy
from offload.prefill import attention as prefill_attention
from offload.runtime import generic_loading
from offload.runtime.budgets import weight_bytes_of
from offload.runtime.cache import OffloadedCache
from offload.runtime.config import runtime_config
from offload.runtime.generic_cache import GenericCache, tensors_in
from offload.runtime.generic_loading import generic_runtime
from offload.runtime.generic_sizes import POLICIES, resolve_generic, shape_of, store_and_attention
from offload.system.errors import HostBudgetError, SessionMiss

TYPES = [
    "olmoe",
    "qwen3_5_text",
    "gemma2",
    "granitemoe_swa",
    "stablelm",
    "deepseek_v3",
    "ministral",
]
IDS = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :11] = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for model_type in TYPES:
        made[model_type] = tmp_path_factory.mktemp(model_type)
        tiny_model_of(model_type, vocab_size=VOCAB_SIZE).save_pretrained(made[model_type])
    return made


def load(folder: Path, **options: Any) -> Any:
    return OffloadedModel.from_pretrained(folder, **{"num_threads": 1, "page_tokens": 16} | options)


def stock_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()


def tokens(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(input_ids=ids, attention_mask=mask, **settings)


@pytest.mark.parametrize("model_type", ["granitemoe_swa", "deepseek_v3", "ministral", "gemma2"])
def test_prompts_are_attended_to_by_our_kernel(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """With padding, windows and latents, whole and in parts; caps are left to torch."""
    ids = torch.randint(3, 250, (2, 90), generator=torch.Generator().manual_seed(2))
    mask, calls = torch.ones_like(ids), list[int]()
    mask[0, :61] = 0
    kernel = prefill_attention.causal_attention

    def counting(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(options.get("window", 0))
        return kernel(*arguments, **options)

    model, stock = load(folders[model_type]), stock_of(folders[model_type])
    monkeypatch.setattr(prefill_attention, "causal_attention", counting)
    with torch.no_grad():
        expected = stock(input_ids=ids, attention_mask=mask).logits[:, -1]
        for stops in ((90,), (50, 90), (89, 90)):
            cache, start = model.new_cache(), 0
            for stop in stops:
                part = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
                logits = model(**part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
                start = stop
            assert (logits - expected).norm() < 1e-4 * expected.norm()
    assert bool(calls) == (model_type != "gemma2")
    assert any(calls) == (model_type in ("granitemoe_swa", "ministral"))


def test_windows_are_told_by_their_masks() -> None:
    cache: Any = GenericCache.__new__(GenericCache)
    column, query = torch.arange(40), torch.arange(40)[:, None]
    causal = column <= query
    chunks, early = column // 8 == query // 8, column < 5
    cases = [(causal, 0), (causal & (column > query - 8), 8), (causal & chunks, None)]
    cases += [(causal & (column > query - 8) | early, None)]
    for pad in (0, 3):
        for seen, window in cases:
            for n in (40, 17, 9, 2):
                cache._pads, cache._num_columns, cache._known_window = [pad], 40, (None, 0)
                mask = (seen & (column >= pad))[None, None, 40 - n :]
                assert cache._window_of(mask, n, 40) == window, (pad, window, n)


@pytest.mark.parametrize(("model_type", "backend"), combinations(TYPES, [None, "inline"]))
def test_tokens_are_those_of_the_stock_model(
    folders: dict[str, Path], model_type: str, backend: str | None
) -> None:
    """Inline, too: modules as on a GPU, apart from the attention of decode steps."""
    stock, model = stock_of(folders[model_type]), load(folders[model_type], backend=backend)
    assert type(model).__name__ == type(stock).__name__
    assert isinstance(model, type(stock))
    for options in ({}, {"do_sample": True}, {"prefill_chunk_size": 8}):
        for rows in (slice(0, 2),) if options else (slice(1, 2), slice(0, 2)):
            found = []
            for each in (stock, model):
                torch.manual_seed(3)
                found.append(tokens(each, IDS[rows], MASK[rows], **options))
            assert found[0].tolist() == found[1].tolist(), options
    stats = model.offload_stats()
    assert stats.prefill_tokens == 80
    assert stats.decode_tokens == 2 * 9
    assert (stats.kv_host_bytes if backend is None else stats.kv_device_bytes) > 0
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize(("model_type", "backend"), combinations(TYPES, ["inline", None]))
def test_turns_go_on_from_the_cache(
    folders: dict[str, Path], model_type: str, backend: str | None
) -> None:
    stock, model = stock_of(folders[model_type]), load(folders[model_type], backend=backend)
    found = []
    for each, cache in ((stock, DynamicCache(config=stock.config)), (model, model.new_cache())):
        told, mask = IDS, MASK
        for _ in range(3):
            told = tokens(each, told, mask, past_key_values=cache)
            told = torch.cat([told, IDS[:, :9]], dim=1)
            mask = torch.nn.functional.pad(MASK, (0, told.shape[1] - 40), value=1)
        found.append(told.tolist())
    assert found[0] == found[1]
    assert cache.kv_lens == [len(found[1][0]) - 10 - pad for pad in (11, 0)]


@pytest.mark.parametrize(
    "model_type", slow_but(["glm4_moe_lite", "longcat_flash", "minicpm3"], "glm4_moe_lite")
)
def test_latents_are_cached_in_the_place_of_heads(tmp_path: Path, model_type: str) -> None:
    """The store, and a plan, have one row of 40 elements a token, padded to 48, for the key and the
    value together, not 4 heads of 32 for each;
    a policy that chooses all tokens, and one that sees queries of prompts, attend to it."""
    stock = tiny_model_of(model_type, vocab_size=VOCAB_SIZE)
    stock.save_pretrained(tmp_path)
    expected = [tokens(stock, IDS[rows], MASK[rows]).tolist() for rows in (slice(1, 2), slice(2))]
    for options in ({}, {"policy": make_policy("exact_topk", budget_tokens=4096, dense_layers=0)}):
        model = load(tmp_path, **options)
        specs = model._offload.hosted.specs
        assert options or "latents of all heads" in model.policy_reason
        assert {(x.num_kv_heads, x.k_dim, x.v_dim, x.head_dim) for x in specs.values()} == {
            (1, 40, 32, 48)
        }
        for more in ({}, {"prefill_chunk_size": 8}):
            for rows, of_rows in zip((slice(1, 2), slice(2)), expected, strict=True):
                assert tokens(model, IDS[rows], MASK[rows], **more).tolist() == of_rows
    if model_type == "longcat_flash":
        return  # its sizes cannot be told without its weights
    result = CliRunner().invoke(
        app, ["plan", str(tmp_path), "--device", "cpu", "--context", "64", "--json"]
    )
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["kv_bytes_per_token"] == model.kv_store.token_bytes == len(specs) * 48 * 4
    assert plan["host_bytes"]["weights"] == sum(x.nbytes for x in model.parameters()) + sum(
        x.num_qo_heads * 16 * 32 * 4 for x in specs.values()
    )


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize(
    "model_type", ["olmoe", "qwen3_5_text", "gemma2", "deepseek_v3", "falcon", "zamba2"]
)
def test_dense_weights_are_packed_if_asked(tmp_path: Path, model_type: str, weights: str) -> None:
    """Logits are the stock model's with the rounded matrices, those that layers share, too; a plan
    counts their bytes, and routers and small matrices stay as they are."""
    stock = tiny_model_of(model_type, vocab_size=VOCAB_SIZE)
    stock.save_pretrained(tmp_path)
    model = load(tmp_path, weights=weights)
    packed = {of: x for of, x in model.named_modules() if isinstance(x, PackedMatrix)}
    of_layers = [x for of, x in packed.items() if ".0." in of]
    assert of_layers
    assert {x.packed.format for x in of_layers} == {weights}
    assert not any("gate" in of.split(".") or "router" in of for of in packed)
    for path, module in packed.items():
        stock.get_parameter(module.stock_name(path)).data = module.of_stock()
    with torch.no_grad():
        expected, found = stock(input_ids=IDS).logits, model(input_ids=IDS).logits
    assert (found - expected).abs().mean() <= 0.02 * expected.std()  # inputs are rounded, too
    plan = ["plan", str(tmp_path), "--device", "cpu", "--context", "64", "--weights", weights]
    result = CliRunner().invoke(app, [*plan, "--json"])
    assert result.exit_code == 0, result.output
    absorbed = sum(x.num_qo_heads * 16 * 32 * 4 for x in model._offload.hosted.specs.values())
    of_plan = json.loads(result.stdout)["host_bytes"]["weights"]
    assert of_plan == weight_bytes_of(model, "cpu") + (model_type == "deepseek_v3") * absorbed


def test_matrices_that_cannot_be_packed_are_named(tmp_path: Path) -> None:
    tiny_model_of("gpt2").save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="weights='q4' with a model of type 'gpt2', who"):
        load(tmp_path, weights="q4")
    assert load(tmp_path, weights="bfloat16").dtype == torch.bfloat16


def test_a_turn_of_one_token_is_a_prompt(folders: dict[str, Path]) -> None:
    model = load(folders["olmoe"])
    cache = model.new_cache()
    told = tokens(model, IDS, MASK, past_key_values=cache)  # the last token is not cached
    mask = torch.nn.functional.pad(MASK, (0, 10), value=1)
    tokens(model, told, mask, past_key_values=cache, max_new_tokens=3)
    stats = model.offload_stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (2, 4)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=[pytest.mark.slow] * (policy in ("lfps", "lychee_cluster")))
        for policy in POLICIES[1:]
    ],
)
def test_policies(folders: dict[str, Path], policy: str) -> None:
    """A budget of all tokens is exact; a small one is attended to, and changes tokens."""
    for model_type in ("qwen3_5_text", "deepseek_v3"):
        folder = folders[model_type]
        expected = tokens(stock_of(folder), IDS, MASK).tolist()
        least = {"sink_tokens": 2, "dense_layers": 0}
        if policy != "streaming_llm":
            least["recent_tokens"] = 4
        whole = load(folder, policy=make_policy(policy, budget_tokens=4096, **least))
        assert tokens(whole, IDS, MASK).tolist() == expected
        few = load(folder, policy=make_policy(policy, budget_tokens=16, **least))
        assert tokens(few, IDS, MASK).tolist() != expected


@pytest.mark.parametrize(
    ("model_type", "backend", "said"),
    [
        (
            "granitemoe_swa",
            None,
            "exact up to 8,192 tokens, then sketch, budget 1,024, .*SmolLM2-135M",
        ),
        (
            "granitemoe_swa",
            "inline",
            "exact where all KV of a generation fits the GPU; else, on the CPU",
        ),
        ("stablelm", None, "exact: contexts up to 8,192 tokens are faster so"),
        ("ministral", None, "exact: no layer attends to all tokens"),
    ],
)
def test_what_auto_comes_to(
    folders: dict[str, Path],
    model_type: str,
    backend: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, and module by module on a GPU."""
    monkeypatch.setattr(generic_loading, "_module_steps", lambda *_: None)
    model = load(folders[model_type], backend=backend)
    assert re.match(said, model.policy_reason)
    is_sketch = "sketch" in model.policy_reason
    dense_until = 8192 if backend is None else None  # which decoding with a GPU does not take
    expected = make_policy("sketch", dense_until=dense_until, estimate_clusters=128)
    assert model.policy == (expected if is_sketch else make_policy("full"))
    assert (model._offload.resident is not None) == (backend == "inline")


def test_auto_is_full_where_heads_differ() -> None:
    """And what estimates the rest of a selection is refused by name."""
    specs = {0: AttentionSpec(4, 2, 32, 32, 1.0), 1: AttentionSpec(4, 1, 64, 64, 1.0)}
    work = Workload(shape_of(specs.values()), Auto(), 65536)
    policy, reason = resolve_generic(Auto(), specs, work, None, on_gpu=False)
    assert policy == make_policy("full")
    assert reason == "exact: sketch estimates the rest of a selection, and heads of layers differ"
    named = runtime_config(policy=make_policy("sketch", estimate_clusters=64))
    pool: Any = None
    with pytest.raises(NotImplementedError, match=r"'sketch' estimates .*give estimate_clusters=0"):
        store_and_attention(specs, named, pool, dtype=torch.float32, host_budget_bytes=2**20)


@pytest.mark.parametrize("model_type", ["granitemoe_swa", "gemma2"])  # with sinks, with a soft cap
def test_sinks_and_soft_caps_are_in_the_estimate(folders: dict[str, Path], model_type: str) -> None:
    """What is not selected is estimated: nearer to exact attention than without it."""
    ids = torch.randint(3, 250, (1, 404), generator=torch.Generator().manual_seed(2))
    sketch = partial(make_policy, "sketch", budget_tokens=80, dense_layers=0)
    logits = []
    for policy in (make_policy("full"), sketch(estimate_clusters=128), sketch()):
        model = load(folders[model_type], policy=policy)
        cache = model.new_cache()
        model(input_ids=ids[:, :400], past_key_values=cache)
        steps = [model(input_ids=ids[:, n : n + 1], past_key_values=cache) for n in range(400, 404)]
        logits.append(torch.cat([step.logits[0] for step in steps]))
    exact, found, dropped = logits
    assert 0.0 < (found - exact).norm() < 0.5 * (dropped - exact).norm()


def test_exact_top_k_is_that_of_a_reference(folders: dict[str, Path]) -> None:
    """The next token's logits, with all but the 12 heaviest tokens of each KV head masked."""
    folder = folders["olmoe"]
    model = load(
        folder, policy=ExactTopK(budget_tokens=12, sink_tokens=0, recent_tokens=1, dense_layers=0)
    )
    seen: list[int] = []
    model._offload.attention.on_attended = lambda layer_idx, *_: seen.extend(
        len(selection) for selection in model._offload.attention.last_selection()
    )
    tokens(model, IDS[1:], MASK[1:], max_new_tokens=3)
    assert set(seen) == {12}


def test_the_command_line_generates(folders: dict[str, Path]) -> None:
    folder = folders["qwen3_5_text"]
    byte_tokenizer().save_pretrained(folder)
    options = ["--prompt", "hello", "--no-chat", "--ignore-eos", "--json", "-n", "4"]
    for more in (["--policy", "quest", "--compare"], []):
        result = CliRunner().invoke(app, ["generate", str(folder), *options, *more])
        assert result.exit_code == 0, result.output
        runs = json.loads(result.stdout)["runs"]
        assert [run["new_tokens"] for run in runs] == [4] * len(runs)
        assert runs[-1]["resolved_policy"] == "full"


@pytest.mark.parametrize(("model_type", "beside"), [("gpt2", ["sketch"]), ("ministral", [])])
def test_the_command_line_compares(tmp_path: Path, model_type: str, beside: list[str]) -> None:
    """Also where a config has names of its own for sizes, or no layer attends to all tokens."""
    tiny_model_of(model_type, vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    options = ["--prompt", "hello " * 100, "--no-chat", "--ignore-eos", "--json", "-n", "4"]
    options += ["--budget-tokens", "256"]
    result = CliRunner().invoke(app, ["generate", str(tmp_path), *options, "--compare"])
    assert result.exit_code == 0, result.output
    assert [run["policy"] for run in json.loads(result.stdout)["runs"]] == ["auto", *beside]


def test_a_context_beyond_the_positions_is_refused(folders: dict[str, Path]) -> None:
    """And not one beyond a sliding window, which is transformers' own."""
    folder = folders["gemma2"]
    model = load(folder)
    most = model.config.max_position_embeddings
    message = f"a context of {most + 1} tokens exceeds the {most} tokens of this model"
    with pytest.raises(ValueError, match=message):
        tokens(model, IDS, MASK, max_new_tokens=most - 38)
    byte_tokenizer().save_pretrained(folder)
    options = ["--prompt", "hello", "--no-chat", "-n", "2", "--json"]
    for context, code in ((most // 2, 0), (most + 1, 1)):
        command = ["generate", str(folder), *options, "--context", str(context)]
        assert CliRunner().invoke(app, command).exit_code == code


def test_bfloat16(folders: dict[str, Path]) -> None:
    model = load(folders["gemma2"], dtype="bfloat16")
    assert tokens(model, IDS, MASK).shape == (2, 50)
    assert model.kv_store.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", TYPES)
def test_int8_rows(folders: dict[str, Path], tmp_path: Path, model_type: str) -> None:
    """Near the logits of float32 rows, in a prompt of two parts and in steps. Latents are as wide
    as a group with a scale, as in models that there are: else they share one with the rotated part.
    """
    found, used, folder = [], [], folders[model_type]
    if model_type == "deepseek_v3":
        sizes = {"kv_lora_rank": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
        tiny_model_of(model_type, vocab_size=VOCAB_SIZE, **sizes).save_pretrained(tmp_path)
        folder = tmp_path
    for kv_dtype in ("auto", "int8"):
        model = load(folder, kv_dtype=kv_dtype)
        cache, logits = model.new_cache(), []
        for first, last in ((0, 25), (25, 36), *((n, n + 1) for n in range(36, 40))):
            mask, ids = MASK[:, :last], IDS[:, first:last]
            output = model(input_ids=ids, attention_mask=mask, past_key_values=cache)
            logits.append(output.logits[:, -1].log_softmax(-1))
        found.append(torch.stack(logits))
        used.append(model.kv_store.host_bytes_used)
        assert tokens(model, IDS, MASK).shape == (2, 50)
    exact, int8 = found
    assert used[1] <= used[0] * 34 / 64  # of a head_dim of 16, less of others
    divergence = float((exact.exp() * (exact - int8)).sum(-1).mean())
    assert divergence < 2e-3
    assert (divergence > 0) == bool(model._offload.hosted.specs)  # or no layer is in the store


@pytest.mark.parametrize("model_type", ["llama4", "qwen3_5"])
def test_the_text_part_of_a_multi_modal_model(
    tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tiny_model_of(model_type)
    whole.save_pretrained(tmp_path)
    caplog.set_level("INFO")
    model = load(tmp_path)
    assert "only the text part is loaded, a " in caplog.text
    assert tokens(model, IDS, MASK).tolist() == tokens(whole, IDS, MASK).tolist()
    assert model.num_parameters() < whole.num_parameters()


def test_a_model_is_built_once_and_weighed_before_it_is_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, read = list[str](), list[str]()
    init, load_weights = PreTrainedModel.__init__, PreTrainedModel._load_pretrained_model

    def note_init(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append(type(self).__name__)
        init(self, *args, **kwargs)

    def note_read(*args: Any) -> Any:
        read.append("weights")
        return load_weights(*args)

    monkeypatch.setattr(PreTrainedModel, "__init__", note_init)
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(note_read))
    with pytest.raises(HostBudgetError, match="the weights need"):
        load(folders["stablelm"], max_memory={"cpu": 1000})
    assert not read
    built.clear()
    load(folders["stablelm"])
    assert (built, read) == (["StableLmForCausalLM", "StableLmModel"], ["weights"])


def test_a_model_that_only_sees_windows_selects_nothing(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="policy 'quest' has nothing to select: no layer attends"):
        load(folders["ministral"], policy="quest")


def test_a_budget_is_refused_before_anything_is_computed(folders: dict[str, Path]) -> None:
    model = load(folders["stablelm"], max_memory={"cpu": "3MiB"})
    with pytest.raises(HostBudgetError, match="2 sequences of up to 10039 tokens need"):
        tokens(model, IDS, MASK, max_new_tokens=10000)
    assert tokens(model, IDS, MASK).shape == (2, 50)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "ministral"])
def test_windows_and_recurrent_states_are_in_the_budget(
    folders: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    """Those of beams twice, as rows are chosen, and those of a file that is loaded."""
    model = load(folders[model_type])
    cache, ledger = model.new_cache(), model.kv_store.ledger
    model(input_ids=IDS, past_key_values=cache)
    tensors = [x for layer in cache.layers for x in tensors_in(vars(layer))]
    held = sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
    assert held <= cache.state_bytes <= 1.1 * held
    assert ledger.by_tenant()["windows and recurrent states"] == cache.state_bytes
    cache.save(tmp_path / "cache")
    cache.reset()
    of_two = 2 * model._offload.hosted.others.at(40)
    model.kv_store.trim()
    limit, ledger.limit_bytes = ledger.limit_bytes, of_two - 1
    for read in (lambda: tokens(model, IDS, MASK), lambda: model(input_ids=IDS)):
        with pytest.raises(HostBudgetError, match=r"2 sequences .*need .* more of host KV cache"):
            read()
    assert model.kv_store.num_sequences == 0
    ledger.limit_bytes = of_two * 3 // 2 + 2 * 48 * model.kv_store.token_bytes
    with pytest.raises(SessionMiss, match="no room: windows and recurrent states of 2 sequences"):
        OffloadedCache.load(model, tmp_path / "cache")
    assert model.kv_store.num_sequences == 0
    ledger.limit_bytes = of_two * 3 // 2 + 2 * 64 * model.kv_store.token_bytes
    assert tokens(model, IDS, MASK).shape == (2, 50)
    with pytest.raises(HostBudgetError, match="2 sequences of up to 49 tokens need"):
        tokens(model, IDS[1:], MASK[1:], num_beams=2)
    ledger.limit_bytes = limit
    assert tokens(model, IDS, MASK, max_new_tokens=1).shape == (2, 41)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefill_slice_tokens": 64}, "prefill_slice_tokens=64"),
        ({"quality_probe": 0.1}, "quality_probe=0.1"),
        ({"host_bytes_per_sequence": "1MiB"}, "host_bytes_per_sequence=1048576"),
        ({"policy": "tidal_decode"}, "policy 'tidal_decode'"),
        ({"kv_dtype": "int8", "cache_correction_every": 8}, "cache_correction_every=8"),
    ],
)
def test_what_needs_lean_layers_is_named(
    folders: dict[str, Path], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"{said} with .*which has no lean layers"):
        load(folders["stablelm"], **options)


def test_calls_that_are_not_supported_are_named(folders: dict[str, Path]) -> None:
    model = load(folders["stablelm"])
    with pytest.raises(NotImplementedError, match="calibrations need one"):
        _ = model._offload.lean
    with pytest.raises(ValueError, match="must be a cache of this model, got DynamicCache"):
        model(input_ids=IDS, past_key_values=DynamicCache(config=model.config))
    cache = model.new_cache()
    model(input_ids=IDS, attention_mask=MASK, past_key_values=cache)
    with pytest.raises(ValueError, match="as 0 or less, got 1"):
        cache.crop(1)
    with pytest.raises(IndexError, match="row 2 of a cache of 2 rows"):
        cache.reorder_cache(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="hides 0 columns of row 0"):
        model(input_ids=IDS[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="padding on the left"):
        model(input_ids=IDS, attention_mask=MASK.flip(1))


@pytest.mark.parametrize("model_type", ["stablelm", "qwen3_5_text", "gemma2", "deepseek_v3"])
def test_beams_and_copies_of_a_cache(
    folders: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    """Tokens are the stock model's with beams, padded; a cache goes on as it would have where it
    was copied, saved, or cut, which windows and recurrent states cannot be."""
    model, stock = load(folders[model_type]), stock_of(folders[model_type])
    beams = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    assert torch.equal(tokens(model, IDS, MASK, **beams), tokens(stock, IDS, MASK, **beams))
    assert model.kv_store.num_sequences == 0
    cache = model.new_cache()
    ids = torch.cat([tokens(model, IDS, MASK, past_key_values=cache), IDS[:, :5]], 1)
    mask = torch.nn.functional.pad(MASK, (0, 15), value=1)
    cache.save(tmp_path / "cache")
    expected = tokens(stock, ids, mask)
    for other in (copy.deepcopy(cache), OffloadedCache.load(model, tmp_path / "cache"), cache):
        assert torch.equal(tokens(model, ids, mask, past_key_values=other), expected)
    if model_type in ("qwen3_5_text", "gemma2"):
        with pytest.raises(NotImplementedError, match="with windows or recurrent states"):
            cache.crop(-1)
        return
    cache.crop(-8)
    ids, mask = expected[:, : cache.get_seq_length() + 1], torch.ones_like(expected)
    mask[0, :11] = 0
    again = tokens(model, ids, mask[:, : ids.shape[1]], past_key_values=cache, max_new_tokens=7)
    assert torch.equal(again, expected[:, : again.shape[1]])
    for _ in range(2):  # an empty one, too
        cache.crop(-1000)
        assert (cache.get_seq_length(), cache.seqs) == (0, ())
    with pytest.raises(SessionMiss, match="saved with other weights"):
        OffloadedCache.load(load(folders["olmoe"]), tmp_path / "cache")


def test_a_failed_pass_leaves_nothing(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_5_text"])
    cache = model.new_cache()
    model(input_ids=IDS, past_key_values=cache)
    with pytest.raises(IndexError):
        model(input_ids=IDS + 10**6, past_key_values=cache)
    with pytest.raises(RuntimeError, match="a forward pass with this cache has failed"):
        model(input_ids=IDS[:, :1], past_key_values=cache)
    cache.reset()
    assert model.kv_store.num_sequences == 0
    model(input_ids=IDS, past_key_values=cache)
    assert cache.kv_lens == [40, 40]


def test_the_gate_refuses_other_logits() -> None:
    """Types whose attention is not what passes through the attention function."""
    refused = {"doge": "hides more than padding", "deepseek_v32": "attention asks for indices"}
    for model_type, reason in refused.items():
        with pytest.raises(ValueError, match=f"unsupported model type '{model_type}': .*{reason}"):
            generic_runtime(tiny_model_of(model_type), runtime_config(num_threads=1), None)
