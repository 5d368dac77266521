"""The training of the 32K model, tried out on a tiny one: text, tasks, adapter, resumed run."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.loading.adapter import merge_adapter, read_adapter
from offload.loading.names import resolve_folder
from offload.system.stdlib_text import stdlib_paragraphs
from perf.long_context import batches
from perf.long_context.lora import AdaptedModel
from perf.long_context.tasks import TASKS, TaskMaker
from perf.long_context.text import Corpus, read_corpus, write_corpus
from perf.long_context.train import Settings, Training


@pytest.fixture(scope="module")
def tokenizer_folder() -> Path:
    return resolve_folder("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def corpus_file(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    text = "\n\n".join(stdlib_paragraphs())[:60_000]
    tokens = np.array(tokenizer.encode(text).ids, np.uint16)
    half = len(tokens) // 2
    prose = np.array([True, False])
    starts = np.array([0, half, len(tokens)], np.int64)
    corpus = Corpus(tokens, starts, prose, ("a", "b"))
    path = tmp_path_factory.mktemp("corpus") / "corpus.xz"
    write_corpus(path, {"train": corpus, "held_out": corpus})
    return path


@pytest.fixture(scope="module")
def maker(tokenizer_folder: Path, corpus_file: Path) -> TaskMaker:
    return TaskMaker(tokenizer_folder, read_corpus(corpus_file)["train"])


def test_corpus_file(corpus_file: Path, tmp_path: Path) -> None:
    corpora = read_corpus(corpus_file)
    again = tmp_path / "again.xz"
    write_corpus(again, corpora)
    for part, corpus in read_corpus(again).items():
        assert np.array_equal(corpus.tokens, corpora[part].tokens)
        assert np.array_equal(corpus.starts, corpora[part].starts)
        assert corpus.names == ("a", "b")


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("length", [2048, 5000])
def test_tasks_fit_and_can_be_answered(maker: TaskMaker, kind: str, length: int) -> None:
    for seed in range(5):
        sample = maker.task(random.Random(seed), kind, length)
        assert length // 3 < len(sample.tokens) <= length
        assert len(sample.weights) == len(sample.tokens)
        pairs = list(zip(sample.tokens, sample.weights, strict=True))
        document = maker.decode([token for token, weight in pairs if weight == 0.0])
        answers = [
            maker.decode([token for token, _ in group]).strip()
            for is_answer, group in groupby(pairs, lambda pair: pair[1] == 1.0)
            if is_answer
        ]
        assert answers
        assert all(answers)
        if kind in ("single", "multi_key", "keys_only"):  # the value is in the document, too
            assert all(answer.rstrip(".").split()[-1] in document for answer in answers)
        assert sample == maker.task(random.Random(seed), kind, length)


def test_chat_is_the_template(maker: TaskMaker, tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokens = maker.chat(random.Random(3))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    instruction = maker.decode(tokens).split("user\n")[1].removesuffix("\nassistant\n")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": instruction}], add_generation_prompt=True, tokenize=False
    )
    assert maker.encode(rendered) == tokens


def _tiny(tokenizer_folder: Path, folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(
        tokenizer_folder, num_hidden_layers=2, hidden_size=64, intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    for file in tokenizer_folder.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return model


def test_merged_adapter_is_what_was_trained(tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    stock_folder, folder, merged = (tmp_path / name for name in ("stock", "adapter", "merged"))
    stock = _tiny(tokenizer_folder, stock_folder)
    tokens = torch.randint(3, 40_000, (1, 64))
    with torch.no_grad():
        of_stock = stock.model(tokens).last_hidden_state.float()
        adapted = AdaptedModel(stock, 4, 8.0)
        for linear in adapted.linears.values():
            torch.nn.init.normal_(linear.lora_B, std=0.2)
        with adapted.as_stock():
            assert torch.allclose(adapted.hidden(tokens).float(), of_stock, atol=0.05)
        of_adapted = adapted.hidden(tokens).float()
    assert float((of_adapted - of_stock).norm() / of_stock.norm()) > 0.2
    adapted.save(folder, "tiny")
    config = adapted.long_config
    (folder / "settings.json").write_text(
        json.dumps({key: getattr(config, key) for key in ("max_position_embeddings",
                                                          "rope_parameters")})
    )  # fmt: skip
    merged.mkdir()
    merge_adapter(read_adapter(folder), stock_folder, merged)
    model: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)
    with torch.no_grad():
        of_merged = model.model(tokens).last_hidden_state.float()
    assert float((of_merged - of_adapted).norm() / of_adapted.norm()) < 0.03
    assert model.config.max_position_embeddings == 4 * stock.config.max_position_embeddings


def test_a_run_that_goes_on(
    tokenizer_folder: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of a step or more; the second begins where the first ended."""
    _tiny(tokenizer_folder, tmp_path / "stock")
    # One process makes the batches, of few and short documents.
    monkeypatch.setattr(batches, "PLAN", (("tasks", (512,)), ("text", (512,)), ("keep", (512,))))
    maker = TaskMaker(tokenizer_folder, read_corpus(corpus_file)["train"])
    monkeypatch.setattr(batches, "_maker", maker)

    def steps(first: int, *arguments: Any) -> Any:
        for number in range(first, first + 100):
            yield [batches._make(13, number, place, 32) for place in range(3)]

    monkeypatch.setattr("perf.long_context.train.steps", steps)
    settings = {"replies": 2, "reply_tokens": 4, "rank": 4, "alpha": 8.0, "scale": 32}
    paths = tmp_path / "stock", corpus_file, tmp_path / "run"
    for minutes, first in ((0.001, 0), (60.0, 1)):
        training = Training(*paths, Settings(minutes=minutes, **settings), "cpu", 1)
        assert training.step == first
        if first:
            training.settings = Settings(minutes=training.elapsed_s / 60 + 0.001, **settings)
        training.run()
        assert training.step == first + 1
    log = json.loads((tmp_path / "run" / "log.json").read_text())
    assert [row["step"] for row in log] == [1, 2]
    assert all(np.isfinite(row[kind]) for row in log for kind in ("tasks", "text", "keep"))
    assert read_adapter(tmp_path / "run").rank == 4
    with pytest.raises(ValueError, match="was made with rank=4, not 5"):
        Training(*paths, Settings(**(settings | {"rank": 5})), "cpu", 1)
    another = Training(
        *paths[:2], tmp_path / "another", Settings(minutes=0.001, **settings), "cpu", 1
    )
    another.start_from(tmp_path / "run")
    another.run()
    whole = json.loads((tmp_path / "another" / "log.json").read_text())
    assert whole[:2] == log
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert whole[2]["elapsed_s"] > log[1]["elapsed_s"]
    counted = json.loads((tmp_path / "another" / "settings.json").read_text())
    assert (counted["steps"], counted["tokens"]) == (3, sum(row["tokens"] for row in whole))
