"""Drafts of a checkpoint's own head for multi-token prediction, against decoding without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_model_of
from cases.mtp_checkpoint import QWEN, in_four_bits, save_with_head
from cases.slowly import combinations
from cases.tiny_models import VOCAB_SIZE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from offload import OffloadedModel
from offload.loading.checkpoint import GGUF_FILE, check_checkpoint
from offload.models.packed_linear import PackedMatrix, PackedModule
from offload.policies.registry import make_policy
from offload.runtime.mtp_head import HeadFiles, MtpDrafts
from offload.system.errors import HostBudgetError

OTHERS = ["deepseek_v3", "glm4_moe", "glm4_moe_lite"]
IDS = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(1))
PROMPT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = save_with_head(tmp_path_factory.mktemp(model_type), model_type)
        return made[model_type]

    return folder


def load(folder: Path, **options: Any) -> Any:
    return OffloadedModel.from_pretrained(folder, **{"num_threads": 1, "page_tokens": 16} | options)


def generate(model: Any, prompt: dict[str, Any] = PROMPT, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**prompt, **settings)


def draft(monkeypatch: pytest.MonkeyPatch, told: torch.Tensor, wrong_every: int) -> None:
    """Let the head propose the tokens that are `told`, of which each so many-th is wrong."""
    stock = MtpDrafts.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        ids, logits = stock(self, input_ids, **given)
        for column in range(input_ids.shape[1], ids.shape[1]):
            is_wrong = column % wrong_every == 0
            ids[0, column] = (told[0, column] + is_wrong) % VOCAB_SIZE
        return ids, logits

    monkeypatch.setattr(MtpDrafts, "get_candidates", get_candidates)


@pytest.mark.parametrize(
    ("model_type", "policy"),
    combinations([*QWEN, *OTHERS], ["full", "exact_topk", "quest", "lychee_cluster"]),
)
def test_tokens_are_those_without_drafts(
    monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[str], Path], model_type: str, policy: str
) -> None:
    options = (
        {}
        if policy == "full"
        else {"budget_tokens": 24, "dense_layers": 0, "sink_tokens": 4, "recent_tokens": 8}
    )
    model = load(folder_of(model_type), policy=make_policy(policy, **options))
    expected = generate(model)
    padded = {name: torch.nn.functional.pad(x, (3, 0)) for name, x in PROMPT.items()}
    of_padded = generate(model, padded)
    end = int(expected[0, 47])
    to_end = generate(model, eos_token_id=end)
    for wrong_every in (1, 3, 1000):
        with monkeypatch.context() as patch:
            for num_drafts in (1, 3):
                options = {"use_mtp": True, "num_assistant_tokens": num_drafts}
                with patch.context() as each:
                    draft(each, expected, wrong_every)
                    assert generate(model, **options).tolist() == expected.tolist()
                    stats = model.offload_stats()
                    if num_drafts == 3:
                        found = generate(model, eos_token_id=end, **options)
                        assert found.tolist() == to_end.tolist()
                if num_drafts == 1:
                    with patch.context() as each:
                        draft(each, of_padded, wrong_every)
                        assert generate(model, padded, **options).tolist() == of_padded.tolist()
                assert stats.drafted_tokens >= stats.accepted_tokens
                assert (stats.accepted_tokens > 0) == (wrong_every > 1)
                if wrong_every == 1000:
                    assert stats.accepted_tokens == 11 - -(-11 // (num_drafts + 1))
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "glm4_moe_lite"])
@pytest.mark.parametrize("head", [True, False])
def test_beside_a_packed_model_the_head_is_as_in_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str, *, head: bool
) -> None:
    """Packed where the files have it in four bits, else dense; and the tokens are the same."""
    in_four_bits(save_with_head(tmp_path, model_type), head=head)
    model = load(tmp_path)
    assert any(isinstance(x, PackedMatrix) for x in model.modules())
    expected = generate(model)
    for wrong_every in (1, 3, 1000):
        with monkeypatch.context() as patch:
            draft(patch, expected, wrong_every)
            options = {"use_mtp": True, "num_assistant_tokens": 3}
            assert generate(model, **options).tolist() == expected.tolist()
        assert (model.offload_stats().accepted_tokens > 0) == (wrong_every > 1)
    of_head = model._offload._head
    kept = {x.packed.format for x in of_head._model.modules() if isinstance(x, PackedMatrix)}
    assert kept == ({"q4"} if head else set())
    checkpoint = check_checkpoint(tmp_path, takes_generic=True)
    files = HeadFiles(checkpoint, model.config, model.dtype, "auto")
    assert files.num_bytes == of_head._num_bytes
    dense, weights = HeadFiles(checkpoint, model.config, model.dtype, "").load()
    linears = {n: x for n, x in dense.model.named_modules() if isinstance(x, torch.nn.Linear)}
    for name, module in of_head._model.named_modules():
        if isinstance(module, PackedModule):
            torch.testing.assert_close(module.of_stock(), linears[name].weight)
    assert weights["eh_proj.weight"].equal(of_head._eh_proj.weight)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "glm4_moe_lite"])
def test_turns_go_on_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[str], Path], model_type: str
) -> None:
    """Also where the last pass has taken tokens back, and the next turn gives new ids alone."""
    model, told = load(folder_of(model_type)), [list[Any](), list[Any]()]
    caches = model.new_cache(), model.new_cache()
    ids = [IDS, IDS]
    for turn in range(3):
        for i, options in enumerate(({}, {"use_mtp": True, "num_assistant_tokens": 2})):
            prompt = {"input_ids": ids[i], "attention_mask": torch.ones_like(ids[i])}
            if turn == 2:
                prompt["input_ids"] = ids[i][:, caches[i].get_seq_length() :]
            with monkeypatch.context() as patch:
                if options and turn < 2:
                    draft(patch, told[0][turn], wrong_every=3)
                found = generate(model, prompt, past_key_values=caches[i], **options)
            told[i].append(found)
            ids[i] = torch.cat([found, IDS[:, :9]], dim=1)
        assert told[0][turn].tolist() == told[1][turn].tolist()
        assert caches[0].kv_lens == caches[1].kv_lens
    if model_type == "qwen3_5_text":
        with pytest.raises(NotImplementedError, match="cannot be cropped"):
            caches[1].crop(-1)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "glm4_moe_lite"])
@pytest.mark.parametrize("calls", [2, 4, 7])
def test_an_error_leaves_no_draft_in_a_cache(
    monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[str], Path], model_type: str, calls: int
) -> None:
    """As of a processor of logits that fails before wrong drafts are taken back."""
    model, left = load(folder_of(model_type)), [calls]
    expected, cache = generate(model), model.new_cache()

    def fails(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise InterruptedError
        return logits

    with monkeypatch.context() as patch:
        draft(patch, expected, wrong_every=2)
        options = {"use_mtp": True, "num_assistant_tokens": 3, "logits_processor": [fails]}
        with pytest.raises(InterruptedError):
            generate(model, past_key_values=cache, **options)
    columns = cache.get_seq_length()
    ids, left[0] = expected[:, : max(columns, 40) + 1], 1000
    rest = {"max_new_tokens": 52 - ids.shape[1], "past_key_values": cache}
    found = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **rest)
    assert found.tolist() == expected.tolist()


@pytest.mark.slow
def test_sampled_tokens_have_the_models_distribution(folder_of: Callable[[str], Path]) -> None:
    """Of the second token and the third, of which the head proposes one: 500 draws."""
    folder = folder_of("qwen3_5_text")
    stock, model = AutoModelForCausalLM.from_pretrained(folder).eval(), load(folder)
    options = {"do_sample": True, "top_k": 3, "max_new_tokens": 3, "temperature": 2.0}
    prompt = {name: x[:, :8] for name, x in PROMPT.items()}
    torch.manual_seed(0)
    drawn, expected = Counter[tuple[int, ...]](), dict[tuple[int, ...], float]()
    for _ in range(500):
        drawn[tuple(generate(model, prompt, use_mtp=True, **options)[0, 8:10].tolist())] += 1
    with torch.no_grad():
        first, tokens = (stock(prompt["input_ids"]).logits[0, -1] / 2.0).topk(3)
        for p, token in zip(first.softmax(0), tokens, strict=True):
            ids = torch.cat((prompt["input_ids"], token.view(1, 1)), dim=1)
            second, follow = (stock(ids).logits[0, -1] / 2.0).topk(3)
            for q, next_token in zip(second.softmax(0), follow, strict=True):
                expected[int(token), int(next_token)] = float(p * q)
    assert set(drawn) <= set(expected)
    assert sum(abs(drawn[pair] / 500 - p) for pair, p in expected.items()) / 2 < 0.08


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v3", "glm4_moe"])
def test_the_head_gives_the_stock_modules_values(
    monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[str], Path], model_type: str
) -> None:
    """transformers has heads of some types; of Qwen's, the parts are put together here."""
    folder = folder_of(model_type)
    stock, model = AutoModelForCausalLM.from_pretrained(folder).eval(), load(folder)
    generate(model, use_mtp=True)
    head = model._offload._head
    hidden = torch.randn(
        1, 12, stock.config.hidden_size, generator=torch.Generator().manual_seed(3)
    )
    ids, rows = IDS[:, :12], head.new_cache(12)
    cuts = ((0, 9), (9, 10), (10, 12))
    found = [head.hidden(hidden[:, i:j], ids[:, i:j], rows, i) for i, j in cuts]
    if model_type in QWEN:
        expected = qwen_head(stock, load_file(folder / "model.safetensors"), hidden, ids)
    else:
        ignored = [rf"model\.layers\.{stock.config.num_hidden_layers}\..*"]
        monkeypatch.setattr(stock, "_keys_to_ignore_on_load_unexpected", ignored)
        of_stock, cache = (
            MtpModel.from_pretrained(stock),
            MtpCache(config=stock.config.get_mtp_config()),
        )
        positions = torch.arange(1, 13)[None]
        with torch.no_grad():
            expected = of_stock.forward_layer(0, hidden, positions, cache, input_ids=ids)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-4)


def qwen_head(stock: Any, weights: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + stock.config.rms_norm_eps)
        return x * scale * (1 + weights[f"mtp.{name}.weight"])

    embedded = norm(stock.get_input_embeddings()(ids), "pre_fc_norm_embedding")
    parts = torch.cat([embedded, norm(hidden, "pre_fc_norm_hidden")], -1)
    x, n = parts @ weights["mtp.fc.weight"].T, ids.shape[1]
    layer = next(x for x in stock.model.layers if hasattr(x, "self_attn"))
    prefix = "mtp.layers.0."
    of_head = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    layer.load_state_dict(of_head)
    rope = stock.model.rotary_emb(x, torch.arange(n)[None])
    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        return norm(layer(x, position_embeddings=rope, attention_mask=mask), "norm")


def test_what_cannot_be_drafted_is_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("qwen3_5_text")
    model, embeds = load(folder), {"inputs_embeds": torch.zeros(1, 4, 64)}
    bare = sum(model.kv_store.ledger.by_tenant().values())
    for more, error, message in (
        ({"num_assistant_tokens": 0}, ValueError, "num_assistant_tokens=0 .*: 1 to 8"),
        ({"num_assistant_tokens": 9}, ValueError, "num_assistant_tokens=9"),
        ({"num_beams": 2}, NotImplementedError, "leave it out"),
        ({"prompt_lookup_num_tokens": 2, "use_mtp": False}, NotImplementedError, "leave it out"),
    ):
        with pytest.raises(error, match=message):
            generate(model, **{"use_mtp": True} | more)
    with pytest.raises((ValueError, NotImplementedError), match="inputs_embeds"):
        generate(model, embeds, use_mtp=True)
    assert sum(model.kv_store.ledger.by_tenant().values()) == bare  # nothing was loaded
    two = {name: x.expand(2, -1) for name, x in PROMPT.items()}
    with pytest.raises(ValueError, match="batch_size = 1"):
        generate(model, two, use_mtp=True)
    of_head = model.kv_store.ledger.by_tenant()["head for multi-token prediction"]
    assert of_head > 4 * 64 * 128
    with pytest.raises(NotImplementedError, match="verified on a CPU only"):
        generate(load(folder, backend="inline"), use_mtp=True)
    model._offload.store.ledger.limit_bytes = model._offload.store.host_bytes_used + of_head + 4096
    with pytest.raises(HostBudgetError):
        generate(model, use_mtp=True)
    tiny_model_of("qwen3_5_text", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no head for multi-token prediction, of weights mtp\.\*"):
        generate(load(tmp_path), use_mtp=True)
    (tmp_path / GGUF_FILE).touch()
    of_gguf = replace(check_checkpoint(folder, takes_generic=True), folder=tmp_path)
    with pytest.raises(NotImplementedError, match="holds a GGUF file"):
        HeadFiles(of_gguf, model.config, model.dtype, "auto")
