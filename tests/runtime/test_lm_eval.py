"""lm-eval's HFLM takes an offloaded model as it is. The requests are made here: no downloads."""

from __future__ import annotations

from typing import Any

import pytest

Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def lm_eval() -> Any:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install lm-eval)")
    import lm_eval.api.instance
    import lm_eval.models.huggingface

    return lm_eval


def answers(lm_eval: Any, model: Any, tokenizer: Any, kind: str, arguments: list[Any]) -> Any:
    harness = lm_eval.models.huggingface.HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=256
    )
    requests = [
        lm_eval.api.instance.Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)
    ]
    return getattr(harness, kind)(requests)


def test_loglikelihood(llama_pair: Pair, tokenizer: Any, lm_eval: Any) -> None:
    contexts = [("Hello the", "re"), ("", "x y z"), ("a much longer context", " yes"), ("a", "b")]
    stock, ours = (
        answers(lm_eval, model, tokenizer, "loglikelihood", contexts) for model in llama_pair
    )
    for (expected, expected_greedy), (got, got_greedy) in zip(stock, ours, strict=True):
        assert got == pytest.approx(expected, abs=1e-3)
        assert got_greedy == expected_greedy


def test_rolling_loglikelihood(llama_pair: Pair, tokenizer: Any, lm_eval: Any) -> None:
    text = [("A text that is longer than the window of the model. " * 12,)]
    stock, ours = (
        answers(lm_eval, model, tokenizer, "loglikelihood_rolling", text) for model in llama_pair
    )
    assert ours == pytest.approx(stock, rel=1e-5)


def test_generate_until(llama_pair: Pair, tokenizer: Any, lm_eval: Any) -> None:
    options = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
    prompts = [(prompt, options) for prompt in ("Hello", "hi there you", "z", "another one")]
    stock, ours = (
        answers(lm_eval, model, tokenizer, "generate_until", prompts) for model in llama_pair
    )
    assert ours == stock
