"""What is recorded of a model's attention, and what policies are judged by, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_models import byte_tokenizer, random_tokens

from offload.bench.eval.perplexity import Window
from offload.bench.eval.sample import Sample
from offload.policies.registry import make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel
from perf.papers import judge as judging
from perf.papers import lychee_decode
from perf.papers.kinds_of_text import DECODED_TOKENS, Item
from perf.papers.layer_attention import QUERIES, LayerAttention, attention_to

TOKENS = 200
WINDOW = Window(TOKENS - DECODED_TOKENS, 0, random_tokens(TOKENS).tolist(), "prose")
SAMPLE = Sample("needle", 300, 0, "the number is 417 " * 12, "it is", ("417",), 12)


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path]) -> SharedModel:
    return SharedModel(tiny_folders["llama"], [make_policy("full")], runtime_config(num_threads=1))


def chat_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def stock_attention(folder: Path, tokens: list[int]) -> list[torch.Tensor]:
    """Of each layer, [num_qo_heads, kv_len, kv_len], by stock transformers."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    stock = auto.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return [layer[0] for layer in stock(torch.tensor([tokens]), output_attentions=True)[-1]]


def test_attention_of_a_window_is_stock_transformers(
    model: SharedModel, tiny_folders: dict[str, Path]
) -> None:
    found = attention_to(model, WINDOW, None, "cpu")
    expected = stock_attention(tiny_folders["llama"], list(WINDOW.tokens[:-1]))
    last = [layer[:, -QUERIES:] for layer in expected]  # of the decoded tokens
    for layer_idx, layer in enumerate(last):
        of_units = layer.view(2, 3, QUERIES, TOKENS - 1).mean(1)
        torch.testing.assert_close(found.weights[layer_idx], of_units, rtol=1e-3, atol=1e-5)
    similar = torch.cosine_similarity(last[0], last[1], dim=-1).mean(-1)
    np.testing.assert_allclose(found.adjacent[0, 0], similar, rtol=1e-4)
    assert found.right is None
    assert not found.wanted.any()
    assert found.adjacent[:, 2].min() == 1  # 199 tokens: all are among the 256 heaviest


def test_a_question_is_looked_at_where_it_is_answered(model: SharedModel) -> None:
    found = attention_to(model, SAMPLE, chat_tokenizer(), "cpu")
    prompt = len(SAMPLE.text) + len(SAMPLE.answer_prefix) - SAMPLE.text.count("he")
    _, _, num_queries, kv_len = found.weights.shape
    assert kv_len == prompt + num_queries - 1
    assert found.wanted.sum() == 4 * 12  # with the space before it
    assert found.right in (0.0, 1.0)
    assert not found.weights[..., 0, prompt:].any()
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(found.weights.shape[:-1]))


def test_policies_are_judged_by_questions_and_texts(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def items(*_: Any, **__: Any) -> Iterator[Item]:
        return iter([SAMPLE, WINDOW])

    monkeypatch.setattr(judging, "MODEL", tiny_folders["llama"])
    monkeypatch.setattr(judging, "load_cached_tokenizer", chat_tokenizer)
    monkeypatch.setattr(judging, "items_until", items)
    said: list[str] = []
    policies = {"few": make_policy("streaming_llm", budget_tokens=24, recent_tokens=20)}
    rows = judging.judge(
        policies, ("needle", "prose"), [300], runtime_config(num_threads=1), 0.0, said_by(said)
    )
    assert [line.split(" tokens")[0] for line in said[1:]] == [
        "judged by needle, 300",
        f"judged by prose, {TOKENS}",
    ]
    answers = [(row["task"], row["policy"]) for row in rows if row["part"] == "answers"]
    assert answers == [(task, name) for task in ("all", "needle") for name in ("full", "few")]
    texts = {(r["length"], r["policy"]): r["change"] for r in rows if r["part"] == "text"}
    assert texts[judging.ALL_LENGTHS, "full"] == 0
    assert texts[judging.ALL_LENGTHS, "few"] == texts[TOKENS, "few"] != 0


def said_by(lines: list[str]) -> Any:
    class Said:
        say = lines.append

    return Said()


def test_ablations_of_prompts_of_some_kinds() -> None:
    """Rows and policies by the same names; kinds that were not recorded have no rows."""
    rng = np.random.default_rng(0)
    weights = torch.from_numpy(rng.random((6, 2, 1, 1500)).astype(np.float32))
    attention = LayerAttention(
        weights / weights.sum(-1, keepdim=True), np.empty(0), torch.zeros(1500, dtype=bool), None
    )
    recorded = [lychee_decode.Recorded("json", 1500, attention)]
    calibration = lychee_decode.Calibration(rng.random((2, 6, 6)), np.zeros((6, 2)), 512, 32)
    for part, ablate in lychee_decode.ABLATIONS.items():
        rows, policies = ablate(recorded, calibration)
        assert {row["part"] for row in rows} == {part}
        assert {row["kind"] for row in rows} == {"all", "json"}
        assert {row["policy"] for row in rows} <= set(policies)
        assert all(0 < row["mass"] <= 1 for row in rows)
    assert policies["evenly spaced, 2"].head_roles.num_retrieval_heads == 2
