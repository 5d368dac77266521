"""`offload eval` of models without lean layers, against the stock model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_model_of
from cases.tiny_models import VOCAB_SIZE, byte_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from offload.cli import app
from offload.runtime.config import runtime_config
from offload.runtime.generic_shared import GenericSharedModel

runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})
TYPES = ["qwen3_5_text", "gemma2", "granitemoe_swa"]
_SPARSE = "exact_topk.dense_layers=0"
_POSITIONS, _CONTEXT, _STEPS = 2048, 300, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for model_type in TYPES:
        made[model_type] = tmp_path_factory.mktemp(model_type)
        positions = 131072 if model_type == "granitemoe_swa" else _POSITIONS
        options = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": positions}
        tiny_model_of(model_type, **options).save_pretrained(made[model_type])
        byte_tokenizer().save_pretrained(made[model_type])
    return made


def run(kind: str, folder: Path, *arguments: str) -> Any:
    command = ["eval", kind, str(folder), "--dtype", "float32", "--threads", "1", *arguments]
    return runner.invoke(app, command)


@pytest.mark.parametrize("model_type", TYPES)
def test_perplexity_is_that_of_the_stock_model(
    folders: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    folder, text = folders[model_type], tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(2)
    letters = torch.randint(97, 123, (800,), generator=generator).tolist()
    text.write_text("".join(map(chr, letters)))
    arguments = ["--text", str(text), "--context", str(_CONTEXT), "--steps", str(_STEPS)]
    arguments += [
        "--windows",
        "2",
        "--policy",
        "auto,exact_topk",
        "--budget-tokens",
        "96,4096",
        "--option",
        _SPARSE,
    ]
    result = run("perplexity", folder, *arguments, "--json")
    assert result.exit_code == 0, result.output
    rows = {row["policy"]: row for row in json.loads(result.stdout)["rows"]}
    sparse, whole = (f"exact_topk {budget} dense_layers=0" for budget in (96, 4096))
    # With room for long contexts.
    auto = "sketch" if model_type == "granitemoe_swa" else "full"
    assert {*rows} == {"full", f"auto 96 ({auto})", f"auto 4096 ({auto})", sparse, whole}
    stock = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer, losses = byte_tokenizer(), []
    tokens = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    begun = [x for x in tokenizer("")["input_ids"][:1] if x == tokenizer.bos_token_id]
    for start in (0, _STEPS):
        ids = torch.cat([torch.tensor(begun, dtype=torch.int64), tokens[start:]])
        ids = ids[: _CONTEXT + _STEPS + 1]
        with torch.no_grad():
            logits = stock(ids[None]).logits[0].double().log_softmax(-1)
        of_targets = logits[_CONTEXT:-1].gather(1, ids[_CONTEXT + 1 :, None])
        losses.append(-float(of_targets.mean()))
    for label in ("full", f"auto 96 ({auto})", whole):
        assert rows[label]["nll"] == pytest.approx(sum(losses) / 2, rel=1e-4), label
        assert rows[label]["kl"] < 1e-6
    assert rows[sparse]["kl"] > 1e-4
    assert rows["full"]["attended_tokens"] == pytest.approx(_CONTEXT + (_STEPS + 1) / 2)


def test_ruler_asks_each_policy(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, resume = folders["gemma2"], tmp_path / "answers.jsonl"
    arguments = ["--context", "1100", "--tasks", "niah_single_1", "--samples", "1"]
    arguments += ["--policy", "exact_topk", "--budget-tokens", "4096,96", "--resume", str(resume)]
    arguments += ["--option", _SPARSE]
    result = run("ruler", folder, *arguments, "--json")
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(result.stdout)["cells"]
    assert cell["samples"] == 1
    records = [json.loads(line) for line in resume.read_text().splitlines()[1:]]
    for record in records:
        answers = {label: one["answer"] for label, one in record["answers"].items()}
        assert answers["full"] == answers["exact_topk 4096 dense_layers=0"]
        attended = [one["attended_tokens"] for one in record["answers"].values()]
        assert attended[0] == attended[1] > 700
        assert attended[2] == 96


def test_one_prompt_at_a_time_is_in_memory(folders: dict[str, Path]) -> None:
    from offload.policies.registry import make_policy

    policies = [make_policy("full"), make_policy("exact_topk", budget_tokens=96)]
    config = runtime_config(num_threads=1, page_tokens=16)
    model = GenericSharedModel(folders["qwen3_5_text"], policies, config)
    with model.read(range(5, 105)) as prompt:
        for index in (0, 1, 0):
            with model.continued(index, prompt) as cache:
                assert cache.kv_lens == [100]
                used = [runtime.store.host_bytes_used > 0 for runtime in model.runtimes]
                assert used == [index == 0, index == 1]
    assert not any(runtime.store.num_sequences for runtime in model.runtimes)


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("ruler", ["--batch-size", "2"], "--batch-size with a model of type 'gemma2', which has"),
        ("ruler", ["--host-share", "0.5"], "--host-share with a model of type"),
        ("ruler", ["--policy", "lychee_decode"], "policy 'lychee_decode' with type 'gemma2'"),
        ("ruler", ["--context", "4096"], "4,096 tokens are more than the 2,048 positions"),
        ("perplexity", ["--kv-dtype", "int8"], "--kv-dtype with a model of type"),
        ("perplexity", ["--selections-every", "2"], "--selections-every 2 needs lean layers"),
    ],
)
def test_what_does_not_apply_is_refused(
    folders: dict[str, Path], kind: str, arguments: list[str], said: str
) -> None:
    lengths = [] if "--context" in arguments else ["--context", "1100"]
    result = run(kind, folders["gemma2"], *lengths, *arguments)
    assert result.exit_code == 1, result.output
    assert said in " ".join(result.stderr.split())
