"""`offload serve` with a model type that has no lean layers: streams, and a session."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases.every_type import tiny_model_of
from cases.tiny_models import VOCAB_SIZE, byte_tokenizer
from serve.conftest import TEMPLATE, serving_process

QUESTION = "a question that is as long as those of people are, and not only a word. " * 2


def body_of(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True} | fields


def streamed(http: httpx.Client, prompt: str) -> list[str]:
    """The pieces of an answer."""
    pieces = list[str]()
    with http.stream("POST", "/v1/completions", json=body_of(prompt, stream=True)) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["text"] for choice in choices]
    return pieces


def usage(http: httpx.Client, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """An answer of a session, the tokens of its prompt, and how many of them were there."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "session_id": "s"}
    answer = http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    found, text = answer.json()["usage"], answer.json()["choices"][0]["message"]["content"]
    return text, found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_of_a_generic_model(tmp_path: Path) -> None:
    folder, sessions = tmp_path / "model", tmp_path / "sessions"
    tiny_model_of("qwen3_5_text", vocab_size=VOCAB_SIZE).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    options = ("--session-dir", sessions, "--max-memory", "cpu=256MiB")
    messages = [{"role": "user", "content": QUESTION}]
    with (
        serving_process(folder, *options) as (_, url),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        prompts = [QUESTION[: 10 * i] for i in range(1, 5)]
        alone = [
            http.post("/v1/completions", json=body_of(prompt)).json()["choices"][0]["text"]
            for prompt in prompts
        ]
        with ThreadPoolExecutor(4) as pool:
            pieces = list(pool.map(lambda prompt: streamed(http, prompt), prompts))
        assert ["".join(each) for each in pieces] == alone
        assert all(len(each) > 3 for each in pieces)
        text, first, cached = usage(http, messages)
        assert cached == 0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        _, _, cached = usage(http, messages)
        assert first - 16 <= cached <= first + 7
