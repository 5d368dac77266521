"""Quality and speed of one configuration: one list of policies is timed and judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model

from offload.bench.decode.engines import STOCK_ON_CPU
from offload.selection.state import PolicyStates
from perf import bench_tradeoff
from perf.plots import is_current
from perf.tables.tradeoff_tables import in_short_table, options_table, tradeoff_table
from perf.tradeoff import quality, speed
from perf.tradeoff_plot import plot_tradeoff

LABELS = ["full", "exact_topk 96", "lfps 96 alpha=0.4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for RULER's prompts in bytes."""
    folder = tmp_path_factory.mktemp("roomy")
    make_tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(folder: Path, tmp_path: Path) -> list[str]:
    given = f"--out {tmp_path}/t.json --model {folder} --dtype float32 --commit none"
    given += " --policies full,exact_topk,lfps --budgets 96 --option lfps.alpha=0.4"
    given += " --lengths 1100,1200 --tasks niah_single_1 --samples 2 --quality-threads 1"
    given += " --device cpu --threads 1 --steps 6 --repeats 1 --peer-steps 1"
    return given.split()


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_tradeoff", *arguments])
    bench_tradeoff.main()


@pytest.mark.slow
def test_what_is_timed_is_what_is_judged(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    build = PolicyStates._build
    monkeypatch.setattr(
        PolicyStates, "_build", lambda x, seq, *rest: (built.append(seq), build(x, seq, *rest))
    )
    arguments += ["--repeats", "3"]
    run(monkeypatch, [*arguments, "--only", "speed"])
    assert len(built) == 2  # lfps at each length: a repeat continues what was built
    run(monkeypatch, [*arguments, "--only", "quality"])
    found = json.loads((tmp_path / "t.json").read_text("utf-8"))
    assert list(found["settings"]["policies"]) == LABELS
    assert found["settings"]["policies"][LABELS[2]]["alpha"] == 0.4
    rows = found["rows"]
    for length in (1100, 1200):
        of_length = [row for row in rows if row["length"] == length]
        timed = [row for row in of_length if row["part"] == "speed"]
        assert [row["label"] for row in timed] == [*LABELS, STOCK_ON_CPU]
        assert all(row["milliseconds"] > 0 and row["threads"] == 1 for row in timed)
        assert {row["kv_len"] for row in timed} == {length - 6 - speed.ROOM}
        assert timed[1]["heads"] == {"dense": 4, "select": 2}
        judged = [row for row in of_length if row["part"] == "quality"]
        assert [row["label"] for row in judged] == LABELS
        assert judged[0]["prompts"] == 2
        (cell,) = [row for row in of_length if row["part"] == "cells"]
        assert cell["attended_tokens"][LABELS[1]] < cell["attended_tokens"]["full"]

    # Nothing is measured twice, and nothing is mixed.
    monkeypatch.setattr(speed, "SharedModel", None)
    run(monkeypatch, arguments)
    assert json.loads((tmp_path / "t.json").read_text("utf-8"))["rows"] == rows
    with pytest.raises(ValueError, match=r"t\.json was made with policies"):
        run(monkeypatch, [*arguments, "--budgets", "97"])
    changes = {"steps": (6, 7), "repeats": (3, 2), "threads": (1, 2), "peer-steps": (1, 2)}
    for name, (then, now) in changes.items():
        message = rf"t\.json was made with --{name} = {then}, but this run has {now}; give another"
        with pytest.raises(ValueError, match=message):
            run(monkeypatch, [*arguments, f"--{name}", str(now)])
    run(monkeypatch, [*arguments, "--only", "quality", "--steps", "7"])  # which are not for it


def test_each_part_is_of_one_machine_and_commit(tmp_path: Path) -> None:
    def document(commit: str) -> bench_tradeoff.Document:
        return bench_tradeoff.Document(tmp_path / "t.json", {"model": "tiny"}, commit)

    timed = {"part": "speed", "device": "cpu", "length": 1100}
    first = document("a")
    first.begin("speed", "cpu", {"--steps": 5})
    first.replace([timed], **timed)
    with pytest.raises(ValueError, match=r"made with commit = a, but this run has b"):
        document("b").begin("speed", "cpu", {"--steps": 5})
    later, judged = document("b"), {"part": "quality", "device": "cpu", "length": 1100}
    later.begin("quality", "cpu", {})
    later.replace([judged], **judged)
    found = json.loads((tmp_path / "t.json").read_text("utf-8"))
    machines = found["settings"]["machines"]
    assert {name: machine["commit"] for name, machine in machines.items()} == {
        "speed on cpu": "a",
        "quality on cpu": "b",
    }
    assert found["rows"] == [timed, judged]


@pytest.mark.slow
def test_a_run_that_is_cut_goes_on(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality_only = [*arguments, "--only", "quality"]
    run(monkeypatch, [*quality_only, "--seconds", "0", "--processes", "2"])
    assert not (tmp_path / "t.json").exists()
    whole = "niah_single_1, 1,200 tokens: answered"
    said: list[str] = []
    monkeypatch.setattr(bench_tradeoff, "say", said.append)
    with pytest.raises(RuntimeError, match=r"1 cells were not answered, .*no_such, 1,200 tokens"):
        run(monkeypatch, [*quality_only, "--lengths", "1200", "--tasks", "no_such,niah_single_1"])
    assert any(line.endswith(whole) for line in said)
    answers = tmp_path / "t.answers" / "1200-niah_single_1.jsonl"
    with answers.open("a", encoding="utf-8") as file:
        file.write('{"task": "half a li')
    found = json.loads((tmp_path / "t.json").read_text("utf-8"))
    rows, policies = found["rows"], found["settings"]["policies"]
    (first, _) = quality.records_of(answers.parent, 1200, policies)
    assert list(first["answers"]) == LABELS
    assert policies[LABELS[1]]["recent_tokens"] == 64  # the default, though eval's is 24
    assert [row["prompts"] for row in rows if row["part"] == "quality"] == [2] * 3


def test_a_cell_that_has_only_just_begun_has_no_answers(tmp_path: Path) -> None:
    (tmp_path / "1200-vt.jsonl").touch()
    assert quality.records_of(tmp_path, 1200, {"full": {}}) == []


def result() -> dict[str, Any]:
    def timed(device: str, label: str, milliseconds: float | None, **more: Any) -> dict[str, Any]:
        times = dict.fromkeys(("milliseconds", "milliseconds_p10"), milliseconds)
        times["milliseconds_p90"] = milliseconds and milliseconds + 1
        row = {"part": "speed", "length": 4096, "device": device, "label": label}
        return row | {"engine": label, "threads": 8, "steps": 64} | times | more

    judged = {"part": "quality", "length": 4096, "device": "cpu", "reads_on": "cuda", "seed": 0}
    judged |= {"prompts": 22, "counting_tasks": 10, "fewest_samples": 2}
    line = {"score": 0.8, "difference": 0.0, "interval": [0, 0], "attended_tokens": 4000.0}
    lost = {"score": 0.7, "difference": -0.1, "interval": [-0.15, -0.05], "scored_tokens": 900.0}
    machine = json.loads(
        (Path(__file__).parents[2] / "perf/results/ruler.json").read_text("utf-8")
    )["machine"]
    return {
        "machine": machine,
        "settings": {
            "model": "tiny",
            "dtype": "bfloat16",
            "policies": {"full": {}, "quest 320": {"budget_tokens": 320, "page_tokens": 16}},
        },
        "rows": [
            timed("cuda", "full", 10.0, engine="offload", heads={"dense": 90}),
            timed("cuda", "quest 320", 4.0, engine="offload", heads={"select": 84, "on_gpu": 6}),
            timed("cuda", "transformers, KV on the GPU", 20.0),
            timed("cpu", "full", None, engine="offload"),
            judged | line | {"label": "full"},
            judged | line | lost | {"label": "quest 320"},
        ],
    }


def test_table_of_quality_and_speed() -> None:
    lines = tradeoff_table(result()).splitlines()
    header = next(line for line in lines if line.startswith("| policy"))
    assert "ms, GPU | GPU, over full | GPU, over transformers | ms, CPU" in header
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines)}
    unknown, times = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
    quest = rows["`quest 320`"]
    assert quest[:2] == ["70.0", "-10.0"]
    assert quest[2].split(" … ") == ["-15.0", "-5.0"]
    assert quest[3:5] == ["4,000", "900"]
    assert quest[5].startswith("4.00 ")
    assert quest[6:] == [f"2.50{times}", f"5.00{times}", *[unknown] * 3]
    peer = rows["transformers, KV on the GPU"]
    assert peer[:5] == [unknown] * 5
    assert peer[6:8] == [f"0.50{times}", f"1.00{times}"]
    assert "22 prompts, read by a GPU, the mean of 10 tasks" in "\n".join(lines)


def test_policies_in_short() -> None:
    latency_row = {"num_threads": 1, "kv_len": 131072}
    latency = {
        "rows": [
            latency_row | {"policy": "full", "all_layers_microseconds": 50.0},
            latency_row | {"policy": "quest", "all_layers_microseconds": 10.0},
        ]
    }
    found = result()
    text = json.dumps(found).replace("quest 320", "quest 1024")
    header, _, *lines = in_short_table(json.loads(text), latency).splitlines()
    assert header.endswith(
        "| difference to exact, 4K | ms, GPU, 4K | ms, CPU, 4K | CPU attention, 128K |"
    )
    quest = lines[1].strip("| ").split(" | ")
    assert quest[:3] == ["`quest`", "70.0", "-10.0 (-15.0 … -5.0)"]
    assert quest[-1] == "5.0\N{MULTIPLICATION SIGN}"


def test_each_part_names_its_machine() -> None:
    found = result()
    of_speed = found["machine"] | {"commit": "abc"}
    found["settings"]["machines"] = {"quality on cpu": found["machine"], "speed on cuda": of_speed}
    *_, judged, timed = tradeoff_table(found).split("\n\n")
    assert judged.startswith("*Quality on cpu:* *")
    assert timed.startswith("*Speed on cuda:* *")
    assert "commit abc" in timed


def test_table_of_options() -> None:
    text = options_table(result())
    assert "| `quest 320` | budget_tokens 320, page_tokens 16 | 84 select, 6 on gpu |" in text


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    plot_tradeoff(result(), path)
    text = path.read_text("utf-8")
    assert is_current(path, result())
    assert all(f"<!-- {name}" in text for name in ("quest -->", "full -->", "transformers 20 ms"))
    assert "4,096 tokens, with a GPU" in text
    assert "prefers-color-scheme:dark" in text


def test_a_table_says_how_many_prompts_a_gpu_read() -> None:
    found = result()
    for row in found["rows"]:
        if row["part"] == "quality":
            row["prompts_read_on"] = {"cuda": 20, "cpu": 2}
    assert "22 prompts, 20 of them read by a GPU, the mean of 10 tasks" in tradeoff_table(found)
