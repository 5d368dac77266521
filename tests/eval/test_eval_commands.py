"""`offload eval` on a tiny model: outputs, resuming, refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import byte_tokenizer, make_tiny_model
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from offload.bench.eval.perplexity import text_tokens, windows_of
from offload.bench.eval.record_file import RecordFile
from offload.cli import app

runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})
POLICIES = ["--policy", "exact_topk,streaming_llm", "--budget-tokens", "64"]


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def command(kind: str, folder: Path, *arguments: str) -> list[str]:
    return ["eval", kind, str(folder), "--dtype", "float32", "--threads", "1", *arguments]


@pytest.fixture(scope="module")
def ruler(roomy_folder: Path) -> list[str]:
    """Two cells of two samples."""
    lengths = ["--context", "1100,1200", "--tasks", "niah_single_1", "--samples", "2"]
    return command("ruler", roomy_folder, *POLICIES, *lengths)


@pytest.fixture(scope="module")
def whole(ruler: list[str]) -> Any:
    """What it prints."""
    result = runner.invoke(app, [*ruler, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_auto_came_to(roomy_folder: Path) -> None:
    lengths = ["--context", "1100", "--tasks", "niah_single_1", "--samples", "1"]
    arguments = ["--budget-tokens", "96,128", *lengths, "--json"]
    result = runner.invoke(app, command("ruler", roomy_folder, *arguments))
    assert result.exit_code == 0, result.output
    settings = json.loads(result.stdout)["settings"]
    assert list(settings["policies"]) == ["full", "auto 96 (full)", "auto 128 (full)"]
    assert flat(result.stderr).count("auto: exact: contexts up to 8,192 tokens are faster so") == 2


def test_ruler_json(whole: Any) -> None:
    assert whole["machine"]["isa"]
    settings = whole["settings"]
    assert list(settings["policies"]) == ["full", "exact_topk 64", "streaming_llm 64"]
    assert [line["kl"] for line in whole["summary"]] == [None] * 3
    assert settings["policies"]["exact_topk 64"]["recent_tokens"] == 16
    assert settings["policies"]["exact_topk 64"]["sink_tokens"] == 4
    assert settings["policies"]["streaming_llm 64"]["recent_tokens"] == 60
    assert settings["chat_template"] is False
    assert [(cell["task"], cell["length"]) for cell in whole["cells"]] == [
        ("niah_single_1", 1100),
        ("niah_single_1", 1200),
    ]
    for cell in whole["cells"]:
        assert cell["prompt_tokens"] <= cell["length"]
        everything = cell["attended_tokens"]["full"]  # by two of three layers, which are dense
        of_all = (2 * everything + 64) / 3
        assert cell["attended_tokens"]["exact_topk 64"] == pytest.approx(of_all, rel=0.01)
        assert not cell["counts"]  # a random model finds nothing
    assert [line["score"] for line in whole["summary"]] == [None] * 3


def test_several_prompts_in_the_same_steps(ruler: list[str], whole: Any, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    arguments = ["--samples", "3", "--batch-size", "2", "--json", "--resume", str(answers)]
    result = runner.invoke(app, [*ruler, *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [cell["samples"] for cell in found["cells"]] == [3, 3]
    alone = runner.invoke(app, [*ruler, "--samples", "3", "--resume", str(tmp_path / "alone")])
    assert alone.exit_code == 0, alone.output

    def said(file: Path) -> list[Any]:
        records = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        records.sort(key=lambda record: (record["length"], record["index"]))
        return [[of["answer"] for of in record["answers"].values()] for record in records]

    assert said(answers) == said(tmp_path / "alone")


def test_hard_set(roomy_folder: Path) -> None:
    arguments = ["--context", "1900", "--tasks", "two_steps,asked,asked_lines", "--samples", "2"]
    arguments += ["--policy", "exact_topk", "--budget-tokens", "64", "--batch-size", "2", "--json"]
    result = runner.invoke(app, command("ruler", roomy_folder, *arguments))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [cell["samples"] for cell in document["cells"]] == [2, 2, 2]
    assert document["settings"]["of_full"] is None
    result = runner.invoke(app, command("ruler", roomy_folder, "--tasks", "hard", "--context", "9"))
    assert "leave no room" in flat(result.stderr)


def test_another_device_reads_the_prompts(ruler: list[str], whole: Any) -> None:
    result = runner.invoke(app, [*ruler, "--reads-on", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["settings"] == whole["settings"] | {"reads_on": "cpu"}
    assert [x["scores"] for x in found["cells"]] == [x["scores"] for x in whole["cells"]]
    result = runner.invoke(app, [*ruler, "--reads-on", "tpu"])
    assert result.exit_code == 1
    assert "unknown device 'tpu'" in flat(result.stderr)


def test_divergence_from_full_attention(ruler: list[str], whole: Any, tmp_path: Path) -> None:
    ruler = [*ruler, "--resume", str(tmp_path / "answers.jsonl")]
    result = runner.invoke(app, [*ruler, "--kl", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    full, topk, streaming = (line.pop("kl") for line in document["summary"])
    assert full == 0 < topk < streaming
    assert [line["score"] for line in document["summary"]] == [
        line["score"] for line in whole["summary"]
    ]
    table = runner.invoke(app, [*ruler, "--kl", "-o", "md"]).stdout
    assert "| 95 % interval | KL |" in table
    assert f"{topk:.5f}" in table


def test_tables_and_markdown(ruler: list[str], tmp_path: Path) -> None:
    ruler = [*ruler, "--context", "1100", "--samples", "1", "--resume", str(tmp_path / "answers")]
    result = runner.invoke(app, ruler)
    assert result.exit_code == 0, result.output
    assert "niah_single_1 *" in result.stdout
    assert "full attention scores nothing there" in flat(result.stdout)
    result = runner.invoke(app, [*ruler, "-o", "md"])
    assert result.stdout.startswith("ruler: ")
    header = "| task | length | samples | full | exact_topk 64 |"
    assert f", scores in per cent\n\n{header}" in result.stdout
    assert "\n| policy | mean | difference | 95 % interval | attended | tokens/s |" in result.stdout


def test_an_interrupted_run_goes_on(
    ruler: list[str], whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "answers.jsonl"
    import offload.bench.eval.answers as answers

    measure, calls = answers.answer_samples, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(answers, "answer_samples", interrupted)
    resumed = [*ruler, "--json", "--resume", str(file)]
    assert runner.invoke(app, resumed).exit_code == 130
    assert len(file.read_text().splitlines()) == 1 + 2
    with file.open("a") as half:
        half.write('{"task": "niah_si')  # killed while it wrote
    result = runner.invoke(app, resumed)
    assert result.exit_code == 0, result.output
    assert len(calls) == 3 + 2
    cells = json.loads(result.stdout)["cells"]
    scores = [[cell["scores"], cell["attended_tokens"]] for cell in cells]
    assert scores == [[cell["scores"], cell["attended_tokens"]] for cell in whole["cells"]]

    # Once more: nothing is left, and the model is not even loaded.
    monkeypatch.setattr(answers, "answer_samples", None)
    assert json.loads(runner.invoke(app, resumed).stdout)["cells"] == cells
    for changed, message in (
        (["--seed", "1"], "was made with seed = 0, but this run has 1"),
        (["--budget-tokens", "80"], "full, exact_topk 64, streaming_llm 64, but this run has full"),
        (["--option", "dense_layers=1"], "but this run has full, exact_topk 64 dense_layers=1"),
        (["--decode-last", "8"], "was made with decode_last = 0, but this run has 8"),
        (["--decode-last", "5000"], "--decode-last 5000 leaves nothing to read"),
    ):
        result = runner.invoke(app, [*resumed, *changed])
        assert result.exit_code == 1
        assert message in flat(result.stderr)
    with RecordFile(file, json.loads(file.read_text().splitlines()[0])["options"]):
        result = runner.invoke(app, resumed)
        assert result.exit_code == 1
        assert "another run writes to" in flat(result.stderr)
    assert runner.invoke(app, resumed).exit_code == 0
    file.write_text("")
    runner.invoke(app, [*resumed, "--context", "100"])  # refused after the file was opened
    assert file.read_text() == ""
    for others in ("{}\n", "My diary.", "My diary.\nDay 1\n", "[1]\n", "[" * 10**6 + "\n"):
        file.write_text(others)
        assert "is no file of offload eval" in flat(runner.invoke(app, resumed).stderr)
        assert file.read_text() == others


def test_another_text_under_the_same_name(roomy_folder: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("The quick brown fox jumps over the lazy dog. It was late. " * 90, "utf-8")
    arguments = ["--context", "1100", "--tasks", "niah_single_2", "--samples", "1"]
    answers = tmp_path / "answers.jsonl"
    ruler = command("ruler", roomy_folder, "--policy", "full", "--haystack", str(book), *arguments)
    ruler += ["--resume", str(answers)]
    assert runner.invoke(app, ruler).exit_code == 0
    book.write_text("Another text under the same name. " * 90, "utf-8")
    assert "but this run has" in flat(runner.invoke(app, ruler).stderr)


def test_truncated_prompts_are_counted_and_said(roomy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "templated"
    shutil.copytree(roomy_folder, folder)
    template = "{{ 'A rather long system prompt. ' * 12 }}{% for m in messages %}{{ m.content }} "
    (folder / "chat_template.jinja").write_text(template + "{% endfor %}")
    arguments = ["--policy", "full", "--samples", "1", "--context", "2048"]
    tasks = ["--tasks", "niah_single_1", "--json"]
    result = runner.invoke(app, command("ruler", folder, *arguments, *tasks))
    assert result.exit_code == 0, result.output
    assert [cell["truncated_samples"] for cell in json.loads(result.stdout)["cells"]] == [1]
    assert "1 prompt was longer than the model's positions" in flat(result.stderr)


def test_another_model_under_the_same_path_is_refused(roomy_folder: Path, tmp_path: Path) -> None:
    folder, answers = tmp_path / "model", tmp_path / "answers.jsonl"
    shutil.copytree(roomy_folder, folder)
    arguments = ["--context", "1100", "--tasks", "niah_single_1", "--samples", "1"]
    ruler = command("ruler", folder, *POLICIES, *arguments, "--resume", str(answers))
    assert runner.invoke(app, ruler).exit_code == 0
    other = make_tiny_model("llama", max_position_embeddings=2048)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5:] += 0.5
    other.save_pretrained(folder)  # the same shapes, sizes and names
    result = runner.invoke(app, ruler)
    assert result.exit_code == 1
    assert "was made with checkpoint = " in flat(result.stderr)
    shutil.rmtree(folder)
    shutil.copytree(roomy_folder, folder)  # a copy is the same model
    assert runner.invoke(app, ruler).exit_code == 0


def test_perplexity(roomy_folder: Path, tmp_path: Path) -> None:
    arguments = ["--context", "300,400", "--steps", "12", "--windows", "2", "--budget-tokens", "40"]
    arguments += ["--policy", "exact_topk", "--resume", str(tmp_path / "windows.jsonl")]
    perplexity = command("perplexity", roomy_folder, *arguments)
    result = runner.invoke(app, [*perplexity, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["policy"], row["length"]) for row in rows] == [
        ("full", 300),
        ("exact_topk 40", 300),
        ("full", 400),
        ("exact_topk 40", 400),
    ]
    assert rows[0]["change"] == 0
    assert rows[0]["kl"] == 0 < rows[1]["kl"]
    assert rows[0]["tokens"] == 2 * 12
    assert rows[1]["perplexity"] != rows[0]["perplexity"]
    assert rows[1]["attended_tokens"] == pytest.approx((2 * rows[0]["attended_tokens"] + 40) / 3)
    assert "mass_kept" not in rows[1]
    result = runner.invoke(app, perplexity)
    assert "12 decode steps of 2 windows" in result.stdout


def test_selections_are_judged(roomy_folder: Path, tmp_path: Path) -> None:
    arguments = ["--context", "300", "--steps", "12", "--windows", "2", "--budget-tokens", "40"]
    arguments += ["--policy", "exact_topk", "--selections-every", "4", "--host-share", "0.8"]
    arguments += ["--page-tokens", "16", "--resume", str(tmp_path / "windows"), "-o"]
    result = runner.invoke(app, command("perplexity", roomy_folder, *arguments, "json"))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["settings"]["selections_every"] == 4
    rows = {row["policy"]: row for row in document["rows"]}
    full, topk = rows["full"], rows["exact_topk 40"]
    assert topk["mass_kept"] < full["mass_kept"] == pytest.approx(1)
    assert topk["overlap"] == pytest.approx(1, abs=2e-3)
    assert topk["tokens"] - topk["decoded_tokens"] == 2 * 3
    assert "mass_kept" not in rows["full host=0.8"]
    result = runner.invoke(app, command("perplexity", roomy_folder, *arguments, "md"))
    assert "| KL | error | overlap | mass | of top-k | attended | scored |" in result.stdout
    assert "relative to exact top-k with the same budget" in flat(result.stdout)


def test_corrections(roomy_folder: Path) -> None:
    """With a correction after each token, what comes later shows no trace of the selection."""
    arguments = ["--context", "300", "--steps", "24", "--windows", "1", "--budget-tokens", "40"]
    arguments += ["--policy", "exact_topk", "--option", "dense_layers=1", "--json"]
    divergences = []
    for every in ([], ["--cache-correction-every", "1"]):
        result = runner.invoke(app, command("perplexity", roomy_folder, *arguments, *every))
        assert result.exit_code == 0, result.output
        of_full, of_policy = (row["kl"] for row in json.loads(result.stdout)["rows"])
        assert of_full == 0
        divergences.append(of_policy)
    assert divergences[0] != divergences[1] > 0


def test_every_window_begins_as_the_tokenizer_has_texts_begin() -> None:
    tokenizer = byte_tokenizer()
    plain, tokens = text_tokens("Some text of several words.", tokenizer)
    assert plain == []
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)]
    )
    beginning, same = text_tokens("Some text of several words.", tokenizer)
    assert (beginning, same) == ([bos], tokens)
    windows = windows_of(tokens, 10, 4, 5, 3, beginning)
    assert [[*window.tokens] for window in windows] == [
        [bos, *tokens[start : start + 13]] for start in (0, 5, 10)
    ]
    with pytest.raises(ValueError, match="need 23"):
        windows_of(tokens[:22], 10, 4, 5, 3, beginning)


@pytest.mark.parametrize(
    ("kind", "arguments", "code", "message"),
    [
        ("ruler", ["--tasks", "niah"], 2, "unknown 'niah'; available: niah_single_1"),
        ("ruler", ["--policy", "qest"], 2, "unknown 'qest'; available: auto, exact_topk, full"),
        ("ruler", ["--option", "alpha=1"], 2, "no option 'alpha' in auto"),
        ("ruler", ["--policy", "quest", "--option", "recent_tokens=5000"], 2, "cannot hold"),
        ("ruler", ["--option", "budget_tokens=64"], 2, "use --budget-tokens"),
        ("ruler", ["--policy", "full", "--option", "a=1"], 2, "full attention takes no options"),
        ("ruler", ["--output", "xml"], 2, "unknown 'xml'; available: table, json, md"),
        ("ruler", ["--context", "4096"], 1, "4,096 tokens are more than the 2,048 positions of"),
        (
            "ruler",
            ["--batch-size", "4", "--policy", "full", "--host-share", "0.5"],
            2,
            "4 prompts at a time are not for --host-share",
        ),
        ("perplexity", ["--batch-size", "4"], 2, "4 windows at a time are not decoded"),
        ("ruler", ["--context", "200"], 1, "200 tokens leave no room for its prompt and answer"),
        ("ruler", ["--chat-template"], 1, "has no chat template; use --no-chat-template"),
        ("ruler", ["--haystack", "/no/such"], 1, "No such file or directory: '/no/such'"),
        ("perplexity", ["--context", "2000"], 1, "2,256 tokens are more than the 2,048 positions"),
        (
            "perplexity",
            ["--selections-every", "4", "--hot-rows"],
            2,
            "selections are judged where the CPU attends to all tokens",
        ),
        ("perplexity", ["--text", "/no/such"], 1, "No such file or directory: '/no/such'"),
    ],
)
def test_bad_options(
    kind: str,
    arguments: list[str],
    code: int,
    message: str,
    roomy_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import offload.runtime.shared_model as shared_model

    monkeypatch.setattr(shared_model, "load_stock_model", None)  # all before anything is loaded
    result = runner.invoke(app, command(kind, roomy_folder, "--context", "1000", *arguments))
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in flat(result.stderr)


def test_a_model_that_is_not_there() -> None:
    result = runner.invoke(app, command("ruler", Path("/no/such/model")))
    assert result.exit_code == 1
    assert "no such model folder or GGUF file: /no/such/model" in flat(result.stderr)


def test_an_empty_haystack(roomy_folder: Path, tmp_path: Path) -> None:
    arguments = ["--tasks", "niah_single_2", "--context", "1100", "--haystack", str(tmp_path)]
    ruler = command("ruler", roomy_folder, *arguments)
    result = runner.invoke(app, ruler)
    assert result.exit_code == 1
    assert "no text there (a file, or a folder of .txt, .md)" in flat(result.stderr)
    (tmp_path / "short.txt").write_text("Too short." + os.linesep, "utf-8")
    assert "the haystack's 2 words are" in flat(runner.invoke(app, ruler).stderr)


def test_bounds_beside_the_whole(ruler: list[str], tmp_path: Path) -> None:
    bounded = ["--host-share", "0.5", "--evictions", "auto,dropped", "--page-tokens", "16"]
    few = [*ruler, "--policy", "exact_topk", "--context", "1100", "--samples", "1"]
    few += ["--decode-last", "8"]
    plain = json.loads(runner.invoke(app, [*few, "--json"]).stdout)
    few += [*bounded, "--resume", str(tmp_path / "answers.jsonl")]
    result = runner.invoke(app, [*few, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    labels = ["full", "exact_topk 64"]
    within = [f"{label} host=0.5{drops}" for label in labels for drops in ("", " dropped")]
    lines = {line["policy"]: line for line in document["summary"]}
    assert [*lines] == [
        x for i, label in enumerate(labels) for x in (label, *within[2 * i : 2 * i + 2])
    ]
    (cell,), (before,) = document["cells"], plain["cells"]
    for label in labels:
        assert cell["attended_tokens"][label] == before["attended_tokens"][label]
        assert "slots" not in lines[label]
    of_full = [cell["attended_tokens"][label] for label in (labels[0], *within[:2])]
    for label in within:
        assert lines[label]["slots"] % 16 == 0
        assert 300 < lines[label]["slots"] < 0.5 * 1100
        assert lines[label]["condensed_tokens"] > 500
    assert max(of_full[1:]) < 0.55 * of_full[0]
    assert document["settings"]["bounds"][1] == {"share": 0.5, "eviction": "dropped"}
    result = runner.invoke(app, few)
    assert "host=SHARE: prompt and answer within" in flat(result.stdout)
    assert "full host=0.5 dropped" in flat(result.stdout)


def test_perplexity_within_a_bound(roomy_folder: Path, tmp_path: Path) -> None:
    arguments = ["--context", "600", "--steps", "8", "--windows", "2", "--policy", "full"]
    arguments += ["--host-share", "0.6,0.3", "--page-tokens", "16"]
    arguments += ["--resume", str(tmp_path / "windows.jsonl"), "-o"]
    result = runner.invoke(app, command("perplexity", roomy_folder, *arguments, "json"))
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["policy"] for row in rows] == ["full", "full host=0.6", "full host=0.3"]
    assert rows[2]["slots"] < rows[1]["slots"] < 0.6 * 608
    assert len({row["nll"] for row in rows}) == 3
    result = runner.invoke(app, command("perplexity", roomy_folder, *arguments, "md"))
    assert "| tokens/s | slots | condensed |" in result.stdout


def test_bounds_that_cannot_be(
    ruler: list[str], roomy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it before the model is loaded."""
    import offload.runtime.shared_model as shared_model

    monkeypatch.setattr(shared_model, "load_stock_model", None)
    for arguments, code, message in (
        (["--host-share", "1"], 2, "must be above 0 and below 1, got 1.0"),
        (["--host-share", "half"], 2, "expected shares above 0"),
        (["--host-share", "0.5", "--evictions", "h2o"], 2, "unknown 'h2o'; available: auto"),
        (["--evictions", "dropped"], 2, "needs --host-share"),
        (["--host-share", "0.5", "--device", "cuda"], 2, "bounds are scored on the CPU, but"),
        (["--host-share", "0.2", "--evictions", "fitted"], 1, "a page of 256 tokens need"),
        (
            ["--host-share", "0.5", "--policy", "quest", "--evictions", "reread"],
            1,
            "reread: condense_by='reconstruction' leaves",
        ),
    ):
        result = runner.invoke(app, [*ruler, *arguments])
        assert result.exit_code == code, result.output
        assert message in flat(result.stderr)


def test_perplexity_of_int8_rows(
    roomy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL is from keys and values of the model's dtype; one that is not small is warned of."""
    arguments = ["--context", "300", "--steps", "12", "--windows", "2", "--budget-tokens", "40"]
    arguments += ["--policy", "exact_topk", "--kv-dtype", "int8"]
    arguments += ["--resume", str(tmp_path / "windows")]
    perplexity = command("perplexity", roomy_folder, *arguments)
    result = runner.invoke(app, [*perplexity, "--json"])
    assert result.exit_code == 0, result.output
    full, chosen = json.loads(result.stdout)["rows"]
    assert 0 < full["kl"] < min(0.01, chosen["kl"])
    assert full["change"] == 0
    assert "warning" not in result.stderr
    monkeypatch.setattr("offload.bench.eval.perplexity.MOST_INT8_KL", full["kl"] / 2)
    result = runner.invoke(app, perplexity)
    assert "warning: keys and values in int8 change this model's next tokens" in result.stderr
    assert "what int8 alone changes" in result.stdout
