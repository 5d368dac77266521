"""`offload bench budget` on a tiny model: outputs and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.bench.budget.evictions import EVICTIONS
from offload.bench.budget.measure import BudgetMeasurement
from offload.cli import app

runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})


SMALL = ["--option", "recent_tokens=8", "--option", "dense_layers=1"]


@pytest.fixture
def plain(tiny_folders: dict[str, Path]) -> list[str]:
    """Few steps of a short text."""
    arguments = ["--context", "150", "--steps", "9", "--sample-every", "3", "--generate", "4"]
    arguments += ["--budget-tokens", "24,100", "--dtype", "float32", "--threads", "1"]
    return ["bench", "budget", str(tiny_folders["llama"]), *arguments]


@pytest.fixture
def command(plain: list[str]) -> list[str]:
    """The defaults' recent window is too long for that text."""
    return [*plain, *SMALL, "--option", "hard_kv.inner=exact_topk"]


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_json(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--top-p", "0.8,0.9", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["machine"]["isa"]
    settings = document["settings"]
    assert (settings["length"], settings["top_p"], settings["dtype"]) == (150, 0.8, "float32")
    assert len(settings["text"]["sha256"]) == 64
    rows = document["rows"]
    assert [(row["policy"], row["top_p"], row["budget_tokens"]) for row in rows] == [
        ("full", None, None),
        ("hard_kv", 0.8, 75),
        ("hard_kv", 0.9, 75),
        ("exact_topk", None, 24),
        ("exact_topk", None, 100),
    ]
    assert {"byte_seconds", "utilisation", *BudgetMeasurement.__dataclass_fields__} == set(rows[0])
    for row in rows[1:]:
        assert [(head["layer"], head["head"]) for head in row["heads"]] == [
            (layer, head) for layer in (1, 2) for head in (0, 1)
        ]
        assert len(row["drift"]["output_error"]) == 4
    low, high, small, large = rows[1:]
    assert low["attended_tokens"] < high["attended_tokens"] <= 75
    assert large["output_error"] < high["output_error"] < low["output_error"]
    assert list(high["tokens_share"]) == [small["label"]]


def test_table_and_picture(command: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    picture = tmp_path / "budget.png"
    result = runner.invoke(app, [*command, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    text = flat(result.stdout)
    assert "150 tokens, 9 decode steps" in text
    assert "What heads needed" in text
    assert "Output error of 4 generated tokens, by quarter" in text
    assert "0.95 to 75: tokens of the heads of each layer" in text
    assert "wrote" in result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_markdown_without_generation(command: list[str]) -> None:
    options = ["--generate", "0", "--runtime-option", "page_tokens=64", "-o", "md"]
    options += ["--top-p", "0.99991,0.99992"]
    result = runner.invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    *parts, legend = result.stdout.strip().split("\n\n")
    titles, tables = parts[::2], parts[1::2]
    assert legend.startswith("Steps that are compared")
    assert titles[1:2] == ["What heads needed"]
    label = "hard_kv of exact_topk recent_tokens=8 dense_layers=1"
    assert titles[2:] == [
        f"{label}, {share} to 75: tokens of the heads of each layer"
        for share in ("0.99991", "0.99992")
    ]
    assert [table.split(" | ")[0] for table in tables] == ["| policy"] * 2 + ["| layer"] * 2
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    rows = tables[0].splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == [
        *("\N{EN DASH}", "0.99991 to 75", "0.99992 to 75", "24", "100")
    ]
    memory = tables[0].splitlines()[0].split(" | ").index("memory MB")
    # 159 tokens in three pages of 64, of three layers, two KV heads of 32 and four bytes.
    assert {row.split(" | ")[memory] for row in rows} == {
        f"{3 * 3 * 64 * 2 * 2 * 32 * 4 / 1e6:.1f}"
    }


@pytest.mark.parametrize("names", ["full", "exact_topk", "full,hard_kv", "per_head,quest,lfps"])
def test_other_policies(plain: list[str], names: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    options = ["--policy", names, "--plot", str(tmp_path / "a.svg"), "--json"]
    result = runner.invoke(app, [*plain, *options, *(SMALL if names != "full" else [])])
    assert result.exit_code == 0, result.output
    wanted = {"full", *names.split(",")}
    assert {row["policy"] for row in json.loads(result.stdout)["rows"]} == wanted
    assert (tmp_path / "a.svg").read_text("utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--policy", "hard"], 2, "unknown 'hard'; available:"),
        (["--output", "csv"], 2, "unknown 'csv'; available: table, json, md"),
        (["--top-p", "1.2"], 2, "shares above 0 and at most 1, separated by commas, got '1.2'"),
        (["--top-p", "much"], 2, "got 'much'"),
        (["--budget-tokens", "0"], 2, "integers of at least 1"),
        (["--option", "hard_kv.top_p=0.9"], 2, "use --top-p for it"),
        (["--option", "exact_topk.budget_tokens=9"], 2, "use --budget-tokens or --max-tokens"),
        (["--option", "hard_kv.max_tokens=9"], 2, "use --budget-tokens or --max-tokens"),
        (["--option", "lfps.alpha=0.2"], 2, "'lfps' is not among the policies"),
        (["--budget-tokens", "11"], 2, "budget_tokens=11 cannot hold sink_tokens=4"),
        (["--max-tokens", "9"], 2, "budget_tokens=9 cannot hold sink_tokens=4"),
        (["--max-tokens", "150"], 1, "hard_kv: 150 tokens hold the whole text of 150"),
        (["--budget-tokens", "150"], 1, "raise --context or lower --budget-tokens"),
        (["--generate", "3"], 1, "generate must be 0 or at least 4, one token a quarter, got 3"),
        (["--generate", "400"], 1, "550 tokens are more than the 512 positions"),
        (["--option", "exact_topk.dense_layers=3"], 1, "dense_layers=3 are all 3 layers"),
        (["--runtime-option", "pages=3"], 2, "unknown option 'pages'; available: policy, dtype"),
        (["--runtime-option", "device=cuda"], 2, "device: always cpu"),
        (["--runtime-option", "page_tokens=0"], 1, "page_tokens must be an integer of at least 1"),
        (["--dtype", "int8"], 1, "unknown dtype 'int8'"),
        (["--text", "/no/such/file"], 1, "No such file or directory: '/no/such/file'"),
        (["--plot", "picture.gif"], 1, "must end in one of .png, .svg, .pdf"),
    ],
)
def test_bad_options(command: list[str], arguments: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, [*command, *arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in flat(result.stderr)


def test_a_share_needs_weights(plain: list[str]) -> None:
    result = runner.invoke(app, [*plain, "--option", "hard_kv.inner=streaming_llm"])
    assert result.exit_code == 2
    assert "hard_kv cuts selections by attention weights, which streaming_llm has none of" in (
        flat(result.stderr)
    )


def test_options_of_a_share_need_one(plain: list[str]) -> None:
    for option, given in (("--max-tokens", "64"), ("--top-p", "0.8,0.9")):
        result = runner.invoke(app, [*plain, "--policy", "exact_topk", option, given])
        assert result.exit_code == 2
        assert (
            f"{given.removeprefix('0.8,')} is for hard_kv, which is not among --policy exact_topk"
            in flat(result.stderr)
        )


def test_a_short_text(command: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Too short.", encoding="utf-8")
    result = runner.invoke(app, [*command, "--text", str(text)])
    assert result.exit_code == 1
    assert (
        "the text has 10 tokens, but --context 150, --steps 9 and 40 tokens of timing need 191"
        in (flat(result.stderr))
    )


def test_help_teaches() -> None:
    result = runner.invoke(app, ["bench", "budget", "--help"])
    assert result.exit_code == 0
    for text in (
        "--top-p",
        "--max-tokens",
        "utilisation",
        "offload bench budget --top-p",
        "drifts",
        *EVICTIONS,
    ):
        assert text in result.stdout


def test_temperatures_over_time(plain: list[str]) -> None:
    command = [*plain, *SMALL, "--option", "hard_kv.inner=quest", "--option", "page_tokens=4"]
    command += ["--policy", "hard_kv", "--generate", "128", "-o"]
    result = runner.invoke(app, [*command, "md"])
    assert result.exit_code == 0, result.output
    assert "Temperatures solved for again, of those of the prompt" in result.stdout
    assert "| 128 |" in result.stdout
    document = json.loads(runner.invoke(app, [*command, "json"]).stdout)
    full, share = (row["drift"]["temperatures"] for row in document["rows"])
    assert document["settings"]["temperature_every"] == 64
    assert full == []
    assert [later["tokens"] for later in share] == [64, 128]
    assert [len(later["of_layers"]) for later in share] == [3, 3]
    result = runner.invoke(app, [*command, "md", "--temperature-every", "63"])
    assert result.exit_code == 1
    assert "temperature_every must be at least 64" in flat(result.stderr)


def test_evictions(plain: list[str]) -> None:
    command = [*plain, *SMALL, "--policy", "exact_topk", "--generate", "60", "-o"]
    few = ["--evictions", "fitted,rkv", "--host-share", "0.8", "--runtime-option", "page_tokens=16"]
    result = runner.invoke(app, [*command, "md", *few])
    assert result.exit_code == 0, result.output
    assert "The text's next 60 tokens within 80% of the bytes" in result.stdout
    assert "| rkv |" in result.stdout
    document = json.loads(runner.invoke(app, [*command, "json", *few]).stdout)
    fitted, rkv = document["evictions"]
    assert (fitted["eviction"], rkv["eviction"]) == ("fitted", "rkv")
    assert (fitted["share"], fitted["seen"], rkv["condensed"]) == (0.8, 209, 0)
    assert len(rkv["error_of_quarters"]) == 4


def test_evictions_that_cannot_be_compared(plain: list[str]) -> None:
    """All of it before a model is loaded, so as usage errors."""
    command = [*plain, *SMALL, "--policy", "exact_topk", "--generate", "60", "--evictions"]
    too_little = "Invalid value for --host-share: 0.8 of the 322560 bytes of 210 tokens"
    for arguments, message in (
        (["rkv", "--host-share", "0.8", "--runtime-option", "page_tokens=256"], too_little),
        (["rkv", "--host-share", "0.8"], "a page of 256 tokens need"),
        (["", "--host-share", "7"], "must be above 0 and below 1, got 7"),
        (["h2o"], "unknown 'h2o'; available: reread, fitted"),
        (["rkv", "--host-share", "1.5"], "must be above 0 and below 1, got 1.5"),
        (["rkv", "--runtime-option", "condensed_share=0"], "condensed_share is not for"),
        (["rkv", "--generate", "12"], "--sample-every 3 need at least 13 tokens"),
    ):
        result = runner.invoke(app, [*command, *arguments])
        assert result.exit_code == 2
        assert message in flat(result.stderr)
